"""Choice of the kernel that computes the loss from the last hidden states on a CUDA device: our slices or another one.

Liger's (2410.10989; extra `cuda`) and torch's own from 2.13 on fuse the head's product with the cross entropy, as ours
does. At the start of a stage a kernel is chosen if its loss and gradient on the first micro-batch equal ours within
rounding and it takes at most `GAIN` of our time. A resumed stage keeps its kernel. Never on a CPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..atomic import write_json
from ..config import Train
from .cuda_status import is_cuda, product_dtype
from .loss import IGNORED, Head, align_targets, linear_cross_entropy
from .micro_batch import MicroBatch
from .numerics import attention_kernel, evaluation_mode
from .precision import autocast, compute_dtype
from .protocols import LossTask, MeshModel

RECORD = "loss_kernel.json"
GAIN = 0.95
"""Largest share of our time that another kernel may take to be chosen."""
OURS = "slices"
_TURNS = 4
_GET = "pip install 'flatshift[cuda]'"
_LOSS_ROUNDING = {torch.float32: 1e-5}
_GRADIENT_ROUNDING = {torch.float32: 1e-4}
_HALF_LOSS, _HALF_GRADIENT = 2e-3, 2e-2
"""Relative differences of loss and gradient allowed for rounding in half precision."""


class FusedLossKernel(Protocol):
    """Alternative implementation of `flatshift.finetune.compute.loss.linear_cross_entropy`."""

    def __call__(self, hidden: Tensor, linear: nn.Linear, targets: Tensor, *, smoothing: float = 0.0) -> Tensor: ...


class MicroBatches(Protocol):
    """Micro-batches of each step on this rank (`flatshift.finetune.data.batches.TrainingDataLoader`)."""

    def at(self, step: int, /) -> Sequence[MicroBatch]: ...


# ------------------------------------------------------------------------------------------- available kernels


def available_kernels() -> dict[str, FusedLossKernel]:
    """Return the kernels available here by name; their packages are not imported yet."""
    kernels: dict[str, FusedLossKernel] = {}
    if importlib.util.find_spec("liger_kernel") is not None:
        kernels["liger"] = _liger
    if hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions"):
        kernels["torch"] = _torch
    return kernels


def _operands(hidden: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias in the dtype of the product: autocast's if enabled, else the hidden
    states'."""
    dtype = product_dtype(hidden)
    return hidden.to(dtype), linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype)


def _liger(hidden: Tensor, linear: nn.Linear, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    rows, weight, bias = _operands(hidden, linear)
    with torch.autocast(hidden.device.type, enabled=False):
        result = liger_fused_linear_cross_entropy(
            rows, weight, targets, bias=bias, reduction="sum", label_smoothing=smoothing
        )
    loss: Tensor = result if isinstance(result, Tensor) else result[0]
    return loss.float()


def _torch(hidden: Tensor, linear: nn.Linear, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    if smoothing:
        raise ValueError("its slices know no label smoothing")
    rows, weight, bias = _operands(hidden, linear)
    compute: Any = F.linear_cross_entropy  # type: ignore[attr-defined]
    options: Any = nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = compute(rows, weight, targets, linear_bias=bias, reduction="sum", options=options)
    return loss.float()


# --------------------------------------------------------------------------------------------- the trial


@dataclass(frozen=True)
class KernelTrial:
    """Result of one kernel on a micro-batch."""

    seconds: float
    """Forward and backward, the best turn; infinite if it failed or its result differs."""
    wrong: str = ""
    """Reason it cannot be used."""


def benchmark_kernels(
    kernels: Mapping[str, FusedLossKernel], hidden: Tensor, linear: nn.Linear, targets: Tensor, *, ratio: float = 0.0
) -> dict[str, KernelTrial]:
    """Time our slices (under `OURS`) and each of `kernels` on hidden states (n, D), alternating the order of the turns.

    ratio: ε of label smoothing.
    """
    computed = {}
    trials: dict[str, KernelTrial] = {}
    candidates: dict[str, FusedLossKernel] = {OURS: linear_cross_entropy, **kernels}
    for name, kernel in candidates.items():
        try:
            computed[name] = _loss_and_gradient(kernel, hidden, linear, targets, ratio)
        except Exception as error:  # a third-party kernel may raise anything: compiler, limits, memory
            text = str(error).strip()
            trials[name] = KernelTrial(math.inf, text.splitlines()[0] if text else type(error).__name__)
    for name, (loss, gradient) in computed.items():
        if name != OURS and (difference := _describe_difference(computed[OURS], (loss, gradient))) is not None:
            trials[name] = KernelTrial(math.inf, difference)
    good = [name for name in candidates if name not in trials]
    best = dict.fromkeys(good, math.inf)
    for turn in range(_TURNS):
        for name in good if turn % 2 else reversed(good):
            started = _synchronised_time(hidden.device)
            _loss_and_gradient(candidates[name], hidden, linear, targets, ratio)
            best[name] = min(best[name], _synchronised_time(hidden.device) - started)
    return trials | {name: KernelTrial(seconds) for name, seconds in best.items()}


def _loss_and_gradient(
    kernel: FusedLossKernel, hidden: Tensor, linear: nn.Linear, targets: Tensor, ratio: float
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient with respect to the hidden states."""
    with torch.enable_grad():
        rows = hidden.detach().requires_grad_()
        loss = kernel(rows, linear, targets, smoothing=ratio)
        (gradient,) = torch.autograd.grad(loss, rows)
    return loss.detach(), gradient


def _describe_difference(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> str | None:
    """Describe the difference beyond rounding; None if there is none."""
    (loss, gradient), (other, its) = ours, theirs
    dtype = product_dtype(gradient)
    off = float((other.double() - loss.double()).abs() / loss.double().abs().clamp_min(1e-30))
    if not off <= _LOSS_ROUNDING.get(dtype, _HALF_LOSS):
        return f"its loss differs by {off:.1e}"
    apart = float((its.double() - gradient.double()).norm() / gradient.double().norm().clamp_min(1e-30))
    if not apart <= _GRADIENT_ROUNDING.get(dtype, _HALF_GRADIENT):
        return f"its gradient differs by {apart:.1e}"
    return None


def _synchronised_time(device: torch.device) -> float:
    if is_cuda(device):
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --------------------------------------------------------------------------------------------- the choice


def choose_loss_kernel(
    engine: MeshModel,
    head: Head | None,
    batches: MicroBatches,
    *,
    task: LossTask,
    train: Train,
    folder: Path,
    log: Callable[[str], None],
    kernels: Mapping[str, FusedLossKernel] | None = None,
) -> Head | None:
    """Return `head` with the kernel for the stage's loss; collective on a mesh, where all ranks choose the same.

    batches: the kernels are tried on this rank's first micro-batch.
    folder: directory of the stage, where the choice is stored.
    log: receives one line with the choice and its reason.
    """
    if head is None or head.cap is not None or not is_cuda(engine.device) or engine.world.width("tp", "pp", "cp") > 1:
        return head
    if hasattr(head.linear, "vocabulary"):  # the ranks share its product
        return head
    if task.dft:  # other kernels return no term per token
        return head
    if train.deterministic:  # timings vary between runs, and the other kernels add in no fixed order
        return head
    kernels = available_kernels() if kernels is None else kernels
    saved = _broadcast_choice(engine, _read_saved_choice(folder))
    if saved is not None:
        if saved != OURS and saved not in kernels:
            log(f"warning: loss: the stage began with the kernel {saved}, which is not here any more; {_GET}")
        return replace(head, kernel=kernels.get(saved))
    if not kernels:
        log(f"loss: our slices, no other kernel is here ({_GET})")
        return head
    trials = _try_kernels(engine, head, batches.at(0)[0], task=task, train=train, kernels=kernels)
    seconds = _max_over_ranks(engine, {name: trials[name].seconds for name in (OURS, *kernels)})
    fastest = min(kernels, key=lambda name: seconds[name])
    name = fastest if seconds[fastest] <= GAIN * seconds[OURS] else OURS
    log(_format_choice(name, seconds, trials))
    if engine.is_main:
        shown = {each: None if math.isinf(value) else value for each, value in seconds.items()}
        why = {each: trial.wrong for each, trial in trials.items() if trial.wrong}
        write_json(folder / RECORD, {"kernel": name, "seconds": shown, "wrong": why})
    return replace(head, kernel=kernels.get(name))


def _try_kernels(
    engine: MeshModel,
    head: Head,
    micro: MicroBatch,
    *,
    task: LossTask,
    train: Train,
    kernels: Mapping[str, FusedLossKernel],
) -> dict[str, KernelTrial]:
    """Try the kernels on the hidden states of `micro` inside the head's own forward, where FSDP2 has gathered its
    weights."""
    batch, trials = micro.to(engine.device), dict[str, KernelTrial]()

    def cost(hidden: Tensor) -> Tensor:
        values, targets = align_targets(hidden, batch.labels, task)
        mask = targets != IGNORED
        trials.update(benchmark_kernels(kernels, values[mask], head.linear, targets[mask], ratio=task.smoothing))
        return hidden.new_zeros(1, 1, 1)

    around = autocast(train, engine.device) if compute_dtype(train) != torch.float32 else contextlib.nullcontext()
    with (
        evaluation_mode(engine.eval_model),
        torch.no_grad(),
        around,
        head.computing(cost),
        attention_kernel(batch.inputs),
    ):
        engine.eval_model(**batch.inputs)
    engine.reshard()
    return trials


def _format_choice(name: str, seconds: Mapping[str, float], trials: Mapping[str, KernelTrial]) -> str:
    def figure(each: str) -> str:
        known = f"{1000 * seconds[each]:.3g} ms" if math.isfinite(seconds[each]) else "not on every rank"
        return f"{each} {trials[each].wrong or known}"

    others = ", ".join(figure(each) for each in seconds if each != name)
    what = "our slices" if name == OURS else f"the kernel of {name}"
    return f"loss: {what}, {1000 * seconds[name]:.3g} ms on the first micro-batch ({others})"


def _read_saved_choice(folder: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / RECORD).read_text(encoding="utf-8"))["kernel"])
    return None


def _broadcast_choice(engine: MeshModel, name: str | None) -> str | None:
    """Return rank 0's value on every rank."""
    if engine.world.size == 1:
        return name
    box = [name]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _max_over_ranks(engine: MeshModel, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each kernel's time on its slowest rank, the same on every rank."""
    if engine.world.size == 1:
        return dict(seconds)
    times = torch.tensor(list(seconds.values()), dtype=torch.float64, device=engine.device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return dict(zip(seconds, times.tolist(), strict=True))
