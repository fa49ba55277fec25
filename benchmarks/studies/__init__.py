"""Studies that answer a question of ours: run by a benchmark, and by their own command on other data."""
