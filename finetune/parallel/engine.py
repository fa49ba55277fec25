"""A model on a device mesh, with the operations that a training loop needs.

    engine = Engine.alone(model)                                  # one process: just the model
    loss = engine.forward_backward(micros, count, ...)            # gradients of the whole step, summed over the mesh
    norm = engine.clip(1.0)                                       # the true global norm
    tensors = engine.full_tensors(engine.parameters)              # full tensors, as stored in a file

With one rank every method does what a plain loop would do, operation by operation.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from flatshift.regularizers.mesh import Placement

from ..adapters import adapter
from ..atomic import make_directory
from ..compute.attention import drop_sample_offsets
from ..compute.capabilities import copy_to_device
from ..compute.dropout import DropoutPass, KeyedDropout
from ..compute.loss import Head, add_reference, batch_loss, find_head, head_probe
from ..compute.micro_batch import MicroBatch, PreferenceTargets
from ..data.eval_batching import DataShard
from ..errors import UserError
from ..models.anatomy import position_limit, transformer_blocks
from ..models.checkpoint import canonical_name
from ..tasks import Task
from .layout import (
    Slice,
    TensorParallelLayout,
    copy_local_part,
    gather_full_tensors,
    join_parts,
    local_part,
    save_parts,
    sum_parts,
)
from .mesh import DATA, EXPERT_SHARDS, TOKENS, ProcessMesh

if TYPE_CHECKING:
    from .context import ContextParallel
    from .fsdp import Sharding
    from .pipeline.runner import PipelineRunner


Context = Callable[[int], contextlib.AbstractContextManager[Any]]
"""Context of the forward pass of the i-th micro-batch: randomness and precision."""


class Engine:
    """A model on a mesh (see the module docstring).

    Created by `Engine.alone` or `flatshift.finetune.parallel.build.build_engine`.
    """

    def __init__(
        self,
        model: Any,
        world: ProcessMesh,
        *,
        layout: TensorParallelLayout | None = None,
        sharding: Sharding | None = None,
        runner: PipelineRunner | None = None,
        tokens: ContextParallel | None = None,
        multiple: int = 1,
    ) -> None:
        """Wrap a model that is already parallelised.

        model: the PEFT model, or under a pipeline the container of this rank's stages.
        layout: tensor-parallel slices.
        sharding: FSDP2's shards; None without it.
        runner: the pipeline; None without one.
        tokens: splits rows among the cp ranks; None without context parallelism.
        multiple: rows are padded to a multiple of this many tokens.
        """
        self.model, self.world, self.multiple = model, world, multiple
        self.device, self.is_main = world.device, world.is_main
        self.layout = layout or TensorParallelLayout()
        self.sharding, self.runner, self.tokens = sharding, runner, tokens
        self.routed = RoutedModules(model) if world.width(*TOKENS) > 1 else None
        self.parameters: dict[str, nn.Parameter] = adapter.trainable(model)
        """This rank's trained parameters (or its parts of them) by canonical name."""
        self.loss_scale = 1.0
        """Factor by which the gradients of `forward_backward` exceed the true ones
        (`flatshift.finetune.train.divergence.LossScale`)."""
        self.dropout_context: Callable[..., DropoutPass] | None = None
        """`KeyedDropout.forward_pass` of the current step; None without dropout."""
        self.heartbeat: Callable[[], None] = lambda: None
        """Called after every micro-batch, for the watchdog."""

    @classmethod
    def alone(cls, model: nn.Module) -> Engine:
        """Return the engine of a single process with the whole model."""
        return cls(model, ProcessMesh.alone(next(model.parameters()).device))

    @property
    def share(self) -> tuple[int, int]:
        """(i, n): this rank takes the i-th of n equal parts of every micro-batch's rows."""
        return self.world.index(*DATA), self.world.width(*DATA)

    @property
    def stream(self) -> tuple[int, int]:
        """(i, n): this rank is the i-th of n that see different tokens, so that their dropout differs."""
        return self.world.index(*TOKENS), self.world.width(*TOKENS)

    def dropout(self, seed: int) -> KeyedDropout:
        """Return the dropout that draws this rank's part of the masks that a single process draws from `seed`."""
        modules = {module: canonical_name(name) for name, module in self.model.named_modules()}
        tokens = self.tokens
        return KeyedDropout(
            modules,
            seed,
            columns=self.layout.first_features(modules.values()),
            tensor=(self.world.index("tp"), self.world.width("tp")),
            gathered=self.layout.gathered,
            splits_tokens=self.layout.splits_tokens,
            positions=None if tokens is None else lambda own: tokens.indices(own * tokens.width),
        )

    @property
    def gradient_scale(self) -> float:
        """Factor on the loss before backward, because FSDP2 averages gradients that must be summed."""
        return float(self.sharding.group) if self.sharding is not None else 1.0

    @property
    def placement(self) -> Any:
        """Mesh information for a regularizer; None in one process."""
        if self.world.size == 1:
            return None
        return MeshPlacement(self.world, self.layout, self.parameters, gradient_scale=self.gradient_scale)

    @property
    def eval_model(self) -> Any:
        """Model for evaluation, called as `model(**inputs).logits`; under a pipeline its stand-in."""
        return self.model if self.runner is None else self.runner.stand_in

    @property
    def evaluation(self) -> DataShard:
        """This rank's part of an evaluation, in which cp ranks take whole rows of their own."""
        if self.world.size == 1:
            return DataShard()
        index, width = self.stream
        return DataShard(
            index,
            width,
            multiple=self.multiple,
            lockstep=self.sharding is not None and bool(self.sharding.units),
            add=lambda array: self.world.sum(torch.from_numpy(array).to(self.device), *TOKENS).cpu().numpy(),
            union=lambda items: self._merge(items, *TOKENS),
        )

    def _merge(self, items: Mapping[Any, Any], *axes: str) -> dict[Any, Any]:
        """Return the items of all ranks along `axes`."""
        gathered: list[Any] = [items] * self.world.width(*axes)
        if len(gathered) > 1:
            dist.all_gather_object(gathered, items, group=self.world.group(*axes))
        return {key: value for mapping in gathered for key, value in mapping.items()}

    def position_limit(self) -> int | None:
        """Return the longest row, in tokens, that learned positions allow, from any pipeline stage; None without such a
        limit."""
        limits = self._merge({self.world.index("pp"): position_limit(self.model)}, "pp")
        return min((limit for limit in limits.values() if limit is not None), default=None)

    def find_head(self, inputs: dict[str, Tensor], *, task: Task) -> Head | None:
        """Return the head whose loss needs no logits (`flatshift.finetune.compute.loss.find_head`), agreed by all ranks
        that share a stage."""
        probe = head_probe(drop_sample_offsets(inputs), multiple=self.multiple)
        if self.runner is not None:
            return self.runner.find_head(probe, task=task)
        head = find_head(self.model, probe, task=task)
        if self.world.size > 1:
            verdict = torch.tensor(float(head is not None), device=self.device)
            dist.all_reduce(verdict, dist.ReduceOp.MIN)
            head = head if verdict.item() else None
        return head

    def reshard(self) -> None:
        """Free weights that FSDP2 still holds gathered after forward passes without backward."""
        if self.sharding is not None:
            self.sharding.reshard()

    def reference_log_probs(
        self,
        micros: Sequence[MicroBatch],
        *,
        task: Task,
        head: Head | None,
        precision: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> list[PreferenceTargets | None]:
        """Return the reference and the drift of the answers in each of this rank's micro-batches, for a
        `task.has_reference` (`flatshift.finetune.compute.loss.add_reference`).

        Call it before the passes of the step and outside of a regularizer's step, so that the reference is the
        unperturbed base model. Every rank calls this.
        """
        with_reference = add_reference(
            self.model,
            [micro.to(self.device) for micro in micros],
            task=task,
            head=head,
            precision=precision,
            add=lambda sums: self.world.sum(sums, *TOKENS),
        )
        self.reshard()
        return [micro.preference for micro in with_reference]

    def forward_backward(
        self, micros: Sequence[MicroBatch], count: int, *, task: Task, head: Head | None, context: Context
    ) -> Tensor:
        """Compute the gradients of Σ loss ÷ `count` over all micro-batches of the step and all ranks, times
        `loss_scale`; return that loss, unscaled: float32 scalar on the device, the same on every rank.

        micros: this rank's rows.
        count: target tokens (examples) of the step, over all ranks.
        """
        scale = self.gradient_scale * self.loss_scale
        if self.runner is not None:
            total = self.runner.forward_backward(
                micros, count, task=task, head=head, context=context, scale=scale, heartbeat=self.heartbeat,
                dropout_context=self.dropout_context,
            )  # fmt: skip
        else:
            total = torch.zeros((), device=self.device)
            rows = max(len(micro.labels) for micro in micros)
            for index, micro in enumerate(micros):
                if self.sharding is not None:
                    self.sharding.set_sync(last=index + 1 == len(micros))
                with context(index), self._dropout_of(index, rows, micro):
                    loss = self._loss(micro.to(self.device), task=task, head=head) / count
                (loss if scale == 1 else loss * scale).backward()
                total += loss.detach()
                self.heartbeat()
        self._reduce_gradients()
        return self.world.sum(total, *TOKENS)

    def _dropout_of(self, index: int, rows: int, micro: MicroBatch) -> contextlib.AbstractContextManager[Any]:
        """Return the dropout context of the `index`-th micro-batch, of which a data rank has `rows` rows."""
        if self.dropout_context is None:
            return contextlib.nullcontext()
        rank, ranks = self.share
        tokens = micro.inputs["input_ids"].shape[1] // self.world.width("cp")
        return self.dropout_context(first_row=(index * ranks + rank) * rows, rows=len(micro.labels), tokens=tokens)

    def _loss(self, micro: MicroBatch, *, task: Task, head: Head | None) -> Tensor:
        """Return the loss summed over this rank's tokens of `micro`."""
        if self.tokens is None:
            return batch_loss(self.model, micro, task=task, head=head)
        part = self.tokens.take(micro)
        with self.tokens.forward_pass(part):
            return batch_loss(self.model, part, task=task, head=head)

    def _reduce_gradients(self) -> None:
        """Sum the gradients that are not summed yet, by one flat collective each: over tp those of factors that are
        whole there, over the data axes those of parameters that FSDP2 does not hold; and of experts that only this rank
        of ep has, over the ranks with the same."""
        if self.routed is not None:
            for name in self.routed.unused_parameters(self.world):
                self.parameters[name].grad = None
        self._all_reduce([p for name, p in self.parameters.items() if name in self.layout.partial], "tp")
        reduced = self.sharding.reduced if self.sharding is not None else frozenset()
        own = [name for name in self.parameters if self.layout.has_own_experts(name)]
        done = {*reduced, *own}
        self._all_reduce([p for name, p in self.parameters.items() if name not in done], *TOKENS)
        self._all_reduce([self.parameters[name] for name in own if name not in reduced], "replicate", *EXPERT_SHARDS)
        for name in own:
            # other ranks' tokens are in it already; FSDP2 has averaged it over the ranks with these experts, or not
            factor = self.world.width("ep") if name in reduced else self.gradient_scale
            if factor != 1 and (grad := self.parameters[name].grad) is not None:
                grad.div_(factor)

    def _all_reduce(self, parameters: Iterable[nn.Parameter], *axes: str) -> None:
        if self.world.width(*axes) == 1:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                grad = local_part(parameter.grad)
                by_type.setdefault(grad.dtype, []).append(grad)
        for grads in by_type.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            self.world.sum(flat, *axes)
            for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    @torch.no_grad()
    def clip(self, bound: float | None) -> Tensor:
        """Scale all gradients so that their global norm is at most `bound` (None: no bound); return the norm before.

        The norm is that of the whole gradient: each part counts once, on whichever device it is and however often
        replicated.
        """
        limit = math.inf if bound is None else bound
        if self.world.size == 1:
            return nn.utils.clip_grad_norm_(self.parameters.values(), limit)
        kinds = {name: self.layout.divided_over(name, parameter) for name, parameter in self.parameters.items()}
        distinct = list(dict.fromkeys(kinds.values()))
        # gradients by the axes over which they are divided, and by device: offloaded shards have theirs in host memory
        groups: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and local_part(parameter.grad).numel():
                grad = local_part(parameter.grad)
                groups.setdefault((distinct.index(kinds[name]), grad.device, grad.dtype), []).append(grad)
        squares = torch.zeros(len(distinct), dtype=torch.float64, device=self.device)
        for (kind, _, _), grads in groups.items():
            norms = torch.stack(torch._foreach_norm(grads, 2, torch.float64))
            squares[kind] += copy_to_device(norms.square().sum(), self.device)
        whole = sum_parts(squares, distinct, world=self.world)
        norm = self.world.sum(whole.sum(), "pp").sqrt()
        if math.isfinite(limit):
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            for (_, device, dtype), grads in groups.items():
                torch._foreach_mul_(grads, factor.to(device, dtype))
        return norm.float()

    @torch.no_grad()
    def full_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return full tensors on the CPU from local ones that are sharded like the parameters of these names.

        Collective over all ranks; every rank gets all of them, of every pipeline stage.
        """
        if self.world.size == 1:
            return {name: tensor.detach() for name, tensor in tensors.items()}
        self.reshard()
        wholes = gather_full_tensors(tensors, parameters=tensors, layout=self.layout, world=self.world)
        return self._merge({name: tensor.cpu() for name, tensor in wholes.items()}, "pp")

    @torch.no_grad()
    def load_full_tensors(self, wholes: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, context: str) -> None:
        """Copy this rank's part of each full tensor; names and shapes must agree over the mesh, else UserError that
        starts with `context`."""
        if self.world.size == 1:
            return adapter.copy_tensors(wholes, tensors, context=context)
        self.reshard()
        if odd := sorted(self._merge(dict.fromkeys(tensors), "pp").keys() ^ wholes.keys()):
            raise UserError(
                f"{context}: this adapter belongs to other settings or another backbone ({odd[0]} has no partner)"
            )
        for name, tensor in tensors.items():
            shape = self.layout.shape(name, tensor.shape)
            if wholes[name].shape != shape:
                raise UserError(
                    f"{context}: {name} has the shape {tuple(wholes[name].shape)} and the model wants {shape}"
                )
        for name, tensor in tensors.items():
            copy_local_part(tensor, wholes[name], self.layout.slices.get(name))
        return None

    def union(self, items: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all pipeline stages, on the CPU; collective under a pipeline."""
        if self.world.width("pp") == 1:
            return dict(items)
        host = {name: tensor.detach().cpu() for name, tensor in items.items()}
        return self._merge(host, "pp")

    def save_parts(
        self,
        folder: Path,
        groups: Mapping[str, Mapping[str, Tensor]],
        *,
        wholes: Mapping[str, Mapping[str, Tensor]] = {},
    ) -> None:
        """Write files to `folder` from which `join_parts` makes those of one process; every rank its own, collective.

        groups: tensors by group and by the name of the parameter that each is sharded like.
        wholes: others, which are the same on every rank.
        """
        if self.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        self.world.wait()
        self.reshard()
        make_directory(folder)
        save_parts(folder / f"{self.world.rank}.safetensors", groups, layout=self.layout, world=self.world)
        if self.is_main and wholes:
            save_parts(folder / "whole.safetensors", wholes, layout=TensorParallelLayout(), world=self.world)
        self.world.wait()

    def save_adapter(self, directory: Path) -> None:
        """Write the adapter as plain PEFT, re-opened and compared; on a mesh collective, written by the main rank."""
        if self.world.size == 1:
            adapter.save_adapter(self.model, directory)
            return
        folder = directory.with_name(f".{directory.name}.parts.tmp")
        self.save_parts(folder, {"adapter": self.parameters})
        if self.is_main:
            try:
                joined = folder / "joined"
                join_parts(sorted(folder.glob("*.safetensors")), joined)
                tensors = {name.removeprefix("adapter/"): tensor for name, tensor in load_file(joined).items()}
                adapter.write_adapter(self.peft, tensors, directory)
            finally:
                shutil.rmtree(folder)
        self.world.wait()

    def load_adapter(self, directory: Path, *, partial: bool = False) -> None:
        """Restore a saved adapter exactly (`flatshift.finetune.adapters.adapter.load_adapter`), each rank its part."""
        if self.world.size == 1:
            adapter.load_adapter(self.model, directory, partial=partial)
            return
        source, target = adapter.read_adapter(directory), dict[str, Tensor](self.parameters)
        if partial:
            present = self._merge(dict.fromkeys(target), "pp")
            source, target = adapter.shared_lora(source, target, present=present)
        self.load_full_tensors(source, target, context=str(directory))

    @property
    def peft(self) -> Any:
        """A PEFT model with the adapter's configuration (of any stage)."""
        return self.model if self.runner is None else self.runner.parts[0]


class RoutedModules:
    """Experts that are modules, which a forward pass leaves out if they get no token.

    A rank on which one is left out adds 0 times its trained parameters to the block's output: all ranks then have
    gradients of the same sizes to reduce, whatever their tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        """Register the hooks; those of FSDP2, which free a block's weights, run after them."""
        self._parameters: dict[nn.Module, list[str]] = {}
        self._called: set[nn.Module] = set()
        """Since `unused_parameters` was called."""
        self._in_pass: set[nn.Module] = set()
        names = {module: canonical_name(name) for name, module in model.named_modules()}
        for block in transformer_blocks(model):
            members = []
            for container in block.modules():
                is_list = isinstance(container, nn.ModuleList | nn.ModuleDict)
                if is_list and "expert" in names[container].rpartition(".")[2]:
                    members += [member for member in container.children() if adapter.trainable(member)]
            for member in members:
                self._parameters[member] = [f"{names[member]}.{name}" for name in adapter.trainable(member)]
                member.register_forward_pre_hook(self._note_call)
            if members:
                block.register_forward_pre_hook(lambda *_, own=members: self._in_pass.difference_update(own))
                block.register_forward_hook(partial(self._add_zero, members), prepend=True)

    def _note_call(self, member: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._called.add(member)
            self._in_pass.add(member)

    def _add_zero(self, members: list[nn.Module], block: nn.Module, inputs: Any, output: Any) -> Any:
        left_out = [member for member in members if member not in self._in_pass]
        if not left_out or not torch.is_grad_enabled():
            return output
        first = output if isinstance(output, Tensor) else output[0]
        for member in left_out:
            for parameter in adapter.trainable(member).values():
                first = first + (parameter.sum() * 0.0).to(first.dtype)
        return first if isinstance(output, Tensor) else (first, *output[1:])

    def unused_parameters(self, world: ProcessMesh) -> list[str]:
        """Return the names of trained parameters that no rank has used since the last call, as in one process they
        have no gradient; collective over the ranks of a stage."""
        if not self._parameters:
            return []
        called = torch.tensor([float(member in self._called) for member in self._parameters], device=world.device)
        self._called.clear()
        used = world.sum(called, *TOKENS).tolist()
        return [name for names, uses in zip(self._parameters.values(), used, strict=True) if not uses for name in names]


class MeshPlacement(Placement):
    """View of a `ProcessMesh` and a `TensorParallelLayout` for `regularizers`."""

    def __init__(
        self,
        world: ProcessMesh,
        layout: TensorParallelLayout,
        parameters: Mapping[str, nn.Parameter],
        *,
        gradient_scale: float,
    ) -> None:
        """Create the view. `parameters`: this rank's trained ones by canonical name."""
        self._world, self._layout, self._parameters = world, layout, parameters
        self.gradient_scale = gradient_scale

    @property
    def device(self) -> torch.device:
        return self._world.device

    @property
    def pipelined(self) -> bool:
        return self._world.width("pp") > 1

    @property
    def share(self) -> tuple[int, int]:
        return self._world.index(*DATA), self._world.width(*DATA)

    def rows(self, layer: str) -> Slice | None:
        return self._layout.slices.get(f"{canonical_name(layer)}.lora_B.weight")

    def columns(self, layer: str) -> Slice | None:
        return self._layout.slices.get(f"{canonical_name(layer)}.lora_A.weight")

    def sum_tensor(self, tensor: Tensor) -> None:
        self._world.sum(tensor, "tp")

    def sum_data(self, tensor: Tensor) -> None:
        self._world.sum(tensor, *TOKENS)

    def sum_pipeline(self, tensor: Tensor) -> None:
        self._world.sum(tensor, "pp")

    def squares(self, tensors: Mapping[str, Tensor]) -> Tensor:
        names = [canonical_name(name) for name in tensors]
        squares = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if names:
            norms = torch._foreach_norm([tensor.detach() for tensor in tensors.values()], 2, torch.float64)
            squares = torch.stack(norms).square()
        kinds = [self._layout.divided_over(name, self._parameters[name]) for name in names]
        return sum_parts(squares, kinds, world=self._world)

    def full_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        keys = {canonical_name(name): name for name in tensors}
        wholes = gather_full_tensors(
            {key: tensors[name] for key, name in keys.items()},
            parameters=self._parameters,
            layout=self._layout,
            world=self._world,
        )
        return {keys[key]: tensor for key, tensor in wholes.items()}

    def copy_local_parts(self, wholes: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            key = canonical_name(name)
            whole = wholes[name].to(tensor.device)
            copy_local_part(tensor, whole, self._layout.slices.get(key), parameter=self._parameters[key])
