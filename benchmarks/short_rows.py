"""Training on short rows in bf16 on a CPU: our choice of attention kernel beside torch's own.

    python -m benchmarks.short_rows

Forward and backward pass of one update, LoRA on all layers of the shipped encoder and decoder (8 heads of 32), 32 rows
of 8 to 256 tokens, one thread. The peer is the same pass with the kernel left to torch, which takes flash attention.
Above `flatshift.finetune.compute.numerics.SHORT` tokens, and on a CPU without bf16 instructions, both are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks._harness import Benchmark, limit_threads
from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.compute.loss import batch_loss, find_head
from flatshift.finetune.compute.micro_batch import MicroBatch
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Adapter, Train
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.seeds import torch_generator
from flatshift.finetune.tasks import Classify, LanguageModel

ROWS, UPDATES = 32, 4


def ready_pass(
    backbone: str, rows: int, tokens: int, precision: Any, *, narrow: bool = False, padded: bool = False
) -> Callable[[], None]:
    """A forward and backward pass with LoRA on all layers; calling it makes the gradients of one update.

    padded: a quarter of every second row. narrow: weights kept in bf16.
    """
    task = Classify() if "encoder" in backbone else LanguageModel()
    names = ("a", "b", "c") if task.has_classes else None
    model = load_backbone(backbone, task=task, label_names=names, precision=precision, narrow=narrow)
    model = attach_adapter(model, Adapter(rank=8), task=task, seed=0).train()
    generator = torch_generator(0, "short rows", tokens)
    ids = torch.randint(5, 1000, (rows, tokens), generator=generator)
    labels = torch.randint(0, 3, (rows,), generator=generator) if names else ids
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if padded:
        inputs["attention_mask"][1::2, -tokens // 4 :] = 0
    batch = MicroBatch(inputs, labels, rows, rows, tuple((i,) for i in range(rows)))
    train, cpu = Train(precision=precision), torch.device("cpu")
    with autocast(train, cpu):
        head = None if names else find_head(model, inputs, task=task)

    def run() -> None:
        with autocast(train, cpu):
            loss = batch_loss(model, batch, task=task, head=head)
        loss.backward()
        model.zero_grad()

    return run


def main() -> None:
    """Measure every length and write benchmarks/results/short_rows.json."""
    limit_threads(1)
    bench = Benchmark("short_rows", packages=("torch", "transformers", "peft"))
    for backbone in ("flatshift-encoder-3m", "flatshift-5m"):
        for tokens in (8, 16, 32, 64, 128, 256):
            run = ready_pass(backbone, ROWS, tokens, "bf16", padded=True)

            def ours(run: Callable[[], None] = run) -> None:
                for _ in range(UPDATES):
                    run()

            def theirs(ours: Callable[[], None] = ours) -> None:
                with mock.patch("flatshift.finetune.compute.loss.attention_kernel", lambda _: contextlib.nullcontext()):
                    ours()

            what = f"{UPDATES} updates of {ROWS} rows of {tokens} tokens, {backbone}, bf16"
            bench.compare(what, "CPU-s", ours, theirs, "torch's choice", rounds=3, maximum=1.05)
    bench.finish()


if __name__ == "__main__":
    main()
