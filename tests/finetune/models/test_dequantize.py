"""Backbones whose files are quantised: the floats are those of transformers, or of a naive loop over single values
where transformers needs a GPU or another package; in any slices, in one process and in 4 bits, through the command."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor

from flatshift.cli import run
from flatshift.finetune.config import Adapter
from flatshift.finetune.errors import UserError
from flatshift.finetune.models import dequantize
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.checkpoint import read_index
from flatshift.finetune.models.dequantize import find_quantized
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.parallel.layout import TensorParallelLayout
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.parallel.weights import load_weights, materialize
from flatshift.finetune.planner.sizes import read_sizes
from flatshift.finetune.tasks import Classify, LanguageModel
from tests.support.commands import flags
from tests.support.finetune_models import save_backbone
from tests.support.quantized_files import FORMATS, draw, fp8, quantized_copy, rewrite, weights_of, whole_numbers

LM = LanguageModel()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_backbone("llama", tmp_path_factory.mktemp("llama"), hidden_size=64, intermediate_size=128)


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("name", FORMATS)
def test_the_floats_are_those_of_the_format(name: str, llama: Path, tmp_path: Path) -> None:
    settings, pack = FORMATS[name]
    floats = quantized_copy(llama, tmp_path / "packed", settings, pack)
    model = load_backbone(tmp_path / "packed", task=LM)
    assert getattr(model.config, "quantization_config", None) is None
    loaded = model.state_dict()
    assert floats.keys() == loaded.keys()
    for key, value in floats.items():
        assert torch.allclose(loaded[key], value, rtol=1e-6, atol=0), key
    narrow = load_backbone(tmp_path / "packed", task=LM, precision="bf16").state_dict()
    assert all(torch.equal(narrow[key], loaded[key].bfloat16()) for key in floats)


@pytest.mark.parametrize("name", FORMATS)
def test_any_slice_is_a_part_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "_PIECE", 500)  # values of five of these rows
    settings, pack = FORMATS[name]
    parts, floats = pack(draw(48, 96))
    save_file({f"layer.{key}": part.contiguous() for key, part in parts.items()}, tmp_path / "model.safetensors")
    (weight,) = find_quantized(read_index(tmp_path), settings, context="here").values()
    assert weight.shape == (48, 96)
    for rows, columns in ((slice(0, 48), slice(0, 96)), (slice(5, 6), slice(17, 95)), (slice(31, 47), slice(3, 4))):
        assert torch.allclose(weight[rows, columns], floats[rows, columns], rtol=1e-6, atol=0), (rows, columns)
    assert torch.allclose(weight[7:9], floats[7:9], rtol=1e-6, atol=0)


def test_fp8_and_mxfp4_are_as_transformers_reads_them(llama: Path, tmp_path: Path) -> None:
    quantized_copy(llama, tmp_path / "fp8", *FORMATS["fp8"])
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = tf.GptOssConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, **sizes)
    tf.GptOssForCausalLM(config).save_pretrained(tmp_path / "gpt-oss")
    stored = {}
    for name, weight in weights_of(tmp_path / "gpt-oss").items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            count, inputs, outputs = weight.shape
            stored[f"{name}_blocks"] = whole_numbers(256, count, outputs, inputs // 32, 16).to(torch.uint8)
            stored[f"{name}_scales"] = (whole_numbers(20, count, outputs, inputs // 32) + 110).to(torch.uint8)
        else:
            stored[name] = weight
    rewrite(tmp_path / "gpt-oss", tmp_path / "mxfp4", stored, {"quant_method": "mxfp4"})
    readers = {"fp8": tf.FineGrainedFP8Config(dequantize=True), "mxfp4": tf.Mxfp4Config(dequantize=True)}
    for name, reader in readers.items():
        ours = load_backbone(tmp_path / name, task=LM, precision="bf16").state_dict()
        theirs = tf.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, quantization_config=reader, dtype=torch.bfloat16
        ).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name


def test_exponents_stored_as_bytes_and_one_scale_for_all(tmp_path: Path) -> None:
    values = draw(8, 8).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[120, 127], [130, 126]], dtype=torch.uint8)
    wanted = values.float() * (2.0 ** (exponents.float() - 127)).repeat_interleave(4, 0).repeat_interleave(4, 1)
    for scales in (exponents, exponents.view(torch.float8_e8m0fnu)):
        save_file({"a.weight": values, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
        (weight,) = find_quantized(read_index(tmp_path), {"quant_method": "fp8"}, context="here").values()
        assert torch.equal(weight[:], wanted) and torch.equal(weight[3:6, 2:5], wanted[3:6, 2:5])
    save_file({"a.weight": values, "a.weight_scale_inv": torch.tensor(0.5)}, tmp_path / "model.safetensors")
    (weight,) = find_quantized(read_index(tmp_path), {"quant_method": "fp8"}, context="here").values()
    assert torch.equal(weight[2:3, 1:], values.float()[2:3, 1:] / 2)


# --------------------------------------------------------------------------------------------- 4 bits, heads, command


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs the extra `quant` (bitsandbytes)")
@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8"])
def test_quantised_anew_as_the_floats_would_be(kind: Any, llama: Path, tmp_path: Path) -> None:
    floats = quantized_copy(llama, tmp_path / "packed", *FORMATS["gptq"])
    rewrite(llama, tmp_path / "floats", floats, None)
    models = [load_backbone(tmp_path / name, task=LM, quantization=kind) for name in ("packed", "floats")]
    ids = whole_numbers(60, 2, 9)
    with torch.no_grad():
        mine, wanted = (model.eval()(input_ids=ids).logits for model in models)
    assert torch.equal(mine, wanted)
    weights = [model.get_submodule("model.layers.1.mlp.up_proj").weight for model in models]
    assert weights[0].dtype == weights[1].dtype != torch.float32
    assert torch.equal(*(weight.detach().as_subclass(Tensor) for weight in weights))


def test_a_new_head_is_left_to_the_adapter(llama: Path, tmp_path: Path) -> None:
    floats = quantized_copy(llama, tmp_path / "packed", *FORMATS["awq"])
    model = load_backbone(tmp_path / "packed", task=Classify(), label_names=("a", "b"))
    assert model.new_parameters == ("score.weight",)
    assert torch.allclose(model.model.layers[0].mlp.up_proj.weight, floats["model.layers.0.mlp.up_proj.weight"])


def test_a_run_begins_with_quantised_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = open_backbone("flatshift-5m").directory
    quantized_copy(source, tmp_path / "packed", *FORMATS["fp8"])
    settings = {"train.steps": 2, "train.batch_size": 2, "train.max_length": 32, "train.threads": 1}
    settings |= {"train.precision": "fp32", "data.train.limit": 8, "data.dev.limit": 4, "data.test.limit": 4}
    command = ["train", "language-model", "--backbone", str(tmp_path / "packed"), "--out", str(tmp_path / "run")]
    assert run([*command, *flags(settings | {"eval.bootstrap": 20})]) == 0
    capsys.readouterr()
    assert run(["eval", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "run" / "eval.json").read_text())
    assert read_sizes(tmp_path / "packed", Adapter()).elements == read_sizes(source, Adapter()).elements


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "compressed-tensors"},
            r"quantised already \(compressed-tensors\), and a mesh",
        ),
        ({"quant_method": "gptq", "bits": 3}, "quantised with gptq in 3 bits, which is not read here"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "gptq's checkpoint_format marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "awq in 4 bits, version gemv"),
        ({"quant_method": "awq", "group_size": "all"}, "quantised with group_size all"),
        ({"bits": 4}, r"quantised already \(None\)"),
    ],
)
def test_another_format_is_refused(settings: dict[str, Any], message: str, llama: Path, tmp_path: Path) -> None:
    rewrite(llama, tmp_path / "packed", weights_of(llama), settings)
    with pytest.raises(UserError, match=message):
        build_skeleton(tmp_path / "packed", task=LM)


def test_missing_and_ill_shaped_scales_are_refused(llama: Path, tmp_path: Path) -> None:
    settings = FORMATS["fp8"][0]
    quantized_copy(llama, tmp_path / "packed", *FORMATS["fp8"])
    weights = weights_of(tmp_path / "packed")
    del weights["model.layers.0.mlp.up_proj.weight_scale_inv"]
    rewrite(llama, tmp_path / "bare", weights, settings)
    with pytest.raises(UserError, match=r"the scales of model\.layers\.0\.mlp\.up_proj\.weight are not among"):
        build_skeleton(tmp_path / "bare", task=LM)
    del weights["model.layers.0.mlp.down_proj.weight_scale_inv"]
    weights["model.layers.0.mlp.down_proj.weight_scale_inv"] = torch.ones(3, 5)
    rewrite(llama, tmp_path / "ill-shaped", weights, settings)
    with pytest.raises(UserError, match=r"down_proj\.weight_scale_inv and its scales do not fit \(3 scales for 64 val"):
        build_skeleton(tmp_path / "ill-shaped", task=LM)


def test_experts_stored_one_by_one_are_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = tf.MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=2, **sizes)
    tf.MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    stored, floats = {}, {}
    for name, weight in weights_of(tmp_path / "mixtral").items():
        stored[name] = floats[name] = weight
        if re.search(r"\.w[123]\.", name):
            parts, floats[name] = fp8(weight)
            stored |= {name: parts["weight"], f"{name}_scale_inv": parts["weight_scale_inv"]}
    rewrite(tmp_path / "mixtral", tmp_path / "packed", stored, FORMATS["fp8"][0])
    rewrite(tmp_path / "mixtral", tmp_path / "floats", floats, None)
    wanted = load_backbone(tmp_path / "floats", task=LM).state_dict()
    loaded = load_backbone(tmp_path / "packed", task=LM).state_dict()
    skeleton = build_skeleton(tmp_path / "packed", task=LM)
    materialize(skeleton, "cpu")
    load_weights(skeleton, skeleton.checkpoint, layout=TensorParallelLayout(), world=ProcessMesh.alone())
    for name, value in wanted.items():
        assert torch.equal(loaded[name], value) and torch.equal(skeleton.state_dict()[name], value), name
