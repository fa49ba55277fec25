"""The commands whose durable calls are struck, each small, with what it must leave whatever happened on the way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._commands import flags

SMALL = {
    "train.steps": 2,
    "train.batch_size": 2,
    "train.max_length": 16,
    "train.max_cut": 1,
    "train.threads": 1,
    "train.device": "cpu",
    "train.precision": "fp32",
    "train.save_every": 1,
    "train.eval_every": 1,
    "train.peak_tflops": 1,
    "adapter.rank": 2,
    "adapter.targets": "[q_proj]",
    "adapter.dropout": 0.05,
    "data.train.limit": 12,
    "data.dev.limit": 6,
    "data.test.limit": 6,
    "eval.bootstrap": 5,
    "eval.train_limit": 6,
}
TOPICS = ("ships", "birds", "tax", "bread")
PAGE = "report.html"
ROWS = [{"id": f"p{i}", "text": f"passage {i} on {TOPICS[i % 4]} {i * i}"} for i in range(60)]
LABELLED = [
    {"text": f"{('fine', 'poor')[i % 2]} meal {i}", "label": ("good", "bad")[i % 2], "split": ("train", "test")[i > 23]}
    for i in range(32)
]
TIMES = (
    *("seconds", "time_s", "record_s", "cpu_s", "step_cpu_s", "wall_s", "rates", "plan", "tokens_per_s", "mfu"),
    *("created", "peak_bytes", "attempt", "attempts", "code", "seal"),
)
"""What differs between two undisturbed runs, or tells of the disturbance."""


@dataclass(frozen=True)
class Scenario:
    """One command on a small problem.

    command: given the folder of inputs and the output, its arguments. again: the arguments that its user is told to go
    on with. result: digests of what it leaves, by name, of what must not differ. prepare: makes its inputs, once.
    """

    name: str
    command: Callable[[Path, Path], list[str]]
    result: Callable[[Path], dict[str, str]]
    again: Callable[[Path, Path], list[str]] | None = None
    prepare: tuple[str, ...] = ()
    """Scenarios whose undisturbed output is an input: found as `inputs / name`."""
    starts_ranks: bool = False


def write_inputs(folder: Path) -> None:
    """Rows for every scenario."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("pool", ROWS), ("target", ROWS[::7]), ("rows", LABELLED)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "comparison.yaml").write_text(_COMPARISON)


def _select(inputs: Path, out: Path) -> list[str]:
    files = ["--pool", str(inputs / "pool.jsonl"), "--target", str(inputs / "target.jsonl")]
    return ["select", *files, "--budget", "7", "--out", str(out), "--embedder", "tfidf", *flags(_EMBED)]


_EMBED = {"select.embedder.dim": 8, "select.checks": "false"}


def _rows(inputs: Path) -> dict[str, str]:
    files = f"[{inputs / 'rows.jsonl'}]"
    return {f"data.{split}.files": files for split in ("train", "dev", "test")} | {"data.checks.copies": "warn"}


def _train(inputs: Path, out: Path) -> list[str]:
    return ["train", "classify", "--out", str(out), *flags(SMALL | _rows(inputs))]


def _stages(inputs: Path, out: Path) -> list[str]:
    """Selection, warm-up and fine-tuning."""
    more = {
        "select.pool.files": f"[{inputs / 'pool.jsonl'}]",
        "select.budget": 7,
        "select.embedder.dim": 8,
        "select.checks": "false",
        "warmup.steps": 1,
        "warmup.batch_size": 2,
    }
    return ["train", "warmup", "--out", str(out), *flags(SMALL | _rows(inputs) | more)]


def _mesh(inputs: Path, out: Path) -> list[str]:
    return [*_train(inputs, out), "--mesh.dp", "2"]


def _resume(begin: Callable[[Path, Path], list[str]]) -> Callable[[Path, Path], list[str]]:
    """What a stopped `train` says: resume a run directory, or begin again where there is none."""

    def again(inputs: Path, out: Path) -> list[str]:
        return ["train", "--resume", str(out)] if (out / "environment.json").is_file() else begin(inputs, out)

    return again


def _sweep(inputs: Path, out: Path) -> list[str]:
    small = {key: value for key, value in SMALL.items() if "dev" not in key and "every" not in key}
    rows = {key: value for key, value in _rows(inputs).items() if "dev" not in key}
    grid = ["--grid", "adapter.rank=1,2", "--seeds", "1", "--jobs", "1"]
    more = {"record.per_doubling": 1, "record.heldout_rows": 4}
    del small["adapter.rank"]
    return ["sweep", "double-descent", "--out", str(out), *grid, *flags(small | rows | more)]


_COMPARISON = """
backbone: flatshift-5m
task: classify
adapter: {rank: 2, targets: [q_proj]}
train: {steps: 1, batch_size: 2, max_length: 16, max_cut: 1, save_every: 0, precision: fp32, threads: 1, peak_tflops: 1}
comparison:
  seeds: 2
  exploratory_seeds: 2
  lr: [1e-3, 2e-3]
  rounds: 0
  finalists: 1
  tuning_seeds: [101]
  sharpness_seeds: 0
  equal_time_above: 1000
  resamples: 100
  tasks: {meals: {file: rows.jsonl, train: 8, validation: 6, test: 6}}
  methods: {plain: {}, msam: {confirmatory: true, set: {regularizer.kind: msam}}}
"""


def _compare(inputs: Path, out: Path) -> list[str]:
    recipe, data = str(inputs / "comparison.yaml"), str(inputs)
    return ["compare", recipe, "--data", data, "--out", str(out), "--jobs", "1"]


def _merge(inputs: Path, out: Path) -> list[str]:
    return ["merge", str(inputs / "train"), "--out", str(out)]


def _export(inputs: Path, out: Path) -> list[str]:
    return ["export", str(inputs / "train"), "--out", str(out)]


def _report(inputs: Path, out: Path) -> list[str]:
    return ["report", str(inputs / "train"), "--out", str(out / "page.html")]


# ---------------------------------------------------------------------------------------------- what must not differ


def digest(data: bytes) -> str:
    """SHA-256, shortened."""
    return hashlib.sha256(data).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """JSON without times."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if key not in TIMES}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _json(path: Path, out: Path) -> str:
    text = json.dumps(_plain(json.loads(path.read_text(encoding="utf-8"))), sort_keys=True)
    return digest(text.replace(str(out), "OUT").encode())


def _table(path: Path) -> str:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    columns = table.drop_columns([name for name in TIMES if name in table.column_names])
    rows = sorted(json.dumps(_plain(row), sort_keys=True, default=str) for row in columns.to_pylist())
    return digest("\n".join(rows).encode())


def _metrics(path: Path) -> str:
    from flatshift.finetune.run_directory import read_metrics

    return digest(json.dumps([_plain(line) for line in read_metrics(path)], sort_keys=True).encode())


def leavings(out: Path, patterns: tuple[str, ...], whole: tuple[str, ...] = ()) -> dict[str, str]:
    """Digests of the files of `patterns`, read as what they are; of `whole`, only that they are there and end well."""
    results = {}
    for pattern in patterns:
        files = sorted(out.glob(pattern))
        if not files:
            results[pattern] = "missing"
        for file in files:
            if file.is_dir():
                continue
            name = str(file.relative_to(out))
            try:
                if file.name == "metrics.jsonl":
                    results[name] = _metrics(file)
                elif file.suffix in (".json", ".parquet"):
                    results[name] = _json(file, out) if file.suffix == ".json" else _table(file)
                else:
                    results[name] = digest(file.read_bytes())
            except ValueError as error:
                results[name] = f"unreadable: {error}"
    for name in whole:
        text = (out / name).read_text(encoding="utf-8") if (out / name).is_file() else ""
        results[name] = "whole" if text.rstrip().endswith("</html>") else "missing or torn"
    return results


def differing(results: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Names of results that are not as wanted."""
    return sorted(name for name in results.keys() | wanted.keys() if results.get(name) != wanted.get(name))


def _run(out: Path) -> dict[str, str]:
    tensors = ("adapter/*.safetensors", "adapter/*.json", "stages/*/adapter/*.safetensors")
    tables = ("metrics.jsonl", "stages/*/metrics.jsonl", "eval.json", "stages/*/done.json", "recipe.resolved.yaml")
    return leavings(out, (*tensors, *tables, "manifest.json"), whole=(PAGE,))


def _chosen(out: Path) -> dict[str, str]:
    files = ("scores.parquet", "selected.jsonl", "manifest.json", "recipe.resolved.yaml", "map.parquet")
    return leavings(out, files, whole=(PAGE,))


SCENARIOS = {
    one.name: one
    for one in (
        Scenario("select", _select, _chosen),
        Scenario("train", _train, _run, again=_resume(_train)),
        Scenario(
            "train of three stages",
            _stages,
            lambda out: _run(out) | leavings(out, ("selection/scores.parquet", "selection/selected.jsonl")),
            again=_resume(_stages),
        ),
        Scenario("train, dp 2", _mesh, _run, again=_resume(_mesh), starts_ranks=True),
        Scenario(
            "sweep",
            _sweep,
            lambda out: leavings(out, ("cells.parquet", "cells/*/result.json", "recipe.resolved.yaml"), (PAGE,)),
        ),
        Scenario("compare", _compare, lambda out: leavings(out, ("cells/*/result.json",), (PAGE,))),
        Scenario("merge", _merge, lambda out: leavings(out, ("*",)), prepare=("train",)),
        Scenario("export", _export, lambda out: leavings(out, ("*",)), prepare=("train",)),
        Scenario("report", _report, lambda out: leavings(out, (), whole=("page.html",)), prepare=("train",)),
    )
}
