"""Prompts to token ids as training put them before an answer, so that generation continues what was trained.

    kind = writer_of(task)                  # UserError for a task that writes no text
    texts = [kind.text(task, row) for row in rows]
    prompts = [kind.ids(tokenizer, text) for text in texts]

- language-model: the text, open: `prefix text`.
- completion: the filled `task.prompt`, open: `prefix prompt`.
- chat: see `finetune.data.chat.questions`.
- seq2seq: `task.prefix` and the filled `task.prompt` as the encoder reads it, closed by the tokenizer's own end.

Nothing is cut: unlike a training row, a prompt that is too long for the backbone is refused by whoever generates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import Task
from ..errors import UserError
from .rows import Row
from .specials import Specials
from .template import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Writer:
    """How a kind of task makes prompts."""

    columns: Callable[[Any], tuple[str, ...]]
    """Columns of a row that a prompt of this task shows."""
    text: Callable[[Any, Row], str]
    """The prompt of a row."""
    ids: Callable[[PreTrainedTokenizerBase, str], list[int]]
    """The tokens of a prompt, all that the model reads before its answer."""


def writer_of(task: Task) -> Writer:
    """How prompts of `task` are made.

    Raises:
        UserError: its models write no text.
    """
    if task.kind not in _WRITERS:
        raise UserError(
            f"task.kind: {task.kind} trains a model that writes no text, so there is nothing to generate; judge it on "
            "rows of yours with `flatshift eval RUN_DIR --data FILE`"
        )
    return _WRITERS[task.kind]


def end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that closes every trained answer: the end of sequence, else what the tokenizer's template ends with."""
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    suffix = Specials.of(tokenizer).suffix
    return suffix[0] if suffix else None


def _open(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [*Specials.of(tokenizer).prefix, *_tokens(tokenizer, text)]


def _closed(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    specials = Specials.of(tokenizer, begin=False)
    return [*specials.prefix, *_tokens(tokenizer, text), *specials.suffix]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def _prompt_columns(task: Any) -> tuple[str, ...]:
    return Template(task.prompt, "task.prompt").columns


def _filled(task: Any, row: Row) -> str:
    template = Template(task.prompt, "task.prompt")
    try:
        return (getattr(task, "prefix", None) or "") + template.fill(row)
    except ValueError as error:
        raise UserError(f"{row.where}: {error}") from None


_WRITERS: dict[str, Writer] = {
    "language-model": Writer(columns=lambda task: ("text",), text=lambda task, row: row.values["text"], ids=_open),
    "completion": Writer(columns=_prompt_columns, text=_filled, ids=_open),
    "seq2seq": Writer(columns=_prompt_columns, text=_filled, ids=_closed),
}
