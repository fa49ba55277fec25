"""What can be asked of a task, with the answers of one that is nothing special."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ..errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..config import Train
    from ..data.encoding import RowEncoder
    from ..data.example import Example, Question
    from ..data.labels import OutputLayer, Units
    from ..data.masking import Masking
    from ..data.micro_batch import PreferenceTargets
    from ..data.rows import Row
    from ..data.template import Template
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator


@dataclass(frozen=True)
class Usage:
    """How a model of a task is asked, as lines of Python: for its model card. `tokenizer` and `model` are there."""

    text: str
    """The text that is read: an expression."""
    answer: Sequence[str]
    """Show the answer of `logits`, or the generated `answer`."""
    whole: bool = False
    """Whether the text has its special tokens in it, so that the tokenizer is to add none."""
    ends: int | list[int] | None = None
    """The tokens that end an answer."""
    before: Sequence[str] = ()
    """What comes first of all, as the names of classes."""
    options: str = ""
    """More arguments of the backbone's `from_pretrained`."""
    ask: Sequence[str] = ()
    """Make the text."""
    inputs: Sequence[tuple[str, str]] = ()
    """What the model reads beside `input_ids`: its name, and the expression for it."""


class BaseTask:
    """A task: what its rows hold, how they are encoded, what is lost on them, and how a model of them is judged.

    A kind is a frozen dataclass of its settings, tagged by `kind`, that overrides what is particular to it. Methods
    import what is heavy when they are called, since a recipe is parsed without it.
    """

    # ------------------------------------------------------------------------------------------ settings of some kinds

    kind: str
    pack: bool = False
    """Whether rows of training hold several samples."""
    score: str = "perplexity"
    """How dev and test are judged besides perplexity: also `rank` or `generate`."""
    metrics: tuple[str, ...] = ()
    """Of what models write, judged besides (`flatshift.finetune.evaluate.metrics`, "agreement")."""
    max_new_tokens: int = 64
    num_beams: int | None = None
    prefix: str | None = None
    multi: bool | None = None
    max_truncated: float | None = None
    label_smoothing: float | None = None
    template: str = "auto"

    # ---------------------------------------------------------------------------------------------------- what it is

    is_sequence_level: ClassVar[bool] = False
    """A new head answers for a whole row: the loss is divided by examples, labels are of whole rows."""
    by_answer: ClassVar[bool] = False
    """The loss is of whole answers, by how likely each is: it is divided by pairs of answers, or by answers."""
    rows_of_example: ClassVar[int] = 1
    """Rows of tokens that the model reads of one example."""
    causal: ClassVar[bool] = False
    """The model's output at position t is for the label at t + 1, and the first token of a sample has none."""
    encoder_decoder: ClassVar[bool] = False
    """An encoder reads a row and a decoder writes its labels, behind its start token."""
    backbone: ClassVar[Literal["decoder", "encoder", "any"]] = "any"
    """What the backbone must be (`encoder_decoder` apart)."""
    modelling: ClassVar[str] = "causal language modelling"
    """What errors about backbones call it."""
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    """transformers' class that loads its models."""
    pipeline_tag: ClassVar[str] = "text-generation"
    """What the hub calls its models."""
    peft_type: ClassVar[str | None] = "CAUSAL_LM"
    """PEFT's `task_type`; None where it has no kind for it."""
    new_head: ClassVar[bool] = False
    """Whether a checkpoint may lack its head, which is then drawn and trained whole."""
    loss_unit: ClassVar[str] = "nats per supervised token"
    """What its loss is counted in, for a reader."""
    truncates: ClassVar[Literal["left", "right"]] = "right"
    """The end that a longer text or prompt loses, unless `train.truncation` names one."""
    noise: ClassVar[Literal["tokens", "rows"]] = "rows"
    """Where `data.label_noise` makes labels wrong: among the tokens of encoded rows, or in the rows."""
    documents: ClassVar[bool] = False
    """Whether its rows are plain documents, of which every token is judged however long they are."""
    splits: ClassVar[bool] = False
    """A row that is too long may be read in pieces (`train.overlong: split`)."""
    soft_tokens: ClassVar[bool] = False
    """Whether soft tokens may come before its rows."""
    accuracy: ClassVar[bool] = False
    """Whether dev figures have the share of right answers, by which the best step can be chosen."""
    has_targets: ClassVar[bool] = False
    """Whether labels are numbers, whose units must be known before rows are encoded."""
    hides_tokens: ClassVar[bool] = False
    """Whether tokens are hidden anew each time a row comes up, by its `masking`."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """What it does not go with: a block, setting or flag → the sentence for the user."""

    def replace(self, **settings: Any) -> Self:
        """The same task with other settings, which its kind must have."""
        same: Any = self
        return dataclasses.replace(same, **settings)

    def as_read(self, train: Train) -> Train:
        """`train` with the rows that the model reads of a micro-batch as its batch size: what memory is planned by."""
        return dataclasses.replace(train, batch_size=train.batch_size * self.rows_of_example)

    def refuse(self, what: str) -> None:
        """Raise UserError where it does not go with `what`, a block, setting or flag."""
        if what in self.refuses:
            raise UserError(self.refuses[what])

    @property
    def name(self) -> str:
        """Its kind, with the settings that make another of it."""
        return self.kind

    @classmethod
    def variants(cls) -> Sequence[Self]:
        """The kind at its defaults, and with the settings that make another of it."""
        return (cls(),)

    @property
    def no_axes(self) -> Mapping[str, str]:
        """Axes of a mesh that its models do not train on, and why: rows of `flatshift.finetune.planner.rules`."""
        return {}

    def _check_metrics(self) -> None:
        """Raise UserError for `task.metrics` that are none, or of answers that nobody writes."""
        from ..evaluate.metrics import check_named

        if self.metrics and self.score != "generate":
            raise UserError("task.metrics judges what models write; set task.score: generate, or leave it out")
        check_named(self.metrics, "agreement", "task.metrics")

    @property
    def figure_names(self) -> tuple[str, ...]:
        """The metrics that it is judged by, as its settings are."""
        from ..evaluate.metrics import names_of

        return names_of("text")

    @property
    def is_generative(self) -> bool:
        """Whether its models continue a prompt."""
        return not (self.is_sequence_level or self.backbone == "encoder")

    @property
    def loss_denominator(self) -> str:
        """What a loss is divided by."""
        return "examples" if self.is_sequence_level else "tokens"

    @property
    def supervised(self) -> float:
        """Largest share of a row's tokens that the loss reads."""
        return 1.0

    @property
    def is_unpaired(self) -> bool:
        """Whether each answer is lost by itself, beside answers to other prompts (by_answer)."""
        return False

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the backbone alone, the adapter off (by_answer)."""
        return False

    @property
    def uses_chat_template(self) -> bool:
        """Whether prompts are conversations, which a chat template writes with its special tokens."""
        return False

    @property
    def one_class(self) -> bool:
        """Whether every row has exactly one class that a head tells."""
        return False

    # -------------------------------------------------------------------------------------------------------- columns

    def columns(self) -> tuple[str, ...]:
        """The columns that every row must have.

        Raises:
            UserError: a malformed template.
        """
        return ("text",)

    def optional_columns(self) -> tuple[str, ...]:
        """The canonical columns that a row may have beside those it must: what it learns from. A row's `id` is apart,
        as no task reads it."""
        return ()

    def read_label(self, value: Any) -> Any:
        """A record's label as a row's. Raises ValueError with the reason for a value of another kind."""
        from ..data.rows import canonical_label

        return canonical_label(value)

    # --------------------------------------------------------------------------------------------- classes and targets

    @property
    def has_classes(self) -> bool:
        """Whether labels are classes, which must be known before rows are encoded."""
        return False

    @property
    def given_classes(self) -> tuple[str, ...] | None:
        """The classes in head order, where the settings name them."""
        return None

    def with_classes(self, names: tuple[str, ...] | None) -> Self:
        """The same with these classes in head order, where its settings name them."""
        return self

    def class_names(self, rows: Iterable[Row]) -> tuple[str, ...] | None:
        """The classes in head order, given or else the sorted labels of the training rows; None where it has none."""
        from ..data.labels import classes_of, sort_labels

        return self.given_classes or (sort_labels(classes_of(rows)) if self.has_classes else None)

    @property
    def own_units(self) -> bool:
        """Whether training sees targets in units of its own."""
        return False

    def units(self, targets: Sequence[float], backbone: str | Path) -> Units | None:
        """How training is to see the `targets` of the training rows; None where there are none."""
        return None

    def head_layer(self, backbone: str | Path) -> OutputLayer | None:
        """The layer of `backbone` that units of its own are folded into; None where there are none."""
        return None

    def with_noise(
        self, rows: Sequence[Row], *, rate: float, label_names: Sequence[str] | None, seed: int
    ) -> tuple[list[Row], list[str]]:
        """The rows with ⌊rate·n + ½⌋ wrong labels of n, and the ids of those (noise: rows).

        Raises:
            UserError: there is no other label, or a rate outside [0, 1].
        """
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- encoding

    def encoder(self, tokenizer: PreTrainedTokenizerBase, max_length: int, **how: Any) -> Any:
        """What encodes rows a run at a time: `add(rows) -> Encoded` and, at the end, `close() -> notes`.

        how: as `flatshift.finetune.data.encoding.encode`.
        """
        from ..data.encoding import RowEncoder

        return RowEncoder(self, tokenizer, max_length, **how)

    def encode(self, rows: Iterable[Row], to: RowEncoder) -> tuple[list[Example], tuple[str, ...] | None]:
        """The examples of `rows`, and the classes in head order where it has them.

        Bad rows and those that are cut are told to `to.rest`.

        Raises:
            UserError: a label outside the classes, a column that a template needs, a row with nothing to supervise
                (unless skipped), a longer sample (if refused).
        """
        raise NotImplementedError

    def masking(self, tokenizer: PreTrainedTokenizerBase) -> Masking | None:
        """How tokens are hidden anew each time a row comes up; None where none is.

        Raises:
            UserError: a tokenizer that cannot hide one.
        """
        return None

    def without_limits(self) -> Self:
        """The same where any share of rows may lose what is supervised."""
        return self

    # ------------------------------------------------------------------------------------------------- conversations

    def template_record(self) -> dict[str, str] | None:
        """`path, sha256` of the chat template that it names, for a manifest; None where it names none.

        Raises:
            UserError: no such file, or it is not text.
        """
        return None

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Give `tokenizer`, in place, what must be saved with it so that a model is asked as it was trained: of a text
        it makes what training put before an answer, or the whole row where there is none to write."""
        from ..data.encoding import Specials
        from ..data.post_processor import adopt

        specials = Specials.of(tokenizer, begin=not self.encoder_decoder)
        if self.causal:  # what closes an answer is none of a prompt
            specials = dataclasses.replace(specials, middle=(), suffix=(), pair_suffix=())
        adopt(tokenizer, specials, pairs=self.is_sequence_level)

    def reads_same(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        """Whether a tokenizer that `prepare_tokenizer` made and that was `saved` and read again gives for `row`, called
        as everybody calls one, what training read of it as `example`: the whole, or all before an answer."""
        ids = list(saved(self.prompt_text(row))["input_ids"])
        return ids == (example.input_ids[: len(ids)] if self.causal else example.input_ids)

    # ------------------------------------------------------------------------------------------------------- backbone

    def head_settings(self, *, num_labels: int | None, label_names: Sequence[str] | None) -> dict[str, Any]:
        """Settings of the configuration of its models: the classes of a head."""
        return {}

    # ------------------------------------------------------------------------------------------------------------ loss

    def example_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example, float32 [B], from logits [B, C] (is_sequence_level)."""
        raise NotImplementedError

    def answer_losses(self, log_probs: Tensor, sides: PreferenceTargets) -> Tensor:
        """The loss of each pair, or of each answer (mismatches), (P,) or (R,), from log p of each row's answer (R,)
        (by_answer)."""
        raise NotImplementedError

    def rewards(self, log_probs: Tensor, sides: PreferenceTargets) -> Tensor:
        """The implicit reward of each row's answer, (R,), from log p of it (by_answer)."""
        raise NotImplementedError

    def residuals(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B, C] float32: targets less outputs, where a row's loss is the sum of their squares (`squares`)."""
        raise NotImplementedError

    def answered_right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Whether each example is answered right, bool [B], by logits [B, C] (accuracy)."""
        raise NotImplementedError

    def shown_label(self, label: Tensor, *, label_names: Sequence[str] | None, units: Units | None) -> str:
        """The label of one row as the first-batch panel shows it (is_sequence_level)."""
        raise NotImplementedError

    @property
    def squares(self) -> bool:
        """Whether a row's loss is a sum of squares of `residuals`."""
        return False

    @property
    def smoothing(self) -> float:
        """ε of label smoothing (Szegedy et al. 1512.00567, §7): a token's loss is (1 − ε)·−log p(token) + ε times the
        mean of −log p over the vocabulary, as transformers' `LabelSmoother` has it."""
        return self.label_smoothing or 0.0

    def judged(self) -> Self:
        """The task as dev and test are judged by it: without what only training is made harder with."""
        return self

    # --------------------------------------------------------------------------------------------------------- judging

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Figures of a model on encoded examples, each `{value, low, high, n}`; see
        `flatshift.finetune.evaluate.evaluator.evaluate`.

        Raises:
            UserError: answers that do not fit the backbone.
        """
        return judge.perplexity_metrics(examples, *judge.token_nll(examples))

    # ------------------------------------------------------------------------------------------------------ predicting

    @property
    def answers_in_text(self) -> bool:
        """Whether what its models say of a row is a text that they write."""
        return False

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        """Columns with which a row can be encoded whose answer nobody knows."""
        return {}

    def predict(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """What a model says of each encoded example, column by column; here how surprised it is by the text: `nats`
        of all its supervised `tokens`, and their `perplexity`."""
        return judge.surprises(*judge.token_nll(examples))

    # --------------------------------------------------------------------------------------------------------- writing

    def check_writes(self) -> None:
        """Raise UserError unless its models continue a prompt."""
        if not self.is_generative:
            raise UserError(
                f"task.kind: {self.kind} trains a model that writes no text, so there is nothing to generate; judge it "
                "on rows of yours with `flatshift eval RUN_DIR --data FILE`"
            )

    def prompt_columns(self) -> tuple[str, ...]:
        """The columns that a prompt shows. Raises UserError for a malformed template."""
        return self.columns()

    def asked_columns(self) -> tuple[str, ...]:
        """The columns that a row must have for `predict`. Raises UserError for a malformed template."""
        return self.prompt_columns()

    def prompt_text(self, row: Row) -> str:
        """The prompt of a row. Raises UserError for a column that it cannot show."""
        return str(row.values["text"])

    def prompt_ids(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """The tokens of a prompt as training put them before an answer, all that the model reads; nothing is cut."""
        from ..data.encoding import Specials, plain_ids

        return [*Specials.of(tokenizer).prefix, *plain_ids(tokenizer, text)]

    def ask_texts(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False
    ) -> list[Question]:
        """What the model reads for texts in place of rows, put as its prompts are; `raw`: as they stand.

        Raises:
            UserError: a prompt that shows another number of columns than one (unless raw).
        """
        from ..data.example import Question

        return [
            Question(f"prompt-{i}", text, self.prompt_ids(tokenizer, text)) for i, text in enumerate(texts, start=1)
        ]

    def ask(
        self, rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, *, bad_rows: str = "refuse"
    ) -> tuple[list[Question], list[str]]:
        """What the model reads for each row, and `file:line: reason` of those left out.

        Raises:
            UserError: a row that the prompt cannot show (unless skipped).
        """
        from ..data.example import Question

        shown = [(row, self.prompt_text(row)) for row in rows]
        return [Question(row.id, text, self.prompt_ids(tokenizer, text)) for row, text in shown], []

    def sample_prompt(self) -> str:
        """A prompt of its form, for a model card."""
        return "Once upon a time"

    def usage(self, tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str] | None) -> Usage:
        """How its models are asked as they were trained, for a model card.

        label_names: classes in head order, where it has them.
        """
        from ..data.encoding import end_token

        return Usage(
            "prompt",
            ["print(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))"],
            ends=end_token(tokenizer),
            ask=[f"prompt = {self.sample_prompt()!r}"],
        )


class Templated(BaseTask):
    """A task of two templates over the row's columns: a prompt, and the answer that is supervised."""

    def templates(self) -> tuple[Template, Template]:
        """Prompt and answer. Raises UserError for malformed ones."""
        raise NotImplementedError

    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for template in self.templates() for name in template.columns))

    def answer_columns(self) -> tuple[str, ...]:
        """The columns that only the answer shows.

        Raises:
            UserError: a malformed template, or an answer without a column of its own.
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
        """Other classes where those are known, else the answers of rows that have another one."""
        from ..data.noise import foreign_answers, noisy_rows

        if label_names is not None:
            return noisy_rows(rows, rate=rate, label_names=label_names, seed=seed)
        return foreign_answers(rows, columns=self.answer_columns(), rate=rate, seed=seed)

    def prompt_columns(self) -> tuple[str, ...]:
        return self.templates()[0].columns

    def prompt_text(self, row: Row) -> str:
        try:
            return (self.prefix or "") + self.templates()[0].fill(row)
        except ValueError as error:
            raise UserError(f"{row.where}: {error}") from None

    def ask_texts(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False
    ) -> list[Question]:
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

    def sample_prompt(self) -> str:
        shown = (literal + ("" if name is None else "some text") for literal, name in self.templates()[0].parts)
        return (self.prefix or "") + "".join(shown)


class ByExample(BaseTask):
    """A task with a new head over `text` (or the pair `text`, `text2`), which answers for the whole row."""

    is_sequence_level: ClassVar[bool] = True
    new_head: ClassVar[bool] = True
    modelling: ClassVar[str] = "sequence classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    pipeline_tag: ClassVar[str] = "text-classification"
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
        """Cut as in training by `truncation=True`."""
        texts = [row.values["text"], *filter(None, [row.values.get("text2")])]
        return list(saved(*texts, truncation=True, max_length=max_length)["input_ids"]) == example.input_ids

    def usage(self, tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str] | None) -> Usage:
        return Usage("'some text'", ["print(logits)"])
