"""Splitting of micro-batches into the pieces that go through the pipeline, all of one shape.

Stages exchange hidden states of a fixed size, so every piece of a step has the same rows and tokens: missing rows are
repeated without targets, tokens are padded on the right and masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compute.loss import Batch
from ...data.encoding import IGNORE


@dataclass(frozen=True)
class Piece:
    """Input of one pass through the pipeline (a `flatshift.finetune.compute.loss.Batch`)."""

    inputs: dict[str, Tensor]
    """Model keyword arguments, rows first."""
    labels: Tensor
    """(rows, T), or the classes (rows,); −100 where there is no target."""

    def to(self, device: torch.device) -> Piece:
        """Return the piece on another device."""
        return Piece({name: tensor.to(device) for name, tensor in self.inputs.items()}, self.labels.to(device))


def split_micro_batches(micros: Sequence[Batch], *, each: int, total: int, pad_id: int) -> list[Piece]:
    """Return pieces of one shape, in order; their summed loss is that of the micro-batches.

    Args:
        each: pieces of the largest micro-batch.
        total: pieces in all; missing ones are copies of the last one, without targets.
        pad_id: token used as padding.
    """
    rows = -(-max(len(micro.labels) for micro in micros) // each)
    widths = _max_widths(micros)
    pieces = []
    for micro in micros:
        for start in range(0, each * rows, rows):
            index = torch.arange(start, start + rows)
            pieces.append(_cut_piece(micro, index, widths, pad_id))
    assert len(pieces) <= total, (len(pieces), total)
    empty = Piece(pieces[-1].inputs, torch.full_like(pieces[-1].labels, IGNORE))
    return pieces + [empty] * (total - len(pieces))


def _max_widths(micros: Sequence[Batch]) -> dict[str, int]:
    """Return the number of tokens of the widest tensor of each name; labels are `labels`."""
    widths: dict[str, int] = {}
    for micro in micros:
        for name, tensor in (*micro.inputs.items(), ("labels", micro.labels)):
            if tensor.ndim > 1:
                widths[name] = max(widths.get(name, 0), tensor.shape[1])
    tokens = max(widths.get(name, 0) for name in ("input_ids", "attention_mask", "position_ids", "token_type_ids"))
    return {**widths, **{name: tokens for name in widths if name not in _OF_DECODER}}


_OF_DECODER = ("decoder_input_ids", "decoder_attention_mask", "labels")


def _cut_piece(micro: Batch, index: Tensor, widths: Mapping[str, int], pad_id: int) -> Piece:
    """Return rows `index` of `micro`; those beyond its last are copies of it without targets."""
    there = index.clamp(max=len(micro.labels) - 1)
    labels = micro.labels[there]
    labels[index != there] = IGNORE
    inputs = dict(micro.inputs)
    if "attention_mask" not in inputs and "position_ids" not in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    fill = {"input_ids": pad_id, "decoder_input_ids": pad_id}
    cut = {name: _pad_right(tensor[there], widths.get(name, 0), fill.get(name, 0)) for name, tensor in inputs.items()}
    extra = widths["input_ids"] - micro.inputs["input_ids"].shape[1]
    if extra and "position_ids" in cut:  # the padding is a separate sample
        cut["position_ids"][:, -extra:] = torch.arange(extra)
    return Piece(cut, _pad_right(labels, widths.get("labels", 0), IGNORE) if labels.ndim > 1 else labels)


def _pad_right(tensor: Tensor, width: int, fill: int) -> Tensor:
    """Pad (rows, T, …) with `fill` on the right to `width` tokens."""
    missing = width - tensor.shape[1]
    if missing <= 0:
        return tensor
    padding = tensor.new_full((len(tensor), missing, *tensor.shape[2:]), fill)
    return torch.cat([tensor, padding], dim=1)
