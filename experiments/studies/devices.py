"""Placement of a study's workers: a device each, or a share of the cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flatshift.experiments.studies.cell import Cell
from flatshift.finetune.errors import UserError


@dataclass(frozen=True)
class DevicePlacement:
    """Workers and their devices.

    jobs: number of worker processes. devices: assigned in turn; none: each cell's own choice. given: CPU threads of one
    worker; None: its share of the cores.
    """

    jobs: int
    devices: tuple[str, ...] = ()
    given: int | None = None

    @property
    def threads(self) -> int:
        """CPU threads of one worker."""
        if self.given is not None:
            return self.given
        from flatshift.finetune.planner.devices import detect_devices

        return max(1, detect_devices("cpu").count // self.jobs)

    def device(self, worker: int) -> str | None:
        """Return the device of a worker."""
        return self.devices[worker % len(self.devices)] if self.devices else None


def with_device(cell: Cell, device: str | None) -> Cell:
    """Return the cell with its device set to `device`, which is not part of its key."""
    if device is None:
        return cell
    recipe = cell.resolved.recipe
    train = dataclasses.replace(recipe.train, device=device)
    resolved = dataclasses.replace(cell.resolved, recipe=dataclasses.replace(recipe, train=train))
    return dataclasses.replace(cell, resolved=resolved)


def uses_cuda(places: DevicePlacement, cells: Sequence[Cell]) -> bool:
    """Return True if any of the cells runs on a CUDA device."""
    from flatshift.finetune.planner.devices import detect_devices

    wanted = set(places.devices) or {cell.resolved.recipe.train.device for cell in cells}
    return any(device != "cpu" and detect_devices(device).kind == "cuda" for device in wanted)


def _cuda_devices() -> int:
    from flatshift.finetune.planner.devices import detect_devices

    found = detect_devices()
    return found.count if found.kind == "cuda" else 0


def choose_devices(flag: str, wanted: str, *, count: Callable[[], int] = _cuda_devices) -> tuple[str, ...]:
    """Return the devices for the workers of a study; none: let each cell choose.

    flag: `auto` (every CUDA device, unless the recipe names one), `cpu`, or CUDA numbers `0,2`. wanted: the recipe's
    train.device. count: returns the number of CUDA devices. Raises UserError for a missing device.
    """
    if flag == "auto":
        return tuple(f"cuda:{i}" for i in range(count())) if wanted in ("auto", "cuda") else ()
    if flag == "cpu":
        return ("cpu",)
    numbers = [part.strip().removeprefix("cuda:") for part in flag.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise UserError(f"--devices {flag}: write auto, cpu, or CUDA numbers such as 0,1")
    there = count()
    for number in numbers:
        if int(number) >= there:
            raise UserError(f"--devices {flag}: there is no cuda:{number}; this machine has {there} CUDA devices")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"--devices {flag}: a device is given twice; several workers share one by --jobs")
    return tuple(f"cuda:{int(number)}" for number in numbers)
