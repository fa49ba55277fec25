"""What `train.precision: auto` takes beside what a whole training step is faster in, on several instruction sets.

Each instruction set has a child process of its own, because kernels are chosen when torch is imported. It settles the
precision as a command would, then makes the same updates in both dtypes, turn about, on one thread by CPU time. `auto`
is right in a setting if the dtype that it took is the faster one, or if rounds disagree about which that is.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._harness import Benchmark, call, in_child, in_turn, interleave, limit_threads
from benchmarks._instructions import rehearsal
from benchmarks._sized import random_llama
from benchmarks.short_rows import ready_pass
from flatshift.finetune.compute.precision import feed_forward_shape, resolve_precision
from flatshift.finetune.config import Train
from flatshift.finetune.models.backbone import open_backbone

HERE = "benchmarks._machine_precision"
LLAMA = "llama 768 × 2"
SHAPES = (
    *(("flatshift-5m", rows, tokens) for rows, tokens in ((4, 16), (16, 32), (16, 64), (8, 256))),
    *(("flatshift-encoder-3m", rows, tokens) for rows, tokens in ((4, 16), (16, 32), (32, 64), (16, 128))),
    *((LLAMA, rows, tokens) for rows, tokens in ((4, 16), (8, 64))),
)
"""(backbone, rows of a micro-batch, tokens of a row)."""
ROUNDS = 4
SLOW = 0.25
"""A round in which one dtype takes four times as long as the other settles it: no more are made."""


def instructions() -> dict[str, dict[str, str]]:
    """Environments that rehearse other machines on this one; a limit above what the CPU has changes nothing."""
    return {
        "as it is": {},
        "AVX2 only": rehearsal(),
        "AVX512 without bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        "AVX512_BF16 without AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    }


def backbone_of(name: str) -> str:
    """A shipped name, or the directory of a random backbone of that width, made once in the temporary directory."""
    if name != LLAMA:
        return name
    directory = Path(tempfile.gettempdir()) / "flatshift-any-machine-llama-768"
    if not (directory / "config.json").is_file():
        model = random_llama(vocabulary=4096, hidden=768, inner=2048, blocks=2, heads=12)
        model.save_pretrained(directory)
    return str(directory)


def settings() -> list[dict[str, Any]]:
    """For each of `SHAPES` what auto takes here, and CPU-seconds of an update in either dtype by round; in a child."""
    limit_threads(1)
    results = []
    for name, rows, tokens in SHAPES:
        directory = backbone_of(name)
        shape = feed_forward_shape(open_backbone(directory).directory, tokens=rows * tokens // 2)
        choice = resolve_precision(Train(), torch.device("cpu"), shape)
        runs = {dtype: ready_pass(directory, rows, tokens, dtype) for dtype in ("fp32", "bf16")}
        for run in runs.values():
            run()
        taken = in_turn(runs, 1)
        if taken["fp32"][0] >= SLOW * taken["bf16"][0]:
            more = in_turn(runs, ROUNDS - 1)
            taken = {dtype: taken[dtype] + more[dtype] for dtype in runs}
        results.append({"auto": choice.precision, "seconds": taken})
    return results


def precision_rows(bench: Benchmark) -> None:
    """A row for each setting, auto's step ÷ the faster dtype's, and one that counts where auto took the faster."""
    right = count = 0
    for name, environment in instructions().items():
        result = in_child(f"{HERE}:settings", environment=environment)
        for (backbone, rows, tokens), one in zip(SHAPES, result, strict=True):
            seconds: dict[str, list[float]] = one["seconds"]
            auto, other = one["auto"], "bf16" if one["auto"] == "fp32" else "fp32"
            ratios = [a / b for a, b in zip(seconds[auto], seconds[other], strict=True)]
            faster, count = statistics.median(ratios) <= 1.0, count + 1
            right += faster or min(ratios) <= 1.0  # rounds that disagree: no difference that this can tell
            best, costs = auto if faster else other, statistics.median(1 / ratio for ratio in ratios)
            what = f"{name}: an update of {backbone}, {rows} × {tokens}; auto takes {auto}"
            pair = {"ours": seconds[auto], "peer": seconds[best], "peer_name": f"always {best}"}
            bench.row(f"{what}, {other} costs {costs:.3g} of it", "CPU-s", **pair, maximum=1.05)
    what = f"of {count} settings, those in which auto took the faster dtype or the two could not be told apart"
    bench.row(what, "settings", ours=right, minimum=count)


def narrow(rows: int, tokens: int) -> dict[str, list[float]]:
    """CPU-seconds of an update over weights kept in bf16 and in float32, both computed in float32; in a child."""
    limit_threads(1)
    runs = [ready_pass(backbone_of(LLAMA), rows, tokens, "fp32", narrow=flag) for flag in (True, False)]
    for run in runs:
        run()
    ours, peer = interleave(*runs, rounds=ROUNDS)
    return {"ours": ours, "peer": peer}


def narrow_rows(bench: Benchmark) -> None:
    """`train.backbone_precision: bf16` beside float32 weights."""
    for name, environment in instructions().items():
        for rows, tokens in ((4, 16), (8, 64), (8, 256)):
            result = in_child(f"{HERE}:narrow", rows=rows, tokens=tokens, environment=environment)
            what = f"{name}: an update over weights kept in bf16, {LLAMA}, {rows} × {tokens}, fp32"
            bench.row(what, "CPU-s", **result, peer_name="kept in fp32")


def threads(backbone: str, rows: int, tokens: int) -> dict[str, list[float]]:
    """Wall seconds of one float32 update by round, on all threads that torch takes and on one; in a child."""
    counts = {"ours": torch.get_num_threads(), "peer": 1}
    run = ready_pass(backbone_of(backbone), rows, tokens, "fp32")

    def seconds(count: int) -> float:
        torch.set_num_threads(count)
        run()
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    ways = {name: lambda count=count: seconds(count) for name, count in counts.items()}
    result = in_turn(ways, 2 * ROUNDS + 1, measure=call)
    return {name: taken[1:] for name, taken in result.items()}


def thread_rows(bench: Benchmark) -> None:
    """What `train.threads: null` takes beside one thread: wall time, so nothing may run beside it."""
    cores = os.cpu_count() or 1
    for backbone, rows, tokens in SHAPES:
        result = in_child(f"{HERE}:threads", threads=cores, backbone=backbone, rows=rows, tokens=tokens)
        what = f"an update of {backbone}, {rows} × {tokens}, fp32, {cores} threads"
        bench.row(what, "seconds", **result, peer_name="one thread", maximum=1.05)
