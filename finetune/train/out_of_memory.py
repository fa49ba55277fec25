"""Error message of a stage that runs out of memory: the plan next to measured memory, and the two cheapest changes.

Changes are ordered by their cost to the run: first those that leave its steps unchanged (smaller micro-batches,
recomputed activations), then fewer bits for the base model or the moments, last shorter rows. Each states what it saves
by the plan; one that saves next to nothing is omitted.
"""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..compute.memory import machine_memory, process_bytes
from ..config import Optimizer, Train
from ..errors import OutOfMemory, is_out_of_memory
from ..figures import format_bytes
from ..models.anatomy import transformer_blocks
from ..models.quantize import quantization_scales
from ..parallel.engine import Engine
from ..parallel.layout import local_part
from ..planner.memory import MemoryPlan, memory_plan, optimizer_state_bytes
from ..planner.rules import RuleSettings, broken_rule
from ..run_directory import resume_command
from .checkpointer import Checkpointer, checkpoint_steps
from .stage import TrainingStage

_WORTH = 0.03
"""Smallest share of the plan that a proposed change must save."""
_NF4_BYTES = 0.5 + 4 / 64
"""Bytes per value in 4 bits, including its share of a scale (`flatshift.finetune.models.quantize`)."""
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?([KMGT]i?B|bytes)", re.IGNORECASE)


@dataclass(frozen=True)
class MemoryAtFailure:
    """Memory in bytes at the failure.

    device: cuda:0, or `this machine`.
    used: by allocated tensors on a CUDA device; by the process (resident) on a CPU.
    reserved: by the allocator on a CUDA device, including gaps; None on a CPU.
    total: size of the device or of the machine's memory; None if unknown.
    others: of other processes on a CUDA device.
    """

    device: str
    used: int
    reserved: int | None
    total: int | None
    others: int = 0

    def __str__(self) -> str:
        total = f" of {format_bytes(self.total)}" if self.total is not None else ""
        if self.reserved is None:
            return f"{format_bytes(self.used)} held by the process{total} on {self.device}"
        others = f", {format_bytes(self.others)} by other processes" if self.others > (self.total or 0) / 50 else ""
        return (
            f"{format_bytes(self.used)} allocated and {format_bytes(self.reserved)} reserved{others}{total} on "
            f"{self.device}"
        )


@dataclass(frozen=True)
class SettingChange:
    """One proposed change: the setting with its value, its effect on the run, and the bytes saved by the plan."""

    setting: str
    cost: str
    saves: int

    def __str__(self) -> str:
        return f"{self.setting} ({self.cost}; saves {format_bytes(self.saves)} by the plan)"


def measure_memory(device: torch.device) -> MemoryAtFailure:
    """Return the memory in use now; call it before the failed pass is released."""
    if device.type == "cuda":
        used, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        return MemoryAtFailure(str(device), used, reserved, total, max(0, total - free - reserved))
    return MemoryAtFailure("this machine", process_bytes("VmRSS") or 0, None, machine_memory())


def failed_allocation_bytes(error: BaseException) -> int | None:
    """Return the bytes of the failed allocation, parsed from torch's message; None if it does not contain them."""
    match = _REQUESTED.search(str(error))
    if match is None:
        return None
    number, unit = match.groups()
    power = "kmgt".find(unit[0].lower()) + 1 if unit.lower() != "bytes" else 0
    return round(float(number) * 1024**power)


def plan_memory(engine: Engine, *, train: Train, optimizer: Optimizer, measured: MemoryAtFailure) -> MemoryPlan:
    """Return the memory plan of this rank. On a mesh activations are not planned: they are the measured remainder."""
    if engine.world.size == 1:
        try:
            return memory_plan(engine.model, train=train, optimizer=optimizer)
        except Exception:  # too little memory even for a short row
            gc.collect()
    adapter = sum(local_part(p).nbytes for p in engine.parameters.values())
    frozen = sum(local_part(p).nbytes for p in engine.model.parameters() if not p.requires_grad)
    frozen += sum(scale.nbytes for scale in quantization_scales(engine.model).values())
    moments = optimizer_state_bytes(engine.parameters, optimizer, train)
    return MemoryPlan(frozen, adapter, adapter, moments, max(0, measured.used - (frozen + 2 * adapter + moments)))


def propose_changes(
    engine: Engine, plan: MemoryPlan, *, train: Train, optimizer: Optimizer, rules: RuleSettings | None = None
) -> list[SettingChange]:
    """Return the changes that this run and the rules about its settings allow and that save something, the cheapest
    first."""
    world, changes = engine.world, []
    rows = train.batch_size // engine.share[1]
    divisor = next((n for n in range(2, rows + 1) if rows % n == 0), None)
    if divisor is not None and world.width("pp") == 1:
        setting = f"train.batch_size {train.batch_size // divisor} with train.accumulate {train.accumulate * divisor}"
        cost = "other samples in a step" if train.group == "length" else "the same steps"
        changes.append(SettingChange(setting, cost, plan.activations - plan.activations // divisor))
    checkpointed = _full_checkpointing_bytes(engine.model, plan, rows=rows, train=train)
    if train.checkpointing != "full" and not train.compile and checkpointed is not None:
        saves = max(0, plan.activations - checkpointed)
        changes.append(SettingChange("train.checkpointing: full", "the same steps, about a third slower", saves))
    # packed weights fit an adapter whose initialisation has subtracted nothing from them
    plain = all(
        getattr(config, "init_lora_weights", None) in (True, False)
        for config in getattr(engine.peft, "peft_config", {}).values()
    )
    plain = plain and _is_allowed(rules, train=replace(train, quantization="nf4"))
    if train.quantization is None and not train.compile and world.width("tp", "pp") == 1 and plain:
        saves = _four_bit_savings(engine.model)
        changes.append(SettingChange("train.quantization: nf4", "another backbone, to rounding; extra `quant`", saves))
    if optimizer.kind == "adamw" and world.size == 1:
        saves = plan.optimizer - optimizer_state_bytes(engine.parameters, replace(optimizer, kind="adamw-8bit"), train)
        changes.append(SettingChange("optimizer.kind: adamw-8bit", "moments in 8 bits; extra `quant`", saves))
    if (shorter := train.max_length // 2) >= 2:
        cost = "longer samples are cut"
        changes.append(SettingChange(f"train.max_length {shorter}", cost, plan.activations // 2))
    return [change for change in changes if change.saves > _WORTH * plan.total]


def _is_allowed(rules: RuleSettings | None, **changed: Any) -> bool:
    return rules is None or broken_rule(replace(rules, **changed)) is None


def _full_checkpointing_bytes(model: nn.Module, plan: MemoryPlan, *, rows: int, train: Train) -> int | None:
    """Return the activation bytes under `train.checkpointing: full`: each block's input, and one block's own at a
    time."""
    depth = len(transformer_blocks(model))
    hidden: Any = getattr(getattr(model, "config", None), "hidden_size", None)
    if not depth or not isinstance(hidden, int):
        return None
    width = 2 if train.precision != "fp32" else 4
    return rows * train.max_length * hidden * width * depth + plan.activations // depth


def _four_bit_savings(model: nn.Module) -> int:
    """Return the bytes that 4 bits save for the frozen linear layers, except the head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    saved = 0.0
    for module in model.modules():
        if type(module) is nn.Linear and module is not head and not module.weight.requires_grad:
            weight = local_part(module.weight)
            saved += weight.nbytes - weight.numel() * _NF4_BYTES
    return max(0, int(saved))


@contextlib.contextmanager
def oom_context(activity: str) -> Iterator[None]:
    """Attach `activity` to an exception raised inside, for the message of `OutOfMemoryHandler`."""
    try:
        yield
    except Exception as error:
        vars(error).setdefault("activity", activity)
        raise


class OutOfMemoryHandler(contextlib.AbstractContextManager["OutOfMemoryHandler"]):
    """Surrounds a stage: an error inside that means memory ran out leaves as an OutOfMemory with one message."""

    def __init__(self, engine: Engine, stage: TrainingStage) -> None:
        self._engine, self._stage = engine, stage
        self.checkpointer: Checkpointer | None = None
        """Provides the current step; None until the stage has one."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            return
        before = "the tests before the first step"
        step = before if self.checkpointer is None else f"step {self.checkpointer.progress.step + 1}"
        raise self._out_of_memory(error, vars(error).get("activity", step)) from error

    def _out_of_memory(self, error: Exception, activity: str) -> OutOfMemory:
        """Return the error to raise: the failure, the plan, the two cheapest changes, and how the run continues."""
        engine, stage, run = self._engine, self._stage, self._stage.run
        measured = measure_memory(engine.device)
        run.log(f"{stage.name}: out of memory in {activity}: {str(error).strip()}")
        # planning below runs a short pass, which needs the memory of the failed one
        _free_failed_pass(error, engine)
        train = stage.task.traits.count_token_rows(stage.train)
        plan = plan_memory(engine, train=train, optimizer=stage.optimizer, measured=measured)
        rules = stage.rules
        changes = propose_changes(engine, plan, train=stage.train, optimizer=stage.optimizer, rules=rules)
        rank = f"rank {engine.world.rank} " if engine.world.size > 1 else ""
        requested = failed_allocation_bytes(error)
        more = f" and {format_bytes(requested)} more asked for" if requested else ""
        causes = {
            "backbone": plan.backbone,
            "adapter": plan.adapter,
            "gradients": plan.gradients,
            "optimizer state": plan.optimizer,
            "activations": plan.activations,
        }
        causes |= {name: count for name, count in (("work", plan.work), ("regularizer", plan.regularizer)) if count}
        planned = ", ".join(f"{name} {format_bytes(count)}" for name, count in causes.items())
        advice = ", then ".join(map(str, changes[:2])) or "a smaller backbone, or a device with more memory"
        message = (
            f"{stage.name}: {rank}ran out of memory in {activity}: {measured}{more}; planned "
            f"{format_bytes(plan.total)} ({planned}). Cheapest changes: {advice}"
        )
        step = max(checkpoint_steps(run.state), default=None)
        earlier = any((run.path / "stages").glob("*/done.json")) or (run.path / "selection" / "manifest.json").is_file()
        if step is None and not earlier:
            return OutOfMemory(f"{message}. Nothing is kept: no checkpoint had been written", resumable=False)
        state = f"The checkpoint of step {step} is" if step is not None else "What was finished before it is"
        mesh = " --mesh.dp 2" if engine.world.size == 1 else " on a mesh of more ranks"
        resume = f"on a device with more memory, or by `{resume_command(run.path)}{mesh}`"
        if engine.world.size == 1 and rules is not None and not _is_allowed(rules, mesh=replace(rules.mesh, dp=2)):
            resume = f"on a device with more memory by `{resume_command(run.path)}`"
        return OutOfMemory(f"{message}. {state} kept: the run continues {resume}", resumable=True)


def _free_failed_pass(error: BaseException, engine: Engine) -> None:
    """Free the memory of the failed pass: the frames of the traceback keep its activations alive."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__context__
    for parameter in engine.parameters.values():
        parameter.grad = None
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
