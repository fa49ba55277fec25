"""`task.kind: masked-lm`: masked tokens of a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..config import check_bounds
from .base import BaseTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.encoding import EncodingResult, RowEncoder
    from ..data.example import Example
    from ..data.masking import Masking
    from ..data.rows import Row
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator


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

    backbone: ClassVar[Literal["encoder"]] = "encoder"
    modelling: ClassVar[str] = "masked language modelling"
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    peft_type: ClassVar[None] = None
    new_head: ClassVar[bool] = True
    hides_tokens: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = {
        "data.label_noise": "data.label_noise: task.kind: masked-lm has no labels to make wrong; set it to 0"
    }

    def __post_init__(self) -> None:
        check_bounds(self, share=(0.01, 0.9))

    @property
    def no_axes(self) -> Mapping[str, str]:
        return dict.fromkeys(("tp", "pp", "cp"), "its head is not cut")

    @property
    def supervised(self) -> float:
        return self.share

    def masking(self, tokenizer: PreTrainedTokenizerBase) -> Masking:
        from ..data.masking import Masking

        return Masking.of(self, tokenizer)

    def encode(self, rows: Iterable[Row], to: RowEncoder) -> tuple[list[Example], None]:
        """Encode the text with the tokenizer's own special tokens and mask some tokens as targets
        (`flatshift.finetune.data.masking`). If too long, the text is truncated, or split into pieces
        (`train.overlong: split`)."""
        masking = self.masking(to.tokenizer)
        return to.samples(rows, (), lambda chunk, _: _mask_rows(chunk, to, masking)), None

    def reads_same(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        """Compare after masked tokens are restored."""
        from ..data.example import IGNORE

        assert isinstance(example.labels, list)
        pairs = zip(example.input_ids, example.labels, strict=True)
        whole = [token if label == IGNORE else label for token, label in pairs]
        return list(saved(row.values["text"], truncation=True, max_length=max_length)["input_ids"]) == whole

    @property
    def figure_names(self) -> tuple[str, ...]:
        from ..evaluate.metrics import metric_names

        return metric_names("hidden")

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return `loss` (nats per masked token) and `pseudo_perplexity` (its exponential)."""
        from ..data.example import find_document_starts

        return judge.perplexity_metrics(
            examples, *judge.token_nll(examples), of="hidden", documents=find_document_starts(examples)
        )


def _mask_rows(rows: Sequence[Row], to: RowEncoder, masking: Masking) -> list[EncodingResult]:
    from ..data.encoding import Truncation, truncate_tokens
    from ..data.example import name_piece
    from ..data.masking import SPECIAL

    batch = to.tokens(to.within((row.values["text"] for row in rows), left=to.left))
    room = to.max_length - len(to.specials.prefix) - len(to.specials.suffix)
    special = set(to.tokenizer.all_special_ids)
    made: list[EncodingResult] = []
    for i, (row, ids) in enumerate(zip(rows, batch["input_ids"], strict=True)):
        of = batch.word_ids(i) if batch.is_fast else range(len(ids))
        words = [SPECIAL if token in special or word is None else word for token, word in zip(ids, of, strict=True)]
        cut = Truncation(to.max_length - room + len(ids), len(ids) > room)
        if to.overlong == "split" and cut:
            spans = [slice(low, low + room) for low in range(0, len(ids), room)]
            some = [
                _mask_example(ids[span], words[span], *name_piece(row, number), to, masking)
                for number, span in enumerate(spans)
            ]
            found: Any = [example for example in some if example is not None]
            cut = Truncation(cut.needs, False)
        else:
            kept = truncate_tokens(ids, room, left=to.left), truncate_tokens(words, room, left=to.left)
            found = _mask_example(*kept, row.id, row.where, to, masking)
        if not found:
            made.append(("the text has no token that could be hidden", Truncation(0, False)))
        else:
            made.append((found, cut))
    return made


def _mask_example(
    ids: Sequence[int], words: Sequence[int], name: str, where: str, to: RowEncoder, masking: Masking
) -> Example | None:
    """Return the masked example of some tokens with special tokens around them; None if none of them can be masked."""
    import numpy as np

    from ..data.example import Example
    from ..data.masking import SPECIAL

    if all(word == SPECIAL for word in words):
        return None
    prefix, suffix = to.specials.prefix, to.specials.suffix
    whole = np.array([*prefix, *ids, *suffix], dtype=np.int64)
    numbers = [SPECIAL] * len(prefix) + list(words) + [SPECIAL] * len(suffix)
    read, labels = masking.fixed(whole, np.array(numbers), name)
    segments = [0] * len(whole) if to.specials.segments else None
    return Example(read.tolist(), labels.tolist(), name, where, segments=segments, words=numbers)
