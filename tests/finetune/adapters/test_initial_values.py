"""What an adapter starts from: PEFT's initialisations beside naive ones, and what plain PEFT loads."""

from __future__ import annotations

import hashlib
import importlib.util

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, load_adapter, save_adapter, trainable
from flatshift.finetune.adapters.initial_values import SUBTRACTED_INITS, Calibration
from flatshift.finetune.adapters.offsets import folded_offsets, lora_layers
from flatshift.finetune.config import Adapter, Mesh, Train
from flatshift.finetune.data.example import Example
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.tasks import LanguageModel
from tests.support.adapter_models import logits, move, plain_peft
from tests.support.finetune_models import save_backbone

LM = LanguageModel(pack=False)
QUERY = {"llama": "model.layers.1.self_attn.q_proj", "gpt2": "transformer.h.1.attn.c_attn"}
ATTRS = pytest.mark.skipif(importlib.util.find_spec("attr") is None, reason="PEFT's CorDA imports attrs")
ALL = ("pissa", "olora", "orthogonal", "eva", pytest.param("corda", marks=ATTRS), "lora-ga")


def examples(count=24):
    generator = torch.Generator().manual_seed(5)
    made = []
    for index in range(count):
        ids = torch.randint(3, 60, (int(torch.randint(12, 20, (1,), generator=generator)),), generator=generator)
        made.append(Example(input_ids=ids.tolist(), labels=ids.tolist(), id=str(index), where=f"f:{index}"))
    return made


def calibration(**more):
    return Calibration(rows=examples(), task=LM, pad_id=0, **more)


def build(source, adapter, *, seed=0, initial=None, dtype=torch.float32):
    rows = calibration() if initial is None else None
    return attach_adapter(
        load_backbone(source, task=LM), adapter, task=LM, seed=seed, initial=initial, calibration=rows, dtype=dtype
    )


def dense(layer):
    """The weight (out, in) that the layer computes with, in float64."""
    weight = layer.get_base_layer().weight.double()
    weight = weight.T if layer.fan_in_fan_out else weight
    return (
        weight
        + layer.scaling["default"] * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("init", ALL)
def test_starts_at_the_backbone_and_a_saved_adapter_fits_the_files(init, kind, sources, tmp_path):
    if (init, kind) == ("olora", "gpt2"):
        pytest.skip("refused: see test_impossible_beginnings")
    source = sources[kind]
    before = hashlib.sha256((source / "model.safetensors").read_bytes()).digest()
    state = torch.random.get_rng_state()
    wide = {"q_proj": 6} if kind == "llama" else {"c_attn": 6}
    adapter = Adapter(rank=4, init=init, rslora=kind == "gpt2", ranks=wide)
    model = build(source, adapter)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".lora_" not in n)
    plain = logits(load_backbone(source, task=LM))
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=2e-5)
    save_adapter(model, tmp_path / "initial")
    torch.testing.assert_close(logits(plain_peft(source, tmp_path / "initial")), plain, rtol=0, atol=2e-5)
    wanted = logits(move(model))
    assert (wanted - plain).abs().max() > 0.05, "the adapter does something"
    save_adapter(model, tmp_path / "adapter")
    theirs = plain_peft(source, tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), wanted, rtol=0, atol=2e-4)
    if kind == "llama" and init in SUBTRACTED_INITS:  # twice the rank, at the same scale, layer by layer
        for name, layer in lora_layers(theirs).items():
            mine = lora_layers(model)[name]
            assert layer.r["default"] == 2 * mine.r["default"] == (12 if name.endswith("q_proj") else 8)
            assert layer.scaling["default"] == mine.scaling["default"] == 2.0
    assert hashlib.sha256((source / "model.safetensors").read_bytes()).digest() == before
    # taken over again: the same bits, whatever the seed, and without a look at data
    again = build(source, adapter, seed=9, initial=tmp_path / "initial")
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(again), wanted)


@pytest.mark.parametrize("init", ALL)
def test_a_pure_function_of_settings_seed_and_rows(init, sources):
    one, two = (build(sources["llama"], Adapter(rank=4, init=init)) for _ in range(2))
    first, second = dict(one.named_parameters()), dict(two.named_parameters())
    assert first.keys() == second.keys() and all(torch.equal(p, second[n]) for n, p in first.items())


def test_olora_is_a_qr_decomposition(sources):
    layer = lora_layers(build(sources["llama"], Adapter(rank=4, init="olora")))[QUERY["llama"]]
    original = load_backbone(sources["llama"], task=LM).get_submodule(QUERY["llama"]).weight.double()
    q, r = torch.linalg.qr(original)
    part = layer.scaling["default"] * q[:, :4] @ r[:4]
    torch.testing.assert_close(layer.get_base_layer().weight.double(), original - part, rtol=0, atol=1e-6)


def test_orthogonal_factors_do_not_meet(sources):
    layer = lora_layers(build(sources["llama"], Adapter(rank=4, init="orthogonal")))[QUERY["llama"]]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.any() and b.any() and (b @ a).abs().max() < 1e-7 * 10


def inputs_of(source, name, rows):
    """The inputs of a layer at the real tokens of each row, float64."""
    backbone = load_backbone(source, task=LM).double().eval()
    seen = []
    hook = backbone.get_submodule(name).register_forward_hook(lambda m, x, y: seen.append(x[0][0]))
    with torch.no_grad():
        for row in rows:
            backbone(input_ids=torch.tensor([row.input_ids]))
    hook.remove()
    return seen


@ATTRS
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_corda_is_the_decomposition_weighted_by_the_covariance(kind, sources):
    name = QUERY[kind]
    layer = lora_layers(build(sources[kind], Adapter(rank=4, init="corda")))[name]
    weight = load_backbone(sources[kind], task=LM).get_submodule(name).weight.double()
    weight = weight.T if kind == "gpt2" else weight
    states = [x / x.max().abs() for x in inputs_of(sources[kind], name, examples())]
    covariance = sum(x.T @ x for x in states) / len(states)
    covariance += 0.01 * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(weight @ covariance, full_matrices=False)  # W C = U S V', and W = U S V' C⁻¹
    part = (u[:, :4] * s[:4]) @ vh[:4] @ torch.linalg.inv(covariance)
    base = layer.get_base_layer().weight.double()
    torch.testing.assert_close(base.T if kind == "gpt2" else base, weight - part, rtol=0, atol=2e-4)
    torch.testing.assert_close(dense(layer), weight, rtol=0, atol=1e-5)


def test_eva_takes_the_directions_in_which_inputs_vary(sources):
    model = build(sources["llama"], Adapter(rank=4, init="eva"))
    ranks = {name: layer.r["default"] for name, layer in lora_layers(model).items()}
    assert sum(ranks.values()) == 4 * 14 and len(set(ranks.values())) > 1, "shared out anew, none lost"
    name = "model.layers.0.self_attn.q_proj"  # its inputs are the same in every pass
    layer, rows = lora_layers(model)[name], torch.cat(inputs_of(sources["llama"], name, examples()))
    _, values, directions = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    a = layer.lora_A["default"].weight.double()
    best = values[: len(a)].square().sum()
    explained = ((rows - rows.mean(0)) @ a.T).square().sum()
    assert explained > 0.97 * best and not layer.lora_B["default"].weight.any()
    torch.testing.assert_close(a @ a.T, torch.eye(len(a), dtype=torch.float64), rtol=0, atol=1e-4)
    assert (directions[0] @ a[0]).abs() > 0.95


def test_lora_ga_spans_the_first_gradient(sources):
    name = QUERY["llama"]
    layer = lora_layers(build(sources["llama"], Adapter(rank=4, init="lora-ga")))[name]
    backbone = load_backbone(sources["llama"], task=LM)
    weight = backbone.get_submodule(name).weight.requires_grad_()
    loss = 0.0
    for row in examples():
        ids = torch.tensor([row.input_ids])
        loss = loss + torch.nn.functional.cross_entropy(
            backbone(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum"
        )
    loss.backward()
    u, _, vh = torch.linalg.svd(weight.grad.double())
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()

    def inside(rows, basis):  # share of the rows' energy within the span of the basis
        return float((rows.detach() @ basis.T).square().sum() / rows.detach().square().sum())

    assert inside(a, vh[:4]) > 0.999 and inside(b.T, u.T[4:8]) > 0.99


def test_dora_and_bf16_adapters_start_at_the_backbone_too(sources, tmp_path):
    plain = logits(load_backbone(sources["llama"], task=LM))
    model = build(sources["llama"], Adapter(rank=4, init="pissa", dora=True))
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=2e-5)
    wanted = logits(move(model))
    save_adapter(model, tmp_path / "dora")
    torch.testing.assert_close(logits(plain_peft(sources["llama"], tmp_path / "dora")), wanted, rtol=0, atol=2e-4)
    half = build(sources["llama"], Adapter(rank=4, init="olora"), dtype=torch.bfloat16)
    assert {p.dtype for p in trainable(half).values()} == {torch.bfloat16}
    for name, offset in folded_offsets(half).items():  # what was taken out is what the rounded factors add
        layer = lora_layers(half)[name]
        assert torch.equal(offset.a, layer.lora_A["default"].weight)
        assert torch.equal(-offset.b, layer.lora_B["default"].weight)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Adapter(rank=5, init="orthogonal"), "orthogonal needs even ranks"),
        (Adapter(rank=40, init="pissa"), r"at most 32 directions.*adapter\.ranks\.q_proj: 32"),
        (Adapter(rank=20, init="lora-ga"), "at most 16 directions"),
        (Adapter(rank=100, init="eva"), "eva needs 200 tokens"),
        (Adapter(rank=4, init="olora", targets=("wte", "c_attn")), "olora does not work on .*c_attn, a Conv1D"),
        (Adapter(rank=4, init="pissa", targets=("wte", "lm_head")), "lm_head shares its weight"),
    ],
)
def test_impossible_beginnings(adapter, message, sources):
    with pytest.raises(UserError, match=message):
        build(sources["gpt2" if "wte" in adapter.targets else "llama"], adapter)


def test_data_is_needed_and_an_initial_adapter_must_be_one(sources, tmp_path):
    for init in ("eva", "corda", "lora-ga"):
        with pytest.raises(UserError, match=f"{init} looks at training rows, and there are none"):
            attach_adapter(load_backbone(sources["llama"], task=LM), Adapter(init=init), task=LM, seed=0)
    save_adapter(build(sources["llama"], Adapter(rank=4)), tmp_path / "plain")
    with pytest.raises(UserError, match=r"does not hold what adapter\.init: pissa folded"):
        build(sources["llama"], Adapter(rank=4, init="pissa"), initial=tmp_path / "plain")
    save_adapter(build(sources["llama"], Adapter(rank=4, init="olora")), tmp_path / "olora")
    with pytest.raises(UserError, match="begun with other parts"):
        load_adapter(build(sources["llama"], Adapter(rank=4, init="pissa")), tmp_path / "olora")


@pytest.mark.parametrize(
    ("adapter", "mesh", "train", "message"),
    [
        (Adapter(init="corda"), Mesh(dp=2), Train(), "one rank"),
        (Adapter(init="loftq"), Mesh(), Train(), "needs train.quantization: nf4"),
        (Adapter(init="loftq"), Mesh(), Train(quantization="int8"), "needs train.quantization: nf4"),
        (Adapter(init="lora-ga"), Mesh(), Train(quantization="nf4"), "packed weights cannot be changed"),
        (Adapter(under="x"), Mesh(tp=2), Train(), "one rank"),
        (Adapter(train_whole=("lm_head",)), Mesh(dp=2), Train(), "one rank"),
    ],
)
def test_what_goes_with_what(adapter, mesh, train, message):
    with pytest.raises(UserError, match=message):
        check_settings(RuleSettings(mesh, train, adapter, LM))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_rows": 8}, "init_rows goes with init"),
        ({"init": "pissa", "start": "x"}, "init must be default with start"),
        ({"under": "x", "dora": True}, "does not go with dora"),
        ({"under": "x", "start": "y"}, "start does not go with under"),
        ({"ranks": {"q_proj": 0}}, r"ranks\.q_proj must be above 0"),
        ({"ranks": {"*.q_proj": 4}}, r"ranks: '\*\.q_proj' is no name or pattern \(nothing to repeat"),
    ],
)
def test_contradictions_are_refused_when_they_are_written(settings, message):
    with pytest.raises(ValueError, match=message):
        Adapter(**settings)


def test_loftq_makes_up_for_quantisation(sources, tmp_path):
    pytest.importorskip("bitsandbytes")
    source = save_backbone("llama", tmp_path / "wide", hidden_size=64, intermediate_size=128)
    exact = dict(load_backbone(source, task=LM).named_parameters())
    model = attach_adapter(
        load_backbone(source, task=LM, quantization="nf4"), Adapter(rank=8, init="loftq"), task=LM, seed=0
    )
    from peft.utils.integrations import dequantize_module_weight

    for name, layer in lora_layers(model).items():
        packed = dequantize_module_weight(layer.get_base_layer()).double()
        target = exact[f"{name}.weight"].double()
        part = (
            layer.scaling["default"] * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        )
        u, s, v = torch.linalg.svd(target - packed)
        best = (u[:, :8] * s[:8]) @ v[:8]
        torch.testing.assert_close(part, best, rtol=0, atol=1e-3)
        assert (target - packed - part).norm() < (target - packed).norm()
    with pytest.raises(UserError, match="loftq"):
        attach_adapter(load_backbone(source, task=LM), Adapter(init="loftq"), task=LM, seed=0)


def test_eva_leaves_out_layers_and_the_saved_adapter_knows_which(sources, tmp_path):
    adapter = Adapter(rank=1, init="eva")
    model = move(build(sources["llama"], adapter))
    kept = lora_layers(model).keys()
    assert 0 < len(kept) < 14, "some get no direction at this rank"
    save_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(
        logits(plain_peft(sources["llama"], tmp_path / "adapter")), logits(model), rtol=0, atol=2e-4
    )
    again = build(sources["llama"], adapter, seed=9, initial=tmp_path / "adapter")
    assert lora_layers(again).keys() == kept
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
