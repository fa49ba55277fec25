"""A tokenizer that is handed on reads a text as training did, after it was saved and read again by its name alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer

from flatshift.finetune.data.encoding import SpecialTokens, encode
from flatshift.finetune.data.post_processor import set_post_processor
from flatshift.finetune.data.rows import Row
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, MaskedLM, Seq2Seq, Task
from tests.support.data_models import bert_tokenizer, byte_tokenizer


def gpt2() -> Any:
    """Of a class that builds its own backend, with a byte-level post-processor and `add_bos_token` written out."""
    plain = byte_tokenizer()
    vocabulary = dict(sorted(plain.get_vocab().items(), key=lambda pair: pair[1]))
    merges: list[Any] = []
    tokenizer = GPT2Tokenizer(
        vocab=vocabulary, merges=merges, unk_token="<eos>", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.init_kwargs["add_bos_token"] = False
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def begins() -> Any:
    """As Llama 3's: the template puts the beginning of sequence, and the byte level stays beside it."""
    tokenizer = byte_tokenizer()
    template = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 1)])
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


KINDS = {
    "bare": byte_tokenizer,
    "no-bos": lambda: byte_tokenizer(bos=False),
    "gpt2": gpt2,
    "llama3": begins,
    "bert": bert_tokenizer,
    "decoder": lambda: open_backbone("flatshift-5m").own_tokenizer(),
    "encoder": lambda: open_backbone("flatshift-encoder-3m").own_tokenizer(),
    "t5": lambda: open_backbone("flatshift-t5-3m").own_tokenizer(),
}
TEXTS = ("how do I reset my card", " The cat", "9 <eos> Ü\n")
CASES = [
    *[(kind, task) for kind in KINDS for task in (Classify(labels=("x", "y")),)],
    *[(kind, LanguageModel()) for kind in ("bare", "no-bos", "gpt2", "llama3", "decoder", "t5")],
    ("bare", Completion(prompt="Q: {text}")),
    ("encoder", MaskedLM()),
    ("t5", Seq2Seq(target="{label}")),
]


@pytest.mark.parametrize(("kind", "task"), CASES, ids=[f"{kind}-{task.kind}" for kind, task in CASES])
def test_what_is_saved_reads_as_training_did(kind: str, task: Task, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.save_pretrained(tmp_path / "before")
    own = AutoTokenizer.from_pretrained(tmp_path / "before")
    rows = [Row({"text": text, "label": "x"}, str(i), f"f:{i}") for i, text in enumerate(TEXTS)]
    rows += [Row({**row.values, "text2": "and a second"}, f"p{i}", f"f:{i}") for i, row in enumerate(rows)]
    start = 0 if task.traits.encoder_decoder else None
    found = encode(rows, task=task, tokenizer=own, max_length=20, decoder_start=start).examples
    task.input_format.prepare_tokenizer(tokenizer)
    tokenizer.save_pretrained(tmp_path / "after")
    saved = AutoTokenizer.from_pretrained(tmp_path / "after")
    assert len(found) == 6
    for row, example in zip(rows, found, strict=True):
        if len(example.input_ids) < 20 or task.traits.is_sequence_level:
            assert task.input_format.matches_saved(saved, row, example, 20), (
                row.values,
                saved(row.values["text"])["input_ids"],
            )
    assert saved.decode(saved("a b")["input_ids"], skip_special_tokens=True) == own.decode(
        own("a b")["input_ids"], skip_special_tokens=True
    )


def test_one_that_reads_so_by_itself_is_left_alone(tmp_path: Path) -> None:
    tokenizer = begins()
    before = tokenizer.backend_tokenizer.to_str()
    LanguageModel().input_format.prepare_tokenizer(tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_tokens_with_the_signs_of_a_template_and_offsets(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<a:b $>"})
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    specials = SpecialTokens.of(tokenizer)
    set_post_processor(tokenizer, specials, pairs=True)
    read = tokenizer("x y", return_offsets_mapping=True)
    assert read["input_ids"][0] == tokenizer.bos_token_id == specials.prefix[0]
    assert read["offset_mapping"][-1] == (2, 3), "blanks are trimmed from offsets as before"


def test_the_fault_that_this_mends() -> None:
    """The shipped decoder's own tokenizer, called as everybody calls one, leaves out what training put first."""
    own = open_backbone("flatshift-5m").own_tokenizer()
    (example,) = encode(
        [Row({"text": "a card", "label": "x"}, "0", "f:1")], task=Classify(labels=("x",)), tokenizer=own, max_length=9
    ).examples
    assert example.input_ids == [own.bos_token_id, *own("a card")["input_ids"]]


def test_sentencepiece_classes_that_build_their_own_template(tmp_path: Path) -> None:
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b"])}
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")], pad_token="</s>")
    task = Classify(labels=("x", "y"))
    tokenizer.save_pretrained(tmp_path / "before")
    own = AutoTokenizer.from_pretrained(tmp_path / "before")
    row = Row({"text": "a b", "label": "x"}, "0", "f:1")
    (example,) = encode([row], task=task, tokenizer=own, max_length=9).examples
    task.input_format.prepare_tokenizer(own)
    own.save_pretrained(tmp_path / "after")
    assert task.input_format.matches_saved(AutoTokenizer.from_pretrained(tmp_path / "after"), row, example, 9)
