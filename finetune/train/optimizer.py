"""Optimizers of an adapter: AdamW in float32, with 8-bit or paged moments, for pairs of factors, and Gauss-Newton.

Adapters stored in bfloat16 get float32 masters: gradients are widened, the step is applied to the masters, and the
adapter receives their rounding. Sharded parameters (DTensors of FSDP2) keep their state sharded in the same way.

**8-bit and paged moments.** 8-bit moments are quantised in blocks of 256 values with a dynamic map (Dettmers et al.,
2110.02861); tensors of fewer than 4096 values keep float32 moments, the library's default. Paged moments are those of
QLoRA (2305.14314, §3).

**Pairs of factors.** A step of A ∈ ℝ^{r×n} alone moves the weights by BΔA, so that its size depends on B, and the other
way round. `RiemannianAdamW` (arXiv 2402.02347; PEFT's `create_riemannian_optimizer`) takes (BᵀB + δ)⁻¹∇A and
∇B(AAᵀ + δ)⁻¹ for the gradients. `LoraMuon` (2606.12921, algorithm 1) descends by the spectral norm of the weights: with
m the momentum and polar(UΣVᵀ) = UVᵀ, ΔA = −η/2 · (BᵀB + δ)^{−½} polar((BᵀB + δ)^{−½} m_A), and likewise ΔB. Weight
decay λ scales both factors by √(1 − λ·lr) and their steps by its inverse, which shrinks BA by λ·lr. Two departures from
the paper: δ, because its factors do not begin at B = 0; and η = lr · 0.2·√(mn/r), by which either half changes BA by
lr/10 in root mean square. At full rank that is torch's `match_rms_adamw`, so that heads under AdamW share the rate;
with the paper's η, equal at every rank, a step of rank 32 would be four times one of rank 2. Sharded factors are
gathered for a step, one pair at a time.

**Gauss-Newton** solves in each step the least-squares problem of the model linearised at its weights. With r the
residuals of all rows of a step and J their Jacobian, the moving weights become θ' = argmin ‖r + Jθ − Jθ'‖² + λ‖θ'‖²,
and the step goes `lr` of the way there; λ is `weight_decay`. Without it the step has the least norm among the best
fits. A model that is linear in its moving weights is fully trained by one step: an adapter on the head of which only B
moves (`optimizer.fixed: [a, head]`).
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..compute.capabilities import capabilities
from ..compute.jacobian import jacobian
from ..compute.micro_batch import MicroBatch
from ..config import FACTOR_OPTIMIZERS, Optimizer, OptimizerKind
from ..errors import UserError
from ..models.quantize import GET, import_bitsandbytes
from ..parallel.engine import Context, Engine
from ..planner.memory import QUANTISED_BLOCK, QUANTISED_FROM
from ..tasks import Task

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
_OWN_STATE = ("adamw", "gauss-newton", *FACTOR_OPTIMIZERS)
"""Kinds that need no bitsandbytes."""
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Lower-case names that transformers' `Trainer.get_decay_parameter_names` excludes from weight decay."""


def has_weight_decay(name: str, tensor: Tensor) -> bool:
    """Return True if weight decay applies to a trained tensor: matrices, but no bias, no norm, no vector.

    The groups of transformers' Trainer; in addition, one-dimensional tensors of any name are excluded, because a vector
    scales or shifts a matrix's output (DoRA's magnitudes, the scales of LayerNorm and BatchNorm).
    """
    return tensor.ndim > 1 and _UNDECAYED.search(name.lower()) is None


class _TorchState:
    """State of torch's AdamW by tensor; plain SGD, whose gradients already hold minus the step, keeps none."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        settings: Optimizer,
        *,
        fused: bool,
        pairs: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """Create the optimizer. fused: one pass over all tensors, if the device supports it."""
        self.inner: torch.optim.Optimizer
        if settings.kind == "gauss-newton":
            self.inner = torch.optim.SGD([{**group, "weight_decay": 0.0} for group in groups], lr=1.0)
        elif settings.kind in FACTOR_OPTIMIZERS:
            kind = RiemannianAdamW if settings.kind == "riemannian" else LoraMuon
            damping = DAMPING if settings.damping is None else settings.damping
            self.inner = kind(groups, pairs=pairs, damping=damping, fused=fused, **_adam_settings(settings))
        else:
            self.inner = torch.optim.AdamW(groups, fused=fused, **_adam_settings(settings))

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return moments (and scales) of a tensor by kind; empty before its first step."""
        state = self.inner.state.get(tensor, {})
        return {kind: state[kind] for kind in MOMENTS if kind in state}

    def updates(self, tensor: Tensor) -> Tensor:
        """Return the number of steps that the tensor has had, scalar."""
        count: Tensor = self.inner.state[tensor]["step"]
        return count

    def second_moment(self, tensor: Tensor) -> Tensor:
        """Return v, float32, on the tensor's device, as the next step will read it."""
        v: Tensor = self.inner.state[tensor]["exp_avg_sq"].clone()
        return v

    def prepare(self, tensor: Tensor, updates: Tensor) -> None:
        """Allocate the state of a tensor that has had `updates` steps."""
        kinds = self.inner.kinds(tensor) if isinstance(self.inner, LoraMuon) else MOMENTS
        self.inner.state[tensor] = {"step": updates.to(tensor.device if self.inner.defaults["fused"] else "cpu")} | {
            kind: torch.zeros_like(tensor, requires_grad=False) for kind in kinds
        }


def _adam_settings(settings: Optimizer) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("lr", "betas", "eps", "weight_decay")}


DAMPING = 1e-2
"""δ unless `optimizer.damping` is set, PEFT's default."""


_SMALLEST = 1e-6
"""Square of the singular value, as a share of the norm of a momentum, below which a direction is rounding noise."""


def find_factor_pairs(tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return A [r, n] and B [m, r] of every adapted linear layer among `tensors`; embeddings have none, as in PEFT."""
    pairs = []
    for name, a in tensors.items():
        b = tensors.get(name.replace(".lora_A.", ".lora_B.")) if ".lora_A." in name else None
        if b is not None and a.ndim == b.ndim == 2:
            pairs.append((a, b))
    return pairs


def gram_power(factor: Tensor, damping: float, power: float) -> Tensor:
    """Return (FᵀF + δ)^power of a factor F [n, r], [r, r]; in float64 where that is fast, as squares of small singular
    values are rounding noise in float32."""
    wide = factor.to(capabilities(factor.device).sums)
    gram = wide.T @ wide
    gram.diagonal().add_(damping)
    values, vectors = torch.linalg.eigh(gram)
    return ((vectors * values.clamp(min=damping).pow(power)) @ vectors.T).to(factor.dtype)


def _gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor, float32."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float()


def _write(whole: Tensor, tensor: Tensor) -> None:
    """Copy `whole`, or this rank's part of it, into `tensor`."""
    if isinstance(tensor, DTensor):
        whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(whole)


class FactorAdamW(torch.optim.AdamW):
    """AdamW that knows the pairs of factors; with the gradients of `RiemannianAdamW` or the steps of `LoraMuon`."""

    def __init__(self, groups: Any, *, pairs: Sequence[tuple[Tensor, Tensor]], damping: float, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self._pairs, self._damping = pairs, damping


class RiemannianAdamW(FactorAdamW):
    """AdamW of gradients that are preconditioned by the other factor of each pair (module's docstring)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Precondition the gradients in place, then take AdamW's step."""
        for a, b in self._pairs:
            if a.grad is not None:
                _write(gram_power(_gather(b), self._damping, -1) @ _gather(a.grad), a.grad)
            if b.grad is not None:
                _write(_gather(b.grad) @ gram_power(_gather(a).T, self._damping, -1), b.grad)
        return super().step(closure)


class LoraMuon(FactorAdamW):
    """Spectral descent of pairs of factors (module's docstring), which keep `exp_avg` alone; AdamW of all else."""

    def kinds(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the moments that a tensor keeps."""
        return MOMENTS[:1] if any(tensor is factor for pair in self._pairs for factor in pair) else MOMENTS

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move the factors and drop their gradients, then take AdamW's step of all other tensors."""
        groups = {id(tensor): group for group in self.param_groups for tensor in group["params"]}
        for a, b in self._pairs:
            whole_a, whole_b = _gather(a), _gather(b)
            size = math.sqrt(len(whole_b) * whole_a.shape[1] / len(whole_a))
            root_b = gram_power(whole_b, self._damping, -0.5)  # both before either moves
            root_a = gram_power(whole_a.T, self._damping, -0.5)
            if a.grad is not None and id(a) in groups:  # else fixed
                momentum = self._average(a, groups[id(a)]["betas"][0])
                self._move(a, whole_a, root_b @ _polar_factor(root_b @ momentum), groups[id(a)], size)
            if b.grad is not None and id(b) in groups:
                momentum = self._average(b, groups[id(b)]["betas"][0])
                self._move(b, whole_b, _polar_factor(momentum @ root_a) @ root_a, groups[id(b)], size)
        return super().step(closure)

    def _average(self, factor: Tensor, beta: float) -> Tensor:
        """Update the momentum of a factor by its gradient, which is dropped; return all of it."""
        state = self.state[factor]
        if not state:
            state["step"] = torch.zeros((), device=factor.device if self.defaults["fused"] else "cpu")
            state["exp_avg"] = torch.zeros_like(factor, requires_grad=False)
        state["step"] += 1
        state["exp_avg"].lerp_(factor.grad, 1 - beta)
        factor.grad = None
        return _gather(state["exp_avg"])

    @staticmethod
    def _move(factor: Tensor, whole: Tensor, direction: Tensor, group: Mapping[str, Any], size: float) -> None:
        scale = math.sqrt(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * 0.2 * size / 2
        _write(whole * scale - direction * (rate / scale), factor)


def _polar_factor(matrix: Tensor) -> Tensor:
    """Return UVᵀ of UΣVᵀ. Not by the Newton-Schulz iteration of torch's Muon: that is in bfloat16, so that the order of
    a sum over ranks shows in losses."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    norm = torch.linalg.matrix_norm(wide)
    scaled = wide / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    result = gram_power(scaled.T, _SMALLEST, -0.5) @ scaled
    return result if wide is matrix else result.T


class AdapterOptimizer:
    """AdamW over `parameters` (by name); with `lora_plus` two learning rates (LoRA+, arXiv 2402.12354).

    Weight decay applies only to the tensors that `has_weight_decay` selects.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: Optimizer) -> None:
        """Create the optimizer. Raises UserError if `settings.kind` needs something that is not available
        (`check_optimizer`)."""
        self.parameters = {name: p for name, p in parameters.items() if not settings.is_fixed(name)}
        """Parameters that are not fixed."""
        self._fixed = [p for name, p in parameters.items() if name not in self.parameters]
        narrow = {name: p for name, p in self.parameters.items() if p.dtype != torch.float32}
        self.masters: dict[str, Tensor] = {name: p.detach().float().requires_grad_() for name, p in narrow.items()}
        self._updated: dict[str, Tensor] = {name: self.masters.get(name, p) for name, p in self.parameters.items()}
        groups = self._groups(settings)
        devices = {p.device for p in self.parameters.values()}
        self._adam: _TorchState | LowBitAdam
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Factors that the kind steps together."""
        if settings.kind in FACTOR_OPTIMIZERS:
            self.pairs = find_factor_pairs({**parameters, **self._updated})
        if settings.kind in _OWN_STATE:
            fused = all(capabilities(device).fused_optimizer for device in devices)
            self._adam = _TorchState(groups, settings, fused=fused, pairs=self.pairs)
        else:
            self._adam = LowBitAdam(groups, settings, device=next(iter(devices), torch.device("cpu")))

    def _groups(self, settings: Optimizer) -> list[dict[str, Any]]:
        """Group the tensors to update by learning-rate factor, weight decay, and the ranks that they are sharded over,
        because torch updates no tensors of different meshes together.

        The first group always exists, because a pipeline stage may have no tensor at all.
        """
        meshes = {name: getattr(tensor, "device_mesh", None) for name, tensor in self._updated.items()}
        groups: dict[tuple[float, bool, Any], list[Tensor]] = {(1.0, True, next(iter(meshes.values()), None)): []}
        for name, tensor in self._updated.items():
            # LoRA's factor B starts at zero; PEFT initialises an embedding's A with zeros and its B randomly
            is_b = ".lora_B." in name or name.endswith(".lora_embedding_A")
            factor = settings.lora_plus if settings.lora_plus is not None and is_b else 1.0
            groups.setdefault((factor, has_weight_decay(name, tensor), meshes[name]), []).append(tensor)
        return [
            {"params": tensors, "factor": factor, "weight_decay": settings.weight_decay if decayed else 0.0}
            for (factor, decayed, _), tensors in groups.items()
        ]

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer of torch or bitsandbytes."""
        return self._adam.inner

    def step(self, rate: float) -> None:
        """Take one step at the learning rate `rate` (for B: times `lora_plus`), then drop the gradients."""
        for group in self.inner.param_groups:
            group["lr"] = rate * group["factor"]
        for name, master in self.masters.items():
            grad = self.parameters[name].grad
            master.grad = None if grad is None else grad.float()
        self.inner.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.parameters[name].copy_(master)
        self.zero_grad()

    def zero_fixed_grad(self) -> None:
        """Drop the gradients of fixed parameters, so that no norm counts them."""
        for parameter in self._fixed:
            parameter.grad = None

    def zero_grad(self) -> None:
        """Drop all gradients, as after a skipped step."""
        self.inner.zero_grad(set_to_none=True)
        self.zero_fixed_grad()
        for name in self.masters:
            self.parameters[name].grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the state by kind (`MOMENTS` or `KINDS`; `MASTER` if there are masters) and parameter name.

        Moments and masters are sharded like the parameter.
        """
        is_torch = isinstance(self.inner, torch.optim.AdamW)
        moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in MOMENTS} if is_torch else {}
        for name, updated in self._updated.items():
            for kind, tensor in self._adam.state(updated).items():
                moments.setdefault(kind, {})[name] = tensor
        return {**moments, MASTER: dict(self.masters)} if self.masters else moments

    @torch.no_grad()
    def preconditioner(self) -> dict[str, Tensor]:
        """Return P of Adam's step −rate · P⁻¹ m̂ by name, float32: √v̂ + ε with bias-corrected v̂, divided by
        `lora_plus` for the factors that it speeds up. Parameters without a step yet are omitted; empty for an optimizer
        other than Adam."""
        result: dict[str, Tensor] = {}
        if self.pairs:
            return result
        for name, (tensor, group) in self._by_name().items():
            if tensor in self.inner.state:
                updates = float(self._adam.updates(tensor))
                second = self._adam.second_moment(tensor).div_(1 - group["betas"][1] ** updates)
                result[name] = second.sqrt_().add_(group["eps"]).div_(group["factor"])
        return result

    @torch.no_grad()
    def first_preconditioner(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return P as `preconditioner` before any step, as if the first steps left the weights unchanged.

        squares: by name the mean square of those steps' gradients, used as v̂, float32. An entry that had no gradient
        gets an infinite P, because nothing moves it (A, as long as B = 0). Empty for an optimizer other than Adam.
        """
        if self.pairs or isinstance(self.inner, torch.optim.SGD):
            return {}
        return {
            name: torch.where(square > 0, (square.sqrt() + group["eps"]) / group["factor"], math.inf)
            for name, (_, group) in self._by_name().items()
            if (square := squares.get(name)) is not None
        }

    def _by_name(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        names = {id(tensor): name for name, tensor in self._updated.items()}
        return {names[id(t)]: (t, group) for group in self.inner.param_groups for t in group["params"]}

    def counters(self) -> dict[str, Tensor]:
        """Return the number of steps that each parameter has had, scalars."""
        return {name: self._adam.updates(t) for name, t in self._updated.items() if t in self.inner.state}

    def expect(self, counters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Allocate the state of a checkpoint with these `counters`, and no other; return the tensors of `moments` to be
        filled."""
        self.inner.state.clear()
        for name, counter in counters.items():
            if (tensor := self._updated.get(name)) is not None:  # else of another pipeline stage
                self._adam.prepare(tensor, counter)
        return self.moments()


KINDS = ("state1", "state2", "absmax1", "absmax2")
"""Both moments, and the scales of their blocks if they are quantised."""


def check_optimizer(kind: OptimizerKind, *, device: str | None = None) -> None:
    """Raise UserError if `kind` needs a package or a device that is not available.

    device: `cpu` or `cuda`, if known already.
    """
    if kind in _OWN_STATE:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"optimizer.kind: {kind} needs the package bitsandbytes; {GET}, or take adamw")
    if kind.startswith("paged") and device not in (None, "cuda"):
        plain = "adamw-8bit" if kind.endswith("8bit") else "adamw"
        raise UserError(
            f"optimizer.kind: {kind} pages host memory into a CUDA device, and this is {device}; take {plain}"
        )


class LowBitAdam:
    """bitsandbytes' AdamW; methods as those of `_TorchState`."""

    def __init__(self, groups: Sequence[dict[str, Any]], settings: Optimizer, *, device: torch.device) -> None:
        """Create the optimizer. Raises UserError if the package or the device is missing (`check_optimizer`)."""
        check_optimizer(settings.kind, device=capabilities(device).kind)
        library: Any = import_bitsandbytes()
        self._dequantize = library.functional.dequantize_blockwise
        self.inner: Any = library.optim.AdamW(
            groups,
            optim_bits=8 if settings.kind.endswith("8bit") else 32,
            min_8bit_size=QUANTISED_FROM,
            is_paged=settings.kind.startswith("paged"),
            **_adam_settings(settings),
        )

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        state = self.inner.state.get(tensor, {})
        return {kind: state[kind] for kind in KINDS if kind in state}

    def updates(self, tensor: Tensor) -> Tensor:
        return torch.tensor(float(self.inner.state[tensor]["step"]))

    def second_moment(self, tensor: Tensor) -> Tensor:
        """Paged moments count as host memory."""
        state = self.inner.state[tensor]
        if state["state2"].dtype == torch.float32:
            return state["state2"].to(tensor.device, copy=True)
        moment, scales, code = (state[kind].to(tensor.device) for kind in ("state2", "absmax2", "qmap2"))
        return self._dequantize(moment, absmax=scales, code=code, blocksize=QUANTISED_BLOCK)

    def prepare(self, tensor: Tensor, updates: Tensor) -> None:
        for group_index, group in enumerate(self.inner.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter is tensor:
                    self.inner.init_state(group, tensor, group_index, index)
        self.inner.state[tensor]["step"] = int(updates)


LARGEST = 300_000_000
"""Maximum entries of a Jacobian: 2.4 GB in float64."""
_NOISE = 1e-12
"""Eigenvalues below this share of the largest are rounding noise of features computed in float32."""


def solve_least_squares(jac: np.ndarray, target: np.ndarray, decay: float) -> np.ndarray:
    """Return argmin over θ of ‖target − jac·θ‖² + decay·‖θ‖², of least norm, [P]; jac [N, P], target [N], float64."""
    wide = jac.shape[0] <= jac.shape[1]
    values, vectors = np.linalg.eigh(jac @ jac.T if wide else jac.T @ jac)
    gains = np.divide(1.0, values + decay, out=np.zeros_like(values), where=values > _NOISE * values[-1])
    solution = vectors @ (gains * (vectors.T @ (target if wide else jac.T @ target)))
    return jac.T @ solution if wide else solution


class GaussNewton:
    """Computes the steps of a stage and stores minus the step in the gradients."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, decay: float) -> None:
        """Create the solver. parameters: those that move. decay: λ."""
        self.parameters, self.decay = dict(parameters), decay

    def compute(
        self, engine: Engine, micros: Sequence[MicroBatch], count: int, *, task: Task, context: Context
    ) -> Tensor:
        """Write minus the step of an update into the gradients; return the loss before it, as
        `Engine.forward_backward`.

        Raises UserError for more numbers than `LARGEST`, or a parameter outside linear layers.
        """
        sizes = [p.numel() for p in self.parameters.values()]
        jacobians, residuals = [], []
        for index, micro in enumerate(micros):
            batch = micro.to(engine.device)
            with context(index):
                outputs, rows = jacobian(engine.model, self.parameters, batch.inputs)
            if count * rows.shape[1] * rows.shape[2] > LARGEST:
                raise UserError(
                    f"optimizer.kind: gauss-newton solves for {count} rows × {rows.shape[1]} outputs × "
                    f"{sum(sizes):,} weights at once, above its {LARGEST:.0e} numbers; lower adapter.rank, or "
                    "train.batch_size · train.accumulate"
                )
            jacobians.append(rows.flatten(0, 1).double().cpu().numpy())
            residuals.append(task.residuals(outputs, batch.labels).flatten().double().cpu().numpy())
            engine.heartbeat()
        jac, residual = np.concatenate(jacobians), np.concatenate(residuals)
        weights = torch.cat([p.detach().flatten() for p in self.parameters.values()]).double().cpu().numpy()
        if self.decay:
            step = solve_least_squares(jac, residual + jac @ weights, self.decay) - weights
        else:
            step = solve_least_squares(jac, residual, 0.0)
        for parameter, change in zip(self.parameters.values(), torch.from_numpy(step).split(sizes), strict=True):
            parameter.grad = -change.view_as(parameter).to(parameter)
        return torch.tensor(float(residual @ residual) / count, device=engine.device)
