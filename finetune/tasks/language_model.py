"""`task.kind: language-model`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from .objective import Objective

if TYPE_CHECKING:
    from ..data.encoding import Encoder, Made
    from ..data.example import Example
    from ..data.rows import Row


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Objective):
    """Plain causal language modelling: every token of `text` is supervised."""

    kind: Literal["language-model"] = "language-model"
    pack: bool = True
    """Fill rows of `train.max_length` with several samples; no sample attends to another."""

    causal: ClassVar[bool] = True
    backbone: ClassVar[Literal["decoder"]] = "decoder"
    noise: ClassVar[Literal["tokens"]] = "tokens"
    documents: ClassVar[bool] = True
    soft_tokens: ClassVar[bool] = True

    def encode(self, rows: Iterable[Row], to: Encoder) -> tuple[list[Example], None]:
        """`prefix text eos`; every token after the first is supervised. Too long: the text loses its end."""
        return to.samples(rows, (), lambda chunk, _: _documents(chunk, to)), None


def _documents(rows: Sequence[Row], to: Encoder) -> list[Made]:
    from ..data.encoding import Cut
    from ..data.example import IGNORE, Example

    texts = to.within((row.values["text"] for row in rows), left=to.left)
    batch = to.tokens(texts)
    prefix = list(to.specials.prefix)
    made: list[Made] = []
    for i, (row, ids) in enumerate(zip(rows, batch["input_ids"], strict=True)):
        content, room = [*ids, *to.end], to.max_length - len(prefix)
        cut = Cut(len(prefix) + len(content), len(content) > room)
        start = len(content) - room if cut and to.left else 0
        input_ids = [*prefix, *content[start : start + room]]
        if len(input_ids) < 2 or not ids:
            made.append(("the text is empty", cut))
            continue
        first = start if prefix else start + 1
        size = to.bytes(texts[i], batch, i, first, min(len(ids), start + room))
        made.append((Example(input_ids, [IGNORE, *input_ids[1:]], row.id, row.where, size), cut))
    return made
