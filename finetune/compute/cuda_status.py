"""Whether a CUDA device is there, and if not, which of five reasons it is and what to do about it.

Facts are read once and judged apart, so that every reason can be tried without the machine that has it. Importing
it imports no torch: `flatshift doctor` asks too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_PROC = Path("/proc")
_LIBRARY = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class CudaStatus:
    """What can be told of CUDA here."""

    torch: str
    """Its version."""
    built_for: str | None
    """`CUDA 12.8`, `ROCm 6.4`; None for a build that has neither."""
    driver: bool
    """Whether an NVIDIA driver is installed."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""
    count: int
    """Devices that torch sees."""
    said: str = ""
    """What torch says when it is asked to start CUDA; empty where it starts, or was not asked."""


@dataclass(frozen=True)
class CudaUnavailable:
    """Why there is no CUDA device."""

    what: str
    """In a clause, without a full stop."""
    fix: str
    """The nearest thing to do about it, in the imperative; empty where nothing but a GPU would help."""


def probe_cuda() -> CudaStatus:
    """Read the facts; imports torch, and starts CUDA only where torch was built for it and sees no device."""
    import torch

    version: Any = torch.version
    hip = getattr(version, "hip", None)
    built = f"ROCm {hip}" if hip else f"CUDA {version.cuda}" if version.cuda else None
    count = torch.cuda.device_count() if built else 0
    said = ""
    if built and not count:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CudaStatus(torch.__version__, built, has_driver(), os.environ.get(VISIBLE), count, said)


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed: its own file, its tool, or the library that torch would load."""
    if (_PROC / "driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None:
        return True
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def absence(found: CudaStatus) -> CudaUnavailable | None:
    """Why torch sees no CUDA device; None where it sees one."""
    if found.count:
        return None
    if found.built_for is None:
        what = f"torch {found.torch} is a build without CUDA"
        if found.driver:
            wanted = f"torch=={found.torch.partition('+')[0]}"
            return CudaUnavailable(
                f"{what}, though an NVIDIA driver is here",
                f"pip install --force-reinstall '{wanted}' without the index of CPU builds",
            )
        return CudaUnavailable(f"{what}, and no NVIDIA driver is here", "")
    here = f"torch {found.torch} is built for {found.built_for}"
    if not found.driver and not found.built_for.startswith("ROCm"):
        return CudaUnavailable(f"{here}, but no NVIDIA driver is here", "install one")
    if found.visible is not None and _hides_all(found.visible):
        return CudaUnavailable(
            f"{VISIBLE}={found.visible!r} hides every CUDA device", f"unset {VISIBLE}, or name one in it"
        )
    words = f" ({found.said})" if found.said else ""
    hidden = f", {VISIBLE}={found.visible}" if found.visible is not None else ""
    return CudaUnavailable(
        f"{here} and sees no device though a driver is here{hidden}{words}",
        f"look at `nvidia-smi`, {VISIBLE} and whether the driver is new enough",
    )


def missing(name: str, found: CudaStatus) -> str:
    """What a run is told whose device `name` (cuda, cuda:N) is not there."""
    reason = absence(found)
    if reason is not None:
        return f"{name}: {reason.what}; {' or '.join(filter(None, [reason.fix, 'take train.device: cpu']))}"
    others = f"cuda:0 to cuda:{found.count - 1} are" if found.count > 1 else "cuda:0 is"
    return f"{name} is not there, {others}; take one that is, or cpu"


def _hides_all(visible: str) -> bool:
    """Whether a value of CUDA_VISIBLE_DEVICES leaves no device: CUDA stops at the first empty or negative one."""
    first = visible.split(",")[0].strip()
    return not first or first.startswith("-") or first == "NoDevFiles"


def is_cuda(device: torch.device) -> bool:
    """Whether kernels really run on `device`, which `capabilities` may only rehearse: streams, pinned copies and
    kernels of its own pay there."""
    return device.type == "cuda"


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that products of `tensor` are made in: autocast's inside of it, else its own."""
    import torch

    device = tensor.device.type
    inside = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if inside else tensor.dtype


def read_straight_to(device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told so that each tensor goes from its safetensors file to `device`.

    A model that is built on the host and moved lies in host memory whole at first, which a machine that hosts GPUs may
    not have. Nothing is told for a CPU.
    """
    return {"device_map": {"": device}} if is_cuda(device) else {}


def resolve_device(name: str) -> torch.device:
    """`auto` → the first CUDA device or the CPU; raises UserError for a device that is not there, with the reason."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"train.device: {name!r} is no device; take auto, cpu, cuda or cuda:N") from None
    if device.type not in {"cpu", "cuda"}:
        raise UserError(f"train.device: {name!r} is not served; take auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"train.device: {missing(name, probe_cuda())}")
    return device
