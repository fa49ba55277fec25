"""Task interface with default implementations."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..compute.protocols import TaskTraits
from ..errors import UserError
from ..evaluate.metrics import metric_names

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..compute.micro_batch import PreferenceTargets
    from ..data.encoding import RowEncoder
    from ..data.example import Example, GenerationPrompt
    from ..data.labels import Units
    from ..data.masking import Masking
    from ..data.rows import Row
    from ..data.template import Template
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator


class BaseTask:
    """Base class of tasks: required columns, encoding, loss and evaluation.

    A kind is a frozen dataclass of its settings, tagged by `kind`, that overrides what differs. Methods import heavy
    modules inside, because recipes are parsed without torch.
    """

    kind: str
    pack: bool = False
    """True if a training row holds several examples."""
    score: str = "perplexity"
    """Evaluation on dev and test in addition to perplexity: `rank` or `generate`."""
    metrics: tuple[str, ...] = ()
    """Additional metrics of generated text (`flatshift.finetune.evaluate.metrics`, "agreement")."""
    max_new_tokens: int = 64
    num_beams: int | None = None
    labels: tuple[str, ...] | None = None
    """Classes in head order, if the settings name them."""
    multi: bool | None = None
    standardise: bool = False
    """True if targets are standardised for training."""
    max_truncated: float | None = None
    dft: bool = False
    """True if each target token's loss is weighted by its own probability
    (`flatshift.finetune.compute.loss.weigh_by_probability`)."""
    template: str = "auto"

    traits: ClassVar[TaskTraits] = TaskTraits()

    def replace(self, **settings: Any) -> Self:
        """Return the task with other settings, which must exist for its kind."""
        task: Any = self
        return dataclasses.replace(task, **settings)

    @property
    def name(self) -> str:
        """Kind, with the settings that change its nature."""
        return self.kind

    @property
    def no_axes(self) -> Mapping[str, str]:
        """Mesh axes on which its models cannot be trained → reason; rows of `flatshift.finetune.planner.rules`."""
        return {}

    @property
    def loss_denominator(self) -> str:
        """Unit by whose number the loss is divided: `tokens`, `examples`, `pairs` or `answers`."""
        return "examples" if self.traits.is_sequence_level else "tokens"

    @property
    def supervised(self) -> float:
        """Largest share of a row's tokens that are target tokens."""
        return 1.0

    @property
    def is_unpaired(self) -> bool:
        """True if each answer has its own loss term, relative to answers paired with prompts of other examples
        (`is_answer_level`)."""
        return False

    @property
    def has_reference(self) -> bool:
        """True if the loss compares with the base model, run with the adapter off (`is_answer_level`)."""
        return False

    def columns(self) -> tuple[str, ...]:
        """Return the columns that every row must have. Raises UserError for a malformed template."""
        return ("text",)

    def optional_columns(self) -> tuple[str, ...]:
        """Return the canonical columns that a row may have in addition, without `id`, which no task reads."""
        return ()

    def read_label(self, value: Any) -> Any:
        """Convert a record's label to that of a row. Raises ValueError with the reason if its type is wrong."""
        from ..data.rows import canonical_label

        return canonical_label(value)

    @property
    def has_classes(self) -> bool:
        """True if labels are classes, which must be known before rows are encoded."""
        return False

    @property
    def one_class(self) -> bool:
        """True if every row has exactly one class, predicted by a head."""
        return self.traits.is_sequence_level and self.has_classes and not self.multi

    def class_names(self, rows: Iterable[Row]) -> tuple[str, ...] | None:
        """Return the classes in head order: `labels`, else the sorted ones of these rows; None without classes."""
        from ..data.labels import iter_classes, sort_labels

        return self.labels or (sort_labels(iter_classes(rows)) if self.has_classes else None)

    @property
    def input_format(self) -> InputFormat:
        """Text and tokens that the model reads before it predicts."""
        return InputFormat(self)

    def encoder(self, tokenizer: PreTrainedTokenizerBase, max_length: int, **options: Any) -> Any:
        """Return an encoder that takes rows in chunks: `add(rows) -> Encoded`, and at the end `close() -> notes`.

        options: keyword arguments of `flatshift.finetune.data.encoding.encode`.
        """
        from ..data.encoding import RowEncoder

        return RowEncoder(self, tokenizer, max_length, **options)

    def encode(self, rows: Iterable[Row], encoder: RowEncoder) -> tuple[list[Example], tuple[str, ...] | None]:
        """Encode `rows`; return the examples, and the classes in head order if the task has any.

        `encoder` counts bad and truncated rows.

        Raises UserError: a label outside the classes, a missing column of a template, a row without target tokens
        (unless skipped), an example that is too long (if refused).
        """
        raise NotImplementedError

    def masking(self, tokenizer: PreTrainedTokenizerBase) -> Masking | None:
        """Return the random masking applied each time a row is drawn; None if the task masks nothing. Raises UserError
        if the tokenizer has no mask token."""
        return None

    def without_limits(self) -> Self:
        """Return the task without limits on the share of rows that may lose target tokens."""
        return self

    def head_settings(self, *, num_labels: int | None, label_names: Sequence[str] | None) -> dict[str, Any]:
        """Return settings of the model configuration, such as the classes of a head."""
        return {}

    def example_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, float32 [B], from logits [B, C] (`is_sequence_level`)."""
        raise NotImplementedError

    def answer_losses(self, log_probs: Tensor, targets: PreferenceTargets) -> Tensor:
        """Return the loss of each pair (P,), or of each answer (R,) if `is_unpaired`, from log p of each row's answer
        (R,) (`is_answer_level`)."""
        raise NotImplementedError

    def rewards(self, log_probs: Tensor, targets: PreferenceTargets) -> Tensor:
        """Return the implicit reward of each row's answer (R,), from its log p (R,) (`is_answer_level`)."""
        raise NotImplementedError

    def residuals(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return targets minus outputs, float32 [B, C]; a row's loss is the sum of their squares (`squares`)."""
        raise NotImplementedError

    def answered_right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return for each example whether logits [B, C] predict its label, bool [B] (`has_accuracy`)."""
        raise NotImplementedError

    def format_label(self, label: Tensor, *, label_names: Sequence[str] | None, units: Units | None) -> str:
        """Format the label of one row for the first-batch panel (`is_sequence_level`)."""
        raise NotImplementedError

    @property
    def squares(self) -> bool:
        """True if a row's loss is the sum of squared `residuals`."""
        return False

    @property
    def smoothing(self) -> float:
        """ε of label smoothing (Szegedy et al. 1512.00567, §7): a token's loss is (1 − ε)·−log p(token) + ε times
        the mean of −log p over the vocabulary, as in transformers' `LabelSmoother`."""
        return 0.0

    def for_evaluation(self) -> Self:
        """Return the task for evaluation on dev and test, without settings that only regularise training."""
        neutral = {"dft": False, "label_smoothing": None}
        changed = {name: value for name, value in neutral.items() if vars(self).get(name, value) != value}
        return self.replace(**changed) if changed else self

    @property
    def figure_names(self) -> tuple[str, ...]:
        """Names of the metrics that evaluation returns with the current settings."""
        answers = "seq2seq" if self.traits.encoder_decoder else "answers"
        added = {"generate": (answers,), "rank": ("classes",)}.get(self.score, ())
        return (*metric_names("hidden" if self.traits.masks_tokens else "text", *added), *self.metrics)

    def evaluate(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return the metrics of a model on encoded examples, each `{value, low, high, n}`; see
        `flatshift.finetune.evaluate.evaluator.evaluate`: by default those of the target tokens, and with
        `score: generate` those of the generated answers.

        Raises UserError: answers that do not fit the backbone.
        """
        figures = evaluator.perplexity_metrics(examples, *evaluator.token_nll(examples))
        return figures | evaluator.answer_metrics(examples) if self.score == "generate" else figures

    def predict(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return the prediction for each encoded example, by column; by default the text's negative log-likelihood
        in `nats`, its number of target `tokens`, and their `perplexity`. The first piece of a document has the sums
        over all its pieces."""
        return evaluator.perplexity_columns(examples)

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        """Return placeholder values for label columns, so that rows without a label can be encoded."""
        return {}


class InputFormat:
    """Text and tokens that the model of a task reads before it predicts: the prompt, or the whole text.

    A kind whose rows are no plain texts has a subclass.
    """

    uses_chat_template: ClassVar[bool] = False
    """True if prompts are conversations that a chat template renders with its special tokens."""

    def __init__(self, task: BaseTask) -> None:
        self.task = task

    def columns(self) -> tuple[str, ...]:
        """Return the columns used in the prompt. Raises UserError for a malformed template."""
        return ("text",)

    def answer_columns(self) -> tuple[str, ...]:
        """Return the columns used only in the answer. Raises UserError for a malformed template, or if there are
        none."""
        return ("label",)

    def render(self, row: Row) -> str:
        """Return the prompt of a row. Raises UserError for a column that it cannot render."""
        return str(row.values["text"])

    def token_ids(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the model's input ids for a prompt, the same as before an answer in training, without truncation; an
        encoder's end with the tokenizer's own end token."""
        from ..data.encoding import SpecialTokens, tokenize_plain

        own_encoder = self.task.traits.encoder_decoder
        specials = SpecialTokens.of(tokenizer, begin=not own_encoder)
        return [*specials.prefix, *tokenize_plain(tokenizer, text), *(specials.suffix if own_encoder else ())]

    def build_text_prompts(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False
    ) -> list[GenerationPrompt]:
        """Return model inputs for texts given instead of rows, formatted as prompts; `raw`: unchanged. Raises UserError
        if the prompt does not have exactly one column (unless raw)."""
        from ..data.example import GenerationPrompt

        return [
            GenerationPrompt(f"prompt-{i}", text, self.token_ids(tokenizer, text))
            for i, text in enumerate(texts, start=1)
        ]

    def build_prompts(
        self, rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, *, bad_rows: str = "refuse"
    ) -> tuple[list[GenerationPrompt], list[str]]:
        """Return the model input of each row, and `file:line: reason` of the skipped rows. Raises UserError for a row
        that the prompt cannot render (unless skipped)."""
        from ..data.example import GenerationPrompt

        prompts, skipped = list[GenerationPrompt](), list[str]()
        for row in rows:
            try:
                text = self.render(row)
                prompts.append(GenerationPrompt(row.id, text, self.token_ids(tokenizer, text), where=row.where))
            except UserError as error:
                if bad_rows == "refuse":
                    raise
                skipped.append(str(error))
        return prompts, skipped

    def template_record(self) -> dict[str, str] | None:
        """Return `path, sha256` of the chat template file that the settings name, for a manifest; None if they name
        none. Raises UserError if the file does not exist or is not text."""
        return None

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Modify `tokenizer` in place, so that its saved copy encodes a text as training did: the tokens before an
        answer, or the whole row if the task generates nothing."""
        from ..data.encoding import SpecialTokens
        from ..data.post_processor import set_post_processor

        traits = self.task.traits
        specials = SpecialTokens.of(tokenizer, begin=not traits.encoder_decoder)
        if traits.causal:  # a prompt does not end with the tokens that close an answer
            specials = dataclasses.replace(specials, middle=(), suffix=(), pair_suffix=())
        set_post_processor(tokenizer, specials, pairs=traits.is_sequence_level)

    def matches_saved(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        """Return True if the tokenizer, prepared, `saved` and loaded again, encodes `row` by a plain call to the
        same ids as in `example`: the whole row, or the part before the answer."""
        ids = list(saved(self.render(row))["input_ids"])
        return ids == (example.input_ids[: len(ids)] if self.task.traits.causal else example.input_ids)


class TemplateTask(BaseTask):
    """Base class of tasks with two templates over a row's columns: a prompt, and an answer that holds the target
    tokens."""

    prefix: str | None = None
    answer_setting: ClassVar[str]
    """Setting that holds the template of the answer."""

    def templates(self) -> tuple[Template, Template]:
        """Return the templates of prompt and answer. Raises UserError if one is malformed."""
        from ..data.template import Template

        prompt, answer = (Template(getattr(self, name), f"task.{name}") for name in ("prompt", self.answer_setting))
        return prompt, answer

    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for template in self.templates() for name in template.columns))

    @property
    def input_format(self) -> InputFormat:
        return TemplateFormat(self)


class TemplateFormat(InputFormat):
    """Prompt written by the first of a task's two templates."""

    task: TemplateTask

    def columns(self) -> tuple[str, ...]:
        return self.task.templates()[0].columns

    def answer_columns(self) -> tuple[str, ...]:
        prompt, answer = self.task.templates()
        columns = tuple(name for name in answer.columns if name not in prompt.columns)
        if not columns:
            raise UserError(
                f"data.label_noise: the answer of task.kind: {self.task.kind} has no column that task.prompt does not "
                "show, so no other row's can be put in its place"
            )
        return columns

    def render(self, row: Row) -> str:
        try:
            return (self.task.prefix or "") + self.task.templates()[0].fill(row)
        except ValueError as error:
            raise UserError(f"{row.where}: {error}") from None

    def build_text_prompts(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False
    ) -> list[GenerationPrompt]:
        from ..data.rows import Row

        columns = self.columns()
        if raw:
            return super().build_text_prompts(texts, tokenizer)
        if len(columns) != 1:
            names = " and ".join(f"{{{name}}}" for name in columns) or "no column"
            raise UserError(
                f"--prompt: a text alone does not fill the run's prompt, which shows {names}; give rows with these "
                "columns by --data, or --raw for texts as they stand"
            )
        rows = [Row({columns[0]: text}, f"prompt-{i}", f"--prompt {i}") for i, text in enumerate(texts, start=1)]
        return self.build_prompts(rows, tokenizer)[0]


class SequenceLevelTask(BaseTask):
    """Base class of tasks with a new head over `text` (or the pair `text`, `text2`) that predicts for the whole row."""

    traits: ClassVar[TaskTraits] = TaskTraits(
        is_sequence_level=True, has_new_head=True, auto_class="AutoModelForSequenceClassification"
    )

    @property
    def no_axes(self) -> Mapping[str, str]:
        return {
            "cp": "a head takes the last token, which one rank has",
            "pp": "a row that fills a piece up must bear a label that the loss leaves out",
        }

    def columns(self) -> tuple[str, ...]:
        return ("text", "label")

    def optional_columns(self) -> tuple[str, ...]:
        return ("text2",)

    @property
    def input_format(self) -> InputFormat:
        return _WholeTextFormat(self)


class _WholeTextFormat(InputFormat):
    def matches_saved(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        """Compare with the tokenizer's own truncation, which cuts as training does."""
        texts = [row.values["text"], *filter(None, [row.values.get("text2")])]
        return list(saved(*texts, truncation=True, max_length=max_length)["input_ids"]) == example.input_ids


def check_task_metrics(task: BaseTask) -> None:
    """Raise UserError for unknown `metrics`, or if no answers are generated for them."""
    if task.metrics and task.score != "generate":
        raise UserError("metrics evaluates generated text; set task.score: generate, or leave it out")
    names = metric_names("agreement")
    for name in task.metrics:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(names)}"
            raise UserError(f"metrics: no metric {name!r} of answers; {hint}")
