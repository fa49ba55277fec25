"""What moves an adapter: AdamW in float32, its moments in 8 bits or paged by bitsandbytes, and Gauss-Newton.

Adapters kept in bfloat16 get float32 masters: gradients are widened, the update is made on the masters, and the
adapter receives their rounding. Sharded parameters (DTensors of FSDP2) keep their state sharded in the same way.

**8-bit and paged moments.** 8-bit moments are quantised in blocks of 256 values with a dynamic map (Dettmers et al.,
2110.02861); tensors of fewer than 4096 values keep float32 moments, as the library has it. Paged moments are those of
QLoRA (2305.14314, §3).

**Gauss-Newton** solves with each update the least-squares problem of the model linearised where it stands. With r the
residuals of all rows of an update and J their Jacobian, the weights that move become θ' = argmin ‖r + Jθ − Jθ'‖² +
λ‖θ'‖², and the step goes `lr` of the way there; λ is `weight_decay`. Without it the step has the least norm among those
that fit best. A model that is linear in what moves is trained to the end by one update: an adapter on the head of which
only B moves (`optimizer.fixed: [a, head]`).
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..compute.capabilities import capabilities
from ..compute.jacobian import jacobian
from ..config import Optimizer, OptimizerKind
from ..errors import UserError
from ..models.quantize import GET, import_library
from ..planner.memory import QUANTISED_BLOCK, QUANTISED_FROM

if TYPE_CHECKING:
    from ..data.micro_batch import MicroBatch
    from ..parallel.engine import Context, Engine
    from ..tasks import Task

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names that transformers' `Trainer.get_decay_parameter_names` leaves undecayed, in lower case."""


def _is_b(name: str) -> bool:
    """Whether a trained tensor is the factor B of LoRA, which starts at zero and of which LoRA+ speaks."""
    return ".lora_B." in name or name.endswith(".lora_embedding_A")


def is_fixed(name: str, settings: Optimizer) -> bool:
    """Whether `settings.fixed` keeps a trained tensor at its first values."""
    fixed = settings.fixed or ()
    is_a = ".lora_A." in name or name.endswith(".lora_embedding_B")
    return ("a" in fixed and is_a) or ("head" in fixed and ".lora_" not in name)


def decays(name: str, tensor: Tensor) -> bool:
    """Whether weight decay reaches a trained tensor: matrices, but no bias, no norm, no vector.

    The groups of transformers' Trainer; beyond them, one-dimensional tensors of any name are left out, because a
    vector scales or shifts what a matrix makes (DoRA's magnitudes, the scales of LayerNorm and BatchNorm).
    """
    return tensor.ndim > 1 and _UNDECAYED.search(name.lower()) is None


class _Adam(Protocol):
    """What `AdapterOptimizer` needs of an implementation of AdamW."""

    inner: torch.optim.Optimizer

    def state(self, tensor: Tensor) -> dict[str, Tensor]: ...

    def updates(self, tensor: Tensor) -> Tensor: ...

    def second_moment(self, tensor: Tensor) -> Tensor: ...

    def prepare(self, tensor: Tensor, updates: Tensor) -> None: ...


class _TorchAdam:
    """torch's AdamW: one fused pass over all tensors where the device has it."""

    def __init__(self, groups: Sequence[dict[str, Any]], settings: Optimizer, *, fused: bool) -> None:
        self._fused = fused
        self.inner: torch.optim.Optimizer = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=fused,
        )

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        found = self.inner.state.get(tensor, {})
        return {kind: found[kind] for kind in MOMENTS if kind in found}

    def updates(self, tensor: Tensor) -> Tensor:
        count: Tensor = self.inner.state[tensor]["step"]
        return count

    def second_moment(self, tensor: Tensor) -> Tensor:
        v: Tensor = self.inner.state[tensor]["exp_avg_sq"].clone()
        return v

    def prepare(self, tensor: Tensor, updates: Tensor) -> None:
        self.inner.state[tensor] = {"step": updates.to(tensor.device if self._fused else "cpu")} | {
            kind: torch.zeros_like(tensor, requires_grad=False) for kind in MOMENTS
        }


class _Steps:
    """Goes the way that the gradients hold already, times the learning rate; keeps no state."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.inner: torch.optim.Optimizer = torch.optim.SGD(
            [{**group, "weight_decay": 0.0} for group in groups], lr=1.0
        )

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        return {}

    def updates(self, tensor: Tensor) -> Tensor:
        return torch.zeros(())

    def second_moment(self, tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor)

    def prepare(self, tensor: Tensor, updates: Tensor) -> None:
        pass


class AdapterOptimizer:
    """AdamW over `parameters` (by name); with `lora_plus` two learning rates (LoRA+, arXiv 2402.12354).

    Weight decay reaches only what `decays` says.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: Optimizer) -> None:
        """Raises UserError where `settings.kind` needs what is not here (`check_optimizer`), or
        nothing is left to move."""
        self.parameters = {name: p for name, p in parameters.items() if not is_fixed(name, settings)}
        """Those that move."""
        self._fixed = [p for name, p in parameters.items() if name not in self.parameters]
        if self._fixed and not self.parameters:
            raise UserError(f"optimizer.fixed: {', '.join(settings.fixed or ())} leaves nothing that trains")
        narrow = {name: p for name, p in self.parameters.items() if p.dtype != torch.float32}
        self.masters: dict[str, Tensor] = {name: p.detach().float().requires_grad_() for name, p in narrow.items()}
        self._updated: dict[str, Tensor] = {name: self.masters.get(name, p) for name, p in self.parameters.items()}
        groups = self._groups(settings)
        devices = {p.device for p in self.parameters.values()}
        self._adam: _Adam = (
            _TorchAdam(groups, settings, fused=all(capabilities(device).fused_optimizer for device in devices))
            if settings.kind == "adamw"
            else _Steps(groups)
            if settings.kind == "gauss-newton"
            else LowBitAdam(groups, settings, device=next(iter(devices), torch.device("cpu")))
        )

    def _groups(self, settings: Optimizer) -> list[dict[str, Any]]:
        """The updated tensors by the factor of their learning rate and whether they decay; the first group is always
        there, for a pipeline stage may have no tensor at all."""
        by: dict[tuple[float, bool], list[Tensor]] = {(1.0, True): []}
        for name, tensor in self._updated.items():
            factor = settings.lora_plus if settings.lora_plus is not None and _is_b(name) else 1.0
            by.setdefault((factor, decays(name, tensor)), []).append(tensor)
        return [
            {"params": tensors, "factor": factor, "weight_decay": settings.weight_decay if decayed else 0.0}
            for (factor, decayed), tensors in by.items()
        ]

    @property
    def inner(self) -> torch.optim.Optimizer:
        """torch's or bitsandbytes' optimizer at work."""
        return self._adam.inner

    def step(self, rate: float) -> None:
        """One update at the learning rate `rate` (of B: times `lora_plus`); the gradients are dropped afterwards."""
        for group in self.inner.param_groups:
            group["lr"] = rate * group["factor"]
        for name, master in self.masters.items():
            grad = self.parameters[name].grad
            master.grad = None if grad is None else grad.float()
        self.inner.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)
        self.drop_gradients()

    def leave_fixed(self) -> None:
        """No gradients of what is fixed, so that no norm counts them."""
        for parameter in self._fixed:
            parameter.grad = None

    def drop_gradients(self) -> None:
        """No gradients: what an update that is left out leaves behind."""
        self.inner.zero_grad(set_to_none=True)
        self.leave_fixed()
        for name in self.masters:
            self.parameters[name].grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """By kind (`MOMENTS`, or those of `flatshift.finetune.train.optimizer`; `MASTER` where there are masters) and
        name; moments and masters are laid out like the parameter."""
        states = {name: self._adam.state(t) for name, t in self._updated.items() if t in self.inner.state}
        found: dict[str, dict[str, Tensor]] = (
            {kind: {} for kind in MOMENTS} if isinstance(self._adam, _TorchAdam) else {}
        )
        for name, state in states.items():
            for kind, tensor in state.items():
                found.setdefault(kind, {})[name] = tensor
        return {**found, MASTER: dict(self.masters)} if self.masters else found

    @torch.no_grad()
    def preconditioner(self) -> dict[str, Tensor]:
        """P of Adam's step −rate · P⁻¹ m̂ by name, float32: √v̂ + ε with v̂ corrected for its start, divided by
        `lora_plus` for the factors that it speeds up. Parameters without an update yet are left out."""
        found = {}
        for name, (tensor, group) in self._by_name().items():
            if tensor in self.inner.state:
                updates = float(self._adam.updates(tensor))
                second = self._adam.second_moment(tensor).div_(1 - group["betas"][1] ** updates)
                found[name] = second.sqrt_().add_(group["eps"]).div_(group["factor"])
        return found

    @torch.no_grad()
    def first_preconditioner(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """P as `preconditioner`, before any update: as it were if the first ones left the weights where they are.

        squares: by name the mean square of those updates' gradients, which stands for v̂, float32. A number that had no
        gradient gets an infinite P, as nothing moves it (A, as long as B = 0). Empty where no Adam is at work.
        """
        if isinstance(self._adam, _Steps):
            return {}
        return {
            name: torch.where(square > 0, (square.sqrt() + group["eps"]) / group["factor"], math.inf)
            for name, (_, group) in self._by_name().items()
            if (square := squares.get(name)) is not None
        }

    def _by_name(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        """The updated tensors with the group that each is in."""
        names = {id(tensor): name for name, tensor in self._updated.items()}
        return {names[id(t)]: (t, group) for group in self.inner.param_groups for t in group["params"]}

    def counters(self) -> dict[str, Tensor]:
        """Updates that each parameter has had, scalars."""
        return {name: self._adam.updates(t) for name, t in self._updated.items() if t in self.inner.state}

    def expect(self, names: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Make room for the state of a checkpoint with counters `names`, and for no other: the tensors of `moments`, to
        be filled."""
        self.inner.state.clear()
        for name, counter in names.items():
            if (tensor := self._updated.get(name)) is not None:  # else of another pipeline stage
                self._adam.prepare(tensor, counter)
        return self.moments()


# ---------------------------------------------------------------------------------------------------- moments in 8 bits


KINDS = ("state1", "state2", "absmax1", "absmax2")
"""Both moments, and the scales of their blocks where they are quantised."""


def check_optimizer(kind: OptimizerKind, *, device: str | None = None) -> None:
    """Raise UserError where `kind` needs a package or a device that is not here.

    device: `cpu` or `cuda`, where it is known already.
    """
    if kind in ("adamw", "gauss-newton"):
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"optimizer.kind: {kind} needs the package bitsandbytes; {GET}, or take adamw")
    if kind.startswith("paged") and device not in (None, "cuda"):
        plain = "adamw-8bit" if kind.endswith("8bit") else "adamw"
        raise UserError(
            f"optimizer.kind: {kind} pages host memory into a CUDA device, and this is {device}; take {plain}"
        )


class LowBitAdam:
    """bitsandbytes' AdamW, with a state that can be read by name and put back."""

    def __init__(self, groups: Sequence[dict[str, Any]], settings: Optimizer, *, device: torch.device) -> None:
        """Raises UserError where the package or the device is missing (`check_optimizer`)."""
        check_optimizer(settings.kind, device=capabilities(device).kind)
        library: Any = import_library()
        self._dequantize = library.functional.dequantize_blockwise
        self.inner: Any = library.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            optim_bits=8 if settings.kind.endswith("8bit") else 32,
            min_8bit_size=QUANTISED_FROM,
            is_paged=settings.kind.startswith("paged"),
        )

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Moments and scales of a tensor by kind; empty before its first update."""
        found = self.inner.state.get(tensor, {})
        return {kind: found[kind] for kind in KINDS if kind in found}

    def updates(self, tensor: Tensor) -> Tensor:
        """How many it has had, scalar."""
        return torch.tensor(float(self.inner.state[tensor]["step"]))

    def second_moment(self, tensor: Tensor) -> Tensor:
        """v, float32, on the tensor's device (paged moments count as host memory), as the next update will read it."""
        state = self.inner.state[tensor]
        if state["state2"].dtype == torch.float32:
            return state["state2"].to(tensor.device, copy=True)
        moment, scales, code = (state[kind].to(tensor.device) for kind in ("state2", "absmax2", "qmap2"))
        return self._dequantize(moment, absmax=scales, code=code, blocksize=QUANTISED_BLOCK)

    def prepare(self, tensor: Tensor, updates: Tensor) -> None:
        """Room for the state of a tensor that has had so many updates."""
        for number, group in enumerate(self.inner.param_groups):
            for place, each in enumerate(group["params"]):
                if each is tensor:
                    self.inner.init_state(group, tensor, number, place)
        self.inner.state[tensor]["step"] = int(updates)


# --------------------------------------------------------------------------------------------------------- Gauss-Newton


LARGEST = 300_000_000
"""Numbers of a Jacobian, at most: 2.4 GB in float64."""
_NOISE = 1e-12
"""Eigenvalues below this share of the largest are the rounding of features that were computed in float32."""


def solve(jac: np.ndarray, wanted: np.ndarray, decay: float) -> np.ndarray:
    """[P]: argmin over θ of ‖wanted − jac·θ‖² + decay·‖θ‖², of least norm; jac [N, P], wanted [N], float64."""
    wide = jac.shape[0] <= jac.shape[1]
    values, vectors = np.linalg.eigh(jac @ jac.T if wide else jac.T @ jac)
    kept = values > _NOISE * values[-1]
    gains = np.divide(1.0, values + decay, out=np.zeros_like(values), where=kept)
    right = wanted if wide else jac.T @ wanted
    found = vectors @ (gains * (vectors.T @ right))
    return jac.T @ found if wide else found


class GaussNewton:
    """Makes the updates of a stage; what it finds lies in the gradients, as minus the step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, decay: float) -> None:
        """parameters: those that move. decay: λ."""
        self.parameters, self.decay = dict(parameters), decay

    def compute(
        self, engine: Engine, micros: Sequence[MicroBatch], count: int, *, task: Task, context: Context
    ) -> Tensor:
        """The step of an update into the gradients; returns its loss before it, as `Engine.forward_backward`.

        Raises:
            UserError: more numbers than `LARGEST`, a parameter outside linear layers.
        """
        sizes = [p.numel() for p in self.parameters.values()]
        jacobians, residuals = [], []
        for index, micro in enumerate(micros):
            batch = micro.to(engine.device)
            with context(index):
                outputs, rows = jacobian(engine.model, self.parameters, batch.inputs)
            whole = count * rows.shape[1] * rows.shape[2]
            if whole > LARGEST:
                raise UserError(
                    f"optimizer.kind: gauss-newton solves for {count} rows × {rows.shape[1]} outputs × "
                    f"{sum(sizes):,} weights at once, above its {LARGEST:.0e} numbers; lower adapter.rank, or "
                    "train.batch_size · train.accumulate"
                )
            jacobians.append(rows.flatten(0, 1).double().cpu().numpy())
            residuals.append(task.residuals(outputs, batch.labels).flatten().double().cpu().numpy())
            engine.beat()
        jac, residual = np.concatenate(jacobians), np.concatenate(residuals)
        now = torch.cat([p.detach().flatten() for p in self.parameters.values()]).double().cpu().numpy()
        if self.decay:
            step = solve(jac, residual + jac @ now, self.decay) - now
        else:
            step = solve(jac, residual, 0.0)
        parts = torch.from_numpy(step).split(sizes)
        for parameter, part in zip(self.parameters.values(), parts, strict=True):
            parameter.grad = -part.view_as(parameter).to(parameter)
        loss = float(residual @ residual) / count
        return torch.tensor(loss, device=engine.device)
