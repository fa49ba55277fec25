"""Evaluation mode that leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..compute.capabilities import capabilities


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and on exit back into the mode that each had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def forward_precision(device: torch.device | str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """Autocast to `dtype` on the device; with None, the model's own precision."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(capabilities(device).autocast, dtype=dtype)
