"""Backbones that a user brings along, through the command: families that write into what a layer gives, positions that
are fewer than a table has rows, a number for each layer, a package that is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.auto import modeling_auto

from flatshift.cli import run
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.packing_check import check_packing_isolation
from flatshift.finetune.models.families import BOUNDED, COUNTED_FROM_PAD, LEAKS_PACKED
from tests.support.data_models import byte_tokenizer, write_jsonl

TOKENIZER = byte_tokenizer()
TOKENIZER.add_special_tokens({"mask_token": "<mask>"})
IDS = {"vocab_size": 352, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = [
    *("--train.steps", "1", "--train.batch_size", "4", "--train.precision", "fp32", "--train.threads", "1"),
    *("--train.max_length", "24", "--train.max_cut", "1", "--train.eval_every", "0", "--eval.bootstrap", "10"),
    *("--eval.cold", "0", "--eval.train_limit", "0", "--data.dev.files", "[]", "--data.test.files", "[]"),
]
GEMMA3N = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": [48, 64], "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 352, "num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2,
    "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0],
}  # fmt: skip
LED = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "decoder_attention_heads": 2, "decoder_ffn_dim": 48, "attention_window": 8, "decoder_start_token_id": 2,
    "max_encoder_position_embeddings": 48, "max_decoder_position_embeddings": 48,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "deberta": (
        tf.DebertaForMaskedLM,
        tf.DebertaConfig,
        {**SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
    ),
    "led": (tf.LEDForConditionalGeneration, tf.LEDConfig, LED),
    "gemma3n": (tf.Gemma3nForCausalLM, tf.Gemma3nTextConfig, GEMMA3N),
    "bert": (tf.BertForMaskedLM, tf.BertConfig, {**SIZES, "max_position_embeddings": 40}),
    "roberta": (tf.RobertaForMaskedLM, tf.RobertaConfig, {**SIZES, "max_position_embeddings": 40, "pad_token_id": 1}),
    "opt": (
        tf.OPTForCausalLM,
        tf.OPTConfig,
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 40},
    ),
    "nystromformer": (
        tf.NystromformerForMaskedLM,
        tf.NystromformerConfig,
        {**SIZES, "max_position_embeddings": 40, "num_landmarks": 8, "segment_means_seq_len": 40},
    ),
    "mpt": (tf.MptForCausalLM, tf.MptConfig, {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 40}),
    "gptj": (tf.GPTJForCausalLM, tf.GPTJConfig, {"n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 40,
                                                 "rotary_dim": 8}),
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {**SIZES, "num_key_value_heads": 2}),
}  # fmt: skip
ROWS = [{"text": f"the cat {i} sat on the mat " * 9, "label": ("good", "bad")[i % 2]} for i in range(8)]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    home = tmp_path_factory.mktemp("families")

    def make(kind: str) -> Path:
        if not (home / kind).is_dir():
            model, config, own = FAMILIES[kind]
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                model(config(**{**IDS, **own})).save_pretrained(home / kind)
            TOKENIZER.save_pretrained(home / kind)
        return home / kind

    return make


@pytest.fixture
def words(tmp_path: Path) -> Callable[..., list[str]]:
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    return lambda recipe, backbone, *more: [
        *("train", recipe, "--backbone", str(backbone), "--data.train.files", str(rows), "--data.train.limit", "null"),
        *(*SMALL, "--out", str(tmp_path / "run"), *more),
    ]


@pytest.mark.parametrize(
    ("kind", "recipe", "more"),
    [
        ("deberta", "classify", ["--regularizer.kind", "plain"]),
        ("deberta", "classify", ["--regularizer.kind", "ggpo"]),
        ("deberta", "language-model", ["--task.kind", "masked-lm"]),
        ("led", "seq2seq", ["--task.score", "perplexity"]),
        ("gemma3n", "language-model", []),
    ],
)
def test_a_family_trains(family, words, tmp_path: Path, kind: str, recipe: str, more: list[str]) -> None:
    assert run(words(recipe, family(kind), *more)) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line["split"] == "train" and line["step"] == 1 and line["loss"] > 0 for line in steps)


def test_packing_that_nobody_asked_for_gives_way(family, words, tmp_path: Path, capsys) -> None:
    line = "task.pack: false (auto: opt lets packed samples see each other)"
    assert run(words("language-model", family("opt"))) == 0
    assert line in capsys.readouterr().err
    written = (tmp_path / "run" / "recipe.resolved.yaml").read_text()
    assert "  pack: false  # auto: opt lets packed samples see each other" in written
    assert run(["train", "--resume", str(tmp_path / "run"), "--train.steps", "2"]) == 0
    assert line not in capsys.readouterr().err
    assert run([*words("language-model", family("opt"), "--task.pack", "true"), "--out", str(tmp_path / "asked")]) == 2
    assert "lets packed samples see each other" in capsys.readouterr().err and not (tmp_path / "asked").exists()
    assert run([*words("language-model", family("llama")), "--out", str(tmp_path / "llama")]) == 0
    assert "  pack: true" in (tmp_path / "llama" / "recipe.resolved.yaml").read_text()


LEAKING = {
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 2},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 40},
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2},
    "biogpt": {**SIZES, "num_hidden_layers": 1},
    "openai-gpt": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 40},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("kind", [*LEAKING, "llama"])
def test_families_that_leak_are_measured_to(kind: str) -> None:
    own = LEAKING.get(kind, {**SIZES, "num_key_value_heads": 2})
    config = tf.AutoConfig.for_model(kind, **{**IDS, **own, "use_cache": False})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config).eval()
    if kind not in LEAKS_PACKED:
        check_packing_isolation(model)
    else:
        with pytest.raises(UserError, match=r"lets packed samples see each other|takes no position_ids"):
            check_packing_isolation(model)


@pytest.mark.parametrize(
    ("kind", "usable"),
    [("bert", 40), ("roberta", 38), ("opt", 40), ("nystromformer", 40), ("mpt", 40), ("gptj", 40)],
)
def test_positions_that_can_be_used(family, words, tmp_path: Path, capsys, kind: str, usable: int) -> None:
    """RoBERTa has a table of 40 rows, of which two are before the first token's."""
    backbone = family(kind)
    assert run(words("classify", backbone, "--train.max_length", str(usable + 1))) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"train.max_length: {usable + 1} is above this backbone's {usable} positions" in told
    assert not (tmp_path / "run").exists()
    assert run(words("classify", backbone, "--train.max_length", str(usable))) == 0
    plan = ["plan", "classify", "--backbone", str(backbone), "--gpus", "1xH100-80", "--train.max_cut", "1"]
    assert run([*plan, "--train.max_length", str(usable + 1)]) == 2
    assert f"more than the {usable} positions" in capsys.readouterr().err
    assert run([*plan, "--train.max_length", str(usable)]) == 0


def test_the_tables_of_positions_know_every_architecture() -> None:
    """By transformers' own source: who counts from the pad token, in a table of `max_position_embeddings` rows."""
    names = {
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }  # fmt: skip
    home = Path(tf.__file__).parent / "models"
    counted, computed = set(), set()
    for name in names:
        for file in (home / name.replace("-", "_")).glob("modeling_*.py"):
            source = file.read_text(encoding="utf-8")
            if "create_position_ids_from_input_ids" in source and "max_position_embeddings + " not in source:
                counted.add(name)
            if re.search(r"def (create_sinusoidal_positions|positional_encoding|build_mpt_alibi)", source):
                computed.add(name)
    assert counted >= {"roberta", "xlm-roberta", "camembert"} and counted <= COUNTED_FROM_PAD
    assert computed == BOUNDED


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "quanto", "weights": "int8"}, "optimum"),
        ({"quant_method": "eetq", "weights": "int8"}, "kernels"),
    ],
)
def test_a_package_that_is_missing_is_one_sentence(
    family, words, tmp_path: Path, monkeypatch, capsys, settings: dict[str, Any], package: str
) -> None:
    """In `train` and in the embedder of `select`: transformers raises ImportError."""
    monkeypatch.setitem(__import__("sys").modules, package, None)
    backbone = tmp_path / "quantised"
    backbone.mkdir()
    for file in family("llama").iterdir():
        (backbone / file.name).write_bytes(file.read_bytes())
    config = json.loads((backbone / "config.json").read_text())
    (backbone / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    rows = str(write_jsonl(tmp_path / "pool.jsonl", ROWS))
    select = ["select", "--pool", rows, "--target", rows, "--budget", "2", "--method", "gotd"]
    for command in (
        words("language-model", backbone),
        [*select, "--embedder", str(backbone), "--out", str(tmp_path / "chosen")],
    ):
        assert run(command) == 2
        told = capsys.readouterr().err.strip().splitlines()[-1]
        assert "cannot be loaded" in told and package in told and len(told) <= 320
    assert not (tmp_path / "chosen").exists()
