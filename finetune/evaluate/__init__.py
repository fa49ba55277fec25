"""Evaluation: perplexity, classification, ranking and generation, each metric with a bootstrap interval."""
