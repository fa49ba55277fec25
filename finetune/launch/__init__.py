"""Ranks of a job: start, messages, watchdog, and an end with one message and one exit code."""
