"""BAR: balances the two factors of each LoRA layer, as SAM does implicitly, by rescaling them slightly.

For a layer with factors A, B and their gradients g_A, g_B, with learning rate η and a decaying α_t:

    nbar   |g_A| ≥ |g_B|:  A ← (1 + α_t η) A,  B ← (1 − α_t η) B;   else the other way round
    obar   |A| ≥ |B|:      A ← (1 − α_t η) A;   else B ← (1 − α_t η) B

and then the optimizer step with the unchanged gradients. Norms and factors are those before the step, as for decoupled
weight decay: here ±α_t η θ_t is added after the optimizer step, which is equivalent. Gradients are those of the whole
step before clipping (a common factor does not change the comparison). In `nbar`, a step with a non-finite gradient
rescales nothing.

Source: Li, Zhang & He, Implicit Regularization of Sharpness-Aware Minimization for Scale-Invariant Problems, NeurIPS
2024 (arXiv 2410.14802), Algorithms 2 and 3; no code was published.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import BAR, RegularizerError
from flatshift.regularizers.layers.adapters import AdapterParameters
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement
from flatshift.regularizers.methods.base import (
    SCHEDULES,
    AttachedRegularizer,
    lora_layers,
    require,
    require_nonnegative,
)
from flatshift.regularizers.protocol import MetricTensors

_log = logging.getLogger(__name__)


def scheduled_alpha(config: BAR, t: int, total_steps: int) -> float:
    """Return α_t of optimizer step `t` (from 0): constant, or falling from α to 0 over `total_steps`."""
    if config.schedule == "constant":
        return config.alpha
    done = min(t / total_steps, 1.0)
    return config.alpha * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def factor_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (A, B) of every layer whose two factors are both among the parameter `names`."""
    present = dict.fromkeys(names)
    partners = ((name, re.sub(r"\.(lora_|lora_embedding_)A\.", r".\1B.", name)) for name in present)
    return [(a, b) for a, b in partners if a != b and b in present]


class BARRegularizer(AttachedRegularizer):
    """BAR (see the module docstring); created by `flatshift.regularizers.build(BAR(...))`. Acts in
    `after_optimizer_step`, so the loop must call it."""

    def __init__(self, config: BAR) -> None:
        require_nonnegative("alpha", config.alpha)
        require(config.form in ("nbar", "obar"), "form", config.form, "`nbar` or `obar`")
        require(config.schedule in SCHEDULES, "schedule", config.schedule, "`constant`, `linear` or `cosine`")
        super().__init__("bar", "bar.")
        self.config = config
        self._adapters: AdapterParameters | None = None
        self._pairs: list[tuple[str, str]] = []
        self._layers = 0
        """Number of pairs in the whole model, over all pipeline stages."""
        self._total_steps = 0
        self._before: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        """Growth of each factor in units of α_t η: 1, 0 or −1."""
        self._grown = torch.zeros(())

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        self._check_not_attached()
        if self.config.schedule != "constant" and total_steps < 1:
            raise RegularizerError(
                f"regularizer.schedule: {self.config.schedule} falls over the optimizer steps, but there are "
                f"{total_steps}; give the number of steps, or use `constant`"
            )
        placement = placement or SINGLE_PROCESS
        adapters = AdapterParameters(model, placement)
        adapters.require_float32("BAR's factors 1 ± α·lr")
        pairs = factor_pairs(adapters.parameters)
        count = torch.tensor([len(pairs)], device=adapters.device)
        placement.sum_pipeline(count)
        if int(count) == 0:
            raise RegularizerError(
                "BAR balances the two factors of a layer, and no LoRA layer trains both; train lora_A and lora_B"
            )
        if 2 * len(pairs) < len(adapters.parameters):
            paired = {name for pair in pairs for name in pair}
            odd = [name for name in adapters.parameters if name not in paired]
            _log.warning("BAR leaves %d factors without a trained partner alone, e.g. %s", len(odd), odd[0])
        self._finish_attach(lora_layers(model), seed, placement)
        self._adapters, self._pairs, self._layers, self._total_steps = adapters, pairs, int(count), total_steps
        self._before, self._scales = {}, {}
        self._grown = torch.zeros((), dtype=torch.float64, device=adapters.device)
        return self

    @contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Iterable[int]]:
        with self._in_step(t):
            self._before, self._scales = {}, {}
            yield range(1)
            self._compare(loss_scale)

    @torch.no_grad()
    def _compare(self, loss_scale: float) -> None:
        """Decide which factor of each layer grows and which shrinks. Does not wait for the device."""
        assert self._adapters is not None
        values = self._adapters.values()
        a, b = self._squares(values if self.config.form == "obar" else self._adapters.gradients(loss_scale))
        a_is_larger = a >= b
        if self.config.form == "obar":
            a_scale, b_scale = -a_is_larger.double(), -(~a_is_larger).double()
        else:
            broken = (~(a.isfinite() & b.isfinite())).sum()
            self._placement.sum_pipeline(broken)
            a_scale = torch.where(broken == 0, a_is_larger.double() * 2 - 1, 0.0)
            b_scale = -a_scale
        for i, (name_a, name_b) in enumerate(self._pairs):
            self._scales[name_a], self._scales[name_b] = a_scale[i], b_scale[i]
        self._before = {name: values[name].clone() for name in self._scales}
        self._grown = (a_scale > b_scale).sum().double()

    def _squares(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the squared norms of A and of B of each pair, float64 (pairs,). Collective."""
        names = [name for pair in self._pairs for name in pair]
        both = self._placement.squares({name: tensors[name] for name in names}).view(-1, 2)
        return both[:, 0], both[:, 1]

    @torch.no_grad()
    def after_optimizer_step(self, rate: float) -> None:
        """Rescale the factors; runs once for every step left without an exception."""
        if self._adapters is None:
            return
        factor = scheduled_alpha(self.config, self._step, self._total_steps) * rate
        values = self._adapters.values()
        for name, scale in self._scales.items():
            values[name].add_(self._before[name] * (scale * factor))
        self._before, self._scales = {}, {}

    def metric_tensors(self) -> MetricTensors:
        """Return the metrics of the last step. `alpha`; `grown_a`, the share of layers whose A grew relative to its B;
        `balance`, Σ(|A|² − |B|²)/Σ(|A|² + |B|²) over all layers now: 0 is balanced, ±1 all in A or in B."""
        if self._adapters is None:
            return MetricTensors(torch.zeros(0), lambda numbers: {})
        a, b = self._squares(self._adapters.values())
        sums = torch.stack([(a - b).sum(), (a + b).sum(), self._grown.to(a)]).to(self._adapters.device)
        self._placement.sum_pipeline(sums)
        alpha, layers = scheduled_alpha(self.config, self._step, self._total_steps), self._layers

        def named(numbers: Sequence[float]) -> dict[str, float]:
            difference, total, grown = numbers
            return {"alpha": alpha, "grown_a": grown / layers, "balance": difference / total if total else 0.0}

        return MetricTensors(sums, named)

    def detach(self) -> None:
        super().detach()
        self._adapters, self._pairs, self._layers, self._before, self._scales = None, [], 0, {}, {}
