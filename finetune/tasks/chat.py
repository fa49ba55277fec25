"""`task.kind: chat`: conversations."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ..compute.protocols import TaskTraits
from ..config import check_bounds
from .base import BaseTask, InputFormat, check_task_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.chat.encode import ChatEncoder
    from ..data.example import Example, GenerationPrompt
    from ..data.rows import Row


@dataclass(frozen=True, kw_only=True)
class Chat(BaseTask):
    """Causal language modelling of conversations; the target tokens are the assistant's turns, including their end
    tokens."""

    kind: Literal["chat"] = "chat"
    turns: Literal["all", "last"] = "all"
    """Turns of the assistant to train on."""
    template: str = "auto"
    """Chat template. `auto`: the tokenizer's own, or `base` if it has none. Otherwise a Jinja file, or one that
    ships: `base` (<|user|>, <|assistant|> and tools in plain text), `plain` (User: …, Assistant: …) and `alpaca`,
    which need no special token except the end of sequence; `chatml`, `hermes` (ChatML with tools), `llama3`, `gemma`
    and `mistral`, for backbones that know their tokens."""
    template_arguments: dict[str, Any] | None = None
    """Variables passed to the template, such as {enable_thinking: false}, in training and at inference."""
    system: str | None = None
    """System turn for rows that have none."""
    date: str | None = None
    """Date (YYYY-MM-DD) given to templates that print today's date. Required for these, so that a resumed run sees
    the same rows."""
    pack: bool = True
    """Pack several examples into each row of `train.max_length` tokens; examples do not attend to each other."""
    dft: bool = False
    """Weight each target token's loss by the probability that the model gives it (DFT, 2508.05629): tokens that it
    thinks unlikely, wrong ones among them, count less. In training only: evaluation reports the loss without it."""
    score: Literal["perplexity", "generate"] = "perplexity"
    """Evaluation on dev and test in addition to perplexity: `generate` produces the last turn greedily and compares
    it (exact match)."""
    max_new_tokens: int = 64
    """Maximum length of a generated answer in tokens (score: generate)."""
    empty_thoughts: bool = False
    """Train on empty thoughts (`<think></think>`), which some templates insert before answers without any."""
    metrics: tuple[str, ...] = ()
    """Additional metrics of generated answers (score: generate): `numeric_match` (the last number, or the one after
    `####`), `has_number`, `match_normalised`, `f1_words`, and for tags `span_f1`, `span_precision`, `span_recall`."""
    max_truncated: float = 0.1
    """Maximum share of rows whose answer may be truncated at `train.max_length`; the run stops if there are more."""
    max_unsupervised: float = 0.01
    """Maximum share of rows that may have no target token left after truncation at `train.max_length`. These rows
    are dropped; the run stops if there are more."""

    traits: ClassVar[TaskTraits] = TaskTraits(
        causal=True,
        backbone="decoder",
        refusals={
            "data.label_noise": "data.label_noise: a conversation has no label to make wrong; set it to 0 for "
            "task.kind: chat",
            "warmup": "the recipe's `warmup` block moves towards the target's texts, and conversations (task.kind: "
            "chat) have none; leave it out",
            "--harness": "--harness: lm-eval would not ask a chat run as it was trained; `flatshift merge` it and give "
            "lm-eval --apply_chat_template, or evaluate it with `flatshift eval RUN_DIR --data FILE`",
        },
    )

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), max_truncated=(0, 1), max_unsupervised=(0, 1))
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                raise ValueError(f"date must be written YYYY-MM-DD, got {self.date!r}") from None
        check_template_arguments(self.template_arguments or {})
        check_task_metrics(self)

    def columns(self) -> tuple[str, ...]:
        return ("messages",)

    def optional_columns(self) -> tuple[str, ...]:
        return ("tools", "system")

    @property
    def input_format(self) -> InputFormat:
        return ChatFormat(self)

    def encoder(self, tokenizer: PreTrainedTokenizerBase, max_length: int, **options: Any) -> ChatEncoder:
        """Return an encoder that renders conversations with a chat template and marks the assistant's tokens as
        targets (`flatshift.finetune.data.chat`)."""
        from ..data.chat.encode import ChatEncoder

        used = {name: options[name] for name in ("bad_rows", "truncation", "overlong") if name in options}
        return ChatEncoder(self, tokenizer, max_length, **used)

    def without_limits(self) -> Self:
        return self.replace(max_truncated=1.0, max_unsupervised=1.0)


class ChatFormat(InputFormat):
    """Conversation rendered by a chat template."""

    uses_chat_template: ClassVar[bool] = True
    task: Chat

    def columns(self) -> tuple[str, ...]:
        return self.task.columns()

    def template_record(self) -> dict[str, str] | None:
        from ..data.chat.template import template_record

        return template_record(self.task)

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Store the task's template and its arguments in the tokenizer."""
        from ..data.chat.template import set_template

        set_template(tokenizer, self.task)

    def matches_saved(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        """Compare the text that the chat template renders, ignoring whitespace, because training splits tokens at
        the start of an answer. A template that prints today's date is not compared."""
        from ..data.chat.conversation import read_conversation
        from ..data.chat.template import ChatTemplate

        # Unknown tokens do not decode to the original text.
        if self.task.date is not None or saved.unk_token_id in example.input_ids:
            return True
        conversation = read_conversation(row, system=self.task.system)
        trained = str(saved.decode(example.input_ids, clean_up_tokenization_spaces=False))
        task = self.task.replace(template="auto", template_arguments=None)  # the saved tokenizer has both
        rendered = ChatTemplate(saved, task).render(conversation.messages, conversation.tools)
        return "".join(rendered.split()).startswith("".join(trained.split()))

    def build_text_prompts(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False
    ) -> list[GenerationPrompt]:
        """Return each text as the first user turn; `raw`: as a conversation that is already rendered, whose beginning
        is added only if it lacks it."""
        from ..data.chat.encode import build_prompts, make_prompt_row
        from ..data.encoding import tokenize_plain
        from ..data.example import GenerationPrompt

        rows = [make_prompt_row(text, i) for i, text in enumerate(["a"] if raw else texts, start=1)]
        prompts = build_prompts(rows, task=self.task, tokenizer=tokenizer)[0]
        if not raw:
            return prompts
        begin = prompts[0].ids[: prompts[0].ids[0] == tokenizer.bos_token_id]
        tokens = [tokenize_plain(tokenizer, text) for text in texts]
        return [
            GenerationPrompt(f"prompt-{i}", text, ids if ids[:1] == begin else [*begin, *ids], prompts[0].stop)
            for i, (text, ids) in enumerate(zip(texts, tokens, strict=True), start=1)
        ]

    def build_prompts(
        self, rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, *, bad_rows: str = "refuse"
    ) -> tuple[list[GenerationPrompt], list[str]]:
        """Return conversations that wait for an answer; a row's own last answer is removed."""
        from ..data.chat.encode import build_prompts

        return build_prompts(rows, task=self.task, tokenizer=tokenizer, bad_rows=bad_rows)


_RENDERED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "documents", "chat_template")


def check_template_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for invalid `template_arguments`: variables that rendering sets itself, or values that JSON
    cannot hold."""
    for name, value in arguments.items():
        if not name.isidentifier() or name in _RENDERED or name.endswith("_token"):
            raise ValueError(f"template_arguments cannot set {name!r}; name a variable of the template's own")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"template_arguments: {name} is {value!r}, which JSON cannot hold ({error})") from None
