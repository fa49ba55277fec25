"""Adapters on mixtures of experts: each expert's factors beside a dense reference, a frozen router, plain PEFT."""

from __future__ import annotations

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, attach_on_meta, load_adapter, save_adapter, trainable
from flatshift.finetune.config import Adapter
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.parallel.build import check_mesh_support
from flatshift.finetune.planner.sizes import BackboneSizes
from flatshift.finetune.tasks import LanguageModel
from flatshift.regularizers import GGPO, build
from flatshift.regularizers.layers.sites import find_lora_sites
from tests.support.adapter_models import IDS, logits, move

LM = LanguageModel(pack=False)
KINDS = ("mixtral", "qwen2-moe", "deepseek")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    import transformers as tf

    ids = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "initializer_range": 0.1}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    qwen = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    deepseek = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    }
    latent = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    groups = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    table = {
        "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig, {"num_key_value_heads": 2, "num_local_experts": 4}),
        "qwen2-moe": (
            tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig,
            {**qwen, "num_key_value_heads": 2, "shared_expert_intermediate_size": 40},
        ),
        "deepseek": (tf.DeepseekV3ForCausalLM, tf.DeepseekV3Config, {**deepseek, **latent, **groups}),
    }  # fmt: skip
    found = {}
    for kind, (model_class, config_class, own) in table.items():
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = model_class(config_class(**{**ids, **sizes, **own}))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
        found[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(found[kind])
    return found


def build_model(source, adapter, *, seed=0):
    return attach_adapter(load_backbone(source, task=LM), adapter, task=LM, seed=seed)


def dense(source, model):
    """The backbone with s·BA added to every adapted tensor, expert by expert, from the factors of the live `model`."""
    backbone = load_backbone(source, task=LM)
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
        place = name.removeprefix("base_model.model.").replace(".base_layer", "")
        target = backbone.get_parameter(f"{place}.{getattr(layer, 'parameter_name', 'weight')}")
        with torch.no_grad():
            if target.ndim == 2:
                target += layer.scaling["default"] * b @ a
            else:
                experts, rank = target.shape[0], layer.r["default"]
                for e in range(experts):  # rows e·r … of A; every E-th column of B from e on
                    target[e] += layer.scaling["default"] * b[:, e::experts] @ a[e * rank : (e + 1) * rank]
    return backbone


@pytest.mark.parametrize("kind", KINDS)
def test_experts_shared_experts_and_attention_are_adapted_and_the_router_is_not(kind, sources, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    source = sources[kind]
    state = torch.random.get_rng_state()
    model = build_model(source, Adapter(rank=4, experts=2))
    assert torch.equal(state, torch.random.get_rng_state())
    names = list(trainable(model))
    assert not [n for n in names if ".gate.lora" in n or "router" in n or "shared_expert_gate" in n]
    assert [n for n in names if "experts.lora_A" in n] and [n for n in names if "experts.base_layer.lora_A" in n]
    shared = [n for n in names if "shared_expert" in n]
    assert bool(shared) == (kind != "mixtral") and {n.split(".lora")[0].rsplit(".", 1)[-1] for n in shared} == (
        {"gate_proj", "up_proj", "down_proj"} if shared else set()
    )
    assert any(n.endswith("o_proj.lora_A.weight") for n in names)
    torch.testing.assert_close(logits(model), logits(load_backbone(source, task=LM)), rtol=0, atol=1e-6)
    wanted = logits(move(model))
    torch.testing.assert_close(logits(dense(source, model)), wanted, rtol=0, atol=5e-5)
    save_adapter(model, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    if kind == "deepseek":  # PEFT folds the factors of shared experts into the weight, here they are a path beside it
        torch.testing.assert_close(logits(theirs), wanted, rtol=0, atol=5e-6)
    else:
        assert torch.equal(logits(theirs), wanted)
    ours = build_model(source, Adapter(rank=4, experts=2), seed=5)
    load_adapter(ours, tmp_path / "adapter")
    assert torch.equal(logits(ours), wanted)
    merged = ours.merge_and_unload(safe_merge=True)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(again), wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_adapters_of_experts(kind, sources):
    """Also those of files that have experts one by one."""
    for adapter in (Adapter(rank=4, experts=3), Adapter(rank=2, experts=1, targets=("q_proj",))):
        built = sum(p.numel() for p in trainable(build_model(sources[kind], adapter)).values())
        sizes = BackboneSizes.read(sources[kind], adapter)
        assert sizes.adapter == built and 0 < sizes.expert_adapter < built
    assert BackboneSizes.read(sources[kind], Adapter()).expert_adapter == 0


@pytest.mark.parametrize("kind", KINDS)
def test_without_experts_only_what_every_token_passes_is_adapted(kind, sources):
    names = list(trainable(build_model(sources[kind], Adapter(rank=2))))
    assert names and not [n for n in names if ".experts." in n]
    blocks = {n.split(".layers.")[1][0] for n in trainable(build_model(sources[kind], Adapter(layers=(1,), experts=1)))}
    assert blocks == {"1"}


def test_gradients_of_expert_factors_are_those_of_the_dense_weights(sources):
    """Of W + s·B_e A_e for each expert e: ∂/∂A_e = s·B_eᵀ G_e and ∂/∂B_e = s·G_e A_eᵀ."""
    model = move(build_model(sources["qwen2-moe"], Adapter(rank=2, experts=3)))
    backbone = dense(sources["qwen2-moe"], model).eval().requires_grad_()

    def backward(what):
        scores = what(input_ids=IDS).logits[:, :-1]
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum").backward()

    backward(model.eval())
    backward(backbone)
    checked = 0
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A") or ".experts" not in name:
            continue
        place = name.removeprefix("base_model.model.").replace(".base_layer", "")
        whole = backbone.get_parameter(f"{place}.{layer.parameter_name}").grad
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        experts, rank, scale = len(whole), layer.r["default"], layer.scaling["default"]
        for e in range(experts):
            rows = slice(e * rank, (e + 1) * rank)
            wanted_a = scale * b[:, e::experts].T @ whole[e]
            wanted_b = scale * whole[e] @ a[rows].T
            torch.testing.assert_close(a.grad[rows], wanted_a, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(b.grad[:, e::experts], wanted_b, rtol=1e-3, atol=1e-4)
            checked += bool(wanted_a.any()) and rank == 3
    assert checked >= 8, "most experts see some of these tokens"


def test_ggpo_leaves_expert_layers_alone(sources):
    """Its noise lies on linear layers; what experts have beside them trains as without it."""
    model = build_model(sources["qwen2-moe"], Adapter(rank=2, experts=2))
    sites, others = find_lora_sites(model)
    experts = {name for name, module in model.named_modules() if hasattr(module, "lora_A") and ".experts" in name}
    assert experts and experts <= set(others) and sites and not experts & {site.name for site in sites}
    block = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp.experts"))
    states = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    inputs = (states, torch.tensor([[0, 1]] * 6), torch.full((6, 2), 0.5))
    model.train()
    wanted, plain = block(*inputs), model(input_ids=IDS).logits
    regularizer = build(GGPO(sigma=0.5))
    regularizer.attach(model, seed=0, total_steps=4)
    try:
        with regularizer.step(0):
            assert torch.equal(block(*inputs), wanted)
            assert not torch.equal(model(input_ids=IDS).logits, plain), "the noise is on, in other layers"
    finally:
        regularizer.detach()


def test_shared_experts_and_dense_blocks_are_adapted_as_linear_layers(sources, tmp_path):
    """With dropout, ranks and alphas of their own; in the file they are parameters, which PEFT reads alike."""
    from peft import PeftConfig, PeftModel
    from peft.tuners.lora import Linear
    from transformers import AutoModelForCausalLM

    adapter = Adapter(rank=4, dropout=0.3, ranks={"shared_experts.up_proj": 2}, alphas={"down_proj": 3.0})
    model = move(build_model(sources["deepseek"], adapter))
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    mlp = {name: layer for name, layer in layers.items() if ".mlp." in name}
    assert {name.rsplit(".mlp.", 1)[-1].partition(".")[0] for name in mlp} == {
        "gate_proj", "up_proj", "down_proj", "shared_experts"
    }  # fmt: skip
    assert all(isinstance(layer, Linear) and layer.lora_dropout["default"].p == 0.3 for layer in mlp.values())
    wanted = logits(model)
    model.train()
    assert not torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits), "dropout draws"
    save_adapter(model, tmp_path / "adapter")
    config = PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (
        set(config.target_parameters) == {f"{name.removeprefix('base_model.model.')}.weight" for name in mlp}
        and config.lora_dropout == 0
    )
    plain = AutoModelForCausalLM.from_pretrained(sources["deepseek"], dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", ("qwen2-moe", "deepseek"))
def test_a_skeleton_for_a_mesh_is_adapted_alike(kind, sources):
    adapter = Adapter(rank=2, experts=2)
    skeleton = attach_on_meta(build_skeleton(sources[kind], task=LM), adapter, task=LM, dtype=torch.float32)
    check_mesh_support(skeleton)
    shapes = {name: parameter.shape for name, parameter in trainable(skeleton).items()}
    assert shapes == {name: p.shape for name, p in trainable(build_model(sources[kind], adapter)).items()}


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Adapter(experts=2, dropout=0.1), "adapter.dropout does not go with adapters on experts"),
        (Adapter(experts=2, dora=True), "adapter.dora does not go"),
        (Adapter(experts=2, init="pissa"), "adapter.init: pissa does not go"),
        (Adapter(targets=("q_proj", "shared_expert_gate")), "stays frozen; take shared_expert_gate out"),
        (Adapter(targets=("q_proj", "gat_proj")), "nearest: gate_proj"),
    ],
)
def test_what_experts_do_not_go_with(adapter, message, sources):
    with pytest.raises(UserError, match=message):
        build_model(sources["qwen2-moe"], adapter)


def test_dora_on_layers_that_files_have_as_parameters(sources):
    with pytest.raises(UserError, match=r"adapter\.dora does not go .*shared_experts"):
        build_model(sources["deepseek"], Adapter(dora=True, targets=("q_proj", "up_proj"), layers=(1,)))
    assert [n for n in trainable(build_model(sources["qwen2-moe"], Adapter(dora=True))) if "shared_expert" in n]
