"""A fair comparison of training methods: equal trials, paired seeds, one endpoint named beforehand.

    flatshift compare flat-comparison --data DIR --out comparisons/flat

`comparison_plan` makes runs of what the recipe's `comparison` block says, `tuning` gives every method the same trials,
`run` runs all of them, `analysis` judges and tells the protocol.
"""
