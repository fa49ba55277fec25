"""What a mesh costs beside one process, beside DeepSpeed ZeRO-3 and beside the Trainer on DDP.

    python -m benchmarks.sharding_speed

A Llama of 8 blocks × 512 (random weights, 34 M parameters) with rank-8 LoRA on every linear layer, 4 rows of 128 tokens
a rank, AdamW, clipping at 1.0, one thread a rank. Every figure is the CPU-seconds of all ranks together for the same
number of updates, without start-up, each variant in fresh processes, in the order A B B A. One process gets as many
rows as both ranks. DeepSpeed's default keeps a model of this size gathered between forward and backward, which is our
`mesh.reshard: false`; tuned, it frees every unit as our default does. Each is measured beside its like.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks import _sharding_peers as peers
from benchmarks._harness import Benchmark, call, on_ranks
from benchmarks._sized import Sizes, Updates, draw_ids, random_llama
from flatshift.regularizers import GGPO

ROWS, TOKENS, VOCABULARY = 4, 128, 4096
WARM, STEPS = 2, 6


def save_backbone(folder: str, *, blocks: int = 8, hidden: int = 512, vocabulary: int = VOCABULARY) -> None:
    """The benchmark's model."""
    random_llama(
        vocabulary=vocabulary, hidden=hidden, inner=3 * hidden, blocks=blocks, heads=8, max_position_embeddings=256
    ).save_pretrained(folder)


def measure(update: Any, steps: int = STEPS) -> dict[str, float]:
    """CPU-seconds of `steps` updates after a warm-up; of the shortest one, its wall time and how much of that the
    computing thread was busy (waiting for other ranks is not). This rank's."""
    for step in range(WARM):
        update(step)
    dist.barrier()
    cpu, updates = time.process_time(), []
    for step in range(steps):
        wall, busy = time.monotonic(), time.thread_time()
        update(WARM + step)
        updates.append((time.monotonic() - wall, time.thread_time() - busy))
    shortest, busy = min(updates)
    return {"cpu": time.process_time() - cpu, "wall": shortest, "busy": busy}


def ours(
    backbone: str, mesh: dict[str, Any], rows: int, *, micros: int = 1, ggpo: bool = False, steps: int = STEPS
) -> dict[str, float]:
    """Our engine on `mesh`: `rows` rows a rank (of each of `micros` micro-batches)."""
    regularizer, shape = GGPO() if ggpo else None, {"vocabulary": VOCABULARY, "rows": rows, "tokens": TOKENS}
    return measure(Updates(backbone, mesh, regularizer=regularizer, accumulate=micros, **shape), steps)


def deepspeed_zero3(backbone: str, rows: int, *, tuned: bool) -> dict[str, float]:
    """DeepSpeed ZeRO-3 + PEFT."""
    sizes = Sizes(vocabulary=VOCABULARY, rows=rows, tokens=TOKENS)
    return measure(peers.deepspeed_update(backbone, sizes, tuned=tuned, partitioned=False))


def trainer_ddp(backbone: str, rows: int) -> dict[str, float]:
    """transformers' Trainer + PEFT on DDP, as `accelerate launch --cpu` runs it; CPU-seconds between two steps."""

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return rows * 2 * (WARM + STEPS)

        def __getitem__(self, i: int) -> dict[str, Any]:
            ids = draw_ids(VOCABULARY, 1, TOKENS, i)[0]
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    results: dict[str, float] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM:
                results["cpu"] = -time.process_time()
            if state.global_step == WARM + STEPS:
                results["cpu"] += time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            max_steps=WARM + STEPS,
            learning_rate=1e-3,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            logging_steps=1000,
            use_cpu=True,
            disable_tqdm=True,
            ddp_backend="gloo",
        )
        model = peers.load_adapted(backbone)
        Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Clock()]).train()
    return results


def cpu(function: str, ranks: int, **arguments: Any) -> float:
    """CPU-seconds of all ranks."""
    return sum(result["cpu"] for result in on_ranks(f"benchmarks.sharding_speed:{function}", ranks, **arguments))


def main() -> None:
    """Measure all rows and write benchmarks/results/sharding_speed.json."""
    bench = Benchmark("sharding_speed", packages=("torch", "transformers", "peft", "accelerate", "deepspeed"))
    meshes: dict[str, dict[str, Any]] = {
        "FSDP2, dp 2": {"dp": 2},
        "FSDP2, dp 2, weights kept gathered": {"dp": 2, "reshard": False},
        "tp 2": {"tp": 2},
        "replicate 2": {"replicate": 2},
        "GGPO, dp 2": {"dp": 2},
    }
    with tempfile.TemporaryDirectory() as backbone:
        save_backbone(backbone)
        own, model = partial(cpu, "ours"), {"backbone": backbone}
        for what, mesh in meshes.items():
            rows, more = 2 * ROWS if what == "tp 2" else ROWS, {**model, "ggpo": what.startswith("GGPO")}
            two, one = partial(own, 2, mesh=mesh, rows=rows, **more), partial(own, 1, mesh={}, rows=2 * ROWS, **more)
            bench.compare(f"{what}, the same rows", "CPU-s", two, one, "one process", measure=call)
        if peers.has_deepspeed():
            for name, what in zip(("tuned", "default"), meshes, strict=False):
                mine = partial(own, 2, mesh=meshes[what], rows=ROWS, **model)
                peer = partial(cpu, "deepspeed_zero3", 2, rows=ROWS, tuned=name == "tuned", **model)
                bench.compare(what, "CPU-s", mine, peer, f"DeepSpeed ZeRO-3, {name}", measure=call, maximum=0.8)
        else:
            reason = "deepspeed is not installed"
            bench.row("FSDP2, dp 2", "CPU-s", peer_name="DeepSpeed ZeRO-3", reason=reason)
        mine = partial(own, 2, mesh={"replicate": 2}, rows=ROWS, **model)
        peer = partial(cpu, "trainer_ddp", 2, rows=ROWS, **model)
        bench.compare("replicate 2", "CPU-s", mine, peer, "Trainer on DDP", measure=call, maximum=1.0)
    bench.finish()


if __name__ == "__main__":
    main()
