"""What a regularizer asks of a device mesh; it knows nothing else of one.

Two cuts are told apart. *Tensor parallelism* gives a process some rows or some columns of W0 as a plain tensor, for
good: `Placement.rows` and `columns` say which. *FSDP2* splits these tensors further between forward passes and gathers
them for each: that is read off the parameters themselves (`flatshift.regularizers.layers.sharded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ShardSlice(Protocol):
    """Which rows or columns of a whole W0 a process has."""

    @property
    def size(self) -> int:
        """How many the whole has."""

    def indices(self) -> Tensor:
        """Global indices in local order, int64."""


class Placement(Protocol):
    """A process's place in a mesh. The sums are in place and collective: every rank along their axes calls them, in
    the same order. A layer's name is that of its module in the PEFT model: `base_model.model.…self_attn.q_proj`,
    without wrappers and without a pipeline part's number."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""

    @property
    def gradient_scale(self) -> float:
        """A process's gradients are those of its own tokens' loss terms times this number (FSDP2 averages, so a loop
        that wants sums scales the loss by the group's size)."""

    def rows(self, layer: str) -> ShardSlice | None:
        """The rows of W0 that this process has of `layer` (column-parallel: LoRA's B is cut along); None: all."""

    def columns(self, layer: str) -> ShardSlice | None:
        """The columns of W0 that this process has of `layer` (row-parallel: LoRA's A is cut along); None: all."""

    def sum_tensor(self, tensor: Tensor) -> None:
        """Add up over the ranks of a tensor-parallel group: the same tokens, other parts of the layers."""

    def sum_data(self, tensor: Tensor) -> None:
        """Add up over all ranks that have other tokens: replicas, FSDP shards and context parallelism."""

    def sum_pipeline(self, tensor: Tensor) -> None:
        """Add up over the pipeline's stages: other layers."""

    @property
    def pipelined(self) -> bool:
        """Whether several micro-batches are under way at once, as in a pipeline."""

    @property
    def share(self) -> tuple[int, int]:
        """(i, n): this process has the i-th of n equal runs of every micro-batch's rows."""

    def squares(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Σ of squares of the whole of each tensor, float64 (len(tensors),).

        `tensors`: local parts (FSDP2's included), laid out like the trained parameter of their name.
        """

    def full_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole of each tensor; `tensors` as for `squares`."""

    def take(self, wholes: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """The reverse of `whole`: copies into `tensors`. Without communication."""


class Alone:
    """The placement of a single process: it has everything, and sums are free."""

    gradient_scale = 1.0
    pipelined = False

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def rows(self, layer: str) -> None:
        return None

    def columns(self, layer: str) -> None:
        return None

    def sum_tensor(self, tensor: Tensor) -> None:
        pass

    def sum_data(self, tensor: Tensor) -> None:
        pass

    def sum_pipeline(self, tensor: Tensor) -> None:
        pass

    @property
    def share(self) -> tuple[int, int]:
        return 0, 1

    def squares(self, tensors: Mapping[str, Tensor]) -> Tensor:
        import torch

        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in tensors.values()]
        return torch.stack(norms).square()

    def full_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def take(self, wholes: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.detach().copy_(wholes[name])


ALONE = Alone()
