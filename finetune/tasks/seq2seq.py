"""`task.kind: seq2seq`: an encoder-decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ..compute.protocols import TaskTraits
from ..config import check_bounds
from ..errors import UserError
from .base import TemplateTask, check_task_metrics

if TYPE_CHECKING:
    from ..data.encoding import EncodingResult, RowEncoder
    from ..data.example import Example
    from ..data.rows import Row


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(TemplateTask):
    """Encoder-decoder training (T5, BART): the encoder reads the prompt, and all tokens of the target are trained
    on."""

    kind: Literal["seq2seq"] = "seq2seq"
    prompt: str = "{text}"
    """Template of the encoder's input over the row's columns; at most `train.max_length` tokens."""
    target: str = "{label}"
    """Template of the decoder's output over the row's columns, followed by the end-of-sequence token; at most
    `train.max_length` tokens."""
    prefix: str | None = None
    """Text before every prompt, as T5 was trained with (`summarize: `); braces are literal."""
    label_smoothing: float | None = None
    """ε: each target token has weight 1 − ε, and ε is spread evenly over the vocabulary. In training only:
    evaluation reports the loss without it."""
    score: Literal["perplexity", "generate"] = "perplexity"
    """Evaluation on dev and test in addition to perplexity: `generate` an answer and compare (exact match, chrF)."""
    max_new_tokens: int = 64
    """Maximum length of a generated answer in tokens (score: generate)."""
    metrics: tuple[str, ...] = ()
    """Additional metrics of generated answers (score: generate): `numeric_match` (the last number, or the one after
    `####`), `has_number`, `match_normalised`, `f1_words`, and for tags `span_f1`, `span_precision`, `span_recall`."""
    num_beams: int | None = None
    """Number of beams of beam search (score: generate). Null: greedy."""
    max_truncated: float | None = None
    """Maximum share of rows whose target may be truncated at `train.max_length`; the run stops if there are more.
    Null: 0.1."""

    answer_setting: ClassVar[str] = "target"
    traits: ClassVar[TaskTraits] = TaskTraits(
        auto_class="AutoModelForSeq2SeqLM",
        refusals={
            "warmup": "the recipe's `warmup` block trains a decoder or an encoder alone, and task.kind: seq2seq has "
            "both; leave it out",
            "train.compile": "train.compile does not go with task.kind: seq2seq: decoder rows come in all lengths, "
            "each a graph of its own; leave one of them out",
        },
    )

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), label_smoothing=(0, 0.99), num_beams=(1, None))
        check_bounds(self, max_truncated=(0, 1))
        if self.num_beams is not None and self.score != "generate":
            raise ValueError(f"num_beams is for `score: generate`, got {self.num_beams} with score: {self.score}")
        check_task_metrics(self)

    @property
    def smoothing(self) -> float:
        return self.label_smoothing or 0.0

    @property
    def no_axes(self) -> Mapping[str, str]:
        return {"cp": "encoder and decoder have rows of their own"}

    def encode(self, rows: Iterable[Row], encoder: RowEncoder) -> tuple[list[Example], None]:
        """Encode prompt (for the encoder) and target (for the decoder), both with the tokenizer's own special
        tokens; the target ends with eos and all its tokens are target tokens. The decoder reads its start token,
        then the target shifted by one position. If too long, each is truncated from the right."""
        if encoder.left and self.prefix:
            raise UserError("train.truncation: left would cut task.prefix off; leave one of them out")
        if encoder.decoder_start is None:
            raise ValueError("encode(task=Seq2Seq) needs decoder_start, the token that the decoder begins with")
        start = encoder.decoder_start
        make = lambda chunk, texts: self._encode_chunk(chunk, texts, start, encoder)  # noqa: E731
        return encoder.samples(rows, self.templates(), make), None

    def _encode_chunk(
        self, rows: Sequence[Row], texts: Sequence[Sequence[str]], decoder_start: int, encoder: RowEncoder
    ) -> Iterator[EncodingResult]:
        """Encode a chunk of rows.

        texts: prompt and target of each row.
        """
        from ..data.encoding import Truncation
        from ..data.example import Example

        prompts = encoder.within(((self.prefix or "") + prompt for prompt, _ in texts), left=encoder.left)
        decoder = encoder.for_targets()
        targets = decoder.within(target for _, target in texts)
        batch = decoder.tokens(targets)
        room = decoder.max_length - len(decoder.specials.prefix) - len(decoder.end)
        for i, (row, prompt, ids) in enumerate(
            zip(rows, encoder.tokens(prompts)["input_ids"], batch["input_ids"], strict=True)
        ):
            source, prompt_cut = encoder.closed(prompt, encoder.specials.suffix, left=encoder.left)
            labels, target_cut = decoder.closed(ids, decoder.end)
            needs = max(prompt_cut.needs, target_cut.needs)
            truncation = Truncation(needs, bool(prompt_cut or target_cut), answer=bool(target_cut))
            empty = not ids or not targets[i].strip()
            if empty or not source:
                yield f"the {'target' if empty else 'prompt'} is empty", truncation
                continue
            size = decoder.bytes(targets[i], batch, i, 0, min(len(ids), room))
            yield Example(
                source, labels, row.id, row.where, size, decoder_ids=[decoder_start, *labels[:-1]],
                answer=texts[i][1] if self.score == "generate" else None,
            ), truncation  # fmt: skip
