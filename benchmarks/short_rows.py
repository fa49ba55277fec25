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

from benchmarks._harness import Benchmark, interleave, limit_threads

ROWS, ROUNDS, UPDATES = 32, 3, 4
TOKENS = (8, 16, 32, 64, 128, 256)


def update(backbone: str, tokens: int, precision: Any) -> Callable[[], None]:
    """A ready pass; calling it makes the gradients of `UPDATES` updates."""
    import torch

    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.compute.loss import batch_loss
    from flatshift.finetune.compute.micro_batch import MicroBatch
    from flatshift.finetune.compute.precision import autocast
    from flatshift.finetune.config import Adapter, Train
    from flatshift.finetune.models.load import load_backbone
    from flatshift.finetune.seeds import torch_generator
    from flatshift.finetune.tasks import Classify, LanguageModel

    task = Classify() if "encoder" in backbone else LanguageModel()
    names = ("a", "b", "c") if task.has_classes else None
    model = load_backbone(backbone, task=task, label_names=names, precision=precision)
    model = attach_adapter(model, Adapter(rank=8), task=task, seed=0).train()
    generator = torch_generator(0, "short rows", tokens)
    ids = torch.randint(5, 1000, (ROWS, tokens), generator=generator)
    labels = torch.randint(0, 3, (ROWS,), generator=generator) if names else ids
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1::2, -tokens // 4 :] = 0  # half of the rows are padded
    batch = MicroBatch(inputs, labels, ROWS, ROWS, tuple((i,) for i in range(ROWS)))

    def run() -> None:
        for _ in range(UPDATES):
            with autocast(Train(precision=precision), torch.device("cpu")):
                loss = batch_loss(model, batch, task=task)
            loss.backward()
            model.zero_grad()

    return run


def torch_chooses(run: Callable[[], None]) -> Callable[[], None]:
    """The same pass without our choice."""
    from unittest import mock

    def theirs() -> None:
        with mock.patch("flatshift.finetune.compute.loss.attention_kernel", lambda inputs: contextlib.nullcontext()):
            run()

    return theirs


def main() -> None:
    """Measure every length and write benchmarks/results/short_rows.json."""
    limit_threads(1)
    bench = Benchmark("short_rows", packages=("torch", "transformers", "peft"))
    for backbone in ("flatshift-encoder-3m", "flatshift-5m"):
        for tokens in TOKENS:
            run = update(backbone, tokens, "bf16")
            ours, theirs = interleave(run, torch_chooses(run), rounds=ROUNDS)
            bench.row(
                f"{UPDATES} updates of {ROWS} rows of {tokens} tokens, {backbone}, bf16",
                ours=ours,
                peer=theirs,
                peer_name="torch's choice",
                unit="CPU-s",
                bar_op="<=",
                bar_value=1.05,
            )
    bench.finish()


if __name__ == "__main__":
    main()
