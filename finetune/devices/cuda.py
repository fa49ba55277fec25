"""The one question that what is for CUDA asks of a device, and what follows from it for loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def is_cuda(device: torch.device) -> bool:
    """Whether kernels run on `device` beside the host: streams, pinned copies and kernels of its own pay there."""
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
