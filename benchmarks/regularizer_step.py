"""What a training step costs with each regularizer beside a plain LoRA step: CPU time and peak memory.

    python -m benchmarks.regularizer_step

A Llama of 12 blocks × 768 (random weights, 105 M parameters), rank-8 LoRA on every linear layer, dropout 0, 4 rows of
128 tokens, AdamW: forward, backward, clipping and update of a whole step, plain LoRA layers in their fused form as the
loop has them (`flatshift.regularizers.layers.fused`), so that a ratio is the price of the method. One process, one
thread; single steps in the order A B B A, so that a drift of the machine falls on both. The bars are on the upper 95 %
bound of the median ratio (order statistics, no distribution assumed). Memory is by allocator counts: weights and
whatever else is alive, plus the highest level within a step, from the profiler's record of every allocation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import binom
from torch import nn

from benchmarks._harness import Benchmark, in_child, limit_threads, peak_bytes
from benchmarks._published import AddAndSubtract
from benchmarks._sized import random_llama
from flatshift.regularizers import build, config
from flatshift.regularizers.layers.fused import FusedLayers

HERE = "benchmarks.regularizer_step"
BLOCKS, WIDTH, INNER, VOCABULARY, ROWS, TOKENS = 12, 768, 2304, 8192, 4, 128
BARRED: dict[str, float] = {"ggpo": 1.03, "mgpo": 1.01}
CYCLES, FEW = {"ggpo": 40, "mgpo": 100}, 8
"""A B B A cycles for the rows with a bar (40 bound a median to about 0.8 %, which is too wide for a bar of 1 %), and
for the others."""
KINDS: dict[str, Any] = {
    "ggpo": config.GGPO(),
    "mgpo": config.MGPO(),
    "flat-lora": config.FlatLora(schedule="constant"),
    "mgpo-code": config.MGPO(form="code"),
    "msam": config.MSAM(),
    "bar": config.BAR(),
    "bi-lora": config.BiLora(),
    "neftune": config.NEFTune(),
    "lora-sam": config.LoraSAM(),
    "asam": config.ASAM(),
    "sam": config.SAM(),
}
PUBLISHED = "published: materialise, add, subtract"


def adapted_llama(blocks: int, width: int, inner: int) -> Any:
    """A random Llama with PEFT's LoRA of rank 8 on every linear layer."""
    sizes = {"vocabulary": VOCABULARY, "hidden": width, "inner": inner, "blocks": blocks, "heads": width // 64}
    model = random_llama(**sizes, use_cache=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")).train()


def _stepper(kind: str, model: Any) -> Callable[[int], None]:
    """`step(t)`: one whole update of `model` under a regularizer."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    layers = FusedLayers(model)
    if kind == PUBLISHED:
        regularizer: Any = AddAndSubtract(model, sigma=0.05)
    else:
        regularizer = build(KINDS.get(kind, config.Plain())).attach(model, seed=0, total_steps=10_000)

    def step(t: int) -> None:
        ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(t))
        with regularizer.step(t) as passes:
            for _ in passes or range(1):
                with layers.replace_forwards():
                    model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if kind != PUBLISHED:
            regularizer.after_optimizer_step(1e-4)

    return step


def step_times(kind: str, cycles: int) -> dict[str, list[float]]:
    """CPU-seconds of single steps, ours and plain, paired: element i of both comes from neighbouring steps."""
    limit_threads(1)
    steps = {name: _stepper(name, adapted_llama(BLOCKS, WIDTH, INNER)) for name in (kind, "plain")}
    times: dict[str, list[float]] = {kind: [], "plain": []}
    for name in (kind, "plain"):
        for t in range(2):
            steps[name](t)
    for cycle in range(cycles):
        for turn, name in enumerate((kind, "plain", "plain", kind)):
            started = time.process_time()
            steps[name](2 + 2 * cycle + turn // 2)
            times[name].append(time.process_time() - started)
    return {"ours": times[kind], "plain": times["plain"]}


def step_memory(kind: str, blocks: int, width: int, inner: int) -> float:
    """Bytes alive at the worst moment of a step, everything counted."""
    limit_threads(1)
    step = _stepper(kind, adapted_llama(blocks, width, inner))
    step(0)
    step(1)
    return peak_bytes(partial(step, 2))


def upper_bound(ratios: list[float]) -> float:
    """Upper end of the 95 % interval of the median: the order statistic that exceeds it with probability ≥ .975."""
    ordered = sorted(ratios)
    rank = int(binom.ppf(0.975, len(ordered), 0.5))
    return ordered[min(rank, len(ordered) - 1)]


def main() -> None:
    """Measure all rows and write benchmarks/results/regularizer_step.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, help="A B B A cycles of the rows that have a bar")
    asked = parser.parse_args().cycles
    bench = Benchmark("regularizer_step", packages=("torch", "transformers", "peft"))
    for kind in (*KINDS, PUBLISHED):
        cycles = (asked or CYCLES[kind]) if kind in CYCLES else FEW
        times = in_child(f"{HERE}:step_times", kind=kind, cycles=cycles, wall_cap_s=3600)
        bench.row(f"step, {kind}", "CPU-s", ours=times["ours"], peer=times["plain"], peer_name="plain LoRA")
        if kind in BARRED:
            ratios = [mine / plain for mine, plain in zip(times["ours"], times["plain"], strict=True)]
            what = f"step, {kind}: upper 95 % bound of the median ratio"
            bench.row(what, "× plain", ours=upper_bound(ratios), maximum=BARRED[kind])
    for blocks, width, inner, bar in ((2, 2048, 5632, 0.01), (BLOCKS, WIDTH, INNER, 0.03)):
        size = {"blocks": blocks, "width": width, "inner": inner}
        plain = in_child(f"{HERE}:step_memory", kind="plain", **size)
        for kind in (*KINDS, PUBLISHED):
            mine = in_child(f"{HERE}:step_memory", kind=kind, **size)
            bench.row(f"peak memory, width {width}, {kind}", "B", ours=mine, peer=plain, peer_name="plain LoRA")
            if kind == "ggpo":
                what = f"(GGPO peak − plain peak) ÷ plain peak, width {width}"
                bench.row(what, "of plain", ours=(mine - plain) / plain, maximum=bar)
    bench.finish()


if __name__ == "__main__":
    main()
