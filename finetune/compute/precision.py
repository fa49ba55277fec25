"""In what a step computes: the values of `train.precision`, what each means to torch, and what `auto` takes.

    choice = choose(train, device, shape)        # fp32, bf16 or fp16, with its figures in a line
    with autocast(train, device): ...

On a CPU bf16 is between five times as fast as float32 (AMX) and a hundredth of it (AVX2, where torch multiplies
element by element: pytorch#146508), and the instruction flags do not tell which: AVX512 without BF16 is slower, too,
and even AVX512_BF16 loses to float32 where the products' inputs must be converted. So `auto` times both.

**Widened weights.** A frozen backbone kept in bf16 that computes in float32: half the memory, each weight widened when
it is used.

For machines whose memory cannot hold the float32 weights and whose products are slow in bf16. A product's weight is
widened for the product and dropped; the backward pass widens it again instead of keeping it. Widening is exact, so the
step is that of a float32 backbone with these (rounded) weights, up to the order of sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Precision, Train
from ..errors import UserError
from .capabilities import capabilities
from .matmul_rate import DTYPES, MatmulShape, Rates, cpu_rates

GAIN = 1.2
"""How much faster bf16 must be to be taken for float32: a product of `products.PRODUCT`, and the LoRA block."""
_BLOCK_GAIN = 1.1
"""The same of a whole block, in which the products' gain is diluted already."""
_BF16_FROM, _FP16_FROM = (8, 0), (7, 0)
"""CUDA compute capability from which on tensor cores multiply bf16 (Ampere) and fp16 (Volta)."""


@dataclass(frozen=True)
class Choice:
    """What `train.precision` comes to on a device."""

    precision: str
    why: str
    """Its figures, for a person and for the resolved recipe."""
    note: str | None = None
    """What the user should know besides: bf16 that he asked for and that is slow, a kept measurement that was bad."""


def choose(train: Train, device: torch.device, shape: MatmulShape) -> Choice:
    """Settle `train.precision` for `device`.

    shape: of a feed-forward block of the run, which a CPU is timed with.
    Raises UserError for a precision that the device does not have.
    """
    asked = train.precision
    if device.type == "cuda":
        return cuda_choice(asked, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    if asked == "fp16":
        raise UserError(
            "train.precision: fp16 is for CUDA devices (a CPU has no fast fp16 products); take auto, fp32 or bf16"
        )
    if train.tf32:
        raise UserError("train.tf32 is for CUDA devices; leave it off")
    if asked == "fp32":
        return Choice("fp32", "asked for")
    rates, wrong = cpu_rates(shape)
    if asked == "bf16":
        slow = (
            f"precision: bf16 as asked, but on this CPU it is slower than fp32, by a factor of {1 / rates.gain:.3g} "
            f"({rates}); train.precision: auto takes fp32"
        )
        return Choice("bf16", "asked for", slow if rates.gain < 1 else wrong)
    return Choice(faster(rates), f"{rates}", wrong)


def block_shape(directory: Path | None, *, tokens: int = 256) -> MatmulShape:
    """Of a transformer block of the backbone in `directory` in a micro-batch of so many tokens; middling where its
    config.json does not tell, or is not to be had."""
    width = inner = 512
    try:
        if directory is not None:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config") or config
            width = next((int(config[key]) for key in ("hidden_size", "d_model", "n_embd") if config.get(key)), width)
            wide = next((config[key] for key in ("intermediate_size", "d_ff") if config.get(key)), 4 * width)
            inner = int(max(wide) if isinstance(wide, list) else wide)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        pass  # whoever loads the backbone says what is wrong
    return MatmulShape.of(tokens=tokens, width=width, inner=inner)


def loading_dtype(precision: Precision, directory: Path, device: str | torch.device, *, narrow: bool) -> torch.dtype:
    """What the weights in `directory` are kept in: bf16 where they are kept `narrow`, else what `precision` computes
    in, `auto` settled by `device`."""
    if narrow:
        return torch.bfloat16
    if precision == "auto":
        return DTYPES[choose(Train(), torch.device(device), block_shape(directory)).precision]
    return DTYPES[precision]


def faster(rates: Rates) -> str:
    """`bf16` where both its product and a whole block are faster by enough, else `fp32`."""
    enough = rates.bf16 >= GAIN * rates.fp32 and rates.block is not None and rates.block >= _BLOCK_GAIN
    return "bf16" if enough else "fp32"


def cuda_choice(asked: str, name: str, capability: tuple[int, int]) -> Choice:
    """`choose` for the CUDA device `name` of that compute capability."""
    where = f"{name} (sm {capability[0]}.{capability[1]})"
    if asked == "bf16" and capability < _BF16_FROM:
        other = "fp16" if capability >= _FP16_FROM else "fp32"
        raise UserError(f"train.precision: bf16: {where} has no bf16 instructions; take auto or {other}")
    if asked == "fp16" and capability < _FP16_FROM:
        raise UserError(f"train.precision: fp16: {where} has no fast fp16 products; take auto or fp32")
    if asked != "auto":
        return Choice(asked, "asked for")
    if capability >= _BF16_FROM:
        return Choice("bf16", f"{where} multiplies bf16 natively")
    if capability >= _FP16_FROM:
        return Choice("fp16", f"{where} multiplies fp16 and not bf16 natively; losses are scaled")
    return Choice("fp32", f"{where} has neither bf16 nor fast fp16 products")


# --------------------------------------------------------------------------------------------- what it means to torch


def read_precision(train: Train, model: nn.Module) -> Train:
    """`train` with `precision: auto` read off what `model` keeps its frozen weights in: whoever loaded it has chosen.

    Commands settle it before they load (`choose`); this is for stages that are trained from Python.
    """
    if train.precision != "auto":
        return train
    if any(isinstance(module, WidenedLinear) for module in model.modules()):
        return dataclasses.replace(train, precision="fp32")
    kept = {p.dtype for p in model.parameters() if not p.requires_grad}
    found = next((name for name in ("bf16", "fp16") if DTYPES[name] in kept), "fp32")
    return dataclasses.replace(train, precision=found)  # type: ignore[arg-type]


def compute_dtype(train: Train) -> torch.dtype:
    """The dtype of a step's products. `train.precision` must be settled."""
    assert train.precision != "auto", "train.precision is settled before anything computes"
    return DTYPES[train.precision]


def autocast_dtype(train: Train) -> torch.dtype | None:
    """The dtype that autocast takes; None for float32, which needs none."""
    dtype = compute_dtype(train)
    return None if dtype == torch.float32 else dtype


def adapter_dtype(train: Train) -> torch.dtype:
    """The dtype that adapters are kept in: float32, unless asked otherwise."""
    return DTYPES["fp32" if train.adapter_precision == "auto" else train.adapter_precision]


@contextlib.contextmanager
def float32_products(train: Train, device: torch.device) -> Iterator[None]:
    """TF32 in float32 products on CUDA inside, where `train.tf32` asks for it; what was set before comes back."""
    if not (train.tf32 and device.type == "cuda"):
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def autocast(train: Train, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast in the precision of `train`; float32 needs none."""
    dtype = autocast_dtype(train)
    return contextlib.nullcontext() if dtype is None else torch.autocast(capabilities(device).autocast, dtype=dtype)


# ------------------------------------------------------------------------------ weights kept narrower than they compute


class _Product(torch.autograd.Function):
    """x (…, n) times the frozen weight (m, n), narrower than x, transposed: (…, m)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return upstream @ weight.to(upstream.dtype), None


class WidenedLinear(nn.Linear):
    """nn.Linear whose frozen weight is kept narrow; its bias is in the dtype of the product."""

    def forward(self, input: Tensor) -> Tensor:
        out = _Product.apply(input, self.weight)
        return out if self.bias is None else out + self.bias


class WidenedEmbedding(nn.Embedding):
    """nn.Embedding whose frozen rows are kept narrow and come out in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


_WIDENED = {nn.Linear: WidenedLinear, nn.Embedding: WidenedEmbedding}


@torch.no_grad()
def widen_on_use(model: nn.Module, *, where: str) -> None:
    """Let `model`, frozen and loaded in bf16, compute in float32 with the weights it has, in place.

    Weights of linear layers and embeddings stay in bf16; everything else (norms, biases, buffers) becomes float32.
    PEFT wraps the layers like any others.

    Raises:
        UserError: beginning with `where`: most of the weights are not of such layers.
    """
    narrow: set[int] = set()
    for module in model.modules():
        if type(module) in _WIDENED:
            module.__class__ = _WIDENED[type(module)]
            narrow.add(id(module.weight))
    for parameter in model.parameters():
        if id(parameter) not in narrow:
            parameter.data = parameter.data.float()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.bfloat16:
                module._buffers[name] = buffer.float()
    kept = sum(p.numel() for p in model.parameters() if id(p) in narrow)
    if 2 * kept < sum(p.numel() for p in model.parameters()):
        raise UserError(
            f"{where}: most of its weights are in layers that cannot be kept in bf16 under fp32 compute; set "
            "train.backbone_precision: same"
        )
    model.config.dtype = torch.float32
