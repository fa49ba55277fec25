"""The closed form of activations beside a trace: the real model and PEFT's own LoRA on fake tensors, nothing computed.

Two and four blocks at three lengths: their difference is a block, and the parabola through the lengths parts what is of
the adapters' copies (constant), of tokens (linear) and of pairs of tokens, of which there must be nothing: rows padded
on the right take the kernel's own causal mask (`flatshift.finetune.compute.attention`), so no mask is made here either.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.plan_validation import RESERVED, loop_gigabytes
from flatshift.finetune.compute.numerics import without_input_casts
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Adapter, Mesh, Train
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.planner.footprint import predict_footprint
from flatshift.finetune.planner.sizes import KNOWN, BackboneSizes

_SMALL = {"vocab_size": 5000, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama": KNOWN["llama-3.2-3b"],
    "llama, as many keys as queries": KNOWN["llama-2-7b"],
    "mistral": KNOWN["mistral-7b"],
    "qwen2": KNOWN["qwen2.5-0.5b"],
    "qwen3": {**_SMALL, "model_type": "qwen3", "intermediate_size": 3072, "head_dim": 128},
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 5000},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    },
}
LENGTHS = (256, 512, 1024)


def _model(shape: Mapping[str, Any], blocks: int) -> Any:
    config = transformers.CONFIG_MAPPING[shape["model_type"]].from_dict({**shape, "num_hidden_layers": blocks})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def _sizes(shape: Mapping[str, Any], blocks: int, adapter: Adapter) -> BackboneSizes:
    model = _model(shape, blocks)
    return BackboneSizes.of(
        model.config.to_dict(), {name: tuple(p.shape) for name, p in model.named_parameters()}, adapter
    )


@contextlib.contextmanager
def _no_mask() -> Iterator[None]:
    usual = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionMaskInterface.register("sdpa", lambda **how: None)
    try:
        yield
    finally:
        transformers.AttentionMaskInterface.register("sdpa", usual)


def _saved(shape: Mapping[str, Any], blocks: int, tokens: int, adapter: Adapter, train: Train) -> int:
    """Bytes that autograd keeps of one row."""
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    stacked = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")] if adapter.experts is not None else None
    config = peft.LoraConfig(
        r=adapter.rank, target_modules=adapter.targets, task_type="CAUSAL_LM", target_parameters=stacked
    )
    model: Any = peft.get_peft_model(_model(shape, blocks).to(dtype), config, low_cpu_mem_usage=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    checkpoint_activations(model, train.checkpointing)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        kept = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage  # held, so that no other gets its place
            return tensor.detach()

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with autocast(train, torch.device("cpu")), without_input_casts(model, train), hooks, _no_mask():
            logits = model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False).logits
        assert logits.shape[1] == tokens
        return sum(storage.nbytes() for storage in kept.values())


def _cases() -> list[Any]:
    """All families in bf16, each way and precision once for Llama; the rest is slow."""
    cases = []
    for name, how, precision in itertools.product(SHAPES, ("none", "selective", "full"), ("bf16", "fp32")):
        if name == "gpt2" and precision == "bf16":  # a CPU's autocast keeps LayerNorm in bf16, a CUDA device's does not
            continue
        quick = (
            name == "gpt2"
            or (how, precision) == ("none", "bf16")
            or (name == "llama" and (how != "none") != (precision == "fp32"))
        )
        cases.append(pytest.param(name, how, precision, marks=() if quick else pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("name", "checkpointing", "precision"), _cases())
def test_a_block_keeps_what_the_trace_says(name: str, checkpointing: Any, precision: Any) -> None:
    shape, adapter = SHAPES[name], Adapter(rank=16)

    def trained(tokens: int) -> Train:
        return Train(precision=precision, checkpointing=checkpointing, max_length=tokens, batch_size=1)

    def closed(blocks: int, tokens: int) -> int:
        sizes = _sizes(shape, blocks, adapter)
        return predict_footprint(sizes, mesh=Mesh(), adapter=adapter, train=trained(tokens)).activations

    traced = [
        (_saved(shape, 4, n, adapter, trained(n)) - _saved(shape, 2, n, adapter, trained(n))) / 2 for n in LENGTHS
    ]
    square, slope, constant = np.polyfit(LENGTHS, traced, 2)
    assert square == pytest.approx(0, abs=1e-3)
    for tokens in LENGTHS:
        said = (closed(4, tokens) - closed(2, tokens)) / 2
        assert said == pytest.approx(slope * tokens + constant, rel=0.005)


@pytest.mark.parametrize(("adapter", "published"), RESERVED, ids=["r32", "r64", "feed-forward", "dora"])
def test_memory_that_others_measured(adapter: Adapter, published: float) -> None:
    assert loop_gigabytes(adapter) == pytest.approx(published, rel=0.05)


def test_adapted_experts_are_kept_with_their_adapters() -> None:
    """PEFT multiplies with W + BA, a copy of every expert of a block."""
    shape = {**_SMALL, "model_type": "qwen3_moe", "intermediate_size": 512, "head_dim": 32, "num_experts": 16}
    shape |= {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
    train = Train(precision="bf16", checkpointing="none", max_length=64, batch_size=1)

    def kept(blocks: int, experts: int | None) -> tuple[int, int]:
        adapter = Adapter(rank=8, targets=("q_proj",), experts=experts)
        closed = predict_footprint(_sizes(shape, blocks, adapter), mesh=Mesh(), adapter=adapter, train=train)
        return _saved(shape, blocks, 64, adapter, train), closed.activations

    (traced, closed), (traced_without, closed_without) = kept(2, 8), kept(2, None)
    assert closed - closed_without == pytest.approx(traced - traced_without, rel=0.01)
    assert closed - closed_without > 2 * 16 * 3 * 512 * 1024 * 2
