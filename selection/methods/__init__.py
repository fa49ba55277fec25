"""The selectors, one file each with its settings: `fit(pool, target)`, `scores_`, `select(k)`."""
