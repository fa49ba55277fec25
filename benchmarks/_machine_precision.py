"""What `train.precision: auto` takes beside what a whole training step is faster in, on several instruction sets.

Each instruction set has a child process of its own, because kernels are chosen when torch is imported. It settles the
precision as a command would, then makes the same updates in both dtypes, turn about, on one thread by CPU time. `auto`
is right in a setting if the dtype that it took is the faster one, or if rounds disagree about which that is.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks._harness import Benchmark, cpu_seconds, in_child, interleave
from benchmarks._instructions import rehearsal


def instructions() -> dict[str, dict[str, str]]:
    """Environments that rehearse other machines on this one; a limit above what the CPU has changes nothing."""
    return {
        "as it is": {},
        "AVX2 only": rehearsal(),
        "AVX512 without bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        "AVX512_BF16 without AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    }


SHAPES = (
    ("flatshift-5m", 4, 16),
    ("flatshift-5m", 16, 32),
    ("flatshift-5m", 16, 64),
    ("flatshift-5m", 8, 256),
    ("flatshift-encoder-3m", 4, 16),
    ("flatshift-encoder-3m", 16, 32),
    ("flatshift-encoder-3m", 32, 64),
    ("flatshift-encoder-3m", 16, 128),
    ("llama 768 × 2", 4, 16),
    ("llama 768 × 2", 8, 64),
)
"""(backbone, rows of a micro-batch, tokens of a row)."""
ROUNDS = 4
SLOW = 0.25
"""A round in which one dtype takes four times as long as the other settles it: no more are made."""


def settings() -> list[dict[str, Any]]:
    """`setting` for each of `SHAPES`; for a child process."""
    return [setting(*shape) for shape in SHAPES]


def setting(backbone: str, rows: int, tokens: int) -> dict[str, Any]:
    """What auto takes here, and CPU-seconds of one update in either dtype by round."""
    import torch

    from flatshift.finetune.compute.precision import feed_forward_shape, resolve_precision
    from flatshift.finetune.config import Train
    from flatshift.finetune.models.backbone import open_backbone

    torch.set_num_threads(1)
    directory = _backbone(backbone)
    shape = feed_forward_shape(open_backbone(directory).directory, tokens=rows * tokens // 2)
    choice = resolve_precision(Train(), torch.device("cpu"), shape)
    runs = {name: update(directory, rows, tokens, name) for name in ("fp32", "bf16")}
    for run in runs.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name in runs if turn % 2 == 0 else reversed(list(runs)):
            taken[name].append(cpu_seconds(runs[name]))
        if min(taken["fp32"]) < SLOW * min(taken["bf16"]):
            break
    return {"auto": choice.precision, "seconds": taken}


def _backbone(name: str) -> str:
    """A shipped name, or the directory of a random backbone of that width, made once in the temporary directory."""
    if not name.startswith("llama"):
        return name
    import tempfile
    from pathlib import Path

    import torch
    import transformers

    directory = Path(tempfile.gettempdir()) / "flatshift-any-machine-llama-768"
    if not (directory / "config.json").is_file():
        config = transformers.LlamaConfig(
            vocab_size=4096, hidden_size=768, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=12
        )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def update(backbone: str, rows: int, tokens: int, precision: Any, *, narrow: bool = False) -> Callable[[], None]:
    """A ready forward and backward pass with LoRA on all layers; calling it makes the gradients of one update."""
    import torch

    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.compute.loss import batch_loss, find_head
    from flatshift.finetune.compute.micro_batch import MicroBatch
    from flatshift.finetune.compute.precision import autocast
    from flatshift.finetune.config import Adapter, Train
    from flatshift.finetune.models.load import load_backbone
    from flatshift.finetune.seeds import torch_generator
    from flatshift.finetune.tasks import Classify, LanguageModel

    task = Classify() if "encoder" in backbone else LanguageModel()
    names = ("a", "b", "c") if task.has_classes else None
    model = load_backbone(backbone, task=task, label_names=names, precision=precision, narrow=narrow)
    model = attach_adapter(model, Adapter(rank=8), task=task, seed=0).train()
    generator = torch_generator(0, "any machine", tokens)
    ids = torch.randint(5, 1000, (rows, tokens), generator=generator)
    labels = torch.randint(0, 3, (rows,), generator=generator) if names else ids
    batch = MicroBatch(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels, rows, rows, tuple((i,) for i in range(rows))
    )
    train = Train(precision=precision)
    with autocast(train, torch.device("cpu")):
        head = None if names else find_head(model, batch.inputs, task=task)

    def run() -> None:
        with autocast(train, torch.device("cpu")):
            loss = batch_loss(model, batch, task=task, head=head)
        loss.backward()
        model.zero_grad()

    return run


def narrow(rows: int, tokens: int) -> dict[str, list[float]]:
    """CPU-seconds of an update over weights kept in bf16 and in float32, both computed in float32; in a child."""
    import torch

    torch.set_num_threads(1)
    directory = _backbone("llama 768 × 2")
    runs = [update(directory, rows, tokens, "fp32", narrow=kept) for kept in (True, False)]
    for run in runs:
        run()
    ours, peer = interleave(*runs, rounds=ROUNDS)
    return {"ours": ours, "peer": peer}


def narrow_rows(bench: Benchmark) -> None:
    """`train.backbone_precision: bf16` beside float32 weights."""
    for name, environment in instructions().items():
        for rows, tokens in ((4, 16), (8, 64), (8, 256)):
            found = in_child("benchmarks._machine_precision:narrow", rows=rows, tokens=tokens, environment=environment)
            bench.row(
                f"{name}: an update over weights kept in bf16, llama 768 × 2, {rows} × {tokens}, fp32",
                **found,
                peer_name="kept in fp32",
                unit="CPU-s",
            )


def threads(backbone: str, rows: int, tokens: int) -> dict[str, list[float]]:
    """Wall seconds of one float32 update by round, on all threads that torch takes and on one; in a child."""
    import time

    import torch

    counts = {"ours": torch.get_num_threads(), "peer": 1}
    run = update(_backbone(backbone), rows, tokens, "fp32")
    taken: dict[str, list[float]] = {name: [] for name in counts}
    for turn in range(2 * ROUNDS + 1):
        for name in counts if turn % 2 == 0 else reversed(list(counts)):
            torch.set_num_threads(counts[name])
            run()
            begun = time.perf_counter()
            run()
            if turn:
                taken[name].append(time.perf_counter() - begun)
    return taken


def thread_rows(bench: Benchmark) -> None:
    """What `train.threads: null` takes beside one thread: wall time, so nothing may run beside it."""
    cores = os.cpu_count() or 1
    for backbone, rows, tokens in SHAPES:
        shape = {"backbone": backbone, "rows": rows, "tokens": tokens}
        found = in_child("benchmarks._machine_precision:threads", threads=cores, **shape)
        bench.row(
            f"an update of {backbone}, {rows} × {tokens}, fp32, {cores} threads",
            **found,
            peer_name="one thread",
            unit="seconds",
            bar_op="<=",
            bar_value=1.05,
        )


def precision_rows(bench: Benchmark) -> None:
    """A row for each setting, auto's step ÷ the faster dtype's, and one that counts where auto took the faster."""
    right, count = 0, 0
    for name, environment in instructions().items():
        found = in_child("benchmarks._machine_precision:settings", environment=environment)
        for (backbone, rows, tokens), one in zip(SHAPES, found, strict=True):
            count += 1
            seconds: dict[str, list[float]] = one["seconds"]
            auto, other = one["auto"], "bf16" if one["auto"] == "fp32" else "fp32"
            ratios = [a / b for a, b in zip(seconds[auto], seconds[other], strict=False)]
            faster = statistics.median(ratios) <= 1.0
            right += faster or min(ratios) <= 1.0  # rounds that disagree: no difference that this can tell
            best = auto if faster else other
            rounds = min(map(len, seconds.values()))
            bench.row(
                f"{name}: an update of {backbone}, {rows} × {tokens}; auto takes {auto}, {other} costs "
                f"{statistics.median(1 / ratio for ratio in ratios):.3g} of it",
                ours=seconds[auto][:rounds],
                peer=seconds[best][:rounds],
                peer_name=f"always {best}",
                unit="CPU-s",
                bar_op="<=",
                bar_value=1.05,
            )
    bench.row(
        f"of {count} settings, those in which auto took the faster dtype or the two could not be told apart",
        ours=right,
        unit="settings",
        bar_op=">=",
        bar_value=count,
    )
