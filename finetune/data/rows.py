"""Rows of user data: reads files into `Row`s with canonical columns, each with its file:line.

    for row in read_rows(["train.jsonl.xz"], required=("text", "label")):
        row.values["text"], row.values["label"], row.id, row.where

Reading streams: memory does not grow with the number of rows, except for about 10 bytes per *given* id and one bit per
row without one, to detect repeated ids.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from ..errors import UserError
from ..seeds import numpy_generator
from .config import Columns
from .files import expand_files
from .formats import LONGEST_LINE, BrokenFile, FileRecord, has_lone_surrogate, iter_records
from .remote import DataFile

_Any = TypeVar("_Any")

_HALF_PAIR = "has half of a surrogate pair, which is not text"
_DEFAULT = Columns()
_BREAK = " records before that were read"


FORMS = {
    "ShareGPT": ("conversations", "system"),
    "Alpaca": ("instruction", "input", "context", "output", "system", "history"),
    "TRL": ("prompt", "completion", "system"),
    "Dolly": ("instruction", "input", "context", "response", "system"),
    "question and answer": ("question", "answer", "system"),
    "input and output": ("input", "output", "system"),
}
"""Other people's columns that stand for `messages`; the first of each tells it, of the last two if no other does."""
TWO_TURNS = tuple(FORMS)[-2:]
PROMPTS = {"Orca": ("question", "system"), "Alpaca": ("instruction", "input", "system"), "ShareGPT": ("conversations",)}
"""Columns of other formats that stand for the `prompt` of a pair of answers, `chosen` and `rejected`; the first one
identifies the format."""
PAIRS = {
    "question and answer": ("question", "answer"),
    "instruction and output": ("instruction", "output"),
    "instruction and response": ("instruction", "response"),
    "input and output": ("input", "output"),
    "text and label": ("text", "label"),
}
"""Columns of other formats that stand for `prompt` and `completion`; `input` or `context` is appended to an
instruction."""
TURNS_WITH_LABEL = "turns with a label"
"""Form of single answers that are the last turn of a conversation."""
SHARED = "what both answers begin with"
"""Form of pairs without a prompt column."""
_ANSWERED = ("prompt", "messages", "conversations", "chosen", "rejected", "completion")
"""Columns of preferences that may hold turns."""


def form_columns(form: str, *, turns: bool) -> tuple[str, ...]:
    """Return the columns from which `messages` (turns), or else `prompt` and `completion`, are read in this form."""
    if turns:
        return FORMS.get(form, ())
    if form == TURNS_WITH_LABEL:
        return ("messages", "conversations")
    beside = ("input", "context") if form.startswith("instruction") else ()
    return (*PROMPTS.get(form, ()), *PAIRS.get(form, ()), *beside)


@dataclass(frozen=True, slots=True)
class Row:
    """A usable record."""

    values: dict[str, Any]
    """Canonical `text`, `text2`, `label` (a string, or the result of the task's `read_label`), `messages`, `tools`,
    `system` and `id`, if the record has them, and all its other columns."""
    id: str
    """The given id, or `<file index>-<line>`, both 0-based (line: ordinal of the record for CSV and Parquet)."""
    where: str
    """`path:line`, 1-based, for messages."""
    record: dict[str, Any] = field(default_factory=dict, repr=False)
    index: int = 0
    """0-based position among all records of all files, including bad ones: the row in the user's own feature arrays."""
    nulls: int = 0
    form: str = ""
    """Source of `messages` or `prompt` if the record has no such column: a key of `FORMS`, `PROMPTS` or `PAIRS`,
    `TURNS_WITH_LABEL` or `SHARED`."""


def canonical_label(value: Any) -> str:
    """Return a class as a string: `1`, `1.0` and `"1"` become `"1"`; `True` becomes `"True"`; text is unchanged. Raises
    ValueError for null, empty, not finite, not valid Unicode, or a list or object."""
    if isinstance(value, str):
        if not value:
            raise ValueError("is empty")
        if has_lone_surrogate(value):
            raise ValueError(_HALF_PAIR)
        return value
    if isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"is {value}")
        return str(int(value)) if value.is_integer() else repr(value)
    if value is None:
        raise ValueError("is null")
    raise ValueError(f"is a {type(value).__name__}, not a name or a number")


def read_rows(
    files: Sequence[str],
    *,
    columns: Columns | None = None,
    required: Sequence[str] = ("text",),
    bad_rows: Literal["refuse", "skip"] = "refuse",
    skipped: list[str] | None = None,
    setting: str = "data.columns",
    first: int | None = None,
    label: Callable[[Any], Any] = canonical_label,
    used: Sequence[str] = (),
    named: Mapping[str, str] | None = None,
    only: int | None = None,
    block: str = "",
) -> Iterator[Row]:
    """Yield the rows of `files`, in the given order.

    A row is bad if its record is malformed, or a required column is missing, null or of the wrong type (`text` and
    `text2` must be strings, `label` a name or a number). A null column that is not required is absent; so is a blank
    `text2`.

    columns: names of the record's columns for `text`, `text2`, `label`, `messages`, `tools`, `system` and `id`.
    With the `id` "\\0" all ids are automatic, and a column `id` is one of the others.
    required: canonical or other column names that every row must have.
    bad_rows: refuse the first bad row, or skip them all. If one of several files breaks off, its rest then counts as
        one bad row after the readable records; a single file is refused.
    skipped: receives `file:line: reason` of every skipped row.
    setting: setting with which the user named the columns, for messages. block: that of `bad_rows`, if another.
    first: stop after this many rows, without reading further; None: read all.
    label: converts a record's label to a row's (`BaseTask.read_label`), or raises ValueError.
    used: optional columns; if `columns` gives one of them a name other than the default, at least one row must have it.
    named: other columns that at least one row must have, each with the setting in which the user named it.
    only: read the file of this number alone, under the ids that its rows have among all files; `index` then counts
        within it, and ids and columns are compared within it.

    Raises UserError: a bad row (unless skipped), a file that cannot be read, a repeated id, fewer rows than `first`, a
    column of `used` or `named` that no row has (after the last row).
    """
    mapper = _ColumnMapper(columns or Columns(), tuple(required), setting, label)
    mapper.files = _format_files(files)
    given_ids, automatic_ids = SeenIds(), AutoIds()
    paths = expand_files(files)
    renamed = [name for name in used if name in mapper.names and mapper.names[name] != getattr(_DEFAULT, name)]
    absent = {mapper.names[name]: f"{setting}.{name}" for name in renamed} | dict(named or {})
    columns_seen: dict[str, None] = {}
    index, count = -1, 0
    for file_index, path in enumerate(paths):
        if only not in (None, file_index):
            continue
        if count == first:
            break
        skips = bad_rows == "skip" and len(paths) > 1
        for record in _read_until_broken(path, skipped) if skips else iter_records(path):
            index += 1
            location = f"{path}:{record.place}"
            if absent and not record.problem:
                columns_seen |= dict.fromkeys(record.values)
                absent = {own: origin for own, origin in absent.items() if own not in record.values}
            try:
                values = mapper.values(record)
            except ValueError as error:
                problem = f"{location}: {error}"
                if bad_rows == "refuse":  # in a first row the mistake may be in all
                    fix = f"; or leave such rows out with {block or setting.partition('.')[0]}.bad_rows: skip"
                    raise UserError(problem + fix * (index > 0 and skipped is not None)) from None
                if skipped is not None:
                    skipped.append(problem)
                continue
            given_id = values.get("id") if "id" in mapper.names else None
            name = given_id or f"{file_index}-{record.line}"
            if given_id is None:
                automatic_ids.add(file_index, record.line)
            elif automatic_ids.named(given_id):
                _check_duplicate_id(given_id, location, paths, mapper)
            if given_id is not None or automatic_ids.imitated:
                for repeated, repeated_at in given_ids.add(name, location):
                    _check_duplicate_id(repeated, repeated_at, paths, mapper)
            yield Row(values, name, location, record.values, index, record.nulls, mapper.form)
            count += 1
            if count == first:
                break
    if first is not None and count < first:
        names = ", ".join(map(str, files))
        raise UserError(f"first: {first} rows are asked for, and {names} ends after {count}; ask for no more")
    for repeated, repeated_at in given_ids.finish():
        _check_duplicate_id(repeated, repeated_at, paths, mapper)
    for own, origin in absent.items() if columns_seen else ():
        raise UserError(f"{', '.join(map(str, files))}: {missing_column_message(own, columns_seen, origin)}")


def _read_until_broken(path: DataFile, skipped: list[str] | None) -> Iterator[FileRecord]:
    """Yield the records of `path`, one of several files, up to the point where it breaks off; record that as a bad
    row."""
    count = 0
    try:
        for record in iter_records(path):
            count += 1
            yield record
    except BrokenFile as error:
        if skipped is not None:
            skipped.append(f"{error}; {count:,}{_BREAK}")


def count_records(good: int, skipped: Iterable[str]) -> int:
    """Count the records among `good` rows and the reasons in `skipped`: the rest of a file that breaks off is none."""
    return good + sum(not reason.endswith(_BREAK) for reason in skipped)


class _ColumnMapper:
    def __init__(self, columns: Columns, required: tuple[str, ...], setting: str, label: Callable[[Any], Any]) -> None:
        self.setting, self.label, self.required = setting, label, required
        self.files = "FILE"
        """The files as words of a command line, for messages."""
        names = ("text", "text2", "label", "messages", "tools", "system", "id")
        self.names = {name: own for name in names if (own := getattr(columns, name)) != "\0"}
        self.converts_turns = "messages" in required and self.names["messages"] == _DEFAULT.messages
        self.form, self._first_row = "", True

    def values(self, record: FileRecord) -> dict[str, Any]:
        """Return the row's values. Raises ValueError with the reason if the record is bad."""
        if record.problem:
            raise ValueError(record.problem)
        values = dict(record.values)
        turns = self._convert_turns(record.values) if self.converts_turns else None
        # Read every canonical column from the record, not from `values`, because a mapping may swap two of them.
        for name, own in self.names.items():
            value = record.values.get(own) if turns is None or name != "messages" else turns
            if name == "id":
                value = read_id(value, own)
            elif value is not None:
                value = self._check(name, own, value)
            elif name in self.required:
                raise ValueError(self._describe_missing(name, own, record.values))
            if value is None:
                values.pop(name, None)
            else:
                values[name] = value
        if "prompt" in self.required:
            if isinstance(values.get("label"), bool) or None not in (values.get("chosen"), values.get("rejected")):
                values |= {name: _parse_json_turns(values[name]) for name in _ANSWERED if name in values}
            values |= self._convert_turns_with_label(record.values, values) or self._convert_prompt(values)
        for name in self.required:
            if values.get(name) is None:
                raise ValueError(self._describe_missing(name, self.names.get(name, name), record.values))
        return values

    def _convert_turns(self, record: dict[str, Any]) -> Any:
        """Return the turns of a record in a form of `FORMS`; None if it has none, or has its own `messages`."""
        forms = [form for form, (column, *_) in FORMS.items() if record.get(column) is not None]
        own = record.get("messages") is not None
        dolly = record.get("output") is None and any(record.get(name) is not None for name in ("response", "context"))
        forms = [form for form in forms if form != ("Alpaca" if dolly else "Dolly")]
        if own or len(forms) > sum(form in TWO_TURNS for form in forms):
            forms = [form for form in forms if form not in TWO_TURNS]
        elif len(forms) > 1 and (answered := [form for form in forms if record.get(FORMS[form][1]) is not None]):
            forms = answered
        if "TRL" in forms and (own or len(forms) > 1) and record.get("completion") is None:
            forms.remove("TRL")  # a lone prompt may repeat the first turn of a conversation
        if not own and not forms:
            return None
        if own + len(forms) > 1:
            names = ["messages"] * own + [FORMS[form][0] for form in forms]
            fix = f"name one: {self.setting}.messages" if "conversations" in names else "rename one of them"
            raise ValueError(f"columns {' and '.join(map(repr, names))} may each be the conversation; {fix}")
        form = "" if own else forms[0]
        self._check_form(form, {name: column for name, (column, *_) in FORMS.items()} | {"": "messages"})
        if form in ("Alpaca", "Dolly"):
            return _convert_instruction(record, "output" if form == "Alpaca" else "response")
        if form in ("TRL", *TWO_TURNS):
            return _convert_prompt_completion(*(record.get(name) for name in FORMS[form][:2]))
        return record["conversations"] if form else None

    def _check_form(self, form: str, columns: Mapping[str, str]) -> None:
        """Remember the form of the first row; refuse rows of another form. columns: the one that tells each form."""
        if self._first_row:
            self.form, self._first_row = form, False
        elif form != self.form:
            before = columns.get(self.form, "prompt")
            raise ValueError(f"a row with {columns[form]!r}, and those before have {before!r}; give files of one form")

    def _convert_prompt(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return `prompt`, `chosen` and `rejected` of a record of pairs in a form of `PROMPTS`, or `prompt` and
        `completion` of one in a form of `PAIRS`; else nothing."""
        if values.get("chosen") is None or values.get("rejected") is None:
            return self._convert_completion(values)
        forms = [form for form, (column, *_) in PROMPTS.items() if values.get(column) is not None]
        own = values.get("prompt") is not None
        if not own and len(forms) > 1:
            names = " and ".join(repr(PROMPTS[form][0]) for form in forms)
            raise ValueError(f"columns {names} may each be the prompt; rename one of them to 'prompt'")
        form = "" if own else forms[0] if forms else SHARED
        columns = {name: column for name, (column, *_) in PROMPTS.items()}
        self._check_form(form, columns | {"": "prompt", SHARED: "no prompt"})
        if own:
            return {}
        if form == SHARED:
            return split_shared_prompt(values["chosen"], values["rejected"])
        if form == "ShareGPT":
            return {"prompt": values["conversations"]}
        question = "\n\n".join(_get_texts(values, [name for name in PROMPTS[form] if name != "system"]))
        system = _get_texts(values, ["system"])
        if not system:
            return {"prompt": question}
        return {"prompt": [{"role": "system", "content": system[0]}, {"role": "user", "content": question}]}

    def _convert_turns_with_label(self, record: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Return `prompt` and `completion` of a conversation with a label, whose last turn is the answer; else
        nothing."""
        turns = values.get("messages") or values.get("conversations")
        if record.get(self.names["label"]) is None or {"completion", "chosen"} & {*self.required, *values}:
            return {}
        if "prompt" in values or not isinstance(turns, list) or not turns or not _is_answer(turns[-1]):
            return {}
        self._check_form(TURNS_WITH_LABEL, {TURNS_WITH_LABEL: "messages"})
        return {"prompt": turns[:-1], "completion": turns[-1]}

    def _convert_completion(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return `prompt`, and `completion` if there is one, of a record that has other columns for them."""
        answered = "completion" in self.required
        forms = [
            form
            for form, (question, answer) in PAIRS.items()
            if values.get(question) is not None and (values.get(answer) is not None or not answered)
        ]
        if any(form.startswith("instruction") for form in forms):  # its `input` is part of the prompt, not a prompt
            forms = [form for form in forms if not form.startswith("input")]
        forms = list({PAIRS[form][0]: form for form in reversed(forms)}.values())[::-1]  # one for each prompt column
        if forms != ["text and label"] or "label" in self.required:
            forms = [form for form in forms if form != "text and label"]
        form = "" if values.get("prompt") is not None else forms[0] if forms else None
        if form is None:
            return {}
        self._check_form(form, {name: column for name, (column, _) in PAIRS.items()} | {"": "prompt"})
        if not form:
            return {}
        question, answer = PAIRS[form]
        if len(forms) > 1:
            raise ValueError(
                f"columns {question!r} and {PAIRS[forms[1]][0]!r} may each be the prompt; name one: --task.prompt "
                f"'{{{question}}}\\n' --task.completion '{{{answer}}}'"
            )
        prompt = values[question]
        if question == "instruction":
            prompt = "\n\n".join(_get_texts(values, ["instruction", "input", "context"]))
        return {"prompt": prompt, **({} if values.get(answer) is None else {"completion": values[answer]})}

    def _check(self, name: str, own: str, value: Any) -> Any:
        if name in ("messages", "tools"):
            return value  # checked in flatshift.finetune.data.chat
        if name == "label":
            try:
                return self.label(value)
            except ValueError as error:
                if name in self.required:
                    raise ValueError(f"column {own!r} {error}") from None
                return None
        if not isinstance(value, str):
            if name not in self.required:
                return value
            raise ValueError(f"column {own!r} is a {type(value).__name__}, not text")
        if len(value) > LONGEST_LINE:
            raise ValueError(f"column {own!r} has {len(value):,} characters, more than {LONGEST_LINE:,}; cut the text")
        _check_no_lone_surrogate(value, own)
        return None if name == "text2" and name not in self.required and not value.strip() else value

    def _describe_missing(self, name: str, own: str, record: dict[str, Any]) -> str:
        if own in record:
            return f"column {own!r} is null"
        if name == "chosen" and {"completion", "label"} <= record.keys():
            return f"no column {own!r}, but 'completion' and 'label': --task.loss kto trains on single answers"
        if name in ("prompt", "completion") and (turns := {own, "messages", "conversations"} & record.keys()):
            command = f"flatshift train chat --data {self.files}"
            return f"no column {own!r}, but {min(turns)!r}: the recipe chat trains on conversations (`{command}`)"
        flags = _suggest_templates(record)
        if flags and "completion" in self.required and name in ("prompt", "completion"):
            return f"{missing_column_message(own, record)}; name yours: {flags}"
        if flags and name == "messages":
            command = f"`flatshift train completion --data {self.files} {flags}`"
            return f"{missing_column_message(own, record)}; {command} trains on a prompt and its answer"
        return missing_column_message(own, record, f"{self.setting}.{name}" if name in self.names else None)


def _convert_instruction(record: dict[str, Any], answer: str) -> list[dict[str, str]]:
    """Return the turns of `instruction[, input][, context][, history]` and the column of the answer. Input and context
    are appended to the instruction after blank lines; earlier turns are pairs of user and assistant; without an answer,
    the last user turn waits for it."""
    question = "\n\n".join(_get_texts(record, ["instruction", "input", "context"]))
    _get_texts(record, [answer])
    turns = [*_parse_history(record.get("history")), ("user", question), ("assistant", record.get(answer))]
    return [{"role": role, "content": text} for role, text in turns if text or (role == "assistant" and text == "")]


def _parse_history(value: Any) -> list[tuple[str, str]]:
    try:
        pairs = json.loads(value) if isinstance(value, str) and value else value or []
    except (ValueError, RecursionError):
        pairs = None
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    ):
        raise ValueError("column 'history' is no list of pairs [what the user said, what the assistant said]")
    return [turn for question, answer in pairs for turn in (("user", question), ("assistant", answer))]


def _format_files(files: Sequence[str]) -> str:
    """Return files as a command line in this directory names them; FILE for what an error message has no room for."""
    here = Path.cwd()
    paths = [Path(name) for name in map(str, files)]
    words = shlex.join(
        str(path.relative_to(here) if path.is_relative_to(here) else name)
        for path, name in zip(paths, files, strict=True)
    )
    return words if len(words) <= 60 else "FILE"


def _suggest_templates(record: Mapping[str, Any]) -> str:
    """Return flags that take a record's two columns of text for a prompt and its answer, or stand-ins of several
    columns; "" where there are not two with plain names, or a column may hold turns."""
    if any(isinstance(value, list | dict) or str(value).lstrip().startswith("[{") for value in record.values()):
        return ""
    names = [name for name, value in record.items() if isinstance(value, str) and value and name != _DEFAULT.id]
    if len(names) < 2 or not all(re.fullmatch(r"\w{1,40}", name) for name in (names[0], names[-1])):
        return ""
    prompt, answer = names if len(names) == 2 else ("QUESTION", "ANSWER")
    return f"--task.prompt '{{{prompt}}}\\n' --task.completion '{{{answer}}}'"


def _convert_prompt_completion(prompt: Any, completion: Any) -> list[Any]:
    """Return the turns of a prompt and its completion, if any, each a text or a list of turns (also as JSON text).
    Turns of the prompt are not trained on."""
    turns = ({**turn, "weight": 0} if _is_answer(turn) else turn for turn in parse_turns(prompt, "user"))
    return [*turns, *parse_turns(completion, "assistant")]


def parse_turns(value: Any, role: str) -> list[Any]:
    """Return a list of turns, also as JSON text, as it is; a text or number as one turn of `role`; None as no turn."""
    value = _parse_json_turns(value)
    if value is None or isinstance(value, list):
        return value or []
    return [{"role": role, "content": canonical_label(value) if isinstance(value, int | float) else value}]


def _parse_json_turns(value: Any) -> Any:
    """Return the list of turns that JSON text holds; any other value, such as an answer in JSON, unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            turns = json.loads(value)
            if turns and all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in turns):
                return turns
    return value


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, dict) and (turn.get("role") == "assistant" or turn.get("from") in ("gpt", "assistant"))


def _get_texts(values: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    texts = {name: values.get(name) for name in names}
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"column {name!r} is a {type(value).__name__}, not text")
    return [text for text in texts.values() if text]


def split_shared_prompt(chosen: Any, rejected: Any) -> dict[str, Any]:
    """Split two answers that include their prompt into `prompt, chosen, rejected`: the prompt is the common leading
    turns, or for texts the common leading words."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, list | str):
        return {}
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):  # do not split words; the space belongs to the answer
        while length and not chosen[length - 1 : length].isspace():
            length -= 1
        length = len(chosen[:length].rstrip(" "))
    if not length:
        return {}
    return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def missing_column_message(own: str, record: Iterable[str], setting: str | None = None) -> str:
    """Return the message for a missing column: names the nearest one, or all that exist, and the `setting` that names
    it."""
    names = [str(name) for name in record]
    close = difflib.get_close_matches(own, names, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(map(repr, names[:12])) or 'none'}"
    return f"no column {own!r}; {hint}" + (f" (set {setting})" if setting else "")


def read_canonical_values(
    record: dict[str, Any], columns: Columns, required: tuple[str, ...] = ("text",)
) -> dict[str, Any]:
    """Return the `values` of the row that `read_rows` makes of this record. Raises ValueError with the reason if it
    is bad."""
    return _ColumnMapper(columns, required, "data.columns", canonical_label).values(FileRecord(0, 0, record))


def read_id(value: Any, own: str) -> str | None:
    """Return the id that is read from a `value` of the column `own`, None for none. Raises ValueError."""
    if value is None or value == "":
        return None
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        _check_no_lone_surrogate(given := str(value), own)
        return given
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    raise ValueError(f"column {own!r} is a {type(value).__name__}, not a name or a number")


def _check_no_lone_surrogate(value: str, own: str) -> None:
    if has_lone_surrogate(value):
        raise ValueError(f"column {own!r} {_HALF_PAIR}")


def _check_duplicate_id(name: str, location: str, paths: Sequence[DataFile], mapper: _ColumnMapper) -> None:
    """Raise UserError with both places of a repeated id. Only hashes were stored, so the first place is found by
    reading again."""
    for file_index, path in enumerate(paths):
        for record in iter_records(path):
            first = f"{path}:{record.place}"
            if first == location:
                return  # a hash collision, not a repeated id
            try:
                own = mapper.values(record).get("id")
            except ValueError:
                continue
            if (own or f"{file_index}-{record.line}") == name:
                raise UserError(repeated_id_message(name, location, first))


def repeated_id_message(name: str, location: str, first: str) -> str:
    """Return the message for an id at `location` that the record at `first` has."""
    hint = "; a record without an id is named by its file and line" if _AUTOMATIC.fullmatch(name) else ""
    return f"{location}: id {name!r} was already given at {first}; ids must be unique{hint}"


def require_rows(rows: Iterable[Row], *, files: Sequence[str], purpose: str, skipped: Sequence[str] = ()) -> list[Row]:
    """Return all rows as a list, at least one. purpose: as in the sentence "no PURPOSE rows". Raises UserError if there
    is none; says if the files are empty or every row was skipped."""
    rows = list(rows)
    if rows:
        return rows
    names = ", ".join(map(str, files))
    if not names:
        raise UserError(f"no {purpose} rows: no file is named")
    if skipped:
        raise UserError(f"no {purpose} rows: all {len(skipped)} of {names} were skipped, the first for {skipped[0]}")
    raise UserError(f"no {purpose} rows: {names} is empty")


def limit_rows(rows: Sequence[_Any], limit: int | None, *, seed: int, setting: str = "limit") -> list[_Any]:
    """Return the first `limit` rows of a shuffle keyed by `seed`, in their original order; None returns all.

    With the same rows and seed, a larger limit contains every smaller one. setting: its key, for messages. Raises
    UserError for a limit below one, or above the number of rows.
    """
    if limit is None:
        return list(rows)
    if limit < 1:
        raise UserError(f"{setting}: {limit} rows cannot be used; give at least 1, or null for all")
    if limit > len(rows):
        raise UserError(f"{setting}: {limit} is above the {len(rows)} rows there are; ask for at most {len(rows)}")
    order = numpy_generator(seed, "limit").permutation(len(rows))
    return [rows[i] for i in sorted(order[:limit].tolist())]


_BATCH = 1 << 16
_AUTOMATIC = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,17})")


class SeenIds:
    """Set of ids already seen, stored as hashes: 8 to 16 bytes each instead of the hundred bytes of a set of strings.

    `add` compares with the last up to `batch` ids immediately; older ones are compared when the batch is full, and at
    the end. A repetition further back is thus reported later, by `add` of another id or by `finish`. Every id whose
    hash was seen before is reported, so in rare cases one that is not repeated.
    """

    def __init__(self, batch: int = _BATCH):
        self.batch = batch
        self._pending: dict[int, tuple[str, str]] = {}
        self._runs: list[np.ndarray] = []

    def add(self, name: str, location: str) -> list[tuple[str, str]]:
        """Add the id `name` at `location`; return (id, location) of the ids now found to be repeated."""
        key = hash(name)
        if key in self._pending:
            return [(name, location)]
        self._pending[key] = (name, location)
        return self.finish() if len(self._pending) >= self.batch else []

    def finish(self) -> list[tuple[str, str]]:
        """Compare all pending ids; return as `add`."""
        hashes = np.fromiter(self._pending, dtype=np.int64, count=len(self._pending))
        hashes.sort()
        repeated: set[int] = set()
        for run in self._runs:
            positions = np.minimum(np.searchsorted(run, hashes), len(run) - 1)
            repeated.update(hashes[run[positions] == hashes].tolist())
        matches = [entry for key, entry in self._pending.items() if key in repeated]
        self._pending = {}
        # Merge runs of similar size, so that each hash is moved only a logarithmic number of times.
        while self._runs and len(self._runs[-1]) <= len(hashes):
            hashes = np.concatenate([self._runs.pop(), hashes])
            hashes.sort()
        if len(hashes):
            self._runs.append(hashes)
        return matches


class AutoIds:
    """Set of records without an id, stored as one bit per line of each file. imitated: True once a given id looked like
    an automatic one; before that, no given id can collide with one."""

    def __init__(self) -> None:
        self.imitated = False
        self._bits: dict[int, bytearray] = {}

    def add(self, file_index: int, line: int) -> None:
        """Record that the record of this 0-based line has no id."""
        bits = self._bits.setdefault(file_index, bytearray())
        if line // 8 >= len(bits):
            bits.extend(bytes(line // 8 + 1 - len(bits)))
        bits[line // 8] |= 1 << line % 8

    def named(self, name: str) -> bool:
        """Return True if a record added so far has this automatic id; sets `imitated` if the id has the automatic
        form."""
        if (match := _AUTOMATIC.fullmatch(name)) is None:
            return False
        self.imitated = True
        file_index, line = map(int, match.groups())
        bits = self._bits.get(file_index, b"")
        return line // 8 < len(bits) and bool(bits[line // 8] >> line % 8 & 1)
