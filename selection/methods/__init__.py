"""The selectors, one a file with its settings: `fit(pool, target)`, `scores_`, `select(k)`."""
