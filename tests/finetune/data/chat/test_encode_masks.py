"""Supervised tokens of public chat templates, beside references marked by hand; no mask is empty in silence."""

from __future__ import annotations

import pytest

from flatshift.finetune.data.encoding import IGNORE, encode
from flatshift.finetune.tasks import Chat
from tests.support.chat_models import (
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
from tests.support.data_models import row

CASES = [(name, told) for name in REFERENCED for told in references(name) if told != "end"]


def encoded(template, told, **settings):
    task = Chat(date=DATE, **{"empty_thoughts": True, **settings})  # as the references mark them
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


@pytest.mark.parametrize("template", ["qwen3", "qwen3_6", "qwen3_training"])
def test_thoughts_without_a_word_are_not_supervised_unless_asked(template):
    """The same samples; of each answer only what stands behind them, and that is where judging begins."""
    tokenizer = chat_tokenizer(template)
    whole = encoded(template, "multi", score="generate")
    found = encoded(template, "multi", score="generate", empty_thoughts=False)
    said = []
    for one, other in zip(whole.examples, found.examples, strict=True):
        assert one.input_ids == other.input_ids
        before, after = (tokenizer.decode([t for t in e.labels if t != IGNORE]) for e in (one, other))
        assert "think>" in before and "think>" not in after
        said = [after, *said]
    assert "".join(said).replace("\n", "") == "Hello! How can I help?<|im_end|>Blue.<|im_end|>Red.<|im_end|>"
    assert found.examples[0].answer.strip() == "Red."
    assert tokenizer.decode(found.examples[0].prompt).endswith("<think>\n\n</think>\n\n")
    (note,) = [note for note in found.notes if "thoughts without a word" in note]
    assert note.endswith("; task.template_arguments: {enable_thinking: false} asks without thoughts too")
    assert not any("thoughts without" in note for note in whole.notes)
    thinking = {
        "messages": [
            *CONVERSATIONS["single"]["messages"][:1],
            {"role": "assistant", "content": "4", "thinking": "2 + 2"},
        ]
    }
    kept = encode([row(0, **thinking)], task=Chat(), tokenizer=tokenizer, max_length=512)
    assert "2 + 2" in tokenizer.decode([label for label in kept.examples[0].labels if label != IGNORE])


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
