"""A fair comparison of training methods: equal trials, paired seeds, one endpoint named beforehand, one page.

    flatshift compare flat-comparison --data DIR --out comparisons/flat

`settings` is what a recipe can say; `plan` makes cells of it, `tuning` gives every method the same trials, `cell` runs
one, `runner` all of them, `analysis` judges, `page` shows. The protocol is in `protocol`.
"""
