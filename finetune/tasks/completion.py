"""`task.kind: completion`: a prompt and an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..config import check_bounds
from ..errors import UserError
from .base import TemplateTask, check_task_metrics

if TYPE_CHECKING:
    from ..data.encoding import EncodingResult, RowEncoder
    from ..data.example import Example
    from ..data.rows import Row
    from ..data.template import Template
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

    causal: ClassVar[bool] = True
    backbone: ClassVar[Literal["decoder"]] = "decoder"
    truncates: ClassVar[Literal["left"]] = "left"
    soft_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), max_truncated=(0, 1))
        check_task_metrics(self)

    @property
    def figure_names(self) -> tuple[str, ...]:
        from ..evaluate.metrics import metric_names

        return (
            *metric_names(
                "text", *(["classes"] if self.score == "rank" else ["answers"] if self.score == "generate" else [])
            ),
            *self.metrics,
        )

    def templates(self) -> tuple[Template, Template]:
        from ..data.template import Template

        return Template(self.prompt, "task.prompt"), Template(self.completion, "task.completion")

    @property
    def has_classes(self) -> bool:
        return self.score == "rank"

    def encode(self, rows: Iterable[Row], to: RowEncoder) -> tuple[list[Example], tuple[str, ...] | None]:
        """Encode as `prefix prompt completion eos`; the completion and its eos are target tokens.

        Prompt and completion are tokenised separately and joined, so no token spans the boundary and generation
        continues from exactly this prompt. If too long, the prompt is truncated from the left (or the side given by
        `train.truncation`), then the completion from the right.
        """
        names = None
        if self.score == "rank":
            self._check_ranked()
            rows = rows if to.label_names is not None else list(rows)
            names = tuple(to.label_names if to.label_names is not None else self.class_names(rows) or ())
        choices = _ChoiceEncoder(self.templates()[1], names, to)
        return to.samples(rows, self.templates(), lambda chunk, texts: self._made(chunk, texts, choices, to)), names

    def _check_ranked(self) -> None:
        prompt, answer = self.templates()
        if "label" not in answer.columns:
            raise UserError(f"task.score: rank needs {{label}} in task.completion, which is {self.completion!r}")
        if "label" in prompt.columns:
            raise UserError(f"task.score: rank needs a prompt that does not give {{label}} away; it is {self.prompt!r}")

    def _made(
        self, rows: Sequence[Row], filled: Sequence[Sequence[str]], choices: _ChoiceEncoder, to: RowEncoder
    ) -> list[EncodingResult]:
        """Encode a chunk of rows.

        filled: prompt and answer of each row.
        """
        from ..data.encoding import Truncation
        from ..data.example import IGNORE, Example
        from ..data.labels import label_index
        from ..data.template import fit_completion

        prompts = to.tokens(to.within((prompt for prompt, _ in filled), left=to.left))["input_ids"]
        texts = to.within(answer for _, answer in filled)
        batch = to.tokens(texts)
        prefix = list(to.specials.prefix)
        made: list[EncodingResult] = []
        of_rows = choices.of(rows)
        for i, (row, prompt, ids) in enumerate(zip(rows, prompts, batch["input_ids"], strict=True)):
            mine = of_rows[i]
            # All choices share one prompt, so it is truncated to leave room for the longest of them.
            reserve = max(map(len, mine)) if mine else 0
            context, kept, shorter = fit_completion(
                prefix, prompt, [*ids, *to.end], to.max_length, reserve=reserve, left=to.left
            )
            cut = Truncation(
                len(prefix) + len(prompt) + max(len(ids) + len(to.end), reserve),
                shorter,
                answer=len(kept) < len(ids) + len(to.end),
                prompt=bool(prompt) and len(context) == len(prefix),
            )
            if not texts[i].strip() or not ids or len(context) + len(kept) < 2:
                made.append(("the completion is empty", cut))
                continue
            if not context and self.score != "perplexity":
                made.append((f"the prompt is empty, so score: {self.score} has nothing to start from", cut))
                continue
            # Without context, nothing predicts the first token of the answer.
            labels = [IGNORE] * len(context) + kept if context else [IGNORE, *kept[1:]]
            example = Example(
                [*context, *kept],
                labels,
                row.id,
                row.where,
                to.bytes(texts[i], batch, i, 0 if context else 1, min(len(ids), len(kept))),
                choices=mine,
                gold=label_index(row, choices.names) if choices.names is not None else None,
                answer=filled[i][1] if self.score == "generate" else None,
            )
            made.append((example, cut))
        return made

    @property
    def answers_in_text(self) -> bool:
        return self.score != "rank"

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        return {"label": (label_names or ("",))[0]}

    def predict(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return the likeliest class and its probability among the completions, in the columns of `Classify.predict`
        (score: rank)."""
        return judge.chosen(judge.ranks(examples))

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Evaluate as a language model; with `score: rank` also `accuracy, f1_macro, matthews, majority_floor`, with
        `score: generate` also `exact_match`."""
        if self.score == "rank":
            return judge.ranked(examples)
        figures = super().judge(judge, examples)
        return figures | judge.answers(examples) if self.score == "generate" else figures


class _ChoiceEncoder:
    """Tokenised completions of all classes, in head order."""

    def __init__(self, template: Template, names: tuple[str, ...] | None, to: RowEncoder) -> None:
        """names: the classes; None: rows have no choices."""
        self.template, self.names, self.to = template, names, to
        self._known: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def of(self, rows: Sequence[Row]) -> list[Any]:
        """Return the completions of each row, ((token, …), …) or None; rows with the same texts share one tuple."""
        if self.names is None:
            return [None] * len(rows)
        to = self.to
        texts = [tuple(self.template.fill(row, label=name) for name in self.names) for row in rows]
        for all_of_row in set(texts) - self._known.keys():
            encoded = to.tokens(list(all_of_row))["input_ids"]
            # Leave room for at least one token of context.
            self._known[all_of_row] = tuple((*ids, *to.end)[: to.max_length - 1] for ids in encoded)
        return [self._known[all_of_row] for all_of_row in texts]
