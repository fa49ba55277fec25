"""Availability of CUDA devices, and if there is none, one of five reasons with its fix.

Facts are read once and interpreted separately, so that every reason can be tested on any machine. Importing this module
does not import torch.
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
    """Facts about CUDA on this machine.

    torch: its version.
    built_for: `CUDA 12.8`, `ROCm 6.4`; None for a build with neither.
    driver: True if an NVIDIA driver is installed.
    visible: CUDA_VISIBLE_DEVICES; None if it is not set.
    count: devices that torch sees.
    init_error: torch's error when initialising CUDA; empty if it succeeds or was not tried.
    """

    torch: str
    built_for: str | None
    driver: bool
    visible: str | None
    count: int
    init_error: str = ""


@dataclass(frozen=True)
class CudaUnavailable:
    """Reason why there is no CUDA device: a clause without a full stop, and the nearest remedy in the imperative; empty
    if only a GPU would help."""

    problem: str
    fix: str


def probe_cuda() -> CudaStatus:
    """Read the facts; imports torch, and initialises CUDA only if torch was built for it and sees no device."""
    import torch

    version: Any = torch.version
    hip = getattr(version, "hip", None)
    built_for = f"ROCm {hip}" if hip else f"CUDA {version.cuda}" if version.cuda else None
    count = torch.cuda.device_count() if built_for else 0
    init_error = ""
    if built_for and not count:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            init_error = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CudaStatus(torch.__version__, built_for, has_driver(), os.environ.get(VISIBLE), count, init_error)


def has_driver() -> bool:
    """Return True if an NVIDIA driver is installed: its proc file, its tool, or the library that torch would load."""
    if (_PROC / "driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None:
        return True
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def diagnose_cuda(status: CudaStatus) -> CudaUnavailable | None:
    """Return the reason why torch sees no CUDA device; None if it sees one."""
    if status.count:
        return None
    if status.built_for is None:
        problem = f"torch {status.torch} is a build without CUDA"
        if not status.driver:
            return CudaUnavailable(f"{problem}, and no NVIDIA driver is here", "")
        version = status.torch.partition("+")[0]
        return CudaUnavailable(
            f"{problem}, though an NVIDIA driver is here",
            f"pip install --force-reinstall 'torch=={version}' without the index of CPU builds",
        )
    build = f"torch {status.torch} is built for {status.built_for}"
    if not status.driver and not status.built_for.startswith("ROCm"):
        return CudaUnavailable(f"{build}, but no NVIDIA driver is here", "install one if there is a GPU")
    # CUDA stops at the first empty or negative entry
    first = "0" if status.visible is None else status.visible.split(",")[0].strip()
    if not first or first.startswith("-") or first == "NoDevFiles":
        return CudaUnavailable(
            f"{VISIBLE}={status.visible!r} hides every CUDA device", f"unset {VISIBLE}, or name one in it"
        )
    error = f" ({status.init_error})" if status.init_error else ""
    visible = f", {VISIBLE}={status.visible}" if status.visible is not None else ""
    return CudaUnavailable(
        f"{build} and sees no device though a driver is here{visible}{error}",
        f"look at `nvidia-smi`, {VISIBLE} and whether the driver is new enough",
    )


def missing_device_message(name: str, status: CudaStatus) -> str:
    """Return the error message for an unavailable device `name` (cuda, cuda:N)."""
    reason = diagnose_cuda(status)
    if reason is not None:
        return f"{name}: {reason.problem}; {' or '.join(filter(None, [reason.fix, 'take train.device: cpu']))}"
    others = f"cuda:0 to cuda:{status.count - 1} are" if status.count > 1 else "cuda:0 is"
    return f"{name} is not there, {others}; take one that is, or cpu"


def is_cuda(device: torch.device) -> bool:
    """Return True if kernels really run on `device`, so that streams, pinned copies and custom kernels pay off.

    False for a device that `capabilities` only rehearses.
    """
    return device.type == "cuda"


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of products of `tensor`: autocast's if enabled, else its own."""
    import torch

    device = tensor.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else tensor.dtype


def direct_load_kwargs(device: torch.device) -> dict[str, Any]:
    """Return the `from_pretrained` arguments that load each tensor from its safetensors file directly to `device`.

    Building a model on the host and moving it needs host memory for all of it, which a machine that hosts GPUs may not
    have. Empty for a CPU.
    """
    return {"device_map": {"": device}} if is_cuda(device) else {}


def resolve_device(name: str) -> torch.device:
    """Resolve `auto` to the first CUDA device or the CPU. Raises UserError with the reason for a device that is not
    available."""
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
        raise UserError(f"train.device: {missing_device_message(name, probe_cuda())}")
    return device
