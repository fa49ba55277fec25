"""Checkpoints of a running stage: `step-N/{state.safetensors,state.json}`, whole, verified, the newest few kept.

Written to a temporary name, fsynced, renamed, then re-opened and compared. A reader takes the newest checkpoint whose
content has the digest that its state.json names, so a save that was killed or a file that was damaged costs at most
the steps since the one before. No pickle: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..atomic import replacing_directory, sweep_leftovers, write_json
from ..digests import digest, record_digest
from ..run_directory import disk_full_interrupts

FORMAT = 1
TENSORS, META = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """What was read: completed updates, named tensors (on the CPU), and everything else."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save_checkpoint(
    directory: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, keep: int
) -> Path:
    """Write `directory/step-<step>` and drop all but the newest `keep` checkpoints; returns its path.

    Raises:
        Interrupted: the disk is full (earlier checkpoints are untouched).
        RuntimeError: what was written does not read back.
    """
    from safetensors.torch import save_file

    target = directory / f"step-{step}"
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with disk_full_interrupts(f"saving a checkpoint in {directory}"), replacing_directory(target) as temporary:
        save_file(host, temporary / TENSORS)
        record = {"format": FORMAT, "step": step, "sha256": digest(temporary / TENSORS), **meta}
        write_json(temporary / META, {**record, "self": record_digest(record)})
    if _read(target) is None:
        raise RuntimeError(f"the checkpoint {target} does not read back as it was written")
    for stale in steps(directory)[max(keep, 1) :]:
        _remove(directory / f"step-{stale}")
    return target


def latest_checkpoint(directory: Path, *, stage: str, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest valid checkpoint of `stage` in `directory`; None if there is none. Sweeps what killed saves left.

    Each damaged one on the way is reported through `warn` and removed, so that it is not counted among those to keep.
    """
    sweep_leftovers(directory)
    for step in steps(directory):
        found = _read(directory / f"step-{step}")
        if found is None:
            warn(f"warning: checkpoint {directory.name}/step-{step} is damaged or incomplete; taking the one before")
            _remove(directory / f"step-{step}")
        elif found.meta.get("stage") == stage:
            return found
    return None


def is_valid(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is as it was written."""
    return _read(folder) is not None


def drop_checkpoints(directory: Path, *, other_than: str) -> None:
    """Remove the checkpoints of every stage but `other_than` (a finished stage needs none)."""
    for step in steps(directory):
        folder = directory / f"step-{step}"
        meta = _meta(folder)
        if meta is None or meta.get("stage") != other_than:
            _remove(folder)


def drop_later(directory: Path, step: int) -> None:
    """Remove the checkpoints of more than `step` updates, the newest first."""
    for later in steps(directory):
        if later > step:
            _remove(directory / f"step-{later}")


def steps(directory: Path) -> list[int]:
    """Steps that have a checkpoint directory, newest first, whether valid or not."""
    if not directory.is_dir():
        return []
    names = [p.name.removeprefix("step-") for p in directory.glob("step-*") if p.is_dir()]
    return sorted((int(n) for n in names if n.isdigit()), reverse=True)


def _remove(folder: Path) -> None:
    """Rename first, so that a kill half-way leaves a leftover to sweep, not half a checkpoint."""
    hidden = folder.with_name(f".{folder.name}.gone.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.replace(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _meta(folder: Path) -> dict[str, Any] | None:
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return meta if isinstance(meta, dict) else None


def _read(folder: Path) -> Checkpoint | None:
    """The checkpoint in `folder`, or None where anything about it is not as it was written."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    meta = _meta(folder)
    try:
        if meta is None or meta.pop("self", None) != record_digest(meta) or meta["format"] != FORMAT:
            return None
        if digest(folder / TENSORS) != meta["sha256"]:
            return None
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError):
        return None
    return Checkpoint(folder, int(meta["step"]), {n: t.clone() for n, t in tensors.items()}, meta)


def pack(**groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Groups of named tensors as one flat mapping `group/name`."""
    return {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}


def unpack(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    """The tensors of one group of `pack`, by their own names."""
    prefix = f"{group}/"
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def clone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A detached copy of each tensor."""
    return {name: torch.clone(tensor.detach()) for name, tensor in tensors.items()}
