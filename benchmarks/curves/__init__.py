"""Curves whose answer is known: what the verdict on double descent is judged by."""
