"""Slicing of a model for its tensor-parallel rank: local tensors, with collectives at the borders of its regions."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.anatomy import is_conv1d, unwrap_peft
from ...models.checkpoint import canonical_name
from ..layout import Slice, TensorParallelLayout
from ..mesh import ProcessMesh
from . import borders
from .plans import FoundRegion, PlanMatch, check_tensor_plan, match_plan
from .vocabulary import VocabularySlice, split_embedding, split_head

_OTHER_INPUTS = ("key_value_states", "encoder_hidden_states")
"""Keyword arguments of cross attention that enter a region in addition to its first input."""


def tensor_parallel(model: nn.Module, *, world: ProcessMesh, sequence_parallel: bool = False) -> TensorParallelLayout:
    """Slice `model` (PEFT or transformers, on meta or real; or a container `part0`, `part1`, … of pipeline stages) in
    place for this rank of the axis `tp`, and return the slices.

    Call it after PEFT and after a pipeline's cut, before FSDP2. `requires_grad` is unchanged. With `sequence_parallel`
    the residual stream is split by tokens if gradients are recorded (T must be a multiple of tp); without gradients, as
    in evaluation and generation, it is whole.

    Raises:
        UserError: as `check_tensor_plan`.
        RuntimeError: the model is sliced already.
    """
    width = world.width("tp")
    if width == 1:
        return TensorParallelLayout()
    group = world.group("tp")
    cutter = ParameterSlicer(model, rank=world.index("tp"), width=width, device=world.device)
    for part in _pipeline_parts(model):
        base = unwrap_peft(part)
        if getattr(base, "tensor_parallel_width", 1) != 1:
            raise RuntimeError("this model is cut for tensor parallelism already")
        check_tensor_plan(part, tp=width, sequence_parallel=sequence_parallel)
        found = match_plan(part)
        for region, entry in found.biases:
            bias: Any = entry.get_submodule(str(region.bias))
            cutter.cut(bias.weight, 1)
            bias.embedding_dim //= width
        for place in found.regions:
            _cut_region(place, cutter)
            _register_border_hooks(place, group, sequence_parallel=sequence_parallel)
        _cut_vocabulary(found, cutter, group)
        if sequence_parallel:
            _split_tokens(found, cutter, group)
            cutter.layout.splits_tokens = True
        base.tensor_parallel_width = width
    return cutter.layout


def _pipeline_parts(model: nn.Module) -> list[nn.Module]:
    return [child for name, child in model.named_children() if re.fullmatch(r"part\d+", name)] or [model]


# --------------------------------------------------------------------------------------------- regions


def _cut_region(place: FoundRegion, cutter: ParameterSlicer) -> None:
    for layer in place.columns.values():
        cutter.columns(layer, fused=place.region.fused)
    cutter.row(place.row)
    for count in place.region.counts:
        setattr(place.entry, count, getattr(place.entry, count) // cutter.width)
    cutter.summed(place.entry)


def _register_border_hooks(place: FoundRegion, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
    """Hook the entry's inputs and the row layer's output, outside of adapters and of anything that replaces a
    forward."""

    def enters(x: Tensor) -> Tensor:
        return (
            borders.gather_tokens(x, group)
            if sequence_parallel and torch.is_grad_enabled()
            else borders.copy_to_tp(x, group)
        )

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            args = (enters(args[0]), *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": enters(kwargs["hidden_states"])}
        others = {name: enters(kwargs[name]) for name in _OTHER_INPUTS if isinstance(kwargs.get(name), Tensor)}
        return args, {**kwargs, **others}

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        split = sequence_parallel and torch.is_grad_enabled()
        return borders.reduce_scatter_tokens(output, group) if split else borders.reduce_from_tp(output, group)

    place.entry.register_forward_pre_hook(before, with_kwargs=True)
    place.row.register_forward_hook(after)


# --------------------------------------------------------------------------------------------- vocabulary


def _cut_vocabulary(found: PlanMatch, cutter: ParameterSlicer, group: dist.ProcessGroup) -> None:
    for embedding in found.embeddings.values():
        held = _make_vocabulary_slice(embedding.num_embeddings, cutter, group)
        cutter.cut(embedding.weight, 0)
        split_embedding(embedding, held)
    if found.head is not None:
        held = _make_vocabulary_slice(found.head.out_features, cutter, group)
        cutter.cut(found.head.weight, 0)
        if found.head.bias is not None:
            cutter.cut(found.head.bias, 0)
        split_head(found.head, held)


def _make_vocabulary_slice(size: int, cutter: ParameterSlicer, group: dist.ProcessGroup) -> VocabularySlice:
    rows = size // cutter.width
    return VocabularySlice(cutter.rank * rows, (cutter.rank + 1) * rows, size, group)


# --------------------------------------------------------------------------------------------- tokens


def _split_tokens(found: PlanMatch, cutter: ParameterSlicer, group: dist.ProcessGroup) -> None:
    """Split the tokens over the ranks from the first block's input to the last norm's output, and so also between
    pipeline stages."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled():
            return None
        return (borders.scatter_to_tp(args[0], borders.TOKENS, group), *args[1:])

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return borders.gather_from_tp(output, borders.TOKENS, group) if torch.is_grad_enabled() else output

    blocks = list(found.blocks.values())
    if next(iter(found.blocks)).endswith(".0"):
        blocks[0].register_forward_pre_hook(before)
    if found.norm is not None:
        found.norm.register_forward_hook(after)
    for module in (*blocks, *filter(None, [found.norm])):
        cutter.summed(module)


class ParameterSlicer:
    """Slices parameters of `model` for the `rank`-th of `width` ranks and records the slices."""

    def __init__(self, model: nn.Module, *, rank: int, width: int, device: torch.device) -> None:
        """Index the parameters of `model`.

        Args:
            device: where the model will be, if its parameters are still on meta.
        """
        self.rank = rank
        self.device = device
        self.width = width
        self.layout = TensorParallelLayout()
        self._holders: dict[int, list[tuple[nn.Module, str, str]]] = {}
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = canonical_name(f"{prefix}.{key}" if prefix else key)
                    self._holders.setdefault(id(parameter), []).append((module, key, name))
        self._cut: set[int] = set()

    def cut(self, parameter: Tensor, dim: int, *, fused: int = 1) -> None:
        """Replace `parameter` by this rank's part along `dim` in all modules that hold it (tied weights stay tied)."""
        if id(parameter) in self._cut:
            return
        part = Slice.even(dim, parameter.shape[dim], rank=self.rank, width=self.width, fused=fused)
        shape = list(parameter.shape)
        shape[dim] //= self.width
        if parameter.is_meta:
            local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        else:
            local = part.take(parameter.detach()).clone()
        replacement = nn.Parameter(local, requires_grad=parameter.requires_grad)
        holders = self._holders.pop(id(parameter))
        for module, key, name in holders:
            module._parameters[key] = replacement
            self.layout.slices[name] = part
        self._holders[id(replacement)] = holders
        self._cut.add(id(replacement))

    def names(self, parameter: Tensor) -> list[str]:
        """Return the canonical names of `parameter`."""
        return [name for _, _, name in self._holders[id(parameter)]]

    def columns(self, layer: Any, *, fused: int = 1) -> None:
        """Keep this rank's output rows of a column layer: of the weight, the bias and every adapter's B."""
        base = _base_layer(layer)
        self.cut(base.weight, 1 if is_conv1d(base) else 0, fused=fused)
        if base.bias is not None:
            self.cut(base.bias, 0, fused=fused)
        for up in getattr(layer, "lora_B", {}).values():
            self.cut(up.weight, 0, fused=fused)
            up.out_features //= self.width
        for down in getattr(layer, "lora_A", {}).values():
            self._partial(down.weight)
        _shrink_sizes(layer, base, "nf" if is_conv1d(base) else "out_features", "out_features", self.width)

    def row(self, layer: Any) -> None:
        """Keep this rank's input columns of a row layer: of the weight and every adapter's A; the bias on rank 0."""
        base = _base_layer(layer)
        self.cut(base.weight, 0 if is_conv1d(base) else 1)
        if base.bias is not None and self.rank:
            # Outputs are summed over the ranks, so only one may add the bias. A plain attribute: neither a
            # parameter nor a buffer, so that no weights are loaded into it.
            device = self.device if base.bias.is_meta else base.bias.device
            zero = torch.zeros(base.bias.shape, dtype=base.bias.dtype, device=device)
            del base.bias
            base.bias = zero
        for down in getattr(layer, "lora_A", {}).values():
            self.cut(down.weight, 1)
            down.in_features //= self.width
        for up in getattr(layer, "lora_B", {}).values():
            self._partial(up.weight)
        _shrink_sizes(layer, base, "nx" if is_conv1d(base) else "in_features", "in_features", self.width)

    def summed(self, module: nn.Module) -> None:
        """Mark the trainable parameters of `module` that stayed whole: their gradient must be summed over the ranks."""
        for parameter in module.parameters():
            if id(parameter) not in self._cut:
                self._partial(parameter)

    def _partial(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad:
            self.layout.partial.update(self.names(parameter))


def _base_layer(layer: Any) -> Any:
    return layer.base_layer if hasattr(layer, "lora_A") else layer


def _shrink_sizes(layer: Any, base: Any, own: str, peft: str, width: int) -> None:
    setattr(base, own, getattr(base, own) // width)
    if layer is not base:
        setattr(layer, peft, getattr(layer, peft) // width)
