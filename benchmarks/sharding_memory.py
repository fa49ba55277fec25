"""What loading and training cost in memory on a mesh, beside three other ways to shard, and under a hard limit.

    python -m benchmarks.sharding_memory

A random Llama of 12 blocks × 768 with 8192 tokens (377 MiB with rank-8 LoRA in float32), made on the fly. Bytes are
anonymous resident memory (mapped files do not count) above the level after the imports and one update of a tiny model;
the largest of any rank. glibc gives blocks of 128 KiB and more back at once (MALLOC_MMAP_THRESHOLD_), else it hides
what was freed. A step's transient is its peak above the level before it, when optimizer state exists already.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import _sharding_peers as peers
from benchmarks._harness import Benchmark, PeakMemory, anonymous_rss, on_ranks
from benchmarks._limited import limited_rows
from benchmarks._sized import Sizes, Updates, save_backbone
from flatshift.finetune.compute.memory import process_bytes
from flatshift.finetune.config import Optimizer
from flatshift.finetune.parallel.layout import local_part
from flatshift.finetune.train.checkpointer import Checkpointer

BIG = Sizes(hidden=768, inner=2048, blocks=12, vocabulary=8192, rows=2, tokens=32)
TINY = Sizes(hidden=64, inner=128, blocks=2, vocabulary=256, rows=2, tokens=32)
STEPS = 3
LOAD_SHARE, LOAD_MORE = 1.15, 32 << 20
Load = Callable[[str, Sizes], Callable[[int], Any]]
PEERS: dict[str, Load] = {
    "transformers' DistributedConfig": peers.native_update,
    "rank 0 loads, broadcast": peers.broadcast_update,
    "DeepSpeed ZeRO-3, default": partial(peers.deepspeed_update, tuned=False, partitioned=True),
    "DeepSpeed ZeRO-3, tuned": partial(peers.deepspeed_update, tuned=True, partitioned=True),
}


def measure(load: Load, tiny: str, big: str, sizes: Sizes) -> dict[str, float]:
    """Peak while `load` makes an update; memory afterwards; peak of later updates above the level before them."""
    warm = load(tiny, TINY)
    for step in range(2):
        warm(step)
    gc.collect()
    level, total = anonymous_rss(), process_bytes("VmRSS")
    with PeakMemory(0.002) as loading:
        update = load(big, sizes)
    gc.collect()
    after = anonymous_rss() - level
    update(0)  # the first one also makes optimizer state and what FSDP2 keeps
    update(1)
    gc.collect()
    now = process_bytes("VmRSS")
    assert now is not None and total is not None
    with PeakMemory(0.002) as training:
        for step in range(STEPS):
            update(2 + step)
    loaded = max(loading.bytes, after)
    return {"load": loaded, "after": after, "resident": now - total, "transient": training.bytes}


def ours(
    tiny: str, big: str, mesh: dict[str, Any], precision: str = "fp32", sizes: dict[str, int] | None = None
) -> dict[str, float]:
    """Our engine on `mesh` (one process if that is empty), with `big` of `sizes`; also what this rank holds."""
    results: dict[str, float] = {}

    def load(backbone: str, s: Sizes) -> Updates:
        updates = Updates(
            backbone, mesh, vocabulary=s.vocabulary, rows=s.rows, tokens=s.tokens, rank=s.rank, precision=precision
        )
        results.update(held(updates.engine))
        return updates

    return measure(load, tiny, big, Sizes(**sizes) if sizes else BIG) | results


def checkpointer_of(updates: Updates, folder: str) -> Checkpointer:
    """One that saves the updates' state in `folder`, as of step 1."""
    run = SimpleNamespace(state=Path(folder), log=lambda line: None, sync_metrics=lambda stage: None)
    run.stage = lambda name: Path(folder)
    settings = {"name": "stage", "train": updates.train, "optimizer": Optimizer(), "seed": 0}
    stage: Any = SimpleNamespace(run=run, regularizer=updates.regularizer, **settings)
    checkpointer = Checkpointer(updates.engine, updates.optimizer, stage)
    checkpointer.progress.step = 1
    return checkpointer


def saving(
    big: str, mesh: dict[str, Any], rank: int, folder: str, sizes: dict[str, int] | None = None
) -> dict[str, float]:
    """Peaks while a checkpoint of an adapter of rank `rank` and its moments is saved and restored, above the level
    before; the bytes of all its tensors, and of the parts of them that this rank has."""
    s = Sizes(**sizes) if sizes else BIG
    updates = Updates(big, mesh, vocabulary=s.vocabulary, rows=s.rows, tokens=s.tokens, rank=rank)
    updates(0)
    checkpointer = checkpointer_of(updates, folder)
    checkpointer.save()  # the first time loads modules
    checkpointer.restore()
    gc.collect()
    with PeakMemory(0.001) as saved:
        checkpointer.progress.step = 2
        checkpointer.save()
    gc.collect()
    with PeakMemory(0.001) as restored:
        checkpointer.restore()
    tensors: list[Any] = [*updates.engine.parameters.values()]
    for moments in updates.optimizer.moments().values():
        tensors += moments.values()
    whole, own = sum(t.numel() * t.itemsize for t in tensors), sum(local_part(t).nbytes for t in tensors)
    return {"saving": saved.bytes, "restoring": restored.bytes, "states": whole, "own": own}


def held(engine: Any) -> dict[str, float]:
    """Bytes of parameters on this rank, and of the largest unit as it is gathered."""
    mine = {id(p): local_part(p).untyped_storage().nbytes() for p in engine.model.parameters()}
    units = engine.sharding.units if engine.sharding is not None else ()
    sizes = [0]
    for unit in units:
        inner = [module for module in unit.modules() if module is not unit and module in units]
        other = {id(p) for module in inner for p in module.parameters()}
        sizes.append(sum(p.numel() * p.itemsize for p in unit.parameters() if id(p) not in other))
    return {"held": sum(mine.values()), "unit": max(sizes)}


def theirs(tiny: str, big: str, peer: str) -> dict[str, float]:
    return measure(PEERS[peer], tiny, big, BIG)


def worst(function: str, ranks: int, **arguments: Any) -> dict[str, float]:
    """The largest figure of any rank."""
    results = on_ranks(f"benchmarks.sharding_memory:{function}", ranks, **arguments)
    return {name: max(result[name] for result in results) for name in results[0]}


def main() -> None:
    """Measure all rows and write benchmarks/results/sharding_memory.json."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 << 10)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # DeepSpeed builds with ninja
    bench = Benchmark("sharding_memory", packages=("torch", "transformers", "peft", "accelerate", "deepspeed"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}/extensions"
        models = {"tiny": f"{folder}/tiny", "big": f"{folder}/big"}
        save_backbone(TINY, models["tiny"])
        save_backbone(BIG, models["big"])
        # The child of one process: what the same rows cost without any sharding.
        alone = worst("ours", 1, **models, mesh={})
        results = {}
        for mesh, precision in (
            ({"dp": 2}, "fp32"),
            ({"dp": 4}, "fp32"),
            ({"dp": 2}, "bf16"),
            ({"dp": 4}, "bf16"),
            ({"tp": 2}, "fp32"),
            ({"dp": 2, "tp": 2}, "fp32"),
            ({"pp": 2}, "fp32"),
        ):
            name = " × ".join(f"{axis} {width}" for axis, width in mesh.items()) + f", {precision}"
            results[name] = worst("ours", math.prod(mesh.values()), **models, mesh=mesh, precision=precision)
            own_rows(bench, name, mesh, results[name], alone)
        bench.row("one process, fp32: transient of an update", "bytes", ours=alone["transient"])
        for ranks in (2, 4):
            mine = results[f"dp {ranks}, fp32"]
            for peer in PEERS:
                absent = peer.startswith("DeepSpeed") and not peers.has_deepspeed()
                other = {} if absent else worst("theirs", ranks, **models, peer=peer)
                reason = "deepspeed is not installed" if absent else None
                figures = {
                    "load": "peak while loading",
                    "resident": "resident after an update",
                    "transient": "transient",
                }
                for key, what in figures.items():
                    title = f"dp {ranks}: {what}"
                    bench.row(title, "bytes", ours=mine[key], peer=other.get(key), peer_name=peer, reason=reason)
        state = worst("saving", 2, big=models["big"], mesh={"dp": 2}, rank=64, folder=f"{folder}/state")
        for key in ("saving", "restoring"):
            what = f"dp 2: peak while {key} a checkpoint of rank 64"
            bench.row(what, "bytes", ours=state[key], peer=state["own"], peer_name="a rank's part", maximum=0.25)
        limited_rows(bench, folder)
    bench.finish()


def own_rows(
    bench: Benchmark, name: str, mesh: dict[str, int], results: dict[str, float], alone: dict[str, float]
) -> None:
    """Our figures beside their bounds."""

    def row(what: str, key: str, bound: float, words: str, **bar: float) -> None:
        bench.row(f"{name}: {what}", "bytes", ours=results[key], peer=bound, peer_name=words, **bar)

    sharded = set(mesh) == {"dp"}
    if sharded:
        sizes = replace(BIG, item=2 if name.endswith("bf16") else 4)
        row("bytes of parameters on a rank", "held", sizes.whole_bytes / mesh["dp"], "Ψ/N", exactly=1.0)
    load = LOAD_SHARE * results["held"] + LOAD_MORE
    row("peak while loading", "load", load, "shard + 15 % + 32 MiB", maximum=1.0)
    if sharded:
        bound = 3 * results["unit"] + alone["transient"]
        words = "3 largest units + one process's transient"
        row("transient of an update", "transient", bound, words, maximum=1.0)


if __name__ == "__main__":
    main()
