"""The loss that a neighbourhood is judged by: evaluated and differentiated without leaving anything behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regularizers.errors import RegularizerError
from regularizers.stored import is_quantised

Loss = Callable[[], Tensor | Iterable[Tensor]]
"""Gives the loss over fixed batches: a scalar, or an iterable of scalar terms whose sum it is. A generator is best for
several micro-batches: the graph of a term is gone before the next is made."""


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside (dropout would drown a difference), and each module in its own mode afterwards.

    Quantised linear layers are in training mode: bitsandbytes repacks 4-bit weights for inference on a CPU, which lets
    no gradient through any more.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = isinstance(module, nn.Linear) and is_quantised(module)
        yield
    finally:
        for module, training in modes:
            module.training = training


class Objective:
    """`loss` of `model`; sums over terms are in float64."""

    def __init__(self, model: nn.Module, loss: Loss, count: Callable[[int], None] = lambda passes: None) -> None:
        """count: told of every evaluation, 1 for a loss and 3 for a gradient."""
        self.model = model
        self._loss = loss
        self._count = count

    @torch.no_grad()
    def value(self) -> float:
        """The loss at the weights as they are."""
        with _resting(self.model):
            total = sum(float(term) for term in self._terms())
        self._count(1)
        return total

    @torch.enable_grad()
    def gradient(self, inputs: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        """The loss and its gradients with respect to `inputs`, which require one; in float32, or float64 for float64
        inputs; zero for an input without a part in the loss. No `.grad` is touched.

        Raises RegularizerError if the loss depends on none of them.
        """
        total = 0.0
        sums = [torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in inputs]
        with _resting(self.model):
            for term in self._terms():
                if not term.requires_grad:
                    raise RegularizerError(
                        "the loss has no gradient with respect to the weights that are measured; switch the adapters "
                        "on, and compute the loss outside torch.no_grad()"
                    )
                for into, part in zip(sums, torch.autograd.grad(term, inputs, allow_unused=True), strict=True):
                    if part is not None:
                        into.add_(part)
                total += float(term.detach())
        self._count(3)
        return total, [each.detach() for each in sums]

    def _terms(self) -> Iterable[Tensor]:
        given = self._loss()
        return (given,) if isinstance(given, Tensor) else given
