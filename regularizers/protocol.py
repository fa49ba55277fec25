"""What a training loop may ask of a regularizer, and how a regularizer is made from its settings.

The loop's whole part:

    regularizer = build(config).attach(model, seed=seed, total_steps=steps)
    for t in range(steps):
        with regularizer.step(t):                 # every forward and backward of optimizer step t
            for micro in batches.at(t):
                loss(model, micro).backward()
        clip(); optimizer.step(); optimizer.zero_grad()
    regularizer.detach()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from regularizers.config import GGPO, Plain, RegularizerConfig
from regularizers.errors import RegularizerError

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor, nn

    from regularizers.mesh import Placement


class Regularizer(ABC):
    """What is added to the training steps of an adapter. It sees optimizer steps, never the optimizer."""

    @abstractmethod
    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        """Find the LoRA layers of `model` (PEFT, by duck type) and get ready; the model itself is not changed.

        `seed` keys every draw, the same on all ranks of a mesh; `total_steps` is the length of a schedule;
        `placement` is this process's place in a mesh, None for a single process. With a placement, `attach`, `step`,
        `metrics` and `state_dict` are collective: every rank calls them in the same order. Raises RegularizerError
        if the model has no layer to serve, or if one of its layers already serves a regularizer.
        """

    @abstractmethod
    def step(self, t: int) -> AbstractContextManager[None]:
        """Wraps all forward and backward passes of optimizer step `t` (from 0), and nothing else.

        The perturbation exists only inside. On a normal exit the gradients are read, so leave before clipping; on an
        exception the model is as it was and nothing is learned from the step.
        """

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Figures of the last step worth a line in the log; reading them may wait for the device."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """All that a resumed run needs to continue with the same bits; tensors only.

        Of this pipeline stage's layers, whole and equal on all its ranks; the union over the stages is the state of
        the same run on any mesh.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a `state_dict`, after `attach`; with a placement, layers of other stages are passed over.

        Raises RegularizerError for the state of anything else.
        """

    @abstractmethod
    def detach(self) -> None:
        """Let go of the model; it keeps no trace. Doing it twice is harmless."""


class PlainRegularizer(Regularizer):
    """Plain training: every step is left as it is."""

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        return self

    @contextmanager
    def step(self, t: int) -> Iterator[None]:
        yield

    def metrics(self) -> dict[str, float]:
        return {}

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


def build(config: RegularizerConfig) -> Regularizer:
    """The regularizer that `config` describes. Raises RegularizerError for settings without a meaning."""
    if isinstance(config, Plain):
        return PlainRegularizer()
    if isinstance(config, GGPO):
        from regularizers.ggpo import GGPORegularizer

        return GGPORegularizer(config)
    raise RegularizerError(f"no regularizer for settings of type {type(config).__name__}; use Plain or GGPO")
