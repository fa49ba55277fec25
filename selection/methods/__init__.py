"""The selectors with their settings: `fit(pool, target)`, `scores_`, `select(k)`."""
