"""`task.kind: language-model`: plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .base import BaseTask

if TYPE_CHECKING:
    from ..data.encoding import EncodingResult, RowEncoder
    from ..data.example import Example
    from ..data.rows import Row
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator


@dataclass(frozen=True, kw_only=True)
class LanguageModel(BaseTask):
    """Plain causal language modelling: every token of `text` is a target token."""

    kind: Literal["language-model"] = "language-model"
    pack: bool = True
    """Pack several examples into each row of `train.max_length` tokens; examples do not attend to each other."""

    causal: ClassVar[bool] = True
    backbone: ClassVar[Literal["decoder"]] = "decoder"
    noise: ClassVar[Literal["tokens"]] = "tokens"
    documents: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    soft_tokens: ClassVar[bool] = True

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Evaluate perplexity; intervals are over documents if these were split into pieces."""
        from ..data.example import find_document_starts

        return judge.perplexity_metrics(examples, *judge.token_nll(examples), documents=find_document_starts(examples))

    def predict(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return the columns of `BaseTask.predict`; the first piece of a document has the sums over all its pieces."""
        from ..data.example import find_document_starts, sum_by_document

        nats, tokens = judge.token_nll(examples)
        if (documents := find_document_starts(examples)) is not None:
            nats, tokens = (sum_by_document(values, documents) for values in (nats, tokens))
        return judge.surprises(nats, tokens)

    def encode(self, rows: Iterable[Row], to: RowEncoder) -> tuple[list[Example], None]:
        """Encode as `prefix text eos`; every token after the first is a target token. If too long, the text is
        truncated, or split into pieces (`train.overlong: split`): each starts with the prefix and the last token of
        the previous piece, so that every token of the document is a target token once."""
        return to.samples(rows, (), lambda chunk, _: _encode_documents(chunk, to)), None


def _encode_documents(rows: Sequence[Row], to: RowEncoder) -> list[EncodingResult]:
    from ..data.encoding import Truncation
    from ..data.example import IGNORE, Example

    texts = to.within((row.values["text"] for row in rows), left=to.left)
    batch = to.tokens(texts)
    prefix = list(to.specials.prefix)
    made: list[EncodingResult] = []
    for i, (row, ids) in enumerate(zip(rows, batch["input_ids"], strict=True)):
        content, room = [*ids, *to.end], to.max_length - len(prefix)
        if to.overlong == "split" and len(content) > room:
            made.append(
                (
                    list(_split_document(row, texts[i], content, batch, i, to)),
                    Truncation(len(prefix) + len(content), False),
                )
            )
            continue
        cut = Truncation(len(prefix) + len(content), len(content) > room)
        start = len(content) - room if cut and to.left else 0
        input_ids = [*prefix, *content[start : start + room]]
        if len(input_ids) < 2 or not ids:
            made.append(("the text is empty", cut))
            continue
        first = start if prefix else start + 1
        size = to.bytes(texts[i], batch, i, first, min(len(ids), start + room))
        made.append((Example(input_ids, [IGNORE, *input_ids[1:]], row.id, row.where, size), cut))
    return made


def _split_document(row: Row, text: str, content: list[int], batch: Any, i: int, to: RowEncoder) -> Iterator[Example]:
    """Yield consecutive pieces of a document that is longer than a row; content: its tokens including the end
    tokens."""
    from ..data.example import IGNORE, Example, name_piece

    prefix, length = list(to.specials.prefix), len(batch["input_ids"][i])
    start = 0
    for number in count():
        before = content[start - 1 : start] if start else []
        taken = content[start : start + to.max_length - len(prefix) - len(before)]
        if not taken:
            return
        context = [*prefix, *before]
        labels = [*[IGNORE] * len(context), *taken] if context else [IGNORE, *taken[1:]]
        size = to.bytes(text, batch, i, start if context else start + 1, min(length, start + len(taken)))
        yield Example([*context, *taken], labels, *name_piece(row, number), size)
        start += len(taken)
