"""The frame of the two-pass methods (the SAM kind): a first pass at the weights, a second one above them.

    with regularizer.step(t) as passes:
        for _ in passes:                  # 0: gradients at the weights; 1: gradients at the perturbed weights
            for micro in batches.at(t):
                loss(model, micro).backward()
    clip(); optimizer.step()

Between the passes the first one's gradients are read and taken away, so `.grad` ends as the second one's alone: no
closure, and whatever scales, clips or unscales gradients does it once, after the step, as for plain training. A pass
is all micro-batches of the step, so accumulation is right by construction. Dropout should draw alike in both passes,
that they judge the same function: our loop and `TwoPassMixin` see to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from regularizers.adapters import Adapters, local
from regularizers.checks import refuse_reentry
from regularizers.claims import claim, release
from regularizers.errors import RegularizerError
from regularizers.protocol import Figures, Regularizer

_VANISHING = 1e-30
"""A gradient norm below is none at all: ρ divided by it has no float32."""


class TwoPass(Regularizer):
    """Counts passes, keeps the figures and the state; subclasses say how the weights are perturbed."""

    passes = 2

    def __init__(self, kind: str) -> None:
        self._kind = kind
        """As in `regularizer.kind`; names the state's tensors."""
        self._theta: Adapters | None = None
        self._model: nn.Module | None = None
        self._inside = False
        self._asked = 0
        self._step = 0
        self._unperturbed = torch.zeros((), dtype=torch.int64)
        self._figures: dict[str, Tensor] = {}

    def _take(self, model: nn.Module, theta: Adapters, layers: Mapping[str, nn.Module]) -> None:
        """The end of `attach`: claim the `layers` by name and begin to count."""
        claim(layers, self)
        self._theta, self._model = theta, model
        self._step, self._figures = 0, {}
        self._unperturbed = torch.zeros((), dtype=torch.int64, device=theta.device)

    @abstractmethod
    def _begin(self, stack: ExitStack) -> None:
        """Before the first pass; what `stack` holds is undone when the step is left."""

    @abstractmethod
    def _climb(self, stack: ExitStack, loss_scale: float) -> dict[str, Tensor]:
        """Between the passes: read the gradients, perturb until `stack` is closed; returns what `metrics` is to show.
        They are taken away after it."""

    def _gradient_norm(self, loss_scale: float) -> Tensor:
        """|∂L/∂θ| of the gradients as they are, float64 (). Collective."""
        assert self._theta is not None
        found = {
            name: torch.zeros_like(local(p)) if p.grad is None else local(p.grad)
            for name, p in self._theta.parameters.items()
        }
        return self._theta.squared_norm(found).sqrt() / loss_scale

    @contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Iterable[int]]:
        refuse_reentry(self._kind, t, attached=self._theta is not None, inside=self._inside)
        self._step, self._asked, self._inside = t, 0, True
        try:
            with ExitStack() as stack:
                self._begin(stack)
                yield self._passes(t, stack, loss_scale)
                if self._asked < 2:
                    raise RegularizerError(
                        f"{self._kind} takes two passes over the micro-batches of step {t} and got {self._asked}; "
                        "write `with regularizer.step(t) as passes:` and inside it `for _ in passes:` around the "
                        "forward and backward passes"
                    )
                self._figures["perturbed_gradient_norm"] = self._gradient_norm(loss_scale)
        finally:
            self._inside = False

    def _passes(self, t: int, stack: ExitStack, loss_scale: float) -> Iterator[int]:
        for index in range(2):
            if not (self._inside and self._step == t and self._asked == index):
                raise RegularizerError(f"the passes of step({t}) were asked for after the step had been left")
            if index == 1:
                assert self._theta is not None and self._model is not None
                self._figures = self._climb(stack, loss_scale)
                self._theta.forget_gradients(self._model)
            self._asked = index + 1
            yield index

    def _factor(self, rho: float, norm: Tensor) -> tuple[Tensor, Tensor]:
        """ρ/`norm`, and whether it has a value, bool (); counts the steps where it has none, which stay unperturbed
        because their first gradient is zero or not finite. No wait for the device."""
        usable = norm.isfinite() & (norm > _VANISHING)
        self._unperturbed = self._unperturbed.to(norm.device) + ~usable
        return rho / norm, usable

    def metrics(self) -> dict[str, float]:
        """Of the last step, before clipping and without the loss scale: `gradient_norm` |∂L/∂θ| at the weights,
        `perturbed_gradient_norm` at the perturbed ones, `perturbation_norm` |ε|, and for SAM over the weights
        `weight_gradient_norm` |∂L/∂W'|; `unperturbed_steps`: how many so far had a first gradient that was zero or
        not finite, and trained with ε = 0."""
        return self.figures().read()

    def figures(self) -> Figures:
        found = {**self._figures, "unperturbed_steps": self._unperturbed}
        values = torch.stack([value.to(self._unperturbed.device, torch.float64) for value in found.values()])
        return Figures(values, lambda numbers: dict(zip(found, numbers, strict=True)))

    def _names(self) -> dict[str, Tensor]:
        return {f"{self._kind}.step": torch.tensor(self._step), f"{self._kind}.unperturbed": self._unperturbed}

    def state_dict(self) -> dict[str, Tensor]:
        """Counters; the method has no other memory, and draws nothing."""
        return {name: value.clone() for name, value in self._names().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._theta is None:
            raise RegularizerError(f"{self._kind} is not attached to a model; attach before loading its state")
        if different := set(self._names()) ^ set(state):
            raise RegularizerError(
                f"the saved state does not belong to {self._kind} ({min(different)!r} is in only one of the two); "
                "resume with the regularizer that the checkpoint was written with"
            )
        self._step = int(state[f"{self._kind}.step"])
        self._unperturbed = state[f"{self._kind}.unperturbed"].detach().clone()

    def detach(self) -> None:
        release(self)
        self._theta = self._model = None
