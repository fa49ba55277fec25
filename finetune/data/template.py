"""Templates over a row's columns, and truncation rules for examples that are too long."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from ..errors import UserError
from .rows import PAIRS, Row, canonical_label, missing_column_message


class Template:
    """A text with `{column}` placeholders; `{{` and `}}` are literal braces."""

    def __init__(self, text: str, flag: str) -> None:
        """Raise UserError for unbalanced braces, empty placeholders, and conversions or formats."""
        self.parts: list[tuple[str, str | None]] = []
        try:
            for literal, name, form, conversion in string.Formatter().parse(text):
                if name is not None and (not name or form or conversion):
                    raise ValueError("a place is {column} and nothing else")
                self.parts.append((literal, name))
        except ValueError as error:
            raise UserError(
                f"{flag}: {text!r} is not a template ({error}); write {{{{ and }}}} for literal braces"
            ) from error
        self.columns = tuple(dict.fromkeys(name for _, name in self.parts if name is not None))

    def fill(self, row: Row, **replacements: str) -> str:
        """Return the text for `row`, with `replacements` for some columns. Raises ValueError for a column that the row
        lacks, or that holds a list, an object or a lone surrogate."""
        return "".join(literal + self._value(row, name, replacements) for literal, name in self.parts)

    def _value(self, row: Row, name: str | None, replacements: dict[str, str]) -> str:
        if name is None:
            return ""
        value: Any = replacements.get(name, row.values.get(name))
        if value is None and name in row.record:
            raise ValueError(f"column {name!r} is null")
        if value is None:
            raise ValueError(missing_column_message(name, row.values))
        try:
            text = value if isinstance(value, str) else canonical_label(value)
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"column {name!r} has half of a surrogate pair, which is not text") from None
        except ValueError as error:
            own = dict(zip(("prompt", "completion"), PAIRS.get(row.form, ()), strict=False)).get(name, name)
            raise ValueError(f"column {own!r} {error}") from None
        return text


def fit_completion(
    prefix: Sequence[int],
    prompt: Sequence[int],
    answer: Sequence[int],
    max_length: int,
    *,
    reserve: int = 0,
    left: bool = True,
) -> tuple[list[int], list[int], bool]:
    """Return context and answer of at most `max_length` tokens in total, and whether anything was truncated.

    The prompt is truncated first, from the left (from the right if `left` is false); the answer is truncated from the
    right only if it does not fit with the prefix (or, without a prefix, with one token of the prompt, because something
    must precede an answer). The prompt leaves room for an answer of `reserve` tokens even if this one is shorter.
    """
    minimum = len(prefix) or min(len(prompt), 1)
    shortened = list(answer[: max_length - minimum])
    room = max(max_length - len(prefix) - max(len(shortened), reserve), minimum - len(prefix))
    context = [*prefix, *(prompt[max(len(prompt) - room, 0) :] if left and room else prompt[:room])]
    return context, shortened, len(context) + len(shortened) < len(prefix) + len(prompt) + len(answer)


def truncate_longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """Return lengths ≤ a, ≤ b with a sum ≤ room: truncate the longer until both are equal, then both (the rule of
    tokenizers). An odd token goes to the longer text, or to the second if both are equally long."""
    if a + b <= room:
        return a, b
    half = room // 2
    if a <= b:
        return (a, room - a) if a <= half else (half, room - half)
    return (room - b, b) if b <= half else (room - half, half)
