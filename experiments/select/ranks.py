"""Selection over several processes: rank 0 reads, cleans, embeds, selects and writes; every rank maps its part of the
rows in each pass of the transport solver.

Ranks open large features by file name, on a disk that all of them see; features of a small pool are sent. A pass sends
only the data listed in `flatshift.selection.transport.ranks`: M sums, scalars, and once the subsample, which rank 0
solves while the others sleep. Every rank computes on one thread, so that results are bit-identical for any number of
ranks.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from flatshift.experiments.recipe import Resolved
from flatshift.experiments.recipe.rules import SPLIT_RULES, check_rules
from flatshift.experiments.run.console import Draw
from flatshift.experiments.select.select import select
from flatshift.finetune.config import Mesh
from flatshift.finetune.errors import UserError
from flatshift.finetune.launch import consistency, job, spawn, watchdog
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.selection import Pool, SelectionError
from flatshift.selection.features.matrix import sendable_rows
from flatshift.selection.methods.base import Progress, Selector
from flatshift.selection.methods.gotd import GotDSelector
from flatshift.selection.transport.blocks import BLOCK
from flatshift.selection.transport.settings import ITERATIONS

_MAX_RATIO = 1.5
"""Ranks that need more than this many times the median CPU time per row are reported."""


def select_on_ranks(
    resolved: Resolved, out: Path, *, quiet: bool = False, draw: Draw | None = None, on: str | None = None
) -> dict[str, Any] | None:
    """Run `select` as one of the processes that a launcher started; the manifest on rank 0, None on the others.
    Collective. on: as in `select`, whose stages rank 0 runs.

    Raises what `select` raises, and UserError for a method that is not distributed, ranks with different recipes, or
    more ranks than blocks of rows.
    """
    recipe = resolved.recipe
    check_rules(recipe, SPLIT_RULES)
    # One thread per rank: results then do not depend on the number of ranks.
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    world = spawn.join_mesh(Mesh(dp=size, stall=recipe.mesh.stall), recipe.train.device)
    # `join` creates no process group for a single process, and the solver needs one.
    if size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    consistency.check_ranks_agree(world, consistency.collect_job_facts(recipe))
    manifest = None
    if world.rank == 0:
        manifest = select(resolved, out, quiet=quiet, draw=draw, fit=_RankSolver(world).fit, on=on)
    else:
        _RankSolver(world).serve()
    spawn.destroy_process_group(world)
    return manifest


class _RankTask(NamedTuple):
    """Part of the transport problem that one rank maps: the selector's settings, (n, d) of the pool's features, their
    weights, and the target."""

    settings: dict[str, Any]
    rows: Any
    weights: np.ndarray | None
    target: Pool


class _RankSolver:
    def __init__(self, world: ProcessMesh):
        self.world = world

    def fit(self, selector: Selector, pool: Pool, target: Pool, progress: Progress) -> None:
        """On rank 0: fit `selector` on all ranks together."""
        assert isinstance(selector, GotDSelector)
        count, size = len(pool), self.world.size
        blocks = -(-count // BLOCK)
        if size > blocks:
            raise UserError(
                f"--processes {size}: {count:,} records are {blocks} blocks of {BLOCK:,} rows, and each process takes "
                f"whole ones; take {blocks} or fewer"
            )
        edges = [min(count, BLOCK * (blocks * rank // size)) for rank in range(size + 1)]
        settings = {name: value for name, value in selector.get_params().items() if name not in ("group", "device")}
        aim = Pool(features=np.asarray(target.features), weights=target.weights)
        weights = None if pool.weights is None else np.asarray(pool.weights, dtype=np.float64)
        ranges = list(itertools.pairwise(edges))
        jobs = [
            _RankTask(settings, sendable_rows(pool.features, a, b), None if weights is None else weights[a:b], aim)
            for a, b in ranges
        ]
        fitted, figures = self._map(self._receive_task(jobs), progress)
        scores, f = np.empty(count), np.empty(count)
        nearest = np.empty(count, dtype=np.int64)
        own: tuple[Any, ...] = (fitted.scores_, fitted.potentials_.f, fitted.nearest_target_)
        for rank, (low, high) in enumerate(ranges):
            for array, own_part in zip((scores, f, nearest), own, strict=True):
                array[low:high] = own_part if rank == 0 else self._receive(high - low, array.dtype, rank)
        selector.scores_, selector.nearest_target_ = scores, nearest
        selector.potentials_ = replace(fitted.potentials_, f=f, scores=scores, nearest=nearest)
        selector.diagnostics_ = fitted.diagnostics_ | {"processes": size}
        if size > 1 and (slow := _slow_rank_warning(figures)) is not None:
            warnings.warn(slow, UserWarning, stacklevel=2)

    def serve(self) -> None:
        """On every other rank: map the part that rank 0 hands out, and send its scores."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 prints it
            try:
                fitted, _ = self._map(self._receive_task(None), None)
            except SelectionError:  # raised on all ranks, and rank 0 knows the records
                job.wait_for_cause()
                raise
        for array in (fitted.scores_, fitted.potentials_.f, fitted.nearest_target_):
            dist.send(torch.from_numpy(np.ascontiguousarray(array)), dst=0)

    def _map(self, job: _RankTask, progress: Progress | None) -> tuple[GotDSelector, list[tuple[str, float]]]:
        """Return the selector of this rank's rows, and every rank's address with its CPU seconds per row of the
        passes."""
        steps, timer = 0, _CpuTimer()

        def report(stage: str, done: int, total: int) -> None:
            nonlocal steps
            steps += 1
            watchdog.report_progress(steps, stage)
            timer.note(stage, done)
            if progress is not None:
                progress(stage, done, total)

        selector = GotDSelector(**job.settings, device=str(self.world.device), group=dist.group.WORLD)
        with watchdog.no_progress_timeout("transport"):
            selector.fit(Pool(features=job.rows, weights=job.weights), job.target, progress=report)
        own = f"{socket.gethostname()}:{os.getpid()}", timer.seconds
        figures: list[Any] = [None] * self.world.size
        dist.all_gather_object(figures, own)
        return selector, figures

    def _receive_task(self, jobs: list[_RankTask] | None) -> _RankTask:
        task: list[Any] = [None]
        dist.scatter_object_list(task, jobs, src=0)
        assert isinstance(task[0], _RankTask)
        return task[0]

    def _receive(self, count: int, dtype: np.dtype[Any], rank: int) -> np.ndarray:
        tensor = torch.from_numpy(np.empty(count, dtype=dtype))
        dist.recv(tensor, src=rank)
        return tensor.numpy()


class _CpuTimer:
    """CPU seconds per row of the solver's passes, the work that every rank does.

    Measured between two reports of the same pass, so that rank 0's extra work between passes does not count.
    """

    def __init__(self) -> None:
        self._last = ("", 0, 0.0)
        self._spent, self._rows = 0.0, 0

    def note(self, stage: str, done: int) -> None:
        """Record that a pass (or another stage) has reached this many rows."""
        now = time.process_time()
        before, already, then = self._last
        if stage == before and stage != ITERATIONS and done > already:
            self._spent += now - then
            self._rows += done - already
        self._last = stage, done, now

    @property
    def seconds(self) -> float:
        """Return seconds per row; 0 if no pass reported twice."""
        return self._spent / self._rows if self._rows else 0.0


def _slow_rank_warning(figures: list[tuple[str, float]]) -> str | None:
    seconds = [value for _, value in figures]
    median, rank = float(np.median(seconds)), int(np.argmax(seconds))
    if not median or seconds[rank] <= _MAX_RATIO * median:
        return None
    return f"rank {rank} ({figures[rank][0]}) lags: {seconds[rank] / median:.1f} times the CPU time a row of the median"
