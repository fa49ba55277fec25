"""A backbone that is built on meta and read in slices is the loaded one, and its files are checked beforehand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.compute.loss import batch_loss
from flatshift.finetune.config import Adapter, Mesh
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.anatomy import transformer_blocks
from flatshift.finetune.models.checkpoint import read_index
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.parallel.fsdp import shard
from flatshift.finetune.parallel.layout import (
    Slice,
    TensorParallelLayout,
    copy_local_part,
    gather_full_tensors,
    local_index_runs,
)
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.parallel.weights import load_weights, materialize
from flatshift.finetune.tasks import Classify, LanguageModel
from tests.support.finetune_models import Micro, save_backbone


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.bf16)])
@pytest.mark.parametrize(
    ("kind", "task"),
    [
        *((kind, LanguageModel()) for kind in ("llama", "gemma2", "gpt2")),
        *((kind, Classify()) for kind in ("llama", "gemma2", "gpt2", "bert", "roberta")),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_a_filled_skeleton_is_the_loaded_backbone(kind, task, precision, tmp_path):
    labels = ("no", "yes", "maybe") if task == Classify() else None
    source = save_backbone(kind, tmp_path)
    before = torch.random.get_rng_state()
    loaded = load_backbone(source, task=task, label_names=labels, precision=precision)
    built = build_skeleton(source, task=task, label_names=labels, precision=precision)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(p.is_meta and not p.requires_grad for p in built.parameters())
    assert built.new_parameters == loaded.new_parameters and built.name_or_path == loaded.name_or_path
    assert built.config.to_dict() == loaded.config.to_dict() and not built.training
    materialize(built, "cpu")
    report = load_weights(built, built.checkpoint, layout=TensorParallelLayout(), world=ProcessMesh.alone())
    assert sorted(report.unread) == list(loaded.new_parameters)
    ours, theirs = built.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    for name in ours.keys() - set(loaded.new_parameters):
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name
    assert [n for n, _ in built.named_parameters()] == [n for n, _ in loaded.named_parameters()]  # the same ties
    for (name, mine), (other, true) in zip(built.named_buffers(), loaded.named_buffers(), strict=True):
        assert name == other and torch.equal(mine, true), name


def test_ties_are_undone_where_the_file_has_two_matrices(tmp_path):
    source = save_backbone("gpt2", tmp_path)
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"] * 2
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    loaded, built = (make(source, task=LanguageModel()) for make in (load_backbone, build_skeleton))
    materialize(built, "cpu")
    load_weights(built, built.checkpoint, layout=TensorParallelLayout(), world=ProcessMesh.alone())
    for model in (loaded, built):
        assert model.lm_head.weight is not model.transformer.wte.weight
        assert torch.equal(model.lm_head.weight, model.transformer.wte.weight * 2)


def test_a_head_for_other_classes_is_new_and_one_for_as_many_is_read(tmp_path):
    source = save_backbone("bert", tmp_path / "plain")
    trained = load_backbone(source, task=Classify(), num_labels=3)
    trained.save_pretrained(tmp_path / "trained")
    same = build_skeleton(tmp_path / "trained", task=Classify(), num_labels=3)
    assert same.new_parameters == ()
    other = build_skeleton(tmp_path / "trained", task=Classify(), num_labels=5)
    assert other.new_parameters == ("classifier.bias", "classifier.weight")
    assert other.new_parameters == load_backbone(tmp_path / "trained", task=Classify(), num_labels=5).new_parameters


def damaged(source: Path, tmp_path: Path, size: str) -> Path:
    copy = tmp_path / "copy"
    load_backbone(source, task=LanguageModel()).save_pretrained(copy, max_shard_size=size)
    return copy


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, f: f.write_bytes(f.read_bytes()[:-9]), r"00002-of.*cut short: it has \d+ of \d+ bytes"),
        (lambda d, f: f.write_bytes(f.read_bytes()[:30]), r"00002-of.*ends in its header"),
        (lambda d, f: f.write_bytes(b"oops"), r"00002-of.*no safetensors file"),
        (lambda d, f: f.write_bytes(b"\x02" + bytes(7) + b"[]"), r"00002-of.*damaged header"),
        (lambda d, f: f.unlink(), r"00002-of.* is missing, though"),
        (
            lambda d, f: f.write_bytes(next(iter(d.glob("*00001-of*"))).read_bytes()),
            r"00002-of.* lacks .*says is in it",
        ),
        (lambda d, f: (d / "model.safetensors.index.json").write_text("{}"), r"index\.json is damaged"),
        (lambda d, f: (d / "model.safetensors.index.json").unlink(), r"has neither"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_is_read(damage, message, llama, tmp_path):
    copy = damaged(llama, tmp_path, "30KB")
    (second,) = copy.glob("*00002-of*")
    damage(copy, second)
    with pytest.raises(UserError, match=message):
        build_skeleton(copy, task=LanguageModel())


def test_incomplete_and_ill_shaped_and_quantised_backbones_are_refused(llama, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    weights = load_file(copy / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, key: weights[key][:5].clone()}, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{key} has another shape"):
        build_skeleton(copy, task=LanguageModel())
    del weights[key]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"lack {key}"):
        build_skeleton(copy, task=LanguageModel())
    config = json.loads((llama / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantised"):
        build_skeleton(copy, task=LanguageModel())


def test_a_file_that_changes_while_it_is_read_is_named(llama, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    built = build_skeleton(copy, task=LanguageModel())
    (copy / "model.safetensors").write_bytes(b"gone")
    materialize(built, "cpu")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read any more"):
        load_weights(built, built.checkpoint, layout=TensorParallelLayout(), world=ProcessMesh.alone())


def test_long_tensors_are_read_in_pieces(llama, monkeypatch):
    from flatshift.finetune.parallel import weights

    monkeypatch.setattr(weights, "_PIECE", 100)
    built, loaded = (make(llama, task=LanguageModel()) for make in (build_skeleton, load_backbone))
    materialize(built, "cpu")
    report = load_weights(built, built.checkpoint, layout=TensorParallelLayout(), world=ProcessMesh.alone())
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), loaded.parameters(), strict=True))
    assert report.bytes == sum(e.bytes for e in read_index(llama).values())


def test_local_parts_follow_fused_runs():
    cut = Slice.part(0, 12, rank=1, width=2, fused=3)
    parameter = nn.Parameter(torch.zeros(6, 4))
    assert local_index_runs(parameter, cut) == [((2, 4), (6, 8), (10, 12)), ((0, 4),)]
    values = torch.arange(48.0).view(12, 4)
    copy_local_part(parameter, values, cut)
    assert torch.equal(parameter, cut.take(values))
    alone = nn.Parameter(values.clone())
    only, layout = {"": alone}, TensorParallelLayout()
    whole = gather_full_tensors(only, parameters=only, layout=layout, world=ProcessMesh.alone())
    assert torch.equal(whole[""], values)


def test_one_rank_shards_nothing(llama):
    model = load_backbone(llama, task=LanguageModel())
    sharding = shard(model, mesh=Mesh(), world=ProcessMesh.alone())
    assert sharding.units == () and sharding.reduced == frozenset() and sharding.group == 1
    assert sharding.local_bytes == sharding.whole_bytes == sum(p.numel() * 4 for p in model.parameters())


def test_recomputing_changes_no_bit_and_keeps_fewer_tensors(llama):
    ids = torch.arange(24).view(2, 12) % 60 + 3
    results = {}
    for mode in ("none", "selective", "full"):
        model = attach_adapter(
            load_backbone(llama, task=LanguageModel()), Adapter(rank=2), task=LanguageModel(), seed=0
        )
        names = [name for name, _ in model.named_parameters()]
        assert checkpoint_activations(model, mode) == {"none": 0, "selective": 2, "full": 2}[mode]
        assert names == [name for name, _ in model.named_parameters()] and len(transformer_blocks(model)) == 2
        kept = 0

        def pack(tensor):
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        results[mode] = (kept, loss.detach(), grads)
        with torch.no_grad():
            model.eval()(input_ids=ids)
    plain = results["none"]
    for mode in ("selective", "full"):
        assert torch.equal(results[mode][1], plain[1])
        assert all(torch.equal(a, b) for a, b in zip(results[mode][2], plain[2], strict=True))
    assert results["full"][0] < results["selective"][0] < plain[0]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_backward_recomputes_by_the_kernels_of_the_forward_pass(llama, mode, monkeypatch):
    """Short rows in bf16 have a kernel of attention of their own, named around the forward pass alone."""
    monkeypatch.setattr("flatshift.finetune.compute.numerics.has_bf16_matmul", lambda: True)
    task = LanguageModel(pack=False)
    ids = torch.arange(24).view(2, 12) % 60 + 3
    batch = Micro({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids, 22, 2)
    results = []
    for chosen in ("none", mode):
        model = attach_adapter(load_backbone(llama, task=task), Adapter(rank=2), task=task, seed=0).train()
        checkpoint_activations(model, chosen)
        with torch.autocast("cpu", torch.bfloat16):
            loss = batch_loss(model, batch, task=task)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_selective_needs_attention_modules():
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(UserError, match="take full"):
        checkpoint_activations(Strange(), "selective")
