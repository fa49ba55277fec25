"""Load of a mixture's experts: how evenly its frozen routers spread the tokens of a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.protocol import MetricTensors

from ..models.anatomy import stacked_experts, unwrap_peft
from ..parallel.engine import Engine
from ..parallel.mesh import TOKENS

METRIC = "expert_max_violation"
"""Tokens of the fullest expert ÷ mean tokens of an expert − 1 (MaxVio, Wang et al. 2408.15664), mean over the blocks: 0
if all experts get as many, E ÷ k − 1 if all tokens go to the same k of E experts."""


class ExpertLoadMeter:
    """Counts the tokens of each expert in training passes, over the whole mesh; padding is not counted."""

    def __init__(self, engine: Engine) -> None:
        """Hook the experts of this rank's blocks; collective. Without any on a rank there is no metric."""
        self._engine = engine
        self._counts: list[Tensor] = []
        self._hooks: list[Any] = []
        self._mask: Tensor | None = None
        for module in stacked_experts(engine.model):
            counts = torch.zeros(_expert_count(module), dtype=torch.int64, device=engine.device)
            self._counts.append(counts)
            self._hooks.append(module.register_forward_pre_hook(partial(self._count, counts), with_kwargs=True))
        self._on = engine.world.any(bool(self._counts))
        if self._counts:
            for part in [engine.model] if engine.runner is None else engine.runner.parts:
                hook = unwrap_peft(part).register_forward_pre_hook(self._remember_mask, with_kwargs=True)
                self._hooks.append(hook)

    def detach(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def reset(self) -> None:
        """Forget what was counted: a step begins."""
        for counts in self._counts:
            counts.zero_()

    def metric_tensors(self) -> list[MetricTensors]:
        """Return the metric of the passes since `reset`; nothing for a model without routed experts. Collective."""
        if not self._on:
            return []
        world = self._engine.world
        total = torch.zeros(2, dtype=torch.float64, device=self._engine.device)  # summed over blocks; blocks
        if self._counts:
            counts = world.sum(torch.cat(self._counts), *TOKENS)
            loads = [own.double() for own in counts.split([len(own) for own in self._counts])]
            total[0] = torch.stack([load.max() / load.mean() - 1 for load in loads]).sum()
            total[1] = len(loads)
        total = world.sum(total, "pp")
        return [MetricTensors((total[0] / total[1]).reshape(1), lambda numbers: {METRIC: numbers[0]})]

    def _remember_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if self._mask is not None and (tokens := self._engine.tokens) is not None:
            self._mask = self._mask[:, tokens.indices(self._mask.shape[1]).to(self._mask.device)]

    def _count(self, counts: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        chosen = next((x for x in tensors if not x.is_floating_point()), None)  # experts of each token (N, k)
        if chosen is None:  # Llama 4: every expert has a row for each token, which is 0 if it is not routed there
            hits = tensors[0].detach().view(len(counts), -1, tensors[0].shape[-1]).ne(0).any(-1)
            counts += (hits * self._real_tokens(hits.shape[1], hits)).sum(1)
        else:
            real = self._real_tokens(len(chosen), chosen).repeat_interleave(chosen.shape[1])
            counts.scatter_add_(0, chosen.flatten(), real)

    def _real_tokens(self, count: int, like: Tensor) -> Tensor:
        """Return 1 for each of `count` tokens that is not padding, int64."""
        if self._mask is None or self._mask.numel() != count:
            return torch.ones(count, dtype=torch.int64, device=like.device)
        return self._mask.reshape(-1).to(like.device, torch.int64)


def _expert_count(module: nn.Module) -> int:
    return next(len(p) for p in module._parameters.values() if p is not None and p.ndim == 3)
