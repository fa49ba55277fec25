"""What a mesh will hold and send, said before step 1: bytes on this rank by cause, and bytes sent per update.

Everything here is counted on the model as it was cut; activations are not in it (they are measured in one process by
`finetune.planner.memory`). Volumes are those of ring collectives: a rank sends (n − 1)/n of what is gathered or
reduced.
"""

from __future__ import annotations

from typing import Any

from ..config import WIDTHS, Mesh, Optimizer, Train
from ..parallel.engine import Engine
from ..parallel.fsdp import blocks
from ..parallel.gather import local
from ..parallel.pipeline.plan import bubble, full_pieces, pieces_per_micro, virtual_stages
from ..quantised import scales
from .memory import size


def mesh_lines(engine: Engine, *, mesh: Mesh, train: Train, optimizer: Optimizer) -> list[str]:
    """The plan of one stage as text, one cause a line."""
    world, sharding = engine.world, engine.sharding
    frozen = sum(local(p).nbytes for p in engine.model.parameters() if not p.requires_grad)
    frozen += sum(part.nbytes for part in scales(engine.model).values())
    adapter = sum(local(p).nbytes for p in engine.parameters.values())
    masters = 2 * adapter if train.adapter_precision == "bf16" else 0
    moments = 2 * (2 * adapter if train.adapter_precision == "bf16" else adapter)
    rows = [
        ("backbone, frozen", frozen, "on this rank"),
        ("adapter", adapter, "on this rank"),
        ("gradients", adapter, "of the adapter only"),
        ("optimizer state", moments + masters, f"AdamW, lr {optimizer.lr:g}, {optimizer.schedule}"),
    ]
    if sharding is not None and sharding.units:
        units = [sum(p.numel() * p.itemsize for p in unit.parameters()) for unit in blocks(engine.model)]
        rows.append(("gathered", 2 * max(units, default=0), "the largest block and its gather buffer"))
    rows.append(("together", sum(count for _, count, _ in rows), "without activations, temporaries and libraries"))
    head = f"plan: {train.steps} steps × {train.accumulate} × {train.batch_size} rows on {world}, {world.device.type}"
    width = max(len(name) for name, _, _ in rows)
    lines = [head, *(f"  {name.ljust(width)}  {size(count):>11}  {note}" for name, count, note in rows)]
    return [*lines, *(f"  sends per update: {line}" for line in _traffic(engine, mesh, train, adapter))]


def _traffic(engine: Engine, mesh: Mesh, train: Train, adapter: int) -> list[str]:
    world, sharding = engine.world, engine.sharding
    lines = []
    if sharding is not None and sharding.units:
        n = world.width("dp", "cp")
        axes = " × ".join(axis for axis in ("dp", "cp") if world.width(axis) > 1)
        gathers = 2 if mesh.reshard and mesh.pp == 1 else 1
        gathered = gathers * train.accumulate * sharding.sharded_bytes * (n - 1) // n
        lines.append(f"{size(gathered)} of weights gathered along {axes}, {size(adapter)} of adapter gradients reduced")
    if mesh.replicate > 1:
        lines.append(
            f"{size(2 * adapter * (mesh.replicate - 1) // mesh.replicate)} of adapter gradients along replicate"
        )
    if mesh.tp > 1:
        each = _activation_bytes(engine, train) * train.accumulate * len(blocks(engine.model))
        lines.append(f"{size(8 * each * (mesh.tp - 1) // mesh.tp)} of activations along tp (4 all-reduces a block)")
    if mesh.cp > 1:
        each = _key_value_bytes(engine, train) * train.accumulate * len(blocks(engine.model))
        lines.append(
            f"{size(2 * each * (mesh.cp - 1) // mesh.cp)} of keys and values along cp (one all-gather and one "
            "reduce-scatter a block)"
        )
    if mesh.pp > 1:
        stages = virtual_stages(mesh.schedule, mesh.virtual)
        rows = train.batch_size // engine.share[1]
        cut = pieces_per_micro(
            rows,
            train.accumulate,
            pp=mesh.pp,
            virtual=stages,
            schedule=mesh.schedule,
            wanted=mesh.microbatches,
        )
        pieces = full_pieces(cut * train.accumulate, pp=mesh.pp, schedule=mesh.schedule)
        idle = bubble(mesh.pp, stages, pieces, mesh.schedule)
        lines.append(
            f"{size(2 * stages * _activation_bytes(engine, train) * train.accumulate)} of activations along pp; "
            f"{pieces} pieces through {mesh.pp} × {stages} stages leave a bubble of {idle:.1%}"
        )
    return lines


def _activation_bytes(engine: Engine, train: Train) -> int:
    """Of the hidden states of one micro-batch of this rank, B·T/cp·D."""
    config: Any = engine.peft.config
    hidden = getattr(config, "hidden_size", None) or config.get_text_config().hidden_size
    rows = train.batch_size // engine.share[1]
    tokens = train.max_length // engine.world.width("cp")
    return rows * tokens * hidden * WIDTHS[train.precision]


def _key_value_bytes(engine: Engine, train: Train) -> int:
    """Of a layer's keys and values of all tokens of one micro-batch of this rank, 2·B·T·H·D/tp."""
    config: Any = engine.peft.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = train.batch_size // engine.share[1]
    each = WIDTHS[train.precision]
    return 2 * rows * train.max_length * heads // engine.world.width("tp") * width * each
