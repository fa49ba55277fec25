"""`task.kind: language-model`: plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..compute.protocols import TaskTraits
from .base import BaseTask

if TYPE_CHECKING:
    from ..data.encoding import EncodingResult, RowEncoder
    from ..data.example import Example
    from ..data.rows import Row


@dataclass(frozen=True, kw_only=True)
class LanguageModel(BaseTask):
    """Plain causal language modelling: every token of `text` is a target token."""

    kind: Literal["language-model"] = "language-model"
    pack: bool = True
    """Pack several examples into each row of `train.max_length` tokens; examples do not attend to each other."""
    dft: bool = False
    """Weight each target token's loss by the probability that the model gives it (DFT, 2508.05629): tokens that it
    thinks unlikely, wrong ones among them, count less. In training only: evaluation reports the loss without it."""

    traits: ClassVar[TaskTraits] = TaskTraits(
        causal=True,
        backbone="decoder",
        noise_level="tokens",
        reads_documents=True,
        splits_documents=True,
        takes_soft_tokens=True,
    )

    def encode(self, rows: Iterable[Row], encoder: RowEncoder) -> tuple[list[Example], None]:
        """Encode as `prefix text eos`; every token after the first is a target token. If too long, the text is
        truncated, or split into pieces (`train.overlong: split`): each starts with the prefix and the last token of
        the previous piece, so that every token of the document is a target token once."""
        return encoder.samples(rows, (), lambda chunk, _: _encode_documents(chunk, encoder)), None


def _encode_documents(rows: Sequence[Row], encoder: RowEncoder) -> Iterator[EncodingResult]:
    from ..data.encoding import Truncation
    from ..data.example import IGNORE, Example

    texts = encoder.within((row.values["text"] for row in rows), left=encoder.left)
    batch = encoder.tokens(texts)
    prefix = list(encoder.specials.prefix)
    room = encoder.max_length - len(prefix)
    for i, (row, ids) in enumerate(zip(rows, batch["input_ids"], strict=True)):
        content = [*ids, *encoder.end]
        length = len(prefix) + len(content)
        if encoder.overlong == "split" and len(content) > room:
            yield list(_split_document(row, texts[i], content, batch, i, encoder)), Truncation(length, False)
            continue
        truncation = Truncation(length, len(content) > room)
        start = len(content) - room if truncation and encoder.left else 0
        input_ids = [*prefix, *content[start : start + room]]
        if len(input_ids) < 2 or not ids:
            yield "the text is empty", truncation
            continue
        size = encoder.bytes(texts[i], batch, i, start if prefix else start + 1, min(len(ids), start + room))
        yield Example(input_ids, [IGNORE, *input_ids[1:]], row.id, row.where, size), truncation


def _split_document(
    row: Row, text: str, content: list[int], batch: Any, i: int, encoder: RowEncoder
) -> Iterator[Example]:
    """Yield consecutive pieces of a document that is longer than a row; content: its tokens including the end
    tokens."""
    from ..data.example import IGNORE, Example, name_piece

    prefix, length = list(encoder.specials.prefix), len(batch["input_ids"][i])
    start = 0
    for number in count():
        context = [*prefix, *(content[start - 1 : start] if start else [])]
        tokens = content[start : start + encoder.max_length - len(context)]
        if not tokens:
            return
        labels = [*[IGNORE] * len(context), *tokens] if context else [IGNORE, *tokens[1:]]
        size = encoder.bytes(text, batch, i, start if context else start + 1, min(length, start + len(tokens)))
        yield Example([*context, *tokens], labels, *name_piece(row, number), size)
        start += len(tokens)
