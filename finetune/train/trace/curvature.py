"""Curvature of the training loss at the adapter's weights, for plain gradient descent and for Adam.

Adam with a frozen preconditioner P oscillates if λ_max(P^-½ H P^-½)·lr is above `stability_threshold`. Curvature is
computed from differences of gradients (`flatshift.regularizers.sharpness`), in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.layers.adapters import AdapterParameters
from flatshift.regularizers.layers.frozen import is_quantised
from flatshift.regularizers.sharpness import Sharpness, measure
from flatshift.regularizers.sharpness.measures import Hessian, lanczos
from flatshift.regularizers.sharpness.spaces import AdapterSpace, Loss, LossFunction, Purpose, Space

from ...compute.loss import Head, batch_loss
from ...compute.micro_batch import MicroBatch
from ...config import Optimizer
from ...tasks import Task
from .files import stability_threshold

PRODUCTS = 12
"""Maximum Hessian products per eigenvalue."""
PROBES = 3
"""Random vectors for the trace."""
FIRST = 8
"""Batches whose gradients form Adam's initial preconditioner: enough that few of its entries are small by chance, which
would inflate λ_max."""
BEST = (0.01, 0.3)
"""Range of the best learning rates as shares of the threshold (`benchmarks.rate_advice`); runs diverged from 0.1 of it
on, because it describes the start only."""


def curvature_metrics(
    model: nn.Module,
    loss: Loss,
    *,
    parameters: Mapping[str, nn.Parameter],
    preconditioner: Mapping[str, Tensor],
    seed: int,
) -> dict[str, float | None]:
    """Return `sharpness.lambda_max` and `.trace` of the Hessian in the LoRA factors, and `.preconditioned`: λ_max of
    P^-½ H P^-½ in all trainable parameters, including a new head.

    loss: the loss over fixed rows (`flatshift.regularizers.sharpness.spaces.Loss`).
    preconditioner: P by the names of `parameters`; parameters without an entry have had no step and are held fixed.
        Empty before the first step: then there is no preconditioned λ_max.
    seed: of the random directions.

    Raises RegularizerError if the loss is not finite, or differs when it is computed again.
    """
    settings = Sharpness(
        spaces=("adapter",), lanczos=PRODUCTS, probes=PROBES, sigmas=(), rhos=(), lines=0, plane_points=0
    )
    with in_float32(model):
        measures = measure(model, loss, settings, seed=seed).measures["adapter"]
        metrics: dict[str, float | None] = {
            "sharpness.lambda_max": measures["lambda_max"].value,
            "sharpness.trace": measures["trace"].value,
            "sharpness.preconditioned": None,
        }
        if preconditioner:
            metrics["sharpness.preconditioned"] = preconditioned_sharpness(
                model, loss, parameters=parameters, preconditioner=preconditioner, seed=seed
            )
    return metrics


def preconditioned_sharpness(
    model: nn.Module,
    loss: Loss,
    *,
    parameters: Mapping[str, nn.Parameter],
    preconditioner: Mapping[str, Tensor],
    seed: int,
) -> float:
    """Return λ_max of P^-½ H P^-½, with the arguments of `curvature_metrics`; an infinite P holds its entry fixed."""
    by_id = {id(parameters[name]): value for name, value in preconditioner.items()}
    with in_float32(model):
        space = PreconditionedSpace.of(model, lambda parameter: by_id.get(id(parameter)))
        start = space.signs(seed, "start", 0)
        product = Hessian.calibrated(space, LossFunction(model, loss), start)
        return lanczos(product, start, steps=PRODUCTS, tolerance=Sharpness().tolerance).largest.value


def format_rate_line(preconditioned: float, optimizer: Optimizer, *, rows: int) -> str:
    """Format the stability threshold compared with the peak learning rate, as one line for the user.

    It is not a recommendation, and rates below it are not safe: see `BEST`.

    preconditioned: λ_max of P^-½ H P^-½ at the start, positive. rows: number of rows its loss averages over.
    """
    threshold = stability_threshold(optimizer.betas[0])
    edge = threshold / preconditioned
    return (
        f"learning rate: by the curvature at the start Adam oscillates above {edge:.2g} ({threshold:.3g} over λ_max "
        f"{preconditioned:.3g} of its preconditioned Hessian, {rows} rows); the peak of this run, {optimizer.lr:.2g}, "
        f"is {optimizer.lr / edge:.2g} of that, measured best rates {BEST[0]:g} to {BEST[1]:g} of it"
    )


def mean_loss(model: nn.Module, batches: Sequence[MicroBatch], *, task: Task, head: Head | None = None) -> Loss:
    """Return the mean loss over all target labels of `batches`, which are on the model's device; with `task.dft`
    without its weights, whose slope the gradient leaves out."""
    task = task.replace(dft=False) if task.dft else task
    supervised = sum(micro.supervised for micro in batches)

    def loss() -> Iterator[Tensor]:
        for micro in batches:
            yield batch_loss(model, micro, task=task, head=head) / supervised

    return loss


def mean_squared_gradients(
    model: nn.Module, losses: Sequence[Loss], *, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return the mean square of the gradients of `losses`, one per step, by the names of `parameters`, float32.

    This is Adam's v̂ if these steps left the weights unchanged (β2 close to 1).
    """
    squares = {name: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for name, p in parameters.items()}
    with in_float32(model):
        for loss in losses:
            _, gradients = LossFunction(model, loss).gradient(list(parameters.values()))
            for total, gradient in zip(squares.values(), gradients, strict=True):
                total.addcmul_(gradient, gradient, value=1 / len(losses))
    return squares


class PreconditionedSpace(Space):
    """Coordinates u = P^½ θ of another space's θ: the Hessian in them is P^-½ H P^-½."""

    name = "preconditioned"

    def __init__(self, inner: Space, shrink: Tensor, weights: Tensor) -> None:
        """Create the space. shrink: P^-½ (N,), zero where θ is held fixed; weights: θ (N,)."""
        self.inner, self.shrink = inner, shrink
        self.size, self.dtype, self.device = inner.size, inner.dtype, inner.device
        self.resolution = inner.resolution
        moving = shrink > 0
        self.weight_norm = float((weights[moving] / shrink[moving]).double().norm())

    @classmethod
    def of(cls, model: nn.Module, preconditioner: Callable[[nn.Parameter], Tensor | None]) -> PreconditionedSpace:
        """Return the space of everything that `model` trains.

        preconditioner: returns P of a parameter; None for one that is held fixed.
        """
        trained = AdapterParameters(model, heads=True)
        inner = AdapterSpace(model, trained)
        shrink, weights = [], []
        for parameter in trained.parameters.values():
            diagonal = preconditioner(parameter)
            # an infinite P gives 0, which holds its entry fixed
            root = torch.zeros_like(parameter) if diagonal is None else diagonal.rsqrt()
            shrink.append(root.reshape(-1).to(inner.device, inner.dtype))
            weights.append(parameter.detach().reshape(-1).to(inner.device, inner.dtype))
        return cls(inner, torch.cat(shrink), torch.cat(weights))

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
    """Widen half-precision weights to float32 inside, value for value, and restore the same tensors on exit.

    Quantised layers are unchanged.
    """
    narrow: list[tuple[Tensor, Tensor]] = []
    try:
        for module in model.modules():
            if isinstance(module, nn.Linear) and is_quantised(module):
                continue
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.dtype in (torch.bfloat16, torch.float16):
                    narrow.append((tensor, tensor.data))
                    tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, before in narrow:
            tensor.data = before
