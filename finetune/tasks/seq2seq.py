"""`task.kind: seq2seq`: an encoder-decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from ..config import check_bounds
from ..errors import UserError
from .base import TemplateTask, check_task_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.encoding import EncodingResult, RowEncoder
    from ..data.example import Example
    from ..data.rows import Row
    from ..data.template import Template
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator


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

    encoder_decoder: ClassVar[bool] = True
    modelling: ClassVar[str] = "encoder-decoder"
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    peft_type: ClassVar[str] = "SEQ_2_SEQ_LM"
    refuses: ClassVar[dict[str, str]] = {
        "warmup": "the recipe's `warmup` block trains a decoder or an encoder alone, and task.kind: seq2seq has both; "
        "leave it out",
        "train.compile": "train.compile does not go with task.kind: seq2seq: decoder rows come in all lengths, each a "
        "graph of its own; leave one of them out",
    }

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), label_smoothing=(0, 0.99), num_beams=(1, None))
        check_bounds(self, max_truncated=(0, 1))
        if self.num_beams is not None and self.score != "generate":
            raise ValueError(f"num_beams is for `score: generate`, got {self.num_beams} with score: {self.score}")
        check_task_metrics(self)

    @property
    def figure_names(self) -> tuple[str, ...]:
        from ..evaluate.metrics import metric_names

        return (*metric_names("text", *(["seq2seq"] if self.score == "generate" else [])), *self.metrics)

    @property
    def no_axes(self) -> Mapping[str, str]:
        return {"cp": "encoder and decoder have rows of their own"}

    def templates(self) -> tuple[Template, Template]:
        from ..data.template import Template

        return Template(self.prompt, "task.prompt"), Template(self.target, "task.target")

    def encode(self, rows: Iterable[Row], to: RowEncoder) -> tuple[list[Example], None]:
        """Encode prompt (for the encoder) and target (for the decoder), both with the tokenizer's own special
        tokens; the target ends with eos and all its tokens are target tokens. The decoder reads its start token,
        then the target shifted by one position. If too long, each is truncated from the right."""
        if to.left and self.prefix:
            raise UserError("train.truncation: left would cut task.prefix off; leave one of them out")
        return to.samples(rows, self.templates(), lambda chunk, texts: self._made(chunk, texts, to)), None

    def _made(self, rows: Sequence[Row], filled: Sequence[Sequence[str]], to: RowEncoder) -> list[EncodingResult]:
        """Encode a chunk of rows.

        filled: prompt and target of each row.
        """
        from ..data.encoding import Truncation
        from ..data.example import Example

        if to.decoder_start is None:
            raise ValueError("encode(task=Seq2Seq) needs decoder_start, the token that the decoder begins with")
        asked = to.within(((self.prefix or "") + prompt for prompt, _ in filled), left=to.left)
        prompts = to.tokens(asked)["input_ids"]
        texts = to.within(target for _, target in filled)
        batch = to.tokens(texts)
        made: list[EncodingResult] = []
        for i, (row, prompt, ids) in enumerate(zip(rows, prompts, batch["input_ids"], strict=True)):
            source, cut_prompt = to.closed(prompt, to.specials.suffix, left=to.left)
            labels, cut_target = to.closed(ids, to.end)
            needs = max(cut_prompt.needs, cut_target.needs)
            cut = Truncation(needs, bool(cut_prompt or cut_target), answer=bool(cut_target))
            empty = not ids or not texts[i].strip()
            if empty or not source:
                made.append((f"the {'target' if empty else 'prompt'} is empty", cut))
                continue
            room = to.max_length - len(to.specials.prefix) - len(to.end)
            example = Example(
                source,
                labels,
                row.id,
                row.where,
                to.bytes(texts[i], batch, i, 0, min(len(ids), room)),
                answer=filled[i][1] if self.score == "generate" else None,
                decoder_ids=[to.decoder_start, *labels[:-1]],
            )
            made.append((example, cut))
        return made

    def for_evaluation(self) -> Self:
        return self.replace(label_smoothing=None)

    @property
    def answers_in_text(self) -> bool:
        return True

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Evaluate as a language model; with `score: generate` also `exact_match` and `chrf`."""
        figures = super().judge(judge, examples)
        if self.score == "generate":
            figures |= judge.answers(examples, num_beams=self.num_beams or 1, of="seq2seq")
        return figures

    def prompt_ids(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the encoder's input ids for a prompt, closed by the tokenizer's own end token."""
        from ..data.encoding import SpecialTokens, tokenize_plain

        specials = SpecialTokens.of(tokenizer, begin=False)
        return [*specials.prefix, *tokenize_plain(tokenizer, text), *specials.suffix]
