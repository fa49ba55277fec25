"""Resumable solver state: after every pass each process atomically writes the inputs of the next pass.

`DIRECTORY/pass-<p>-process-<r>.npz`, plain arrays without pickles. A file of pass p is removed only when every process
has written p + 1, so that all can always resume from the same pass. It records a digest of the data (row norms, means,
targets, weights) and every setting that affects the solver's path, and is rejected by a solve of anything else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatshift.selection.errors import SelectionError, is_disk_full
from flatshift.selection.transport.kernel import Evaluation
from flatshift.selection.transport.problem import TransportProblem, on_every_member
from flatshift.selection.transport.settings import SolverSettings

_SCALARS = ("passes", "iterations", "length", "overlap")


@dataclass
class SolverState:
    """Solver state between two passes.

    g: point of the next pass, None when the solve is over. best: the best answer so far; ahead: the g of its
    correction; length: of the step tried towards it; tried: (point, image) of past corrections; origin: g absorbed by
    the subsample's kernel; anchor: g of its Hessian (with both, a resumed solve has the same bits).
    """

    g: Tensor | None
    passes: int = 0
    iterations: int = 0
    best: Evaluation | None = None
    ahead: Tensor | None = None
    length: float = 1.0
    tried: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    origin: Tensor | None = None
    anchor: Tensor | None = None
    overlap: float | None = None


def problem_identity(problem: TransportProblem, settings: SolverSettings, **settings_of_solver: Any) -> dict[str, Any]:
    """Return the data digest and settings that a state must share with the solve that resumes from it."""
    digest = hashlib.sha256()
    for array in (problem.x_squared, problem.mean, problem.a, problem.y, problem.b, problem.centre):
        digest.update(np.ascontiguousarray(array).tobytes())
    return {
        "data": digest.hexdigest(),
        "pool rows": problem.total,
        "targets": len(problem.b),
        "cost": "cosine" if problem.scale is not None else "sqeuclidean",
        "epsilon": settings.relative,
        "tolerance": settings.tolerance,
        "overlap": settings.overlap,
        "budget": settings.top,
        "seed": settings.seed,
        "chunk": settings.chunk,
        "processes": problem.team.size,
        **settings_of_solver,
    }


class StateDirectory:
    """State directory of one process of the team."""

    def __init__(self, directory: Path, problem: TransportProblem, identity: dict[str, Any]):
        self.directory, self.team, self.identity = directory, problem.team, identity

    def _path(self, passes: int) -> Path:
        return self.directory / f"pass-{passes:04d}-process-{self.team.rank}.npz"

    def save(self, standing: SolverState) -> None:
        """Write atomically, then remove older passes once every process has written this one.

        Raises SelectionError if it cannot be written, OSError if the disk is full; the previous pass is kept.
        """
        assert standing.best is not None
        best = standing.best
        arrays = {"best_g": best.g, "best_f": best.f, "best_column": best.column, "nearest": best.nearest}
        arrays |= {name: getattr(standing, name) for name in ("g", "ahead", "origin", "anchor")}
        for i, (point, image) in enumerate(standing.tried):
            arrays |= {f"point_{i}": point, f"image_{i}": image}
        meta = {
            "identity": self.identity,
            "value": best.value,
            "error": best.error,
            **{name: getattr(standing, name) for name in _SCALARS},
        }
        failure: SelectionError | OSError | None = None
        path = self._path(standing.passes)
        scratch = path.with_name(f".{path.name}.tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as handle:
                stored: dict[str, Any] = {
                    name: value.cpu().numpy() for name, value in arrays.items() if value is not None
                }
                np.savez(handle, meta=np.array(json.dumps(meta)), **stored)
                handle.flush()
                os.fsync(handle.fileno())
            scratch.replace(path)
        except OSError as error:
            failure = error
            if not is_disk_full(error):
                failure = SelectionError(
                    f"state {self.directory}: cannot be written ({error}); name a writable directory"
                )
            with contextlib.suppress(OSError):
                scratch.unlink()
        self.team.agree(failure)
        for old in self._own_files():
            if old != path:
                old.unlink(missing_ok=True)

    def load(self, device: torch.device) -> SolverState | None:
        """Load the latest pass that every process has, or None. Raises SelectionError for another problem's."""
        passes = [int(path.name.split("-")[1]) for path in self._own_files()]
        shared = set.intersection(*map(set, self.team.gather(passes)))
        if not shared:
            return None
        return on_every_member(self.team, lambda: self._read(self._path(max(shared)), device))

    def _own_files(self) -> list[Path]:
        return sorted(self.directory.glob(f"pass-*-process-{self.team.rank}.npz"))

    def _read(self, path: Path, device: torch.device) -> SolverState:
        try:
            with np.load(path, allow_pickle=False) as file:
                meta = json.loads(str(file["meta"]))
                arrays = {name: torch.from_numpy(file[name]).to(device) for name in file.files if name != "meta"}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise SelectionError(f"state {path}: cannot be read ({error}); delete it to start again") from error
        stored = meta["identity"]
        different = sorted(
            (name for name, value in self.identity.items() if stored.get(name) != value), key="data".__eq__
        )
        if different:
            name = different[0]
            reason = f"{name} {stored.get(name)}, not {self.identity[name]}"
            raise SelectionError(
                f"state {self.directory}: belongs to another problem "
                f"({'other features or weights' if name == 'data' else reason}); name an empty directory or delete it"
            )
        g, f, column = (arrays[f"best_{name}"] for name in ("g", "f", "column"))
        fields: dict[str, Any] = {name: arrays.get(name) for name in ("g", "ahead", "origin", "anchor")}
        count = sum(name.startswith("point_") for name in arrays)
        return SolverState(
            best=Evaluation(g, f, column, meta["value"], meta["error"], arrays.get("nearest")),
            tried=[(arrays[f"point_{i}"], arrays[f"image_{i}"]) for i in range(count)],
            **fields,
            **{name: meta[name] for name in _SCALARS},
        )
