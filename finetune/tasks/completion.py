"""`task.kind: completion`: a prompt and an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..compute.protocols import TaskTraits
from ..config import check_bounds
from ..errors import UserError
from .base import TemplateTask, check_task_metrics

if TYPE_CHECKING:
    from ..data.encoding import EncodingResult, RowEncoder
    from ..data.example import Example
    from ..data.rows import Row
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator


@dataclass(frozen=True, kw_only=True)
class Completion(TemplateTask):
    """Causal language modelling of an answer: only completion tokens are target tokens."""

    kind: Literal["completion"] = "completion"
    prompt: str = "{text}"
    """Template of the prompt over the row's columns; its tokens are not trained on."""
    completion: str = " {label}"
    """Template of the answer over the row's columns; trained on, followed by the end-of-sequence token."""
    pack: bool = True
    """Pack several examples into each row of `train.max_length` tokens; examples do not attend to each other."""
    dft: bool = False
    """Weight each target token's loss by the probability that the model gives it (DFT, 2508.05629): tokens that it
    thinks unlikely, wrong ones among them, count less. In training only: evaluation reports the loss without it."""
    score: Literal["perplexity", "rank", "generate"] = "perplexity"
    """Evaluation on dev and test in addition to perplexity: `rank` the completions of all labels by likelihood
    (accuracy, F1, Matthews), or `generate` greedily and compare (exact match)."""
    max_new_tokens: int = 64
    """Maximum length of a generated answer in tokens (score: generate)."""
    metrics: tuple[str, ...] = ()
    """Additional metrics of generated answers (score: generate): `numeric_match` (the last number, or the one after
    `####`), `has_number`, `match_normalised`, `f1_words`, and for tags `span_f1`, `span_precision`, `span_recall`."""
    max_truncated: float | None = None
    """Maximum share of rows whose completion may be truncated at `train.max_length`; the run stops if there are
    more. Null: 0.1."""

    answer_setting: ClassVar[str] = "completion"
    traits: ClassVar[TaskTraits] = TaskTraits(
        causal=True, backbone="decoder", truncation_side="left", takes_soft_tokens=True
    )

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), max_truncated=(0, 1))
        check_task_metrics(self)

    @property
    def has_classes(self) -> bool:
        return self.score == "rank"

    def encode(self, rows: Iterable[Row], encoder: RowEncoder) -> tuple[list[Example], tuple[str, ...] | None]:
        """Encode as `prefix prompt completion eos`; the completion and its eos are target tokens.

        Prompt and completion are tokenised separately and joined, so no token spans the boundary and generation
        continues from exactly this prompt. If too long, the prompt is truncated from the left (or the side given by
        `train.truncation`), then the completion from the right.
        """
        names = None
        if self.score == "rank":
            prompt, answer = self.templates()
            if "label" not in answer.columns:
                raise UserError(f"task.score: rank needs {{label}} in task.completion, which is {self.completion!r}")
            if "label" in prompt.columns:
                raise UserError(
                    f"task.score: rank needs a prompt that does not give {{label}} away; it is {self.prompt!r}"
                )
            rows = rows if encoder.label_names is not None else list(rows)
            names = tuple(encoder.label_names if encoder.label_names is not None else self.class_names(rows) or ())
        template = self.templates()[1]

        @cache
        def encode_choices(completions: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
            encoded = encoder.tokens(list(completions))["input_ids"]
            # Leave room for at least one token of context.
            return tuple((*ids, *encoder.end)[: encoder.max_length - 1] for ids in encoded)

        def encode_chunk(rows: Sequence[Row], texts: Sequence[Sequence[str]]) -> Iterator[EncodingResult]:
            choices = None
            if names is not None:
                choices = [encode_choices(tuple(template.fill(row, label=name) for name in names)) for row in rows]
            return self._encode_chunk(rows, texts, names, choices, encoder)

        return encoder.samples(rows, self.templates(), encode_chunk), names

    def _encode_chunk(
        self,
        rows: Sequence[Row],
        texts: Sequence[Sequence[str]],
        names: tuple[str, ...] | None,
        choices: Sequence[tuple[tuple[int, ...], ...]] | None,
        encoder: RowEncoder,
    ) -> Iterator[EncodingResult]:
        """Encode a chunk of rows.

        texts: prompt and answer of each row. choices: tokens of its completions of all classes `names`.
        """
        from ..data.encoding import Truncation
        from ..data.example import IGNORE, Example
        from ..data.labels import label_index
        from ..data.template import fit_completion

        prompts = encoder.tokens(encoder.within((prompt for prompt, _ in texts), left=encoder.left))["input_ids"]
        answers = encoder.within(answer for _, answer in texts)
        batch = encoder.tokens(answers)
        prefix = list(encoder.specials.prefix)
        for i, (row, prompt, ids) in enumerate(zip(rows, prompts, batch["input_ids"], strict=True)):
            # All choices share one prompt, so it is truncated to leave room for the longest of them.
            reserve = max(map(len, choices[i])) if choices else 0
            answer = [*ids, *encoder.end]
            context, targets, shorter = fit_completion(
                prefix, prompt, answer, encoder.max_length, reserve=reserve, left=encoder.left
            )
            needs, lost = len(prefix) + len(prompt) + max(len(answer), reserve), len(context) == len(prefix)
            truncation = Truncation(needs, shorter, answer=len(targets) < len(answer), prompt=bool(prompt) and lost)
            if not answers[i].strip() or not ids or len(context) + len(targets) < 2:
                yield "the completion is empty", truncation
                continue
            if not context and self.score != "perplexity":
                yield f"the prompt is empty, so score: {self.score} has nothing to start from", truncation
                continue
            # Without context, nothing predicts the first token of the answer.
            labels = [IGNORE] * len(context) + targets if context else [IGNORE, *targets[1:]]
            size = encoder.bytes(answers[i], batch, i, 0 if context else 1, min(len(ids), len(targets)))
            yield Example(
                [*context, *targets], labels, row.id, row.where, size, choices=choices[i] if choices else None,
                gold=label_index(row, names) if names is not None else None,
                answer=texts[i][1] if self.score == "generate" else None,
            ), truncation  # fmt: skip

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        return {"label": (label_names or ("",))[0]}

    def predict(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return the likeliest class and its probability among the completions, in the columns of `Classify.predict`
        (score: rank)."""
        return evaluator.class_columns(evaluator.rank_choices(examples))

    def evaluate(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Evaluate as a language model; with `score: rank` also `accuracy, f1_macro, matthews, majority_floor`, with
        `score: generate` also `exact_match`."""
        return evaluator.ranking_metrics(examples) if self.score == "rank" else super().evaluate(evaluator, examples)
