"""Training on all cores while another program takes one, beside one thread.

    python -m benchmarks.busy_cores

OpenMP gives each thread an equal part of a product, and all wait for the last, so a thread that has to share its core
holds up the others. `flatshift train` then says that other programs are at work. Forward and backward pass with LoRA on
all layers, float32, wall seconds (nothing else may run): on all threads alone, and on all and on one beside a loop that
keeps one core busy, in turn in one process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import torch

from benchmarks._harness import Benchmark, call, in_child, in_turn
from benchmarks._machine_precision import LLAMA, backbone_of
from benchmarks.short_rows import ready_pass

SHAPES = (("flatshift-5m", 16, 64), ("flatshift-5m", 8, 256), ("flatshift-encoder-3m", 32, 64), (LLAMA, 8, 64))
ROUNDS = 8


def busy(backbone: str, rows: int, tokens: int) -> dict[str, list[float]]:
    """Wall seconds of one float32 update by round: on all threads alone, and on all and on one beside a busy program;
    in a child."""
    counts = {"alone": torch.get_num_threads(), "all": torch.get_num_threads(), "one": 1}
    run = ready_pass(backbone_of(backbone), rows, tokens, "fp32")
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def seconds(way: str) -> float:
        other.send_signal(signal.SIGSTOP if way == "alone" else signal.SIGCONT)
        torch.set_num_threads(counts[way])
        run()
        begun = time.perf_counter()
        for _ in range(3):  # a scheduler's slice is as long as a small update
            run()
        return (time.perf_counter() - begun) / 3

    try:
        result = in_turn({way: partial(seconds, way) for way in counts}, ROUNDS + 1, measure=call)
    finally:
        other.kill()
    return {way: taken[1:] for way, taken in result.items()}


def main() -> None:
    bench = Benchmark("busy_cores", packages=("torch", "numpy", "transformers", "peft"))
    cores = os.cpu_count() or 1
    for backbone, rows, tokens in SHAPES:
        found = in_child("benchmarks.busy_cores:busy", threads=cores, backbone=backbone, rows=rows, tokens=tokens)
        what = f"an update of {backbone}, {rows} × {tokens}, fp32, beside a program that keeps a core busy"
        bench.row(f"{what}: {cores} threads", "seconds", ours=found["all"], peer=found["alone"], peer_name="alone")
        named = f"{cores} threads"
        bench.row(f"{what}: one thread", "seconds", ours=found["one"], peer=found["all"], peer_name=named, maximum=1.05)
    bench.finish()


if __name__ == "__main__":
    main()
