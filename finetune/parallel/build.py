"""Construction of an `Engine` from a recipe's parts: the order in which a model is built on a mesh.

    build on meta → PEFT on meta → checks → pipeline stage → tensor and expert parallel → activation checkpointing →
    FSDP2 → memory for the local shards → slices of the weight files → values of the adapter by name

PEFT comes before every split, so an adapter belongs to its block's unit and `modules_to_save` are split like the rest;
no weight is read before all checks have passed; no rank ever has more than its own part.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..adapters.adapter import attach_adapter, attach_on_meta, initial_value
from ..adapters.initial_values import InitialAdapter
from ..compute.numerics import dropout_rates, find_generator_dropout, uses_dropout
from ..compute.precision import adapter_dtype
from ..config import Adapter, Mesh, Train
from ..errors import UserError
from ..figures import format_bytes
from ..models.anatomy import is_conv1d
from ..models.backbone import open_backbone
from ..models.checkpoint import canonical_name
from ..models.load import load_backbone
from ..models.quantize import check_available, describe_quantization, is_four_bit, prepare_quantized, quantize_skeleton
from ..tasks import Task
from .activation_checkpoint import checkpoint_activations
from .engine import Engine
from .mesh import ProcessMesh

_TOKENS_FIRST = ("xlnet", "fsmt")
"""Model types that compute with (tokens, rows, features)."""


def build_engine(
    backbone: str,
    *,
    task: Task,
    adapter: Adapter,
    train: Train,
    mesh: Mesh,
    world: ProcessMesh,
    label_names: Sequence[str] | None = None,
    log: Callable[[str], None] = lambda line: None,
    beginning: InitialAdapter | None = None,
) -> Engine:
    """Return the engine of the frozen `backbone` with a fresh adapter on `mesh`; collective.

    Commands resolve `train.precision` before (`flatshift.finetune.compute.precision.resolve_precision`); an unresolved
    `auto` is float32, the default of `load_backbone`. Raises UserError if base model, adapter and mesh do not fit
    together, before a weight is read.

    log: receives a line on the weights that were loaded (every rank's own numbers).
    beginning: initial values of the adapter; for one process.
    """
    if train.precision == "auto":
        train = dataclasses.replace(train, precision="fp32")
    if world.size > 1 and train.quantization != "int8":
        return _build_mesh_engine(
            backbone, task=task, adapter=adapter, train=train, mesh=mesh, world=world, label_names=label_names, log=log
        )
    base = load_backbone(
        backbone,
        task=task,
        label_names=label_names,
        precision=train.precision,
        narrow=train.backbone_precision == "bf16",
        quantization=train.quantization,
        dropout=train.backbone_dropout,
        device=world.device,
    )
    model = attach_adapter(
        base,
        adapter,
        task=task,
        seed=train.seed,
        dtype=adapter_dtype(train),
        initial=None if beginning is None else beginning.folder,
        calibration=None if beginning is None else beginning.rows,
    )
    if train.quantization is not None:
        log(describe_quantization(model, train.quantization))
    if world.size == 1:
        checkpoint_activations(model, train.checkpointing)
        return Engine.alone(model)
    return _build_quantised_engine(model, train=train, mesh=mesh, world=world)


def check_mesh_support(model: Any) -> None:
    """Raise UserError for a model that no mesh supports.

    These are: layerdrop in the base model, because each rank would drop other blocks; dropout of hidden states with
    tokens before rows; and dropout by a generator, because each rank has its own.
    """
    config = model.get_base_model().config
    for _, key, rate in dropout_rates(config):
        if "layerdrop" in key and rate > 0:
            raise UserError(
                f"mesh: {key} {rate} of this backbone leaves out whole blocks by chance, on each rank others; set "
                "train.backbone_dropout: 0, or train in one process"
            )
    if config.model_type in _TOKENS_FIRST and uses_dropout(model):
        raise UserError(
            f"mesh: {config.model_type} models put tokens before rows, whose dropout does not follow the row; set "
            "train.backbone_dropout: 0 and adapter.dropout: 0, or train in one process"
        )
    if (generator := find_generator_dropout(model)) is not None:
        name, module = generator
        raise UserError(
            f"mesh: {canonical_name(name)} of this backbone is a {type(module).__name__}, which drops by a generator, "
            "on each rank something else; set train.backbone_dropout: 0, or train in one process"
        )


def _build_quantised_engine(model: Any, *, train: Train, mesh: Mesh, world: ProcessMesh) -> Engine:
    """Return the engine of a base model in int8, which every rank keeps whole."""
    from .context import ContextParallel, check_context
    from .fsdp import shard

    check_mesh_support(model)
    if mesh.cp > 1:
        check_context(model)
    tokens = ContextParallel(world).attach(model) if mesh.cp > 1 else None
    checkpoint_activations(model, train.checkpointing)
    sharding = shard(model, mesh=mesh, world=world)
    return Engine(model, world, sharding=sharding, tokens=tokens, multiple=1 if tokens is None else tokens.multiple)


def _build_mesh_engine(
    backbone: str,
    *,
    task: Task,
    adapter: Adapter,
    train: Train,
    mesh: Mesh,
    world: ProcessMesh,
    label_names: Sequence[str] | None,
    log: Callable[[str], None],
) -> Engine:
    from ..models.meta import build_skeleton
    from .context import ContextParallel, check_context
    from .experts import check_expert_parallel, expert_parallel
    from .fsdp import shard
    from .pipeline import PipelineRunner, build_rank_stages
    from .tensor import check_tensor_plan, split_tied_vocabulary, tensor_parallel
    from .weights import load_packed_layers, load_weights, materialize, pack_layers

    def build_model() -> Any:
        skeleton = build_skeleton(
            backbone, task=task, label_names=label_names, precision=train.precision, dropout=train.backbone_dropout
        )
        if train.quantization is not None:
            quantize_skeleton(skeleton, train.quantization, context=open_backbone(backbone).where)
        return attach_on_meta(skeleton, adapter, task=task, dtype=adapter_dtype(train))

    check_available(train.quantization)
    model = build_model()
    check_mesh_support(model)
    base = model.get_base_model()
    checkpoint, deviation = base.checkpoint, float(getattr(base.config, "initializer_range", 0.02))
    if mesh.tp > 1:
        check_tensor_plan(model, tp=mesh.tp, sequence_parallel=mesh.sequence_parallel)
    if mesh.cp > 1:
        check_context(model)
    if mesh.ep > 1:
        check_expert_parallel(model, ep=mesh.ep)
    if mesh.pp > 1:
        model, _ = build_rank_stages(model, build_model, mesh=mesh, world=world, tokens=train.max_length)
    shapes = {canonical_name(name): p.shape for name, p in model.named_parameters() if p.requires_grad}
    layout = tensor_parallel(model, world=world, sequence_parallel=mesh.sequence_parallel)
    expert_parallel(model, world=world, layout=layout)
    split_tied_vocabulary(model, mesh=mesh, world=world, layout=layout)
    tokens = ContextParallel(world).attach(model) if mesh.cp > 1 else None
    checkpoint_activations(model, train.checkpointing)
    packed = pack_layers(model, layout)
    sharding = shard(model, mesh=mesh, world=world)
    materialize(model, world.device, offload=mesh.offload)
    began = time.monotonic()
    loaded = load_weights(model, checkpoint.without(packed), layout=layout, world=world)
    count = loaded.bytes + load_packed_layers(packed, checkpoint, layout=layout, world=world)
    prepare_quantized(model)
    rate = count / max(time.monotonic() - began, 1e-9)
    log(f"read {format_bytes(count)} of weights at {format_bytes(round(rate))}/s")
    if train.quantization is not None:
        log(describe_quantization(model, train.quantization))
    engine = Engine(
        model,
        world,
        layout=layout,
        sharding=sharding,
        runner=PipelineRunner(model, mesh=mesh, world=world, tokens=tokens) if mesh.pp > 1 else None,
        tokens=tokens,
        multiple=(1 if tokens is None else tokens.multiple) * (mesh.tp if mesh.sequence_parallel else 1),
    )
    packed_names = {*packed, *(name.removesuffix("weight") + "absmax" for name in packed)}
    unread = [name for name in loaded.unread if canonical_name(name) not in packed_names]
    _initialise_missing_parameters(engine, shapes, unread, seed=train.seed, deviation=deviation)
    return engine


@torch.no_grad()
def _initialise_missing_parameters(
    engine: Engine, shapes: dict[str, torch.Size], unread: Sequence[str], *, seed: int, deviation: float
) -> None:
    """Initialise by name every parameter that no file has: adapters, new heads and PEFT's frozen copy of them; DoRA's
    magnitudes by the row norms of the base model, gathered one layer at a time."""
    from .layout import copy_local_part, gather_full_tensors
    from .weights import gather_dequantized

    parameters = dict(engine.model.named_parameters())
    for full in unread:
        name = canonical_name(full)
        if ".lora_magnitude_vector" in name:
            continue
        parameter = parameters[full]
        shape = shapes.get(name, engine.layout.shape(name, parameter.shape))
        value = initial_value(name, shape, seed, deviation).to(parameter.dtype)
        copy_local_part(parameter, value, engine.layout.slices.get(name))
    for name, module in engine.model.named_modules():
        if "default" not in (getattr(module, "lora_magnitude_vector", None) or ()):
            continue
        base = module.get_base_layer()
        weight_name = canonical_name(f"{name}.base_layer.weight")
        if is_four_bit(base):
            weight = gather_dequantized(weight_name, base, layout=engine.layout, world=engine.world)
        else:
            only = {weight_name: base.weight}
            (weight,) = gather_full_tensors(only, parameters=only, layout=engine.layout, world=engine.world).values()
        norms = torch.linalg.vector_norm(weight, dim=0 if is_conv1d(base) else 1)
        full = f"{name}.lora_magnitude_vector.default.weight"
        magnitude = parameters[full]
        copy_local_part(magnitude, norms.to(magnitude.dtype), engine.layout.slices.get(canonical_name(full)))
