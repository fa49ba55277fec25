"""What tensor parallelism cuts, and what it refuses before any weight is read: meta models, no processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from flatshift.finetune.errors import UserError
from flatshift.finetune.models.families import tensor_plan
from flatshift.finetune.parallel.tensor import check_tensor_plan
from flatshift.finetune.parallel.tensor.plans import match_plan
from tests.support.tensor_models import KINDS, adapted, backbone


def _need(kind: str, style: str = "") -> None:
    """Skip the test if this transformers has no plan of that kind, or one without the style, which later ones have."""
    import transformers

    plan = transformers.CONFIG_MAPPING[kind].base_model_tp_plan
    if plan is None or not any(style in str(value) for value in plan.values()):
        pytest.skip(f"transformers {transformers.__version__} has no such plan of {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_cut_by_two_and_four(kind: str) -> None:
    if kind == "nemotron":
        _need(kind)
    model = adapted(kind, meta=True)
    for tp in (1, 2, 4):
        check_tensor_plan(model, tp=tp, sequence_parallel=False)
    assert all(parameter.is_meta for parameter in model.parameters())


def _refusal(model: Any, tp: int = 2, sequence_parallel: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        check_tensor_plan(model, tp=tp, sequence_parallel=sequence_parallel)
    return str(caught.value)


def test_a_family_without_a_plan() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    with torch.device("meta"):
        model = OPTForCausalLM(OPTConfig(hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2))
    said = _refusal(model)
    assert "'opt' cannot be split: transformers has no plan" in said and "mesh.dp" in said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("BioGpt", "transformers has no plan for its blocks"),
        ("GptOss", "transformers has no plan for its blocks"),
        ("GraniteSWA", "splits its self_attn as local_params"),
        ("DeepseekV2", "splits its self_attn.kv_a_proj_with_mqa as mla_kv_a_proj"),
        ("Qwen3_5Text", "splits its linear_attn as colwise_gather_output"),
    ],
)
def test_styles_that_are_not_split_here(name: str, words: str) -> None:
    import transformers

    kind = getattr(transformers, f"{name}Config").model_type
    if name == "GraniteSWA":
        _need(kind, "local_params")
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        tensor_plan(kind)


@pytest.mark.parametrize(
    ("kind", "overrides", "tp", "words"),
    [
        ("llama", {}, 3, ("3 does not divide the 4 attention heads", "mesh.tp 2")),
        ("llama", {"intermediate_size": 5}, 4, ("a rank without any of the 5 channels of model.layers.0", "mesh.tp 2")),
        ("llama", {"vocab_size": 5}, 4, ("4 leaves a rank without any of the 5 tokens of the vocabulary", "mesh.tp 2")),
        ("phi3", {"intermediate_size": 50}, 4, ("does not divide the 50 channels of model.layers.0.mlp", "mesh.tp 2")),
        ("cohere", {"use_qk_norm": True}, 2, ("does not divide model.layers.0.self_attn.q_norm.weight", "mesh.tp 1")),
        ("gpt_neox", {}, 8, ("8 does not divide the 4 attention heads", "mesh.tp 4")),
    ],
)
def test_sizes_that_do_not_divide(kind: str, overrides: dict, tp: int, words: tuple[str, ...]) -> None:
    said = _refusal(adapted(kind, meta=True, **overrides), tp)
    assert all(word in said for word in words), said


def _lora(kind: str, **settings: Any) -> Any:
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **settings})
    return get_peft_model(backbone(kind, meta=True), config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bias": "lora_only"}, ("q_proj trains more than",)),
        ({"lora_bias": True}, ("q_proj trains more than",)),
        ({"target_modules": ["q_proj", "embed_tokens"]}, ("embed_tokens trains or has an adapter", "adapter.targets")),
        ({"target_modules": ["q_proj", "lm_head"]}, ("the output head trains or has an adapter",)),
        ({"modules_to_save": ["embed_tokens"]}, ("embed_tokens trains or has an adapter",)),
        ({"modules_to_save": ["lm_head"]}, ("the output head trains or has an adapter",)),
        ({"trainable_token_indices": [1, 2]}, ("embed_tokens trains or has an adapter",)),
        ({"modules_to_save": ["up_proj"]}, ("model.layers.0.mlp.up_proj", "is not as")),
    ],
)
def test_adapters_that_cannot_be_cut(settings: dict, words: tuple[str, ...]) -> None:
    overrides = {"attention_bias": True} if "bias" in settings else {}
    config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **settings})
    base = backbone("llama", meta=True, **overrides)
    said = _refusal(get_peft_model(base, config, low_cpu_mem_usage=True, autocast_adapter_dtype=False))
    assert all(word in said for word in words), said


def test_a_trained_norm_is_fine() -> None:
    check_tensor_plan(_lora("qwen3", modules_to_save=["q_norm"]), tp=2, sequence_parallel=True)


def test_layers_that_the_plan_does_not_know() -> None:
    model = adapted("gpt2", meta=True, add_cross_attention=True)
    said = _refusal(model)
    assert "transformer.h.0.crossattention" in said
    model = backbone("bert", meta=True, is_decoder=True, add_cross_attention=True)
    assert "crossattention" in _refusal(model)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("t5", "reads all of the encoder's"), ("vit", "a class token"), ("nemotron", "no plan says after which norm")],
)
def test_tokens_that_cannot_be_split(kind: str, why: str) -> None:
    if kind == "nemotron":
        _need(kind)
    said = _refusal(adapted(kind, meta=True), sequence_parallel=True)
    assert (
        said.startswith(f"mesh.sequence_parallel: the tokens of model type '{kind}' cannot be split: ") and why in said
    )


def test_sequence_parallel_needs_tensor_parallel() -> None:
    assert "mesh.tp is 1" in _refusal(adapted("llama", meta=True), tp=1, sequence_parallel=True)


def test_a_pipeline_stage_that_has_only_the_position_bias_of_a_block() -> None:
    model = adapted("t5", meta=True)
    base = model.get_base_model()
    attention = base.encoder.block[0].layer[0].SelfAttention
    for name in ("q", "k", "v", "o"):
        delattr(attention, name)
    del base.encoder.block[0].layer[1:]
    check_tensor_plan(model, tp=2, sequence_parallel=False)
    found = match_plan(model)
    assert "encoder.block.0" not in found.blocks
    assert [entry is attention for _, entry in found.biases] == [True, False]
