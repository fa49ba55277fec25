"""Selectors on the backbone's tokens beside DSIR and plain GOT-D, budgets in tokens that are read through once.

    python -m benchmarks.selection_short --data DIR        # about 8,000 CPU-seconds; resumable
    python -m benchmarks.selection_short --data DIR --selectors cynical gotd dsir    # a part of it

The study benchmarks/studies/selection_quality/selection-short.yaml; DIR is the directory of its files. Cells are kept
in .bench/selection_short and copied to benchmarks/results/selection_short/cells as they finish, from where a later run
takes them back. Perplexity of the targets' test texts, and of the same in plain form, after the study's focus beside
every other arm: mean over targets, paired by seed, with Holm's p; and target by target beside the two that it has to
beat.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._harness import RESULTS, ROOT, Benchmark
from benchmarks._kept import studied
from benchmarks.studies.selection_quality.study import DOCUMENT, study_quality

RECIPE = Path("benchmarks/studies/selection_quality/selection-short.yaml")
"""From the project's root, as the report names its command."""
KEPT = RESULTS / "selection_short"
BARS = {"dsir": -0.08, "gotd": -0.12}
"""How far below these the perplexity has to be, mean over targets."""
WORST = 0.01
"""How far above either it may be on one target."""


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--data", type=Path, required=True, help="directory of pool and targets")
    flags.add_argument("--out", type=Path, default=ROOT / ".bench" / "selection_short")
    flags.add_argument("--jobs", type=int, default=2)
    flags.add_argument("--selectors", nargs="*", default=(), help="these arms and the baseline alone")
    options = flags.parse_args()
    bench = Benchmark("selection_short", packages=("torch", "transformers", "peft", "numpy", "scikit-learn"))
    study = partial(
        study_quality, str(RECIPE), options.out, data=options.data, jobs=options.jobs, selectors=options.selectors
    )
    rows(bench, studied(options.out, KEPT, DOCUMENT, study))
    bench.finish()


def rows(bench: Benchmark, document: dict[str, Any]) -> None:
    """Rows of the results file, from the study's document."""
    focus, budget = document["focus"], str(document["primary_budget"])
    for metric, form in (("nats", ""), ("form_nats", " in plain form")):
        for arm, pair in document["against"].items():
            what = f"perplexity{form} after {focus} beside {arm}, mean of {len(document['targets'])} targets"
            _row(bench, what, pair[metric], BARS.get(arm) if metric == "nats" else 0.0 if arm == "dsir" else None)
        base = document["baseline"]
        _row(bench, f"perplexity{form} after {focus} beside {base}", document["arms"][focus][metric], None)
    worst = []
    for name, target in document["targets"].items():
        for arm in BARS:
            found = target["budgets"][budget][arm]["nats_focus"]
            _row(bench, f"{name}: perplexity after {focus} beside {arm}", found, None)
            worst.append(math.expm1(found["value"]))
    bench.row(
        f"the worst target beside either of {' and '.join(BARS)}", ours=max(worst), unit="change of perplexity",
        bar_op="<=", bar_value=WORST,
    )  # fmt: skip
    bench.row("CPU time of the study", ours=document["cpu_s"], unit="CPU-s")


def _row(bench: Benchmark, what: str, found: dict[str, Any], bar: float | None) -> None:
    """One paired difference in nats, as the change of perplexity that it is."""
    judged: dict[str, Any] = {} if bar is None else {"bar_op": "<=", "bar_value": bar}
    row = bench.row(what, ours=math.expm1(found["value"]), unit="change of perplexity", **judged)
    interval = {end: None if found[end] is None else math.expm1(found[end]) for end in ("low", "high")}
    row["interval"] = {**interval, "confidence": 0.95, "seeds": found["n"], "p_holm": found.get("p_holm")}


if __name__ == "__main__":
    main()
