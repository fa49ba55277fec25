"""Supervised tokens of public chat templates, beside references marked by hand; no mask is empty in silence."""

from __future__ import annotations

import pytest

from finetune.data.encoding import IGNORE, encode
from finetune.tasks import Chat
from tests.chat_models import (
    CONVERSATIONS,
    DATE,
    REFERENCED,
    chat_tokenizer,
    conversation,
    reference_mask,
    references,
    token_bytes,
    unmarked,
)
from tests.data_models import row

CASES = [(name, told) for name in REFERENCED for told in references(name) if told != "end"]


def encoded(template, told, **settings):
    task = Chat(date=DATE, **settings)
    return encode(
        [row(0, **conversation(told, template))], task=task, tokenizer=chat_tokenizer(template), max_length=8192
    )


def test_there_are_enough_of_them():
    assert len(REFERENCED) >= 10
    assert all(len(references(name)) > 5 for name in REFERENCED)  # one of them is the end of the file


@pytest.mark.parametrize(("template", "told"), CASES)
def test_supervised_tokens_are_those_marked_by_hand(template, told):
    tokenizer = chat_tokenizer(template)
    found = encoded(template, told)
    wanted = references(template)[told]
    assert len(found.examples) == len(wanted)
    for example, marked in zip(found.examples, wanted, strict=True):
        ids, supervised = reference_mask(tokenizer, marked)
        assert tokenizer.decode(example.input_ids) == unmarked(marked)[0]
        assert example.input_ids == ids
        assert [label != IGNORE for label in example.labels] == supervised
        assert all(label in (IGNORE, token) for label, token in zip(example.labels, ids, strict=True))
        special = set(tokenizer.all_special_ids)
        text = [token for token, on in zip(ids, supervised, strict=True) if on and token not in special]
        assert example.bytes == sum(token_bytes(tokenizer, token) for token in text)


@pytest.mark.parametrize("template", REFERENCED)
def test_the_last_turn_alone(template):
    """`turns: last` is the sample with the last turn, and of its answers the last."""
    tokenizer = chat_tokenizer(template)
    for told in references(template):
        if told == "end":
            continue
        (example,) = encoded(template, told, turns="last").examples
        text, spans = unmarked(references(template)[told][0])
        kept = tokenizer.decode([label for label in example.labels if label != IGNORE])
        assert tokenizer.decode(example.input_ids) == text
        assert kept == text[slice(*spans[-1])]


def test_transformers_own_mask_is_empty_without_tags():
    """What the references are for: asked for a mask, these templates give none, and say so in a log line at most."""
    for template in REFERENCED:
        tokenizer = chat_tokenizer(template)
        told = conversation("single", template)
        theirs = tokenizer.apply_chat_template(told["messages"], return_dict=True, return_assistant_tokens_mask=True)
        assert not any(theirs["assistant_masks"])


@pytest.mark.parametrize("template", ["qwen2_5_training", "qwen3_training", "phi3_training"])
@pytest.mark.parametrize("told", [name for name in CONVERSATIONS if name not in ("tools", "thoughts")])
def test_a_template_with_tags_decides_itself(template, told):
    tokenizer = chat_tokenizer(template)
    messages = conversation(told, template)["messages"]
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    (example,) = encoded(template, told).examples
    assert example.input_ids == theirs["input_ids"]
    assert [int(label != IGNORE) for label in example.labels] == theirs["assistant_masks"]
    (last,) = encoded(template, told, turns="last").examples
    end = max(i for i, on in enumerate(theirs["assistant_masks"]) if not on)  # the mask's last run is the last turn
    assert [i for i, label in enumerate(last.labels) if label != IGNORE] == list(range(end + 1, len(last.labels)))
