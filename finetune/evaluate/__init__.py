"""Judging a model: perplexity, classes, ranking, generation, each with a bootstrap interval."""
