"""Interface between a training loop and a regularizer, and construction of a regularizer from its settings.

The loop's whole part:

    regularizer = build(config).attach(model, seed=seed, total_steps=steps)
    for t in range(steps):
        with regularizer.step(t) as passes:       # every forward and backward of optimizer step t
            for _ in passes:                      # once, or twice for the SAM kind
                for index, micro in enumerate(batches.at(t)):
                    regularizer.on_micro_batch(index)
                    loss(model, micro).backward()
        clip(); optimizer.step(); optimizer.zero_grad()
        regularizer.after_optimizer_step(lr)
    regularizer.detach()

`passes` may be ignored by a loop that only supports methods with `passes == 1`, and `on_micro_batch` by one whose
regularizer draws once per optimizer step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from flatshift.regularizers import config as kinds
from flatshift.regularizers.config import Plain, RegularizerConfig, RegularizerError
from flatshift.regularizers.mesh import Placement

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class MetricTensors:
    """Metrics of a step whose `values`, (n,) float64, stay on the device until they are read, possibly together with
    those of other steps; `named` makes metrics by name from the numbers."""

    values: Tensor
    named: Callable[[Sequence[float]], dict[str, float]]

    def read(self) -> dict[str, float]:
        """Return the metrics now; waits for the device."""
        return self.named(self.values.tolist())


class Regularizer(ABC):
    """Base class of the methods added to the training steps of an adapter. It sees optimizer steps, never the
    optimizer."""

    passes: int = 1
    """Number of forward and backward passes over the same micro-batches per step."""

    @abstractmethod
    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        """Find the LoRA layers of `model` (PEFT, by duck typing) and prepare; the model itself is not changed.

        `seed` keys every draw, the same on all ranks of a mesh; `total_steps` is the length of a schedule; `placement`
        is this process's place in a mesh, None for a single process. With a placement, `attach`, `step`, `figures` and
        `state_dict` are collective: every rank calls them in the same order. Raises RegularizerError if the model has
        no suitable layer, or if one of its layers is already hooked by a regularizer.
        """

    @abstractmethod
    def step(self, t: int, *, loss_scale: float = 1.0) -> AbstractContextManager[Iterable[int]]:
        """Wrap all forward and backward passes of optimizer step `t` (from 0), and nothing else.

        Yields the passes to make, each over all micro-batches of the step: `range(1)`, or two for the SAM kind, whose
        first pass's gradients are removed (set to None) when the second is requested. The perturbation exists only
        inside, with the adapters active when it began. On a normal exit the gradients are read, so leave before
        clipping; on an exception the model is restored and nothing is learned from the step. `loss_scale`: factor by
        which a loss scaler multiplied the loss (`GradScaler.get_scale()`); gradients are read unscaled, not modified.
        """

    def on_micro_batch(self, index: int) -> None:  # noqa: B027 - most methods draw once per step
        """Announce the forward pass of micro-batch `index` (from 0, in every pass) of the step."""

    def after_optimizer_step(self, rate: float) -> None:  # noqa: B027 - most methods leave the update alone
        """Announce that the optimizer made its step with the learning rate `rate`; called after `step` was left."""

    @abstractmethod
    def metric_tensors(self) -> MetricTensors:
        """Return metrics of the last step for the log, without waiting for the device; copies, so that later steps do
        not change them."""

    def metrics(self) -> dict[str, float]:
        """Return the same metrics as numbers; reading them may wait for the device."""
        return self.metric_tensors().read()

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return everything a resumed run needs to continue bit for bit; tensors only. Covers this pipeline stage's
        layers, whole and equal on all its ranks; the union over the stages is the state of the same run on any mesh."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state_dict`, after `attach`; with a placement, layers of other stages are ignored. Raises
        RegularizerError for any other state."""

    @abstractmethod
    def detach(self) -> None:
        """Release the model without leaving a trace. Calling it twice is harmless."""


class PlainRegularizer(Regularizer):
    """Plain training: steps are unchanged."""

    def __init__(self, config: Plain | None = None) -> None:
        pass

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        return self

    @contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Iterable[int]]:
        yield range(1)

    def metric_tensors(self) -> MetricTensors:
        from torch import empty

        return MetricTensors(empty(0), lambda numbers: {})

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise RegularizerError(
                f"the saved state belongs to another regularizer (it holds {min(state)!r}), but this run is plain; "
                "set regularizer.kind to what it was when the checkpoint was written"
            )

    def detach(self) -> None:
        pass


_HOMES: dict[type[Any], str] = {
    Plain: "protocol:PlainRegularizer",
    kinds.GGPO: "methods.ggpo:GGPORegularizer",
    kinds.FlatLora: "methods.ggpo:flat_lora",
    kinds.MGPO: "methods.momentum:mgpo",
    kinds.MSAM: "methods.momentum:MomentumRegularizer",
    kinds.SAM: "methods.sam:WeightSAM",
    kinds.ASAM: "methods.sam:AdapterSAM",
    kinds.LoraSAM: "methods.sam:AdapterSAM",
    kinds.BAR: "methods.bar:BARRegularizer",
    kinds.BiLora: "methods.bilora:BiLoraRegularizer",
    kinds.NEFTune: "methods.neftune:NEFTuneRegularizer",
}
"""`module:callable` that builds the regularizer of each type of settings; imported on demand."""


def build(config: RegularizerConfig) -> Regularizer:
    """Build the regularizer that `config` describes. Raises RegularizerError for invalid settings."""
    if type(config) not in _HOMES:
        known = ", ".join(kind.__name__ for kind in _HOMES)
        raise RegularizerError(f"no regularizer for settings of type {type(config).__name__}; use one of {known}")
    module, _, name = _HOMES[type(config)].partition(":")
    regularizer: Regularizer = getattr(import_module(f"flatshift.regularizers.{module}"), name)(config)
    return regularizer
