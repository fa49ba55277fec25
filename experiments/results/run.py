"""Read and list run directories (design §4); tolerant of missing files, strict about broken ones."""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatshift.experiments.results.cells import FORECAST, MARKER, STUDY
from flatshift.experiments.results.predictions import Predictions, RunEvaluation, read_predictions
from flatshift.experiments.results.sweep import SweepData, read_sweep
from flatshift.experiments.results.table import read_parquet
from flatshift.finetune import atomic
from flatshift.finetune.data.files import has_named
from flatshift.finetune.digests import DONE, check_files
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.metrics import find_metric, sort_for_headline
from flatshift.finetune.run_directory import COMMAND, RECIPE, drop_rolled_back, parse_metrics_line
from flatshift.finetune.tasks import KINDS, BaseTask

_FILES = (
    "recipe.resolved.yaml", "metrics.jsonl", "eval.json", "scores.parquet", "cells.parquet", "comparison.json",
    "evaluation.json", "tokenizers.json",
)  # fmt: skip
"""Files of which a directory that can be shown has at least one (or `cells`)."""
_OF_COMMANDS = (COMMAND, RECIPE, MARKER, "report.html")
"""Files of which a directory that a command made has at least one."""
_INNER_FOLDERS = {"cells", "runs", "stages", "selection"}
"""Folders that are never opened as runs: they belong to the run, sweep or comparison above them."""
_MAX_RECORDS = 1000  # selected records listed on a page
_MAX_DEPTH = 6  # of folders that are listed


@dataclass(frozen=True)
class Metrics:
    """Lines of metrics.jsonl, one per (stage, split, step): the last written wins."""

    lines: list[dict[str, Any]]
    unreadable: int = 0

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(line["stage"] for line in self.lines))

    def series(self, stage: str, split: str, key: str) -> list[tuple[int, float]]:
        """Return (step, value) in step order, numbers only (they may be NaN or infinite)."""
        points = [
            (line["step"], line[key])
            for line in self.lines
            if (line["stage"], line["split"]) == (stage, split)
            and isinstance(line.get(key), int | float)
            and not isinstance(line.get(key), bool)
        ]
        return sorted(points, key=lambda point: point[0])


@dataclass(frozen=True)
class SelectionResults:
    """Files of a selection."""

    path: Path
    about: dict[str, Any]  # manifest.json["selection"]
    table: Any  # scores.parquet as a pyarrow Table, or None
    top: list[dict[str, Any]]  # first records of selected.jsonl
    hidden_domains: dict[str, str]  # id → domain tag that was hidden from the selector
    points: dict[str, Any] | None  # map.parquet: x, y, kind, and the explained shares
    targets: dict[str, str] = field(default_factory=dict)  # id → text of the targets nearest to selected records

    @cached_property
    def scores(self) -> tuple[Any, Any]:
        """(scores, selected): float64 and bool arrays of the records with a finite score."""
        score = self.table.column("score").to_numpy().astype(float)
        finite = np.isfinite(score)
        return score[finite], self.table.column("selected").to_numpy().astype(bool)[finite]

    @cached_property
    def taken(self) -> int:
        """Number of selected records."""
        return int(pc.sum(self.table.column("selected")).as_py() or 0)

    @cached_property
    def domains(self) -> dict[str, tuple[int, int]]:
        """Domain: (records in the pool, records selected), from the `domain` column, else from the hidden tags."""
        if self._has_domain_column:
            names = self.table.column("domain")
        elif self.hidden_domains:
            names = pa.array([self.hidden_domains.get(id_) for id_ in self.table.column("id").to_pylist()], pa.string())
        else:
            return {}
        pairs = pa.table({"name": names, "selected": self.table.column("selected").cast(pa.int64())})
        # Arrow groups in the order of first appearance, without a Python string per row.
        groups = pairs.group_by("name", use_threads=False).aggregate([("selected", "count"), ("selected", "sum")])
        columns = (groups.column(name).to_pylist() for name in ("name", "selected_count", "selected_sum"))
        return {"(none)" if name is None else str(name): (n, k) for name, n, k in zip(*columns, strict=True)}

    @property
    def _has_domain_column(self) -> bool:
        return "domain" in self.table.column_names and self.table.column("domain").null_count < self.table.num_rows

    @property
    def judged_only(self) -> bool:
        """True if the domains come from tags that were hidden from the selector."""
        return bool(self.hidden_domains) and not self._has_domain_column


@dataclass(frozen=True)
class RunResults:
    """One run directory; every file may be missing."""

    path: Path
    name: str
    manifest: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    recipe_text: str = ""

    @cached_property
    def recipe(self) -> dict[str, Any]:
        import yaml

        try:
            tree = yaml.safe_load(self.recipe_text)
        except (yaml.YAMLError, ValueError, RecursionError):
            return {}
        return tree if isinstance(tree, dict) else {}

    def loss_unit(self, stage: str) -> str:
        """Return the unit of the loss of `stage`, as far as the recipe determines it; a forecast is least squares."""
        task = self.recipe.get("task")
        if not isinstance(task, dict) or not (kind := task.get("kind")):
            return "nats"
        if stage != "warm-up" and (task.get("loss") == "squared" or (self.path / FORECAST).is_file()):
            return "squared error per example"
        # A warm-up is language modelling, whatever follows.
        return (BaseTask if stage == "warm-up" else KINDS.get(str(kind), BaseTask)).traits.loss_unit

    @cached_property
    def metrics(self) -> Metrics:
        return read_metrics(self.path / "metrics.jsonl")

    @cached_property
    def eval(self) -> dict[str, dict[str, dict[str, float]]]:
        if self.evaluation:
            return {}  # several models, each with its own splits
        return _check_eval(self.path / "eval.json", read_object(self.path / "eval.json"))

    @cached_property
    def predictions(self) -> dict[str, Predictions]:
        """Per-row predictions by split; empty if they were not kept or belong to several models."""
        return {} if self.evaluation else read_predictions(self.path)

    @cached_property
    def cold(self) -> dict[str, RunEvaluation]:
        """Metrics of the base model without the adapter by split, on its first rows; empty if not measured."""
        tree = _check_eval(self.path / "cold.json", read_object(self.path / "cold.json"))
        rows = read_predictions(self.path, "cold.parquet") if tree else {}
        return {
            split: RunEvaluation(metrics, rows.get(split), self.split_evaluation(split).digest, self.loss_settings)
            for split, metrics in tree.items()
        }

    def split_evaluation(self, split: str) -> RunEvaluation:
        """Return the data of a split for comparison with another run; its files are identified by their digests."""
        names = self.split_files(split) or self.split_files("train")
        inputs = [i for i in self.manifest.get("inputs", ()) if isinstance(i, dict)]
        own = [i.get("sha256") for i in inputs if any(has_named(name, str(i.get("path"))) for name in names)]
        digest = ",".join(map(str, own)) or str(self.path)  # unknown: the rows of no other run
        return RunEvaluation(self.eval.get(split, {}), self.predictions.get(split), digest, self.loss_settings)

    def split_files(self, split: str, *, block: str = "data") -> list[str]:
        """Return the files that the recipe names for a split, or for another part of a `block`; empty if it is held out
        of the training files."""
        parts = self.recipe.get(block)
        settings = parts.get(split) if isinstance(parts, dict) else None
        sources = settings.get("sources") if isinstance(settings, dict) else None
        named = [settings, *(sources.values() if isinstance(sources, dict) else ())]
        return [str(name) for each in named if isinstance(each, dict) for name in each.get("files") or ()]

    @property
    def loss_settings(self) -> tuple[Any, ...]:
        """Return the kind of task with its form of the loss, and the tokenizer's digest unless whole rows are
        predicted."""
        task = self.recipe.get("task")
        if not isinstance(task, dict):
            return ()
        whole_rows = KINDS.get(str(task.get("kind")), BaseTask).traits.is_sequence_level
        tokenizer = self.manifest.get("backbone", {}).get("files", {}).get("tokenizer.json")
        return task.get("kind"), task.get("loss"), bool(task.get("multi")), None if whole_rows else tokenizer

    @cached_property
    def sharpness(self) -> dict[str, Any]:
        """Contents of sharpness.json by `flatshift eval --sharpness`; empty if it was not run."""
        file = self.path / "sharpness.json"
        document = read_object(file)
        if document and (missing := {"loss", "measures", "about", "slices"} - document.keys()):
            raise UserError(
                f"{file} has no {min(missing)!r}; run `flatshift eval {shlex.quote(str(self.path))} --sharpness` again"
            )
        return document

    @cached_property
    def selection(self) -> SelectionResults | None:
        for folder in (self.path, self.path / "selection"):
            if (folder / "scores.parquet").is_file() or (folder / "selected.jsonl").is_file():
                return _read_selection(folder)
        return None

    @cached_property
    def comparison(self) -> dict[str, Any]:
        """Result of `flatshift compare`; empty for any other directory."""
        return read_object(self.path / "comparison.json")

    @cached_property
    def evaluation(self) -> dict[str, Any]:
        """Result of `flatshift eval --out` for several models; empty for any other directory."""
        return read_object(self.path / "evaluation.json")

    @cached_property
    def tokenizers(self) -> dict[str, Any]:
        """Result of `flatshift tokenizer --out`; empty for any other directory."""
        return read_object(self.path / "tokenizers.json")

    @cached_property
    def sweep(self) -> SweepData | None:
        is_comparison = self.comparison or (self.path / STUDY).is_file()  # whose cells are not a grid
        data = None if is_comparison else read_sweep(self.path)
        for table in [] if data is None else filter(None, (data, data.trace)):
            table.loss_unit = self.loss_unit("fine-tune")
        return data

    @cached_property
    def shift(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Perplexity of the target's own texts before and after the warm-up: two trees like eval.json, or empty."""
        folder = self.path / "stages" / "warm-up"
        pair = [_check_eval(folder / n, read_object(folder / n)) for n in ("before.json", "eval.json")]
        return pair[0], pair[1]

    @cached_property
    def stages(self) -> dict[str, dict[str, Any]]:
        """Contents of done.json of each finished stage."""
        return {file.parent.name: read_object(file) for file in sorted((self.path / "stages").glob("*/done.json"))}

    @cached_property
    def stage_seconds(self) -> dict[str, float]:
        """Wall seconds by part, as far as the parts recorded them."""
        timings: dict[str, float] = {}
        seconds = self.selection.about.get("seconds") if self.selection else None
        for name, value in (seconds if isinstance(seconds, dict) else {"all": seconds}).items():
            if _is_finite(value):
                timings[f"selection: {name}"] = float(value)
        for stage in self.metrics.stages:  # time_s accumulates over resumed attempts
            times = [ln["time_s"] for ln in self.metrics.lines if ln["stage"] == stage and _is_finite(ln.get("time_s"))]
            if times:
                timings[stage] = float(max(times))
        return timings

    @cached_property
    def elapsed(self) -> float | None:
        """Wall seconds of the whole run if it recorded them, else the sum of its parts."""
        total, parts = read_object(self.path / "timings.json").get("seconds"), sum(self.stage_seconds.values())
        return max(float(total), parts) if _is_finite(total) else parts or None


def best_split(tree: dict[str, Any]) -> str | None:
    """Return test if it was evaluated, else dev, else any split."""
    return next((s for s in ("test", "dev", *tree) if s in tree), None)


def headline_metric(metrics: dict[str, Any]) -> str | None:
    """Return the headline metric of a split; None without any."""
    measured = {name: cell for name, cell in metrics.items() if not find_metric(name).is_floor}
    return next((name for name in ("accuracy", "exact_match", *sort_for_headline(measured)) if name in measured), None)


def _is_finite(value: Any) -> TypeGuard[float]:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, or {} if the file does not exist."""
    return atomic.read_json_object(path) if path.is_file() else {}


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl; a torn line (a killed writer) is skipped and counted, not an error."""
    if not path.is_file():
        return Metrics([])
    lines: dict[tuple[str, str, int], dict[str, Any]] = {}
    unreadable = 0
    for raw in path.read_bytes().split(b"\n"):
        if not raw.strip():
            continue
        line = parse_metrics_line(raw)
        if line is None or "split" not in line:
            unreadable += 1
            continue
        drop_rolled_back(lines, line)
        lines[line["stage"], line["split"], line["step"]] = line
    return Metrics(list(lines.values()), unreadable)


def _check_eval(path: Path, tree: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    for split, metrics in tree.items():
        if not isinstance(metrics, dict):
            raise UserError(f"{path}: {split!r} should hold metrics; run `flatshift eval` again")
        for metric, cell in list(metrics.items()):
            if isinstance(cell, dict) and cell.get("value", 0) is None:
                del metrics[metric]  # not defined on these rows
                continue
            if not isinstance(cell, dict) or not (
                isinstance(cell.get("value"), float) or _is_finite(cell.get("value"))
            ):
                raise UserError(f"{path}: {split}.{metric} has no number `value`; run `flatshift eval` again")
    return tree


def _read_selection(folder: Path) -> SelectionResults:
    table = points = None
    if (folder / "scores.parquet").is_file():
        required = ("id", "score", "rank", "selected")
        table = read_parquet(folder / "scores.parquet", fix="make the run again", columns=required)
    hidden_domains = {}
    tags = folder / "judged_domains.tsv"
    if tags.is_file():
        for line in tags.read_text(encoding="utf-8").splitlines():
            id_, tab, domain = line.partition("\t")
            if tab and (id_, domain) != ("id", "domain"):
                hidden_domains[id_] = domain
    if (folder / "map.parquet").is_file():
        columns = ("x", "y", "kind")
        plane = read_parquet(folder / "map.parquet", fix="make the run again", columns=columns)
        points = {name: plane.column(name).to_pylist() for name in columns}
        points["explained"] = json.loads((plane.schema.metadata or {}).get(b"flatshift.explained", b"null"))
    record = read_object(folder / "manifest.json").get("selection")
    top = _first_records(folder / "selected.jsonl", _MAX_RECORDS)
    targets = {str(line.get("id")): str(line.get("text")) for line in _first_records(folder / "targets.jsonl", 1 << 30)}
    return SelectionResults(
        folder, record if isinstance(record, dict) else {}, table, top, hidden_domains, points, targets
    )


def _first_records(path: Path, count: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    with path.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, 1):
            if len(records) == count:
                break
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number}: not valid JSON; make the selection again") from error
            if isinstance(record, dict) and "repeat_of" not in record:
                records.append(record)
    return records


def is_run(path: Path) -> bool:
    """True if `path` contains any file that the report can show."""
    return any((path / name).is_file() for name in _FILES) or (path / "cells").is_dir()


def find_runs(paths: Sequence[Path]) -> list[RunResults]:
    """Find the runs in `paths`, in order: each path itself, or the runs directly inside a plain folder.

    Raises UserError naming the nearest run directory.
    """
    runs: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path}: no such run directory{_nearest_hint(path)}")
        if not path.is_dir():
            raise UserError(f"{path}: a file, not a run directory; give its folder {path.parent}")
        directories = [path]
        if not is_run(path):
            inner = (p for p in path.iterdir() if p.is_dir() and p.name[0] != "." and p.name not in _INNER_FOLDERS)
            directories = list(filter(is_run, sorted(inner)))
        if not directories:
            *names, last = ("cells/" if name == "cells.parquet" else name for name in _FILES)
            expected = f"{', '.join(names)} or {last}"
            raise UserError(f"{path}: not a run directory (none of {expected}){_nearest_hint(path)}")
        for run in directories:
            runs.setdefault(run.resolve(), run)
    for path in runs.values():
        for folder in (path, path / "selection"):
            check_files(folder, lambda name: not name.startswith(("adapter/", "initial/")))  # no page shows weights
    return [read_run(path) for path in runs.values()]


def _nearest_hint(path: Path) -> str:
    path = path.absolute()
    for parent in list(path.parents)[:3]:
        if is_run(parent):
            return f"; did you mean {parent}?"
    deeper = sorted(p for p in path.glob("*/*") if p.is_dir() and is_run(p)) if path.is_dir() else []
    if deeper:
        return f"; did you mean {deeper[0].parent}?"
    if path.parent.is_dir():
        beside = {p.name: p for p in path.parent.iterdir() if p.is_dir() and p != path and is_run(p)}
        close = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.5) or sorted(beside)[:1]
        if close:
            return f"; did you mean {beside[close[0]]}?"
    return "; give the --out folder of `flatshift train`, `select`, `sweep` or `demo`"


def read_run(path: Path) -> RunResults:
    """Read one run directory."""
    texts = {
        name: (path / name).read_text(encoding="utf-8", errors="replace") if (path / name).is_file() else ""
        for name in ("command.txt", "recipe.resolved.yaml")
    }
    return RunResults(
        path=path,
        # While a run is being written, its folder is a hidden temporary (`.NAME.*.tmp`).
        name=re.sub(r"^\.(.+)\.[0-9a-f]{8}\.tmp$", r"\1", path.resolve().name),
        manifest=read_object(path / "manifest.json"),
        environment=read_object(path / "environment.json"),
        command=texts["command.txt"].strip(),
        recipe_text=texts["recipe.resolved.yaml"],
    )


@dataclass(frozen=True)
class DirectoryEntry:
    """Directory of one command. steps: finished steps or cells; of: how many were requested."""

    path: str
    kind: str
    status: str
    steps: int | None = None
    of: int | None = None
    metric: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    date: str = ""


def list_directories(folder: Path) -> list[DirectoryEntry]:
    """List every run directory in `folder`, itself included, oldest first.

    Raises UserError if `folder` is not a directory. A directory with a broken file gets the status `broken`.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no directory; name the folder that your runs are in, for example `runs`")
    entries = []
    for path in _iter_runs(folder, _MAX_DEPTH):
        name = path.relative_to(folder).as_posix() if path != folder else path.name or str(path)
        try:
            entries.append(_run_entry(read_run(path), name))
        except UserError as error:
            entries.append(DirectoryEntry(name, "?", f"broken: {error}"[:160], date=_modified_time(path)))
    return sorted(entries, key=lambda entry: (entry.date, entry.path))


def _iter_runs(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder) and any((folder / name).is_file() for name in _OF_COMMANDS):
        yield folder
    elif depth:
        skipped = _INNER_FOLDERS | {"adapter", "state", "plots", "initial"}
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink() and path.name[0] != "." and path.name not in skipped:
                yield from _iter_runs(path, depth - 1)


def _run_entry(run: RunResults, name: str) -> DirectoryEntry:
    created = str(run.environment.get("created") or run.manifest.get("created") or "") or _modified_time(run.path)
    date = created.replace("+00:00", "Z")
    documents: dict[str, Any] = {"comparison": run.comparison, "evaluation": run.evaluation}
    documents |= {"tokenizers": run.tokenizers, "forecast": (run.path / FORECAST).is_file()}
    for kind, present in documents.items():
        if present:
            return DirectoryEntry(name, kind, "finished", date=date)
    if (run.path / STUDY).is_file():
        return DirectoryEntry(name, "comparison", "unfinished", date=date)
    if (run.path / MARKER).is_file() or (run.path / "cells").is_dir():
        return _sweep_entry(run, name, date)
    only_selects = (run.path / "scores.parquet").is_file() and not (run.path / "stages").is_dir()
    if (run.path / RECIPE).is_file() and not only_selects:
        return _training_entry(run, name, date)
    selection = run.manifest.get("selection")
    budget, pool = (selection.get(key) if isinstance(selection, dict) else None for key in ("budget", "pool"))
    pool = pool if isinstance(pool, int) else None
    return DirectoryEntry(name, "selection", "finished", steps=budget, of=pool, date=date)


def _training_entry(run: RunResults, name: str, date: str) -> DirectoryEntry:
    train = run.recipe.get("train")
    requested = train.get("steps") if isinstance(train, dict) else None
    steps = max((line["step"] for line in run.metrics.lines if line["stage"] == "fine-tune"), default=0)
    done = run.stages.get("fine-tune", {})
    finished = (run.path / DONE).is_file() and done.get("target_steps") == requested
    status = ("stopped early" if done.get("stopped_early") else "finished") if finished else "unfinished"
    split = best_split(run.eval)
    metric = headline_metric(run.eval[split]) if split else None
    cell = run.eval[split][metric] if split and metric else {}
    figure = f"{split} {metric}" if metric else None
    ends = {key: cell.get(key) for key in ("value", "low", "high")}
    return DirectoryEntry(name, "training", status, int(done.get("steps", steps)), requested, figure, date=date, **ends)


def _sweep_entry(run: RunResults, name: str, date: str) -> DirectoryEntry:
    data = run.sweep
    if data is None:
        planned = read_object(run.path / MARKER).get("cells")
        return DirectoryEntry(name, "sweep", "unfinished", 0, planned, date=date)
    column = data.error_columns()[0]
    lowest = data.best(column)
    ends: dict[str, Any] = {}
    if lowest is not None:
        best = lowest[1]
        ends = {"metric": f"lowest {column.replace('.', ' ')}", "value": best.value, "low": best.low, "high": best.high}
    status = "unfinished" if data.unfinished else f"finished, {len(data.failed)} failed" if data.failed else "finished"
    return DirectoryEntry(name, "sweep", status, data.done, data.total, date=date, **ends)


def _modified_time(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
