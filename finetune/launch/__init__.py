"""Ranks of a job: start, rendezvous, watchdog, and an end with one message and one exit code."""
