"""AdamW whose moments are kept in 8 bits, or in host memory that a CUDA device pages in (bitsandbytes).

8-bit moments are quantised in blocks of 256 values with a dynamic map (Dettmers et al., 2110.02861); tensors of fewer
than 4096 values keep float32 moments, as the library has it. Paged moments are those of QLoRA (2305.14314, §3).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compute.capabilities import capabilities
from ..config import Optimizer, OptimizerKind
from ..errors import UserError
from ..models.quantize import GET, import_library
from ..planner.memory import QUANTISED_BLOCK, QUANTISED_FROM

KINDS = ("state1", "state2", "absmax1", "absmax2")
"""Both moments, and the scales of their blocks where they are quantised."""


def check_optimizer(kind: OptimizerKind, *, device: str | None = None) -> None:
    """Raise UserError where `kind` needs a package or a device that is not here.

    device: `cpu` or `cuda`, where it is known already.
    """
    if kind in ("adamw", "gauss-newton"):
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"optimizer.kind: {kind} needs the package bitsandbytes; {GET}, or take adamw")
    if kind.startswith("paged") and device not in (None, "cuda"):
        plain = "adamw-8bit" if kind.endswith("8bit") else "adamw"
        raise UserError(
            f"optimizer.kind: {kind} pages host memory into a CUDA device, and this is {device}; take {plain}"
        )


class LowBitAdam:
    """bitsandbytes' AdamW, with a state that can be read by name and put back."""

    def __init__(self, groups: Sequence[dict[str, Any]], settings: Optimizer, *, device: torch.device) -> None:
        """Raises UserError where the package or the device is missing (`check_optimizer`)."""
        check_optimizer(settings.kind, device=capabilities(device).kind)
        library: Any = import_library()
        self._dequantize = library.functional.dequantize_blockwise
        self.inner: Any = library.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            optim_bits=8 if settings.kind.endswith("8bit") else 32,
            min_8bit_size=QUANTISED_FROM,
            is_paged=settings.kind.startswith("paged"),
        )

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Moments and scales of a tensor by kind; empty before its first update."""
        found = self.inner.state.get(tensor, {})
        return {kind: found[kind] for kind in KINDS if kind in found}

    def updates(self, tensor: Tensor) -> Tensor:
        """How many it has had, scalar."""
        return torch.tensor(float(self.inner.state[tensor]["step"]))

    def second_moment(self, tensor: Tensor) -> Tensor:
        """v, float32, on the tensor's device (paged moments count as host memory), as the next update will read it."""
        state = self.inner.state[tensor]
        if state["state2"].dtype == torch.float32:
            return state["state2"].to(tensor.device, copy=True)
        moment, scales, code = (state[kind].to(tensor.device) for kind in ("state2", "absmax2", "qmap2"))
        return self._dequantize(moment, absmax=scales, code=code, blocksize=QUANTISED_BLOCK)

    def prepare(self, tensor: Tensor, updates: Tensor) -> None:
        """Room for the state of a tensor that has had so many updates."""
        for number, group in enumerate(self.inner.param_groups):
            for place, each in enumerate(group["params"]):
                if each is tensor:
                    self.inner.init_state(group, tensor, number, place)
        self.inner.state[tensor]["step"] = int(updates)
