"""Routed experts of a mixture: whole experts on each rank of `mesh.ep`, and the load of each expert.

Ranks of ep see different rows. Each sends its tokens to the ranks with their experts, and gets the outputs back (two
all-to-all exchanges a block, and two in backward). Gradients of an expert are of all its tokens, on its own rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshift.regularizers.protocol import MetricTensors

from ..errors import UserError
from ..models.anatomy import called_modules, routed_experts, stacked_parameters, unwrap_peft
from ..models.families import has_expert_plan
from .layout import TensorParallelLayout
from .mesh import TOKENS, ProcessMesh
from .tensor.apply import ParameterSlicer

if TYPE_CHECKING:
    from .engine import Engine

METRIC = "expert_max_violation"
"""Tokens of the fullest expert ÷ mean tokens of an expert − 1 (MaxVio, Wang et al. 2408.15664), mean over the blocks: 0
if all experts get as many, E ÷ k − 1 if all tokens go to the same k of E experts."""


def check_expert_parallel(model: Any, *, ep: int) -> None:
    """Raise UserError for a model whose experts `ep` ranks cannot share."""
    experts = routed_experts(model)
    if not experts:
        raise UserError("mesh.ep: this backbone has no mixture of experts that could be shared; leave it at 1")
    kind = unwrap_peft(model).config.get_text_config().model_type
    if not has_expert_plan(kind):
        raise UserError(
            f"mesh.ep: transformers has no expert-parallel plan for {kind} models, whose experts may take all tokens, "
            "not those that are routed to them; leave it at 1"
        )
    for module in experts.values():
        count = len(next(iter(stacked_parameters(module).values())))
        if count % ep:
            nearest = max(n for n in range(1, ep) if count % n == 0)
            raise UserError(f"mesh.ep: {ep} does not divide the {count} experts of a block; nearest: mesh.ep {nearest}")


def expert_parallel(model: nn.Module, *, world: ProcessMesh, layout: TensorParallelLayout) -> None:
    """Leave this rank of ep its share of the experts of every block of `model` (PEFT or transformers, on meta or real,
    or pipeline stages) in place, and add their slices to `layout`. Call it before FSDP2."""
    width = world.width("ep")
    if width == 1:
        return
    slicer = ParameterSlicer(model, rank=world.index("ep"), width=width, device=world.device, axis="ep")
    for module in routed_experts(model).values():
        layer: Any = module
        while hasattr(layer, "lora_A"):  # A has the rows e·r … of expert e, B every E-th column from e on
            for name, down in layer.lora_A.items():
                slicer.slice(down.weight, 0)
                slicer.slice(layer.lora_B[name].weight, 1, fused=layer.r[name])
            layer.num_experts //= width
            layer = layer.base_layer
        for parameter in stacked_parameters(module).values():
            slicer.slice(parameter, 0)
        layer.num_experts //= width
        exchange = partial(_exchange_tokens, module.forward, layer.num_experts, world.group("ep"))
        # every pass sends other numbers of tokens, each of which `torch.compile` would take for another graph
        vars(module)["forward"] = torch.compiler.disable(exchange)
    layout.slices.update(slicer.layout.slices)


def _exchange_tokens(
    compute: Callable[..., Tensor],
    count: int,
    group: dist.ProcessGroup,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return the weighted outputs of the experts for `hidden` (N, D): `compute` knows the `count` experts of this rank.

    chosen, weights: (N, k).
    """
    ranks, top = dist.get_world_size(group), chosen.shape[1]
    pairs = chosen.flatten()
    order = torch.argsort(pairs, stable=True)
    sent = torch.zeros(ranks * count, dtype=torch.int64, device=pairs.device)
    sent.scatter_add_(0, pairs, torch.ones_like(pairs))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    out, back = (sizes.view(ranks, count).sum(1).tolist() for sizes in (sent, received))
    tokens = _Exchange.apply(hidden[order // top], out, back, group)
    experts = torch.arange(count, device=pairs.device).repeat(ranks).repeat_interleave(received)
    if len(tokens):
        outputs = compute(tokens, experts[:, None], weights.new_ones(len(tokens), 1))
    else:  # a token of zeros, so that backward and FSDP2's collectives run as on other ranks
        nothing = tokens.sum(0, keepdim=True), experts.new_zeros(1, 1), weights.new_ones(1, 1)
        outputs = compute(*nothing)[:0]
    returned = _Exchange.apply(outputs.to(hidden.dtype), back, out, group)
    slots = torch.zeros_like(returned).index_copy(0, order, returned).view(*chosen.shape, -1)
    return (slots * weights[..., None]).sum(1).to(hidden.dtype)


class _Exchange(torch.autograd.Function):
    """Rows sorted by the rank that gets them → the rows that this rank gets, by the rank that sent them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], back: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = back, out, group
        received = rows.new_empty((sum(back), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), back, out, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(gradient, *ctx.arguments), None, None, None


class ExpertLoadMeter:
    """Counts the tokens of each expert in training passes, over the whole mesh; padding, rows that fill up a piece of a
    pipeline, and what backward recomputes are not counted."""

    def __init__(self, engine: Engine) -> None:
        """Hook the experts of this rank's blocks; collective. Without any on a rank there is no metric."""
        model, world = engine.model, engine.world
        self._world, self._tokens, self._runner = world, engine.tokens, engine.runner
        self._counts: list[Tensor] = []
        self._hooks: list[Any] = []
        self._mask: Tensor | None = None
        for module in routed_experts(model).values():
            experts = len(next(iter(stacked_parameters(module).values()))) * world.width("ep")
            counts = torch.zeros(experts, dtype=torch.int64, device=world.device)
            self._counts.append(counts)
            self._hooks.append(module.register_forward_pre_hook(partial(self._count, counts), with_kwargs=True))
        self._on = bool(self._counts) if world.width("pp") == 1 else world.any(bool(self._counts))
        if self._counts:
            for part in called_modules(model):
                hook = unwrap_peft(part).register_forward_pre_hook(self._remember_mask, with_kwargs=True)
                self._hooks.append(hook)

    def detach(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def reset(self) -> None:
        """Forget what was counted: a step begins."""
        for counts in self._counts:
            counts.zero_()

    def metric_tensors(self) -> list[MetricTensors]:
        """Return the metric of the passes since `reset`; nothing for a model without routed experts. Collective."""
        if not self._on:
            return []
        total = torch.zeros(2, dtype=torch.float64, device=self._world.device)  # summed over blocks; blocks
        if self._counts:
            counts = self._world.sum(torch.cat(self._counts), *TOKENS)
            loads = [own.double() for own in counts.split([len(own) for own in self._counts])]
            total[0] = torch.stack([load.max() / load.mean() - 1 for load in loads]).sum()
            total[1] = len(loads)
        total = self._world.sum(total, "pp")
        return [MetricTensors((total[0] / total[1]).reshape(1), lambda numbers: {METRIC: numbers[0]})]

    def _remember_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if self._mask is not None and self._tokens is not None:
            self._mask = self._mask[:, self._tokens.indices(self._mask.shape[1], self._mask.device)]

    def _count(self, counts: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()) or torch._C._current_graph_task_id() != -1:
            return
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        chosen = next((x for x in tensors if not x.is_floating_point()), None)  # experts of each token (N, k)
        if chosen is None:  # Llama 4: every expert has a row for each token, which is 0 if it is not routed there
            hits = tensors[0].detach().view(len(counts), -1, tensors[0].shape[-1]).ne(0).any(-1)
            counts += (hits * self._real_tokens(hits.shape[1], hits)).sum(1)
        else:
            real = self._real_tokens(len(chosen), chosen).repeat_interleave(chosen.shape[1])
            counts.scatter_add_(0, chosen.flatten(), real)

    def _real_tokens(self, count: int, like: Tensor) -> Tensor:
        """Return 1 for each of `count` tokens that is neither padding nor of a row that fills up, int64."""
        rows, size = (1, 1) if self._runner is None else self._runner.real_rows
        real = (torch.arange(count, device=like.device) < count * rows // size).long()
        if self._mask is None or self._mask.numel() != count:
            return real
        return self._mask.reshape(-1).to(like.device, torch.int64) * real
