"""Slicing of a model for its tensor-parallel rank: local tensors, with collectives at the borders of its regions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config import Mesh
from ...models.anatomy import attention_modules, called_modules, is_conv1d, unwrap_peft
from ...models.checkpoint import canonical_name
from ..layout import Slice, TensorParallelLayout
from ..mesh import SHARDS, ProcessMesh
from . import borders
from .plans import MatchedExperts, MatchedRegion, PlanMatch, check_tensor_plan, match_plan
from .vocabulary import VocabularySlice, split_embedding, split_head

_OTHER_INPUTS = ("key_value_states", "encoder_hidden_states")
"""Keyword arguments of cross attention that enter a region in addition to its first input."""


def tensor_parallel(model: nn.Module, *, world: ProcessMesh, sequence_parallel: bool = False) -> TensorParallelLayout:
    """Slice `model` (PEFT or transformers, on meta or real; or a container `part0`, `part1`, … of pipeline stages) in
    place for this rank of the axis `tp`, and return the slices.

    Call it after PEFT and after a pipeline's cut, before FSDP2. `requires_grad` is unchanged. With `sequence_parallel`
    the residual stream is split by tokens if gradients are recorded (T must be a multiple of tp); without gradients, as
    in evaluation and generation, it is whole. Raises UserError as `check_tensor_plan`, RuntimeError for a model that is
    sliced already.
    """
    width = world.width("tp")
    if width == 1:
        return TensorParallelLayout()
    group = world.group("tp")
    slicer = ParameterSlicer(model, rank=world.index("tp"), width=width, device=world.device)
    for stage in called_modules(model):
        base = unwrap_peft(stage)
        if getattr(base, "tensor_parallel_width", 1) != 1:
            raise RuntimeError("this model is cut for tensor parallelism already")
        check_tensor_plan(stage, tp=width, sequence_parallel=sequence_parallel)
        match = match_plan(stage)
        for region, entry in match.biases:
            bias: Any = entry.get_submodule(str(region.bias))
            slicer.slice(bias.weight, 1)
            bias.embedding_dim //= width
        mixtures = {experts.block for experts in match.experts} if sequence_parallel else set()
        for matched in match.regions:
            shared = matched.shared_heads(width)
            for name, layer in matched.columns.items():
                if name in shared:
                    _share_heads(layer, matched, slicer, group)
                else:
                    slicer.slice_columns(layer, fused=matched.region.fused)
            slicer.slice_row(matched.row)
            _sum_row_norms(matched.row, group)
            for count in matched.region.counts:
                setattr(matched.entry, count, getattr(matched.entry, count) // width)
            if matched.region.gathered:
                _gather_inside(matched, group)
                slicer.keep_whole(matched.entry)
                slicer.layout.gathered.add(slicer.names[matched.entry])
            slicer.mark_partial(matched.entry)
            inside = any(matched.entry in mixture.modules() for mixture in mixtures)
            _register_border_hooks(matched, group, sequence_parallel=sequence_parallel and not inside)
        if match.plan.experts:  # some of their plans leave the attention whole
            entries = {matched.entry for matched in match.regions}
            slicer.layout.gathered |= {slicer.names[m] for m in attention_modules(base) if m not in entries}
        for experts in match.experts:
            _split_experts(experts, slicer, group)
        for mixture in mixtures:
            _gather_tokens_inside(mixture, group)
            slicer.keep_whole(mixture)
        _cut_vocabulary([*match.embeddings.values(), *filter(None, [match.head])], slicer, group)
        if sequence_parallel:
            _split_tokens(match, slicer, group)
            slicer.layout.splits_tokens = True
        base.tensor_parallel_width = width
    return slicer.layout


def _register_border_hooks(matched: MatchedRegion, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
    """Hook the entry's inputs and the row layer's output, outside of adapters and of anything that replaces a
    forward."""

    def enter(x: Tensor) -> Tensor:
        split = sequence_parallel and torch.is_grad_enabled()
        return borders.gather_tokens(x, group) if split else borders.copy_to_tp(x, group)

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            args = (enter(args[0]), *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}
        others = {name: enter(kwargs[name]) for name in _OTHER_INPUTS if isinstance(kwargs.get(name), Tensor)}
        return args, {**kwargs, **others}

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        split = sequence_parallel and torch.is_grad_enabled()
        return borders.reduce_scatter_tokens(output, group) if split else borders.reduce_from_tp(output, group)

    matched.entry.register_forward_pre_hook(before, with_kwargs=True)
    matched.row.register_forward_hook(after)


def _sum_row_norms(layer: Any, group: dist.ProcessGroup) -> None:
    """Make DoRA's norms of a row layer those of whole rows of W0 + BA, of which each rank has some columns."""
    for magnitude in getattr(layer, "lora_magnitude_vector", {}).values():

        def norms(*args: Any, local: Callable[..., Tensor] = magnitude.get_weight_norm, **kwargs: Any) -> Tensor:
            part = local(*args, **kwargs)
            squares = part.detach().float().square()
            dist.all_reduce(squares, group=group)
            return squares.sqrt().to(part.dtype)

        magnitude.get_weight_norm = norms


def _gather_inside(matched: MatchedRegion, group: dist.ProcessGroup) -> None:
    """Make the tensors between column and row layers whole on every rank."""

    def gather(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return borders.gather_from_tp(output, -1, group)

    def scatter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (borders.scatter_to_tp(args[0], -1, group), *args[1:])

    for layer in matched.columns.values():
        layer.register_forward_hook(gather)
    matched.row.register_forward_pre_hook(scatter)


def _split_experts(matched: MatchedExperts, slicer: ParameterSlicer, group: dist.ProcessGroup) -> None:
    """Give this rank a part of every expert's channels; the tokens and their routing enter whole."""
    for name, dim, fused in matched.region.parameters:
        slicer.slice_stacked(matched.experts, name, dim, fused=fused, layer=matched.adapters.get(name))

    def enter(x: Any) -> Any:
        return borders.copy_to_tp(x, group) if isinstance(x, Tensor) and x.is_floating_point() else x

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(enter, args)), {name: enter(value) for name, value in kwargs.items()}

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return borders.reduce_from_tp(output, group)

    matched.outer.register_forward_pre_hook(before, with_kwargs=True)
    matched.outer.register_forward_hook(after)


def _gather_tokens_inside(block: nn.Module, group: dist.ProcessGroup) -> None:
    """Make the tokens whole inside a mixture of experts, whose router counts on all of them."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        split = torch.is_grad_enabled()
        return (borders.gather_from_tp(args[0], borders.TOKENS, group) if split else args[0], *args[1:])

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        if isinstance(output, tuple):  # with the router's scores
            return (_own_tokens(output[0], args[0], group), *output[1:])
        return _own_tokens(output, args[0], group)

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)


def _own_tokens(output: Tensor, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens of the `output` for `tokens` [B, T, D], which may be flat."""
    return borders.scatter_to_tp(output.view(tokens.shape), borders.TOKENS, group)


def _share_heads(layer: Any, matched: MatchedRegion, slicer: ParameterSlicer, group: dist.ProcessGroup) -> None:
    """Keep a key or value layer whole on every rank, where its heads do not divide; attention on this rank gets one
    head for each of its queries."""
    slicer.keep_whole(layer)
    matched.entry.num_key_value_groups = 1  # type: ignore[assignment]
    queries, key_values = matched.attention
    own = Slice.part(0, queries, rank=slicer.rank, width=slicer.width).indices() * key_values // queries

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (borders.share_from_tp(args[0], group), *args[1:])

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        whole = borders.copy_to_tp(output, group).unflatten(-1, (key_values, -1))
        return whole[..., own.to(whole.device), :].flatten(-2)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _cut_vocabulary(
    modules: Iterable[Any], slicer: ParameterSlicer, group: dist.ProcessGroup, *, rows_differ: bool = False
) -> None:
    """Slice embeddings and heads by tokens."""
    for module in modules:
        size = module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features
        ((start, stop),) = Slice.part(0, size, rank=slicer.rank, width=slicer.width).runs
        tokens = VocabularySlice(start, stop, size, group, rows_differ)
        slicer.slice(module.weight, 0)
        if getattr(module, "bias", None) is not None:
            slicer.slice(module.bias, 0)
        (split_embedding if isinstance(module, nn.Embedding) else split_head)(module, tokens)


def split_tied_vocabulary(model: nn.Module, *, mesh: Mesh, world: ProcessMesh, layout: TensorParallelLayout) -> None:
    """Slice frozen matrices that embeddings share with a plain head by tokens over the ranks of dp, ep and cp, and add
    the slices to `layout`.

    FSDP2 has one unit for a shared weight and would gather it for as long as the model computes. Call it before FSDP2.
    Without effect beside tp, which slices the vocabulary itself, pp, whose stages share nothing, and `mesh.offload`;
    for `mesh.zero` 1 or 2, which shard no frozen weights; and for an adapted matrix, which PEFT may read as a whole.
    """
    width = world.width(*SHARDS)
    if width == 1 or mesh.zero < 3 or mesh.offload or world.width("tp", "pp") > 1:
        return
    slicer = ParameterSlicer(model, rank=world.index(*SHARDS), width=width, device=world.device)
    holders: dict[nn.Parameter, list[Any]] = defaultdict(list)
    adapted = set()
    for name, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            holders[module.weight].append(module)
            if "base_layer" in name.split("."):
                adapted.add(module.weight)
    for weight, modules in holders.items():
        heads = [module for module in modules if type(module) is nn.Linear]
        others = [module for module in modules if module not in heads]
        trained = any(parameter.requires_grad for module in modules for parameter in module.parameters())
        plain = len(heads) == 1 and others and all(isinstance(module, nn.Embedding) for module in others)
        step = -(-len(weight) // width)
        if plain and not trained and weight not in adapted and step * (width - 1) < len(weight):
            _cut_vocabulary(modules, slicer, world.group(*SHARDS), rows_differ=True)
    layout.slices |= slicer.layout.slices


def _split_tokens(match: PlanMatch, slicer: ParameterSlicer, group: dist.ProcessGroup) -> None:
    """Split the tokens over the ranks from the first block's input to the output of the last norm, or of the last block
    without one, and so also between pipeline stages."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled():
            return None
        return (borders.scatter_to_tp(args[0], borders.TOKENS, group), *args[1:])

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return borders.gather_from_tp(output, borders.TOKENS, group) if torch.is_grad_enabled() else output

    blocks = list(match.blocks.values())
    if next(iter(match.blocks)).endswith(".0"):
        blocks[0].register_forward_pre_hook(before)
    if match.norm is not None:
        match.norm.register_forward_hook(after)
    elif not match.plan.norm and [*match.blocks][-1].endswith(f".{match.depth - 1}"):
        blocks[-1].register_forward_hook(after)
    for module in (*blocks, *filter(None, [match.norm])):
        slicer.mark_partial(module)


class ParameterSlicer:
    """Slices parameters of `model` for the `rank`-th of `width` ranks and records the slices."""

    def __init__(self, model: nn.Module, *, rank: int, width: int, device: torch.device, axis: str = "tp") -> None:
        """Index the parameters of `model`. device: where it will be, if its parameters are still on meta."""
        self.rank, self.width, self.device, self.axis = rank, width, device, axis
        self.layout = TensorParallelLayout()
        self.names = {module: canonical_name(name) for name, module in model.named_modules()}
        self._holders: dict[int, list[tuple[nn.Module, str, str]]] = {}
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = canonical_name(f"{prefix}.{key}" if prefix else key)
                    self._holders.setdefault(id(parameter), []).append((module, key, name))
        self._placed: set[int] = set()

    def slice(self, parameter: Tensor, dim: int, *, fused: int = 1) -> None:
        """Replace `parameter` by this rank's part along `dim` in all modules that hold it (tied weights stay tied)."""
        if id(parameter) in self._placed:
            return
        own = Slice.part(dim, parameter.shape[dim], rank=self.rank, width=self.width, fused=fused, axis=self.axis)
        shape = list(parameter.shape)
        shape[dim] = own.local_size
        if parameter.is_meta:
            local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        else:
            local = own.take(parameter.detach()).clone()
        replacement = nn.Parameter(local, requires_grad=parameter.requires_grad)
        holders = self._holders.pop(id(parameter))
        for module, key, name in holders:
            module._parameters[key] = replacement
            self.layout.slices[name] = own
        self._holders[id(replacement)] = holders
        self._placed.add(id(replacement))

    def slice_columns(self, layer: Any, *, fused: int = 1) -> None:
        """Keep this rank's output rows of a column layer: of the weight, bias, every adapter's B and magnitudes."""
        base = layer.base_layer if hasattr(layer, "lora_A") else layer
        self.slice(base.weight, 1 if is_conv1d(base) else 0, fused=fused)
        if base.bias is not None:
            self.slice(base.bias, 0, fused=fused)
        for up in getattr(layer, "lora_B", {}).values():
            self.slice(up.weight, 0, fused=fused)
            up.out_features = up.weight.shape[0]
        for magnitude in getattr(layer, "lora_magnitude_vector", {}).values():
            self.slice(magnitude.weight, 0, fused=fused)
        for down in getattr(layer, "lora_A", {}).values():
            self._mark(down.weight)
        size = base.weight.shape[1 if is_conv1d(base) else 0]
        setattr(base, "nf" if is_conv1d(base) else "out_features", size)
        layer.out_features = size

    def slice_row(self, layer: Any) -> None:
        """Keep this rank's input columns of a row layer: of the weight and every adapter's A; the bias on rank 0."""
        base = layer.base_layer if hasattr(layer, "lora_A") else layer
        self.slice(base.weight, 0 if is_conv1d(base) else 1)
        if base.bias is not None and self.rank:
            # Outputs are summed over the ranks, so only one may add the bias. A plain attribute: neither a
            # parameter nor a buffer, so that no weights are loaded into it.
            device = self.device if base.bias.is_meta else base.bias.device
            zero = torch.zeros(base.bias.shape, dtype=base.bias.dtype, device=device)
            del base.bias
            base.bias = zero
        for down in getattr(layer, "lora_A", {}).values():
            self.slice(down.weight, 1)
            down.in_features = down.weight.shape[1]
        for whole in (*getattr(layer, "lora_B", {}).values(), *getattr(layer, "lora_magnitude_vector", {}).values()):
            self._mark(whole.weight)
        size = base.weight.shape[0 if is_conv1d(base) else 1]
        setattr(base, "nx" if is_conv1d(base) else "in_features", size)
        layer.in_features = size

    def slice_stacked(self, experts: Any, name: str, dim: int, *, fused: int, layer: Any) -> None:
        """Keep this rank's part of a parameter (E, ., .) of stacked experts along `dim`, and of the factor of its
        adapter `layer` (PEFT's, or None) that spans it: A has the rows e·r … of expert e, B every E-th column."""
        self.slice(getattr(experts, name), dim, fused=fused)
        if layer is None:
            return
        # B spans the first of the two dims, unless PEFT takes the parameter as (E, inputs, outputs)
        spans_rows = layer._did_swap_in_out_features == (dim == 1)
        for down, up in zip(layer.lora_A.values(), layer.lora_B.values(), strict=True):
            if spans_rows:
                self.slice(up.weight, 0, fused=fused)
                self._mark(down.weight)
            else:
                self.slice(down.weight, 1, fused=fused)
                self._mark(up.weight)

    def keep_whole(self, module: nn.Module) -> None:
        """Leave the parameters of `module` that are not sliced whole, with whole gradients on every rank."""
        self._placed.update(id(parameter) for parameter in module.parameters())

    def mark_partial(self, module: nn.Module) -> None:
        """Mark the trainable parameters of `module` that stayed whole: their gradient must be summed over the ranks."""
        for parameter in module.parameters():
            if id(parameter) not in self._placed:
                self._mark(parameter)

    def _mark(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad:
            self.layout.partial.update(name for _, _, name in self._holders[id(parameter)])
