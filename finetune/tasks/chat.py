"""`task.kind: chat`."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ..config import check_bounds
from ..errors import UserError
from .base import BaseTask, Usage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.chat.encode import ChatEncoder
    from ..data.example import Example, Question
    from ..data.rows import Row
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator


@dataclass(frozen=True, kw_only=True)
class Chat(BaseTask):
    """Causal language modelling of conversations: what the assistant says is supervised, with the end of each turn."""

    kind: Literal["chat"] = "chat"
    turns: Literal["all", "last"] = "all"
    """Which turns of the assistant are supervised."""
    template: str = "auto"
    """Form of a conversation. `auto`: by the tokenizer's own chat template; where it has none by `base`. A file
    of Jinja text, or one that ships: `base` (<|user|>, <|assistant|> and tools in plain text), `plain` (User: …,
    Assistant: …), `alpaca`, which need no token but the end of sequence; `chatml`, `hermes` (ChatML with tools),
    `llama3`, `gemma`, `mistral`, for backbones that know their tokens."""
    template_arguments: dict[str, Any] | None = None
    """Variables that the template reads, as {enable_thinking: false}, in training and ever after."""
    system: str | None = None
    """System turn for the rows that have none."""
    date: str | None = None
    """What templates that write today's date are told, as YYYY-MM-DD; they need it, so that a resumed run sees the
    same rows."""
    pack: bool = True
    """Fill rows of `train.max_length` with several samples; no sample attends to another."""
    score: Literal["perplexity", "generate"] = "perplexity"
    """How dev and test are judged besides perplexity: `generate` the last turn greedily and compare (exact match)."""
    max_new_tokens: int = 64
    """Longest generated answer, tokens (score: generate)."""
    empty_thoughts: bool = False
    """Supervise thoughts without a word (`<think></think>`), which some templates put before answers that have none."""
    metrics: tuple[str, ...] = ()
    """What answers are judged by besides (score: generate): `numeric_match` (the last number, or the one after `####`),
    `has_number`, `match_normalised`, `f1_words`, and for tags `span_f1`, `span_precision`, `span_recall`."""
    max_truncated: float = 0.1
    """Largest share of rows with an answer that `train.max_length` cuts; more is refused."""
    max_unsupervised: float = 0.01
    """Largest share of rows that `train.max_length` leaves without a supervised token; these are left out, more is
    refused."""

    causal: ClassVar[bool] = True
    backbone: ClassVar[Literal["decoder"]] = "decoder"
    refuses: ClassVar[dict[str, str]] = {
        "data.label_noise": "data.label_noise: a conversation has no label to make wrong; set it to 0 for task.kind: "
        "chat",
        "warmup": "the recipe's `warmup` block moves towards the target's texts, and conversations (task.kind: chat) "
        "have none; leave it out",
        "--harness": "--harness: lm-eval would not ask a chat run as it was trained; `flatshift merge` it and give "
        "lm-eval --apply_chat_template, or judge it with `flatshift eval RUN_DIR --data FILE`",
    }

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), max_truncated=(0, 1), max_unsupervised=(0, 1))
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                raise ValueError(f"date must be written YYYY-MM-DD, got {self.date!r}") from None
        check_arguments(self.template_arguments or {})
        self._check_metrics()

    @property
    def uses_chat_template(self) -> bool:
        return True

    @property
    def figure_names(self) -> tuple[str, ...]:
        from ..evaluate.metrics import names_of

        return (*names_of("text", *(["answers"] if self.score == "generate" else [])), *self.metrics)

    def columns(self) -> tuple[str, ...]:
        return ("messages",)

    def optional_columns(self) -> tuple[str, ...]:
        return ("tools", "system")

    def encoder(self, tokenizer: PreTrainedTokenizerBase, max_length: int, **how: Any) -> ChatEncoder:
        """The conversation as a chat template writes it; what the assistant has to write is supervised
        (`flatshift.finetune.data.chat`)."""
        from ..data.chat.encode import ChatEncoder

        own = {name: how[name] for name in ("bad_rows", "truncation", "overlong") if name in how}
        return ChatEncoder(self, tokenizer, max_length, **own)

    def without_limits(self) -> Self:
        return self.replace(max_truncated=1.0, max_unsupervised=1.0)

    def template_record(self) -> dict[str, str] | None:
        from ..data.chat.template import template_record

        return template_record(self)

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make the task's own template, with its arguments, the tokenizer's."""
        from ..data.chat.template import set_template

        set_template(tokenizer, self)

    def reads_same(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        """By the text that its chat template writes, blanks aside: tokens that an answer begins inside of are cut apart
        in training. One that writes today's date is not compared."""
        from ..data.chat.conversation import read_conversation
        from ..data.chat.template import ChatTemplate

        if self.date is not None or saved.unk_token_id in example.input_ids:
            return True
        talk = read_conversation(row, system=self.system)
        read = str(saved.decode(example.input_ids, clean_up_tokenization_spaces=False))
        own = self.replace(template="auto", template_arguments=None)  # the saved tokenizer has both
        written = ChatTemplate(saved, own).render(talk.messages, talk.tools)
        return "".join(written.split()).startswith("".join(read.split()))

    @property
    def answers_in_text(self) -> bool:
        return True

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """As a language model's; with `score: generate` also `exact_match` of each row's last answer."""
        figures = super().judge(judge, examples)
        return figures | judge.answers(examples) if self.score == "generate" else figures

    def ask_texts(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False
    ) -> list[Question]:
        """Each text as the first turn of a user; `raw`: as a conversation that its template has written."""
        from ..data.chat.encode import ask, question

        if raw:
            return super().ask_texts(texts, tokenizer, raw=True)

        return ask([question(text, i) for i, text in enumerate(texts, start=1)], task=self, tokenizer=tokenizer)[0]

    def ask(
        self, rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, *, bad_rows: str = "refuse"
    ) -> tuple[list[Question], list[str]]:
        """Conversations that wait for an answer; a row's own last answer is left out."""
        from ..data.chat.encode import ask

        return ask(rows, task=self, tokenizer=tokenizer, bad_rows=bad_rows)

    def usage(self, tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str] | None) -> Usage:
        from ..data.encoding import end_token

        ends = {end_token(tokenizer)}
        with contextlib.suppress(UserError):  # an end of turn in ordinary tokens is none that could stop
            ends |= {one.stop for one in self.ask_texts(["some text"], tokenizer)}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Usage(
            "prompt",
            ["print(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))"],
            whole=True,
            ends=sorted(end for end in ends if end is not None),
            ask=[
                f"turns = {[*system, {'role': 'user', 'content': 'some text'}]!r}",
                "prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)",
            ],
        )


_RENDERED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "documents", "chat_template")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for `template_arguments` that are none: what rendering sets itself, or what JSON cannot hold."""
    for name, value in arguments.items():
        if not name.isidentifier() or name in _RENDERED or name.endswith("_token"):
            raise ValueError(f"template_arguments cannot set {name!r}; name a variable of the template's own")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"template_arguments: {name} is {value!r}, which JSON cannot hold ({error})") from None
