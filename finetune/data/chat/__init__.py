"""Conversations to supervised tokens: what a chat template writes, and which of it the assistant has to write.

- `conversation`: a row's turns, checked
- `template`: the Jinja text that renders them, the tokenizer's own or the user's
- `answers`: where in the rendering the assistant's words and the end of its turn are, proven or refused
- `tokens`: from characters to tokens
- `encode`: rows to examples, with what was lost counted and, past a share, refused
- `questions`: rows to prompts that wait for an answer
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Conversation": "conversation",
    "read_conversation": "conversation",
    "ChatTemplate": "template",
    "template_text": "template",
    "template_file": "template",
    "template_record": "template",
    "shipped_templates": "template",
    "Sample": "answers",
    "Answers": "answers",
    "ChatEncoder": "encode",
    "ask": "questions",
    "question": "questions",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
