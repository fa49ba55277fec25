"""Backbones in 4 and 8 bits: what is read of them, GGPO on them against a dense float64 reference, bytes that never
change, a whole run through the public command, and one sentence for each thing that does not go."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from flatshift.cli import run
from flatshift.finetune.adapters.adapter import attach_adapter, load_adapter, read_adapter, save_adapter, trainable
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Adapter, Mesh, Quantization, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.quantize import KINDS, quantization_scales
from flatshift.finetune.planner.footprint import predict_footprint
from flatshift.finetune.planner.sizes import read_sizes
from flatshift.finetune.tasks import Classify, LanguageModel
from flatshift.regularizers import GGPO, RegularizerError, build
from flatshift.regularizers.layers.frozen import is_quantised
from flatshift.regularizers.layers.sites import find_lora_sites
from tests.support.commands import flags
from tests.support.finetune_models import save_backbone
from tests.support.regularizer_models import perturbations

HERE = importlib.util.find_spec("bitsandbytes") is not None
needs_package = pytest.mark.skipif(not HERE, reason="needs the extra `quant` (bitsandbytes)")
LM = LanguageModel()
WIDE = {"hidden_size": 64, "intermediate_size": 128}  # 4-bit layers have a multiple of 64 inputs


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes: dict[str, dict[str, Any]] = {"llama": WIDE, "gpt2": {"n_embd": 64}, "bert": WIDE}
    return {kind: save_backbone(kind, tmp_path_factory.mktemp(kind), **own) for kind, own in sizes.items()}


def adapted(source: Path, kind: Quantization | None, *, precision: str = "fp32", task: Any = LM, **adapter: Any) -> Any:
    """Backbone with an adapter whose B is not zero, in training mode."""
    labels = ("a", "b") if isinstance(task, Classify) else None
    model = load_backbone(source, task=task, label_names=labels, precision=precision, quantization=kind)  # type: ignore[arg-type]
    model = attach_adapter(model, Adapter(rank=4, **adapter), task=task, seed=0)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in trainable(model).items():
        if ".lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def dense_values(base: Any) -> Tensor:
    """Ŵ (m, n) in float64, unpacked here value by value: the naive reference."""
    weight = base.weight
    if weight.dtype == torch.int8:
        row_scales = base.state.SCB if getattr(weight, "SCB", None) is None else weight.SCB
        return weight.detach().as_subclass(Tensor).double() * (row_scales.double() / 127)[:, None]
    if weight.dtype != torch.uint8:
        return weight.detach().double()
    state = weight.quant_state
    packed = weight.detach().as_subclass(Tensor).reshape(-1)
    index = torch.stack([packed >> 4, packed & 15], 1).reshape(-1).long()
    blocks = state.absmax
    if state.nested:
        blocks = state.state2.code[blocks.long()]
        blocks = blocks * state.state2.absmax.repeat_interleave(256)[: len(blocks)] + state.offset
    values = state.code[index].float().view(-1, 64) * blocks.float()[:, None]
    return values.to(state.dtype).view(state.shape).double()


def ids(rows: int = 4, length: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in trainable(model).items() if p.grad is not None}


def dense_twin(source: Path, model: Any, noise: dict[str, Tensor]) -> Any:
    """A float64 model whose frozen weights are Ŵ + ε, with the same adapter."""
    twin = adapted(source, None).double()
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            weight = twin.get_submodule(name).base_layer.weight
            value = dense_values(module.base_layer) + noise.get(name, torch.zeros(())).double()
            weight.data.copy_(value.T if type(twin.get_submodule(name).base_layer).__name__ == "Conv1D" else value)
    for name, parameter in trainable(twin).items():
        parameter.data.copy_(trainable(model)[name])
    return twin


# --------------------------------------------------------------------------------------------- what is read


@needs_package
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.bf16)])
@pytest.mark.parametrize("kind", KINDS)
def test_row_norms_are_those_of_the_dequantised_values(
    kind: Quantization, precision: str, sources: dict[str, Path]
) -> None:
    model = adapted(sources["llama"], kind, precision=precision)
    sites, others = find_lora_sites(model)
    assert len(sites) == 14 and not others
    for site in sites:
        assert is_quantised(site.base)
        a, b = (part["default"].weight.double() for part in (site.layer.lora_A, site.layer.lora_B))
        expected = (dense_values(site.base) + site.layer.scaling["default"] * b @ a).square().sum(1)
        error = (site.squared_norms(site.factors()).double() / expected - 1).abs().max()
        assert float(error.detach()) < 1e-6, site.name


@needs_package
@pytest.mark.parametrize("source", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_dense_noise_on_the_dequantised_values(
    kind: Quantization, source: str, sources: dict[str, Path]
) -> None:
    model = adapted(sources[source], kind)
    plain, _ = loss_and_gradients(model)
    regularizer: Any = build(GGPO(sigma=0.3)).attach(model, seed=1, total_steps=2)
    with regularizer.step(0):
        noise = perturbations(regularizer)
        loss, gradients = loss_and_gradients(model)
    regularizer.detach()
    assert abs(float(loss - plain)) > 1e-3  # the noise is there
    twin = dense_twin(sources[source], model, noise)
    expected, dense = loss_and_gradients(twin)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert set(gradients) == set(dense)
    for name, gradient in dense.items():
        assert float((gradients[name].double() - gradient).norm() / gradient.norm()) < 1e-4, name


@needs_package
def test_noise_has_the_covariance_of_dense_noise_on_the_dequantised_rows(sources: dict[str, Path]) -> None:
    """Over 200 draws: the mean of ε_i ε_iᵀ of a row is σ_i² on the diagonal and nothing beside it."""
    model = adapted(sources["llama"], "nf4-double")
    regularizer: Any = build(GGPO(sigma=0.3, beta=0.0)).attach(model, seed=1, total_steps=200)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    draws = []
    for t in range(200):
        with regularizer.step(t):
            draws.append(perturbations(regularizer)[name].double())
    drawn = torch.stack(draws)  # (draws, m, n)
    site = next(site for site in find_lora_sites(model)[0] if site.name == name)
    sigma = 0.3 * (site.squared_norms(site.factors()).double() / 64).sqrt()
    scaled = drawn / sigma[:, None]
    covariance = torch.einsum("tmi,tmj->mij", scaled, scaled) / len(drawn)
    assert torch.allclose(covariance.diagonal(dim1=1, dim2=2).mean(1), torch.ones(64).double(), atol=0.06)
    off = covariance - torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
    assert float(off.square().mean().sqrt()) < 1.2 / 200**0.5
    across = torch.einsum("tai,tbi->ab", scaled, scaled) / (200 * 64)
    assert float((across - torch.diag(across.diag())).square().mean().sqrt()) < 2 / 200**0.5


@needs_package
def test_a_dora_layer_takes_its_norms_from_the_magnitude(sources: dict[str, Path]) -> None:
    model = adapted(sources["llama"], "nf4", dora=True)
    before = checksum(model)
    for site in find_lora_sites(model)[0]:
        magnitude = site.layer.lora_magnitude_vector["default"].weight.double()
        assert torch.allclose(site.squared_norms(site.factors()).double(), magnitude.square(), rtol=1e-6)
    regularizer = build(GGPO(sigma=0.1)).attach(model, seed=1, total_steps=1)
    with regularizer.step(0):
        _, gradients = loss_and_gradients(model)
    assert any("magnitude" in name for name in gradients) and checksum(model) == before


# --------------------------------------------------------------------------------------------- bytes that stay


@pytest.mark.bf16
@needs_package
@pytest.mark.parametrize("kind", KINDS)
def test_stored_bytes_and_scales_survive_steps_evaluation_exceptions_and_interrupts(
    kind: Quantization, sources: dict[str, Path]
) -> None:
    model = adapted(sources["llama"], kind, precision="bf16")
    precision = Train(precision="bf16")
    with autocast(precision, torch.device("cpu")):
        loss_and_gradients(model)  # int8 layers move their scales from the parameter to the layer at their first call
    before, held = checksum(model), quantization_scales(model)
    assert len(held) == {"nf4": 14, "nf4-double": 3 * 14, "int8": 14}[kind]
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-2)
    regularizer = build(GGPO(sigma=0.2, refresh=2)).attach(model, seed=1, total_steps=8)
    for t in range(4):
        with regularizer.step(t), autocast(precision, torch.device("cpu")):
            loss_and_gradients(model)
        optimizer.step()
        with torch.no_grad(), autocast(precision, torch.device("cpu")):
            model.eval()(input_ids=ids(), labels=ids())
        model.train()
    for problem in (ValueError, KeyboardInterrupt):
        with pytest.raises(problem), regularizer.step(4):
            model(input_ids=ids())
            raise problem
    regularizer.detach()
    assert checksum(model) == before
    next(iter(held.values())).view(-1)[:1].zero_()
    assert checksum(model) != before  # scales are in it


@pytest.mark.bf16
@needs_package
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_still_pass_after_an_evaluation(kind: Quantization, sources: dict[str, Path]) -> None:
    """bitsandbytes repacks 4-bit weights for inference on some CPUs, and its product then has no gradient."""
    model = adapted(sources["llama"], kind, precision="bf16")
    with autocast(Train(precision="bf16"), torch.device("cpu")):
        _, before = loss_and_gradients(model)
        with torch.no_grad():
            model.eval()(input_ids=ids())
        _, after = loss_and_gradients(model.train())
    assert all(torch.equal(before[name], after[name]) for name in before) and len(before) == 28


# --------------------------------------------------------------------------------------------- loading and saving


@needs_package
def test_what_trains_or_ends_the_model_stays_a_float(sources: dict[str, Path]) -> None:
    model = adapted(sources["bert"], "nf4", task=Classify())
    base = model.get_base_model()
    assert type(base.bert.encoder.layer[0].attention.self.query.base_layer).__name__ == "Linear4bit"
    floats = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("classifier" in name for name in floats) and any("pooler" in name for name in floats)
    logits = model(input_ids=ids()).logits
    logits.sum().backward()
    assert all(p.grad is not None for p in trainable(model).values())


@needs_package
def test_a_layer_whose_rows_end_inside_a_block_of_scales_stays_a_float(tmp_path: Path) -> None:
    """bitsandbytes 0.50 unpacks such a 4-bit layer wrongly on CPUs: 96 inputs, blocks of 64."""
    source = save_backbone("llama", tmp_path, hidden_size=64, intermediate_size=96)
    for kind, down in (("nf4", "Linear"), ("int8", "Linear8bitLt")):
        model = load_backbone(source, task=LM, quantization=kind)  # type: ignore[arg-type]
        assert type(model.model.layers[0].mlp.down_proj).__name__ == down
        assert type(model.model.layers[0].mlp.up_proj).__name__ == {"nf4": "Linear4bit", "int8": "Linear8bitLt"}[kind]


@needs_package
@pytest.mark.parametrize("kind", ["nf4", "nf4-double"])
def test_the_plan_counts_what_is_held_stacked_experts_as_floats(kind: Quantization, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=3, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    model = load_backbone(tmp_path, task=LM, quantization=kind)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *quantization_scales(model).values()))
    backbone = read_sizes(tmp_path, Adapter())
    train = Train(quantization=kind, precision="fp32")
    planned = predict_footprint(backbone, mesh=Mesh(), adapter=Adapter(), train=train).weights
    assert planned == pytest.approx(held, rel=0.01)


@needs_package
@pytest.mark.parametrize("source", ["llama", "gpt2"])
def test_the_adapter_is_plain_peft_and_fits_the_float_backbone(
    source: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    model = adapted(sources[source], "nf4")
    save_adapter(model, tmp_path / "adapter")
    fresh = attach_adapter(load_backbone(sources[source], task=LM), Adapter(rank=4), task=LM, seed=1)
    load_adapter(fresh, tmp_path / "adapter")
    with torch.no_grad():
        ours = fresh.eval()(input_ids=ids()).logits
        plain = load_backbone(sources[source], task=LM)
        theirs = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()(input_ids=ids()).logits
        packed = model.eval()(input_ids=ids()).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    apart = float((packed - ours).norm() / ours.norm())
    assert 1e-3 < apart < 0.5  # near, and not the same: 4 bits


SMALL = {
    "train.steps": 6,
    "train.batch_size": 4,
    "train.max_length": 32,
    "train.max_cut": 1,
    "train.save_every": 2,
    "train.threads": 1,
    "train.precision": "fp32",
    "optimizer.schedule": "constant",  # so that a run of 4 steps is the beginning of one of 6
    "optimizer.warmup": 0,
    "data.train.limit": 40,
    "data.dev.limit": 12,
    "data.test.limit": 12,
    "eval.bootstrap": 20,
    "regularizer": "ggpo",
}


@needs_package
def test_a_run_trains_evaluates_resumes_and_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = SMALL | {"train.quantization": "nf4-double"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(["train", "language-model", "--out", str(whole), *flags(settings)]) == 0
    assert "backbone in nf4-double: 36 of 42 adapted layers; 6 stay floats" in (whole / "log.txt").read_text()
    assert run(["train", "language-model", "--out", str(parts), *flags(settings | {"train.steps": 4})]) == 0
    assert run(["train", "--resume", str(parts), "--train.steps", "6"]) == 0
    one, two = (load_file(path / "state" / "step-6" / "state.safetensors") for path in (whole, parts))
    common = [name for name in one if "best" not in name]
    assert len(common) > 200 and all(torch.equal(one[name], two[name]) for name in common)
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert {"sigma", "row_sigma_mean"} <= lines[0].keys() and read_adapter(whole / "adapter")
    capsys.readouterr()
    assert run(["eval", str(whole), "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged == json.loads((whole / "eval.json").read_text())
    assert run(["merge", str(whole), "--out", str(tmp_path / "merged")]) == 0
    assert "trained on the backbone in nf4-double" in capsys.readouterr().out
    with torch.no_grad():
        merged = load_backbone(tmp_path / "merged", task=LM)
        floats = attach_adapter(load_backbone("flatshift-5m", task=LM), Adapter(rank=8), task=LM, seed=0)
        load_adapter(floats, whole / "adapter")
        difference = merged.eval()(input_ids=ids()).logits - floats.eval()(input_ids=ids()).logits
    assert float(difference.abs().max()) < 0.2  # rounding of the stored bf16


@needs_package
def test_a_resumed_run_has_the_same_bits(sources: dict[str, Path]) -> None:
    """Ten steps, and ten with a stop after five: adapter and regularizer state, from whole tensors only."""

    def course(model: Any, regularizer: Any, steps: range, optimizer: Any) -> None:
        for t in steps:
            with regularizer.step(t):
                loss_and_gradients(model)
            optimizer.step()

    ends = []
    for stop in (None, 5):
        model = adapted(sources["llama"], "nf4")
        regularizer: Any = build(GGPO(sigma=0.2, refresh=4)).attach(model, seed=1, total_steps=10)
        optimizer = torch.optim.SGD(trainable(model).values(), lr=1e-2)
        course(model, regularizer, range(stop or 10), optimizer)
        if stop is not None:
            state = {name: tensor.clone() for name, tensor in regularizer.state_dict().items()}
            weights = {name: p.detach().clone() for name, p in trainable(model).items()}
            model = adapted(sources["llama"], "nf4")
            for name, parameter in trainable(model).items():
                parameter.data.copy_(weights[name])
            regularizer = build(GGPO(sigma=0.2, refresh=4)).attach(model, seed=1, total_steps=10)
            regularizer.load_state_dict(state)
            course(model, regularizer, range(stop, 10), torch.optim.SGD(trainable(model).values(), lr=1e-2))
        ends.append(({n: p.detach() for n, p in trainable(model).items()}, regularizer.state_dict()))
    for whole, resumed in zip(*ends, strict=True):
        assert all(torch.equal(whole[name], resumed[name]) for name in whole) and whole.keys() == resumed.keys()


# --------------------------------------------------------------------------------------------- bad input


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"train\.quantization: 'nf5' is not known; take nf4, nf4-double, int8"):
        load_backbone("flatshift-5m", task=LM, quantization="nf5")  # type: ignore[arg-type]
    assert run(["train", "language-model", "--out", str(tmp_path / "x"), "--train.quantization", "nf5"]) == 2
    assert "did you mean 'nf4'?" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_missing_package_is_one_sentence_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else real(name, *a)
    )
    command = ["train", "language-model", "--out", str(tmp_path / "x"), *flags(SMALL), "--train.quantization", "int8"]
    assert run(command) == 2
    error = capsys.readouterr().err
    assert "train.quantization: int8 needs the package bitsandbytes; pip install 'flatshift[quant]'" in error
    assert not (tmp_path / "x").exists()


@needs_package
def test_a_backbone_that_is_quantised_already_or_has_nothing_to_quantise(tmp_path: Path, sources: dict) -> None:
    narrow = save_backbone("llama", tmp_path / "narrow", hidden_size=32, intermediate_size=48)
    with pytest.raises(UserError, match="no linear layer with a multiple of 64 inputs besides its head"):
        load_backbone(narrow, task=LM, quantization="nf4")
    again = tmp_path / "again"
    again.mkdir()
    for file in sources["llama"].iterdir():
        (again / file.name).write_bytes(file.read_bytes())
    config = json.loads((again / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (again / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantised already"):
        load_backbone(again, task=LM, quantization="nf4")


@needs_package
def test_a_layer_repacked_for_inference_is_refused(sources: dict[str, Path]) -> None:
    model = adapted(sources["llama"], "nf4")
    find_lora_sites(model)[0][0].base.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(RegularizerError, match="repacked by bitsandbytes"):
        build(GGPO()).attach(model, seed=0, total_steps=1)


# --------------------------------------------------------------------------------------------- a model of one's own


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_ggpo_reads_what_torchao_quantised(kind: str) -> None:
    """Tensor subclasses that call themselves floats: norms, loss and gradients beside the dequantised matrix."""
    from peft import LoraConfig, get_peft_model
    from torch import nn
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128)).requires_grad_(False)
    if kind == "int8":
        quantize_(model, Int8WeightOnlyConfig())
    else:
        from torchao.quantization import NF4Tensor

        for layer in (model[0], model[2]):
            packed = NF4Tensor.from_tensor(layer.weight.detach(), 64, 256)
            layer.weight = nn.Parameter(packed, requires_grad=False)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))
    x = torch.randn(6, 256)
    regularizer: Any = build(GGPO(sigma=0.3)).attach(peft, seed=1, total_steps=1)
    with regularizer.step(0):
        noise = perturbations(regularizer)
        loss = peft(x).square().mean()
        loss.backward()
    regularizer.detach()
    wanted = x.double()
    sites = find_lora_sites(peft)[0]
    assert len(sites) == 2 and all(is_quantised(site.base) for site in sites)
    leaves = []
    for number, site in enumerate(sites):
        weight = site.base.weight
        value = weight.get_original_weight() if kind == "nf4" else weight.dequantize()
        a, b = (
            part["default"].weight.detach().double().requires_grad_() for part in (site.layer.lora_A, site.layer.lora_B)
        )
        leaves += [(site.layer.lora_A["default"].weight, a), (site.layer.lora_B["default"].weight, b)]
        adapted_weight = value.double() + site.layer.scaling["default"] * b @ a
        norms = adapted_weight.detach().square().sum(1)
        assert float((site.squared_norms(site.factors()).double() / norms - 1).abs().max()) < 1e-6
        wanted = wanted @ (adapted_weight + noise[site.name].double()).T + site.base.bias.double()
        wanted = wanted.relu() if number == 0 else wanted
    wanted.square().mean().backward()
    for parameter, leaf in leaves:
        assert leaf.grad is not None
        assert float((parameter.grad.double() - leaf.grad).norm() / leaf.grad.norm()) < 1e-4
