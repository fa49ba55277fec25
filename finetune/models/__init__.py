"""Backbones: locating them, reading their files, building the models, and finding their parts."""
