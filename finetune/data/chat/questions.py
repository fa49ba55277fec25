"""Conversations that wait for an answer, as the tokens that training put before one.

    kept, skipped = ask(rows, task=task, tokenizer=tokenizer)     # kept[0].ids, kept[0].stop

A row's own last answer is left out. What asks the assistant, and the token that ends its turn, are those that a trained
answer in that place would have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...errors import UserError
from ..example import Question
from ..rows import Row
from .conversation import open_turns
from .encode import ChatEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...tasks import Chat

_WORD = "."
_ANY_LENGTH = 1 << 40


def ask(
    rows: Iterable[Row], *, task: Chat, tokenizer: PreTrainedTokenizerBase, bad_rows: str = "refuse"
) -> tuple[list[Question], list[str]]:
    """A question of each row, in order, and `file:line: reason` of those left out.

    Raises:
        UserError: as `ChatEncoder`; a conversation that nobody has to answer (unless skipped).
    """
    encoder = ChatEncoder(
        dataclasses.replace(task, score="generate", system=None), tokenizer, _ANY_LENGTH, bad_rows=bad_rows
    )
    asked: list[Question] = []
    skipped: list[str] = []
    for row in rows:
        try:
            turns = open_turns(row, system=task.system)
        except ValueError as error:
            if bad_rows == "refuse":
                raise UserError(f"{row.where}: {error}; or leave such rows out with data.bad_rows: skip") from error
            skipped.append(f"{row.where}: {error}")
            continue
        in_parts = isinstance(turns[-1].get("content"), list)  # as some templates need it
        turns.append({"role": "assistant", "content": [{"type": "text", "text": _WORD}] if in_parts else _WORD})
        encoded = encoder.add([dataclasses.replace(row, values={**row.values, "messages": turns})])
        skipped += encoded.skipped
        for example in encoded.examples:
            if example.answer is not None and example.prompt is not None and example.stop is not None:
                text = str(tokenizer.decode(example.prompt, clean_up_tokenization_spaces=False))
                asked.append(Question(row.id, text, example.prompt, example.stop))
    return asked, skipped


def question(text: str, number: int) -> Row:
    """The row of a conversation that begins with this turn of the user."""
    return Row({"messages": [{"role": "user", "content": text}]}, f"prompt-{number}", f"--prompt {number}")
