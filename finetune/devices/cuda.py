"""The one question that what is for CUDA asks of a device, and what follows from it for loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_cuda(device: torch.device) -> bool:
    """Whether kernels run on `device` beside the host: streams, pinned copies and kernels of its own pay there."""
    return device.type == "cuda"


def generators(device: torch.device) -> list[torch.device]:
    """The devices whose global generators are drawn from beside the CPU's, for `torch.random.fork_rng`."""
    return [device] if is_cuda(device) else []


def read_straight_to(device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told so that each tensor goes from its safetensors file to `device`.

    A model that is built on the host and moved lies in host memory whole at first, which a machine that hosts GPUs may
    not have. Nothing is told for a CPU.
    """
    return {"device_map": {"": device}} if is_cuda(device) else {}
