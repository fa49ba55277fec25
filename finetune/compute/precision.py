"""Precision of a step: the values of `train.precision`, their meaning in torch, and the choice of `auto`.

    choice = resolve_precision(train, device, shape)   # fp32, bf16 or fp16, with its measurements in a line
    with autocast(train, device): ...

On a CPU bf16 is between five times as fast as float32 (AMX) and a hundredth of it (AVX2: pytorch#146508), and the
instruction flags do not decide, so `auto` times both.

`widen_on_use` is for machines whose memory cannot hold the float32 weights and whose bf16 products are slow. A weight
is widened for its product and dropped, which is exact.
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
from .matmul_rate import DTYPES, MatmulRates, MatmulShape, cpu_rates
from .numerics import forward_precision

GAIN = 1.2
"""Minimum speed-up of bf16 over float32 to choose it, in the product `matmul_rate.PRODUCT`."""
_BLOCK_GAIN = 1.1
"""Minimum speed-up of a whole LoRA block, in which the products' gain is already diluted."""
_BF16_FROM, _FP16_FROM = (8, 0), (7, 0)
"""Lowest CUDA compute capability whose tensor cores multiply bf16 (Ampere) and fp16 (Volta)."""


@dataclass(frozen=True)
class PrecisionChoice:
    """Resolved value of `train.precision` on a device.

    `why`: measurements behind it, for the user and for the resolved recipe; `note`: warning for the user, of requested
    bf16 that is slow or a damaged cached measurement.
    """

    precision: str
    why: str
    note: str | None = None


def resolve_precision(train: Train, device: torch.device, shape: MatmulShape) -> PrecisionChoice:
    """Resolve `train.precision` for `device`. Raises UserError if the device does not have it.

    shape: of a feed-forward block of the run, used to time a CPU.
    """
    requested = train.precision
    if device.type == "cuda":
        return resolve_cuda_precision(
            requested, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        )
    if requested == "fp16":
        raise UserError(
            "train.precision: fp16 is for CUDA devices (a CPU has no fast fp16 products); take auto, fp32 or bf16"
        )
    if train.tf32:
        raise UserError("train.tf32 is for CUDA devices; leave it off")
    if requested == "fp32":
        return PrecisionChoice("fp32", "asked for")
    rates, problem = cpu_rates(shape)
    if requested == "bf16":
        slow = (
            f"precision: bf16 as asked, but on this CPU it is slower than fp32, by a factor of {1 / rates.gain:.3g} "
            f"({rates}); train.precision: auto takes fp32"
        )
        return PrecisionChoice("bf16", "asked for", slow if rates.gain < 1 else problem)
    return PrecisionChoice(faster_precision(rates), f"{rates}", problem)


def feed_forward_shape(directory: Path | None, *, tokens: int = 256) -> MatmulShape:
    """Return the feed-forward shape of the base model in `directory` for a micro-batch of that many tokens.

    A medium size if its config.json is missing or does not specify it.
    """
    width = inner = 512
    try:
        if directory is not None:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config") or config
            width = next((int(config[key]) for key in ("hidden_size", "d_model", "n_embd") if config.get(key)), width)
            wide = next((config[key] for key in ("intermediate_size", "d_ff") if config.get(key)), 4 * width)
            inner = int(max(wide) if isinstance(wide, list) else wide)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        pass  # loading the base model reports the error
    return MatmulShape.of(tokens=tokens, width=width, inner=inner)


def loading_dtype(precision: Precision, directory: Path, device: str | torch.device, *, narrow: bool) -> torch.dtype:
    """Return the dtype to store the weights of `directory` in: bf16 if `narrow`, else the compute dtype of `precision`,
    with `auto` resolved for `device`."""
    if narrow:
        return torch.bfloat16
    if precision == "auto":
        return DTYPES[resolve_precision(Train(), torch.device(device), feed_forward_shape(directory)).precision]
    return DTYPES[precision]


def faster_precision(rates: MatmulRates) -> str:
    """Return `bf16` if its product and a whole block are both faster by enough, else `fp32`."""
    enough = rates.bf16 >= GAIN * rates.fp32 and rates.block is not None and rates.block >= _BLOCK_GAIN
    return "bf16" if enough else "fp32"


def resolve_cuda_precision(requested: str, name: str, capability: tuple[int, int]) -> PrecisionChoice:
    """Resolve the `requested` precision for the CUDA device `name` of that compute capability."""
    device = f"{name} (sm {capability[0]}.{capability[1]})"
    has_bf16, has_fp16 = capability >= _BF16_FROM, capability >= _FP16_FROM
    if requested == "bf16" and not has_bf16:
        other = "fp16" if has_fp16 else "fp32"
        raise UserError(f"train.precision: bf16: {device} has no bf16 instructions; take auto or {other}")
    if requested == "fp16" and not has_fp16:
        raise UserError(f"train.precision: fp16: {device} has no fast fp16 products; take auto or fp32")
    if requested != "auto":
        return PrecisionChoice(requested, "asked for")
    if has_bf16:
        return PrecisionChoice("bf16", f"{device} multiplies bf16 natively")
    if has_fp16:
        return PrecisionChoice("fp16", f"{device} multiplies fp16 and not bf16 natively; losses are scaled")
    return PrecisionChoice("fp32", f"{device} has neither bf16 nor fast fp16 products")


def infer_precision(train: Train, model: nn.Module) -> Train:
    """Resolve `precision: auto` of `train` from the dtype of the frozen weights of `model`.

    Commands resolve it before loading (`resolve_precision`); this is for stages that are trained from Python.
    """
    if train.precision != "auto":
        return train
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    if any(isinstance(module, WidenedLinear) for module in model.modules()):
        frozen = set()
    precision = next((name for name in ("bf16", "fp16") if DTYPES[name] in frozen), "fp32")
    return dataclasses.replace(train, precision=precision)  # type: ignore[arg-type]


def compute_dtype(train: Train) -> torch.dtype:
    """Return the dtype of a step's products. `train.precision` must be resolved."""
    assert train.precision != "auto", "train.precision is settled before anything computes"
    return DTYPES[train.precision]


def autocast_dtype(train: Train) -> torch.dtype | None:
    """Return the dtype for autocast; None for float32, which needs none."""
    dtype = compute_dtype(train)
    return None if dtype == torch.float32 else dtype


def adapter_dtype(train: Train) -> torch.dtype:
    """Return the dtype that adapters are stored in: float32 unless set otherwise."""
    return DTYPES["fp32" if train.adapter_precision == "auto" else train.adapter_precision]


@contextlib.contextmanager
def tf32_products(train: Train, device: torch.device) -> Iterator[None]:
    """Enable TF32 in float32 products on CUDA inside if `train.tf32` is set; restore the previous setting on exit."""
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
    """Return autocast in the precision of `train`; a null context for float32."""
    return forward_precision(device, autocast_dtype(train))


class _WidenedProduct(torch.autograd.Function):
    """x (…, n) times the transposed frozen weight (m, n), stored narrower than x: (…, m)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return upstream @ weight.to(upstream.dtype), None


class WidenedLinear(nn.Linear):
    """nn.Linear with a narrow frozen weight; its bias is in the dtype of the product."""

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.requires_grad:  # a copy that trains: a head, or a module of adapter.train_whole
            return F.linear(input, self.weight.to(input.dtype), self.bias)
        out = _WidenedProduct.apply(input, self.weight)
        return out if self.bias is None else out + self.bias


class WidenedEmbedding(nn.Embedding):
    """nn.Embedding with narrow frozen rows and float32 output."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


_WIDENED = {nn.Linear: WidenedLinear, nn.Embedding: WidenedEmbedding}


@torch.no_grad()
def widen_on_use(model: nn.Module, *, context: str) -> None:
    """Make `model`, frozen and loaded in bf16, compute in float32 with its current weights, in place.

    Weights of linear layers and embeddings stay in bf16; everything else (norms, biases, buffers) becomes float32. PEFT
    wraps the layers like any others. Raises UserError that starts with `context` if most of the weights are not in such
    layers.
    """
    narrow: set[int] = set()
    for module in model.modules():
        if type(module) in _WIDENED:
            module.__class__ = _WIDENED[type(module)]
            narrow.add(id(module.weight))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.bfloat16:
                module._buffers[name] = buffer.float()
    narrow_count = total = 0
    for parameter in model.parameters():
        total += parameter.numel()
        if id(parameter) in narrow:
            narrow_count += parameter.numel()
        else:
            parameter.data = parameter.data.float()
    if 2 * narrow_count < total:
        raise UserError(
            f"{context}: most of its weights are in layers that cannot be kept in bf16 under fp32 compute; set "
            "train.backbone_precision: same"
        )
    model.config.dtype = torch.float32
