"""State of a running stage and its checkpoints: full tensors, saved from any mesh and restored on any mesh.

On a mesh every rank writes the parts that it owns, and the main one joins them, one tensor in memory at a time; a rank
reads its parts only.

On disk `step-N/{state.safetensors,state.json}`, complete and verified, the newest few kept. Each is written to a
temporary name, fsynced, renamed, then re-opened and compared. A reader takes the newest checkpoint whose content
matches the digest in its state.json, so a killed save or a damaged file costs at most the steps since the previous one.
No pickle: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..atomic import atomic_directory, remove_leftovers, write_json
from ..config import SpikeRecovery
from ..digests import file_sha256, record_digest
from ..launch import watchdog
from ..parallel.engine import Engine
from ..parallel.layout import join_parts
from ..run_directory import METRICS, disk_full_interrupts, last_attempt, read_metrics
from .optimizer import AdapterOptimizer
from .stage import TrainingStage


@dataclass
class TrainingState:
    """Content of a checkpoint except model and optimizer tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_dev_loss: float | None = None
    best_accuracy: float | None = None
    best_metric: float | None = None
    misses: int = 0
    evaluation_pending: bool = False
    """True while the dev evaluation after `step` is still to be done."""
    stopped_early: bool = False
    skipped: int = 0
    """Steps whose loss or gradient was not finite; `skipped_in_a_row`: since the last applied one."""
    skipped_in_a_row: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)
    """State of `flatshift.finetune.train.divergence.LossScale`; empty unless the stage computes in fp16."""
    recent: list[float] = field(default_factory=list)
    """Losses of the last steps, up to `train.spikes.window` of them."""
    skipped_ranges: list[list[int]] = field(default_factory=list)
    """Batches [first, stop) skipped because of spikes (`batch_index`)."""
    rewinds: list[dict[str, Any]] = field(default_factory=list)
    """Spikes that the stage rolled back for: `step`, `loss`, `limit`, and `to`, the step of the checkpoint."""
    callbacks: list[dict[str, Any] | None] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    """Adapter after `best_step`, this rank's part; empty while it is the live one or there is no dev set."""


class Checkpointer:
    """Saves and restores a stage. Every rank of a mesh calls both methods; the main one writes."""

    def __init__(self, engine: Engine, optimizer: AdapterOptimizer, stage: TrainingStage) -> None:
        self.engine, self.optimizer, self.regularizer = engine, optimizer, stage.regularizer
        self.run, self.stage, self.train = stage.run, stage.name, stage.train
        self.settings, self.seed = stage.optimizer, stage.seed
        self.progress = TrainingState()
        self.saved_step = -1
        """Step of the newest checkpoint; −1 without one."""
        self.attempt = 1

    def restore(self) -> None:
        """Restore the newest valid checkpoint of the stage, if there is one; count the attempt."""
        if self.engine.is_main:  # removes leftovers of a killed save, so one rank does it before the others read
            drop_checkpoints(self.run.state, other_than=self.stage)
        checkpoint = self._latest_on_all_ranks()
        self.attempt = last_attempt(read_metrics(self.run.stage(self.stage) / METRICS), self.stage) + 1
        if checkpoint is None:
            self.run.log(f"{self.stage}: attempt {self.attempt} from step 0")
            return
        self._apply(checkpoint)
        self.run.log(f"{self.stage}: attempt {self.attempt} continues after step {checkpoint.step}")

    def _latest_on_all_ranks(self, last: float = math.inf) -> Checkpoint | None:
        """Return the newest valid checkpoint up to step `last`, once the main rank has removed damaged ones, and those
        after `last` if there is one before."""
        latest = partial(latest_checkpoint, self.run.state, stage=self.stage, warn=self.run.log, last=last)
        if self.engine.is_main and latest() is not None:
            for step in checkpoint_steps(self.run.state):
                if step > last:
                    _remove_directory(self.run.state / f"step-{step}")
        self.engine.world.wait()
        return latest()

    def _apply(self, checkpoint: Checkpoint) -> None:
        context, parameters = f"checkpoint {checkpoint.path}", self.engine.parameters
        groups, metadata = partial(select_group, checkpoint.tensors), checkpoint.meta
        self.engine.load_full_tensors(groups("adapter"), parameters, context=context)
        for kind, moments in self.optimizer.expect(clone_tensors(groups("step"))).items():
            self.engine.load_full_tensors(groups(kind), moments, context=context)
        self.regularizer.load_state_dict(
            {name: tensor.to(self.engine.device, copy=True) for name, tensor in groups("regularizer").items()}
        )
        platform, before = self._platform(), metadata["place"]
        if platform != before:
            self.run.log(f"warning: {before} before, {platform} now: the same curve to rounding, not the same bits")
        self.progress = TrainingState(step=checkpoint.step, **metadata["progress"])
        if best := groups("best"):
            self.progress.best = clone_tensors(parameters)
            self.engine.load_full_tensors(best, self.progress.best, context=context)
        self.attempt = max(self.attempt, int(metadata["attempt"]) + 1)
        self.saved_step = checkpoint.step

    def rewind(self, spike: dict[str, Any], *, reattach: Callable[[], None]) -> bool:
        """Roll back for `spike` (`step, loss, limit`) to the checkpoint of `rollback_step`, and skip the batches from
        there to the spike, at least `train.spikes.skip` of them. Every rank calls this.

        The checkpoint is rewritten with the skipped batches, so a run that is killed afterwards resumes from here;
        killed before, it meets the same spike again.

        reattach: resets the regularizer to its state before the first step.

        Returns False if there is no checkpoint to roll back to.
        """
        spikes, now, attempt = self.train.spikes, self.progress, self.attempt
        assert spikes is not None
        checkpoint = self._latest_on_all_ranks(rollback_step(now.step, spikes, self.train.save_every))
        if checkpoint is None:
            return False
        reattach()
        self._apply(checkpoint)
        self.attempt = attempt + 1
        first = batch_index(checkpoint.step, now.skipped_ranges)
        stop = max(first + spikes.skip, batch_index(now.step, now.skipped_ranges) + 1)
        self.progress.skipped_ranges = merge_skipped_ranges(now.skipped_ranges, first, stop)
        self.progress.rewinds = [*now.rewinds, {**spike, "to": checkpoint.step}]
        self.saved_step = -1  # so that the checkpoint of this step is written again
        self.save()
        return True

    def _checkpoints_to_keep(self) -> int:
        """Return the number of checkpoints to keep, including the new one: at least those that spikes may roll back to.

        Another spike may follow right after a rollback, so the distances of all remaining rollbacks add up.
        """
        if self.train.spikes is None:
            return self.train.keep
        oldest = self.progress.step
        for _ in range(self.train.spikes.most - len(self.progress.rewinds)):
            oldest = rollback_step(oldest, self.train.spikes, self.train.save_every)
        return max(self.train.keep, 1 + sum(step >= oldest for step in checkpoint_steps(self.run.state)))

    def save(self) -> None:
        """Write a checkpoint of the completed updates, unless this step has one."""
        state = self.progress
        if self.saved_step == state.step:
            return
        metadata = {
            "stage": self.stage,
            "attempt": self.attempt,
            "progress": {name: value for name, value in vars(state).items() if name not in ("best", "step")},
            "data": {"step": state.step, "batch": batch_index(state.step, state.skipped_ranges)},
            "random": {"seed": self.seed},
            "place": self._platform(),
            "scheduler": {**asdict(self.settings), "steps": self.train.steps},
            "regularizer": type(self.regularizer).__name__,
        }
        with watchdog.no_progress_timeout("saving a checkpoint"):
            tensors = self._save_parts()
            if self.engine.is_main:
                self.run.sync_metrics(self.stage)
                save_checkpoint(self.run.state, state.step, tensors, metadata, keep=self._checkpoints_to_keep())
            self.engine.world.wait()
        self.saved_step = state.step

    def _save_parts(self) -> dict[str, Tensor] | Path:
        """Return the tensors of the checkpoint; on a mesh the folder where every rank has written the parts it owns."""
        engine, adapter = self.engine, dict[str, Tensor](self.engine.parameters)
        groups: dict[str, Mapping[str, Tensor]] = {
            "adapter": adapter,
            **self.optimizer.moments(),
            "best": self.progress.best,
        }
        wholes: dict[str, Mapping[str, Tensor]] = {
            "step": engine.union(self.optimizer.counters()),
            "regularizer": engine.union(self.regularizer.state_dict()),
        }
        if engine.world.size == 1:
            return flatten_groups(**groups, **wholes)
        folder = self.run.state / f".step-{self.progress.step}.parts.tmp"
        with disk_full_interrupts(f"saving a checkpoint in {self.run.state}"):
            engine.save_parts(folder, groups, wholes=wholes)
        return folder

    def _platform(self) -> dict[str, Any]:
        """Return everything but the state that determines the last bits of a result."""
        return {
            "device": self.engine.device.type,
            "mesh": str(self.engine.world),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


FORMAT = 1
TENSORS, META = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from disk: completed steps, named tensors (on the CPU, mapped from the file), and everything
    else."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save_checkpoint(
    directory: Path, step: int, tensors: Mapping[str, Tensor] | Path, metadata: Mapping[str, Any], *, keep: int
) -> Path:
    """Write `directory/step-<step>` and drop all but the newest `keep` checkpoints; return its path.

    tensors: or the folder of their parts, which is removed.

    Raises Interrupted on a full disk (earlier checkpoints are untouched), RuntimeError if the files do not read back as
    written.
    """
    from safetensors.torch import save_file

    target = directory / f"step-{step}"
    with disk_full_interrupts(f"saving a checkpoint in {directory}"), atomic_directory(target) as temporary:
        if isinstance(tensors, Path):
            join_parts(sorted(tensors.glob("*.safetensors")), temporary / TENSORS)
            shutil.rmtree(tensors)
        else:
            host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(host, temporary / TENSORS)
        record = {"format": FORMAT, "step": step, "sha256": file_sha256(temporary / TENSORS), **metadata}
        write_json(temporary / META, {**record, "self": record_digest(record)})
    if read_checkpoint(target) is None:
        raise RuntimeError(f"the checkpoint {target} does not read back as it was written")
    for stale in checkpoint_steps(directory)[max(keep, 1) :]:
        _remove_directory(directory / f"step-{stale}")
    return target


def latest_checkpoint(
    directory: Path, *, stage: str, warn: Callable[[str], None], last: float = math.inf
) -> Checkpoint | None:
    """Return the newest valid checkpoint of `stage` in `directory`, up to step `last`; None if there is none. Removes
    leftovers of killed saves.

    Each damaged one on the way is reported through `warn` and removed, so that it does not count among those to keep.
    """
    remove_leftovers(directory)
    for step in (step for step in checkpoint_steps(directory) if step <= last):
        checkpoint = read_checkpoint(directory / f"step-{step}")
        if checkpoint is None:
            warn(f"warning: checkpoint {directory.name}/step-{step} is damaged or incomplete; taking the one before")
            _remove_directory(directory / f"step-{step}")
        elif checkpoint.meta.get("stage") == stage:
            return checkpoint
    return None


def resume_step(directory: Path, *, stage: str) -> int:
    """Return the step of the newest checkpoint of `stage` by its metadata; 0 without one."""
    for step in checkpoint_steps(directory):
        if (_read_metadata(directory / f"step-{step}") or {}).get("stage") == stage:
            return step
    return 0


def drop_checkpoints(directory: Path, *, other_than: str) -> None:
    """Remove the checkpoints of every stage but `other_than` (a finished stage needs none)."""
    for step in checkpoint_steps(directory):
        folder = directory / f"step-{step}"
        metadata = _read_metadata(folder)
        if metadata is None or metadata.get("stage") != other_than:
            _remove_directory(folder)


def checkpoint_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint directory, valid or not, newest first."""
    if not directory.is_dir():
        return []
    names = [p.name.removeprefix("step-") for p in directory.glob("step-*") if p.is_dir()]
    return sorted((int(n) for n in names if n.isdigit()), reverse=True)


def _remove_directory(folder: Path) -> None:
    """Remove a directory; rename it first, so that a kill midway leaves a leftover to sweep, not half a checkpoint."""
    hidden = folder.with_name(f".{folder.name}.gone.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.replace(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _read_metadata(folder: Path) -> dict[str, Any] | None:
    try:
        metadata = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return metadata if isinstance(metadata, dict) else None


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in `folder`; None if it is damaged in any way."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    metadata = _read_metadata(folder)
    try:
        if metadata is None or metadata.pop("self", None) != record_digest(metadata) or metadata["format"] != FORMAT:
            return None
        if file_sha256(folder / TENSORS) != metadata["sha256"]:
            return None
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError):
        return None
    return Checkpoint(folder, int(metadata["step"]), tensors, metadata)


def flatten_groups(**groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flatten groups of named tensors into one mapping `group/name`."""
    return {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


def select_group(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    """Return the tensors of one group of `flatten_groups`, by their own names."""
    prefix = f"{group}/"
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a detached copy of each tensor."""
    return {name: torch.clone(tensor.detach()) for name, tensor in tensors.items()}


def batch_index(step: int, skipped_ranges: Sequence[Sequence[int]]) -> int:
    """Return the batch (from 0) of the step from `step` to `step + 1`: the step-th that is not skipped."""
    index = step
    for first, stop in skipped_ranges:
        if index < first:
            break
        index += stop - first
    return index


def merge_skipped_ranges(skipped_ranges: Sequence[Sequence[int]], first: int, stop: int) -> list[list[int]]:
    """Return the union of `skipped_ranges` and the batches [first, stop)."""
    merged: list[list[int]] = []
    for low, high in sorted([tuple(skipped) for skipped in skipped_ranges] + [(first, stop)]):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return merged


def rollback_step(step: int, spikes: SpikeRecovery, save_every: int) -> int:
    """Return the step of the regular checkpoint to roll back to for a spike in the step from `step` to `step + 1`.

    The newest multiple of `save_every` that is at least `spikes.back` steps before, or 0. Not simply the newest file:
    an interrupted run, which saved at other steps too, must roll back as far as an uninterrupted one.
    """
    return max((step - spikes.back) // save_every * save_every, 0)
