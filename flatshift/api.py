"""Python API: the commands as functions, and their result directories as objects.

    recipe = flatshift.load_recipe("classify", {"train": {"steps": 40}})
    run = flatshift.train(recipe, out="runs/first")
    run.metrics["test"]["accuracy"]                  # {"value": …, "low": …, "high": …, "n": …}

Each function calls the same workflow as its command and draws the report at the end; no logic of its own is here.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatshift.finetune.errors import UserError, is_remote, shorten, store_address, user_path
from flatshift.finetune.redaction import hide_secrets

if TYPE_CHECKING:
    import numpy as np

    from flatshift.experiments.recipe import Resolved
    from flatshift.experiments.recipe.schema import Recipe
    from flatshift.experiments.results.sweep import SweepData
    from flatshift.finetune.evaluate.bootstrap import BootstrapInterval

Overrides = Mapping[str, Any]
"""Recipe keys and values: `{"train": {"steps": 4}}` or `{"train.steps": 4}`."""


def draw_report(directory: Path, *parts: Path) -> Path:
    """Draw `plots/` and `report.html` of a finished directory, or one page from its `parts`; return the page's path."""
    from flatshift.experiments.report.page import build_report

    return build_report(list(parts) or [directory], out=directory / "report.html", plots=not parts)


def load_recipe(reference: str | Path | None = None, overrides: Overrides | None = None) -> Resolved:
    """Load a recipe file or shipped recipe, apply `overrides` and validate the result.

    reference: a path, a shipped name (`flatshift recipes`), or None for the defaults alone.
    Returns the argument of `train`, `select` and `sweep`: `.recipe` is the tree of frozen dataclasses, `.to_yaml()` its
    text. Raises UserError that names the key, with the nearest valid one.

        flatshift.load_recipe("classify", {"train": {"steps": 4}, "adapter.rank": 2})
    """
    from flatshift.experiments.recipe import from_mapping
    from flatshift.experiments.recipe import load_recipe as load

    if reference is not None and not isinstance(reference, str | Path):
        raise _type_error("load_recipe", "reference", "a shipped name, a file or None", reference)
    return load(None if reference is None else str(reference), [from_mapping(overrides or {})])


def _resolve_recipe(recipe: Any, overrides: Overrides | None, function: str) -> Resolved:
    from flatshift.experiments.recipe import Resolved, from_mapping
    from flatshift.experiments.recipe.resolve import resolve_object, resolve_tree
    from flatshift.experiments.recipe.schema import Recipe

    if isinstance(recipe, str | Path):
        return load_recipe(recipe, overrides)
    if isinstance(recipe, Recipe):
        recipe = resolve_object(recipe)
    if not isinstance(recipe, Resolved):
        raise _type_error(function, "recipe", "what load_recipe returns, a Recipe, a shipped name or a file", recipe)
    if not overrides:
        return recipe
    return resolve_tree(recipe.tree(), [from_mapping(overrides)], name=recipe.name)


def _type_error(function: str, name: str, expected: str, value: Any) -> UserError:
    return UserError(f"{function}: {name} must be {expected}, got {shorten(repr(value), 60)} ({type(value).__name__})")


def _local_path(function: str, name: str, value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise _type_error(function, name, "a path", value)
    if is_remote(value):
        raise UserError(f"{function}: {name} {value}: results are in a local directory; name one, and copy it")
    return user_path(value)


def train(
    recipe: Resolved | Recipe | str | Path,
    out: str | Path | None = None,
    *,
    overrides: Overrides | None = None,
    quiet: bool = False,
) -> Run:
    """Run a recipe into a new run directory, as `flatshift train`.

    out: directory to create, by default `runs/DATE-TIME-NAME`. overrides: over the recipe's keys, `{"train.steps": 4}`.
    quiet: print nothing; log.txt has every line.
    Raises UserError for bad input before training starts, Interrupted if stopped with resumable state.
    """
    resolved = _resolve_recipe(recipe, overrides, "train")
    directory = None if out is None else _local_path("train", "out", out)
    from flatshift.experiments.workflows.train import train
    from flatshift.finetune.launch import consistency

    dated = consistency.dated_directory("runs", resolved.name) if directory is None else nullcontext(directory)
    with dated as directory:
        train(resolved, directory, quiet=quiet, draw=draw_report)
    return Run(directory)


def resume(path: str | Path, overrides: Overrides | None = None, *, quiet: bool = False) -> Run:
    """Continue a run directory exactly where it stopped; return at once if it is finished.

    overrides: only another mesh, `train.device` or `train.steps`.
    Raises UserError if `path` is no run directory or in use, an input file or the backbone changed, or an override is
    not allowed.
    """
    directory = _local_path("resume", "path", path)
    from flatshift.experiments.recipe import from_mapping
    from flatshift.experiments.workflows.train import resume

    resume(directory, [from_mapping(overrides or {})], quiet=quiet, draw=draw_report)
    return Run(directory)


@dataclass(frozen=True)
class Run:
    """A run directory of `train`: `Run("runs/first")` opens an existing one.

    Files are read on each access, so a run that is still training can be watched. Raises UserError if `path` is no run.
    """

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", _local_path("Run", "path", path))
        if not (self.path / "recipe.resolved.yaml").is_file():
            raise UserError(f"{self.path} is not a run directory: it has no recipe.resolved.yaml")

    @property
    def recipe(self) -> Recipe:
        """Resolved recipe of the run."""
        from flatshift.experiments.recipe import resume_recipe

        return resume_recipe(self.path).recipe

    @property
    def finished(self) -> bool:
        """True if every part is done; if not, `resume(run.path)` continues the run."""
        return (self.path / "done.json").is_file()

    @property
    def metrics(self) -> dict[str, dict[str, BootstrapInterval]]:
        """Contents of eval.json: `{split: {metric: {"value", "low", "high", "n"}}}`; empty before the evaluation."""
        from flatshift.experiments.results.run import read_object

        return read_object(self.path / "eval.json")

    @property
    def history(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl in order, one per stage, split and step: `stage, split, step, loss, …`."""
        from flatshift.experiments.results.run import read_metrics

        return read_metrics(self.path / "metrics.jsonl").lines

    def evaluate(self, data: str | Path | Sequence[str | Path] = (), *, quiet: bool = True) -> dict[str, Any]:
        """Evaluate the adapter again, on the run's own splits or on files as split `data`, as `flatshift eval`."""
        from flatshift.experiments.workflows.evaluate import evaluate_run

        return evaluate_run(self.path, data=_check_files("evaluate", "data", data), quiet=quiet)

    def predict(self, rows: str | Sequence[str | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Predict for each row: `label, probability, p_NAME`, a number, an answer, or the perplexity.

        rows: texts, or mappings with the training columns; labels are not needed. The model is loaded at the first
        call. For files of any length use `flatshift predict`.
        Raises UserError for a run without an adapter, or a row that the model cannot encode.
        """
        values = [rows] if isinstance(rows, str) else rows
        if isinstance(values, Mapping) or not _is_sized(values):
            raise _type_error("predict", "rows", "a list of texts or of mappings", values)
        for i, row in enumerate(values):
            if not isinstance(row, str | Mapping):
                raise _type_error("predict", f"rows[{i}]", "a text or a mapping of columns", row)
        predictions: list[dict[str, Any]] = self._predictor(list(values))
        return predictions

    @cached_property
    def _predictor(self) -> Any:
        from flatshift.experiments.workflows.predict import Predictor

        return Predictor(self.path)

    def generate(self, prompts: str | Sequence[str], *, raw: bool = False, **decoding: Any) -> list[str]:
        """Generate text after each prompt; prompts go through the task's template unless `raw`.

        decoding: `max_new_tokens, temperature, top_p, seed, …`, as the flags of `flatshift generate`.
        Raises UserError if the task is not generative, or a prompt does not fit.
        """
        texts = _check_texts("generate", "prompts", [prompts] if isinstance(prompts, str) else prompts)
        from flatshift.experiments.workflows.generate import generate_from_run

        records = generate_from_run(self.path, prompts=texts, raw=raw, decoding=decoding, quiet=True)
        return [str(record["text"]) for record in records]

    def adapter(self) -> Any:
        """Return the frozen backbone with the run's adapter, a `peft.PeftModel` in evaluation mode on the run's device.

        Raises UserError if the run has no adapter yet, or its backbone changed.
        """
        from flatshift.experiments.data.splits import read_label_record
        from flatshift.experiments.workflows.build import load_model
        from flatshift.experiments.workflows.run_parts import read_finished_recipe, to_single_process

        recipe = to_single_process(read_finished_recipe(self.path))
        engine, _ = load_model(
            recipe, recipe.task, read_label_record(recipe, self.path)[0], adapter=self.path / "adapter"
        )
        return engine.peft.eval()

    def tokenizer(self) -> Any:
        """Return the backbone's tokenizer, the one used in training."""
        from flatshift.finetune.models.backbone import open_backbone

        return open_backbone(self.recipe.backbone).tokenizer

    def report(self, out: str | Path | None = None) -> Path:
        """Draw the run's page again, by default its `report.html`."""
        from flatshift.experiments.report.page import build_report

        return build_report([self.path], out=_local_path("report", "out", out or self.path / "report.html"))


def select(
    pool: Resolved | Recipe | str | Path | Sequence[str] | Sequence[Path],
    target: Sequence[str] | Sequence[Path] | Path | None = None,
    *,
    budget: int | None = None,
    method: Any = None,
    embedder: Any = None,
    overrides: Overrides | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
) -> Selection:
    """Choose `budget` samples of a pool for a target, as `flatshift select`.

    pool, target: lists of texts, or files as a `Path` or a list of them; or `pool` alone, a recipe with a `select`
    block. method, embedder: a kind (`"gotd"`, `"tfidf"`, …) or its settings
    (`flatshift.selection.methods.gotd.GotD(...)`); by default the recipe's, else `cynical` on the backbone's tokens, or
    GOT-D if an embedder is given. overrides: further recipe keys. out: directory to create; by default only the
    returned object is kept. With `out`, lists of texts are saved next to it as files in `OUT-texts/`, so that the
    manifest names the inputs.
    Raises UserError for wrong types, bad rows or a budget above the pool, before anything is embedded.

        flatshift.select(pool_texts, target_texts, budget=100).texts
    """
    options: dict[str, Any] = {"select.method": method, "select.embedder": embedder}
    options = {key + ".kind" * isinstance(value, str): value for key, value in options.items()}
    settings = {key: value for key, value in {"select.budget": budget, **options}.items() if value is not None}
    texts: dict[Path, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="flatshift-") as temporary:
        directory = Path(temporary) / "selection" if out is None else _local_path("select", "out", out)
        if target is None:
            if not isinstance(pool, str | Path) and isinstance(pool, Sequence):
                raise UserError("select: target is missing; give the texts of the task, or a recipe alone")
            resolved = _resolve_recipe(pool, {**settings, **(overrides or {})}, "select")
        else:
            if budget is None:
                raise UserError("select: budget is missing; say how many of the pool's texts to choose")
            folder = Path(temporary) if out is None else directory.with_name(f"{directory.name}-texts")
            for name, side in (("pool", pool), ("target", target)):
                settings[f"select.{name}.files"] = _side_files(name, side, folder, texts)
            if not _names_files(target):
                settings["data.holdout"] = 0.0  # no training reads these texts, so none are held out
            resolved = load_recipe(None, {**settings, **(overrides or {})})
        from flatshift.experiments.select.select import select

        draw = None if out is None else draw_report
        manifest = select(resolved, directory, quiet=quiet or out is None, draw=draw, setup=lambda: _write_texts(texts))
        assert resolved.recipe.select is not None
        is_listed, text = target is not None and not _names_files(pool), resolved.recipe.select.columns.text
        return Selection.read(directory, manifest, text, is_listed, path=None if out is None else directory)


def embedder(
    embedder: Any, *, moments: Sequence[str] = (), overrides: Overrides | None = None
) -> Callable[[Sequence[str]], np.ndarray]:
    """Return a function texts → (n, dim) float32, the vectors used by `select`, for use in other data engines.

    embedder: `"backbone"`, `"encoder"`, `"gradients"`, `"static"` or its settings. moments: for gradients, some texts
    of the pool, the same in every task and for the target. overrides: recipe keys, such as `{"backbone": DIR}` or
    `{"select.embedder.path": DIR}`. The function can be pickled, and loads its model at a process's first call.
    Raises UserError for an embedder that is fitted to pool and target, or gradients without `moments`.

        ShardWriter("features", flatshift.embedder("gradients", moments=some_texts))
    """
    from flatshift.experiments.select.embedding import RecipeEmbedder

    key = "select.embedder.kind" if isinstance(embedder, str) else "select.embedder"
    recipe = load_recipe(None, {key: embedder, **(overrides or {})}).recipe
    assert recipe.select is not None
    texts = _check_texts("embedder", "moments", moments) if moments else ()
    return RecipeEmbedder(recipe, recipe.select.embedder, texts)


def _names_files(value: Any) -> bool:
    values = [value] if isinstance(value, Path) else value
    return not isinstance(values, str) and isinstance(values, Sequence) and bool(values) and isinstance(values[0], Path)


def _is_sized(values: Any) -> bool:
    return hasattr(values, "__iter__") and hasattr(values, "__len__")


def _side_files(name: str, value: Any, folder: Path, texts: dict[Path, list[str]]) -> list[str]:
    """Return the files of a side; a list of texts is added to `texts` under the file that is to hold it."""
    if _names_files(value):
        return _check_files("select", name, value)
    file = folder / f"{name}.jsonl"
    texts[file] = _check_texts("select", name, value)
    if not texts[file]:
        raise UserError(f"select: {name} is empty; give at least one text")
    return [str(file)]


def _write_texts(texts: Mapping[Path, Sequence[str]]) -> None:
    from flatshift.finetune.atomic import write_text

    for file, side in texts.items():
        lines = (json.dumps({"id": str(row), "text": text}) + "\n" for row, text in enumerate(side))
        write_text(file, "".join(lines))


def _check_texts(function: str, name: str, value: Any) -> list[str]:
    if isinstance(value, str) or not _is_sized(value):
        raise _type_error(function, name, "a list of texts", value)
    texts = list(value)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise _type_error(function, f"{name}[{row}]", "a text", text)
    return texts


def _check_files(function: str, name: str, value: Any) -> list[str]:
    files = [value] if isinstance(value, str | Path) else list(value)
    for row, file in enumerate(files):
        if not isinstance(file, str | Path):
            raise _type_error(function, f"{name}[{row}]", "a path", file)
    return [hide_secrets(store_address(file)) if is_remote(file) else str(Path(file)) for file in files]


@dataclass(frozen=True)
class Selection:
    """Result of `select`.

    indices: positions of the chosen records in the pool, in the order chosen; a repeated record appears each time. ids,
    texts: of the chosen records. scores: `{id: score}` of every record that was kept, smaller is better. nearest: the
    id of the target nearest to each chosen record, if the method provides one. manifest: contents of manifest.json.
    path: the directory, if one was created. is_listed: the pool was a list of texts.
    """

    ids: list[str]
    texts: list[str]
    scores: dict[str, float]
    nearest: list[str | None]
    manifest: dict[str, Any]
    path: Path | None = None
    is_listed: bool = True

    @property
    def indices(self) -> list[int]:
        """Positions in the given list; raises UserError if the pool was files, whose records have their own ids."""
        if not self.is_listed:
            raise UserError("select: the pool was files, whose records have ids; use .ids")
        return [int(id_.partition("#")[0]) for id_ in self.ids]  # `#`: the number of a piece

    @classmethod
    def read(
        cls, directory: Path, manifest: dict[str, Any], text: str, is_listed: bool, *, path: Path | None
    ) -> Selection:
        """Read from a directory of `select`; text: column of the texts."""
        import pyarrow.parquet as pq

        table = pq.read_table(directory / "scores.parquet", columns=["id", "score", "nearest_target"]).to_pydict()
        positions = {id_: row for row, id_ in enumerate(table["id"])}
        lines = (directory / "selected.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        records = [json.loads(line) for line in lines]
        ids = [str(record.get("repeat_of", record["id"])) for record in records]
        texts = [str(record[text]) for record in records]
        nearest = [table["nearest_target"][positions[id_]] for id_ in ids]
        return cls(ids, texts, dict(zip(table["id"], table["score"], strict=True)), nearest, manifest, path, is_listed)


def sweep(
    recipe: Resolved | Recipe | str | Path,
    grid: Mapping[str, Sequence[Any] | str] | None = None,
    *,
    out: str | Path,
    seeds: int | None = None,
    overrides: Overrides | None = None,
    design: Literal["grid", "paired", "random"] | None = None,
    points: int | None = None,
    jobs: int | None = None,
    quiet: bool = False,
) -> Sweep:
    """Run the cells of a grid that have no result yet, as `flatshift sweep`.

    grid: recipe key → values, or a range as a text (`"1e-4..1e-2:log"`, design `random`); by default the recipe's own.
    out: directory to create or continue. seeds: number of values of `train.seed`; below five no verdict is given.
    points: number of points drawn (`random`). jobs: worker processes. A cell that diverged or failed is a row with its
    reason, not an exception.
    Raises UserError before any cell runs, Interrupted if stopped; the same call then continues.
    """
    resolved = _resolve_recipe(recipe, overrides, "sweep")
    directory = _local_path("sweep", "out", out)
    from flatshift.experiments.recipe.schema import SweepOptions
    from flatshift.experiments.studies.sweep import sweep

    if grid is not None and not (isinstance(grid, Mapping) and all(isinstance(key, str) for key in grid)):
        raise _type_error("sweep", "grid", "a mapping of recipe keys to lists of values", grid)
    texts = None
    if grid is not None:
        texts = tuple(f"{key}={_format_grid_values(key, values)}" for key, values in grid.items())
    options = SweepOptions(grid=texts, seeds=seeds, design=design, points=points, jobs=jobs)
    sweep(resolved, (), directory, options, quiet=quiet, draw=draw_report)
    return Sweep(directory)


def _format_grid_values(key: str, values: Any) -> str:
    if isinstance(values, str):
        return values
    if not hasattr(values, "__iter__") or isinstance(values, Mapping):
        raise _type_error("sweep", f"grid[{key!r}]", "a list of values, or a range such as '1e-4..1e-2:log'", values)
    texts = [json.dumps(v.item() if hasattr(v, "item") else v) if not isinstance(v, str) else v for v in values]
    for text in texts:
        if "," in text and text[:1] not in "[{":
            raise UserError(f"sweep: grid[{key!r}]: {shorten(repr(text), 60)} holds a comma, which parts values")
    return ",".join(texts)


@dataclass(frozen=True)
class Verdict:
    """Test result of one curve of a sweep: along `axis`, at `setting` of the other axes."""

    axis: str
    setting: dict[str, Any]
    kind: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """A directory of `sweep`: `Sweep("sweeps/rank")` opens an existing one."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", _local_path("Sweep", "path", path))
        if not (self.path / "cells.parquet").is_file():
            raise UserError(f"{self.path} has no cells.parquet; give the directory of a sweep that has run")

    @cached_property
    def data(self) -> SweepData:
        """Cells as read by the report page."""
        from flatshift.experiments.results.run import read_run

        data = read_run(self.path).sweep
        assert data is not None
        return data

    @property
    def cells(self) -> list[dict[str, Any]]:
        """One row per cell: the axes, `seed`, `status`, `reason`, and every metric as `split.metric`."""
        rows: list[dict[str, Any]] = self.data.table.to_pylist()
        return rows

    @property
    def finding(self) -> str:
        """Headline of the report page."""
        from flatshift.experiments.report.chapters.sweep import sweep_finding
        from flatshift.experiments.results.analysis import SweepAnalysis

        return sweep_finding(self.data, SweepAnalysis(self.data))

    @property
    def verdicts(self) -> list[Verdict]:
        """One verdict per curve that could be tested; empty if there are too few seeds or values."""
        from flatshift.experiments.results.analysis import SweepAnalysis

        curves = SweepAnalysis(self.data).curves
        return [Verdict(curve.axis, dict(curve.setting), curve.verdict.kind, curve.evidence) for curve in curves]

    def report(self) -> Path:
        """Draw the report page again."""
        return draw_report(self.path)


def compare(
    recipe: str | Path, out: str | Path, *, overrides: Overrides | None = None, **options: Any
) -> dict[str, Any]:
    """Run a comparison of training methods, as `flatshift compare`; return the contents of comparison.json.

    recipe: file or shipped name. options: see `flatshift.experiments.studies.compare.run.compare`.
    Raises UserError before any cell runs, Interrupted if stopped; the same call then continues.
    """
    from flatshift.experiments.recipe import from_mapping
    from flatshift.experiments.report.chapters.comparison import page
    from flatshift.experiments.studies.compare.run import compare

    trees = [from_mapping(overrides)] if overrides else []
    return compare(os.fspath(recipe), _local_path("compare", "out", out), overrides=trees, page=page, **options)
