"""Fair comparison of training methods: equal trials, paired seeds, one predefined endpoint.

    flatshift compare flat-comparison --data DIR --out comparisons/flat

`comparison_plan` turns the recipe's `comparison` block into runs, `tuning` gives every method the same trials, `run`
runs all of them, `analysis` computes the results and describes the protocol.
"""
