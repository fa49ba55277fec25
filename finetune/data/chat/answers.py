"""What of a rendered conversation the assistant has to write, found exactly or refused.

An answer begins where the rendering of the turns before it, with the generation prompt, ends; it holds the assistant's
content and tool calls, and closes with the end of turn that the template writes after them (`<|im_end|>`), without the
white space behind that. This is what the model is asked for at inference: the header is given, the rest is its own.

Templates without {% generation %} tags are asked with changed conversations, and every answer is proven:

- start: the text before the turn, rendered with the generation prompt, is a prefix of the text up to the turn. Where
  it is not (DeepSeek-R1 asks with `<think>` and writes finished turns without), the answer begins with its content.
- end: a mark put behind the content shows what the template writes after it. The end of turn is as much of that as
  stays when the conversation goes on; what only closes a conversation (Phi-3's `<|endoftext|>`) is not part of it.
- whole conversation: every answer must stand in the whole text as it does when its turn is the last. Templates that
  rewrite earlier turns (Qwen3 and gpt-oss drop thoughts, gpt-oss changes the end of turn, Mistral moves the system
  turn) fail this; the conversation then becomes several samples, each ending with one of its turns, in which every
  answer stands exactly as the model has to write it.

Where a template has the tags, they decide, and are checked to hold every answer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .conversation import Conversation, text_of
from .template import CannotRender, ChatTemplate, Messages, Tools, thoughts_of

_MARK = "xQZ0markedhere0ZQx"  # letters alone: nothing strips, splits or escapes them; found twice, it is refused
_PROBE = "."
_EMPTY_THOUGHTS = re.compile(r"<(think|thinking)>\s*</\1>\s*")
_LONGEST_TAG = len("<thinking>") + 8

Span = tuple[int, int]


class AmbiguousTemplate(ValueError):
    """Where an answer begins or ends cannot be proven; says why."""


class _ToolsLost(AmbiguousTemplate):
    """The template leaves out tools, or a call of one."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A rendered conversation, or the beginning of one that ends with a turn of the assistant."""

    text: str
    spans: tuple[Span, ...]
    """Start and end, in characters, of what is supervised, in order and apart."""
    last: int
    """Index in `text` at which the last answer begins, behind thoughts without a word that are not supervised."""

    def until(self, size: int) -> RenderedConversation:
        """The first `size` characters of it; a span that goes on ends behind them."""
        spans = tuple((start, min(end, size + 1)) for start, end in self.spans if start < size)
        return RenderedConversation(self.text[:size], spans, self.last)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    """The conversation up to the turn and including it."""
    start: int
    end: int

    @property
    def upto(self) -> str:
        return self.text[: self.end]


class AssistantSpans:
    """Samples of conversations under one template.

    `asked_otherwise`, `thoughts_left_out` and `empty_thoughts` count turns that came out differently from what one
    might think.
    """

    def __init__(
        self, template: ChatTemplate, tokens: Callable[[str], list[Span]], *, empty_thoughts: bool = False
    ) -> None:
        """
        Arguments:
            tokens: (start, end) in characters of each token of a text.
            empty_thoughts: whether thoughts without a word at the beginning of an answer belong to it.
        """
        self.template = template
        self.asked_otherwise = 0
        self.thoughts_left_out = 0
        self.empty_thoughts = 0
        self._supervise_empty = empty_thoughts
        self._tokens = tokens
        self._tails: dict[str, int] = {}  # after content: what the template writes → how much of it ends the turn

    def samples(self, conversation: Conversation, *, last_only: bool) -> list[RenderedConversation]:
        """The samples of a conversation, the one with its last turn first.

        Raises:
            CannotRender: the template raises.
            Unclear: the answers cannot be found exactly.
            ValueError: as `Conversation.supervised`.
        """
        places = conversation.supervised(last_only=last_only)
        try:
            if self.template.tagged(conversation.tools):
                samples = [self._tagged(conversation, places)]
            else:
                samples = _together([self._answer(conversation, place) for place in places])
            _check_context(samples[0].text, conversation.messages[: places[-1]], conversation.tools)
        except _ToolsLost as error:
            raise AmbiguousTemplate(f"{error}{self.template.with_tools}") from None
        return samples

    def _answer(self, conversation: Conversation, place: int) -> _Answer:
        messages, tools = conversation.messages, conversation.tools
        turn = messages[place]
        text = self.template.render(messages[: place + 1], tools)
        tail, kept = self._tail(text, messages, place, tools)
        words_end, end = len(text) - len(tail), len(text) - len(tail) + kept
        start = self._start(text, words_end, messages, place, tools)
        self._check_whole(text[start:end], turn, place)
        return _Answer(text, self._behind_empty_thoughts(text, start, end), end)

    def _behind_empty_thoughts(self, text: str, start: int, end: int) -> int:
        """`start`, or the end of thoughts without a word that begin there, or a little before."""
        if self._supervise_empty:
            return start
        found = _EMPTY_THOUGHTS.search(text, max(0, start - _LONGEST_TAG), end)
        if found is None or found.end() <= start or text[start : found.start()].strip():
            return start
        self.empty_thoughts += 1
        return found.end()

    # ------------------------------------------------------------------------------------------- the beginning

    def _start(self, text: str, words_end: int, messages: Messages, place: int, tools: Tools) -> int:
        before, turn = messages[:place], messages[place]
        content = text_of(turn)
        asked = self.template.render(before, tools, prompt=True)
        if text.startswith(asked) and len(asked) <= words_end:
            between = text[len(asked) : words_end]
            written = _written(between, content)
            alone = written is not None and not between[: len(between) - len(written)].strip()
            if alone or asked != self.template.render(before, tools) or not self._header(asked, before, tools):
                return len(asked)
        # The template asks in another way than it writes, or does not ask at all: then the content itself begins the
        # answer, which is proven to stand directly before what the mark showed.
        written = _written(text[:words_end], content) if not turn.get("tool_calls") else None
        if not written:
            _check_said(text, turn, place)
            raise AmbiguousTemplate(
                f"turn {place + 1} is not written after the template's generation prompt, so where the answer begins "
                "is not certain; mark it by {% generation %} tags in a template of your own (task.template)"
            )
        self.asked_otherwise += 1
        return words_end - len(written)

    def _header(self, asked: str, before: Messages, tools: Tools) -> bool:
        """Whether a template without a generation prompt writes something in front of a turn's content."""
        text = self.template.render([*before, {"role": "assistant", "content": _MARK}], tools)
        return not text.startswith(asked) or bool(text[len(asked) :].partition(_MARK)[0].strip())

    # ------------------------------------------------------------------------------------------- the end

    def _tail(self, text: str, messages: Messages, place: int, tools: Tools) -> tuple[str, int]:
        """What `text` has after the words of its last turn, and how many characters of it end the turn."""
        turn = messages[place]
        if not turn.get("tool_calls"):
            content = text_of(turn)
            for tail, kept in self._tails.items():
                if text.endswith(tail) and _written(text[: len(text) - len(tail)], content):
                    return tail, kept
        tail, kept = self._probed(text, messages, place, tools)
        if not turn.get("tool_calls"):
            self._tails[tail] = kept
        return tail, kept

    def _probed(self, text: str, messages: Messages, place: int, tools: Tools) -> tuple[str, int]:
        marked = [*messages[:place], _marked(messages[place])]
        tail = self._after_mark(self.template.render(marked, tools), messages[place], place)
        if not text.endswith(tail):
            raise AmbiguousTemplate(f"the template writes turn {place + 1} differently depending on how its text ends")
        goes_on = self._continued(marked, messages[place + 1 : place + 2], tools)
        common = _common(tail, goes_on) if goes_on is not None else 0
        kept = max([end for _, end in self._tokens(tail) if end <= common], default=0)
        kept = len(tail[:kept].rstrip())
        if not kept:
            kept = self._lone_end(tail, place)
        return tail, kept

    def _continued(self, marked: Messages, following: Messages, tools: Tools) -> str | None:
        """What comes after the mark when the conversation goes on; None where the template allows no continuation."""
        for more in (following, [{"role": "user", "content": _PROBE}], [{"role": "tool", "content": _PROBE}]):
            try:
                text = self.template.render([*marked, *more], tools) if more else ""
            except CannotRender:
                continue
            if text.count(_MARK) == 1:
                return text.partition(_MARK)[2]
        return None

    def _lone_end(self, tail: str, place: int) -> int:
        """Where the template ends the last turn by another token than earlier ones, that token is the end."""
        end = len(tail.rstrip())
        inside = [span for span in self._tokens(tail) if tail[span[0] : span[1]].strip()]
        if not end:
            raise AmbiguousTemplate(
                f"the template writes nothing after turn {place + 1}, so the model would never learn to stop; let it "
                "write an end of turn, for example {{ eos_token }} (task.template)"
            )
        if len(inside) != 1:
            raise AmbiguousTemplate(
                f"which part of {tail!r} after turn {place + 1} ends it is not certain; mark it by tags"
            )
        return end

    def _after_mark(self, text: str, turn: dict[str, Any], place: int) -> str:
        if text.count(_MARK) != 1:
            what = "tool calls" if turn.get("tool_calls") else "content"
            times = "leaves out" if _MARK not in text else "repeats"
            kind = _ToolsLost if turn.get("tool_calls") else AmbiguousTemplate
            raise kind(f"the template {times} the {what} of turn {place + 1}")
        return text.partition(_MARK)[2]

    # ------------------------------------------------------------------------------------------- checks

    def _check_whole(self, answer: str, turn: dict[str, Any], place: int) -> None:
        """All that the assistant said must be in the answer, but for white space."""
        _check_said(answer, turn, place)
        for call in turn.get("tool_calls", []):
            function = call.get("function", call)
            if function["name"] not in answer:
                raise _ToolsLost(f"the template leaves out the tool call {function['name']!r} of turn {place + 1}")
        thoughts = thoughts_of(turn)
        if isinstance(thoughts, str) and _squeezed(thoughts) not in _squeezed(answer):
            self.thoughts_left_out += 1

    # ------------------------------------------------------------------------------------------- tags

    def _tagged(self, conversation: Conversation, places: Sequence[int]) -> RenderedConversation:
        """The template's own marks, told apart by turn: those that come with a turn are its own."""
        messages, tools = conversation.messages, conversation.tools
        end = places[-1] + 1
        text, blocks = self.template.render_tagged(messages[:end], tools)
        turns = [i for i, turn in enumerate(messages[:end]) if turn["role"] == "assistant"]
        before = []
        for place in turns:
            earlier, own = self.template.render_tagged(messages[:place], tools)
            if [earlier[slice(*block)] for block in own] != [text[slice(*block)] for block in blocks[: len(own)]]:
                raise AmbiguousTemplate(
                    f"the template's {{% generation %}} tags mark earlier turns differently once turn {place + 1} is "
                    "there, so which belong to which turn is not certain"
                )
            before.append(len(own))
        own_blocks = {
            place: blocks[first:stop] for place, first, stop in zip(turns, before, [*before[1:], None], strict=True)
        }
        for place in places:
            if not own_blocks[place]:
                raise AmbiguousTemplate(f"the template's {{% generation %}} tags mark nothing of turn {place + 1}")
            self._check_whole("".join(text[slice(*block)] for block in own_blocks[place]), messages[place], place)
        for place in places:
            first, *rest = own_blocks[place]
            begin = self._behind_empty_thoughts(text, *first)
            own_blocks[place] = [(begin, first[1]), *rest] if begin < first[1] or not rest else rest
        spans = tuple(block for place in places for block in own_blocks[place])
        return RenderedConversation(text, spans, own_blocks[places[-1]][0][0])


def _together(answers: list[_Answer]) -> list[RenderedConversation]:
    """As few samples as hold every answer where it stands as it does when its turn is the last."""
    samples = []
    while answers:
        whole = answers[-1]
        inside = [answer for answer in answers if whole.text.startswith(answer.upto)]
        samples.append(
            RenderedConversation(whole.text, tuple((answer.start, answer.end) for answer in inside), whole.start)
        )
        answers = [answer for answer in answers if answer not in inside]
    return samples


def _check_said(text: str, turn: dict[str, Any], place: int) -> None:
    if _squeezed(text_of(turn)) not in _squeezed(text):
        raise AmbiguousTemplate(
            f"the template leaves out or rewrites a part of turn {place + 1}, so not all of the answer would be "
            "learnt; take a template that keeps it (task.template)"
        )


def _check_context(text: str, messages: Messages, tools: Tools) -> None:
    """What an answer answers must be there: templates leave out roles, and tools, that they do not know."""
    squeezed = _squeezed(text)
    for number, turn in enumerate(messages, start=1):
        if turn["role"] not in ("assistant", "tool") and _squeezed(text_of(turn)) not in squeezed:
            raise AmbiguousTemplate(f"the template leaves out or rewrites turn {number} ({turn['role']})")
    for tool in tools or ():
        name = tool.get("function", tool).get("name")
        if not isinstance(name, str) or name not in text:
            raise _ToolsLost(f"the template leaves out the tool {name!r}")


def _marked(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn with the mark behind its last words: in its last tool call, else at the end of its content."""
    turn = copy.deepcopy(turn)
    if turn.get("tool_calls"):
        call = turn["tool_calls"][-1]
        call.get("function", call)["name"] += _MARK
    elif isinstance(turn["content"], list):
        turn["content"][-1]["text"] += _MARK
    else:
        turn["content"] += _MARK
    return turn


def _written(text: str, content: str) -> str | None:
    """The content as `text` ends with it: whole, or stripped as many templates do; None where it does not, or "" ."""
    for form in (content, content.rstrip(), content.lstrip(), content.strip()):
        if form and text.endswith(form):
            return form
    return None


def _common(one: str, other: str) -> int:
    """Length of the common beginning."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _squeezed(text: str) -> str:
    return "".join(text.split())
