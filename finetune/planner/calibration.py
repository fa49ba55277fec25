"""Measure the rates this machine reaches, in a minute (`flatshift plan --calibrate`), and cache them.

Timed are a large matrix product; forward and backward of a LoRA-adapted Llama block, whose time beyond its products is
element-wise traffic; an all-reduce among several devices; and on a GPU the launch of a kernel. Other rates keep their
published values. On a CPU, fresh processes also measure the memory held on top of the tensors of a step. Reading cached
values imports no torch.
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
from typing import Any, Literal, NamedTuple, TypeVar

from ..cache_directory import cache_root, write_cached_json
from ..figures import format_bytes
from ..machine import cpu_info, without_cwd_imports
from .throughput import CORE, DEVICES, PUBLISHED, DeviceSpec, RooflineConstants, StepLayout, predict_seconds

_TURNS = 3


class _ProbeSizes(NamedTuple):
    """Tensor sizes for timing one kind of device."""

    hidden: int
    tokens: int
    reduced_bytes: int = 0


@dataclass(frozen=True)
class MemoryOverhead:
    """Resident memory of a process on top of the tensors of its steps.

    libraries: bytes before any model is loaded.
    least: further bytes in any case: code compiled by oneDNN, and the allocator's own data.
    share: fraction of the tensors' bytes that the C library may keep after they are freed.
    """

    libraries: int
    least: int
    share: float

    def interval(self, tensors: float) -> tuple[float, float]:
        """Return the minimum and maximum resident bytes of a process whose steps use `tensors` bytes of tensors."""
        return self.libraries + tensors, self.libraries + self.least + (1 + self.share) * tensors


_PROBES = {"cuda": _ProbeSizes(2048, 4096, 256 << 20), "cpu": _ProbeSizes(256, 256, 8 << 20)}


def cached_constants(row: str) -> RooflineConstants | None:
    """Return the cached measurement for a row of the device table; None if there is none that can be read."""
    constants = _read_cached(row, "constants", RooflineConstants)
    return constants if constants and all(0 < value < 100 for value in asdict(constants).values()) else None


def cached_overhead() -> MemoryOverhead | None:
    """Return the cached memory overhead of processes on this machine's CPU; None if there is none that can be read."""
    overhead = _read_cached("CPU", "slack", MemoryOverhead)
    return overhead if overhead and min(asdict(overhead).values()) >= 0 else None


Record = TypeVar("Record", RooflineConstants, MemoryOverhead)


def _read_cached(row: str, key: str, kind: type[Record]) -> Record | None:
    try:
        return kind(**json.loads(_cache_path(row).read_text(encoding="utf-8"))[key])
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
    ranks = min(ranks, 8 if kind == "cuda" else 2)
    link = None if ranks < 2 else float(_spawn(_time_all_reduce, ranks, kind, ranks, probe.reduced_bytes))
    lines = [
        f"matrix products: {rate / 1e9:,.4g} GFLOP/s in {'bf16' if kind == 'cuda' else 'fp32, one core'}",
        f"a LoRA block of width {probe.hidden} over {probe.tokens:,} tokens: {block * 1e3:.3g} ms forward and backward",
        "between devices: one device only, not measured" if link is None else f"all-reduce: {link / 1e9:.3g} GB/s",
    ]
    if device is None:
        return PUBLISHED, [*lines, "this device is not in the table of `--gpus`, so no plan can use these figures"]
    constants = dataclasses.replace(_fit_constants(device, probe, rate=rate, block=block, link=link), launch=launch)
    row = row or "CPU"
    record: dict[str, Any] = {"constants": asdict(constants)}
    if kind == "cpu" and (overhead := measure_overhead()) is not None:
        lines.append(
            f"a process: {format_bytes(overhead.libraries)} of libraries, and up to {format_bytes(overhead.least)} and "
            f"{overhead.share:.0%} of a step's tensors that allocator and kernels keep as well"
        )
        record["slack"] = asdict(overhead)
    write_cached_json(_cache_path(row), {**record, "measured": lines})
    rates_text = ", ".join(
        f"{name} {value:.3g} (published {getattr(PUBLISHED, name):.3g})" for name, value in asdict(constants).items()
    )
    return constants, [*lines, f"plans for {row} take from now on: {rates_text}", f"kept in {_cache_path(row)}"]


def _fit_constants(
    device: DeviceSpec, probe: _ProbeSizes, *, rate: float, block: float, link: float | None
) -> RooflineConstants:
    constants = dataclasses.replace(PUBLISHED, products=rate / device.flops)
    predicted = predict_seconds(_probe_layout(probe), device, network=1.0, constants=constants)
    elements = max(block - predicted.products, 0.05 * block)
    return dataclasses.replace(
        constants,
        elements=PUBLISHED.elements * elements / predicted.elements,
        fast_link=PUBLISHED.fast_link if link is None else link / device.link,
    )


def _probe_layout(probe: _ProbeSizes) -> StepLayout:
    h = probe.hidden
    return StepLayout(
        layers=1, hidden=h, heads=h // 64, products=13 * h * h, head=0, sequence=probe.tokens, rows=1, micro=1
    )


def _cache_path(row: str) -> Path:
    name = row if row != "CPU" else f"CPU-{hashlib.sha256(cpu_info()[0].encode()).hexdigest()[:12]}"
    return cache_root() / f"plan-{name}.json"


def measure_overhead() -> MemoryOverhead | None:
    """Measure the memory overhead in fresh processes, with two numbers of blocks for each precision and recomputation;
    None if the kernel or the C library does not report memory.

    The memory beyond the tensors is fitted by a line through the two sizes; the largest slope and the largest intercept
    count.
    """
    libraries, minimum, share = 0.0, 0.0, 0.0
    for precision, recompute in itertools.product(("fp32", "bf16"), ("none", "full")):
        small, large = (_spawn(_measure_overhead_bytes, 1, precision, recompute, blocks) for blocks in (2, 10))
        if small is None or large is None:
            return None
        slope = max(0.0, (large[2] - small[2]) / (large[1] - small[1]))
        libraries, share = max(libraries, small[0]), max(share, slope)
        minimum = max(minimum, small[2] - slope * small[1])
    return MemoryOverhead(int(libraries), int(minimum), share)


def _spawn(measure: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Return what rank 0 of `ranks` fresh processes measures, through JSON; each calls `measure(rank, folder,
    *arguments)` with one temporary directory."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        with without_cwd_imports():
            torch.multiprocessing.spawn(_write_measured, args=(measure, folder, *arguments), nprocs=ranks)
        return json.loads((Path(folder) / "measured").read_text(encoding="utf-8"))


def _write_measured(rank: int, measure: Callable[..., Any], folder: str, *arguments: Any) -> None:
    measured = measure(rank, folder, *arguments)
    if rank == 0:
        (Path(folder) / "measured").write_text(json.dumps(measured), encoding="utf-8")
    os._exit(0)  # gloo's threads may abort at interpreter shutdown


def _measure_overhead_bytes(
    _rank: int, _folder: str, precision: str, recompute: Literal["none", "full"], blocks: int
) -> tuple[int, int, int] | None:
    """Return the bytes of libraries, of tensors at the peak, and resident beyond both, of steps in this process."""
    import gc

    import torch

    from ..compute.memory import malloc_bytes, measure_peaks, process_bytes

    torch.set_num_threads(1)
    # a first small step, so that everything loaded on first use counts as libraries
    _build_model_step("cpu", _ProbeSizes(64, 32), 1, precision)()
    gc.collect()
    libraries, allocated_before = process_bytes("VmRSS"), malloc_bytes()
    step = _build_model_step("cpu", _ProbeSizes(256, 1024), blocks, precision, recompute, words=20_000)
    resident, allocated = measure_peaks(lambda: [step() for _ in range(_TURNS + 1)])
    if libraries is None or resident is None or allocated_before is None or allocated is None:
        return None
    return libraries, allocated - allocated_before, max(0, resident - libraries - (allocated - allocated_before))


def _shortest_run(call: Callable[[], object], kind: str) -> float:
    """Return the shortest of a few runs in seconds; on a CPU in CPU time, which a busy machine does not lengthen."""
    import torch

    clock = time.perf_counter if kind == "cuda" else time.thread_time
    seconds = []
    for _ in range(_TURNS + 1):
        started = clock()
        call()
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - started)
    return min(seconds[1:])  # the first run is a warm-up


def _measure_product_rate(kind: str, probe: _ProbeSizes) -> float:
    import torch

    from ..compute.numerics import cpu_threads

    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    n, h = probe.tokens, probe.hidden
    with cpu_threads(1 if kind == "cpu" else None):
        a, b = (torch.full(shape, 0.5, dtype=dtype, device=kind) for shape in ((n, h), (h, 4 * h)))
        return 2 * n * h * 4 * h / _shortest_run(lambda: torch.mm(a, b), kind)


def _measure_launch_seconds() -> float:
    """Return the host's seconds per kernel, from many additions that the device ends faster than they are launched."""
    import torch

    value, launches = torch.zeros(1, device="cuda"), 1000
    return _shortest_run(lambda: [value.add_(1) for _ in range(launches)], "cuda") / launches


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


def _time_all_reduce(rank: int, folder: str, kind: str, ranks: int, size: int) -> float:
    """Return the bytes/s that a rank of a ring sends in one direction in an all-reduce of `size` bytes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    values = torch.ones(size // 4, device=f"cuda:{rank}" if kind == "cuda" else "cpu")
    seconds = []
    for _ in range(_TURNS + 1):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    dist.barrier()
    return 2 * (ranks - 1) / ranks * size / min(seconds[1:])
