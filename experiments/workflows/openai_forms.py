"""OpenAI's forms of completions: the parameters of a request, and its answers, log-probabilities and errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from flatshift.experiments.workflows.generate import GenerativeRuns, Question, TokenScore

MAX_BODY = 2 << 20
"""Maximum bytes of a request body."""
MAX_CHOICES = 128
"""Maximum answers of a request: prompts times `n`."""


class RefusalError(Exception):
    """Refusal of a request, by its HTTP status, one sentence, and the parameter at fault."""

    def __init__(self, status: HTTPStatus, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def _is_a(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_is_text, _is_flag = _is_a(str), _is_a(bool)


def _is_integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high and math.isfinite(value)


def _is_list(check: Callable[[Any], bool], most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and 0 < len(value) <= most and all(map(check, value))


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200


_TOKENS = _is_list(_is_integer(0, 1 << 32), MAX_BODY)
_PROMPTS = (_is_text, _TOKENS, _is_list(_is_text, MAX_CHOICES), _is_list(_TOKENS, MAX_CHOICES))
_MOST_TOKENS, _MOST_LOGPROBS, _MOST_STOPS = 1 << 20, 20, 16
_COMMON: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_text, "the name of a run"),
    "max_tokens": (_is_integer(0, _MOST_TOKENS), f"a whole number from 1 to {_MOST_TOKENS:,}"),
    "temperature": (_is_number(0, 100), "a number from 0 to 100"),
    "top_p": (_is_number(0, 1), "a number from 0 to 1"),
    "seed": (_is_integer(0, 2**63 - 1), "a whole number from 0 to 2^63 - 1"),
    "n": (_is_integer(1, MAX_CHOICES), f"a whole number from 1 to {MAX_CHOICES}"),
    "stop": (
        lambda value: _is_stop(value) or value == [] or _is_list(_is_stop, _MOST_STOPS)(value),
        f"a text of 1 to 200 characters, or a list of up to {_MOST_STOPS} of them",
    ),
    "stream": (_is_flag, "true or false"),
    "stream_options": (
        lambda value: isinstance(value, dict) and all(k == "include_usage" and _is_flag(v) for k, v in value.items()),
        'an object such as {"include_usage": true}',
    ),
}
_FIELDS: dict[bool, dict[str, tuple[Callable[[Any], bool], str]]] = {
    True: {
        **_COMMON,
        "messages": (_is_list(_is_a(dict), MAX_BODY), "a list of messages"),
        "max_completion_tokens": (_is_integer(1, _MOST_TOKENS), f"a whole number from 1 to {_MOST_TOKENS:,}"),
        "logprobs": (_is_flag, "true or false"),
        "top_logprobs": (_is_integer(0, _MOST_LOGPROBS), f"a whole number from 0 to {_MOST_LOGPROBS}"),
    },
    False: {
        **_COMMON,
        "prompt": (
            lambda value: any(is_prompt(value) for is_prompt in _PROMPTS),
            "a text, a list of tokens, or a list of either",
        ),
        "logprobs": (
            lambda value: value is False or _is_integer(0, _MOST_LOGPROBS)(value),
            f"a whole number from 0 to {_MOST_LOGPROBS}",
        ),
        "echo": (_is_flag, "true or false"),
    },
}  # fmt: skip
"""Parameters of chat (True) and completion requests: the check of a value, and its description."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "store": (False,),
    "service_tier": ("auto", "default"), "suffix": ("",), "best_of": (1,),
}  # fmt: skip
"""Parameters that clients send at their defaults: accepted at these values, or null."""
_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
"""Parameters that say who asks: no answer depends on them."""


def parse_fields(data: bytes, chat: bool) -> dict[str, Any]:
    """Return the parameters in a request's body that are not null. Raises RefusalError for what cannot be followed."""
    try:
        body = json.loads(data, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise RefusalError(HTTPStatus.BAD_REQUEST, "the body is not valid JSON") from None
    if not isinstance(body, dict):
        raise RefusalError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
    known = _FIELDS[chat]
    fields = {key: value for key, value in body.items() if value is not None and key not in _LABELS}
    for key, value in fields.items():
        if key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                values = " or ".join(json.dumps(one) for one in _NEUTRAL[key])
                raise RefusalError(HTTPStatus.BAD_REQUEST, f"{key!r} can only be {values} here; leave it out", key)
        elif key not in known:
            names = ", ".join(sorted(known))
            raise RefusalError(HTTPStatus.BAD_REQUEST, f"{key[:100]!r} is not known here; known are {names}", key[:100])
        elif not known[key][0](value):
            raise RefusalError(HTTPStatus.BAD_REQUEST, f"{key} must be {known[key][1]}", key)
    fields = {key: value for key, value in fields.items() if key in known}
    prompt = "messages" if chat else "prompt"
    has_scores = fields.get("logprobs", False) is not False
    for key, is_wrong, why in (
        (prompt, prompt not in fields, "is missing"),
        ("max_tokens", fields.get("max_tokens") == 0 and not fields.get("echo"), "can be 0 only with echo"),
        ("max_tokens", {"max_tokens", "max_completion_tokens"} <= fields.keys(), "is max_completion_tokens; give one"),
        ("top_p", fields.get("top_p", 1) < 1 and "temperature" not in fields, "needs a temperature above 0"),
        ("top_logprobs", "top_logprobs" in fields and not has_scores, "needs logprobs: true"),
        ("stream_options", "stream_options" in fields and not fields.get("stream"), "needs stream: true"),
        ("stream", fields.get("stream") and (has_scores or fields.get("echo")), "gives neither logprobs nor echo"),
    ):
        if is_wrong:
            raise RefusalError(HTTPStatus.BAD_REQUEST, f"{key} {why}", key)
    return fields


def read_decoding(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the request's settings as fields of `flatshift.finetune.evaluate.generation.Decoding`."""
    longest = fields.get("max_completion_tokens", fields.get("max_tokens"))
    decoding: dict[str, Any] = {key: fields[key] for key in ("temperature", "seed") if key in fields}
    if "temperature" in decoding:
        decoding["temperature"] = float(decoding["temperature"])
    if decoding.get("temperature") and fields.get("top_p", 1) < 1:
        decoding["top_p"] = float(fields["top_p"])
    return decoding if longest is None else decoding | {"max_new_tokens": max(1, longest)}


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return the body of a refusal."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def finish_reason(question: Question) -> str:
    """Return `stop` if the model or a stop text ended the answer, else `length`."""
    return "stop" if question.ended else "length"


def token_usage(questions: Sequence[Question], count: int) -> dict[str, int]:
    """Count tokens; every `count`-th question has a new prompt."""
    prompts = sum(len(question.prompt.ids) for question in questions[::count])
    tokens = sum(len(question.tokens) for question in questions)
    return {"prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens}


def format_choice(
    runs: GenerativeRuns, question: Question, index: int, fields: dict[str, Any], chat: bool
) -> dict[str, Any]:
    """Return an answer as the choice `index` of its request."""
    logprobs, prompt, echoes = None, question.prompt, bool(fields.get("echo"))
    echo = prompt.text or question.tokenizer.decode(prompt.ids) if echoes else ""
    text = echo + question.text
    wanted = fields.get("logprobs", False)
    if wanted is not False:
        scores = runs.score(
            question.name, [*prompt.ids, *question.tokens], fields.get("top_logprobs", 0) if chat else wanted
        )
        scores = scores if echoes else scores[len(prompt.ids) - 1 :]
        first = prompt.ids[:echoes]
        logprobs = _chat_logprobs(question, scores) if chat else _completion_logprobs(question, first, scores, text)
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason(question)}


def _chat_logprobs(question: Question, scores: Sequence[TokenScore]) -> dict[str, Any]:
    def describe(token: int, logprob: float) -> dict[str, Any]:
        text = str(question.tokenizer.decode([token]))
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**describe(s.token, s.logprob), "top_logprobs": [describe(*pair) for pair in s.likeliest]} for s in scores
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(
    question: Question, first: Sequence[int], scores: Sequence[TokenScore], text: str
) -> dict[str, Any]:
    """first: tokens before the scored ones. text: of the choice, without the tokens that the tokenizer puts around."""
    decode, special = question.tokenizer.decode, question.tokenizer.all_special_ids
    tokens = [*first, *(score.token for score in scores)]
    texts, offsets, end = [str(decode([token])) for token in tokens], [], 0
    for token, part in zip(tokens, texts, strict=True):
        offsets.append(end)
        if token not in special or text.startswith(part, end):
            end += len(part)
    blank: list[None] = [None] * len(first)  # nothing is before the first token
    likeliest: list[dict[str, float] | None] = [*blank]
    for score in scores:  # the likeliest last: it stays where two tokens have one text
        likeliest.append({str(decode([token])): logprob for token, logprob in reversed(score.likeliest)})
    return {
        "tokens": texts,
        "token_logprobs": [*blank, *(score.logprob for score in scores)],
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }
