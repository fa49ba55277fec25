"""How curved the training loss is where the adapter lies, as plain gradient descent and as Adam see it.

Adam with a frozen preconditioner P oscillates where λ_max(P^-½ H P^-½)·lr is above `stability_threshold`. Curvature
comes from differences of gradients (`flatshift.regularizers.sharpness`), in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.layers.adapters import Adapters
from flatshift.regularizers.layers.frozen import is_quantised
from flatshift.regularizers.sharpness import AdapterSpace, Hessian, LossFunction, Sharpness, Space, lanczos, measure
from flatshift.regularizers.sharpness.spaces import Loss, Purpose

from ...compute.loss import Head, batch_loss
from ...config import Optimizer
from ...data.micro_batch import MicroBatch
from .files import stability_threshold

if TYPE_CHECKING:
    from ...tasks import Task

PRODUCTS = 12
"""Most Hessian products for an eigenvalue."""
PROBES = 3
"""Random vectors for the trace."""
FIRST = 8
"""Batches of updates whose gradients make the preconditioner that Adam begins with: so many that few of its entries
are small by chance, which λ_max would be large by."""
BEST = (0.01, 0.3)
"""Between which shares of the threshold the best rates lay (`benchmarks.rate_advice`); runs broke down from 0.1 of it
on, for it is of the start alone."""


def curvature_figures(
    model: nn.Module,
    loss: Loss,
    *,
    parameters: Mapping[str, nn.Parameter],
    preconditioner: Mapping[str, Tensor],
    seed: int,
) -> dict[str, float | None]:
    """`sharpness.lambda_max` and `.trace` of the Hessian in the LoRA factors, and `.preconditioned`: λ_max of
    P^-½ H P^-½ in everything that trains, a new head too.

    Args:
        loss: the loss over fixed rows (`flatshift.regularizers.sharpness.spaces.Loss`).
        preconditioner: P by the names of `parameters`; what it leaves out has had no update and is held fixed. Empty
            before the first update: then there is no preconditioned λ_max.
        seed: of the random directions.

    Raises:
        RegularizerError: the loss is not finite, or not the same when it is computed again.
    """
    settings = Sharpness(
        spaces=("adapter",), lanczos=PRODUCTS, probes=PROBES, sigmas=(), rhos=(), lines=0, plane_points=0
    )
    with in_float32(model):
        found = measure(model, loss, settings, seed=seed).measures["adapter"]
        figures: dict[str, float | None] = {
            "sharpness.lambda_max": found["lambda_max"].value,
            "sharpness.trace": found["trace"].value,
            "sharpness.preconditioned": None,
        }
        if preconditioner:
            figures["sharpness.preconditioned"] = preconditioned_sharpness(
                model, loss, parameters=parameters, preconditioner=preconditioner, seed=seed
            )
    return figures


def preconditioned_sharpness(
    model: nn.Module,
    loss: Loss,
    *,
    parameters: Mapping[str, nn.Parameter],
    preconditioner: Mapping[str, Tensor],
    seed: int,
) -> float:
    """λ_max of P^-½ H P^-½, with the arguments of `curvature_figures`; a P of infinity holds its number fixed."""
    of = {id(parameters[name]): value for name, value in preconditioner.items()}
    with in_float32(model):
        space = Preconditioned.of(model, lambda parameter: of.get(id(parameter)))
        start = space.signs(seed, "start", 0)
        product = Hessian.calibrated(space, LossFunction(model, loss), start)
        return lanczos(product, start, steps=PRODUCTS, tolerance=Sharpness().tolerance).largest.value


def rate_line(preconditioned: float, optimizer: Optimizer, *, rows: int) -> str:
    """Where the threshold of stability lies beside the peak of the learning rate, for a person, in one line.

    It is no recommendation, and below it is not safe: see `BEST`.

    preconditioned: λ_max of P^-½ H P^-½ at the start, positive. rows: which its loss is the mean of.
    """
    threshold = stability_threshold(optimizer.betas[0])
    edge = threshold / preconditioned
    return (
        f"learning rate: by the curvature at the start Adam oscillates above {edge:.2g} ({threshold:.3g} over λ_max "
        f"{preconditioned:.3g} of its preconditioned Hessian, {rows} rows); the peak of this run, {optimizer.lr:.2g}, "
        f"is {optimizer.lr / edge:.2g} of that, measured best rates {BEST[0]:g} to {BEST[1]:g} of it"
    )


def mean_loss(model: nn.Module, batches: Sequence[MicroBatch], *, task: Task, head: Head | None = None) -> Loss:
    """The mean over all supervised labels of `batches`, which lie on the model's device."""
    supervised = sum(micro.supervised for micro in batches)

    def loss() -> Iterator[Tensor]:
        for micro in batches:
            yield batch_loss(model, micro, task=task, head=head) / supervised

    return loss


def mean_squares(
    model: nn.Module, losses: Sequence[Loss], *, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Mean square of the gradients of `losses`, each that of one update, by the names of `parameters`, float32: what
    v̂ of Adam would be if these updates left the weights where they are (β2 close to 1)."""
    found = {name: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for name, p in parameters.items()}
    with in_float32(model):
        for loss in losses:
            _, gradients = LossFunction(model, loss).gradient(list(parameters.values()))
            for total, gradient in zip(found.values(), gradients, strict=True):
                total.addcmul_(gradient, gradient, value=1 / len(losses))
    return found


class Preconditioned(Space):
    """The coordinates u = P^½ θ of another space's θ: the Hessian in them is P^-½ H P^-½."""

    name = "preconditioned"

    def __init__(self, inner: Space, shrink: Tensor, weights: Tensor) -> None:
        """
        Args:
            shrink: P^-½ (N,); zero where θ is held fixed.
            weights: θ (N,).
        """
        self.inner, self.shrink = inner, shrink
        self.size, self.dtype, self.device = inner.size, inner.dtype, inner.device
        self.resolution = inner.resolution
        moving = shrink > 0
        self.weight_norm = float((weights[moving] / shrink[moving]).double().norm())

    @classmethod
    def of(cls, model: nn.Module, preconditioner: Callable[[nn.Parameter], Tensor | None]) -> Preconditioned:
        """Everything that `model` trains; None for a parameter that is held fixed."""
        trained = Adapters(model, heads=True)
        inner = AdapterSpace(model, trained)
        shrink, weights = [], []
        for parameter in trained.parameters.values():
            found = preconditioner(parameter)
            shrink.append(torch.zeros_like(parameter) if found is None else found.rsqrt())
            weights.append(parameter.detach())

        def flat(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat([part.reshape(-1).to(inner.device, inner.dtype) for part in parts])

        return cls(inner, flat(shrink), flat(weights))

    def gradient(self, objective: LossFunction, at: Tensor | None = None) -> tuple[float, Tensor]:
        value, gradient = self.inner.gradient(objective, None if at is None else at * self.shrink)
        return value, gradient * self.shrink

    def value(self, objective: LossFunction, at: Tensor) -> float:
        return self.inner.value(objective, at * self.shrink)

    def draw(self, seed: int, purpose: Purpose, index: int, *, exact: bool) -> Any:
        return self.inner.draw(seed, purpose, index, exact=exact)

    def value_along(self, objective: LossFunction, parts: Sequence[tuple[float, Any]]) -> float:
        return self.inner.value_along(objective, parts)


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Weights in half precision are float32 inside, value for value, and the very same tensors as before afterwards.

    Quantised layers stay as they are.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for module in model.modules():
            if isinstance(module, nn.Linear) and is_quantised(module):
                continue
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.dtype in (torch.bfloat16, torch.float16):
                    kept.append((tensor, tensor.data))
                    tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, before in kept:
            tensor.data = before
