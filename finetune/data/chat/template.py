"""The Jinja text that writes conversations: the tokenizer's own, the user's, or the one that ships.

Rendering is transformers' own, in its sandbox, so that a conversation reads here as it does everywhere else.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...tasks import Chat

_SHIPPED = Path(__file__).resolve().parent / "templates"
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TOO_MUCH = (ArithmeticError, RecursionError, MemoryError)
"""What a template may ask of Python that it cannot do: 1 // 0, a macro that calls itself, a text of petabytes."""
_NOW = re.compile(r"strftime_now\(\s*(?:'([^']*)'|\"([^\"]*)\")?")

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a turn has what was thought before it; templates read one or the other."""
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class CannotRender(ValueError):
    """The template refuses this conversation, or trips over it."""


def shipped_templates() -> list[str]:
    """Names that `task.template` knows, sorted."""
    return sorted(file.stem for file in _SHIPPED.glob("*.jinja"))


def template_file(name: str) -> Path:
    """The file that `task.template` names: a shipped name, else a path.

    Raises:
        UserError: there is neither.
    """
    if name in shipped_templates():
        return _SHIPPED / f"{name}.jinja"
    path = user_path(name)
    if not path.is_file():
        raise UserError(f"task.template: no file {name!r}; name a file of Jinja text, or {shipped_templates()[0]!r}")
    return path


def template_text(name: str) -> str:
    """The Jinja text that `task.template` names.

    Raises:
        UserError: no such file, or it is not text.
    """
    path = template_file(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"task.template: {path} cannot be read ({error})") from error


def template_record(task: Chat) -> dict[str, str] | None:
    """`path, sha256` of the template that the task names, for a manifest; None where it is the tokenizer's own."""
    if task.template is None:
        return None
    digest = hashlib.sha256(template_text(task.template).encode()).hexdigest()
    return {"path": task.template, "sha256": digest}


class ChatTemplate:
    """Writes conversations as `task` and `tokenizer` say."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: Chat) -> None:
        """Raises UserError: neither the task nor the tokenizer has a template; a template that writes today's date."""
        self.tokenizer = tokenizer
        self.name = "task.template" if task.template is not None else "the tokenizer's chat template"
        self._given = template_text(task.template) if task.template is not None else None
        if self._given is None and not tokenizer.chat_template:
            raise UserError(
                "task.template: the backbone's tokenizer has no chat template; name a file of Jinja text, or "
                f"{shipped_templates()[0]!r}"
            )
        self._date = task.date
        self._specials: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._sources: dict[bool, str] = {}
        self._keys: dict[str, bool] = {}

    def tagged(self, tools: Tools) -> bool:
        """Whether the template itself marks what the assistant writes, by {% generation %}."""
        return _TAG.search(self.source(tools)) is not None

    def source(self, tools: Tools) -> str:
        """The Jinja text for conversations with or without tools (some tokenizers have two)."""
        known = bool(tools)
        if known not in self._sources:
            try:
                text = self.tokenizer.get_chat_template(self._given, tools)
            except ValueError as error:
                raise UserError(f"task.template: {str(error).splitlines()[0]}") from error
            self._sources[known] = self._dated(text)
        return self._sources[known]

    def reads_key(self, key: str) -> bool:
        """Whether the text names a key of turns; thoughts go under each of their names."""
        if key not in self._keys:
            names = "|".join(map(re.escape, THOUGHTS if key in THOUGHTS else (key,)))
            text = self.source(None) + self.source([{}])
            self._keys[key] = re.search(rf"(?<!\w)(?:{names})(?!\w)", text) is not None
        return self._keys[key]

    def _dated(self, text: str) -> str:
        """The text with `strftime_now` fixed to `task.date`: otherwise a run resumed tomorrow would read other rows."""
        formats = [single or double for single, double in _NOW.findall(text)]
        if not formats:
            return text
        if self._date is None:
            raise UserError(
                f"task.date: {self.name} writes today's date, so the rows would change from day to day; give one, for "
                f"example {datetime.date.today().isoformat()}"
            )
        if not all(formats):
            raise UserError(f"task.template: {self.name} writes today's date in a form that is not a literal")
        day = datetime.datetime.fromisoformat(self._date)
        known = {json.dumps(form): json.dumps(day.strftime(form)) for form in formats}
        table = ", ".join(f"{form}: {shown}" for form, shown in known.items())
        # A macro of the template's own hides the global function; the line end behind it is not written (trim_blocks).
        return f"{{% macro strftime_now(form) -%}}{{{{- {{{table}}}[form] -}}}}{{%- endmacro %}}\n{text}"

    def render(self, messages: Messages, tools: Tools, *, prompt: bool = False) -> str:
        """The conversation as text; with `prompt`, followed by what asks the assistant for its turn.

        Raises:
            CannotRender: the template raises.
            UserError: it is not valid Jinja.
        """
        return self._render(messages, tools, prompt=prompt, track=False)[0]

    def render_tagged(self, messages: Messages, tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the (start, end) of every non-empty stretch inside the template's {% generation %} tags."""
        text, blocks = self._render(messages, tools, prompt=False, track=True)
        return text, [block for block in blocks if block[0] < block[1]]

    def _render(
        self, messages: Messages, tools: Tools, *, prompt: bool, track: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self.source(tools)
        try:
            found: Any = render_jinja_template(
                conversations=[[_under_each_name(turn) for turn in messages]],
                tools=list(tools) if tools else None,
                chat_template=source,
                return_assistant_tokens_mask=track,
                add_generation_prompt=prompt,
                **self._specials,
            )
        except TemplateSyntaxError as error:
            raise UserError(f"task.template: {self.name} is not valid Jinja (line {error.lineno}: {error})") from error
        except (TemplateError, TypeError, LookupError, AttributeError, ValueError, *_TOO_MUCH) as error:
            said = (str(error).splitlines() or [""])[0]
            raise CannotRender(f"{self.name} fails on it ({said or type(error).__name__})") from error
        (text,), blocks = found
        return text, [(start, end) for start, end in blocks[0]] if track else []


def _under_each_name(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn with its thoughts under the names that templates read, as newer versions of transformers do."""
    thoughts = thoughts_of(turn)
    return turn if thoughts is None else {"thinking": thoughts, **turn, "reasoning_content": thoughts}


def thoughts_of(turn: dict[str, Any]) -> Any:
    """What was thought before the turn; None: nothing."""
    return next((turn[name] for name in THOUGHTS if turn.get(name) is not None), None)
