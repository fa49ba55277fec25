"""One stage of a model: cost, split, checks and cut.

Blocks are numbered consecutively, the encoder's before the decoder's. `cut_to_stage` works in place and on meta
tensors: names keep the whole model's block numbers, and modules of other stages are replaced by ones without parameters
(`OtherStageBlock`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from ...config import Mesh
from ...errors import UserError
from ...models.anatomy import ModelParts
from ...models.checkpoint import canonical_name
from ...models.families import BlockStack
from ..mesh import ProcessMesh
from ..pipeline_plan import BlockCosts, split_blocks, stages_of, virtual_stages
from .stage import OtherStageBlock, PositionBiasBlock, StageInput, StageModules, StageOutput


def stage_costs(model: nn.Module, *, tokens: int = 0) -> BlockCosts:
    """Return the planned cost: 4 per element of a frozen matrix (forward, gradient of the input), 6 of a trained one.

    Embeddings are lookups and cost nothing. A vocabulary head costs as much as its matrix. Attention scores and their
    product with the values cost 6·T·D a block (a causal half; forward once, backward twice), T being `tokens`.
    """
    anatomy = ModelParts.of(model)
    attention = 6.0 * tokens * anatomy.width
    head = sum(_matrix_cost(getattr(anatomy.causal, name)) for name in anatomy.head)
    return BlockCosts(tuple(_matrix_cost(block) + attention for block in anatomy.blocks), head)


def _matrix_cost(module: nn.Module) -> float:
    lookups = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    return float(
        sum(
            (6 if p.requires_grad else 4) * p.numel()
            for p in module.parameters()
            if p.ndim == 2 and id(p) not in lookups
        )
    )


def check_pipeline(model: nn.Module, *, pp: int, virtual: int | None, schedule: str) -> None:
    """Raise UserError for a model that cannot be cut, before any weight is read; `model` may be on meta.

    It has an unknown family or schedule, more stages than blocks, a trained embedding that is tied to the head or a
    trained position bias that several stages would need.
    """
    anatomy = ModelParts.of(model)
    stages = pp * virtual_stages(schedule, virtual)
    split_blocks(stage_costs(model), stages)
    tied = tuple(name.removesuffix("weight") for pair in _tied_parameters(anatomy).items() for name in pair)
    for name, parameter in anatomy.causal.named_parameters():
        if not parameter.requires_grad:
            continue
        name = canonical_name(name)
        if name.startswith(tied):
            raise UserError(
                f"mesh.pp: {name} is trained, but its matrix is shared by embedding and head, which are on "
                "different stages; leave it out of adapter.targets, or set mesh.pp 1"
            )
        if "relative_attention_bias" in name:
            raise UserError(f"mesh.pp: {name} is trained, but every stage needs it; leave it out, or set mesh.pp 1")


def _tied_parameters(anatomy: ModelParts) -> dict[str, str]:
    """Return tied parameter → the one whose values it takes, whether or not both are here."""
    if not getattr(anatomy.causal.config, "tie_word_embeddings", False):
        return {}
    return dict(getattr(anatomy.causal, "all_tied_weights_keys", None) or {})


def tied_source_names(model: nn.Module) -> dict[str, str]:
    """Return for a cut model: canonical names of its parameters → the names that the checkpoint may use for them
    instead.

    A head on the last stage is tied to an embedding on the first: it is a separate parameter here, and a checkpoint
    that stores the shared matrix once stores it under the embedding's name.
    """
    present = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = _tied_parameters(ModelParts.of(model))
    return {name: source for name, source in ties.items() if name in present and source not in present}


def cut_to_stage(model: nn.Module, blocks: range) -> None:
    """Reduce `model` in place to one stage: `blocks`, plus everything before the first block or after the last.

    Parameters may be on meta or real. Tied matrices stay tied if both partners stay. Between encoder and decoder, the
    stage of the decoder's first block has the decoder's embedding and the encoder's final norm.
    """
    anatomy = ModelParts.of(model)
    total = len(anatomy.blocks)
    assert 0 <= blocks.start < blocks.stop <= total, (blocks, total)
    dtype = next(anatomy.base.get_submodule(anatomy.stacks[0].first[0]).parameters()).dtype

    def make(kind: type[OtherStageBlock] = OtherStageBlock, **options: Any) -> OtherStageBlock:
        return kind(anatomy.width, dtype, **options)

    if len(anatomy.stacks) == 1:
        _cut_stack(anatomy, anatomy.stacks[0], blocks, make)
    else:
        _cut_encoder_decoder(anatomy, blocks, make)
    if blocks.stop < total:
        _replace_modules(anatomy.base, anatomy.stacks[-1].last, make)
        _replace_modules(anatomy.causal, anatomy.head, make)


def build_rank_stages(
    model: nn.Module, build_model: Callable[[], nn.Module], *, mesh: Mesh, world: ProcessMesh, tokens: int = 0
) -> tuple[StageModules, tuple[int, ...]]:
    """Return this rank's stages of a model on meta, checked and cut, and their numbers.

    model: the whole model; becomes the first stage.
    build_model: creates another one like it, for each further stage.
    tokens: T, for the cost of attention.

    Raises UserError as `check_pipeline`.
    """
    check_pipeline(model, pp=mesh.pp, virtual=mesh.virtual, schedule=mesh.schedule)
    virtual = virtual_stages(mesh.schedule, mesh.virtual)
    runs = split_blocks(stage_costs(model, tokens=tokens), mesh.pp * virtual)
    stages = stages_of(world.index("pp"), pp=mesh.pp, virtual=virtual, schedule=mesh.schedule)
    parts = [model, *(build_model() for _ in stages[1:])]
    for part, stage in zip(parts, stages, strict=True):
        cut_to_stage(part, runs[stage])
    return StageModules(parts), stages


_ENCODER_STATES = 3  # among the positional arguments of a T5 block


def _cut_encoder_decoder(anatomy: ModelParts, blocks: range, make: Callable[..., OtherStageBlock]) -> None:
    """Cut a T5 model: a stage that ends with the encoder returns its result at the encoder's final norm; stages that
    begin inside the decoder receive the encoder's states there."""
    encoder, decoder = anatomy.stacks
    border = len(anatomy.run(encoder))
    in_decoder = blocks.stop > border
    _cut_stack(anatomy, encoder, blocks, make, t5=True)
    _cut_stack(anatomy, decoder, blocks, make, border, t5=True, returns=in_decoder, encoder_at=_ENCODER_STATES)
    if blocks.start > border:
        _replace_modules(anatomy.base, encoder.last, partial(make, StageInput, slot=1))
        _replace_modules(anatomy.base, ("encoder.dropout",), nn.Identity)  # the received states have passed it already
    elif not in_decoder:
        kind = StageOutput if blocks.stop == border else OtherStageBlock
        _replace_modules(anatomy.base, encoder.last, partial(make, kind))
    if 0 not in blocks and border not in blocks:
        _replace_modules(anatomy.base, ("shared",), make)


def _cut_stack(
    anatomy: ModelParts,
    stack: BlockStack,
    blocks: range,
    make: Callable[..., OtherStageBlock],
    offset: int = 0,
    *,
    t5: bool = False,
    returns: bool = True,
    encoder_at: int | None = None,
) -> None:
    """Replace the blocks of `stack` (numbered from `offset`) that are not in `blocks`, and its embedding if its first
    block is not. returns: the block after the last one takes out the stage's result."""
    modules = anatomy.run(stack)
    in_use = blocks.start < offset + len(modules) and offset < blocks.stop
    for index, block in enumerate(list(modules)):
        number = offset + index
        if number in blocks:
            continue
        if number == blocks.start - 1:
            port = make(StageInput, t5=t5)
        elif number == blocks.stop and returns:
            port = make(StageOutput, t5=t5, encoder_at=encoder_at)
        else:
            port = make(OtherStageBlock, t5=t5)
        # a T5 stack computes its position bias in its first block
        modules[index] = PositionBiasBlock(block, port) if t5 and in_use and index == 0 else port
    if offset not in blocks:
        _replace_modules(anatomy.base, stack.first, make)


def _replace_modules(root: nn.Module, names: Iterable[str], make: Callable[[], nn.Module]) -> None:
    """Replace these modules, but no norm without parameters: NanoChat calls its last one before the first block too."""
    for name in names:
        parent, _, child = name.rpartition(".")
        holder = root.get_submodule(parent)
        module: Any = getattr(holder, child, None)
        is_norm = "Norm" in type(module).__name__
        if module is not None and not (is_norm and next(module.parameters(), None) is None):
            setattr(holder, child, make())
