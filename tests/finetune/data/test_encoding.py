"""What the model reads and what it is judged on, token by token, against spelled-out references."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from flatshift.finetune.data.encoding import IGNORE, encode
from flatshift.finetune.data.labels import sort_labels
from flatshift.finetune.data.template import Template, fit_completion
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, Seq2Seq
from tests.support.data_models import bert_tokenizer, byte_tokenizer, row, text_rows

TOKENIZER = byte_tokenizer()
PAD, BOS, EOS = 0, 1, 2


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def one(task, r, max_length=64, tokenizer=TOKENIZER, **options):
    encoded = encode([r], task=task, tokenizer=tokenizer, max_length=max_length, **options)
    return encoded.examples[0], encoded


def test_language_model_supervises_all_but_the_first():
    example, encoded = one(LanguageModel(), row(text="the cat größe"))
    assert example.input_ids == [BOS, *ids("the cat größe"), EOS]
    assert example.labels == [IGNORE, *ids("the cat größe"), EOS]
    assert example.bytes == len("the cat größe".encode())
    assert (encoded.truncated, example.id, example.where) == (0, "0-0", "rows.jsonl:1")


def test_without_a_bos_the_first_token_has_no_loss_and_no_bytes():
    example, _ = one(LanguageModel(), row(text="日本語 cat"), tokenizer=byte_tokenizer(bos=False))
    assert example.input_ids == [*ids("日本語 cat"), EOS] and example.labels[0] == IGNORE
    first = TOKENIZER("日本語 cat", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][1]
    assert example.bytes == len("日本語 cat"[first[0] :].encode())


def test_truncation_is_counted_and_bytes_follow_it():
    text = "über naïve the cat sat on the mat"
    example, encoded = one(LanguageModel(), row(text=text), max_length=9)
    assert example.input_ids == [BOS, *ids(text)[:8]] and encoded.truncated == 1
    end = TOKENIZER(text, return_offsets_mapping=True)["offset_mapping"][7][1]
    assert example.bytes == len(text[:end].encode()) < len(text.encode())


def test_completion_supervises_the_answer_and_its_end():
    task = Completion(prompt="Q: {text}\n", completion=" {label}{{}}")
    example, _ = one(task, row(text="the cat", label="good"))
    prompt, answer = [BOS, *ids("Q: the cat\n")], [*ids(" good{}"), EOS]
    assert example.input_ids == prompt + answer
    assert example.labels == [IGNORE] * len(prompt) + answer
    assert example.bytes == len(" good{}")
    assert example.choices is None and example.answer is None


def test_completion_truncation_keeps_the_answer():
    task = Completion(prompt="{text}", completion=" {label}")
    answer = [*ids(" good"), EOS]
    text = "the cat sat on the mat and the dog"
    example, encoded = one(task, row(text=text, label="good"), max_length=10)
    assert example.input_ids == [BOS, *ids(text)[-(9 - len(answer)) :], *answer]
    assert encoded.truncated == 1
    long = "good bad neutral positive negative label text"
    example, encoded = one(task, row(text=text, label=long), max_length=8)
    assert example.input_ids == [BOS, *ids(" " + long)[:7]] and encoded.truncated == 1
    assert example.bytes < len(long)


@pytest.mark.parametrize("prefix", [[], [1]])
@pytest.mark.parametrize("prompt", range(0, 9, 2))
@pytest.mark.parametrize("answer", range(1, 9))
@pytest.mark.parametrize("reserve", [0, 3])
def test_fit_completion_invariants(prefix, prompt, answer, reserve):
    p, a = list(range(100, 100 + prompt)), list(range(200, 200 + answer))
    context, kept, cut = fit_completion(prefix, p, a, 6, reserve=reserve)
    assert len(context) + len(kept) <= 6
    assert kept == a[: len(kept)] and context[: len(prefix)] == prefix
    tail = context[len(prefix) :]
    assert tail == p[len(p) - len(tail) :]
    assert cut == (len(tail) < prompt or len(kept) < answer)
    assert context or not p  # an answer always follows something if there is something
    if len(kept) < answer:
        assert len(tail) <= (0 if prefix else 1)  # the prompt goes first


def test_a_tokenizer_without_a_token_for_the_probe():
    """Of bases alone: `a` has no token."""
    letters = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "C": 2, "G": 3}, []))
    special = [("<s>", 0), ("</s>", 1)]
    letters.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=special
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    rows = [row(0, text="CG", label="x"), row(1, text="CG", text2="G", label="x")]
    found = encode(rows, task=Classify(labels=("x", "y")), tokenizer=tokenizer, max_length=16).examples
    assert [example.input_ids for example in found] == [[0, 2, 3, 1], [0, 2, 3, 1, 3, 1]]


def test_ranked_completions_carry_their_choices():
    task = Completion(prompt="{text}:", completion=" {label}", score="rank")
    rows = [row(0, text="the cat", label="good"), row(1, text="the dog", label="bad")]
    encoded = encode(rows, task=task, tokenizer=TOKENIZER, max_length=32)
    assert encoded.label_names == ("bad", "good")
    assert [example.gold for example in encoded.examples] == [1, 0]
    assert encoded.examples[0].choices == ((*ids(" bad"), EOS), (*ids(" good"), EOS))
    assert encoded.examples[0].choices is encoded.examples[1].choices
    # All choices see the same prompt, whichever is the row's own.
    names = ("bad", "the cat sat on the mat")
    cut = encode(
        [row(0, text="good " * 20, label="bad")], task=task, tokenizer=TOKENIZER, max_length=20, label_names=names
    )
    (example,) = cut.examples
    longest = max(map(len, example.choices))
    assert example.labels.count(IGNORE) + longest == 20
    with pytest.raises(UserError, match=r"rows\.jsonl:1: label 'goood' .* nearest is 'good'"):
        encode([row(0, text="a", label="goood")], task=task, tokenizer=TOKENIZER, max_length=32, label_names=("good",))
    with pytest.raises(UserError, match=r"rank needs \{label\} in task.completion"):
        encode(rows, task=Completion(completion="x", score="rank"), tokenizer=TOKENIZER, max_length=32)
    with pytest.raises(UserError, match=r"give \{label\} away"):
        encode(rows, task=Completion(prompt="{label}", score="rank"), tokenizer=TOKENIZER, max_length=32)


def test_nothing_to_supervise_is_refused_or_skipped():
    rows = [row(0, text="", label="a"), row(1, text="cat", label="a")]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the text is empty"):
        encode(rows, task=LanguageModel(), tokenizer=TOKENIZER, max_length=16)
    encoded = encode(rows, task=LanguageModel(), tokenizer=TOKENIZER, max_length=16, bad_rows="skip")
    assert [example.id for example in encoded.examples] == ["0-1"]
    assert encoded.skipped == ["rows.jsonl:1: the text is empty"]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the completion is empty"):
        one(Completion(prompt="a", completion="{text}"), rows[0])
    no_bos = byte_tokenizer(bos=False)
    with pytest.raises(UserError, match="the prompt is empty"):
        one(Completion(prompt="{text}", score="generate"), rows[0], tokenizer=no_bos)


QA = {"prompt": "{q}", "completion": " {a}"}


@pytest.mark.parametrize(
    ("task", "bad", "reason"),
    [
        (Classify(labels=("x", "y")), {"text": "a b", "text2": 7, "label": "y"}, "column 'text2' is a int, not text"),
        (Completion(**QA), {"q": ["a"], "a": "c"}, "column 'q' is a list, not a name or a number"),
        (Completion(**QA), {"q": "a", "a": {"b": 1}}, "column 'a' is a dict, not a name or a number"),
        (Completion(**QA), {"q": "\ud800", "a": "c"}, "column 'q' has half of a surrogate pair, which is not text"),
        (Completion(**QA), {"q": "x"}, "no column 'a'; there are 'q'"),
        (Seq2Seq(prompt="{q}", target="{a}"), {"q": "a", "a": ["c"]}, "column 'a' is a list, not a name or a number"),
        (
            Completion(completion=" {label}{n}", score="rank"),
            {"text": "b", "label": "a", "n": [1]},
            "column 'n' is a l",
        ),
    ],
)
def test_columns_that_cannot_be_shown_make_a_bad_row(task, bad, reason):
    good = {"text": "a b", "text2": "c", "label": "x", "q": "a", "a": 2.0, "n": 1}
    rows = [row(0, **good), row(1, **bad), row(2, **good)]
    how = {"task": task, "tokenizer": TOKENIZER, "max_length": 32, "decoder_start": 0}
    with pytest.raises(
        UserError, match=rf"^rows\.jsonl:2: {reason}.*; leave the row out, or set data\.bad_rows: skip$"
    ):
        encode(rows, **how)
    found = encode(rows, bad_rows="skip", **how)
    assert [example.id for example in found.examples] == ["0-0", "0-2"]
    assert len(found.skipped) == 1 and found.skipped[0].startswith(f"rows.jsonl:2: {reason}")


def test_templates():
    filled = Template("{{{a b}}} {n}{flag}", "task.prompt").fill(row(**{"a b": "x", "n": 2.0, "flag": True}))
    assert filled == "{x} 2True"
    for bad in ("{", "}", "{}", "{a!r}", "{a:>3}"):
        with pytest.raises(UserError, match=r"task\.prompt: .* is not a template"):
            Template(bad, "task.prompt")
    with pytest.raises(ValueError, match=r"^no column 'txt'; did you mean 'text'"):
        Template("{txt}", "task.prompt").fill(row(text="a"))
    with pytest.raises(ValueError, match=r"^column 'x' is a list"):
        Template("{x}", "task.prompt").fill(row(x=[1]))
    with pytest.raises(ValueError, match=r"^column 'answer' is a list"):  # the column of the file, not `completion`
        Template("{completion}", "task.completion").fill(replace(row(completion=[1]), form="question and answer"))
    assert Completion(prompt="{a} {b}", completion="{a}{c}").columns() == ("a", "b", "c")
    assert Classify().columns() == ("text", "label")


def test_classes_in_head_order():
    assert sort_labels(["10", "9", "-1", "10"]) == ("-1", "9", "10")
    assert sort_labels(["b", "10", "a"]) == ("10", "a", "b")
    rows = text_rows(20)
    encoded = encode(rows, task=Classify(), tokenizer=TOKENIZER, max_length=32)
    assert encoded.label_names == ("bad", "good", "neutral")
    assert [encoded.label_names[e.labels] for e in encoded.examples] == [r.values["label"] for r in rows]
    task = Classify(labels=("good", "neutral", "bad"))
    assert encode(rows, task=task, tokenizer=TOKENIZER, max_length=32).label_names == ("good", "neutral", "bad")
    with pytest.raises(UserError, match=r"rows\.jsonl:\d+: label 'neutral' is not one of the 2 classes"):
        encode(rows, task=Classify(labels=("good", "bad")), tokenizer=TOKENIZER, max_length=32)
    with pytest.raises(UserError, match=r"rows\.jsonl:1: no column 'label'"):
        encode([row(text="a")], task=Classify(labels=("a", "b")), tokenizer=TOKENIZER, max_length=32)


def test_pairs_without_a_template_are_joined():
    example, _ = one(Classify(), row(text="the cat", text2="the dog", label="a"))
    assert example.input_ids == [BOS, *ids("the cat"), EOS, *ids("the dog")]
    assert example.segments is None


@pytest.mark.parametrize("max_length", [7, 8, 9, 12, 64])
def test_pairs_are_the_tokenizers_own(max_length):
    tokenizer = bert_tokenizer()
    rows = text_rows(60, words=(1, 10))
    others = text_rows(60, seed=1, words=(1, 10))
    for i, (a, b) in enumerate(zip(rows, others, strict=True)):
        if i % 3:
            a.values["text2"] = b.values["text"]
    encoded = encode(rows, task=Classify(), tokenizer=tokenizer, max_length=max_length)
    cut = 0
    for r, example in zip(rows, encoded.examples, strict=True):
        pair = (r.values["text"], r.values["text2"]) if "text2" in r.values else (r.values["text"],)
        theirs = tokenizer(*pair, truncation="longest_first", max_length=max_length)
        assert example.input_ids == theirs["input_ids"]
        assert example.segments == theirs["token_type_ids"]
        cut += len(tokenizer(*pair)["input_ids"]) > max_length
    assert encoded.truncated == cut


def test_a_length_without_room_is_refused():
    with pytest.raises(UserError, match=r"train\.max_length: 3"):
        encode(text_rows(2), task=LanguageModel(), tokenizer=TOKENIZER, max_length=3)


def test_chunks_do_not_show():
    rows = text_rows(2500, words=(1, 3))
    whole = encode(rows, task=LanguageModel(), tokenizer=TOKENIZER, max_length=32)
    assert [e.input_ids for e in whole.examples[1020:1030]] == [
        e.input_ids for e in encode(rows[1020:1030], task=LanguageModel(), tokenizer=TOKENIZER, max_length=32).examples
    ]
