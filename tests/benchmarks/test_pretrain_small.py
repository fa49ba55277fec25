"""The script that makes the small encoder and encoder-decoder: its batches, its resume, and the folders it writes."""

from __future__ import annotations

import dataclasses
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.pretrain.small import (
    ENCODER,
    SENTINELS,
    SEQ2SEQ,
    PretrainingObjective,
    build_model,
    build_tokenizer,
    corrupted_batch,
    evaluate_held_out,
    pretrain,
    train,
    unigram_table,
)
from scripts.pretrain.small_cards import render_card

TINY = {"sequence": 24, "batch": 4, "tokens": 24 * 4 * 6, "save_every": 2}
CONFIGS = {
    "encoder": dataclasses.replace(ENCODER, blocks=(3,), **TINY),
    "seq2seq": dataclasses.replace(SEQ2SEQ, **TINY),
}


def stream_of(tokens: int = 2000) -> np.ndarray:
    return (np.random.default_rng(0).zipf(1.4, size=tokens) % 400 + 3).astype(np.int32)


def test_spans_are_cut_out_and_can_be_put_back() -> None:
    config = dataclasses.replace(SEQ2SEQ, sequence=128)
    stream = np.arange(128 * 6, dtype=np.int32) % 4000 + 3
    batch = corrupted_batch(stream, np.arange(6), config, 4096, "t", 0)
    assert batch["input_ids"].shape == batch["labels"].shape == (6, 64 + 8 + 1)
    for i, (read, written) in enumerate(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)):
        assert read[-1] == written[-1] == 2
        spans: dict[int, list[int]] = {}
        for token in written[:-1]:
            if token >= 4096:
                spans[token] = []
            else:
                spans[max(spans)].append(token)
        assert list(spans) == list(range(4096, 4104)) and all(spans.values())
        whole = [t for token in read[:-1] for t in (spans[token] if token >= 4096 else [token])]
        assert whole == stream[i * 128 : (i + 1) * 128].tolist()


def test_the_tokenizers_keep_the_decoders_and_add_what_is_needed() -> None:
    from transformers import AutoTokenizer

    from flatshift.finetune.assets import backbone_directory

    old = AutoTokenizer.from_pretrained(backbone_directory("flatshift-5m"))
    text = "The river of naïve 日本 words."
    plain = old(text, add_special_tokens=False)["input_ids"]
    encoder, seq2seq = build_tokenizer("encoder"), build_tokenizer("seq2seq")
    a = old("a")["input_ids"]
    assert encoder(text)["input_ids"] == [1, *plain, 2] and encoder("a", "a")["input_ids"] == [1, *a, 2, *a, 2]
    assert encoder.mask_token_id == 4096 == len(encoder) - 1
    assert encoder.model_input_names == ["input_ids", "attention_mask"]
    assert seq2seq(text)["input_ids"] == [*plain, 2]
    assert seq2seq.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_31>"]) == [4096, 4127]
    assert len(seq2seq) == 4096 + SENTINELS
    assert seq2seq.decode(seq2seq("a <extra_id_3> b")["input_ids"], skip_special_tokens=True).split() == ["a", "b"]


def test_the_encoder_is_the_decoder_that_sees_ahead() -> None:
    """With a causal mask, and one text, its hidden states would be the decoder's: compare the first token's."""
    from transformers import AutoModelForCausalLM

    from flatshift.finetune.assets import backbone_directory

    config = dataclasses.replace(ENCODER, blocks=tuple(range(6)))
    encoder = build_model(config, 4097).eval()
    decoder = AutoModelForCausalLM.from_pretrained(backbone_directory("flatshift-5m"), dtype=torch.float32).eval()
    one = torch.tensor([[57]])
    with torch.no_grad():
        assert torch.allclose(encoder(one).logits[..., :4096], decoder(one).logits, atol=1e-4)
        ahead = [encoder(torch.tensor([[57, last]])).logits[0, 0] for last in (90, 91)]
    assert not torch.allclose(*ahead), "a token sees those after it"


@pytest.mark.parametrize("kind", CONFIGS)
def test_training_learns_and_resumes_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    config, stream = CONFIGS[kind], stream_of()
    objective = PretrainingObjective(config, build_tokenizer(kind))
    unigram = unigram_table(stream, 4096)
    before = torch.random.get_rng_state()
    whole = build_model(config, len(build_tokenizer(kind)))
    first = evaluate_held_out(whole, stream, unigram, objective)["nats_per_token"]
    assert train(whole, stream, objective, tmp_path / "whole", log=lambda line: None)[0] == 6
    assert evaluate_held_out(whole, stream, unigram, objective)["nats_per_token"] < first

    cut = build_model(config, len(build_tokenizer(kind)))

    class Killed(Exception):
        pass

    def kill(line: str) -> None:
        if line.startswith("step 4 "):
            raise Killed

    with pytest.raises(Killed):
        train(cut, stream, objective, tmp_path / "cut", log=kill)
    again = build_model(config, len(build_tokenizer(kind)))
    train(again, stream, objective, tmp_path / "cut", log=lambda line: None)
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_folder_it_writes_loads_and_has_a_card(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

    texts = [f"The {i}th house on the street was older than the other {i + 1}, naïve as they were." for i in range(80)]
    for name, part in {"general-train-0": texts[:70], "general-val": texts[70:]}.items():
        with lzma.open(tmp_path / f"{name}.jsonl.xz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"text": text}) + "\n" for text in part)
    out = tmp_path / "small"
    card = pretrain(tmp_path, out, CONFIGS[kind])
    auto = AutoModelForMaskedLM if kind == "encoder" else AutoModelForSeq2SeqLM
    model, tokenizer = auto.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and model.num_parameters() == card["parameters"]
    assert model.config.vocab_size == len(tokenizer)
    assert card == json.loads((out / "card.json").read_text(encoding="utf-8"))
    assert (tokenizer.mask_token == "<mask>") == (kind == "encoder")
    page = render_card(out)
    assert f"{card['parameters']:,}" in page and f"{card['validation']['nats_per_token']:.3f}" in page
    assert not (tmp_path / "small.state").exists()
