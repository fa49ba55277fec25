"""`task.kind: masked-lm`: masked tokens of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..compute.protocols import TaskTraits
from ..config import check_bounds
from .base import BaseTask, InputFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.encoding import EncodingResult, RowEncoder
    from ..data.example import Example
    from ..data.masking import Masking
    from ..data.rows import Row


@dataclass(frozen=True, kw_only=True)
class MaskedLM(BaseTask):
    """Masked language modelling of an encoder (BERT): some tokens of `text` are masked and predicted."""

    kind: Literal["masked-lm"] = "masked-lm"
    share: float = 0.15
    """Share of a row's tokens that are chosen (at least one); the number is exact, special tokens do not count. Of
    the chosen, 80 % become the mask token, 10 % a random token, and 10 % stay (BERT). Training draws new masks in
    every epoch; rows for evaluation keep a fixed mask that is independent of the seed."""
    whole_words: bool = False
    """Choose whole words with all their tokens, in random order, as long as they fit the share."""

    traits: ClassVar[TaskTraits] = TaskTraits(
        backbone="encoder",
        auto_class="AutoModelForMaskedLM",
        has_new_head=True,
        masks_tokens=True,
        splits_documents=True,
        refusals={
            "data.label_noise": "data.label_noise: task.kind: masked-lm has no labels to make wrong; set it to 0"
        },
    )

    def __post_init__(self) -> None:
        check_bounds(self, share=(0.01, 0.9))

    @property
    def no_axes(self) -> Mapping[str, str]:
        return {"cp": "an encoder's attention is not causal"}

    @property
    def supervised(self) -> float:
        return self.share

    def masking(self, tokenizer: PreTrainedTokenizerBase) -> Masking:
        from ..data.masking import Masking

        return Masking.of(self, tokenizer)

    def encode(self, rows: Iterable[Row], encoder: RowEncoder) -> tuple[list[Example], None]:
        """Encode the text with the tokenizer's own special tokens and mask some tokens as targets
        (`flatshift.finetune.data.masking`). If too long, the text is truncated, or split into pieces
        (`train.overlong: split`)."""
        masking = self.masking(encoder.tokenizer)
        return encoder.samples(rows, (), lambda chunk, _: _mask_rows(chunk, encoder, masking)), None

    @property
    def input_format(self) -> InputFormat:
        return _MaskedFormat(self)


class _MaskedFormat(InputFormat):
    def matches_saved(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        """Compare after masked tokens are restored."""
        from ..data.example import IGNORE

        assert isinstance(example.labels, list)
        pairs = zip(example.input_ids, example.labels, strict=True)
        unmasked = [token if label == IGNORE else label for token, label in pairs]
        return list(saved(row.values["text"], truncation=True, max_length=max_length)["input_ids"]) == unmasked


def _mask_rows(rows: Sequence[Row], encoder: RowEncoder, masking: Masking) -> Iterator[EncodingResult]:
    from ..data.encoding import Truncation, truncate_tokens
    from ..data.example import name_piece
    from ..data.masking import SPECIAL

    batch = encoder.tokens(encoder.within((row.values["text"] for row in rows), left=encoder.left))
    room = encoder.max_length - len(encoder.specials.prefix) - len(encoder.specials.suffix)
    special = set(encoder.tokenizer.all_special_ids)
    for i, (row, ids) in enumerate(zip(rows, batch["input_ids"], strict=True)):
        word_ids = batch.word_ids(i) if batch.is_fast else range(len(ids))
        words = [
            SPECIAL if token in special or word is None else word for token, word in zip(ids, word_ids, strict=True)
        ]
        truncation = Truncation(encoder.max_length - room + len(ids), len(ids) > room)
        masked: Any
        if encoder.overlong == "split" and truncation:
            spans = [slice(start, start + room) for start in range(0, len(ids), room)]
            pieces = [
                _mask_example(ids[span], words[span], *name_piece(row, number), encoder, masking)
                for number, span in enumerate(spans)
            ]
            masked = [example for example in pieces if example is not None]
            truncation = Truncation(truncation.needs, False)
        else:
            tokens, numbers = (truncate_tokens(values, room, left=encoder.left) for values in (ids, words))
            masked = _mask_example(tokens, numbers, row.id, row.where, encoder, masking)
        yield (masked, truncation) if masked else ("the text has no token that could be hidden", Truncation(0, False))


def _mask_example(
    ids: Sequence[int], words: Sequence[int], name: str, where: str, encoder: RowEncoder, masking: Masking
) -> Example | None:
    """Return the masked example of some tokens with special tokens around them; None if none of them can be masked."""
    import numpy as np

    from ..data.example import Example
    from ..data.masking import SPECIAL

    if all(word == SPECIAL for word in words):
        return None
    prefix, suffix = encoder.specials.prefix, encoder.specials.suffix
    tokens = np.array([*prefix, *ids, *suffix], dtype=np.int64)
    numbers = [SPECIAL] * len(prefix) + list(words) + [SPECIAL] * len(suffix)
    input_ids, labels = masking.fixed(tokens, np.array(numbers), name)
    segments = [0] * len(tokens) if encoder.specials.segments else None
    return Example(input_ids.tolist(), labels.tolist(), name, where, segments=segments, words=numbers)
