"""Tensor parallelism equals the whole model: loss, first gradients, logits and generation, on 2 and 4 processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from flatshift.finetune.compute.memory import slice_rows
from flatshift.finetune.config import Mesh
from flatshift.finetune.models.anatomy import vocabulary_size
from flatshift.finetune.models.checkpoint import CheckpointFiles, canonical_name
from flatshift.finetune.models.meta import empty_model
from flatshift.finetune.parallel.layout import TensorParallelLayout
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.parallel.tensor import VocabularySlice, borders, tensor_parallel
from flatshift.finetune.parallel.weights import load_weights, materialize
from tests.support.distributed_ranks import run_ranks
from tests.support.tensor_models import KINDS, VOCABULARY, adapted, backbone, inputs

READ = {
    "gpt2": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
    "bert-masked": "AutoModelForMaskedLM",
    "llama-uneven": "AutoModelForCausalLM",
    "vit": "AutoModelForImageClassification",
}
WHOLE_TOKENS = ("t5", "t5-gated", "vit", "nemotron")
SLOW = (
    "nemotron",
    "smollm3",
    "olmo",
    "starcoder2",
    "helium",
    "arcee",
    "seed_oss",
    "ministral",
    "ernie4_5",
    "glm4",
    "exaone4",
)


GENERATING = ("llama", "gpt2", "t5", "gemma3", "llama-one-key", "qwen2-three-keys", "gpt2-uneven", "olmo2", "phi")


def _world() -> ProcessMesh:
    return ProcessMesh.of(Mesh(tp=dist.get_world_size()), torch.device("cpu"))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            grads[canonical_name(name)] = parameter.grad.detach().clone()
        else:
            assert parameter.grad is None, name
    return grads


def _summed(grads: dict[str, Tensor], layout: TensorParallelLayout) -> dict[str, Tensor]:
    for name in sorted(layout.partial):
        dist.all_reduce(grads[name])
    return grads


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def _compare(
    kind: str,
    *,
    world: ProcessMesh,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    checkpoint: bool = False,
) -> dict[str, float]:
    """Worst relative differences from the whole model, of which every rank makes its own copy."""
    whole = adapted(kind).to(dtype)
    local = copy.deepcopy(whole)
    trains = {canonical_name(n): p.requires_grad for n, p in whole.named_parameters()}
    batch = {name: v.to(dtype) if v.is_floating_point() else v for name, v in inputs(kind).items()}
    loss = _step(whole, batch)
    layout = tensor_parallel(local, world=world, sequence_parallel=sequence_parallel)
    assert {canonical_name(n): p.requires_grad for n, p in local.named_parameters()}.items() <= trains.items()
    assert kind == "vit" or vocabulary_size(local) == vocabulary_size(whole)  # batches are made by it
    if checkpoint:
        local.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    own_loss = _step(local, batch)
    wanted, grads = _gradients(whole), _summed(_gradients(local), layout)
    assert wanted.keys() == grads.keys()
    errors = [abs(float(own_loss - loss)) / float(loss)]
    worst = 0.0
    for name, grad in wanted.items():
        part = layout.slices[name].take(grad) if name in layout.slices else grad
        assert float(grad.abs().max()) > 1e-6, name
        assert layout.shape(name, grads[name].shape) == tuple(grad.shape)
        worst = max(worst, float((grads[name] - part).norm() / part.norm()))
    whole.eval(), local.eval()
    with torch.no_grad():
        a, b = whole(**batch).logits, local(**batch).logits
    same = [torch.empty_like(b) for _ in range(world.size)]
    dist.all_gather(same, b)
    assert all(torch.equal(b, other) for other in same)
    assert a.shape == b.shape
    return {"loss": errors[0], "grads": worst, "logits": float((a - b).norm() / a.norm())}


def every_model(kinds: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Both precisions: float32 is what users compare, float64 tells a wrong term from rounding."""
    world = _world()
    report = {}
    for kind in kinds:
        report[kind] = _compare(kind, world=world)
        report[f"{kind}, exact"] = _compare(kind, world=world, dtype=torch.float64)
        if kind not in WHOLE_TOKENS:
            report[f"{kind}, tokens"] = _compare(kind, world=world, sequence_parallel=True)
    report["llama, tokens, recomputed"] = _compare("llama", world=world, sequence_parallel=True, checkpoint=True)
    report["t5, recomputed"] = _compare("t5", world=world, checkpoint=True)
    return report


def _judge(results: list[dict[str, dict[str, float]]]) -> None:
    for report in results:
        for kind, errors in report.items():
            for what, error in errors.items():
                assert error <= (1e-7 if "exact" in kind else 1e-5), (kind, what, error)


def test_two_ranks_equal_the_whole_model() -> None:
    _judge(run_ranks(every_model, 2, tuple(kind for kind in KINDS if kind not in SLOW)))


@pytest.mark.slow
def test_two_ranks_equal_the_whole_model_in_more_families() -> None:
    _judge(run_ranks(every_model, 2, SLOW))


@pytest.mark.slow
def test_four_ranks_equal_the_whole_model() -> None:
    kinds = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "t5", "bert", "vit")
    kinds += ("llama-one-key", "qwen2-three-keys", "llama-uneven", "gpt2-uneven", "phi3", "olmo2", "granite")
    _judge(run_ranks(every_model, 4, kinds))


# --------------------------------------------------------------------------------------------- the rest, on one spawn


def rest(saved: dict[str, str]) -> dict[str, Any]:
    world = _world()
    return {
        "generation": {kind: _generation(kind, world) for kind in GENERATING},
        "meta": [_meta(kind, world) for kind in ("llama-tied", "gpt2", "t5", "bert-masked", "llama-uneven", "phi3")],
        "vocabulary": _vocabulary(world),
        "traffic": {mode: _traffic(world, sequence_parallel=mode) for mode in (False, True)},
        "second": _second_call(world),
        "curvature": _curvature(world),
        "loaded": {kind: _loaded(kind, Path(folder), world) for kind, folder in saved.items()},
        "stages": _stages(world),
    }


def _generation(kind: str, world: ProcessMesh) -> tuple[list, list]:
    whole = adapted(kind).eval()
    local = copy.deepcopy(whole)
    tensor_parallel(local, world=world, sequence_parallel=kind not in WHOLE_TOKENS)
    batch = {k: v for k, v in inputs(kind).items() if k != "labels"}
    if kind != "t5":  # decoder-only models are asked with the padding on the left
        batch = {k: v.flip(1) for k, v in batch.items()}
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    return whole.generate(**batch, **settings).tolist(), local.generate(**batch, **settings).tolist()


def _meta(kind: str, world: ProcessMesh) -> bool:
    """The cut is the same on the meta device, and tied weights stay one parameter."""
    real, meta = adapted(kind), adapted(kind, meta=True)
    cut = [tensor_parallel(model, world=world) for model in (real, meta)]
    shapes = [{n: (p.shape, p.requires_grad) for n, p in model.named_parameters()} for model in (real, meta)]
    plain = [m for m in meta.modules() if "bias" in vars(m)]
    assert all(not m.bias.any() and m.bias.device.type == "cpu" for m in plain)
    if kind == "llama-tied":
        assert meta.base_model.model.lm_head.weight is meta.base_model.model.model.embed_tokens.weight
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= cut[1].slices.keys()
    has_row_biases = kind in ("gpt2", "bert-masked")
    return cut[0] == cut[1] and shapes[0] == shapes[1] and bool(plain) == (world.rank > 0 and has_row_biases)


def _vocabulary(world: ProcessMesh) -> dict[str, float]:
    """Float32 with a bias, against float64 over the whole vocabulary, of which the last rank has fewer tokens."""
    generator = torch.Generator().manual_seed(4)
    n, width, size = 576, 16, 7281
    hidden = torch.randn(n, width, generator=generator, requires_grad=True)
    weight, bias = torch.randn(size, width, generator=generator) * 2, torch.randn(size, generator=generator)
    targets = torch.randint(size, (n,), generator=generator)
    exact = F.cross_entropy(hidden.double() @ weight.double().T + bias.double(), targets, reduction="sum")
    (wanted,) = torch.autograd.grad(exact * 0.5, hidden)
    rows = -(-size // world.size)
    assert 0 < n % slice_rows(rows, "cpu", 4) < n  # several slices, the last a part of one
    assert slice_rows(rows - 1, "cpu", 4) == n // 2  # fewer, if the last rank took its own number of tokens
    start = rows * world.rank
    stop = min(start + rows, size)
    linear = nn.Linear(width, stop - start).requires_grad_(False)
    linear.weight.copy_(weight[start:stop])
    linear.bias.copy_(bias[start:stop])
    tokens = VocabularySlice(start, stop, size, world.group("tp"))
    loss = tokens.cross_entropy(hidden, linear, targets)
    (got,) = torch.autograd.grad(loss * 0.5, hidden)
    empty = tokens.cross_entropy(hidden[:0], linear, targets[:0])
    return {
        "loss": float((loss - exact).detach().abs() / exact.detach()),
        "grad": float((got - wanted).norm() / wanted.norm()),
        "empty": float(empty.detach()),
    }


def _traffic(world: ProcessMesh, *, sequence_parallel: bool) -> dict[str, int]:
    """Elements that the collectives of one step move by name, embedding and head apart."""
    rows, tokens, blocks = 2, 8, 4
    model = adapted("llama", num_hidden_layers=blocks)
    model.get_input_embeddings().register_forward_hook(lambda m, a, out: out.requires_grad_())
    tensor_parallel(model, world=world, sequence_parallel=sequence_parallel)
    moved: dict[str, int] = {}
    places = {"all_reduce": (dist, "all_reduce")}
    places |= {name: (borders, f"_{name}") for name in ("all_gather", "reduce_scatter")}
    real = {name: getattr(*place) for name, place in places.items()}

    def count(name: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            size = max(a.numel() for a in args if isinstance(a, Tensor))
            moved[f"{name} {size}"] = moved.get(f"{name} {size}", 0) + 1
            return real[name](*args, **kwargs)

        return counted

    for name, place in places.items():
        setattr(*place, count(name))
    try:
        _step(model, inputs("llama", rows=rows, tokens=tokens))
    finally:
        for name, place in places.items():
            setattr(*place, real[name])
    return moved


def _second_call(world: ProcessMesh) -> str:
    model = adapted("llama")
    tensor_parallel(model, world=world)
    try:
        tensor_parallel(model, world=world)
    except RuntimeError as error:
        return str(error)
    return ""


def _curvature(world: ProcessMesh) -> float:
    """A Hessian-vector product of one local B equals the whole model's."""
    whole = adapted("qwen2", attn_implementation="eager")
    local = copy.deepcopy(whole)
    layout = tensor_parallel(local, world=world)
    products = []
    for model in (whole, local):
        b = dict(model.named_parameters())["base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"]
        (grad,) = torch.autograd.grad(model(**inputs("qwen2")).loss, b, create_graph=True)
        direction = torch.ones_like(b)
        inner = (grad * direction).sum()
        if model is local:
            inner = borders.reduce_from_tp(inner, dist.group.WORLD)
        products.append(torch.autograd.grad(inner, b)[0])
    wanted = layout.slices["model.layers.1.mlp.up_proj.lora_B.weight"].take(products[0])
    return float((products[1] - wanted).norm() / wanted.norm())


def _loaded(kind: str, folder: Path, world: ProcessMesh) -> float:
    """Cut on meta and then read from a file, the backbone gives the logits of the whole one."""
    whole = backbone(kind)
    cut = empty_model(getattr(transformers, READ[kind]), folder, dtype=torch.float32).requires_grad_(False)
    checkpoint = CheckpointFiles.of(cut, folder)
    layout = tensor_parallel(cut, world=world)
    materialize(cut, world.device)
    load_weights(cut, checkpoint, layout=layout, world=world)
    batch = inputs(kind)
    with torch.no_grad():
        a, b = whole(**batch).logits, cut(**batch).logits
    return float((a - b).norm() / a.norm())


class _Through(nn.Module):
    """What stands where another pipeline stage's module was."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def _stages(world: ProcessMesh) -> dict[str, float]:
    """Two pipeline stages in one container."""
    whole = adapted("llama")
    container = nn.Module()
    for stage in range(2):
        part = copy.deepcopy(whole)
        base = part.get_base_model()
        base.model.layers[1 - stage] = _Through()
        if stage:
            base.model.embed_tokens = _Through()
        else:
            base.model.norm = base.lm_head = _Through()
        container.add_module(f"part{stage}", part)
    layout = tensor_parallel(container, world=world)
    batch = inputs("llama")
    loss = _step(whole, batch)
    labels, ids = batch.pop("labels"), batch.pop("input_ids")
    border = container.part0.get_base_model().model(input_ids=ids, **batch).last_hidden_state
    own_loss = container.part1(inputs_embeds=border, labels=labels, **batch).loss
    own_loss.backward()
    wanted, grads = _gradients(whole), _summed(_gradients(container), layout)
    assert wanted.keys() == grads.keys()
    parts = {name: layout.slices[name].take(g) if name in layout.slices else g for name, g in wanted.items()}
    worst = max(float((grads[name] - part).norm() / part.norm()) for name, part in parts.items())
    return {"loss": abs(float(own_loss.detach() - loss)) / float(loss), "grads": worst}


def test_generation_loading_vocabulary_traffic_and_stages(tmp_path: Path) -> None:
    saved = {kind: str(tmp_path / kind) for kind in READ}
    for kind, folder in saved.items():
        backbone(kind).save_pretrained(folder)
    rows, tokens, width, blocks = 2, 8, 32, 4
    hidden = rows * tokens * width
    for result in run_ranks(rest, 2, saved):
        for kind, (wanted, got) in result["generation"].items():
            assert wanted == got, kind
        assert all(result["meta"])
        assert result["vocabulary"]["loss"] <= 1e-6
        assert result["vocabulary"]["grad"] <= 1e-6
        assert result["vocabulary"]["empty"] == 0
        # a block: two all-reduces forward, two backward, of b·s·h; the embedding and the head's input one each
        plain = {f"all_reduce {hidden}": 4 * blocks + 2, f"all_gather {rows * tokens * VOCABULARY}": 1}
        assert result["traffic"][False] == plain
        by_tokens = {
            f"all_gather {hidden}": 4 * blocks + 2,
            f"reduce_scatter {hidden}": 4 * blocks,
            f"all_reduce {hidden}": 2,
            f"all_gather {rows * tokens * VOCABULARY}": 1,
        }
        assert result["traffic"][True] == by_tokens
        assert all(error <= 1e-5 for error in result["loaded"].values()), result["loaded"]
        assert "already" in result["second"]
        assert result["curvature"] <= 1e-5
        assert all(error <= 1e-5 for error in result["stages"].values())


def test_one_rank_changes_nothing() -> None:
    model = adapted("llama")
    before = dict(model.named_modules())
    layout = tensor_parallel(model, world=ProcessMesh.alone())
    assert layout == TensorParallelLayout()
    assert dict(model.named_modules()) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bert", "roberta", "vit", "llama-classify")])
def test_models_of_these_tests_have_live_logits(kind: str) -> None:
    """A parity test of a model that ignores its input would show nothing."""
    model = backbone(kind)
    batch = inputs(kind)
    other = {**batch, "input_ids": batch["input_ids"].roll(1, 0)}
    with torch.no_grad():
        assert (model(**batch).logits - model(**other).logits).abs().max() > 0.05
