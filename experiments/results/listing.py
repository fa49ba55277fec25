"""List the run directories in a folder: kind, progress, main metric, date."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flatshift.experiments.results.cells import MARKER
from flatshift.experiments.results.run import RunResults, best_split, headline_metric, is_run, read_object, read_run
from flatshift.finetune.digests import DONE
from flatshift.finetune.errors import UserError
from flatshift.finetune.run_directory import RECIPE

_PARTS = {"cells", "runs", "stages", "selection", "adapter", "state", "plots", "initial"}
"""Folders that belong to the directory above them."""
_DEEPEST = 6


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

    def record(self) -> dict[str, Any]:
        """Return the entry as plain values."""
        return asdict(self)


def list_directories(folder: Path) -> list[DirectoryEntry]:
    """List every run directory in `folder`, itself included, oldest first.

    Raises UserError if `folder` is not a directory. A directory with a broken file gets the status `broken`.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no directory; name the folder that your runs are in, for example `runs`")
    found = [directory_entry(path, folder) for path in _find_runs(folder, _DEEPEST)]
    return sorted(found, key=lambda one: (one.date, one.path))


def _find_runs(folder: Path, depth: int) -> Iterator[Path]:
    own = is_run(folder)
    if own:
        yield folder
    if depth and (not own or (folder / "study.json").is_file()):
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink() and path.name[0] != "." and path.name not in _PARTS:
                yield from _find_runs(path, depth - 1)


def directory_entry(path: Path, folder: Path) -> DirectoryEntry:
    """Describe one directory, named relative to `folder`."""
    name = path.relative_to(folder).as_posix() if path != folder else path.name or str(path)
    try:
        return _run_entry(read_run(path), name)
    except UserError as error:
        return DirectoryEntry(name, "?", f"broken: {error}"[:160], date=_modified_time(path))


def _run_entry(run: RunResults, name: str) -> DirectoryEntry:
    made = str(run.environment.get("created") or run.manifest.get("created") or "") or _modified_time(run.path)
    date = made.replace("+00:00", "Z")
    if run.comparison:
        return DirectoryEntry(name, "comparison", "finished", date=date)
    if (run.path / "study.json").is_file():
        return DirectoryEntry(name, "study", "finished", date=date)
    if run.evaluation:
        return DirectoryEntry(name, "evaluation", "finished", date=date)
    if (run.path / MARKER).is_file() or (run.path / "cells").is_dir():
        return _sweep_entry(run, name, date)
    if (run.path / RECIPE).is_file() and not _is_selection_only(run):
        return _training_entry(run, name, date)
    chosen = run.manifest.get("selection")
    count = chosen.get("budget") if isinstance(chosen, dict) else None
    return DirectoryEntry(name, "selection", "finished", steps=count, of=_pool_size(chosen), date=date)


def _is_selection_only(run: RunResults) -> bool:
    return (run.path / "scores.parquet").is_file() and not (run.path / "stages").is_dir()


def _pool_size(chosen: Any) -> int | None:
    count = chosen.get("pool") if isinstance(chosen, dict) else None
    return count if isinstance(count, int) else None


def _training_entry(run: RunResults, name: str, date: str) -> DirectoryEntry:
    train = run.recipe.get("train")
    asked = train.get("steps") if isinstance(train, dict) else None
    steps = max((line["step"] for line in run.metrics.lines if line["stage"] == "fine-tune"), default=0)
    done = run.stages.get("fine-tune", {})
    finished = (run.path / DONE).is_file() and done.get("target_steps") == asked
    status = ("stopped early" if done.get("stopped_early") else "finished") if finished else "unfinished"
    split = best_split(run.eval)
    metric = headline_metric(run.eval[split]) if split else None
    cell = run.eval[split][metric] if split and metric else {}
    figure = f"{split} {metric}" if metric else None
    ends = {key: cell.get(key) for key in ("value", "low", "high")}
    return DirectoryEntry(name, "training", status, int(done.get("steps", steps)), asked, figure, date=date, **ends)


def _sweep_entry(run: RunResults, name: str, date: str) -> DirectoryEntry:
    plan = read_object(run.path / MARKER)
    asked = plan.get("cells") if isinstance(plan.get("cells"), int) else None
    data = run.sweep
    if data is None:
        return DirectoryEntry(name, "sweep", "unfinished", 0, asked, date=date)
    column = data.error_columns()[0]
    lowest = data.best(column)
    ends: dict[str, Any] = {}
    if lowest is not None:
        best = lowest[1]
        ends = {"metric": f"lowest {column.replace('.', ' ')}", "value": best.value, "low": best.low, "high": best.high}
    status = "unfinished" if data.unfinished else f"finished, {len(data.failed)} failed" if data.failed else "finished"
    return DirectoryEntry(name, "sweep", status, data.done, asked or len(data), date=date, **ends)


def _modified_time(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
