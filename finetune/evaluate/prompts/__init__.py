"""Prompts and verbalisers as data: one YAML file per task, and the checks of a prompt before a model reads it.

    text: "{text}, right? {label}, {text2}"
    labels: {entailment: "Yes", neutral: "Also", contradiction: "No"}

`{label}` is the place of a candidate; the text before it is its context, and the text after it is scored with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...data.rows import Row
from ...data.template import Template
from ...errors import UserError, shorten

_SLOT = "label"
_KNOWN_WRONG = {
    ("ar", "رقم"): "means a number, not `no` (لا)",
    ("tr", "Numara"): "means a number, not `no` (Hayır)",
    ("de", "Rechts"): "means the direction, not `correct` (richtig)",
    ("fr", "droite"): "means the direction, not `correct` (n'est-ce pas)",
    ("es", "derecha"): "means the direction, not `correct` (verdad)",
    ("hi", "दाहिने"): "means the direction, not `correct` (सही)",
    ("th", "ขวา"): "means the direction, not `correct` (ใช่ไหม)",
    ("vi", "phải sang"): "means the direction, not `correct` (đúng)",
}
"""(language, word) → the mistake: machine translations found in published prompts."""


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Wording of a prompt for one language (or one kind of question), where it differs."""

    text: str | None = None
    """The template; null: the prompt's own."""
    labels: dict[str, str] = field(default_factory=dict)
    """Class → word; empty: the prompt's own."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Prompt template for the rows of a task, and the candidate answers."""

    text: str
    """Template over the row's columns; `{label}` is the place of a candidate, exactly once."""
    labels: dict[str, str] = field(default_factory=dict)
    """Class of a row → the word for it (its verbaliser). Without it each row has its own choices."""
    choices: tuple[str, ...] = ()
    """Templates of a row's choices, as ["{choice1}", "{choice2}"]; or one column that holds a list, as ["options"]."""
    answer: str = "label"
    """Column of the correct class; for choices the number, letter or text of the correct one."""
    first: int = 0
    """Number of the first choice, if the answer is a number."""
    separator: str = "\n\n"
    """Separator between few-shot examples."""
    neutral: str | None = None
    """Context without the row's own words, for `pmi`; null: the words of the template right before `{label}`."""
    by: str | None = None
    """Column that selects one of `wordings` for a row: its language, or the kind of its question."""
    wordings: dict[str, Wording] = field(default_factory=dict)
    """Wordings by the value of that column; rows with another value use the prompt's own."""
    review: str = ""
    """Reviewer of the wording, for readers."""

    def __post_init__(self) -> None:
        if bool(self.labels) == bool(self.choices):
            raise UserError("prompt: give either `labels` (class → word) or `choices` (templates of columns)")
        if self.labels and len(self.labels) < 2:
            raise UserError("prompt: `labels` has one class; there is nothing to choose")
        for field_name, text in [
            ("text", self.text),
            *((f"wordings.{n}.text", w.text) for n, w in self.wordings.items()),
        ]:
            if text is not None and text.replace("{{", "").count("{label}") != 1:
                raise UserError(
                    f"prompt: {field_name} must have {{label}} once, where a candidate stands; it is {text!r}"
                )
        for labels in (self.labels, *(wording.labels for wording in self.wordings.values())):
            if empty := [name for name, word in labels.items() if not word.strip()]:
                raise UserError(f"prompt: the word for {empty[0]!r} is empty; nothing would be ranked")
        for name, wording in self.wordings.items():
            if wording.labels and wording.labels.keys() != self.labels.keys():
                raise UserError(f"prompt: wordings.{name}.labels must name the classes {', '.join(self.labels)}")
        if self.wordings and self.by is None:
            raise UserError("prompt: `wordings` needs `by`, the column that says which a row has")

    def wording(self, row: Row, spoken: str | None = None) -> tuple[str, dict[str, str]]:
        """Return template and verbalisers of a row; spoken: use this value of `by` instead of the row's."""
        code = spoken if spoken is not None else str(row.values.get(self.by or "", ""))
        wording = self.wordings.get(code) or self.wordings.get(code.split("-")[0]) or Wording()
        return wording.text or self.text, wording.labels or self.labels

    def columns(self, spoken: str | None = None) -> tuple[str, ...]:
        """Return the columns that every row must have; spoken: as in `wording`."""
        names = [self.answer]
        for text in (self.text, *(self.choices if len(self.choices) > 1 else ())):
            names += [name for name in Template(text, "prompt").columns if name != _SLOT]
        if len(self.choices) == 1:
            names += [self.choices[0].strip("{}")]
        return tuple(dict.fromkeys(names + ([self.by] if self.by and spoken is None else [])))


@dataclass(frozen=True)
class FilledPrompt:
    """A row filled into a prompt: K candidates, each with its context."""

    row: Row
    before: tuple[str, ...]
    """Context of each candidate."""
    candidates: tuple[str, ...]
    after: str
    gold: int
    names: tuple[str, ...]
    """Classes, or numbers of choices."""
    neutral: str
    """Context without the row's words."""
    content_free: tuple[str, ...]
    """Contexts filled with content-free values; empty if candidates are the row's own."""

    @property
    def solved(self) -> str:
        """Row with its correct candidate, as a few-shot example."""
        return self.before[self.gold] + self.candidates[self.gold] + self.after


def fill_prompt(prompt: Prompt, row: Row, *, spoken: str | None = None) -> FilledPrompt:
    """Fill a row into a prompt. Raises UserError: a column that the template cannot show, or an answer that is none of
    the candidates."""
    text, labels = prompt.wording(row, spoken)
    template = Template(text, "prompt: text")
    try:
        candidates = tuple(labels.values()) if labels else _row_choices(prompt, row)
        texts = [template.fill(row, label=f"\0{candidate}\0").split("\0") for candidate in candidates]
    except ValueError as error:
        raise UserError(f"{row.where}: {error}") from None
    names = tuple(labels) if labels else tuple(str(i) for i in range(len(candidates)))
    literal = next((literal for literal, name in reversed(template.parts) if name == _SLOT), "")
    content_free = [
        template.fill(row, **dict.fromkeys(template.columns, empty) | {"label": "\0"}).split("\0")[0]
        for empty in ("N/A", "[MASK]", "")
    ]
    return FilledPrompt(
        row, tuple(parts[0] for parts in texts), candidates, texts[0][2], _gold_index(prompt, row, names, candidates),
        names, literal if prompt.neutral is None else prompt.neutral, tuple(content_free) if labels else (),
    )  # fmt: skip


def _row_choices(prompt: Prompt, row: Row) -> tuple[str, ...]:
    if len(prompt.choices) == 1:
        choices = row.values.get(prompt.choices[0].strip("{}"))
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(text, str) for text in choices):
            raise ValueError(f"column {prompt.choices[0]!r} is no list of two texts or more")
        return tuple(choices)
    return tuple(Template(choice, "prompt: choices").fill(row) for choice in prompt.choices)


def _gold_index(prompt: Prompt, row: Row, names: Sequence[str], candidates: Sequence[str]) -> int:
    text = str(value := row.values.get(prompt.answer))
    context = f"{row.where}: {prompt.answer} {shorten(text, 40)!r}"
    if prompt.labels:
        if text in names:
            return names.index(text)
        raise UserError(f"{context} is no class of the prompt ({', '.join(names)})")
    if text in candidates and not (isinstance(value, int) and 0 <= value - prompt.first < len(candidates)):
        return list(candidates).index(text)
    if len(text) == 1 and text.isascii() and text.isupper():
        number = ord(text) - ord("A")
    else:
        try:
            number = int(float(text)) - prompt.first
        except (ValueError, OverflowError):
            number = -1
    if not 0 <= number < len(candidates):
        raise UserError(f"{context} is none of its {len(candidates)} choices")
    return number


def check_prompt(prompt: Prompt, tokenizer: Any) -> list[str]:
    """Check a prompt's words under a tokenizer and return notes for the user. Raises UserError: two words with the same
    tokens, or one that is known to be a wrong translation."""
    notes = []
    for code, wording in [("", Wording(labels=prompt.labels)), *prompt.wordings.items()]:
        labels = wording.labels or (prompt.labels if wording.text else {})
        context = f"prompt: wordings.{code}.labels" if code else "prompt: labels"
        for (language, mistake), reason in _KNOWN_WRONG.items():
            if language == code and any(mistake in word for word in (*labels.values(), wording.text or "")):
                raise UserError(f"prompt: wordings.{code}: {mistake!r} {reason}; have a speaker review it")
        tokens: dict[tuple[int, ...], str] = {}
        for name, word in labels.items():
            ids = tuple(tokenizer(" " + word.strip(), add_special_tokens=False)["input_ids"])
            if ids in tokens:
                raise UserError(f"{context}: {tokens[ids]} and {name} are the same tokens ({word!r}); take other words")
            tokens[ids] = name
        lengths = sorted({len(ids) for ids in tokens})
        if len(lengths) > 1:
            notes.append(
                f"{context}: words have {lengths[0]} to {lengths[-1]} tokens; sums favour the shorter, `mean`, `byte` "
                "and `pmi` do not"
            )
    return notes


def shipped_prompts() -> dict[str, Path]:
    """Return the prompts shipped in this directory, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
