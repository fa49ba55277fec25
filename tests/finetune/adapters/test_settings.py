"""Ranks by layer, blocks, exclusions, biases and whole modules; adapters that begin with or lie on another one."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BartConfig, BartForSequenceClassification

from flatshift.finetune.adapters.adapter import (
    attach_adapter,
    attach_on_meta,
    load_adapter,
    read_adapter,
    save_adapter,
    trainable,
)
from flatshift.finetune.adapters.merge import combine_adapters, merge_files
from flatshift.finetune.adapters.offsets import lora_layers
from flatshift.finetune.adapters.saved import SavedAdapter, check_same_settings
from flatshift.finetune.config import Adapter, Optimizer
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.fingerprint import fingerprint
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.tasks import Classify, LanguageModel
from flatshift.finetune.train.optimizer import AdapterOptimizer
from tests.support.adapter_models import logits, move, plain_peft
from tests.support.finetune_models import save_backbone
from tests.support.seq2seq_models import save_encoder_decoder

LM, CLS = LanguageModel(), Classify()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_backbone("llama", tmp_path_factory.mktemp("llama"), attention_bias=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_backbone("gpt2", tmp_path_factory.mktemp("gpt2"))


def build(source, adapter, *, task=LM, seed=0, **more):
    labels = ("a", "b", "c") if task is CLS else None
    backbone = load_backbone(source, task=task, label_names=labels)
    return attach_adapter(backbone, adapter, task=task, seed=seed, **more)


def sizes(model):
    return {name: (layer.r["default"], layer.scaling["default"]) for name, layer in lora_layers(model).items()}


def test_ranks_and_alphas_by_layer(source, tmp_path):
    adapter = Adapter(rank=4, ranks={"q_proj": 8, "layers.1.mlp.up_proj": 2}, alphas={"k_proj": 20}, rslora=False)
    model = build(source, adapter)
    found = sizes(model)
    assert found["model.layers.0.self_attn.q_proj"] == found["model.layers.1.self_attn.q_proj"] == (8, 2.0)
    assert found["model.layers.1.mlp.up_proj"] == (2, 2.0) and found["model.layers.0.mlp.up_proj"] == (4, 2.0)
    assert found["model.layers.0.self_attn.k_proj"] == (4, 5.0)
    assert sizes(build(source, Adapter(rank=4, alpha=8, ranks={"q_proj": 8})))["model.layers.0.self_attn.q_proj"] == (
        8,
        1.0,
    )
    fixed = trainable(build(source, Adapter(rank=4)))
    same = {n: p for n, p in trainable(model).items() if "v_proj" in n}
    assert same and all(torch.equal(p, fixed[n]) for n, p in same.items()), "other layers draw what they always drew"
    wanted = logits(move(model))
    save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(plain_peft(source, tmp_path / "adapter")), wanted)
    skeleton = build_skeleton(source, task=LM)  # folded into the files with each layer's own scale
    (tmp_path / "merged").mkdir()
    merge_files(skeleton, tmp_path / "adapter", tmp_path / "merged", dtype=torch.float32)
    skeleton.config.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load_backbone(tmp_path / "merged", task=LM)), wanted, rtol=0, atol=2e-5)


def test_blocks_and_exclusions(source):
    full = set(sizes(build(source, Adapter(rank=2))))
    only = set(sizes(build(source, Adapter(rank=2, layers=(1,)))))
    assert only == {name for name in full if ".layers.1." in name}
    less = set(sizes(build(source, Adapter(rank=2, layers=(0,), exclude=("mlp.up_proj", "o_proj")))))
    assert less == {n for n in full if ".layers.0." in n and not n.endswith(("up_proj", "o_proj"))}
    named = sizes(build(source, Adapter(rank=2, targets=("q_proj", "up_proj"), layers=(1,))))
    assert {name.rsplit(".")[-1] for name in named} == {"q_proj", "up_proj"} and len(named) == 2


@pytest.mark.parametrize(("bias", "count"), [("all", 8), ("adapted", 2)])
def test_biases_train_and_come_back(bias, count, source, tmp_path):
    model = build(source, Adapter(rank=2, bias=bias, targets="q_proj"))
    biases = [name for name in trainable(model) if name.endswith(".bias")]
    assert len(biases) == count
    wanted = logits(move(model))
    save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(plain_peft(source, tmp_path / "adapter")), wanted)
    ours = build(source, Adapter(rank=2, bias=bias, targets="q_proj"), seed=4)
    load_adapter(ours, tmp_path / "adapter")
    assert torch.equal(logits(ours), wanted)


def test_biases_beside_what_is_folded_in(source, tmp_path):
    model = build(source, Adapter(rank=2, bias="adapted", init="pissa"))
    wanted = logits(move(model))
    save_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(logits(plain_peft(source, tmp_path / "adapter")), wanted, rtol=0, atol=1e-4)


def test_whole_modules_train_beside_the_adapter(source, tmp_path):
    model = build(source, Adapter(rank=2, train_whole=("lm_head", "norm")))
    original = dict(load_backbone(source, task=LM).named_parameters())
    whole = {n: p for n, p in trainable(model).items() if ".lora_" not in n}
    assert set(whole) == {"lm_head.weight", "model.norm.weight"}
    assert all(torch.equal(p, original[n]) for n, p in whole.items()), "it starts as the backbone has it"
    wanted = logits(move(model))
    save_adapter(model, tmp_path / "adapter")
    assert torch.equal(logits(plain_peft(source, tmp_path / "adapter")), wanted)
    assert {n for n in read_adapter(tmp_path / "adapter") if ".lora_" not in n} == set(whole)


def test_a_head_of_the_checkpoint_trains_in_full_whatever_its_name(tmp_path):
    """BART's `classification_head`, with as many classes as the task: nothing of it is new."""
    source = save_encoder_decoder("bart", tmp_path / "generates", num_labels=3)
    model = BartForSequenceClassification(BartConfig.from_pretrained(source))
    model.save_pretrained(source)
    built = build(source, Adapter(rank=2, targets=("q_proj", "out_proj")), task=CLS)
    assert built.get_base_model().new_parameters == ()
    head = {
        name.split("head.")[1]: p.requires_grad
        for name, p in built.named_parameters()
        if ".original" not in name and "_head." in name
    }
    assert head == {
        f"{layer}.modules_to_save.default.{leaf}": True
        for layer in ("dense", "out_proj")
        for leaf in ("weight", "bias")
    }
    save_adapter(built, tmp_path / "adapter")
    assert "base_model.model.classification_head.dense.weight" in load_file(
        tmp_path / "adapter" / "adapter_model.safetensors"
    )


def test_lora_plus_speeds_up_every_b_and_nothing_else(source):
    model = build(source, Adapter(rank=2, ranks={"q_proj": 4}, bias="adapted", train_whole=("lm_head",), init="olora"))
    before = {n: p.detach().clone() for n, p in trainable(model).items()}
    optimizer = AdapterOptimizer(trainable(model), Optimizer(lora_plus=8.0))
    for parameter in trainable(model).values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    for name, parameter in trainable(model).items():  # Adam's first step is the learning rate
        rate = 8e-3 if ".lora_B." in name else 1e-3
        torch.testing.assert_close(before[name] - parameter, torch.full_like(parameter, rate), rtol=1e-3, atol=1e-6)


def test_a_backbone_without_biases_trains_none():
    with pytest.raises(UserError, match=r"adapter\.bias: this backbone has no biases"):
        build("flatshift-5m", Adapter(bias="all"))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Adapter(ranks={"q_prj": 4}), r"adapter\.ranks: no adapted layer is called 'q_prj'; nearest: q_proj"),
        (Adapter(targets="q_proj", alphas={"v_proj": 4}), r"adapter\.alphas: no adapted layer is called 'v_proj'"),
        (Adapter(ranks={"q_proj": 4, "layers.0.self_attn.q_proj": 6}), r"'q_proj' and .* both name .*with 4 and 6"),
        (Adapter(ranks={"q_proj": 4}, alphas={"0.self_attn.q_proj": 9}), r"adapter\.alphas: 'q_proj' and .*8 and 9"),
        (Adapter(exclude=("up_prj",)), r"adapter\.exclude: .*nearest: up_proj"),
        (Adapter(layers=(2,)), r"no block 2; this backbone has 2, from 0 to 1"),
        (Adapter(train_whole=("lm_haed",)), r"adapter\.train_whole: no module .*nearest: lm_head"),
        (Adapter(experts=4), "no mixture of experts"),
        (Adapter(targets=("q_proj", "embed_tokens"), layers=(0,)), r"'embed_tokens' is in none of adapter\.layers"),
    ],
)
def test_names_that_nothing_has(adapter, message, source):
    with pytest.raises(UserError, match=message):
        build(source, adapter)


def test_tied_weights_are_not_trained_in_one_place_only(tied):
    with pytest.raises(UserError, match="wte shares its weight with lm_head"):
        build(tied, Adapter(train_whole=("wte",)))


# --------------------------------------------------------------------------------------------- another adapter


def saved(source, directory, adapter, *, task=LM, seed=1):
    model = move(build(source, adapter, task=task), seed)
    save_adapter(model, directory)
    return model


def dense_sum(source, *directories):
    """The backbone with the products of several saved adapters added, each by hand in float64."""
    model = load_backbone(source, task=LM)
    with torch.no_grad():
        for directory in directories:
            settings = json.loads((directory / "adapter_config.json").read_text())
            tensors = read_adapter(directory)
            for name in [n.removesuffix(".lora_A.weight") for n in tensors if n.endswith(".lora_A.weight")]:
                a, b = (tensors[f"{name}.lora_{f}.weight"].double() for f in "AB")
                weight = model.get_parameter(f"{name}.weight")
                weight += (settings["lora_alpha"] / settings["r"] * b @ a).float()
    return model


def test_training_over_a_frozen_adapter(source, tmp_path):
    saved(source, tmp_path / "first", Adapter(rank=2, alpha=6, targets=("q_proj", "up_proj")))
    over = Adapter(rank=4, under=str(tmp_path / "first"))
    model = build(source, over)
    torch.testing.assert_close(logits(model), logits(dense_sum(source, tmp_path / "first")), rtol=0, atol=2e-5)
    assert all(layer.r == {"default": 4} for layer in lora_layers(model).values()), "only the upper one trains"
    save_adapter(model, tmp_path / "initial")
    save_adapter(build(source, Adapter(rank=4)), tmp_path / "upper")  # what the upper one is on its own
    wanted = logits(move(model, 7))
    save_adapter(model, tmp_path / "both")
    torch.testing.assert_close(logits(plain_peft(source, tmp_path / "both")), wanted, rtol=0, atol=1e-4)
    alone = move(build(source, Adapter(rank=4)), 7)
    save_adapter(alone, tmp_path / "second")
    by_hand = dense_sum(source, tmp_path / "first", tmp_path / "second")
    torch.testing.assert_close(logits(by_hand), wanted, rtol=0, atol=5e-5)
    again = build(source, over, seed=3, initial=tmp_path / "initial")
    load_adapter(again, tmp_path / "both")
    assert torch.equal(logits(again), wanted)


def test_a_bf16_adapter_over_another_one_comes_back_with_the_same_bits(source, tmp_path):
    saved(source, tmp_path / "first", Adapter(rank=2, alpha=6))
    over = Adapter(rank=4, under=str(tmp_path / "first"))
    model = build(source, over, dtype=torch.bfloat16)
    save_adapter(model, tmp_path / "initial")
    again = build(source, over, seed=3, initial=tmp_path / "initial", dtype=torch.bfloat16)
    for name, layer in lora_layers(again).items():
        assert torch.equal(layer.get_base_layer().weight, lora_layers(model)[name].get_base_layer().weight), name
    load_adapter(again, tmp_path / "initial")
    wider = build(source, over)  # folds in the float32 values, which are others
    with pytest.raises(UserError, match="begun with other parts"):
        load_adapter(wider, tmp_path / "initial")


def test_a_loftq_adapter_fits_its_own_packed_weights_only(source, tmp_path):
    saved(source, tmp_path / "run" / "adapter", Adapter(rank=2))
    (tmp_path / "run" / "recipe.resolved.yaml").write_text("adapter:\n  init: loftq\ntrain:\n  quantization: nf4\n")
    for name in ("run", "run/adapter"):
        found = SavedAdapter.find(str(tmp_path / name), context="x")
        found.require_backbone(open_backbone(source), context="x", quantization="nf4")
        with pytest.raises(UserError, match="begun by loftq on weights in nf4"):
            found.require_backbone(open_backbone(source), context="x")
    with pytest.raises(UserError, match=r"adapter\.under: .*begun by loftq"):
        build(source, Adapter(under=str(tmp_path / "run")))


def test_another_backbone_of_a_like_name_is_refused(source, tmp_path):
    saved(source, tmp_path / "run" / "adapter", Adapter(rank=2))
    (tmp_path / "run" / "recipe.resolved.yaml").write_text("seed: 0\n")
    told = {"name": "org/other", "fingerprint": "0" * 64}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps({"backbone": told}))
    for name in ("run", "run/adapter"):
        with pytest.raises(UserError, match="trained on org/other, which is not the backbone"):
            SavedAdapter.find(str(tmp_path / name), context="x").require_backbone(open_backbone(source), context="x")
    by_name = SavedAdapter(tmp_path, {"base_model_name_or_path": "other/qwen"}, None)
    by_name.require_backbone(dataclasses.replace(open_backbone(source), name="other/Qwen"), context="x")
    with pytest.raises(UserError, match="trained on other/qwen, which is not the backbone org/qwen"):
        by_name.require_backbone(dataclasses.replace(open_backbone(source), name="org/qwen"), context="x")


def test_a_weighted_sum_of_adapters_is_exact(source, tmp_path):
    saved(source, tmp_path / "one", Adapter(rank=2, alpha=6, ranks={"q_proj": 4}))
    saved(source, tmp_path / "two", Adapter(rank=3, rslora=True, targets=("q_proj", "up_proj")), seed=2)
    pair = [(SavedAdapter.find(str(tmp_path / name), context="x"), w) for name, w in (("one", 1.0), ("two", -0.5))]
    (tmp_path / "sum").mkdir()
    combine_adapters(pair, tmp_path / "sum")
    model = load_backbone(source, task=LM)
    with torch.no_grad():
        for found, weight in pair:
            tensors = read_adapter(found.path)
            for layer, (rank, scale) in found.scales(tensors).items():
                known = (6 / (4 if "q_proj" in layer else 2)) if weight == 1 else 6 / 3**0.5
                assert scale == pytest.approx(known) and rank == len(tensors[f"{layer}.lora_A.weight"])
                a, b = (tensors[f"{layer}.lora_{f}.weight"].double() for f in "AB")
                model.get_parameter(f"{layer}.weight").add_((weight * known * b @ a).float())
    torch.testing.assert_close(logits(plain_peft(source, tmp_path / "sum")), logits(model), rtol=0, atol=5e-5)
    saved(source, tmp_path / "head", Adapter(rank=2), task=CLS)
    with pytest.raises(UserError, match="put this adapter first"):
        combine_adapters([pair[0], (SavedAdapter.find(str(tmp_path / "head"), context="x"), 1.0)], tmp_path / "sum")


@pytest.mark.parametrize("bias", ["adapted", "all"])
def test_a_sum_keeps_trained_biases_where_peft_looks_for_them(bias, tied, tmp_path):
    """Beside an adapter on more layers: a bias of the first lies in a layer that only the sum adapts."""
    first = build(tied, Adapter(rank=2, bias=bias, targets=("c_attn",)))
    move(first)
    save_adapter(first, tmp_path / "first")
    saved(tied, tmp_path / "second", Adapter(rank=2))
    (tmp_path / "sum").mkdir()
    pair = [SavedAdapter.find(str(tmp_path / name), context="x") for name in ("first", "second")]
    combine_adapters([(pair[0], 1.0), (pair[1], 0.0)], tmp_path / "sum")
    found, own = read_adapter(tmp_path / "sum"), read_adapter(tmp_path / "first")
    biases = [name for name in own if name.endswith(".bias")]
    assert biases and all(torch.equal(found[name], own[name]) and own[name].any() for name in biases)
    torch.testing.assert_close(logits(plain_peft(tied, tmp_path / "sum")), logits(first), rtol=0, atol=1e-5)


def test_an_adapter_beneath_must_fit(source, tied, tmp_path):
    saved(source, tmp_path / "first", Adapter(rank=2))
    saved(tied, tmp_path / "foreign", Adapter(rank=2))
    saved(source, tmp_path / "dora", Adapter(rank=2, dora=True))
    saved(source, tmp_path / "head", Adapter(rank=2), task=CLS)
    shutil.copytree(tmp_path / "first", tmp_path / "biased")
    settings = tmp_path / "biased" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_bias": True}))
    for directory, message in (
        ("foreign", "which is not the backbone"),
        ("dora", "is of DoRA"),
        ("head", "also holds score.weight"),
        ("nothing", "neither a finished run directory nor a PEFT adapter"),
        ("biased", "was made with lora_bias"),
    ):
        with pytest.raises(UserError, match=message):
            build(source, Adapter(under=str(tmp_path / directory)))
    with pytest.raises(UserError, match=r"this recipe does not; add .* to adapter\.targets"):
        build(source, Adapter(targets="q_proj", under=str(tmp_path / "first")))


@pytest.mark.parametrize(
    "settings",
    [{"lora_alpha": None}, {"lora_alpha": "8"}, {"alpha_pattern": ["q_proj"]}, {"alpha_pattern": {"q": "x"}}],
)
def test_a_damaged_scale_is_refused_in_a_sentence(settings, tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | settings))
    with pytest.raises(
        UserError, match=r"^here: .*adapter_config\.json: lora_alpha or alpha_pattern has .*, not a number"
    ):
        SavedAdapter.find(str(tmp_path), context="here")


@pytest.mark.parametrize(("leaf", "init"), [("embed_tokens", False), ("lm_head", "mica")])
def test_pefts_copy_of_a_frozen_embedding_is_no_head(leaf, init, source, tmp_path):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", leaf], init_lora_weights=init)
    get_peft_model(AutoModelForCausalLM.from_pretrained(source), config).save_pretrained(tmp_path)
    assert any(name.endswith(f"{leaf}.base_layer.weight") for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert all(".lora_" in name for name in read_adapter(tmp_path))
    model = move(build(source, Adapter(rank=2, targets=("q_proj", leaf), under=str(tmp_path))))
    save_adapter(model, tmp_path / "both")
    torch.testing.assert_close(logits(plain_peft(source, tmp_path / "both")), logits(model), rtol=0, atol=1e-4)
    (tmp_path / "twice").mkdir()
    halves = [(SavedAdapter.find(str(tmp_path / "both"), context=""), 0.5)] * 2
    combine_adapters(halves, tmp_path / "twice")
    torch.testing.assert_close(logits(plain_peft(source, tmp_path / "twice")), logits(model), rtol=0, atol=1e-4)


def test_a_start_is_compared_setting_by_setting(source, tied, tmp_path):
    saved(source, tmp_path / "first", Adapter(rank=2, targets=("q_proj", "v_proj")))
    other = save_backbone("llama", tmp_path / "other", hidden_size=64, attention_bias=True)

    def check(adapter, directory="first", backbone=source):
        found = SavedAdapter.find(str(tmp_path / directory), context="adapter.start")
        found.require_backbone(open_backbone(backbone), context="adapter.start")
        skeleton = attach_on_meta(build_skeleton(backbone, task=LM), adapter, task=LM, dtype=torch.float32)
        check_same_settings(found, read_adapter(found.path), skeleton, context="adapter.start")

    check(Adapter(rank=2, targets=("q_proj", "v_proj")))
    check(Adapter(rank=2, alpha=4, targets=("v_proj", "q_proj")))
    with pytest.raises(UserError) as error:
        check(Adapter(rank=8, dora=True))
    text = str(error.value)
    assert "its rank is 2 and the recipe's 8 (adapter.rank)" in text and "(adapter.dora)" in text
    assert "q_proj (2), v_proj (2)" in text and "\n" not in text
    with pytest.raises(UserError, match=r"its scale is 2 and the recipe's 0\.5 \(adapter\.alpha\)"):
        check(Adapter(rank=2, alpha=1, targets=("q_proj", "v_proj")))
    with pytest.raises(UserError, match="which is not the backbone"):
        check(Adapter(rank=2, targets=("q_proj", "v_proj")), backbone=other)
    settings = json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    (tmp_path / "first" / "adapter_config.json").write_text(json.dumps({**settings, "init_lora_weights": "pissa"}))
    with pytest.raises(UserError, match="path_initial_model_for_weight_conversion"):
        check(Adapter(rank=2, targets=("q_proj", "v_proj")))


def test_a_fingerprint_tells_weights_apart_and_not_files(source, tmp_path):
    from safetensors.torch import load_file, save_file

    assert fingerprint(source) == fingerprint(source)
    tensors = load_file(source / "model.safetensors")
    parts, names = {}, sorted(tensors)
    for index, chosen in enumerate((names[::2], names[1::2]), start=1):
        save_file({n: tensors[n] for n in chosen}, tmp_path / f"model-{index}.safetensors")
        parts |= dict.fromkeys(chosen, f"model-{index}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert fingerprint(tmp_path) == fingerprint(source)
    tensors[names[0]][0, 0] += 1
    save_file({n: tensors[n] for n in names[::2]}, tmp_path / "model-1.safetensors")
    assert fingerprint(tmp_path) != fingerprint(source)


@pytest.mark.parametrize(
    ("key", "value", "is_refused"),
    [
        ("target_modules", "(([a-z_.0-9])+)+!", True), ("target_modules", "(a|a)*b", True),
        ("target_modules", ".*.*.*.*x", True), ("exclude_modules", "((x+){9})", True),
        ("rank_pattern", {"(([a-z.])+)+!": 3}, True), ("alpha_pattern", {"([a-z]+)*!": 3}, True),
        ("target_modules", ["q_proj", "(x+)+"], True), ("alpha_pattern", {"(": 2}, True),
        ("target_modules", r"^(?!.*visual).*(?:q_proj|k_proj).*", False), ("target_modules", "all-linear", False),
        ("rank_pattern", {r"layers\.(0|1)\.q_proj": 3}, False), ("target_modules", 3, False),
        ("rank_pattern", None, False),
    ],
)  # fmt: skip
def test_patterns_that_may_run_away_are_refused(key: str, value: object, is_refused: bool, tmp_path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, key: value}))
    if is_refused:
        with pytest.raises(UserError, match=rf"^here: .*adapter_config\.json: {key} has the pattern"):
            SavedAdapter.find(str(tmp_path), context="here")
    else:
        assert SavedAdapter.find(str(tmp_path), context="here").settings[key] == value
