"""Mixtures of experts by the public command: shared experts, dense blocks and an adapter on every expert train on each
axis as in one process, and the load of the experts is in metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from flatshift.cli import run
from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.assets import backbone_directory, list_backbones
from flatshift.finetune.config import Adapter
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.experts import ExpertLoadMeter, check_expert_parallel
from flatshift.finetune.tasks import LanguageModel
from tests.support import warm_commands
from tests.support.data_models import byte_tokenizer, write_jsonl

TOKENIZER = byte_tokenizer()
SIZES = {
    **{"vocab_size": 352, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1},
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
}
DENSE_FIRST = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [0]},
    "glm4_moe": DENSE_FIRST,
    "qwen3_next": {
        **{"num_experts": 4, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "llama4_text": {
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 3],
    },
}


def save_mixture(kind: str, folder: Path) -> Path:
    """A random backbone of a model type, and its tokenizer."""
    configuration = tf.CONFIG_MAPPING[kind]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = tf.MODEL_FOR_CAUSAL_LM_MAPPING[configuration](configuration(**{**SIZES, **MODELS[kind]}))
        with torch.no_grad():
            for parameter in model.parameters():  # routers that do not start with ties, norms that are not 1
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def write_recipe(folder: Path, backbone: Path, rate: float) -> Path:
    texts = [f"{number} times {number % 7} is {number * (number % 7)}" + "!" * (number % 5) for number in range(60)]
    rows = write_jsonl(folder / "rows.jsonl", [{"text": text} for text in texts])
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"backbone: {backbone}\n"
        "task: {kind: language-model, pack: false}\n"
        f"data: {{train: {{files: [{rows}]}}, holdout: 0.1}}\n"
        "adapter: {rank: 4, alpha: 32, experts: 2}\n"
        f"optimizer: {{lr: {rate}, eps: 1e-6, schedule: constant}}\n"
        "train: {steps: 4, batch_size: 4, max_length: 32, max_cut: 1, eval_every: 4, device: cpu, precision: fp32}\n"
        "eval: {bootstrap: 20, train_limit: 10}\n",
        encoding="utf-8",
    )
    return recipe


def read_run(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["split"] == "train"]
    return {
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in steps],
        "loads": [line["expert_max_violation"] for line in steps],
        "adapter": load_file(out / "adapter" / "adapter_model.safetensors"),
    }


def compare(folder: Path, kind: str, meshes: dict[str, list[str]], *, rate: float = 1e-2) -> dict[str, Any]:
    """Train in one process and on each mesh, demand the same, and return the run in one process."""
    recipe = write_recipe(folder, save_mixture(kind, folder / "backbone"), rate)
    assert run(["train", str(recipe), "--out", str(folder / "one"), "--train.threads", "1"]) == 0
    alone = read_run(folder / "one")
    largest = 4 / {**SIZES, **MODELS[kind]}["num_experts_per_tok"] - 1
    assert len(alone["norms"]) == 4 and all(0.02 < load <= largest for load in alone["loads"])
    assert len(set(alone["loads"])) > 1, "it follows the tokens of a step"
    for name, axes in meshes.items():
        out = folder / name.replace(" ", "-")
        warm_commands.flatshift("train", str(recipe), "--out", str(out), *axes)
        ours = read_run(out)
        assert ours["losses"] == pytest.approx(alone["losses"], abs=1e-5), name
        assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-4), name
        assert ours["loads"] == pytest.approx(alone["loads"], abs=1e-9), name
        assert ours["adapter"].keys() == alone["adapter"].keys(), name
        for key, tensor in alone["adapter"].items():
            assert (ours["adapter"][key] - tensor).norm() <= 1e-3 * tensor.norm(), (name, key)
    return alone


def test_dense_blocks_and_experts_on_shards_columns_and_shared_experts(tmp_path: Path) -> None:
    alone = compare(
        tmp_path,
        "glm4_moe",
        {
            "dp": ["--mesh.dp", "2"],
            "tp": ["--mesh.tp", "2"],
            "ep": ["--mesh.dp", "2", "--mesh.ep", "2"],
        },
    )
    names = set(alone["adapter"])
    parts = (
        "mlp.experts.lora_A",
        "experts.base_layer.lora_B",
        "shared_experts.up_proj.lora_A",
        "0.mlp.down_proj.lora_B",
    )
    assert all(any(part in name for name in names) for part in parts), sorted(names)[:40]


def test_tokens_are_counted_once_and_rows_that_fill_up_never(tmp_path: Path) -> None:
    """In the first pass, not where backward recomputes a block between two passes of a pipeline."""
    model = load_backbone(save_mixture("mixtral", tmp_path / "mixtral"), task=LanguageModel())
    model = attach_adapter(model, Adapter(rank=2), task=LanguageModel(), seed=0).train()
    engine: Any = Engine.alone(model)
    engine.runner = SimpleNamespace(real_rows=(2, 3))
    meter = ExpertLoadMeter(engine)
    ids = torch.arange(3, 27).view(3, 8)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    for mode in ("none", "full"):
        checkpoint_activations(model, mode)  # type: ignore[arg-type]
        meter.reset()
        model(input_ids=ids, attention_mask=mask).logits.sum().backward()
        assert [int(counts.sum()) for counts in meter._counts] == [2 * (5 + 8)] * 4, "two experts for each real token"


@pytest.mark.slow
def test_compiled_blocks_around_shared_experts(tmp_path: Path) -> None:
    """What is exchanged stays outside of the graphs, which would otherwise be compiled for each number of tokens."""
    ep = ["--mesh.dp", "2", "--mesh.ep", "2"]
    compare(tmp_path, "qwen3_moe", {"compiled ep": [*ep, "--train.compile", "true"]})


def test_what_ranks_cannot_share(tmp_path: Path) -> None:
    mixture = build_skeleton(save_mixture("mixtral", tmp_path / "mixtral"), task=LanguageModel())
    check_expert_parallel(mixture, ep=4)
    with pytest.raises(UserError, match=r"mesh\.ep: 3 does not divide the 4 experts of a block; nearest: mesh\.ep 2"):
        check_expert_parallel(mixture, ep=3)
    dense = build_skeleton(backbone_directory(list_backbones()[0]), task=LanguageModel())
    with pytest.raises(UserError, match="this backbone has no mixture of experts"):
        check_expert_parallel(dense, ep=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_other_axes(kind: str, tmp_path: Path) -> None:
    compare(
        tmp_path,
        kind,
        {
            "replicate": ["--mesh.replicate", "2"],
            "pp": ["--mesh.pp", "2"],
            "cp": ["--mesh.cp", "2"],
            "tokens split": ["--mesh.tp", "2", "--mesh.sequence_parallel", "true"],
            "ep and dp": ["--mesh.dp", "4", "--mesh.ep", "2"],
            "ep and replicate": ["--mesh.dp", "2", "--mesh.ep", "2", "--mesh.replicate", "2"],
            "ep and pp": ["--mesh.dp", "2", "--mesh.ep", "2", "--mesh.pp", "2"],
        },
    )


@pytest.mark.slow
def test_linear_attention_beside_experts(tmp_path: Path) -> None:
    """At a smaller rate: its recurrence lets rounding grow tenfold in few updates."""
    meshes = {"dp": ["--mesh.dp", "2"], "ep": ["--mesh.dp", "2", "--mesh.ep", "2"]}
    compare(tmp_path, "qwen3_next", meshes, rate=1e-3)


@pytest.mark.slow
def test_experts_that_take_all_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(tmp_path, "llama4_text", {"dp": ["--mesh.dp", "2"], "tp": ["--mesh.tp", "2"]})
    refused = warm_commands.flatshift(
        *("train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "ep"), "--mesh.dp", "2", "--mesh.ep", "2"),
        code=2,
    )
    assert "transformers has no expert-parallel plan for llama4_text models" in refused.stderr
