"""Matrix-multiplication rates of this device, measured for `train.precision: auto` and for MFU.

Two dtypes are compared on one thread by its own CPU time, which other processes on a busy machine do not change. Every
rate is the best of a few short turns within a budget: bf16 may take a hundred times as long as float32.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache_directory import cache_root, write_cached_json
from ..machine import cpu_info
from .numerics import cpu_threads

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCT = (256, 512, 512)
"""Rows, inputs and outputs of the product that compares two dtypes."""
_FEW = 32
"""Rows of a product that even the slowest kernel finishes in a few hundredths of a second."""
_TURNS = 3


@dataclass(frozen=True)
class MatmulShape:
    """Shape of a transformer block's feed-forward part for one micro-batch of half-full rows."""

    tokens: int
    width: int
    inner: int

    @classmethod
    def of(cls, *, tokens: int, width: int, inner: int) -> MatmulShape:
        """Return the shape rounded to powers of two and small enough that a block takes hundredths of a second."""

        def near(value: int, low: int, high: int) -> int:
            return min(max(1 << (max(value, 1).bit_length() - 1), low), high)

        return cls(near(tokens, 32, 256), near(width, 32, 512), near(inner, 32, 1024))


@dataclass(frozen=True)
class MatmulRates:
    """Rates of a CPU in float32 and in bf16, FLOP/s of one product (n inputs to m outputs, NN as in every backward
    pass).

    rows: of that product; fewer than in `PRODUCT` if bf16 is clearly slow.
    block: time of a LoRA block's forward and backward pass in float32 ÷ in bf16, the geometric mean of half-full and
        full rows; None if the product alone decided.
    """

    fp32: float
    bf16: float
    rows: int
    block: float | None

    @property
    def gain(self) -> float:
        """Estimated speed-up of a training step in bf16 over float32."""
        return self.block if self.block is not None else self.bf16 / self.fp32

    def __str__(self) -> str:
        _, n, m = PRODUCT
        block = "" if self.block is None else f", a LoRA block {self.block:.2f} times as fast in bf16"
        return (
            f"a product of {self.rows} × {n} × {m} runs at {self.fp32 / 1e9:.3g} GFLOP/s in fp32 and "
            f"{self.bf16 / 1e9:.3g} in bf16 on one thread{block}"
        )


_WORTH = 0.8
"""Ratio of product rates below which no block is timed: nothing else in a step is faster in bf16."""


def cpu_rates(shape: MatmulShape) -> tuple[MatmulRates, str | None]:
    """Return the CPU's rates, measured once per machine and cached.

    The second value describes what is wrong with the cached file, if anything; the rates are then measured again.
    """
    machine = _machine_key(shape)
    name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    path, problem = cache_root() / f"rates-{name}.json", None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["machine"] == machine:
            rates = MatmulRates(**record["rates"])
            if rates.fp32 > 0 and rates.bf16 > 0 and (rates.block is None or rates.block > 0):
                return rates, None
            raise ValueError
        problem = f"{path} is of another machine; measured again"
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        problem = f"{path} is torn; measured again"
    rates = measure_rates(shape)
    write_cached_json(path, {"machine": machine, "rates": asdict(rates)})
    return rates, problem


def _machine_key(shape: MatmulShape) -> dict[str, object]:
    """Return everything that a rate depends on."""
    model, flags = cpu_info()
    limits = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "DNNL_MAX_CPU_ISA")
    return {
        "cpu": model,
        "flags": hashlib.sha256(" ".join(flags).encode()).hexdigest()[:16],
        "torch": torch.__version__,
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "limits": {name: os.environ[name] for name in limits if name in os.environ},
        "shape": [shape.tokens, shape.width, shape.inner],
    }


def measure_rates(shape: MatmulShape) -> MatmulRates:
    """Time both dtypes: a small product, the full one unless bf16 is far behind, and a block unless bf16 is behind."""
    dtypes = (torch.float32, torch.bfloat16)
    with cpu_threads(1):
        rows, block = _FEW, None
        fp32, bf16 = (_measure_rate(dtype, (rows, *PRODUCT[1:])) for dtype in dtypes)
        # the full product only if bf16 can still win: it may take a hundred times as long
        if bf16 > fp32 / 4:
            rows = PRODUCT[0]
            fp32, bf16 = (_measure_rate(dtype, PRODUCT) for dtype in dtypes)
        if bf16 > _WORTH * fp32:
            full = MatmulShape.of(tokens=2 * shape.tokens, width=shape.width, inner=shape.inner)
            steps = [make_lora_block(s, dtype) for s in (shape, full) for dtype in dtypes]
            half32, half16, full32, full16 = time_interleaved(steps, turns=_TURNS, clock=time.thread_time)
            block = math.sqrt(half32 / half16 * full32 / full16)
        return MatmulRates(fp32, bf16, rows, block)


def _measure_rate(dtype: torch.dtype, product: tuple[int, int, int]) -> float:
    rows, n, m = product
    x, w = torch.full((rows, n), 0.5, dtype=dtype), torch.full((n, m), 0.5, dtype=dtype)
    (seconds,) = time_interleaved([lambda: torch.mm(x, w)], turns=2, clock=time.thread_time)
    return 2 * rows * n * m / seconds


def time_interleaved(
    calls: Sequence[Callable[[], object]], *, turns: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return each call's shortest time by `clock` in seconds: one warm-up call each, then `turns` rounds over all
    calls."""
    for call in calls:
        call()
    best = [float("inf")] * len(calls)
    for _ in range(turns):
        for i, call in enumerate(calls):
            started = clock()
            call()
            # a coarse clock may read 0: callers divide by the result
            best[i] = min(best[i], max(clock() - started, 1e-9))
    return best


def make_lora_block(shape: MatmulShape, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that runs forward and backward through a feed-forward block with LoRA of rank 8 on both frozen
    products.

    As in a training step: under autocast in `dtype`, factors in float32, with the gradient of the input.
    """
    tokens, d, inner, rank = shape.tokens, shape.width, shape.inner, 8
    x = torch.full((tokens, d), 0.5, requires_grad=True)
    up, down, norm = (torch.full(s, 0.01, dtype=dtype) for s in ((inner, d), (d, inner), (d,)))
    factors = [torch.full(s, 0.01, requires_grad=True) for s in ((rank, d), (inner, rank), (rank, inner), (d, rank))]

    def adapted(y: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(y, w) + 2.0 * F.linear(F.linear(y, a), b)

    def run() -> None:
        narrow = dtype != torch.float32
        with torch.autocast("cpu", dtype=dtype if narrow else torch.bfloat16, enabled=narrow):
            hidden = x.to(dtype)
            y = F.silu(adapted(F.layer_norm(hidden, (d,), norm), up, *factors[:2]))
            y = hidden + adapted(y, down, *factors[2:])
        torch.autograd.grad(y.float().sum(), [x, *factors])

    return run


@functools.lru_cache(maxsize=8)
def peak_rate(device: str, precision: str, width: int = 1024) -> float:
    """Return the FLOP/s of one device in its best square matrix product of `precision`, up to `width` (CUDA: 8 ×
    `width`).

    Measured on this machine, not the vendor's peak; on a CPU, one thread's rate by its own CPU time times the threads
    in use. Sizes grow while the total stays within about 0.3 seconds.
    """
    dtype, cuda = DTYPES[precision], device.startswith("cuda")
    clock = time.perf_counter if cuda else time.thread_time
    remaining, best = 0.3, 0.0
    with cpu_threads(None if cuda else 1):
        for exponent in range(-3, 4 if cuda else 1):
            size = int(width * 2.0**exponent)
            a = torch.full((size, size), 0.5, dtype=dtype, device=device)

            def call(a: Tensor = a) -> None:
                torch.mm(a, a)
                if cuda:
                    torch.cuda.synchronize()

            started = clock()
            (fastest,) = time_interleaved([call], turns=2, clock=clock)
            spent = clock() - started
            remaining -= spent
            best = max(best, 2 * size**3 / fastest)
            if remaining < 8 * spent:  # the next is eight times as much work
                break
    return best * (1 if cuda else torch.get_num_threads())
