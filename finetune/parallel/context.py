"""Context parallelism: a rank of the axis `cp` holds some tokens of every row, and attention gathers keys and values.

A row of T tokens is split into 2·cp runs; rank i holds run i and run 2·cp − 1 − i. Queries stay local, the keys and
values of all tokens are gathered in each attention layer, and their gradients are summed back (as Llama 3 was trained,
2407.21783 §3.3.2). A run needs no key after its last token; an early and a late run together balance the ranks:
(2·cp + 1)/(4·cp²) of T². Masks are transformers' own: padding, packed samples and sliding windows.

Memory that still grows with T: gathered keys and values, and the masks of both runs as numbers, of one layer with
`train.checkpointing`, else of all; and one (B, 1, T/cp, T) boolean mask for each kind of layer.

A `ContextParallel` is registered with transformers as an attention implementation. Outside of `forward_pass`, as in
evaluation and generation, it is `sdpa` on whole rows.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compute.dropout import with_query_offset
from ..compute.loss import IGNORED, Batch
from ..errors import UserError
from ..models.anatomy import attention_modules, unwrap_peft
from ..models.families import find_family
from .mesh import ProcessMesh
from .tensor import borders

_serial = itertools.count()
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of a block's attention in a configuration whose tokens may be split."""


def check_context(model: nn.Module) -> None:
    """Raise UserError for a base model whose tokens cannot be split over `mesh.cp`: they may meet elsewhere than in
    attention, or attention is not causal. Parameters may be on the meta device."""
    config = unwrap_peft(model).config
    recurrent = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    if recurrent or not find_family(config.model_type).context:
        raise UserError(
            f"mesh.cp: {config.model_type} models cannot be split by tokens, which meet only in the causal attention "
            "of plain decoders; use mesh.dp"
        )
    causal = all(getattr(module, "is_causal", True) for module in attention_modules(unwrap_peft(model)))
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True) or not causal:
        raise UserError("mesh.cp: the attention of this backbone is not causal; use mesh.dp")


@dataclass(frozen=True)
class TokenPart:
    """This rank's tokens of a micro-batch."""

    inputs: dict[str, Tensor]
    """(B, T/cp) each; except `attention_mask`, which covers *all* tokens: (B, T)."""
    labels: Tensor
    """(B, 1 + T/cp): after one unused column, the token that follows each of the inputs."""
    positions: Tensor
    """(B, T) of all tokens within their samples."""


class ContextParallel:
    """This rank's tokens, and attention across the ranks' tokens.

        mine = context.take(batch)
        with context.forward_pass(mine):
            loss = batch_loss(model, mine, task=task)
        loss.backward()

    Attention modules also gather in backward if activation checkpointing runs them again.
    """

    def __init__(self, world: ProcessMesh) -> None:
        self.rank, self.width, self.group = world.index("cp"), world.width("cp"), world.group("cp")
        self.multiple = 2 * self.width
        """Rows have a multiple of this many tokens."""
        self._positions: Tensor | None = None
        """(B, T) of the micro-batch in its forward pass; None outside."""
        self._caps = False

    def attach(self, model: nn.Module) -> Self:
        """Make the attention layers of `model` (with or without PEFT, or a pipeline's stages) gather keys and values
        inside `forward_pass`."""
        from transformers import AttentionInterface, AttentionMaskInterface

        from .pipeline.stage import StageModules

        name = f"flatshift_context_{next(_serial)}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, self._mask)
        for stage in model.children() if isinstance(model, StageModules) else [model]:
            config = unwrap_peft(stage).config
            config._attn_implementation = name
            self._caps = getattr(config, "attn_logit_softcapping", None) is not None
        return self

    def indices(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the tokens of a row of `length` that this rank holds, int64 (length / cp,)."""
        assert length % self.multiple == 0, f"rows of {length} tokens are not a multiple of {self.multiple}"
        step = length // self.multiple
        return torch.cat([torch.arange(i * step, (i + 1) * step, device=device) for i in self._runs()])

    def _runs(self) -> tuple[int, int]:
        return self.rank, self.multiple - 1 - self.rank

    def take(self, batch: Batch) -> TokenPart:
        """Return this rank's tokens of `batch`."""
        ids, labels = batch.inputs["input_ids"], batch.labels
        own = self.indices(ids.shape[1], ids.device)
        positions = batch.inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        inputs = {name: tensor[:, own] for name, tensor in {**batch.inputs, "position_ids": positions}.items()}
        # always given: without a mask transformers would search this rank's positions for samples
        inputs["attention_mask"] = batch.inputs.get("attention_mask", torch.ones_like(ids))
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)[:, own]
        return TokenPart(inputs, F.pad(following, (1, 0), value=IGNORED), positions)

    @contextlib.contextmanager
    def forward_pass(self, tokens: TokenPart) -> Iterator[None]:
        """Surround the forward pass of `tokens`; its backward pass may come later."""
        self._positions = tokens.positions
        try:
            yield
        finally:
            self._positions = None

    def _mask(self, **options: Any) -> Tensor | None:
        """Mask function for transformers: the keys that each query of this rank sees, bool (B, 1, T/cp, T)."""
        if self._positions is None:
            from transformers.masking_utils import sdpa_mask

            # attention that caps its scores takes no causal mask by a flag
            return sdpa_mask(**{**options, "allow_is_causal_skip": options["allow_is_causal_skip"] and not self._caps})
        assert not options.get("use_vmap"), "a mask function that cannot be broadcast"
        positions, device = self._positions, self._positions.device
        rows, length = positions.shape
        row = torch.arange(rows, device=device)[:, None, None, None]
        head = torch.zeros(1, dtype=torch.int64, device=device)[None, :, None, None]
        query = self.indices(length, device)[None, None, :, None]
        key = torch.arange(length, device=device)[None, None, None, :]
        sample = F.pad(positions.diff(dim=1) != 1, (1, 0)).cumsum(1)  # positions restart with each packed sample
        allowed = (sample[row, query] == sample[row, key]) & options["mask_function"](
            row, head, positions[row, query], positions[row, key]
        )
        return allowed & options["attention_mask"].bool()[:, None, None, :]

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention function for transformers: (B, H, T/cp, D) each → (B, T/cp, H, D).

        A mask over more keys than given means that the others are on other ranks; this also holds in backward, when
        activation checkpointing calls this again.
        """
        if attention_mask is None or attention_mask.shape[-1] == key.shape[2]:
            return _attention(module, query, key, value, attention_mask, **options)
        step = query.shape[2] // 2
        key, value = self._gather(key, value)
        outputs = []
        for i, run in enumerate(self._runs()):
            queries, key_count = slice(i * step, (i + 1) * step), (run + 1) * step
            mask = attention_mask[:, :, queries, :key_count]
            with with_query_offset(run * step):
                output, _ = _attention(
                    module, query[:, :, queries], key[:, :, :key_count], value[:, :, :key_count], mask, **options
                )
            outputs.append(output)
        return torch.cat(outputs, dim=1), None

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return `key` and `value` (B, H, T/cp, D) for all tokens in order, by one collective."""
        both = torch.cat([key.transpose(1, 2), value.transpose(1, 2)], dim=-1)
        runs = borders.gather_tokens(both, self.group).chunk(self.multiple, dim=1)
        # rank i sent runs i and 2·cp − 1 − i: first halves ascend with the rank, second halves descend
        both = torch.cat([*runs[0::2], *reversed(runs[1::2])], dim=1).transpose(1, 2)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of transformers under a boolean mask: `sdpa`, or the model's own `eager` if it caps its scores."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.get("softcap") is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    assert mask is not None
    own: Any = sys.modules[type(module).__module__]
    lowest = torch.finfo(query.dtype).min
    added = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, lowest)
    return own.eager_attention_forward(module, query, key, value, added, **options)[0], None
