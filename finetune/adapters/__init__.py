"""Adapters: PEFT's settings, initialisation, files, parts folded into frozen weights, and merging."""
