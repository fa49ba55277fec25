"""Entropic optimal transport between a pool and a target: potentials and calibrated gradients."""
