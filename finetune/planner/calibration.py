"""Measure the rates this machine reaches, in a minute (`flatshift plan --calibrate`), and cache them.

Three rates are timed: one large matrix product; forward and backward of a LoRA-adapted Llama block, as the difference
between models of three blocks and of one, whose time beyond its products is element-wise traffic; and, with two or more
devices, an all-reduce among them. On a GPU also the host's time to launch a kernel. Rates that cannot be measured here
(between nodes; between devices if there is only one) keep their published values. On a CPU, fresh processes also
measure the memory held on top of the tensors of a step, which depends on the C library and on the code oneDNN compiles.
Reading cached values imports no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..cache_directory import cache_root, write_cached_json
from ..child_process import without_cwd_imports
from ..figures import format_bytes
from ..processor import cpu_info
from .throughput import CORE, DEVICES, PUBLISHED, DeviceSpec, RooflineConstants, StepLayout, predict_seconds

_TURNS = 3


@dataclass(frozen=True)
class _ProbeSizes:
    """Tensor sizes for timing one kind of device."""

    hidden: int
    tokens: int
    reduced: int
    """Bytes of an all-reduce."""


@dataclass(frozen=True)
class MemoryOverhead:
    """Resident memory of a process on top of the tensors of its steps."""

    libraries: int
    """Bytes before any model is loaded."""
    least: int
    """Further bytes in any case: code compiled by oneDNN, and the allocator's own data."""
    share: float
    """Fraction of the tensors' bytes that the C library may keep after they are freed."""

    def interval(self, tensors: float) -> tuple[float, float]:
        """Return the least and most resident bytes of a process whose steps use `tensors` bytes of tensors."""
        return self.libraries + tensors, self.libraries + self.least + (1 + self.share) * tensors


_PROBES = {"cuda": _ProbeSizes(2048, 4096, 256 << 20), "cpu": _ProbeSizes(256, 256, 8 << 20)}


def cached_constants(row: str) -> RooflineConstants | None:
    """Return the cached measurement for a row of the device table; None if there is none that can be read."""
    try:
        found = json.loads(_cache_path(row).read_text(encoding="utf-8"))["constants"]
        constants = RooflineConstants(**found)
        return constants if all(0 < value < 100 for value in asdict(constants).values()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cached_overhead() -> MemoryOverhead | None:
    """Return the cached memory overhead of processes on this machine's CPU; None if there is none that can be read."""
    try:
        found = MemoryOverhead(**json.loads(_cache_path("CPU").read_text(encoding="utf-8"))["slack"])
        return found if min(asdict(found).values()) >= 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def calibrate(row: str | None, kind: str, ranks: int) -> tuple[RooflineConstants, list[str]]:
    """Measure and cache the rates; return them and the lines to print.

    row: this machine's device in the table (`flatshift.finetune.planner.devices`); None: another device, whose rates
    are printed but not cached, as its data-sheet rates are unknown. ranks: devices, or cores.
    """
    device = CORE if kind == "cpu" else DEVICES.get(row or "")
    probe = _PROBES[kind]
    rate = _measure_product_rate(kind, probe)
    block = _measure_block_seconds(kind, probe)
    launch = _measure_launch_seconds() if kind == "cuda" else PUBLISHED.launch
    link = _measure_link_rate(kind, min(ranks, 8 if kind == "cuda" else 2), probe)
    lines = [
        f"matrix products: {rate / 1e9:,.4g} GFLOP/s in {'bf16' if kind == 'cuda' else 'fp32, one core'}",
        f"a LoRA block of width {probe.hidden} over {probe.tokens:,} tokens: {block * 1e3:.3g} ms forward and backward",
        "between devices: one device only, not measured" if link is None else f"all-reduce: {link / 1e9:.3g} GB/s",
    ]
    if device is None:
        return PUBLISHED, [*lines, "this device is not in the table of `--gpus`, so no plan can use these figures"]
    constants = dataclasses.replace(_fit_constants(device, probe, rate, block, link), launch=launch)
    row = row or "CPU"
    record: dict[str, Any] = {"constants": asdict(constants)}
    if kind == "cpu" and (slack := measure_overhead()) is not None:
        lines.append(
            f"a process: {format_bytes(slack.libraries)} of libraries, and up to {format_bytes(slack.least)} and "
            f"{slack.share:.0%} of a "
            "step's tensors that allocator and kernels keep as well"
        )
        record["slack"] = asdict(slack)
    write_cached_json(_cache_path(row), {**record, "measured": lines})
    shares = ", ".join(
        f"{name} {value:.3g} (published {getattr(PUBLISHED, name):.3g})" for name, value in asdict(constants).items()
    )
    return constants, [*lines, f"plans for {row} take from now on: {shares}", f"kept in {_cache_path(row)}"]


def _fit_constants(
    device: DeviceSpec, probe: _ProbeSizes, rate: float, block: float, link: float | None
) -> RooflineConstants:
    products = rate / device.flops
    shape = _probe_layout(probe)
    predicted = predict_seconds(shape, device, network=1.0, constants=dataclasses.replace(PUBLISHED, products=products))
    left = max(block - predicted.products, 0.05 * block)
    return RooflineConstants(
        products=products,
        elements=PUBLISHED.elements * left / predicted.elements,
        fast_link=PUBLISHED.fast_link if link is None else link / device.link,
        shards=PUBLISHED.shards,
    )


def _probe_layout(probe: _ProbeSizes) -> StepLayout:
    h = probe.hidden
    return StepLayout(
        layers=1,
        hidden=h,
        heads=h // 64,
        products=4 * h * h + 3 * h * 3 * h,
        head=0,
        sequence=probe.tokens,
        rows=1,
        micro=1,
    )


def _cache_path(row: str) -> Path:
    about = row if row != "CPU" else f"CPU-{hashlib.sha256(cpu_info()[0].encode()).hexdigest()[:12]}"
    return cache_root() / f"plan-{about}.json"


_HELD, _FEW_MANY = tuple(itertools.product(("fp32", "bf16"), ("none", "full"))), (2, 10)
"""Precision and recomputation settings in which memory is measured, and the two numbers of blocks for each."""
_HELD_PROBE, _WORDS = _ProbeSizes(256, 1024, 0), 20_000


def measure_overhead() -> MemoryOverhead | None:
    """Measure the memory overhead in fresh processes, two for each setting in `_HELD`; None if the kernel or the C
    library does not report memory.

    The memory beyond the tensors is fitted by a line through the two sizes; the largest slope and the largest intercept
    count.
    """
    import torch

    libraries, least, share = 0.0, 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for precision, recompute in _HELD:
            told: list[Any] = []
            for blocks in _FEW_MANY:
                with without_cwd_imports():
                    torch.multiprocessing.spawn(
                        _write_held_memory, args=(precision, recompute, blocks, folder), nprocs=1
                    )
                told.append(json.loads((Path(folder) / "held").read_text(encoding="utf-8")))
            if None in told:
                return None
            (known, few, less), (_, many, more) = told
            slope = max(0.0, (more - less) / (many - few))
            libraries, share, least = max(libraries, known), max(share, slope), max(least, less - slope * few)
    return MemoryOverhead(int(libraries), int(least), share)


def _write_held_memory(rank: int, precision: str, recompute: Literal["none", "full"], blocks: int, folder: str) -> None:
    """Write (bytes of libraries, of tensors at the peak, resident beyond both) of training steps in this process."""
    import gc

    import torch

    from ..compute.memory import malloc_bytes, measure_peaks, process_bytes

    torch.set_num_threads(1)
    # a first small step, so that everything loaded on first use counts as libraries
    tiny = _build_model_step("cpu", _ProbeSizes(64, 32, 0), 1, precision)
    tiny()
    del tiny
    gc.collect()
    libraries, before = process_bytes("VmRSS"), malloc_bytes()
    step = _build_model_step("cpu", _HELD_PROBE, blocks, precision, recompute, words=_WORDS)

    def updates() -> None:
        for _ in range(_TURNS + 1):
            step()

    resident, handed = measure_peaks(updates)
    told = None
    if libraries is not None and resident is not None and before is not None and handed is not None:
        tensors = handed - before
        told = libraries, tensors, max(0, resident - libraries - tensors)
    (Path(folder) / "held").write_text(json.dumps(told), encoding="utf-8")


def _shortest_run(call: Callable[[], object], kind: str) -> float:
    """Return the shortest of a few runs in seconds; on a CPU in this thread's CPU time, which a busy machine does not
    lengthen."""
    import torch

    clock = time.perf_counter if kind == "cuda" else time.thread_time
    found = []
    for _ in range(_TURNS + 1):
        began = clock()
        call()
        if kind == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - began)
    return min(found[1:])  # the first run is a warm-up


def _measure_product_rate(kind: str, probe: _ProbeSizes) -> float:
    import torch

    from ..compute.numerics import cpu_threads

    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    n, h = probe.tokens, probe.hidden
    with cpu_threads(1 if kind == "cpu" else None):
        a, b = (torch.full(shape, 0.5, dtype=dtype, device=kind) for shape in ((n, h), (h, 4 * h)))
        return 2 * n * h * 4 * h / _shortest_run(lambda: torch.mm(a, b), kind)


def _measure_launch_seconds() -> float:
    """Return the host's time per kernel, from many small additions that the device finishes faster than they are
    launched."""
    import torch

    value, many = torch.zeros(1, device="cuda"), 1000

    def start() -> None:
        for _ in range(many):
            value.add_(1)

    return _shortest_run(start, "cuda") / many


def _measure_block_seconds(kind: str, probe: _ProbeSizes) -> float:
    from ..compute.numerics import cpu_threads

    with cpu_threads(1 if kind == "cpu" else None):
        three, one = (_shortest_run(_build_model_step(kind, probe, blocks), kind) for blocks in (3, 1))
    return max((three - one) / 2, 1e-6)


def _build_model_step(
    kind: str,
    probe: _ProbeSizes,
    blocks: int,
    precision: str = "fp32",
    recompute: Literal["none", "full"] = "none",
    *,
    words: int = 0,
) -> Callable[[], None]:
    """Build a forward and backward pass through a random Llama with LoRA on every linear layer, as in a training step;
    with an output layer and cross-entropy over `words` words if that is above 0."""
    import peft
    import torch
    import transformers

    from ..compute.loss import linear_cross_entropy
    from ..compute.numerics import without_input_casts
    from ..compute.precision import autocast
    from ..config import Train
    from ..parallel.activation_checkpoint import checkpoint_activations

    narrow = kind == "cuda" or precision == "bf16"
    train = Train(precision="bf16" if narrow else "fp32")
    device = torch.device(kind)
    config = transformers.LlamaConfig(
        hidden_size=probe.hidden,
        intermediate_size=3 * probe.hidden,
        num_hidden_layers=blocks,
        num_attention_heads=probe.hidden // 64,
        num_key_value_heads=probe.hidden // 64,
        vocab_size=128,
        max_position_embeddings=probe.tokens,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]), torch.device(kind):
        bare: Any = transformers.LlamaModel(config)
        bare = bare.to(torch.bfloat16 if narrow else torch.float32)
        model: Any = peft.get_peft_model(bare, peft.LoraConfig(r=8, target_modules="all-linear"))
    ids = torch.zeros(1, probe.tokens, dtype=torch.long, device=device)
    checkpoint_activations(model, recompute)
    weight = torch.full((words, probe.hidden), 0.01, dtype=bare.dtype, device=device)
    head = torch.nn.Linear(probe.hidden, 1, bias=False, device="meta")
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        with without_input_casts(model, train):
            with autocast(train, device):
                out = model(input_ids=ids).last_hidden_state
            lost = linear_cross_entropy(out[0], head, ids[0]) if words else out.float().sum()
            torch.autograd.grad(lost, trained)

    return step


def _measure_link_rate(kind: str, ranks: int, probe: _ProbeSizes) -> float | None:
    """Return the bytes/s that a rank of a ring sends in one direction in an all-reduce; None with one rank."""
    if ranks < 2:
        return None
    import torch

    with tempfile.TemporaryDirectory() as folder:
        with without_cwd_imports():
            torch.multiprocessing.spawn(_time_all_reduce, args=(kind, ranks, probe.reduced, folder), nprocs=ranks)
        return float((Path(folder) / "rate").read_text(encoding="utf-8"))


def _time_all_reduce(rank: int, kind: str, ranks: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    values = torch.ones(size // 4, device=f"cuda:{rank}" if kind == "cuda" else "cpu")
    found = []
    for _ in range(_TURNS + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        if kind == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    if rank == 0:
        (Path(folder) / "rate").write_text(str(2 * (ranks - 1) / ranks * size / min(found[1:])), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort at interpreter shutdown
