"""Public chat templates, tokenizers that know their control tokens, and references marked by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.support.data_models import byte_tokenizer

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
CONVERSATIONS: dict[str, dict[str, Any]] = json.loads((TEMPLATES / "conversations.json").read_text(encoding="utf-8"))
DATE = "2026-11-21"
OPEN, CLOSE = "⟦", "⟧"

# Template → its tokenizer's beginning and end of sequence (None: as the test's own) and other control tokens.
_IM = ["<|im_start|>", "<|im_end|>"]
_PHI = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
_DEEPSEEK = ["<｜User｜>", "<｜Assistant｜>"]
CONTROL: dict[str, tuple[str | None, str | None, list[str]]] = {
    "qwen2_5": (None, "<|im_end|>", _IM),
    "qwen3": (None, "<|im_end|>", _IM),
    "qwen3_instruct_2507": (None, "<|im_end|>", _IM),
    "qwen3_6": (None, "<|im_end|>", _IM),
    "phi3": ("<s>", "<|endoftext|>", _PHI),
    "phi3_5": ("<s>", "<|endoftext|>", _PHI),
    "deepseekv3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", _DEEPSEEK),
    "deepseek_r1_distill": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", _DEEPSEEK),
    "gptoss": (
        "<|startoftext|>",
        "<|return|>",
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"],
    ),
    "gemma4": ("<bos>", "<eos>", ["<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"]),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>", []),
    "llava_next": ("<s>", "</s>", []),
    "glm4moe": (None, None, ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"]),
    "qwen2_5_training": (None, "<|im_end|>", _IM),
    "qwen3_training": (None, "<|im_end|>", _IM),
    "phi3_training": ("<s>", "<|endoftext|>", _PHI),
}
REFERENCED = tuple(sorted(path.stem for path in (TEMPLATES / "references").glob("*.txt")))
IN_PARTS = ("smolvlm", "llava_next")
"""Templates that take content as a list of parts only."""


def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A small byte-level tokenizer with the control tokens and the chat template of `name`."""
    bos, eos, control = CONTROL[name]
    tokenizer = byte_tokenizer()
    named = {key: token for key, token in (("bos_token", bos), ("eos_token", eos)) if token is not None}
    tokenizer.add_special_tokens({**named, "additional_special_tokens": control})
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def conversation(name: str, template: str) -> dict[str, Any]:
    """The columns of a row with the conversation `name`, its contents in parts where the template needs them so."""
    found = CONVERSATIONS[name]
    if template not in IN_PARTS:
        return found
    messages = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in found["messages"]]
    return {**found, "messages": messages}


def references(name: str) -> dict[str, list[str]]:
    """Conversation → its samples as text with what is supervised in ⟦…⟧, marked by hand."""
    text = (TEMPLATES / "references" / f"{name}.txt").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for part in text.split("\n=== ")[1:]:
        head, _, body = part.partition("\n")
        found.setdefault(head.split()[0], []).append(body)
    return found


def unmarked(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without its marks, and the (start, end) of what they enclosed."""
    text, spans = "", []
    for number, piece in enumerate(marked.split(OPEN)):
        if number:
            inside, _, piece = piece.partition(CLOSE)
            spans.append((len(text), len(text) + len(inside)))
            text += inside
        text += piece
    return text, spans


def token_bytes(tokenizer: Any, token: int) -> int:
    """Bytes of a token of these byte-level tokenizers: one for each character of its spelling, but for added ones."""
    spelling = tokenizer.convert_ids_to_tokens(token)
    return len(spelling.encode()) if token in tokenizer.added_tokens_decoder else len(spelling)


def reference_mask(tokenizer: Any, marked: str) -> tuple[list[int], list[bool]]:
    """Token ids of the whole text, and which of them consist of marked bytes, by counting bytes from the beginning."""
    text, spans = unmarked(marked)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    edges = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in spans]
    mask, at = [], 0
    for token in ids:
        before, at = at, at + token_bytes(tokenizer, token)
        mask.append(any(start <= before and at <= end for start, end in edges))
    assert at == len(text.encode())
    return ids, mask
