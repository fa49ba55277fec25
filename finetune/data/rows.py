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


FORMS = {
    "ShareGPT": ("conversations", "system"),
    "Alpaca": ("instruction", "input", "output", "system", "history"),
    "TRL": ("prompt", "completion", "system"),
    "Dolly": ("instruction", "context", "response", "system"),
    "question and answer": ("question", "answer", "system"),
    "input and output": ("input", "output", "system"),
}
"""Other people's columns that stand for `messages`; the first of each tells it, of the last two if no other does."""
TWO_TURNS = tuple(FORMS)[-2:]
"""Forms of a user's turn and the assistant's."""
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
SHARED = "what both answers begin with"
"""Form of pairs without a prompt column."""


def form_columns(form: str, *, turns: bool) -> tuple[str, ...]:
    """Return the columns from which `messages` (turns), or else `prompt` and `completion`, are read in rows of this
    form."""
    if turns:
        return FORMS.get(form, ())
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
    """The record as read."""
    index: int = 0
    """0-based position among all records of all files, including bad ones: the row in the user's own feature arrays."""
    nulls: int = 0
    """Number of removed null-valued keys (`FileRecord.nulls`)."""
    form: str = ""
    """Source of `messages` or `prompt` if the record has no such column: a key of `FORMS`, `PROMPTS` or `PAIRS`, or
    `SHARED`."""


def canonical_label(value: Any) -> str:
    """Return a class as a string: `1`, `1.0` and `"1"` become `"1"`; `True` becomes `"True"`; text is unchanged.

    Raises:
        ValueError: null, empty, not finite, not valid Unicode, or a list or object.
    """
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
) -> Iterator[Row]:
    """Yield the rows of `files`, in the given order.

    A row is bad if its record is malformed, or a required column is missing, null or of the wrong type (`text` and
    `text2` must be strings, `label` a name or a number). Unless it is required, a null column counts as absent.

    Arguments:
        columns: names of the record's columns for `text`, `text2`, `label`, `messages`, `tools`, `system` and `id`.
        required: canonical or other column names that every row must have.
        bad_rows: refuse the first bad row, or skip them all. If one of several files breaks off, its rest then counts
            as one bad row after the readable records; a single file is refused.
        skipped: receives `file:line: reason` of every skipped row.
        setting: setting with which the user named the columns, for messages.
        first: stop after this many rows, without reading further; None: read all.
        label: converts a record's label to a row's (`BaseTask.read_label`), or raises ValueError.
        used: optional columns; if `columns` gives one of them a name other than the default, at least one row must have
            it.
        named: other columns that at least one row must have, each with the setting in which the user named it.

    Raises:
        UserError: a bad row (unless skipped), a file that cannot be read, a repeated id, fewer rows than `first`, a
            column of `used` or `named` that no row has (after the last row).
    """
    reader = _ColumnMapper(columns or Columns(), tuple(required), setting, label)
    reader.files = _as_words(files)
    seen, unnamed = SeenIds(), AutoIds()
    paths = expand_files(files)
    renamed = [n for n in used if n in reader.names and reader.names[n] != getattr(_DEFAULT, n)]
    absent = {reader.names[n]: f"{setting}.{n}" for n in renamed}
    absent |= named or {}
    names_there: dict[str, None] = {}
    index, given_rows = -1, 0
    for file_index, path in enumerate(paths):
        if given_rows == first:
            break
        for record in (
            _read_until_broken(path, skipped) if bad_rows == "skip" and len(paths) > 1 else iter_records(path)
        ):
            index += 1
            where = f"{path}:{record.place}"
            if absent and not record.problem:
                names_there |= dict.fromkeys(record.values)
                absent = {own: place for own, place in absent.items() if own not in record.values}
            try:
                values = reader.values(record)
            except ValueError as error:
                problem = f"{where}: {error}"
                if bad_rows == "refuse":
                    raise UserError(problem) from None
                if skipped is not None:
                    skipped.append(problem)
                continue
            given = values.get("id")
            name = given or f"{file_index}-{record.line}"
            if given is None:
                unnamed.add(file_index, record.line)
            elif unnamed.named(given):
                _check_duplicate_id(given, where, paths, reader)
            if given is not None or unnamed.imitated:
                for again, place in seen.add(name, where):
                    _check_duplicate_id(again, place, paths, reader)
            yield Row(values, name, where, record.values, index, record.nulls, reader.form)
            given_rows += 1
            if given_rows == first:
                break
    if first is not None and given_rows < first:
        names = ", ".join(map(str, files))
        raise UserError(f"first: {first} rows are asked for, and {names} ends after {given_rows}; ask for no more")
    for again, place in seen.finish():
        _check_duplicate_id(again, place, paths, reader)
    for own, place in absent.items() if names_there else ():
        raise UserError(f"{', '.join(map(str, files))}: {missing_column_message(own, names_there, place)}")


def _read_until_broken(path: DataFile, skipped: list[str] | None) -> Iterator[FileRecord]:
    """Yield the records of `path`, one of several files, up to the point where it breaks off; record that as a bad
    row."""
    good = 0
    try:
        for record in iter_records(path):
            good += 1
            yield record
    except BrokenFile as error:
        if skipped is not None:
            skipped.append(f"{error}; {good:,} records before that were read")


class _ColumnMapper:
    """Reader that maps the columns of a record to canonical ones and checks them."""

    def __init__(
        self,
        columns: Columns,
        required: tuple[str, ...],
        setting: str = "data.columns",
        label: Callable[[Any], Any] = canonical_label,
    ) -> None:
        self.setting, self.label = setting, label
        self.files = "FILE"
        """The files as words of a command line, for messages."""
        names = ("text", "text2", "label", "messages", "tools", "system", "id")
        self.names = {name: getattr(columns, name) for name in names}
        self.required = required
        self.bridged = "messages" in required and self.names["messages"] == _DEFAULT.messages
        self.prompted = "prompt" in required
        self.form, self._first_row = "", True

    def values(self, record: FileRecord) -> dict[str, Any]:
        """Return the row's values. Raises ValueError with the reason if the record is bad."""
        if record.problem:
            raise ValueError(record.problem)
        values = dict(record.values)
        bridged = self._bridge(record.values) if self.bridged else None
        # Read every canonical column from the record, not from `values`, because a mapping may swap two of them.
        for name, own in self.names.items():
            value = record.values.get(own) if bridged is None or name != "messages" else bridged
            if name == "id":
                value = _read_id(value, own)
            elif value is not None:
                value = self._checked(name, own, value)
            elif name in self.required:
                raise ValueError(self._missing(name, own, record.values))
            if value is None:
                values.pop(name, None)
            else:
                values[name] = value
        if self.prompted:
            values |= self._prompted(values)
        for name in self.required:
            if values.get(name) is None:
                raise ValueError(self._missing(name, self.names.get(name, name), record.values))
        return values

    def _bridge(self, record: dict[str, Any]) -> Any:
        """Return the turns of a record in a form of `FORMS`; None if it has none, or has its own `messages`."""
        there = [form for form, (tell, *_) in FORMS.items() if record.get(tell) is not None]
        own = record.get("messages") is not None
        dolly = record.get("output") is None and any(record.get(name) is not None for name in ("response", "context"))
        there = [form for form in there if form != ("Alpaca" if dolly else "Dolly")]
        if own or len(there) > sum(form in TWO_TURNS for form in there):
            there = [form for form in there if form not in TWO_TURNS]
        elif len(there) > 1 and (answered := [form for form in there if record.get(FORMS[form][1]) is not None]):
            there = answered
        if "TRL" in there and (own or len(there) > 1) and record.get("completion") is None:
            there.remove("TRL")  # a lone prompt may repeat the first turn of a conversation
        if not own and not there:
            return None
        if own + len(there) > 1:
            names = ["messages"] * own + [FORMS[form][0] for form in there]
            cure = "rename one of them" if there[0] in TWO_TURNS else f"name one: {self.setting}.messages"
            raise ValueError(f"columns {' and '.join(map(repr, names))} may each be the conversation; {cure}")
        form = "" if own else there[0]
        self._one_form(form, {name: tell for name, (tell, *_) in FORMS.items()} | {"": "messages"})
        if form == "Alpaca":
            return _convert_alpaca(record)
        if form == "TRL":
            return _convert_prompt_completion(record)
        if form == "Dolly":
            asked = "\n\n".join(_get_texts(record, ["instruction", "context"]))
            return _two_turns(asked, record.get("response"))
        if form in TWO_TURNS:
            return _two_turns(*(record.get(name) for name in FORMS[form][:2]))
        return record["conversations"] if form else None

    def _one_form(self, form: str, called: Mapping[str, str]) -> None:
        """Remember the form of the first row; refuse rows of another form."""
        if self._first_row:
            self.form, self._first_row = form, False
        elif form != self.form:
            raise ValueError(
                f"a row with {called[form]!r}, and those before have {called[self.form]!r}; give files of one form"
            )

    def _prompted(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return `prompt`, `chosen` and `rejected` of a record of pairs in a form of `PROMPTS`, or `prompt` and
        `completion` of one in a form of `PAIRS`; else nothing."""
        if values.get("chosen") is None or values.get("rejected") is None:
            return self._completed(values)
        there = [form for form, (tell, *_) in PROMPTS.items() if values.get(tell) is not None]
        own = values.get("prompt") is not None
        if not own and len(there) > 1:
            names = " and ".join(repr(PROMPTS[form][0]) for form in there)
            raise ValueError(f"columns {names} may each be the prompt; rename one of them to 'prompt'")
        form = "" if own else there[0] if there else SHARED
        self._one_form(form, {name: tell for name, (tell, *_) in PROMPTS.items()} | {"": "prompt", SHARED: "no prompt"})
        if own:
            return {}
        if form == SHARED:
            return split_shared_prompt(values["chosen"], values["rejected"])
        if form == "ShareGPT":
            return {"prompt": values["conversations"]}
        asked = "\n\n".join(_get_texts(values, [name for name in PROMPTS[form] if name != "system"]))
        said = _get_texts(values, ["system"])
        if not said:
            return {"prompt": asked}
        return {"prompt": [{"role": "system", "content": said[0]}, {"role": "user", "content": asked}]}

    def _completed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return `prompt`, and `completion` if there is one, of a record that has other columns for them."""
        forms = find_pair_forms(values, answered="completion" in self.required)
        forms = [
            form for form in forms if form != "text and label" or (forms == [form] and "label" not in self.required)
        ]
        form = "" if values.get("prompt") is not None else forms[0] if forms else None
        if form is None:
            return {}
        self._one_form(form, {name: asked for name, (asked, _) in PAIRS.items()} | {"": "prompt"})
        if not form:
            return {}
        asked, answer = PAIRS[form]
        if len(forms) > 1:
            other = PAIRS[forms[1]][0]
            raise ValueError(
                f"columns {asked!r} and {other!r} may each be the prompt; name one: --task.prompt '{{{asked}}}\\n' "
                f"--task.completion '{{{answer}}}'"
            )
        prompt = values[asked]
        if asked == "instruction":
            prompt = "\n\n".join(_get_texts(values, ["instruction", "input", "context"]))
        return {"prompt": prompt, **({} if values.get(answer) is None else {"completion": values[answer]})}

    def _checked(self, name: str, own: str, value: Any) -> Any:
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
        return value

    def _missing(self, name: str, own: str, record: dict[str, Any]) -> str:
        if own in record:
            return f"column {own!r} is null"
        if name == "chosen" and {"completion", "label"} <= record.keys():
            return f"no column {own!r}, but 'completion' and 'label': --task.loss kto trains on single answers"
        if name in ("prompt", "completion") and (turns := {own, "messages", "conversations"} & record.keys()):
            command = f"flatshift train chat --data {self.files}"
            return f"no column {own!r}, but {min(turns)!r}: the recipe chat trains on conversations (`{command}`)"
        flags = _template_flags(record)
        if flags and "completion" in self.required and name in ("prompt", "completion"):
            return f"{missing_column_message(own, record)}; name yours: {flags}"
        if flags and name == "messages":
            command = f"`flatshift train completion --data {self.files} {flags}`"
            return f"{missing_column_message(own, record)}; {command} trains on a prompt and its answer"
        return missing_column_message(own, record, f"{self.setting}.{name}" if name in self.names else None)


def find_pair_forms(record: Mapping[str, Any], *, answered: bool = True) -> list[str]:
    """Return the forms of `PAIRS` that a record has, one for each prompt column; answered: only with an answer."""
    found = [
        form
        for form, (asked, answer) in PAIRS.items()
        if record.get(asked) is not None and (record.get(answer) is not None or not answered)
    ]
    if any(form.startswith("instruction") for form in found):  # its `input` is part of the prompt, not a prompt
        found = [form for form in found if not form.startswith("input")]
    return list({PAIRS[form][0]: form for form in reversed(found)}.values())[::-1]


def _convert_alpaca(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the turns of `instruction[, input][, output][, history]`. An input is appended to its instruction after
    a blank line; earlier turns are pairs of user and assistant; without an output, the last user turn waits for an
    answer."""
    said = {name: record.get(name) for name in ("instruction", "input", "output")}
    for name, value in said.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"column {name!r} is a {type(value).__name__}, not text")
    asked = "\n\n".join(part for name in ("instruction", "input") if (part := said[name]))
    turns = [*_parse_history(record.get("history")), ("user", asked), ("assistant", said["output"])]
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
    return [turn for asked, answer in pairs for turn in (("user", asked), ("assistant", answer))]


def _two_turns(asked: Any, answer: Any) -> list[dict[str, Any]]:
    """The turns of a user and an assistant; without an answer the first alone."""
    turns = [{"role": "user", "content": asked}]
    return turns if answer is None else [*turns, {"role": "assistant", "content": answer}]


_LONGEST_WORDS = 60


def _as_words(files: Sequence[str]) -> str:
    """Files as a command line in this directory names them; FILE for what an error message has no room for."""
    here = Path.cwd()
    named = [Path(name) for name in map(str, files)]
    words = shlex.join(
        str(name.relative_to(here) if name.is_relative_to(here) else raw)
        for name, raw in zip(named, files, strict=True)
    )
    return words if len(words) <= _LONGEST_WORDS else "FILE"


def _template_flags(record: Mapping[str, Any]) -> str:
    """Flags that take two columns of text for a prompt and its answer; "" where there are not two with plain names, or
    a column may hold turns."""
    if any(isinstance(value, list | dict) or str(value).lstrip().startswith("[{") for value in record.values()):
        return ""
    names = [name for name, value in record.items() if isinstance(value, str) and value and name != _DEFAULT.id]
    if len(names) < 2 or not all(re.fullmatch(r"\w{1,40}", name) for name in (names[0], names[-1])):
        return ""
    return f"--task.prompt '{{{names[0]}}}\\n' --task.completion '{{{names[-1]}}}'"


def _convert_prompt_completion(record: dict[str, Any]) -> list[Any]:
    """Return the turns of `prompt[, completion]`, each a text or a list of turns (also as JSON text). Turns of the
    prompt are not trained on."""
    prompt, answer = (
        _parse_turns(record.get(name), role) for name, role in (("prompt", "user"), ("completion", "assistant"))
    )
    given = [{**turn, "weight": 0} if _is_answer(turn) else turn for turn in prompt]
    return [*given, *answer]


def _parse_turns(value: Any, role: str) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is None or isinstance(value, list):
        return value or []
    return [{"role": role, "content": value}]


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, dict) and (turn.get("role") == "assistant" or turn.get("from") in ("gpt", "assistant"))


def _get_texts(values: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the non-empty texts in these columns."""
    found = {name: values.get(name) for name in names}
    for name, value in found.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"column {name!r} is a {type(value).__name__}, not text")
    return [text for text in found.values() if text]


def split_shared_prompt(chosen: Any, rejected: Any) -> dict[str, Any]:
    """Split two answers that include their prompt into `prompt, chosen, rejected`: the prompt is the common leading
    turns, or for texts the common leading words."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, list | str):
        return {}
    same = next((i for i, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(chosen), len(rejected)) if same is None else same
    if isinstance(chosen, str):  # do not split words; the space belongs to the answer
        while same and not chosen[same - 1 : same].isspace():
            same -= 1
        same = len(chosen[:same].rstrip(" "))
    if not same:
        return {}
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def missing_column_message(own: str, record: Iterable[str], place: str | None = None) -> str:
    """Return the message for a missing column: names the nearest one, or all that exist.

    place: the setting that names it.
    """
    names = [str(name) for name in record]
    nearest = difflib.get_close_matches(own, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(map(repr, names[:12])) or 'none'}"
    return f"no column {own!r}; {hint}" + (f" (set {place})" if place else "")


def read_canonical_values(
    record: dict[str, Any], columns: Columns, required: tuple[str, ...] = ("text",)
) -> dict[str, Any]:
    """Return the `values` of the row that `read_rows` makes of this record. Raises ValueError with the reason if it
    is bad."""
    return _ColumnMapper(columns, required).values(FileRecord(0, 0, record))


def _read_id(value: Any, own: str) -> str | None:
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


def _check_duplicate_id(given: str, where: str, paths: Sequence[DataFile], reader: _ColumnMapper) -> None:
    """Raise UserError with both places of a repeated id. Only hashes were kept, so the first place is found by
    reading again."""
    for file_index, path in enumerate(paths):
        for record in iter_records(path):
            first = f"{path}:{record.place}"
            if first == where:
                return  # a hash collision, not a repeated id
            try:
                own = reader.values(record).get("id")
            except ValueError:
                continue
            if (own or f"{file_index}-{record.line}") == given:
                hint = "; a record without an id is named by its file and line" if is_automatic_id(given) else ""
                raise UserError(f"{where}: id {given!r} was already given at {first}; ids must be unique{hint}")


def require_rows(rows: Iterable[Row], *, files: Sequence[str], what: str, skipped: Sequence[str] = ()) -> list[Row]:
    """Return all rows as a list, at least one.

    Arguments:
        what: their purpose, as in the sentence "no WHAT rows".

    Raises:
        UserError: there is none; says if the files are empty or every row was skipped.
    """
    rows = list(rows)
    if rows:
        return rows
    names = ", ".join(map(str, files))
    if not names:
        raise UserError(f"no {what} rows: no file is named")
    if skipped:
        raise UserError(f"no {what} rows: all {len(skipped)} of {names} were skipped, the first for {skipped[0]}")
    raise UserError(f"no {what} rows: {names} is empty")


def limit_rows(rows: Sequence[_Any], limit: int | None, *, seed: int) -> list[_Any]:
    """Return the first `limit` rows of a shuffle keyed by `seed`, in their original order.

    With the same rows and seed, a larger limit contains every smaller one. `limit=None` keeps all.

    Raises:
        UserError: a limit below one, or above the number of rows.
    """
    if limit is None:
        return list(rows)
    if limit < 1:
        raise UserError(f"limit: {limit} rows cannot be used; give at least 1, or null for all")
    if limit > len(rows):
        raise UserError(f"limit: {limit} is above the {len(rows)} rows there are; ask for at most {len(rows)}")
    order = numpy_generator(seed, "limit").permutation(len(rows))
    return [rows[i] for i in sorted(order[:limit].tolist())]


# --------------------------------------------------------------------------------------------------------- repeated ids

_BATCH = 1 << 16
_BY_PLACE = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,17})")


class SeenIds:
    """Set of ids already seen, stored as hashes: 8 to 16 bytes each instead of the hundred bytes of a set of strings.

    `add` compares with the last up to `batch` ids immediately; older ones are compared when the batch is full, and at
    the end. A repetition further back is thus reported later, by `add` of another id or by `finish`. Every id whose
    hash was seen before is reported, so in rare cases one that is not repeated.
    """

    def __init__(self, batch: int = _BATCH):
        self.batch = batch
        self._fresh: dict[int, tuple[str, str]] = {}
        self._runs: list[np.ndarray] = []

    def add(self, given: str, where: str) -> list[tuple[str, str]]:
        """Add the id `given` at `where`; return (id, where) of the ids now found to be repeated."""
        key = hash(given)
        if key in self._fresh:
            return [(given, where)]
        self._fresh[key] = (given, where)
        return self.finish() if len(self._fresh) >= self.batch else []

    def finish(self) -> list[tuple[str, str]]:
        """Compare all pending ids; return as `add`."""
        fresh = np.fromiter(self._fresh, dtype=np.int64, count=len(self._fresh))
        fresh.sort()
        again: set[int] = set()
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, fresh), len(run) - 1)
            again.update(fresh[run[place] == fresh].tolist())
        found = [noted for key, noted in self._fresh.items() if key in again]
        self._fresh = {}
        # Merge runs of similar size, so that each hash is moved only a logarithmic number of times.
        while self._runs and len(self._runs[-1]) <= len(fresh):
            fresh = np.concatenate([self._runs.pop(), fresh])
            fresh.sort()
        if len(fresh):
            self._runs.append(fresh)
        return found


def is_automatic_id(given: str) -> bool:
    """Return True if the id has the form of an automatic one: `<file index>-<line>`."""
    return _BY_PLACE.fullmatch(given) is not None


class AutoIds:
    """Set of records without an id, stored as one bit per line of each file.

    imitated: True once a given id looked like an automatic one; before that, no given id can collide with one.
    """

    def __init__(self) -> None:
        self.imitated = False
        self._bits: dict[int, bytearray] = {}

    def add(self, file_index: int, line: int) -> None:
        """Record that the record of this 0-based line has no id."""
        bits = self._bits.setdefault(file_index, bytearray())
        if line // 8 >= len(bits):
            bits.extend(bytes(line // 8 + 1 - len(bits)))
        bits[line // 8] |= 1 << line % 8

    def named(self, given: str) -> bool:
        """Return True if a record added so far has this automatic id; sets `imitated` if the id has the automatic
        form."""
        if (found := _BY_PLACE.fullmatch(given)) is None:
            return False
        self.imitated = True
        file_index, line = map(int, found.groups())
        bits = self._bits.get(file_index, b"")
        return line // 8 < len(bits) and bool(bits[line // 8] >> line % 8 & 1)
