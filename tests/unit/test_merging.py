"""Merging file by file gives the model that PEFT's merge in memory gives, and never holds a whole file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from finetune.adapter import attach_adapter, save_adapter, trainable
from finetune.backbone import load_backbone
from finetune.config import Adapter, Classify, LanguageModel, Task
from finetune.merging import merge_files, read_changes, spot_check
from finetune.parallel.skeleton import build_skeleton
from tests.finetune_models import save_backbone

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
        ("bert", Classify(), Adapter(rank=3), 1),
    ],
    ids=["sharded", "head", "dora", "conv1d", "conv1d-dora", "tied-embedding", "tied-head", "pooler"],
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
    merge_files(skeleton, saved, out, dtype=torch.float32)
    skeleton.config.save_pretrained(out)
    auto = AutoModelForSequenceClassification if names else AutoModelForCausalLM
    again, report = auto.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        exact, found = model(ROWS).logits, again.eval()(ROWS).logits
    assert (exact - found).abs().max() <= 2e-5 * exact.abs().max()
    assert spot_check(skeleton.checkpoint, out, read_changes(skeleton, saved)[0]) < 1e-5
    assert len(list(out.glob("*.safetensors"))) == files
    before = {key for file in source.glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118
    after = {key for file in out.glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118
    if isinstance(task, LanguageModel):
        assert before <= after


def split(directory: Path, files: int) -> None:
    """Spread model.safetensors over `files` files with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {key: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, key in enumerate(sorted(tensors))}
    for file in sorted(set(places.values())):
        save_file({k: t for k, t in tensors.items() if places[k] == file}, directory / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_memory_is_that_of_some_rows(tmp_path: Path) -> None:
    """A backbone of 110 MB in one file, bf16, merged within 50 MB of anonymous memory beyond the imports."""
    source, saved, out = tmp_path / "source", tmp_path / "adapter", tmp_path / "out"
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 36000}
    save_backbone("llama", source, dtype="bfloat16", **sizes, num_attention_heads=8, num_key_value_heads=8)
    trained(source, LanguageModel(), Adapter(rank=4), saved)
    out.mkdir()
    code = """
import sys
from pathlib import Path
import torch
from benchmarks._harness import PeakMemory
from finetune.config import LanguageModel
from finetune.merging import merge_files
from finetune.parallel.skeleton import build_skeleton
source, saved, out = map(Path, sys.argv[1:])
model = build_skeleton(source, task=LanguageModel())
with PeakMemory() as peak:
    merge_files(model, saved, out, dtype=torch.bfloat16)
print(peak.bytes)
"""
    command = [sys.executable, "-c", code, str(source), str(saved), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (source / "model.safetensors").stat().st_size > 100e6
    assert int(done.stdout) < 50e6, f"{int(done.stdout) / 1e6:.0f} MB"
