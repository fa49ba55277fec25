"""A backbone in 4 and 8 bits beside the same in bfloat16: what it learns, and what memory it takes, by cause.

    python -m benchmarks.quantised

Loss: the shipped backbone trains 100 updates on SciCite (completion-only, packed 4 × 128, bf16 autocast) with the same
adapter, batches and learning rates, kept in bf16, nf4, nf4-double and int8; the curves lie in
benchmarks/results/quantised/. Memory: a random Llama of 163 M parameters and an adapter of rank 8, one row of 128
tokens, one update, in a process of its own each: bytes of the frozen weights, of their scales, of the adapter, its
gradients and the optimizer's state are counted; activations are what autograd keeps; the peak is the allocator's.
"""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

import torch

from benchmarks import train_step
from benchmarks._harness import RESULTS, Benchmark, in_child, limit_threads, peak_bytes
from benchmarks._sized import Sizes, save_backbone
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.atomic import write_json
from flatshift.finetune.compute.numerics import without_input_casts
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.quantize import quantization_scales
from flatshift.finetune.planner.memory import count_saved_bytes
from flatshift.finetune.tasks import Completion, LanguageModel
from flatshift.finetune.train.optimizer import AdapterOptimizer

BACKBONE, SEED, STEPS, TAIL = "flatshift-5m", 0, 100, 20
TASK = Completion(prompt="{text}\nintent:", completion=" {label}")
OPTIMIZER = Optimizer(lr=2e-3, schedule="cosine", warmup=0.05)
KINDS = ("nf4", "nf4-double", "int8")
BIG = Sizes(hidden=1024, inner=2816, blocks=12, vocabulary=4096, tokens=128, item=2)
CURVES = RESULTS / "quantised" / "losses.json"
FEWER = {"nf4": 0.40, "nf4-double": 0.37, "int8": 0.62}
"""Bars on frozen bytes, scales included, ÷ bf16. Of the 163 M, embedding and head (8.4 M) stay floats: 0.05 of bf16's
bytes; a 4-bit value with a scale for 64 takes 0.28 of bf16's, with quantised scales 0.26, 8 bits 0.5."""


def curve(kind: str | None) -> list[float]:
    """Losses of one run on the shipped backbone."""
    limit_threads(1)
    batches = train_step.batches_of(TASK, rows=4, length=128, limit=100_000)
    losses: list[float] = []
    run = {"steps": STEPS, "precision": "bf16", "losses": losses, "optimizer": OPTIMIZER, "quantization": kind}
    train_step.ours(TASK, batches, **run)()  # type: ignore[arg-type]
    return losses


def memory(kind: str | None, backbone: str) -> dict[str, float]:
    """Bytes by cause of one update on the random Llama."""
    limit_threads(1)
    task, train = LanguageModel(), Train(precision="bf16")
    loaded = load_backbone(backbone, task=task, precision="bf16", quantization=kind)  # type: ignore[arg-type]
    model = attach_adapter(loaded, Adapter(rank=8), task=task, seed=SEED).train()
    trained = trainable(model)
    optimizer = AdapterOptimizer(trained, OPTIMIZER)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, BIG.vocabulary, (1, BIG.tokens), generator=generator)

    def loss() -> Any:
        with autocast(train, torch.device("cpu")), without_input_casts(model, train):
            return model(input_ids=ids, labels=ids).loss

    def update() -> None:
        loss().backward()
        optimizer.step(1e-3)

    update()  # what is made once (int8 moves its scales, the optimizer makes its state)
    frozen = {p.data_ptr(): p.nbytes for p in model.parameters() if not p.requires_grad}
    state = [tensor for moment in optimizer.moments().values() for tensor in moment.values()]
    results = {
        "frozen weights": sum(frozen.values()),
        "scales": sum(t.nbytes for t in quantization_scales(model).values()),
        "adapter": sum(p.nbytes for p in trained.values()),
        "gradients of the adapter": sum(p.nbytes for p in trained.values()),
        "optimizer": sum(t.nbytes for t in state),
        "activations": count_saved_bytes(model, loss),
    }
    del state
    results["peak"] = peak_bytes(update)
    return {name: float(value) for name, value in results.items()}


def main() -> None:
    """Measure and write benchmarks/results/quantised.json and the curves."""
    bench = Benchmark("quantised", packages=("torch", "transformers", "peft", "bitsandbytes"))
    here = importlib.util.find_spec("bitsandbytes") is not None
    missing = "the package bitsandbytes is not installed (the extra `quant`)"
    where = "CPU"
    curves = {"bf16": in_child("benchmarks.quantised:curve", kind=None)}
    final = sum(curves["bf16"][-TAIL:]) / TAIL
    for kind in KINDS:
        what = f"mean loss of the last {TAIL} of {STEPS} updates, {kind} on {where}"
        evaluations: dict[str, Any] = {"unit": "nats/token", "peer_name": "bf16", "maximum": 1.05}
        if not here:
            bench.row(what, reason=missing, **evaluations)
            continue
        curves[kind] = in_child("benchmarks.quantised:curve", kind=kind)
        bench.row(what, ours=sum(curves[kind][-TAIL:]) / TAIL, peer=final, **evaluations)
        apart = [abs(mine / bf16 - 1) for mine, bf16 in zip(curves[kind], curves["bf16"], strict=True)]
        bench.row(f"largest distance of the two loss curves, {kind} on {where}", "relative", ours=max(apart))
    write_json(CURVES, curves)
    with tempfile.TemporaryDirectory() as folder:
        save_backbone(BIG, folder)
        plain = in_child("benchmarks.quantised:memory", kind=None, backbone=folder)
        for kind in KINDS:
            if not here:
                bench.row(f"memory by cause, {kind} on {where}", "bytes", peer_name="bf16", reason=missing)
                continue
            held = in_child("benchmarks.quantised:memory", kind=kind, backbone=folder)
            size = f"{BIG.frozen_bytes // BIG.item / 1e6:.0f} M"
            bench.row(
                f"frozen weights and scales, {size}, {kind} on {where}",
                "bytes",
                ours=held["frozen weights"] + held["scales"],
                peer=plain["frozen weights"],
                peer_name="bf16",
                maximum=FEWER[kind],
            )
            for cause, value in held.items():
                title = f"{cause}, {size}, {kind} on {where}"
                bench.row(
                    title, "bytes", ours=value, **{"peer": plain[cause], "peer_name": "bf16"} if plain[cause] else {}
                )
    bench.finish()


if __name__ == "__main__":
    main()
