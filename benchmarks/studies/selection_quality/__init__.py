"""Does data selection help? Selectors against random on real text: recall, coverage, perplexity, few-label accuracy.

    python -m benchmarks.studies.selection_quality RECIPE --data DIR --out quality

`settings` has the recipe's block, `plan` makes `cells` of it, `pool` and `choosing` give selections, `training` trains
on them; `runner` runs all, `analysis` makes the document, `answers` and `page` show it.
"""
