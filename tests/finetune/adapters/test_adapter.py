"""Adapters are plain PEFT, drawn by name, saved whole and compared."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatshift.finetune.adapters.adapter import (
    WEIGHTS,
    attach_adapter,
    load_adapter,
    read_adapter,
    save_adapter,
    trainable,
    write_adapter,
)
from flatshift.finetune.config import Adapter
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import Classify, LanguageModel
from tests.support.finetune_models import save_backbone

LM, CLS = LanguageModel(), Classify()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {kind: save_backbone(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "gpt2", "bert", "roberta")}


def build(source, adapter=Adapter(rank=4), *, task=LM, seed=0, precision="fp32"):  # noqa: B008
    labels = ("a", "b", "c") if task is CLS else None
    backbone = load_backbone(source, task=task, label_names=labels, precision=precision)
    return attach_adapter(backbone, adapter, task=task, seed=seed)


def fill(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_initialisation_depends_on_seed_and_name_alone(kind, sources):
    before = torch.random.get_rng_state()
    first, again = trainable(build(sources[kind])), trainable(build(sources[kind]))
    assert torch.equal(before, torch.random.get_rng_state())
    other, few = (
        trainable(build(sources[kind], seed=1)),
        trainable(build(sources[kind], Adapter(rank=4, targets="c_proj" if kind == "gpt2" else "up_proj"))),
    )
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert few and all(torch.equal(first[n], few[n]) for n in few), "another set of targets changes no other tensor"
    for name, tensor in first.items():
        if ".lora_B." in name:
            assert not tensor.any()
        else:
            assert not torch.equal(tensor, other[name])
            bound = 1 / math.sqrt(tensor.shape[1])  # Kaiming uniform with a = √5: U(−1/√fan_in, 1/√fan_in)
            assert tensor.abs().max() <= bound and abs(tensor.std().item() / (bound / math.sqrt(3)) - 1) < 0.15


def test_a_fresh_adapter_changes_nothing_and_scaling_follows_the_settings(sources):
    ids = torch.arange(3, 13)[None]
    plain = load_backbone(sources["llama"], task=LM)(input_ids=ids).logits
    assert torch.equal(plain, build(sources["llama"])(input_ids=ids).logits)

    def scale(adapter):
        layer = build(sources["llama"], adapter).get_base_model().model.layers[0].mlp.up_proj
        return layer.scaling["default"]

    assert scale(Adapter(rank=4)) == scale(Adapter(rank=16)) == 2.0
    assert scale(Adapter(rank=4, alpha=4)) == 1.0
    assert scale(Adapter(rank=4, alpha=4, rslora=True)) == 2.0


@pytest.mark.bf16
def test_bf16_backbone_keeps_float32_adapters_and_heads(sources):
    for task in (LM, CLS):
        model = build(sources["llama"], task=task, precision="bf16")
        assert {p.dtype for p in trainable(model).values()} == {torch.float32}
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["llama", "bert", "roberta", "gpt2"])
def test_new_heads_are_drawn_by_name_and_train(kind, sources):
    first, again = build(sources[kind], task=CLS), build(sources[kind], task=CLS)
    heads = {n: p for n, p in trainable(first).items() if ".lora_" not in n}
    assert any(p.ndim == 2 and p.any() for p in heads.values())
    assert all(torch.equal(p, trainable(again)[n]) for n, p in heads.items())
    assert all(not p.any() for n, p in heads.items() if n.endswith("bias"))
    if kind == "bert":  # the masked-LM checkpoint has no pooler: it must not stay random and frozen
        assert "bert.pooler.dense.weight" in heads


@pytest.mark.parametrize("settings", [{}, {"rslora": True}, {"dora": True}, {"targets": ("q_proj", "embed_tokens")}])
def test_saved_adapter_loads_with_plain_peft_and_gives_the_same_logits(settings, sources, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = fill(build(sources["llama"], Adapter(rank=4, **settings))).eval()
    save_adapter(model, tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == ["adapter_config.json", WEIGHTS]
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"], "no leftovers"
    modules = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    assert modules == sorted(modules), "the same bytes from every process"
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(sources["llama"], dtype=torch.float32), tmp_path / "adapter"
    ).eval()
    ids = torch.arange(3, 23).reshape(2, 10)
    assert torch.equal(plain(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("kind", ["llama", "bert", "roberta"])
def test_saved_classifier_loads_with_plain_peft(kind, sources, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    model = fill(build(sources[kind], task=CLS)).eval()
    save_adapter(model, tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(sources[kind], num_labels=3, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.arange(3, 23).reshape(2, 10)
    assert torch.equal(plain(input_ids=ids).logits, model(input_ids=ids).logits)


def test_load_adapter_is_exact_and_refuses_other_shapes(sources, tmp_path):
    model = fill(build(sources["llama"]))
    save_adapter(model, tmp_path / "adapter")
    fresh = build(sources["llama"], seed=5)
    load_adapter(fresh, tmp_path / "adapter")
    assert all(torch.equal(p, trainable(fresh)[n]) for n, p in trainable(model).items())
    with pytest.raises(UserError, match=r"shape \(4, 32\).*\(8, 32\)"):
        load_adapter(build(sources["llama"], Adapter(rank=8)), tmp_path / "adapter")
    with pytest.raises(UserError, match="has no partner"):
        load_adapter(build(sources["llama"], Adapter(rank=4, targets="q_proj")), tmp_path / "adapter")
    with pytest.raises(UserError, match="no adapter here"):
        load_adapter(fresh, tmp_path)
    weights = tmp_path / "adapter" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match="damaged or cut short"):
        load_adapter(fresh, tmp_path / "adapter")


def test_a_warm_up_adapter_continues_under_a_head(sources, tmp_path):
    warm = fill(build(sources["llama"]))
    save_adapter(warm, tmp_path / "adapter")
    model = build(sources["llama"], task=CLS)
    head = trainable(model)["score.weight"].clone()
    load_adapter(model, tmp_path / "adapter", partial=True)
    live = trainable(model)
    assert all(torch.equal(p, live[n]) for n, p in trainable(warm).items()) and torch.equal(head, live["score.weight"])


def test_a_save_that_does_not_read_back_is_refused_and_the_old_adapter_stays(sources, tmp_path, monkeypatch):
    model = fill(build(sources["llama"]))
    target = tmp_path / "adapter"
    save_adapter(model, target)
    before = (target / WEIGHTS).read_bytes()
    fill(model, seed=2)
    whole = type(model).save_pretrained

    def truncating(self, directory, **options):
        whole(self, directory, **options)
        tensors = load_file(f"{directory}/{WEIGHTS}")
        name = next(n for n in tensors if "lora_B" in n)
        tensors[name][-1].zero_()  # as a save that only wrote one shard
        save_file(tensors, f"{directory}/{WEIGHTS}")

    monkeypatch.setattr(type(model), "save_pretrained", truncating)
    with pytest.raises(RuntimeError, match="differs from the live one"):
        save_adapter(model, target)
    assert (target / WEIGHTS).read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert read_adapter(target).keys() == trainable(model).keys()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_adapter_that_is_not_finite_is_not_saved_and_the_old_one_stays(value, sources, tmp_path):
    model = fill(build(sources["llama"]))
    save_adapter(model, tmp_path / "a")
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    name, tensor = next(iter(trainable(model).items()))
    with torch.no_grad():
        tensor.view(-1)[-1] = value
    for write in (
        lambda: save_adapter(model, tmp_path / "a"),
        lambda: write_adapter(model, trainable(model), tmp_path / "a"),
    ):
        with pytest.raises(UserError, match=rf"^{tmp_path / 'a'}: {name} has values that are NaN or infinite"):
            write()
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_an_empty_adapter_is_refused(sources, tmp_path):
    model = build(sources["llama"]).requires_grad_(False)
    with pytest.raises(RuntimeError, match="empty"):
        save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Adapter(targets="q_prj"), r"'q_prj'; nearest: q_proj"),
        (Adapter(targets=("q_proj", "norm")), r"'norm'"),
        (Adapter(targets=()), "empty"),
    ],
)
def test_impossible_settings(adapter, message, sources):
    with pytest.raises(UserError, match=message):
        build(sources["llama"], adapter)
