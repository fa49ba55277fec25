"""Checks of a selection against its scores: realised and predicted transport distances, and target coverage."""
