"""Conversations to examples: cuts counted and refused past a share, the panel, packing, generated answers."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedConfig

from flatshift.finetune.config import Evaluate
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.panel import format_first_batch
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.answers import generate_answers
from flatshift.finetune.evaluate.evaluator import evaluate
from flatshift.finetune.evaluate.perplexity import document_nats
from flatshift.finetune.tasks import Chat
from tests.support.chat_models import CONVERSATIONS, chat_tokenizer
from tests.support.data_models import byte_tokenizer, row, tiny_model

TOKENIZER = byte_tokenizer()
PLAIN = Chat(template="plain")


def rows(*lengths):
    """Conversations of one answer with so many tokens of text."""
    turns = [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "é" * ((length + 1) // 2)}]
        for length in lengths
    ]
    return [row(i, messages=messages) for i, messages in enumerate(turns)]


def encoded(found, *, task=PLAIN, max_length=64, **more):
    return encode(found, task=task, tokenizer=TOKENIZER, max_length=max_length, **more)


def supervised(example):
    return [label for label in example.labels if label != -100]


def test_the_plain_template():
    whole = encoded([row(0, **CONVERSATIONS["system"])], max_length=256).examples[0]
    assert TOKENIZER.decode(whole.input_ids) == (
        "<bos>Be brief.\n\nUser: Who wrote Faust?\nAssistant: Goethe.<eos>\nUser: When?\nAssistant: 1808.<eos>\n"
    )
    assert TOKENIZER.decode(supervised(whole)) == " Goethe.<eos> 1808.<eos>"
    assert whole.bytes == len(" Goethe. 1808.") and whole.answer is None
    with pytest.raises(UserError, match=r"has system, user and assistant turns, and no tools"):
        encoded([row(0, **CONVERSATIONS["tools"])])


def test_long_samples_lose_their_right_and_are_counted():
    header = len(TOKENIZER("<bos>User: Hi\nAssistant:")["input_ids"])
    found = encoded(rows(10, 40, 10), task=Chat(template="plain", max_truncated=0.4), max_length=header + 20)
    short, cut, _ = found.examples
    assert supervised(short)[-1] == TOKENIZER.eos_token_id != supervised(cut)[-1]
    assert len(cut.input_ids) == header + 20 == header + len(supervised(cut))
    assert found.truncated == 1
    total = sum(len(example.input_ids) for example in found.examples)
    assert found.notes[0] == (
        f"3 conversations: {sum(len(supervised(e)) for e in found.examples)} of {total} tokens supervised, "
        "1 truncated answers, 0 without a target token (left out), 0 bad rows (left out)"
    )
    # Only what follows the last answer is cut: nothing is lost.
    whole = len(encoded(rows(10), max_length=256).examples[0].input_ids)
    assert encoded(rows(10), max_length=whole - 1).notes[0].split(", ")[1] == "0 truncated answers"


def test_losses_past_their_share_are_refused_with_the_length_that_would_do():
    header = len(TOKENIZER("<bos>User: Hi\nAssistant:")["input_ids"])
    many = rows(*[10] * 9, 40)
    enough = header + 1 + 40 + 1  # a space, the text, the end
    assert len(encoded(many, max_length=header + 20).examples) == 10
    with pytest.raises(
        UserError,
        match=rf"^rows.jsonl: 1 of 10 rows have an answer that is cut at train.max_length {header + 20}, more than "
        rf"task.max_truncated \(0.05\) allows; --train.max_length {enough} would hold 99 % of them whole$",
    ):
        encoded(many, task=Chat(template="plain", max_truncated=0.05), max_length=header + 20)
    long = [*many[:9], row(9, messages=[{"role": "user", "content": "é" * 40}, {"role": "assistant", "content": "x"}])]
    with pytest.raises(UserError, match=r"1 of 10 rows keep no target token .* task.max_unsupervised \(0.01\)"):
        encoded(long, max_length=header + 20)
    found = encoded(long, task=Chat(template="plain", max_unsupervised=0.1), max_length=header + 20)
    assert len(found.examples) == 9 and "1 without a target token (left out)" in found.notes[0]


def test_samples_of_one_row_are_named_apart_and_one_is_to_be_generated():
    tokenizer = chat_tokenizer("qwen3")
    task = Chat(score="generate", empty_thoughts=True)
    found = encode([row(0, **CONVERSATIONS["multi"])], task=task, tokenizer=tokenizer, max_length=512)
    assert [example.id for example in found.examples] == ["0-0", "0-0#1", "0-0#2"]
    last, *earlier = found.examples
    assert tokenizer.decode(last.prompt).endswith("Another.<|im_end|>\n<|im_start|>assistant\n")
    assert last.answer == "<think>\n\n</think>\n\nRed." and last.stop == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert all(example.answer is None for example in earlier)


def test_an_end_of_turn_in_ordinary_tokens_cannot_be_generated(tmp_path):
    path = tmp_path / "words.jinja"
    path.write_text("{% for m in messages %}{{ m.content }} END {% endfor %}")
    found = encoded(rows(4), task=Chat(template=str(path)))
    assert any("is no special token of this tokenizer" in note for note in found.notes)
    with pytest.raises(UserError, match=r"task.score: generate needs an end of turn that is a token of its own"):
        encoded(rows(4), task=Chat(template=str(path), score="generate"))


def test_the_panel_marks_every_answer():
    found = encoded([row(0, **CONVERSATIONS["system"]), row(1, **CONVERSATIONS["single"])], max_length=128).examples
    batches = TrainingDataLoader(found, task=PLAIN, batch_size=1, seed=0, max_length=128, pad_id=0)
    assert batches.packed
    panel = format_first_batch(batches.at(0)[0], TOKENIZER, PLAIN)
    assert "Who wrote Faust?\n     Assistant:⟦ Goethe.<eos>⟧\n     User: When?\n     Assistant:⟦ 1808.<eos>⟧" in panel
    assert "Assistant:⟦ 4<eos>⟧" in panel
    total = sum(len(supervised(example)) for example in found)
    assert f"{total} tokens supervised" in panel


@torch.no_grad()
def test_surprise_is_of_the_supervised_tokens_alone():
    model = tiny_model("llama", len(TOKENIZER))
    found = encoded([row(0, **CONVERSATIONS["system"]), row(1, **CONVERSATIONS["single"])], max_length=128).examples
    nats, tokens = document_nats(model, found, EvalBatching(2, 0), task=PLAIN)
    for i, example in enumerate(found):
        logits = model(input_ids=torch.tensor([example.input_ids])).logits[0, :-1].double().log_softmax(-1)
        places = [(at - 1, label) for at, label in enumerate(example.labels) if label != -100]
        assert nats[i] == pytest.approx(-sum(logits[at, label].item() for at, label in places), rel=1e-5)
        assert tokens[i] == len(places)
    (micro,) = EvalBatching(2, 0).batches(found, PLAIN)
    assert micro.supervised == sum(map(int, tokens))


def test_the_last_turn_is_generated_from_what_precedes_it_until_its_end():
    task = Chat(template="plain", score="generate", max_new_tokens=5)
    model = tiny_model("llama", len(TOKENIZER))
    names = ("single", "system", "multi", "echo")
    found = encoded([row(i, **CONVERSATIONS[name]) for i, name in enumerate(names)], task=task, max_length=256).examples
    answers = generate_answers(model, TOKENIZER, found, EvalBatching.of(TOKENIZER, batch_size=3), max_new_tokens=5)
    for name, example, answer in zip(names, found, answers, strict=True):
        turns = CONVERSATIONS[name]["messages"]
        assert example.answer == " " + turns[-1]["content"]
        asked = TOKENIZER.decode(example.prompt)
        assert asked.endswith(f"User: {turns[-2]['content']}\nAssistant:")
        said = list(example.prompt)
        while len(said) < len(example.prompt) + 5 and said[-1] != TOKENIZER.eos_token_id:
            with torch.no_grad():
                said.append(int(model(input_ids=torch.tensor([said])).logits[0, -1].argmax()))
        assert answer == TOKENIZER.decode(said[len(example.prompt) :], skip_special_tokens=True).strip()
    figures = evaluate(model, TOKENIZER, found, task=task, config=Evaluate(bootstrap=10))
    assert figures.keys() == {"loss", "perplexity", "bits_per_byte", "exact_match"} and figures["exact_match"]["n"] == 4


def test_generation_stops_at_the_end_of_turn_too():
    """Phi-3 ends a turn with another token than a text: the answer is over with either."""
    tokenizer = chat_tokenizer("phi3")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    task = Chat(score="generate", max_new_tokens=8)
    (example,) = encode([row(0, **CONVERSATIONS["single"])], task=task, tokenizer=tokenizer, max_length=64).examples
    assert example.stop == end != tokenizer.eos_token_id and example.answer == "4"
    four = tokenizer("4")["input_ids"]

    class Model:
        config = PreTrainedConfig()

        def generate(self, *, input_ids, generation_config, **_):
            self.ends = generation_config.eos_token_id
            return torch.cat([input_ids, torch.tensor([[*four, end]])], dim=1)

    model = Model()
    (answer,) = generate_answers(
        model, tokenizer, [example], EvalBatching.of(tokenizer, batch_size=1), max_new_tokens=8
    )
    assert model.ends == [tokenizer.eos_token_id, end] and answer == "4"
