"""First-batch panel: the first batch as the model sees it, with target tokens marked, to check the data at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..compute.micro_batch import MicroBatch
from ..compute.protocols import TraitsTask
from ..errors import UserError
from .example import IGNORE
from .labels import Units

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "⟦", "⟧"


class LabelledTask(TraitsTask, Protocol):
    """Members of a task that the panel uses."""

    @property
    def loss_denominator(self) -> str: ...

    def format_label(self, label: Tensor, *, label_names: Sequence[str] | None, units: Units | None) -> str: ...


@dataclass(frozen=True)
class DecodedSpan:
    """Run of decoded tokens that are all target tokens, or all not."""

    text: str
    supervised: bool


def split_batch_spans(micro: MicroBatch, tokenizer: PreTrainedTokenizerBase) -> list[list[DecodedSpan]]:
    """Return a list of spans for every sample of the batch, without padding but with special tokens.

    Samples of a packed row are separated at the restarts of `position_ids`. For an encoder-decoder, the encoder's input
    is followed by an arrow and the decoder's output.
    """
    ids = micro.inputs["input_ids"].tolist()
    labels = micro.labels.tolist()
    spans: list[list[DecodedSpan]] = []
    decoder = "decoder_input_ids" in micro.inputs
    row_labels = micro.labels.ndim == 1 or micro.labels.is_floating_point()  # a class, classes or a target
    for row, samples in enumerate(micro.rows):
        for start, stop in _find_sample_ranges(micro, row, len(samples)):
            if decoder or row_labels:
                marks = [False] * (stop - start)
            else:
                marks = [label != IGNORE for label in labels[row][start:stop]]
            spans.append(_split_spans(ids[row][start:stop], marks, tokenizer))
        if decoder:
            written = [label for label in labels[row] if label != IGNORE]
            spans[-1] += [DecodedSpan(" → ", False), *_split_spans(written, [True] * len(written), tokenizer)]
    return spans


def _find_sample_ranges(micro: MicroBatch, row: int, samples: int) -> list[tuple[int, int]]:
    if "position_ids" not in micro.inputs:
        return [(0, int(micro.inputs["attention_mask"][row].sum()))]
    positions = micro.inputs["position_ids"][row].tolist()
    starts = [i for i, position in enumerate(positions) if position == 0]
    # A restart after the last sample is padding.
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))[:samples]


def _split_spans(ids: list[int], marks: list[bool], tokenizer: PreTrainedTokenizerBase) -> list[DecodedSpan]:
    spans = []
    text = ""
    edges = [i for i in range(1, len(ids)) if marks[i] != marks[i - 1]] + [len(ids)]
    for start, edge in pairwise([0, *edges]):
        # Decode from the start each time, because some tokenizers drop the space before the first word.
        longer = str(tokenizer.decode(ids[:edge]))
        own = longer.removeprefix(text) if longer.startswith(text) else str(tokenizer.decode(ids[start:edge]))
        spans.append(DecodedSpan(own, marks[start]))
        text = longer
    return spans


def format_first_batch(
    micro: MicroBatch,
    tokenizer: PreTrainedTokenizerBase,
    task: LabelledTask,
    *,
    label_names: Sequence[str] | None = None,
    units: Units | None = None,
    samples: int = 3,
    width: int = 600,
) -> str:
    """Return the first `samples` of the batch decoded, with target tokens as ⟦…⟧, at most `width` characters each. For
    preference data both answers of a pair are shown, with + before a chosen or desirable answer and − before any other.

    label_names: classes in head order. units: of a regression's targets, which are shown in their own units. Raises
    UserError if the batch has no target token.
    """
    if micro.supervised == 0:
        raise UserError("the first batch has no target token, so there is nothing to learn; check task and columns")
    spans = split_batch_spans(micro, tokenizer)
    tokens = micro.supervised if "decoder_input_ids" in micro.inputs else 0
    for r, row in enumerate(micro.rows):
        tokens += sum(stop - start for start, stop in _find_sample_ranges(micro, r, len(row)))
    targets = f"{micro.supervised} {task.loss_denominator} supervised"
    if micro.preference is not None:
        targets = f"{int(micro.preference.lengths.sum())} supervised in {micro.supervised} {task.loss_denominator}"
        samples *= 2 if micro.preference.paired else 1
    lines = [
        f"first batch: {len(micro.rows)} rows, {micro.samples} samples, {tokens} tokens, {targets} ({OPEN}…{CLOSE})"
    ]
    for i, sample in enumerate(spans[:samples]):
        text = _shorten("".join(OPEN + span.text + CLOSE if span.supervised else span.text for span in sample), width)
        if task.traits.is_sequence_level:
            text += f" → {OPEN}{task.format_label(micro.labels[i], label_names=label_names, units=units)}{CLOSE}"
        if micro.preference is not None:
            text = f"{'+' if micro.preference.signs[i] > 0 else '−'} {text}"
        lines.append(f"  {i + 1}. " + text.replace("\n", "\n     "))
    if len(spans) > samples:
        lines.append(f"  … and {len(spans) - samples} more")
    return "\n".join(lines)


def _shorten(text: str, width: int) -> str:
    """Return both ends of a long text, with marks closed and reopened around the gap."""
    if len(text) <= width:
        return text
    head, tail = text[: width // 2], text[-width // 2 :]
    open_at_end = head.rfind(OPEN) > head.rfind(CLOSE)
    reopened = tail.find(CLOSE) != -1 and (tail.find(OPEN) == -1 or tail.find(CLOSE) < tail.find(OPEN))
    return f"{head}{CLOSE if open_at_end else ''} … {OPEN if reopened else ''}{tail}"
