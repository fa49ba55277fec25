"""Jinja templates that render conversations: the tokenizer's own, the user's, or one of the shipped ones.

Rendering uses transformers' own code, in its sandbox, so that a conversation looks the same here as elsewhere. A
template that does not ship is rendered in a child process with limits (`render`).
"""

from __future__ import annotations

import copy
import datetime
import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...compute.limited_process import LimitExceeded
from ...errors import UserError, user_path
from .render import render_in_child, render_jinja

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHIPPED = Path(__file__).resolve().parent / "templates"
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CONTROL = re.compile(r"\{#- control tokens: ([^;#]*?)(?:; end of turn: (\S+))? -#\}")
"""First line of a shipped template with control tokens, and the token that ends a turn unless that is the end of
sequence."""
_NOW = re.compile(r"strftime_now\(\s*(?:'([^']*)'|\"([^\"]*)\")?")

AUTO, FOR_BASES = "auto", "base"
"""Values of `task.template`: the tokenizer's own, and the shipped one used instead if there is none."""
_WITH_TOOLS = ("hermes", FOR_BASES)
_PROBE = "probe"

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a turn for the reasoning before it; each template reads one of them."""
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class TemplateSettings(Protocol):
    """Chat template of a task, and what it is rendered with."""

    @property
    def template(self) -> str: ...
    @property
    def template_arguments(self) -> dict[str, Any] | None: ...
    @property
    def date(self) -> str | None: ...


class TemplateRenderError(ValueError):
    """The template rejects this conversation, or fails on it."""


def list_shipped_templates() -> list[str]:
    """Return the names of the shipped templates, sorted."""
    return sorted(file.stem for file in _SHIPPED.glob("*.jinja"))


def find_template_file(name: str) -> Path:
    """Return the file that `task.template` names: a shipped name, else a path. Raises UserError if neither exists."""
    shipped = list_shipped_templates()
    if name in shipped:
        return _SHIPPED / f"{name}.jinja"
    path = user_path(name)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [AUTO, *shipped], n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"task.template: no file {name!r}{meant}; name a file of Jinja text, {AUTO} (the tokenizer's own), or one "
            f"that ships: {', '.join(shipped)}"
        )
    return path


def read_template(name: str) -> str:
    """Return the Jinja text that `task.template` names. Raises UserError if the file does not exist or is not text."""
    path = find_template_file(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"task.template: {path} cannot be read ({error})") from error


def template_record(task: TemplateSettings) -> dict[str, str] | None:
    """Return `path, sha256` of the template that the task names, for a manifest; None for `auto`."""
    if task.template == AUTO:
        return None
    return {"path": task.template, "sha256": hashlib.sha256(read_template(task.template).encode()).hexdigest()}


def resolve_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return `name`, or the shipped template for base models if it is `auto` and the tokenizer has no template."""
    return FOR_BASES if name == AUTO and not tokenizer.chat_template else name


def describe_template(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a message on the template in use and the reason; name: as in the recipe."""
    resolved = resolve_template(name, tokenizer)
    if resolved == AUTO:
        return "chat template: the tokenizer's own"
    if name == AUTO:
        return (
            f"chat template: {resolved}, as the tokenizer has none: <|user|> and <|assistant|> in plain text, answers "
            f"end with {tokenizer.eos_token!r}; others ship (task.template: {', '.join(list_shipped_templates())})"
        )
    return f"chat template: {resolved}" + (", in place of the tokenizer's own" if tokenizer.chat_template else "")


def add_default_arguments(text: str, arguments: Mapping[str, Any] | None) -> str:
    """Return the Jinja text with `arguments` as defaults of its variables."""
    if not arguments:
        return text
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_to_jinja_literal(value)} %}}{{%- endif %}}"
        for name, value in arguments.items()
    )
    return f"{defaults}\n{text}"  # the newline after a block is not rendered (trim_blocks)


def _to_jinja_literal(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_to_jinja_literal, value))}]"
    if isinstance(value, dict):
        items = (f"{_to_jinja_literal(key)}: {_to_jinja_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def set_template(tokenizer: PreTrainedTokenizerBase, task: TemplateSettings) -> None:
    """Store template and arguments of `task` in the tokenizer, so that its users prompt the model as in training."""
    name = resolve_template(task.template, tokenizer)
    own: Any = tokenizer.chat_template if name == AUTO else read_template(name)
    texts = own if isinstance(own, dict) else {"": own}
    texts = {variant: add_default_arguments(text, task.template_arguments) for variant, text in texts.items()}
    tokenizer.chat_template = texts if isinstance(own, dict) else texts[""]


class ChatTemplate:
    """Renderer of conversations for `task` and `tokenizer`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: TemplateSettings) -> None:
        """Raise UserError for a template that prints today's date or ends turns with a token that the tokenizer
        lacks, or for arguments that it does not read."""
        self.tokenizer = tokenizer
        name = resolve_template(task.template, tokenizer)
        self.name = "the tokenizer's chat template" if name == AUTO else "task.template"
        self._text = None if name == AUTO else read_template(name)
        self._shipped = name if name in list_shipped_templates() else None
        self._arguments = task.template_arguments or {}
        self._date = task.date
        self._specials: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._sources: dict[bool, str] = {}
        self._keys: dict[str, bool] = {}
        self._calls_in_text: bool | None = None
        self._joins_parts: bool | None = None
        self.missing = self._find_missing_tokens()
        self._check_arguments()

    def _find_missing_tokens(self) -> tuple[str, ...]:
        """Return control tokens of a shipped template that the tokenizer lacks and would split into several tokens."""
        match = _CONTROL.match(self._text or "")
        if match is None:
            return ()
        missing = tuple(token for token in match[1].split() if not _is_token(self.tokenizer, token))
        if match[2] in missing:
            raise UserError(
                f"task.template: {self._shipped} ends a turn with {match[2]!r}, which is no token of the backbone's "
                f"tokenizer, so that no answer would stop; take {FOR_BASES}, which ends it with "
                f"{self.tokenizer.eos_token!r}, or a backbone that has it"
            )
        return missing

    def reads(self, argument: str) -> bool:
        """Return True if the template reads a variable of this name."""
        return any(re.search(rf"\b{argument}\b", text) for text in self._texts())

    def _texts(self) -> list[str]:
        own: Any = self.tokenizer.chat_template if self._text is None else self._text
        return list(own.values()) if isinstance(own, dict) else [own]

    def _check_arguments(self) -> None:
        for name in self._arguments:
            if not self.reads(name):
                words = {word for text in self._texts() for word in re.findall(r"[A-Za-z_]\w*", text)}
                close = difflib.get_close_matches(name, words, n=1, cutoff=0.7)
                hint = f"did you mean {close[0]!r}?" if close else "leave it out"
                raise UserError(f"task.template_arguments: {self.name} reads no {name!r}; {hint}")

    @property
    def with_tools(self) -> str:
        """Clause that names a shipped template that renders tools; empty if this one does."""
        if self._shipped in _WITH_TOOLS:
            return ""
        name = _WITH_TOOLS[0] if _is_token(self.tokenizer, "<|im_end|>") else FOR_BASES
        return f"; task.template: {name} ships and writes tools"

    def tagged(self, tools: Tools) -> bool:
        """Return True if the template itself marks the assistant's text with {% generation %} tags."""
        return _TAG.search(self.source(tools)) is not None

    def source(self, tools: Tools) -> str:
        """Return the Jinja text for conversations with or without tools (some tokenizers have two)."""
        known = bool(tools)
        if known not in self._sources:
            try:
                text = self.tokenizer.get_chat_template(self._text, tools)
            except ValueError as error:
                raise UserError(f"task.template: {str(error).splitlines()[0]}") from error
            self._sources[known] = self._fix_date(add_default_arguments(text, self._arguments))
        return self._sources[known]

    def reads_key(self, key: str) -> bool:
        """Return True if the template text contains a key of turns; any name for thoughts counts for all of them."""
        if key not in self._keys:
            names = "|".join(map(re.escape, THOUGHTS if key in THOUGHTS else (key,)))
            text = self.source(None) + self.source([{}])
            self._keys[key] = re.search(rf"(?<!\w)(?:{names})(?!\w)", text) is not None
        return self._keys[key]

    def _fix_date(self, text: str) -> str:
        """Return the text with `strftime_now` fixed to `task.date`; otherwise a run resumed on another day would see
        other rows."""
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
        table = ", ".join(f"{json.dumps(form)}: {json.dumps(day.strftime(form))}" for form in dict.fromkeys(formats))
        # A macro in the template shadows the global function; the newline after it is not rendered (trim_blocks).
        return f"{{% macro strftime_now(form) -%}}{{{{- {{{table}}}[form] -}}}}{{%- endmacro %}}\n{text}"

    def render(self, messages: Messages, tools: Tools, *, prompt: bool = False) -> str:
        """Return the conversation as text; with `prompt`, followed by the generation prompt. Raises TemplateRenderError
        if the template raises, UserError if it is not valid Jinja."""
        return self._render(messages, tools, prompt=prompt, track=False)[0]

    def render_tagged(self, messages: Messages, tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and (start, end) of every non-empty span inside the template's {% generation %} tags."""
        text, blocks = self._render(messages, tools, prompt=False, track=True)
        return text, [block for block in blocks if block[0] < block[1]]

    def _render(
        self, messages: Messages, tools: Tools, *, prompt: bool, track: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        calls = [call for turn in messages for call in turn.get("tool_calls", ())]
        if not calls or self._calls_in_text:
            return self._run_jinja(messages, tools, prompt=prompt, track=track)
        # Most templates take arguments as an object; others concatenate them with text (DeepSeek) or would print
        # Python's repr, and need JSON text. Try objects first and remember which form works.
        objects = [repr(arguments) for call in calls if (arguments := call.get("function", call).get("arguments"))]
        try:
            rendered = self._run_jinja(messages, tools, prompt=prompt, track=track)
            if self._calls_in_text is False or not any(text in rendered[0] for text in objects):
                self._calls_in_text = False
                return rendered
        except TemplateRenderError:
            if self._calls_in_text is False:
                raise
            self._calls_in_text = True
            try:
                return self._run_jinja(messages, tools, prompt=prompt, track=track)
            except TemplateRenderError:
                self._calls_in_text = None
            raise
        self._calls_in_text = True
        return self._run_jinja(messages, tools, prompt=prompt, track=track)

    def _run_jinja(
        self, messages: Messages, tools: Tools, *, prompt: bool, track: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        request = {
            "conversations": [[self._adapt_turn(turn) for turn in messages]],
            "tools": list(tools) if tools else None,
            "chat_template": self.source(tools),
            "return_assistant_tokens_mask": track,
            "add_generation_prompt": prompt,
            **self._specials,
        }
        try:
            answer = render_jinja(request) if self._shipped else render_in_child(request)
        except LimitExceeded as error:
            raise UserError(
                f"task.template: {self.name} {error} for a conversation; take another (task.template)"
            ) from None
        if (reason := answer.get("syntax")) is not None:
            raise UserError(f"task.template: {self.name} is not valid Jinja ({reason})")
        if (reason := answer.get("failure")) is not None:
            has_tools = tools or any(turn["role"] == "tool" or turn.get("tool_calls") for turn in messages)
            hint = self.with_tools if has_tools and "tool" in reason else ""
            raise TemplateRenderError(f"{self.name} fails on it ({reason}){hint}")
        return answer["text"], [(start, end) for start, end in answer["blocks"]]

    def _adapt_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return the turn with its thoughts under the names that templates read, as newer versions of transformers
        do, and with parts of text, and arguments of calls, as one text if the template needs that."""
        thoughts = get_thoughts(turn)
        if thoughts is not None:
            turn = {"thinking": thoughts, **turn, "reasoning_content": thoughts}
        if isinstance(turn.get("content"), list) and self._reads_text_alone():
            from .conversation import join_text_parts  # imports numpy

            turn = {**turn, "content": join_text_parts(turn)}
        if self._calls_in_text and turn.get("tool_calls"):
            turn = copy.deepcopy(turn)
            for call in turn["tool_calls"]:
                function = call.get("function", call)
                if "arguments" in function:
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return turn

    def _reads_text_alone(self) -> bool:
        """Return True if the template writes a text, and something else for a list of its parts."""
        if self._joins_parts is None:
            self._joins_parts, written = False, []
            for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
                turns = [{"role": role, "content": content} for role in ("user", "assistant")]
                try:
                    written.append(self._run_jinja(turns, None, prompt=False, track=False)[0])
                except TemplateRenderError:
                    written.append("")
            self._joins_parts = _PROBE in written[0] and written[0] != written[1]
        return self._joins_parts


def _is_token(tokenizer: PreTrainedTokenizerBase, token: str) -> bool:
    index = tokenizer.convert_tokens_to_ids(token)
    return index is not None and tokenizer.convert_ids_to_tokens(index) == token


def get_thoughts(turn: dict[str, Any]) -> Any:
    """Return the reasoning before the turn; None if there is none."""
    return next((turn[name] for name in THOUGHTS if turn.get(name) is not None), None)
