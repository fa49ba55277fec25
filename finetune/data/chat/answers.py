"""Location of the assistant's answers in a rendered conversation, exact or refused.

An answer starts where the rendering of the turns before it, with the generation prompt, ends; it contains the
assistant's content and tool calls, and ends with the end of turn that the template writes after them (`<|im_end|>`),
without trailing whitespace. This is what the model generates at inference, where the header is given.

Templates without {% generation %} tags are probed with changed conversations, and every answer is verified:

- start: the text before the turn, rendered with the generation prompt, is a prefix of the text up to the turn.
  Otherwise (DeepSeek-R1 prompts with `<think>` but renders finished turns without it), the answer starts with its
  content.
- end: a marker appended to the content shows what the template writes after it. The end of turn is the part that
  remains when the conversation continues; text that only closes a conversation (Phi-3's `<|endoftext|>`) is not part of
  it.
- whole conversation: every answer must appear in the whole text as it does when its turn is the last. Templates that
  rewrite earlier turns (Qwen3 and gpt-oss drop thoughts, gpt-oss changes the end of turn, Mistral moves the system
  turn) fail this; the conversation then becomes several examples, each ending with one of its turns, in which every
  answer appears exactly as the model has to generate it.

If a template has the tags, they decide, and are checked to contain every answer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from .conversation import Conversation, join_text_parts
from .template import ChatTemplate, Messages, TemplateRenderError, Tools, get_thoughts

_MARK = "xQZ0markedhere0ZQx"  # only letters and digits, so that no template strips, splits or escapes it
_PROBE = "."
_EMPTY_THOUGHTS = re.compile(r"<(think|thinking)>\s*</\1>\s*")
_WORD = re.compile(r"[^\W_]+")
_LONGEST_TAG = len("<thinking>") + 8

Span = tuple[int, int]


class AmbiguousTemplate(ValueError):
    """The start or end of an answer cannot be proven; says why."""


class _ToolsOmitted(AmbiguousTemplate):
    """The template omits tools, or a tool call."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A rendered conversation, or the beginning of one that ends with an assistant turn."""

    text: str
    spans: tuple[Span, ...]
    """Start and end, in characters, of the target spans, in order and disjoint."""
    last: int
    """Start of the last answer, after empty thoughts that are not trained on."""

    def until(self, size: int) -> RenderedConversation:
        """Return the first `size` characters; a span that continues beyond them ends one character later."""
        spans = tuple((start, min(end, size + 1)) for start, end in self.spans if start < size)
        return RenderedConversation(self.text[:size], spans, self.last)


class _Answer(NamedTuple):
    text: str
    """The conversation up to and including the turn."""
    start: int
    end: int


class AssistantSpans:
    """Finder of target spans of conversations under one template. `asked_otherwise`, `thoughts_left_out` and
    `empty_thoughts` count turns rendered in an unexpected way, for notes."""

    def __init__(
        self, template: ChatTemplate, token_spans: Callable[[str], list[Span]], *, empty_thoughts: bool = False
    ) -> None:
        """token_spans: returns (start, end) in characters of each token of a text. empty_thoughts: True if empty
        thoughts at the start of an answer belong to it."""
        self.template = template
        self.asked_otherwise = 0
        self.thoughts_left_out = 0
        self.empty_thoughts = 0
        self._supervise_empty = empty_thoughts
        self._token_spans = token_spans
        self._tails: dict[str, int] = {}  # text after the content → number of its characters that end the turn

    def samples(self, conversation: Conversation, *, last_only: bool) -> list[RenderedConversation]:
        """Return the examples of a conversation; the one with its last turn is first.

        Raises TemplateRenderError if the template raises, AmbiguousTemplate if the answers cannot be located exactly,
        and with `last_only` ValueError if the last turn has `weight: 0`.
        """
        turns = conversation.supervised(last_only=last_only)
        try:
            if self.template.tagged(conversation.tools):
                samples = [self._find_tagged(conversation, turns)]
            else:
                samples = _merge_answers([self._find_answer(conversation, index) for index in turns])
            _check_context(samples[0].text, conversation.messages[: turns[-1]], conversation.tools)
        except _ToolsOmitted as error:
            raise AmbiguousTemplate(f"{error}{self.template.with_tools}") from None
        return samples

    def _find_answer(self, conversation: Conversation, index: int) -> _Answer:
        messages, tools = conversation.messages, conversation.tools
        text = self.template.render(messages[: index + 1], tools)
        tail, closing = self._find_tail(text, messages, index, tools)
        content_end = len(text) - len(tail)
        start = self._find_start(text, content_end, messages, index, tools)
        end = content_end + closing
        self._check_complete(text[start:end], messages[index], index)
        return _Answer(text, self._skip_empty_thoughts(text, start, end), end)

    def _skip_empty_thoughts(self, text: str, start: int, end: int) -> int:
        """Return `start`, or the end of empty thoughts that start there or just before."""
        if self._supervise_empty:
            return start
        match = _EMPTY_THOUGHTS.search(text, max(0, start - _LONGEST_TAG), end)
        if match is None or match.end() <= start or text[start : match.start()].strip():
            return start
        self.empty_thoughts += 1
        return match.end()

    def _find_start(self, text: str, content_end: int, messages: Messages, index: int, tools: Tools) -> int:
        context, turn = messages[:index], messages[index]
        content = join_text_parts(turn)
        prompt = self.template.render(context, tools, prompt=True)
        if text.startswith(prompt) and len(prompt) <= content_end:
            between = text[len(prompt) : content_end]
            written = _find_content_suffix(between, content)
            alone = written is not None and not between[: len(between) - len(written)].strip()
            if alone or prompt != self.template.render(context, tools) or not self._has_header(prompt, context, tools):
                return len(prompt)
        # The generation prompt differs from the rendered turn, or there is none: then the answer starts with its
        # content, which must end exactly where the marker was.
        written = _find_content_suffix(text[:content_end], content) if not turn.get("tool_calls") else None
        if not written:
            _check_content(text, turn, index)
            raise AmbiguousTemplate(
                f"turn {index + 1} is not written after the template's generation prompt, so where the answer begins "
                "is not certain; mark it by {% generation %} tags in a template of your own (task.template)"
            )
        self.asked_otherwise += 1
        return content_end - len(written)

    def _has_header(self, prompt: str, context: Messages, tools: Tools) -> bool:
        """Return True if a template without a generation prompt writes text before a turn's content."""
        text = self.template.render([*context, {"role": "assistant", "content": _MARK}], tools)
        return not text.startswith(prompt) or bool(text[len(prompt) :].partition(_MARK)[0].strip())

    def _find_tail(self, text: str, messages: Messages, index: int, tools: Tools) -> tuple[str, int]:
        """Return the text after the content of the last turn, and how many of its characters end the turn."""
        turn = messages[index]
        if turn.get("tool_calls"):
            return self._probe_tail(text, messages, index, tools)
        content = join_text_parts(turn)
        for tail, closing in self._tails.items():
            if text.endswith(tail) and _find_content_suffix(text[: len(text) - len(tail)], content):
                return tail, closing
        tail, closing = self._probe_tail(text, messages, index, tools)
        self._tails[tail] = closing
        return tail, closing

    def _probe_tail(self, text: str, messages: Messages, index: int, tools: Tools) -> tuple[str, int]:
        turn = messages[index]
        marked = [*messages[:index], _append_marker(turn)]
        rendered = self.template.render(marked, tools)
        if rendered.count(_MARK) != 1:
            lost = "tool calls" if turn.get("tool_calls") else "content"
            verb = "leaves out" if _MARK not in rendered else "repeats"
            error = _ToolsOmitted if turn.get("tool_calls") else AmbiguousTemplate
            raise error(f"the template {verb} the {lost} of turn {index + 1}")
        tail = rendered.partition(_MARK)[2]
        if not text.endswith(tail):
            raise AmbiguousTemplate(f"the template writes turn {index + 1} differently depending on how its text ends")
        continued = self._render_continued(marked, messages[index + 1 : index + 2], tools)
        pairs = zip(tail, continued or "", strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        closing = max([end for _, end in self._token_spans(tail) if end <= common], default=0)
        return tail, len(tail[:closing].rstrip()) or self._find_lone_end(tail, index)

    def _render_continued(self, marked: Messages, following: Messages, tools: Tools) -> str | None:
        """Return the text after the marker when the conversation continues; None if the template allows no
        continuation."""
        for more in (following, [{"role": "user", "content": _PROBE}], [{"role": "tool", "content": _PROBE}]):
            try:
                text = self.template.render([*marked, *more], tools) if more else ""
            except TemplateRenderError:
                continue
            if text.count(_MARK) == 1:
                return text.partition(_MARK)[2]
        return None

    def _find_lone_end(self, tail: str, index: int) -> int:
        """Return the end if the last turn ends with a token unlike earlier turns: then this single token is the end
        of turn."""
        if not tail.rstrip():
            raise AmbiguousTemplate(
                f"the template writes nothing after turn {index + 1}, so the model would never learn to stop; let it "
                "write an end of turn, for example {{ eos_token }} (task.template)"
            )
        if sum(bool(tail[start:end].strip()) for start, end in self._token_spans(tail)) != 1:
            raise AmbiguousTemplate(
                f"which part of {tail!r} after turn {index + 1} ends it is not certain; mark it by tags"
            )
        return len(tail.rstrip())

    def _check_complete(self, answer: str, turn: dict[str, Any], index: int) -> None:
        """Check that the answer contains the turn's content and tool calls, ignoring whitespace; count omitted
        thoughts."""
        _check_content(answer, turn, index)
        for call in turn.get("tool_calls", []):
            function = call.get("function", call)
            if function["name"] not in answer:
                raise _ToolsOmitted(f"the template leaves out the tool call {function['name']!r} of turn {index + 1}")
        thoughts = get_thoughts(turn)
        if isinstance(thoughts, str) and _remove_whitespace(thoughts) not in _remove_whitespace(answer):
            self.thoughts_left_out += 1

    def _find_tagged(self, conversation: Conversation, supervised: Sequence[int]) -> RenderedConversation:
        """Return the conversation with the spans of the template's tags, which are assigned to turns by rendering
        ever longer beginnings."""
        messages, tools = conversation.messages, conversation.tools
        end = supervised[-1] + 1
        text, blocks = self.template.render_tagged(messages[:end], tools)
        turns = [i for i, turn in enumerate(messages[:end]) if turn["role"] == "assistant"]
        counts = []
        for index in turns:
            earlier, earlier_blocks = self.template.render_tagged(messages[:index], tools)
            counts.append(len(earlier_blocks))
            if [earlier[slice(*block)] for block in earlier_blocks] != [
                text[slice(*block)] for block in blocks[: counts[-1]]
            ]:
                raise AmbiguousTemplate(
                    f"the template's {{% generation %}} tags mark earlier turns differently once turn {index + 1} is "
                    "there, so which belong to which turn is not certain"
                )
        own_blocks = {
            index: blocks[first:stop] for index, first, stop in zip(turns, counts, [*counts[1:], None], strict=True)
        }
        for index in supervised:
            if not own_blocks[index]:
                raise AmbiguousTemplate(f"the template's {{% generation %}} tags mark nothing of turn {index + 1}")
            answer = "".join(text[slice(*block)] for block in own_blocks[index])
            self._check_complete(answer, messages[index], index)
        for index in supervised:
            first, *others = own_blocks[index]
            begin = self._skip_empty_thoughts(text, *first)
            own_blocks[index] = [(begin, first[1]), *others] if begin < first[1] or not others else others
        spans = tuple(block for index in supervised for block in own_blocks[index])
        return RenderedConversation(text, spans, own_blocks[supervised[-1]][0][0])


def _merge_answers(answers: list[_Answer]) -> list[RenderedConversation]:
    """Return as few examples as contain every answer exactly as rendered when its turn is the last."""
    samples = []
    while answers:
        whole = answers[-1]
        covered = [answer for answer in answers if whole.text.startswith(answer.text[: answer.end])]
        spans = tuple((answer.start, answer.end) for answer in covered)
        samples.append(RenderedConversation(whole.text, spans, whole.start))
        answers = [answer for answer in answers if answer not in covered]
    return samples


def _check_content(text: str, turn: dict[str, Any], index: int) -> None:
    if _remove_whitespace(join_text_parts(turn)) not in _remove_whitespace(text):
        raise AmbiguousTemplate(
            f"the template leaves out or rewrites a part of turn {index + 1}, so not all of the answer would be "
            "learnt; take a template that keeps it (task.template)"
        )


def _check_context(text: str, messages: Messages, tools: Tools) -> None:
    """Check that the context of an answer is rendered: templates omit roles, and tools, that they do not know."""
    squeezed, words = _remove_whitespace(text), set(_WORD.findall(text))
    for number, turn in enumerate(messages, start=1):
        role, content = turn["role"], join_text_parts(turn)
        if role == "tool":  # some templates write it as JSON, with other signs between its words
            kept = all(word in text for word in set(_WORD.findall(content)) - words)
        else:
            kept = role == "assistant" or _remove_whitespace(content) in squeezed
        if not kept:
            error = _ToolsOmitted if role == "tool" else AmbiguousTemplate
            raise error(f"the template leaves out or rewrites turn {number} ({role})")
    for tool in tools or ():
        name = tool.get("function", tool).get("name")
        if not isinstance(name, str) or name not in text:
            raise _ToolsOmitted(f"the template leaves out the tool {name!r}")


def _append_marker(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the turn with the marker after its last words: in its last tool call, else at the end of its content."""
    turn = copy.deepcopy(turn)
    if turn.get("tool_calls"):
        call = turn["tool_calls"][-1]
        call.get("function", call)["name"] += _MARK
    elif isinstance(turn["content"], list):
        turn["content"][-1]["text"] += _MARK
    else:
        turn["content"] += _MARK
    return turn


def _find_content_suffix(text: str, content: str) -> str | None:
    """Return the content in the form in which `text` ends with it: whole, or stripped as many templates do; None if
    it does not, or is empty."""
    for form in (content, content.rstrip(), content.lstrip(), content.strip()):
        if form and text.endswith(form):
            return form
    return None


def _remove_whitespace(text: str) -> str:
    return "".join(text.split())
