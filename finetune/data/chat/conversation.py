"""A row's conversation: turns and tools, checked before a template renders them."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any

from ..rows import Row

# Roles allowed directly before a turn; None: at the start. Templates differ in which orders they reject and which they
# silently render wrongly, so the order is checked here for all of them.
_BEFORE: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None, "system"),
    "user": (None, "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
    "system": "system",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of one row, in the form that chat templates take."""

    messages: list[dict[str, Any]]
    """`role`, `content` and further keys of the row that have a value."""
    tools: list[dict[str, Any]] | None
    answers: tuple[int, ...]
    """Indices of the assistant's turns that may be trained on (all but those with `weight: 0`), in order."""

    def supervised(self, *, last_only: bool) -> tuple[int, ...]:
        """Return the indices of the turns to train on: `answers`, or only the assistant's last turn. Raises ValueError
        if the last turn has `weight: 0`: an earlier turn must not replace it."""
        if not last_only:
            return self.answers
        last = max(i for i, turn in enumerate(self.messages) if turn["role"] == "assistant")
        if last not in self.answers:
            raise ValueError(
                f"turn {last + 1}, the assistant's last, has weight 0, so task.turns: last leaves nothing to learn "
                "from; take task.turns: all"
            )
        return (last,)


def read_conversation(row: Row, *, system: str | None = None) -> Conversation:
    """Return the conversation of `row`, from the columns `messages`, `tools` and `system`.

    Turns are `{role, content[, tool_calls, …]}`, or ShareGPT's `{from, value}` with human, gpt, system, function_call
    and observation. A column, and the arguments of a call, may be JSON text. `weight: 0` (OpenAI's format) excludes an
    assistant turn from training. system: system turn for a conversation that has none of its own.

    Raises ValueError with the reason why the row is bad: no list of turns, an unknown role, roles out of order, an
    empty assistant turn, content that is not text, no assistant turn, two system turns.
    """
    tools = row.values.get("tools")
    messages = _read_turns(row, system)
    answers = tuple(i for i, turn in enumerate(messages) if turn["role"] == "assistant" and _is_trainable(turn, i + 1))
    if not answers:
        raise ValueError("no turn of the assistant is there to learn from")
    definitions = _parse_list(tools, "tools") if tools and tools != "null" else []
    if not all(isinstance(tool, dict) and isinstance(tool.get("function", tool), dict) for tool in definitions):
        raise ValueError("tools must be a list of objects, each the JSON schema of a function")
    _check_text(messages, definitions)
    return Conversation(messages, definitions or None, answers)


def read_unanswered_turns(row: Row, *, system: str | None = None) -> list[dict[str, Any]]:
    """Return the turns of `row` up to the last one that the assistant has to answer; its own last answer is removed.
    Raises ValueError as `read_conversation`, or if there is nothing to answer."""
    messages = _read_turns(row, system)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in _BEFORE["assistant"]:
        raise ValueError("the conversation has no turn that the assistant has to answer")
    return messages


def _read_turns(row: Row, system: str | None) -> list[dict[str, Any]]:
    turns = _parse_list(row.values.get("messages"), "messages")
    messages = [_parse_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    if not messages:
        raise ValueError("the conversation is empty")
    own = row.values.get("system")
    if own is not None and not isinstance(own, str):
        raise ValueError(f"column 'system' is {_describe_type(own)}, not text")
    system = own or system
    if messages[0]["role"] not in ("system", "developer"):
        if system:
            messages.insert(0, {"role": "system", "content": system})
    elif own and join_text_parts(messages[0]) != own:
        raise ValueError("column 'system' and turn 1 are two system turns; keep one of them")
    previous = None
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if previous not in _BEFORE[role]:
            position = "at the beginning" if previous is None else f"after {previous}"
            allowed = " or ".join("at the beginning" if role is None else f"after {role}" for role in _BEFORE[role])
            raise ValueError(f"roles are out of order: turn {number} is {role} {position}, and belongs {allowed}")
        previous = role
    return messages


def _parse_list(value: Any, name: str) -> list[Any]:
    if isinstance(value, str) and (value := _parse_json(value)) is None:
        raise ValueError(f"{name} is text but not JSON; give a list of objects")
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_describe_type(value)}, not a list of objects")
    return value


def _describe_type(value: Any) -> str:
    return {"dict": "an object", "NoneType": "null"}.get(type(value).__name__, f"a {type(value).__name__}")


def _parse_turn(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {number} is {_describe_type(turn)}, not an object with role and content")
    message = {key: value for key, value in turn.items() if value is not None and (key, value) != ("tool_calls", [])}
    if "role" not in message and "from" in message:
        message = _convert_sharegpt(message, number)
    role = message.get("role")
    if not isinstance(role, str) or role not in _BEFORE:
        near = difflib.get_close_matches(str(role), _BEFORE, n=1, cutoff=0.5)
        known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_BEFORE)}"
        raise ValueError(f"turn {number} has the role {role!r}; {known}")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else _describe_type(part)
                raise ValueError(f"turn {number} has a part of type {kind!r}; only text is trained")
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"the content of turn {number} is {_describe_type(content)}, not text")
    if role == "assistant":
        if "tool_calls" in message:
            message["tool_calls"] = _parse_tool_calls(message["tool_calls"], number)
        if not join_text_parts(message).strip() and not message.get("tool_calls"):
            raise ValueError(f"turn {number} of the assistant is empty")
    elif message.pop("tool_calls", None):
        raise ValueError(f"turn {number} ({role}) has tool_calls, which belong to turns of the assistant")
    elif content is None:
        raise ValueError(f"turn {number} ({role}) has no content")
    elif role == "user" and not join_text_parts(message).strip():
        raise ValueError(f"turn {number} of the user is empty")
    return message


def _convert_sharegpt(message: dict[str, Any], number: int) -> dict[str, Any]:
    sender = message["from"]
    if odd := sorted(message.keys() - {"from", "value", "weight"}):
        raise ValueError(f"turn {number} has {odd[0]!r} beside from and value; leave it out, or write role and content")
    if not isinstance(sender, str) or sender not in _SHAREGPT:
        raise ValueError(
            f"turn {number} is from {sender!r}; of ShareGPT's form only human, gpt, system, function_call and "
            "observation with a value are clear: write role and content instead"
        )
    turn = {"role": _SHAREGPT[sender]} | {key: message[key] for key in ("weight",) if key in message}
    if "value" not in message:
        return turn
    if sender != "function_call":
        return turn | {"content": message["value"]}
    calls = _parse_json(message["value"])
    if not isinstance(calls, dict | list):
        raise ValueError(f"turn {number} is from 'function_call', and its value is no JSON of a name and arguments")
    calls = calls if isinstance(calls, list) else [calls]
    return turn | {"tool_calls": [{"type": "function", "function": call} for call in calls]}


def _parse_tool_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, which templates render as JSON."""
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls of turn {number} is {_describe_type(calls)}, not a list")
    parsed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"a tool call of turn {number} names no function")
        if isinstance(text := function.get("arguments"), str):
            arguments = _parse_json(text) if text.strip() else {}
            if not isinstance(arguments, dict):
                raise ValueError(
                    f"the arguments of {function['name']!r} in turn {number} are text that is no JSON object; give an "
                    "object"
                )
            function = {**function, "arguments": arguments}
            call = {**call, "function": function} if "function" in call else function
        parsed.append(call)
    return parsed


def _parse_json(value: Any) -> Any:
    """Return the value of JSON text, or a value that is not text as it is; None for text that is not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


def _is_trainable(message: dict[str, Any], number: int) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"turn {number} has weight {weight!r}; give 0 (not supervised) or 1")
    return bool(weight)


def _check_text(*parts: Any) -> None:
    try:
        json.dumps(parts, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the conversation has half of a surrogate pair, which is not text") from None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"the conversation holds what JSON cannot ({error})") from None


def join_text_parts(message: dict[str, Any]) -> str:
    """Return the content of a turn as one text, with its parts joined."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
