"""Merging file by file gives the model that PEFT's merge in memory gives, and never holds a whole file."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from flatshift.cli import run
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows.export import export_run, merge_run
from flatshift.experiments.workflows.folder_check import draw_inputs, read_run_rows
from flatshift.experiments.workflows.model_card import _hub_dataset_names
from flatshift.finetune.adapters.adapter import attach_adapter, save_adapter, trainable
from flatshift.finetune.adapters.merge import merge_files, read_changes, spot_check
from flatshift.finetune.config import Adapter
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.tasks import Classify, LanguageModel, Task
from tests.support.commands import flags
from tests.support.data_models import byte_tokenizer, write_jsonl
from tests.support.finetune_models import save_backbone
from tests.support.run_records import record_anew
from tests.support.seq2seq_models import TOKENIZER, save_encoder_decoder

LABELS = ("a", "b", "c")
ROWS = torch.tensor([[3, 9, 4, 11, 7], [8, 3, 5, 6, 12]])


def trained(directory: Path, task: Task, adapter: Adapter, out: Path) -> torch.nn.Module:
    """A saved adapter whose every tensor is away from its start, on the backbone in `directory`."""
    names = LABELS if isinstance(task, Classify) else None
    model = attach_adapter(load_backbone(directory, task=task, label_names=names), adapter, task=task, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_adapter(model, out)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "task", "adapter", "files"),
    [
        ("llama", LanguageModel(), Adapter(rank=3), 3),
        ("llama", Classify(), Adapter(rank=3, rslora=True), 1),
        ("llama", LanguageModel(), Adapter(rank=3, dora=True), 1),
        ("gpt2", LanguageModel(), Adapter(rank=3), 1),
        ("gpt2", LanguageModel(), Adapter(rank=3, dora=True), 2),
        ("gpt2", LanguageModel(), Adapter(rank=3, targets=("wte", "c_attn")), 1),
        ("gpt2", LanguageModel(), Adapter(rank=3, targets=("lm_head", "c_fc")), 1),
        ("gpt2", LanguageModel(), Adapter(rank=3, targets=("wte", "lm_head", "c_fc")), 2),
        ("gpt2", LanguageModel(), Adapter(rank=3, dora=True, targets=("wte", "c_attn")), 1),
        ("gpt2", LanguageModel(), Adapter(rank=3, bias="all"), 1),
        ("bert", Classify(), Adapter(rank=3), 1),
    ],
    ids=[
        "sharded",
        "head",
        "dora",
        "conv1d",
        "conv1d-dora",
        "tied-embedding",
        "tied-head",
        "tied-both",
        "dora-embedding",
        "biases",
        "pooler",
    ],
)
def test_equal_to_a_merge_in_memory(tmp_path: Path, kind: str, task: Task, adapter: Adapter, files: int) -> None:
    source, saved, out = tmp_path / "source", tmp_path / "adapter", tmp_path / "out"
    save_backbone(kind, source)
    if files > 1:
        split(source, files)
    model = trained(source, task, adapter, saved)
    names = LABELS if isinstance(task, Classify) else None
    skeleton = build_skeleton(source, task=task, label_names=names)
    out.mkdir()
    merged = merge_files(skeleton, saved, out, dtype=torch.float32)
    assert set(merged.rounding.by_dtype) == {"float32"} and len(merged.changed) >= 2
    assert merged.rounding.by_dtype["float32"]["relative"] <= 2**-24
    skeleton.config.save_pretrained(out)
    auto = AutoModelForSequenceClassification if names else AutoModelForCausalLM
    again, report = auto.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        exact, found = model(ROWS).logits, again.eval()(ROWS).logits
    assert (exact - found).abs().max() <= 2e-5 * exact.abs().max()
    assert spot_check(skeleton, out, read_changes(skeleton, saved)[0]) < 1e-5
    assert len(list(out.glob("*.safetensors"))) == files
    before = {key for file in source.glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118
    after = {key for file in out.glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118
    if isinstance(task, LanguageModel):
        assert before <= after


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_weight_is_the_rounded_sum_and_the_largest_rounding_is_said(tmp_path: Path, dtype: torch.dtype) -> None:
    """Against W + sBA of the whole matrix in float64, bit for bit, with the largest distance found on the way."""
    source, saved, out = tmp_path / "source", tmp_path / "adapter", tmp_path / "out"
    save_backbone("llama", source)
    tensors = keep_in(source, dtype)
    split(source, 2)
    trained(source, LanguageModel(), Adapter(rank=3, alpha=5), saved)
    out.mkdir()
    merged = merge_files(build_skeleton(source, task=LanguageModel()), saved, out, dtype=dtype)
    written = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    factors = load_file(saved / "adapter_model.safetensors")
    worst = 0.0
    for name, before in tensors.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in factors:
            assert torch.equal(written[name], before)
            continue
        product = factors[f"{stem}.lora_B.weight"].double() @ factors[f"{stem}.lora_A.weight"].double()
        exact = before.double() + 5 / 3 * product
        torch.testing.assert_close(written[name], exact.to(dtype), rtol=0, atol=1e-15 if dtype == torch.float64 else 0)
        worst = max(worst, float((written[name].double() - exact).abs().max()))
    said = merged.rounding.by_dtype[str(dtype).removeprefix("torch.")]["largest"]
    assert said == pytest.approx(worst, rel=1e-9, abs=1e-15) and said < torch.finfo(dtype).eps * 4
    assert (said > 0) == (dtype != torch.float64)


def test_a_weight_beyond_the_dtype_is_refused(tmp_path: Path) -> None:
    source, saved, out = tmp_path / "source", tmp_path / "adapter", tmp_path / "out"
    save_backbone("llama", source)
    keep_in(source, torch.float16)
    trained(source, LanguageModel(), Adapter(rank=3), saved)
    factors = {name: tensor * 3000 for name, tensor in load_file(saved / "adapter_model.safetensors").items()}
    save_file(factors, saved / "adapter_model.safetensors", {"format": "pt"})
    out.mkdir()
    with pytest.raises(UserError, match="not finite numbers in float16"):
        merge_files(build_skeleton(source, task=LanguageModel()), saved, out, dtype=torch.float16)


@pytest.mark.parametrize("init", ["default", pytest.param("pissa", marks=pytest.mark.slow)])
def test_a_run_merges_by_files_to_what_peft_merges(tmp_path: Path, init: str) -> None:
    """PiSSA too: what it took out of the frozen weights is in the saved adapter. It says how far rounding moved."""
    source, out = tmp_path / "source", tmp_path / "run"
    save_backbone("llama", source, vocab_size=352)
    keep_in(source, torch.bfloat16)
    byte_tokenizer().save_pretrained(source)
    rows = [{"text": f"the cat sat on {i} mats"} for i in range(12)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    settings = {
        "backbone": source,
        "adapter.init": init,
        "data.train.files": f"[{tmp_path / 'rows.jsonl'}]",
        "data.dev.files": "[]",
        "data.test.files": "[]",
        "train.steps": 2,
        "train.batch_size": 2,
        "train.max_length": 24,
        "train.max_cut": 1,
        "train.threads": 1,
        "train.precision": "fp32",
        "optimizer.lr": 0.02,
        "eval.bootstrap": 5,
    }
    words = flags(settings)
    assert run(["train", "language-model", "--out", str(out), *words]) == 0
    result = merge_run(out, tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, out / "adapter").merge_and_unload().eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16).eval()
    for name, exact in peft.named_parameters():
        found = merged.get_parameter(name).double()
        assert float((found - exact.double()).abs().max()) <= 2**-8 * float(exact.abs().max()), name
    assert 0 < result["rounding"]["bfloat16"]["relative"] <= 2**-8
    assert result["largest_rounding"] is not None, "merged file by file"
    assert 0 < result["max_logit_difference"] < 0.05 * result["largest_logit"]
    assert not result["drawn"]
    if init == "default":
        copied_elsewhere(out, tmp_path)
    file = out / "adapter" / "adapter_config.json"  # as PEFT alone saves what PiSSA began
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "init_lora_weights": "pissa"}))
    record_anew(out)
    for give in (merge_run, export_run):
        with pytest.raises(UserError, match="begun by pissa and saved for changed frozen weights"):
            give(out, tmp_path / "earlier")
    assert not (tmp_path / "earlier").exists()


def copied_elsewhere(out: Path, folder: Path) -> None:
    """Without its data a run merges all the same, and logits are compared on drawn tokens."""
    (folder / "rows.jsonl").rename(folder / "gone.jsonl")
    again = merge_run(out, folder / "elsewhere")
    assert again["drawn"] and again["rows"] == 8 and 0 < again["max_logit_difference"] < 0.05 * again["largest_logit"]


def test_rows_that_are_all_left_out_are_no_rows_to_compare(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": ""}])
    files = {"data.train.files": f"[{tmp_path / 'a.jsonl'}]", "data.bad_rows": "skip", "task.kind": "language-model"}
    recipe = load_recipe(None, [from_override(key, value) for key, value in files.items()]).recipe
    with pytest.raises(UserError, match=rf"no row of the run's files is left, the first for {tmp_path}/a.jsonl:1: the"):
        read_run_rows(recipe, None)


@pytest.mark.parametrize(("kind", "task"), [("t5", "seq2seq"), ("t5", "classify"), ("bart", "classify")])
def test_drawn_rows_go_through_encoder_decoders(tmp_path: Path, kind: str, task: str) -> None:
    source = save_encoder_decoder(kind, tmp_path)
    settings = {"backbone": str(source), "task.kind": task, "train.max_length": "9"}
    recipe = load_recipe(None, [from_override(key, value) for key, value in settings.items()]).recipe
    model = load_backbone(source, task=recipe.task, label_names=LABELS if task == "classify" else None).eval()
    inputs = draw_inputs(recipe, TOKENIZER, model.config)
    assert inputs["input_ids"].shape == (8, 9) and model(**inputs).logits.shape[0] == 8
    assert not set(inputs["input_ids"][:, :-1].flatten().tolist()) & set(TOKENIZER.all_special_ids)


def test_rows_to_compare_come_from_sources_with_their_own_columns(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(save_backbone("llama", tmp_path / "source", vocab_size=352))
    write_jsonl(tmp_path / "a.jsonl", [{"body": "the cat sat"}, {"body": "on a mat"}])
    settings = {
        "backbone": str(tmp_path / "source"),
        "task.kind": "language-model",
        "data.train.sources.a.files": f"[{tmp_path / 'a.jsonl'}]",
        "data.train.sources.a.columns.text": "body",
        "data.train.sources.b.files": '["hub:org/texts[en]@abc:train", "hub:org/texts[de]:train", "hub:other"]',
        "data.holdout": "0.4",
    }
    recipe = load_recipe(None, [from_override(key, value) for key, value in settings.items()]).recipe
    rows = read_run_rows(only(recipe, "a"), None)
    assert [row.id for row, _ in rows] == ["a/0-0", "a/0-1"]
    assert _hub_dataset_names(recipe) == ["org/texts", "other"]


def only(recipe: Recipe, name: str) -> Recipe:
    assert recipe.data.train.sources is not None
    train = dataclasses.replace(recipe.data.train, sources={name: recipe.data.train.sources[name]})
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train=train))


def test_a_backbone_quantised_in_its_own_files_is_refused(tmp_path: Path) -> None:
    source = save_backbone("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    finished = tmp_path / "run"
    (finished / "adapter").mkdir(parents=True)
    (finished / "eval.json").write_text("{}", encoding="utf-8")
    record_anew(finished)
    (finished / "recipe.resolved.yaml").write_text(f"backbone: {source}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"quantised in its own files.*flatshift export"):
        merge_run(finished, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def keep_in(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rewrite model.safetensors in `dtype`; returns its tensors."""
    file = directory / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return tensors


def split(directory: Path, files: int) -> None:
    """Spread model.safetensors over `files` files with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {key: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, key in enumerate(sorted(tensors))}
    for file in sorted(set(places.values())):
        save_file({k: t for k, t in tensors.items() if places[k] == file}, directory / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.slow
def test_the_memory_is_that_of_some_rows(tmp_path: Path) -> None:
    """A backbone of 110 MB in three files, bf16, merged within 50 MB of anonymous memory beyond the imports."""
    source, saved, out = tmp_path / "source", tmp_path / "adapter", tmp_path / "out"
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 36000}
    save_backbone("llama", source, **sizes, num_attention_heads=8, num_key_value_heads=8)
    keep_in(source, torch.bfloat16)
    weights = (source / "model.safetensors").stat().st_size
    split(source, 3)
    trained(source, LanguageModel(), Adapter(rank=4), saved)
    out.mkdir()
    code = """
import sys
from pathlib import Path
import torch
from benchmarks._harness import PeakMemory
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.adapters.merge import merge_files
from flatshift.finetune.models.meta import build_skeleton
source, saved, out = map(Path, sys.argv[1:])
model = build_skeleton(source, task=LanguageModel())
with PeakMemory() as peak:
    merge_files(model, saved, out, dtype=torch.bfloat16)
print(peak.bytes)
"""
    command = [sys.executable, "-c", code, str(source), str(saved), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert weights > 100e6 and len(list(out.glob("*.safetensors"))) == 3
    assert int(done.stdout) < 50e6, f"{int(done.stdout) / 1e6:.0f} MB"
