"""Task interface with default implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ..errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..compute.micro_batch import PreferenceTargets
    from ..config import Train
    from ..data.encoding import RowEncoder
    from ..data.example import Example, GenerationPrompt
    from ..data.labels import OutputLayer, Units
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

    # ------------------------------------------------------------------------------------------- settings of some kinds

    kind: str
    pack: bool = False
    """True if a training row holds several examples."""
    score: str = "perplexity"
    """Evaluation on dev and test in addition to perplexity: `rank` or `generate`."""
    metrics: tuple[str, ...] = ()
    """Additional metrics of generated text (`flatshift.finetune.evaluate.metrics`, "agreement")."""
    max_new_tokens: int = 64
    num_beams: int | None = None
    prefix: str | None = None
    multi: bool | None = None
    max_truncated: float | None = None
    label_smoothing: float | None = None
    template: str = "auto"

    # ------------------------------------------------------------------------------------------- properties of the kind

    is_sequence_level: ClassVar[bool] = False
    """True if a new head predicts for the whole row: labels belong to rows, and the loss is divided by examples."""
    by_answer: ClassVar[bool] = False
    """True if the loss depends on the log-likelihood of whole answers: it is divided by pairs of answers, or by
    answers."""
    rows_of_example: ClassVar[int] = 1
    """Token rows that the model reads per example."""
    causal: ClassVar[bool] = False
    """True if the output at position t predicts the label at t + 1, so that the first token of an example has no
    prediction."""
    encoder_decoder: ClassVar[bool] = False
    """True if an encoder reads the row and a decoder predicts its labels after a start token."""
    backbone: ClassVar[Literal["decoder", "encoder", "any"]] = "any"
    """Required kind of backbone (except for `encoder_decoder`)."""
    modelling: ClassVar[str] = "causal language modelling"
    """Name of the objective in errors about backbones."""
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    """transformers class that loads its models."""
    peft_type: ClassVar[str | None] = "CAUSAL_LM"
    """PEFT `task_type`; None if PEFT has none that fits."""
    new_head: ClassVar[bool] = False
    """True if the checkpoint may lack the head, which is then randomly initialised and fully trained."""
    loss_unit: ClassVar[str] = "nats per target token"
    """Unit of the loss, for messages."""
    truncates: ClassVar[Literal["left", "right"]] = "right"
    """Side from which a text or prompt that is too long is truncated, unless `train.truncation` is set."""
    noise: ClassVar[Literal["tokens", "rows"]] = "rows"
    """Level at which `data.label_noise` corrupts labels: tokens of encoded rows, or rows."""
    documents: ClassVar[bool] = False
    """True if rows are plain documents, whose tokens are all evaluated however long they are."""
    splits: ClassVar[bool] = False
    """True if a row that is too long may be split into pieces (`train.overlong: split`)."""
    soft_tokens: ClassVar[bool] = False
    """True if soft tokens may be prepended to its rows."""
    accuracy: ClassVar[bool] = False
    """True if dev metrics include accuracy, by which the best step can be chosen."""
    has_targets: ClassVar[bool] = False
    """True if labels are numbers, whose units must be known before rows are encoded."""
    hides_tokens: ClassVar[bool] = False
    """True if tokens are masked at random each time a row is drawn (`masking`)."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Incompatible blocks, settings or flags → error message for the user."""

    def replace(self, **settings: Any) -> Self:
        """Return the task with other settings, which must exist for its kind."""
        same: Any = self
        return dataclasses.replace(same, **settings)

    def as_read(self, train: Train) -> Train:
        """Return `train` with the batch size in token rows that the model reads, for memory estimates."""
        return dataclasses.replace(train, batch_size=train.batch_size * self.rows_of_example)

    def refuse(self, what: str) -> None:
        """Raise UserError if the block, setting or flag `what` is incompatible with the task."""
        if what in self.refuses:
            raise UserError(self.refuses[what])

    @property
    def name(self) -> str:
        """Kind, with the settings that change its nature."""
        return self.kind

    @classmethod
    def variants(cls) -> Sequence[Self]:
        """Return the kind at its defaults, and with each setting that changes its nature."""
        return (cls(),)

    @property
    def no_axes(self) -> Mapping[str, str]:
        """Mesh axes on which its models cannot be trained → reason; rows of `flatshift.finetune.planner.rules`."""
        return {}

    @property
    def figure_names(self) -> tuple[str, ...]:
        """Names of the metrics that evaluation returns with the current settings."""
        from ..evaluate.metrics import metric_names

        return metric_names("text")

    @property
    def is_generative(self) -> bool:
        """True if its models continue a prompt."""
        return not (self.is_sequence_level or self.backbone == "encoder")

    @property
    def loss_denominator(self) -> str:
        """Unit by whose number the loss is divided: `tokens`, `examples`, `pairs` or `answers`."""
        return "examples" if self.is_sequence_level else "tokens"

    @property
    def supervised(self) -> float:
        """Largest share of a row's tokens that are target tokens."""
        return 1.0

    @property
    def is_unpaired(self) -> bool:
        """True if each answer has its own loss term, relative to answers paired with prompts of other examples
        (by_answer)."""
        return False

    @property
    def has_reference(self) -> bool:
        """True if the loss compares with the base model, run with the adapter off (by_answer)."""
        return False

    @property
    def uses_chat_template(self) -> bool:
        """True if prompts are conversations that a chat template renders with its special tokens."""
        return False

    @property
    def one_class(self) -> bool:
        """True if every row has exactly one class, predicted by a head."""
        return False

    # -------------------------------------------------------------------------------------------------------- columns

    def columns(self) -> tuple[str, ...]:
        """Return the columns that every row must have.

        Raises:
            UserError: a malformed template.
        """
        return ("text",)

    def optional_columns(self) -> tuple[str, ...]:
        """Return the canonical columns that a row may have in addition. `id` is not among them, because no task
        reads it."""
        return ()

    def read_label(self, value: Any) -> Any:
        """Convert a record's label to that of a row. Raises ValueError with the reason if its type is wrong."""
        from ..data.rows import canonical_label

        return canonical_label(value)

    # --------------------------------------------------------------------------------------------- classes and targets

    @property
    def has_classes(self) -> bool:
        """True if labels are classes, which must be known before rows are encoded."""
        return False

    @property
    def given_classes(self) -> tuple[str, ...] | None:
        """Classes in head order if the settings name them, else None."""
        return None

    def with_classes(self, names: tuple[str, ...] | None) -> Self:
        """Return the task with `names` as its classes in head order, if it has such a setting."""
        return self

    def class_names(self, rows: Iterable[Row]) -> tuple[str, ...] | None:
        """Return the classes in head order: those given, else the sorted labels of the training rows; None without
        classes."""
        from ..data.labels import iter_classes, sort_labels

        return self.given_classes or (sort_labels(iter_classes(rows)) if self.has_classes else None)

    @property
    def own_units(self) -> bool:
        """True if targets are standardised for training."""
        return False

    def units(self, targets: Sequence[float], backbone: str | Path) -> Units | None:
        """Return the units in which training sees the `targets` of the training rows; None if the task has no
        targets."""
        return None

    def head_layer(self, backbone: str | Path) -> OutputLayer | None:
        """Return the layer of `backbone` into which standardisation is folded after training; None without
        standardisation."""
        return None

    def with_noise(
        self, rows: Sequence[Row], *, rate: float, label_names: Sequence[str] | None, seed: int
    ) -> tuple[list[Row], list[str]]:
        """Return the rows, ⌊rate·n + ½⌋ of n with a wrong label, and the ids of those (noise: rows).

        Raises:
            UserError: there is no other label, or a rate outside [0, 1].
        """
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- encoding

    def encoder(self, tokenizer: PreTrainedTokenizerBase, max_length: int, **how: Any) -> Any:
        """Return an encoder that takes rows in chunks: `add(rows) -> Encoded`, and at the end `close() -> notes`.

        how: keyword arguments of `flatshift.finetune.data.encoding.encode`.
        """
        from ..data.encoding import RowEncoder

        return RowEncoder(self, tokenizer, max_length, **how)

    def encode(self, rows: Iterable[Row], to: RowEncoder) -> tuple[list[Example], tuple[str, ...] | None]:
        """Encode `rows`; return the examples, and the classes in head order if the task has any.

        Bad and truncated rows are counted in `to.losses`.

        Raises:
            UserError: a label outside the classes, a missing column of a template, a row without target tokens (unless
                skipped), an example that is too long (if refused).
        """
        raise NotImplementedError

    def masking(self, tokenizer: PreTrainedTokenizerBase) -> Masking | None:
        """Return the random masking applied each time a row is drawn; None if the task masks nothing.

        Raises:
            UserError: the tokenizer has no mask token.
        """
        return None

    def without_limits(self) -> Self:
        """Return the task without limits on the share of rows that may lose target tokens."""
        return self

    # -------------------------------------------------------------------------------------- tokenizer and chat template

    def template_record(self) -> dict[str, str] | None:
        """Return `path, sha256` of the chat template file that the settings name, for a manifest; None if they name
        none.

        Raises:
            UserError: the file does not exist or is not text.
        """
        return None

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Modify `tokenizer` in place, so that its saved copy encodes a text as training did: the tokens before an
        answer, or the whole row if the task generates nothing."""
        from ..data.encoding import SpecialTokens
        from ..data.post_processor import set_post_processor

        specials = SpecialTokens.of(tokenizer, begin=not self.encoder_decoder)
        if self.causal:  # a prompt does not end with the tokens that close an answer
            specials = dataclasses.replace(specials, middle=(), suffix=(), pair_suffix=())
        set_post_processor(tokenizer, specials, pairs=self.is_sequence_level)

    def reads_same(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        """Return True if the tokenizer, prepared, `saved` and loaded again, encodes `row` by a plain call to the
        same ids as in `example`: the whole row, or the part before the answer."""
        ids = list(saved(self.prompt_text(row))["input_ids"])
        return ids == (example.input_ids[: len(ids)] if self.causal else example.input_ids)

    # ------------------------------------------------------------------------------------------------------- backbone

    def head_settings(self, *, num_labels: int | None, label_names: Sequence[str] | None) -> dict[str, Any]:
        """Return settings of the model configuration, such as the classes of a head."""
        return {}

    # ------------------------------------------------------------------------------------------------------------ loss

    def example_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each example, float32 [B], from logits [B, C] (is_sequence_level)."""
        raise NotImplementedError

    def answer_losses(self, log_probs: Tensor, sides: PreferenceTargets) -> Tensor:
        """Return the loss of each pair (P,), or of each answer (R,) if is_unpaired, from log p of each row's answer
        (R,) (by_answer)."""
        raise NotImplementedError

    def rewards(self, log_probs: Tensor, sides: PreferenceTargets) -> Tensor:
        """Return the implicit reward of each row's answer (R,), from its log p (R,) (by_answer)."""
        raise NotImplementedError

    def residuals(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return targets minus outputs, float32 [B, C]; a row's loss is the sum of their squares (`squares`)."""
        raise NotImplementedError

    def answered_right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return for each example whether logits [B, C] predict its label, bool [B] (accuracy)."""
        raise NotImplementedError

    def shown_label(self, label: Tensor, *, label_names: Sequence[str] | None, units: Units | None) -> str:
        """Format the label of one row for the first-batch panel (is_sequence_level)."""
        raise NotImplementedError

    @property
    def squares(self) -> bool:
        """True if a row's loss is the sum of squared `residuals`."""
        return False

    @property
    def smoothing(self) -> float:
        """ε of label smoothing (Szegedy et al. 1512.00567, §7): a token's loss is (1 − ε)·−log p(token) + ε times
        the mean of −log p over the vocabulary, as in transformers' `LabelSmoother`."""
        return self.label_smoothing or 0.0

    def for_evaluation(self) -> Self:
        """Return the task for evaluation on dev and test, without settings that only regularise training."""
        return self

    # ------------------------------------------------------------------------------------------------------- evaluation

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return the metrics of a model on encoded examples, each `{value, low, high, n}`; see
        `flatshift.finetune.evaluate.evaluator.evaluate`.

        Raises:
            UserError: answers that do not fit the backbone.
        """
        return judge.perplexity_metrics(examples, *judge.token_nll(examples))

    # ------------------------------------------------------------------------------------------------------- prediction

    @property
    def answers_in_text(self) -> bool:
        """True if the prediction for a row is generated text."""
        return False

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        """Return placeholder values for label columns, so that rows without a label can be encoded."""
        return {}

    def predict(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return the prediction for each encoded example, by column; by default the text's negative log-likelihood
        in `nats`, its number of target `tokens`, and their `perplexity`."""
        return judge.surprises(*judge.token_nll(examples))

    # ------------------------------------------------------------------------------------------------------- generation

    def prompt_columns(self) -> tuple[str, ...]:
        """Return the columns used in the prompt. Raises UserError for a malformed template."""
        return self.columns()

    def asked_columns(self) -> tuple[str, ...]:
        """Return the columns that a row needs for `predict`. Raises UserError for a malformed template."""
        return self.prompt_columns()

    def prompt_text(self, row: Row) -> str:
        """Return the prompt of a row. Raises UserError for a column that it cannot render."""
        return str(row.values["text"])

    def prompt_ids(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the model's input ids for a prompt, the same as before an answer in training, without truncation."""
        from ..data.encoding import SpecialTokens, tokenize_plain

        return [*SpecialTokens.of(tokenizer).prefix, *tokenize_plain(tokenizer, text)]

    def ask_texts(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False
    ) -> list[GenerationPrompt]:
        """Return model inputs for texts given instead of rows, formatted as prompts; `raw`: unchanged.

        Raises:
            UserError: the prompt does not have exactly one column (unless raw).
        """
        from ..data.example import GenerationPrompt

        return [
            GenerationPrompt(f"prompt-{i}", text, self.prompt_ids(tokenizer, text))
            for i, text in enumerate(texts, start=1)
        ]

    def ask(
        self, rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, *, bad_rows: str = "refuse"
    ) -> tuple[list[GenerationPrompt], list[str]]:
        """Return the model input of each row, and `file:line: reason` of the skipped rows.

        Raises:
            UserError: a row that the prompt cannot render (unless skipped).
        """
        from ..data.example import GenerationPrompt

        shown = [(row, self.prompt_text(row)) for row in rows]
        return [GenerationPrompt(row.id, text, self.prompt_ids(tokenizer, text)) for row, text in shown], []


def check_task_metrics(task: BaseTask) -> None:
    """Raise UserError for unknown `task.metrics`, or if no answers are generated for them."""
    from ..evaluate.metrics import check_metric_names

    if task.metrics and task.score != "generate":
        raise UserError("task.metrics evaluates generated text; set task.score: generate, or leave it out")
    check_metric_names(task.metrics, "agreement", "task.metrics")


class TemplateTask(BaseTask):
    """Base class of tasks with two templates over a row's columns: a prompt, and an answer that holds the target
    tokens."""

    def templates(self) -> tuple[Template, Template]:
        """Return the templates of prompt and answer. Raises UserError if one is malformed."""
        raise NotImplementedError

    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for template in self.templates() for name in template.columns))

    def answer_columns(self) -> tuple[str, ...]:
        """Return the columns used only in the answer.

        Raises:
            UserError: a malformed template, or an answer without a column that the prompt lacks.
        """
        prompt, answer = self.templates()
        own = tuple(name for name in answer.columns if name not in prompt.columns)
        if not own:
            raise UserError(
                f"data.label_noise: the answer of task.kind: {self.kind} has no column that task.prompt does not show, "
                "so no other row's can be put in its place"
            )
        return own

    def with_noise(
        self, rows: Sequence[Row], *, rate: float, label_names: Sequence[str] | None, seed: int
    ) -> tuple[list[Row], list[str]]:
        """Replace labels by other classes if `label_names` is given, else by answers of rows with a different one."""
        from ..data.noise import flip_row_labels, replace_answers

        if label_names is not None:
            return flip_row_labels(rows, rate=rate, label_names=label_names, seed=seed)
        return replace_answers(rows, columns=self.answer_columns(), rate=rate, seed=seed)

    def prompt_columns(self) -> tuple[str, ...]:
        return self.templates()[0].columns

    def prompt_text(self, row: Row) -> str:
        try:
            return (self.prefix or "") + self.templates()[0].fill(row)
        except ValueError as error:
            raise UserError(f"{row.where}: {error}") from None

    def ask_texts(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False
    ) -> list[GenerationPrompt]:
        from ..data.rows import Row

        columns = self.prompt_columns()
        if raw:
            return super().ask_texts(texts, tokenizer, raw=True)
        if len(columns) != 1:
            shown = " and ".join(f"{{{name}}}" for name in columns) or "no column"
            raise UserError(
                f"--prompt: a text alone does not fill the run's prompt, which shows {shown}; give rows with these "
                "columns by --data, or --raw for texts as they stand"
            )
        rows = [Row({columns[0]: text}, f"prompt-{i}", f"--prompt {i}") for i, text in enumerate(texts, start=1)]
        return self.ask(rows, tokenizer)[0]


class SequenceLevelTask(BaseTask):
    """Base class of tasks with a new head over `text` (or the pair `text`, `text2`) that predicts for the whole row."""

    is_sequence_level: ClassVar[bool] = True
    new_head: ClassVar[bool] = True
    modelling: ClassVar[str] = "sequence classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    peft_type: ClassVar[str] = "SEQ_CLS"

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

    def prompt_columns(self) -> tuple[str, ...]:
        return ("text",)

    def reads_same(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        """Compare with the tokenizer's own truncation, which cuts as training does."""
        texts = [row.values["text"], *filter(None, [row.values.get("text2")])]
        return list(saved(*texts, truncation=True, max_length=max_length)["input_ids"]) == example.input_ids
