"""AdamW over an adapter, in float32 whatever the adapter is kept in, with a state that can be read and put back.

Adapters kept in bfloat16 get float32 masters: gradients are widened, the update is made on the masters, and the
adapter receives their rounding. Sharded parameters (DTensors of FSDP2) keep their state sharded in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .config import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


def _is_b(name: str) -> bool:
    """Whether a trained tensor is the factor B of LoRA, which starts at zero and of which LoRA+ speaks."""
    return ".lora_B." in name or name.endswith(".lora_embedding_A")


class AdapterOptimizer:
    """AdamW over `parameters` (by name); with `lora_plus` two learning rates (LoRA+, arXiv 2402.12354)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: Optimizer) -> None:
        self.parameters = dict(parameters)
        narrow = {name: p for name, p in self.parameters.items() if p.dtype != torch.float32}
        self.masters: dict[str, Tensor] = {name: p.detach().float().requires_grad_() for name, p in narrow.items()}
        self._updated: dict[str, Tensor] = {name: self.masters.get(name, p) for name, p in self.parameters.items()}
        # One fused pass over all of them where the device has it.
        fused = all(p.device.type in {"cpu", "cuda"} for p in self.parameters.values())
        faster = [t for name, t in self._updated.items() if settings.lora_plus is not None and _is_b(name)]
        chosen = {id(t) for t in faster}
        self._adam = torch.optim.AdamW(
            # a pipeline stage may have none
            [{"params": [t for t in self._updated.values() if id(t) not in chosen], "factor": 1.0}]
            + ([{"params": faster, "factor": settings.lora_plus}] if faster else []),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=fused,
        )

    def step(self, rate: float) -> None:
        """One update at the learning rate `rate` (of B: times `lora_plus`); the gradients are dropped afterwards."""
        for group in self._adam.param_groups:
            group["lr"] = rate * group["factor"]
        for name, master in self.masters.items():
            grad = self.parameters[name].grad
            master.grad = None if grad is None else grad.float()
        self._adam.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)
        self._adam.zero_grad(set_to_none=True)
        for name in self.masters:
            self.parameters[name].grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """By kind (`MOMENTS`, and `MASTER` where there are masters) and name: tensors laid out like the parameter."""
        found = {
            kind: {name: self._adam.state[t][kind] for name, t in self._updated.items() if t in self._adam.state}
            for kind in MOMENTS
        }
        return {**found, MASTER: dict(self.masters)} if self.masters else found

    @torch.no_grad()
    def preconditioner(self) -> dict[str, Tensor]:
        """P of Adam's step −rate · P⁻¹ m̂ by name, float32: √v̂ + ε with v̂ corrected for its start, divided by
        `lora_plus` for the factors that it speeds up. Parameters without an update yet are left out."""
        found = {}
        names = {id(tensor): name for name, tensor in self._updated.items()}
        for group in self._adam.param_groups:
            for tensor in group["params"]:
                if tensor in self._adam.state:
                    state = self._adam.state[tensor]
                    second = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
                    found[names[id(tensor)]] = second.sqrt_().add_(group["eps"]).div_(group["factor"])
        return found

    def counters(self) -> dict[str, Tensor]:
        """Updates that each parameter has had, scalars."""
        return {name: self._adam.state[t]["step"] for name, t in self._updated.items() if t in self._adam.state}

    def expect(self, names: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Make room for the state of a checkpoint with counters `names`: the tensors of `moments`, to be filled."""
        for name, counter in names.items():
            if (tensor := self._updated.get(name)) is None:
                continue  # of another pipeline stage
            place = tensor.device if self._adam.defaults["fused"] else "cpu"
            self._adam.state[tensor] = {"step": counter.to(place)} | {
                kind: torch.zeros_like(tensor, requires_grad=False) for kind in MOMENTS
            }
        return self.moments()
