"""Settings on two ranks through the command: each gives the losses of one process, or is refused in a true sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from flatshift.cli import run
from tests.support import warm_commands
from tests.support.commands import flags
from tests.support.data_models import byte_tokenizer, write_jsonl

IDS = {"vocab_size": 352, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
BERT = {**SIZES, "max_position_embeddings": 64, "hidden_dropout_prob": 0.1}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16, "sliding_window": 8}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "four blocks": (tf.LlamaForCausalLM, tf.LlamaConfig, {**SIZES, "num_hidden_layers": 4}),
    "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, {**SIZES, **HEADS, **CAPS}),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "bert": (tf.BertForMaskedLM, tf.BertConfig, BERT),
    "roberta": (tf.RobertaForMaskedLM, tf.RobertaConfig, BERT | {"pad_token_id": 0}),
    "t5": (tf.T5ForConditionalGeneration, tf.T5Config, T5),
}
SMALL: dict[str, Any] = {
    **{"train.steps": 3, "train.batch_size": 4, "train.precision": "fp32", "train.device": "cpu"},
    **{"train.threads": 1, "train.max_length": 48, "train.max_cut": 1, "train.eval_every": 3, "optimizer.lr": 1e-3},
    **{"optimizer.eps": 1e-6, "eval.bootstrap": 10, "eval.cold": 0, "eval.train_limit": 0, "data.train.limit": "null"},
    **{"data.test.files": "[]", "data.checks.copies": "warn", "regularizer.kind": "plain", "adapter.dropout": 0.1},
}
ROWS = [
    {
        "text": "the cat sat on the mat " * (1 + i % 3),
        "label": "ab"[i % 2],
        "prompt": f"{i} cats",
        "response": "sat " * 5,
    }
    for i in range(12)
]  # of several lengths, so that ranks pad to different ones


@dataclass(frozen=True)
class Case:
    """A recipe on a backbone with settings, and the mesh that is to change nothing."""

    model: str
    settings: dict[str, Any]
    mesh: dict[str, Any]
    recipe: str = "language-model"


TP, PP, CP = {"mesh.tp": 2}, {"mesh.pp": 2}, {"mesh.cp": 2}
TOKENS = TP | {"mesh.sequence_parallel": "true"}
MASKED = {"task.kind": "masked-lm"}
SMOOTH = {"task.label_smoothing": 0.1, "task.score": "perplexity"}
CASES = {
    "neftune, dp": Case(
        "llama", {"regularizer.kind": "neftune", "regularizer.alpha": 15, "task.pack": "false"}, {"mesh.dp": 2}
    ),
    "dora, tp": Case("llama", {"adapter.dora": "true"}, TP),
    "masked, tp, tokens": Case("bert", MASKED, TOKENS),
    "smoothing, tp": Case("t5", SMOOTH, TP, "seq2seq"),
    "caps, cp": Case("gemma2", {}, CP),
    "dft, tp": Case("llama", {"task.dft": "true"}, TP),
    "riemannian, dp": Case("llama", {"optimizer.kind": "riemannian"}, {"mesh.dp": 2}),
    "lora-muon, dp": Case("llama", {"optimizer.kind": "lora-muon"}, {"mesh.dp": 2}),
}
MORE = {
    "freed stages, pp × dp": Case("llama", {}, PP | {"mesh.dp": 2, "mesh.reshard": "true"}),
    **{
        f"{schedule}, pp": Case("four blocks", {}, PP | {"mesh.schedule": schedule} | own)
        for schedule, own in {
            "gpipe": {},
            "1f1b": {"mesh.microbatches": 4},
            "zero-bubble": {},
            "zbv": {},
            "interleaved": {"mesh.virtual": 2, "mesh.microbatches": 4},
        }.items()
    },
    **{f"zero {stage}, dp": Case("llama", {}, {"mesh.dp": 2, "mesh.zero": stage}) for stage in (1, 2)},
    "kept whole, dp": Case("llama", {}, {"mesh.dp": 2, "mesh.adapters": "replicate", "mesh.reshard": "false"}),
    "dft, pp": Case("llama", {"task.dft": "true"}, PP),
    "dft, cp": Case("gemma2", {"task.dft": "true"}, CP),
    "dft, dp": Case("gpt2", {"task.dft": "true"}, {"mesh.dp": 2}),
    "lora-muon, dp of whole adapters": Case(
        "llama", {"optimizer.kind": "lora-muon"}, {"mesh.dp": 2, "mesh.adapters": "replicate"}
    ),
    "lora-muon, pp": Case("gpt2", {"optimizer.kind": "lora-muon", "adapter.dora": "true"}, PP),
    "riemannian, cp": Case("llama", {"optimizer.kind": "riemannian"}, CP),
    "dora, pp": Case("gpt2", {"adapter.dora": "true"}, PP),
    "dora, tp, tokens": Case("gpt2", {"adapter.dora": "true"}, TOKENS),
    "masked, pp": Case("roberta", MASKED, PP),
    "masked, dp": Case("bert", MASKED, {"mesh.dp": 2}),
    "smoothing, pp": Case("t5", SMOOTH, PP, "seq2seq"),
    "smoothing, dp": Case("t5", SMOOTH, {"mesh.dp": 2}, "seq2seq"),
    "classes, tp, tokens": Case("bert", {}, TOKENS, "classify"),
    "classes of a decoder, tp, tokens": Case("llama", {}, TOKENS, "classify"),
    "tied, cp": Case("gpt2", {}, CP),
    **{
        f"compiled, {axis}": Case("llama", {"train.compile": "true", "adapter.dropout": 0}, mesh)
        for axis, mesh in {"tp": TP, "tokens": TOKENS, "pp": PP, "cp": CP}.items()
    },
}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    home = tmp_path_factory.mktemp("backbones")

    def make(kind: str) -> str:
        if not (home / kind).is_dir():
            model, config, own = MODELS[kind]
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                model(config(**{**IDS, **own})).save_pretrained(home / kind)
            tokenizer = byte_tokenizer()
            tokenizer.add_special_tokens({"mask_token": "<mask>"})
            tokenizer.save_pretrained(home / kind)
        return str(home / kind)

    return make


def losses(out: Path) -> dict[tuple[str, int], float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {(line["split"], line["step"]): line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize(
    "case", [*CASES.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in MORE.values())],
    ids=[*CASES, *MORE],
)  # fmt: skip
def test_two_ranks_are_one_process(case: Case, backbone: Callable[[str], str], tmp_path: Path) -> None:
    rows = str(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    files = {"backbone": backbone(case.model), "data.train.files": rows, "data.dev.files": rows}
    words = ["train", case.recipe, *flags(SMALL | files | case.settings)]
    assert run([*words, "--out", str(tmp_path / "one")]) == 0
    warm_commands.flatshift(*words, *flags(case.mesh), "--out", str(tmp_path / "mesh"))
    one, mesh = losses(tmp_path / "one"), losses(tmp_path / "mesh")
    assert len(one) >= 4 and one.keys() == mesh.keys()
    assert max(abs(mesh[key] - one[key]) for key in one) <= 1e-5, (one, mesh)
