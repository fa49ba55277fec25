"""Experiment trackers in addition to metrics.jsonl: each receives the same rows through one `log(dict)`.

    trackers = open_trackers(Tracker(kinds=("tensorboard",)), run, config={...}, log=print)
    trackers.log({"stage": "fine-tune", "split": "train", "step": 3, "loss": 2.1})
    trackers.close()

metrics.jsonl remains the source of truth: a tracker that fails is dropped with a warning, and training continues. Only
the main rank has trackers. Nothing leaves the machine unless `tracker.online` is set.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..config import Tracker, TrackerKind
from ..errors import UserError
from ..run_directory import ENVIRONMENT, RunDirectory

FOLDER = "trackers"
_SENDING = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")
"""Variables that make trackio send its data."""


class TrackerBackend(Protocol):
    """Interface of a tracker."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Record a row of metrics.jsonl: `stage`, `split`, `step` and metrics."""

    def close(self) -> None:
        """Flush pending rows."""


def check_trackers(settings: Tracker) -> None:
    """Raise UserError if a tracker's package is missing, or if it would send data without `tracker.online`."""
    for kind in settings.kinds:
        if importlib.util.find_spec(kind) is None:
            raise UserError(
                f"tracker.kinds: {kind} needs the package {kind}; pip install 'flatshift[track-{kind}]', or drop it"
            )
    variables = [name for name in _SENDING if os.environ.get(name)]
    if "trackio" in settings.kinds and variables and not settings.online:
        raise UserError(
            f"tracker.online: {variables[0]} is set, so trackio would send; unset it, or set tracker.online: true"
        )


def open_trackers(
    settings: Tracker, run: RunDirectory, *, config: Mapping[str, Any], log: Callable[[str], None]
) -> Trackers:
    """Return the trackers of a run; none on ranks that do not write.

    config: the whole recipe, shown next to the curves. log: receives the warning about a tracker that failed.
    """
    trackers = Trackers(log)
    for kind in settings.kinds if run.writes else ():
        trackers.add(kind, partial(_BACKENDS[kind], settings, run.path, config))
    return trackers


class Trackers:
    """Any number of backends; none of them can stop the training."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._backends: dict[str, TrackerBackend] = {}

    def add(self, name: str, make: Callable[[], TrackerBackend]) -> None:
        """Open one more backend."""
        with self._failures(name):
            self._backends[name] = make()

    def log(self, row: Mapping[str, Any]) -> None:
        """Pass a row to all backends."""
        for name, backend in list(self._backends.items()):
            with self._failures(name):
                backend.log(row)

    def close(self) -> None:
        """Flush and close all backends."""
        for name, backend in list(self._backends.items()):
            with self._failures(name):
                backend.close()
        self._backends = {}

    @contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._backends.pop(name, None)
            self._log(
                f"warning: the tracker {name} failed and is left out from here on ({error}); metrics.jsonl has "
                "everything"
            )


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row, by `split/name`."""
    return {
        f"{row['split']}/{name}": float(value)
        for name, value in row.items()
        if name not in ("attempt", "step") and isinstance(value, int | float) and math.isfinite(value)
    }


class TensorBoard:
    """Event files under `trackers/tensorboard/<stage>`.

    If a run was resumed or rolled back, the repeated steps hide their earlier values (`purge_step`).
    """

    def __init__(self, settings: Tracker, path: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._new_writer, self._folder = SummaryWriter, path / FOLDER / "tensorboard"
        self._writers: dict[str, Any] = {}
        self._last: dict[str, int] = {}

    def log(self, row: Mapping[str, Any]) -> None:
        stage, step = row["stage"], row["step"]
        if step < self._last.get(stage, step + 1):
            if stage in self._writers:
                self._writers[stage].close()
            self._writers[stage] = self._new_writer(log_dir=str(self._folder / stage), purge_step=step)
        self._last[stage] = step
        for name, value in finite_numbers(row).items():
            self._writers[stage].add_scalar(name, value, global_step=step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Wandb:
    """A run of Weights & Biases, offline unless `tracker.online`; resumed under the same id."""

    def __init__(self, settings: Tracker, path: Path, config: Mapping[str, Any]) -> None:
        import wandb

        folder = path / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=settings.project, name=path.name, id=run_id(path), resume="allow", dir=str(folder),
            mode="online" if settings.online else "offline", config=dict(config),
        )  # fmt: skip
        self._stages: set[str] = set()

    def log(self, row: Mapping[str, Any]) -> None:
        stage = row["stage"]
        if stage not in self._stages:  # an axis per stage: wandb's step must not decrease, but a resumed run's does
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        named = {f"{stage}/{name}": value for name, value in finite_numbers(row).items()}
        self._run.log({f"{stage}/step": row["step"], **named})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, in its own database on this machine."""

    def __init__(self, settings: Tracker, path: Path, config: Mapping[str, Any]) -> None:
        import trackio

        self._library: Any = trackio
        name = f"{path.name}-{run_id(path)}"
        trackio.init(project=settings.project, name=name, config=dict(config), resume="allow", embed=False)

    def log(self, row: Mapping[str, Any]) -> None:
        named = {f"{row['stage']}/{name}": value for name, value in finite_numbers(row).items()}
        self._library.log(named, step=row["step"])

    def close(self) -> None:
        self._library.finish()


def run_id(path: Path) -> str:
    """Return an id for the run in `path` that survives resuming and moving it."""
    file = path / ENVIRONMENT
    content = file.read_bytes() if file.is_file() else str(path.resolve()).encode()
    return hashlib.sha256(content).hexdigest()[:12]


_BACKENDS: dict[TrackerKind, Callable[[Tracker, Path, Mapping[str, Any]], TrackerBackend]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
