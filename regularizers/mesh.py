"""Interface of a regularizer to a device mesh.

There are two kinds of sharding. *Tensor parallelism* gives a process some rows or columns of W0 as a plain tensor for
the whole run: `Placement.rows` and `columns` return which. *FSDP2* shards these tensors further between forward passes
and gathers them for each: this is read from the parameters themselves (`flatshift.regularizers.layers.sharded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ShardSlice(Protocol):
    """The rows or columns of a full W0 that a process holds."""

    @property
    def size(self) -> int:
        """Number of rows or columns of the full W0."""

    def indices(self) -> Tensor:
        """Return the global indices in local order, int64."""


class Placement:
    """A process's place in a mesh. This class is that of a single process, which has everything; others override it.

    The sums are in place and collective: every rank along their axes calls them, in the same order. A layer's name is
    that of its module in the PEFT model: `base_model.model.…self_attn.q_proj`, without wrappers and without a pipeline
    part's number.
    """

    gradient_scale: float = 1.0
    """Factor between a process's gradients and those of its own tokens' loss terms (FSDP2 averages, so a loop that
    wants sums scales the loss by the group's size)."""

    @property
    def device(self) -> torch.device:
        """Device on which this process computes."""
        import torch

        return torch.device("cpu")

    @property
    def pipelined(self) -> bool:
        """True if several micro-batches are in flight at once, as in a pipeline."""
        return False

    @property
    def share(self) -> tuple[int, int]:
        """(i, n): this process has the i-th of n equal blocks of every micro-batch's rows."""
        return 0, 1

    def rows(self, layer: str) -> ShardSlice | None:
        """Return this process's rows of W0 of `layer` (column-parallel: LoRA's B is cut along); None: all."""
        return None

    def columns(self, layer: str) -> ShardSlice | None:
        """Return this process's columns of W0 of `layer` (row-parallel: LoRA's A is cut along); None: all."""
        return None

    def sum_tensor(self, tensor: Tensor) -> None:
        """Sum over the ranks of a tensor-parallel group: the same tokens, other parts of the layers."""

    def sum_data(self, tensor: Tensor) -> None:
        """Sum over all ranks with other tokens: replicas, FSDP shards and context parallelism."""

    def sum_pipeline(self, tensor: Tensor) -> None:
        """Sum over the pipeline's stages: other layers."""

    def squares(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of squares of each full tensor, float64 (len(tensors),). tensors: local parts (FSDP2's
        included), each with the layout of the trained parameter of its name."""
        import torch

        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        norms = torch._foreach_norm([tensor.detach() for tensor in tensors.values()], dtype=torch.float64)
        return torch.stack(norms).square()

    def full_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each full tensor; `tensors` as for `squares`."""
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def copy_local_parts(self, wholes: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Copy the local parts of `wholes` into `tensors`, the reverse of `full_tensors`, without communication."""
        for name, tensor in tensors.items():
            tensor.detach().copy_(wholes[name])


SINGLE_PROCESS = Placement()
