"""The one question that what is for CUDA asks of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_cuda(device: torch.device) -> bool:
    """Whether kernels run on `device` beside the host: streams, pinned copies and kernels of its own pay there."""
    return device.type == "cuda"
