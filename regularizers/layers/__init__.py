"""Adapted layers of a model: finding and reading them, replacing their forward for a step, and the signs of their
noise."""
