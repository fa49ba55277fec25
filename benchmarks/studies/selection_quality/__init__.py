"""Does data selection help? Selectors against random on real text: recall, coverage, perplexity, few-label accuracy.

    python -m benchmarks.studies.selection_quality RECIPE --data DIR --out quality

`settings` is what a recipe can say; `plan` makes cells of it; `pool`, `features` and `choosing` give selections,
`stream` and `training` what a model makes of them; `runner` runs all, `analysis` judges, `page` shows. The protocol is
in `protocol`.
"""
