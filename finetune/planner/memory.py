"""Memory of a stage by cause, and on a mesh its communication, printed before step 1.

Weights, gradients and optimizer state are counted; activations are measured: a short sequence is run forward in
training mode while autograd's saved tensors are summed, at the run's own length if that is short, else at two lengths,
and the line through them is evaluated at the run's sequence length and batch size. Temporaries of the loss and the
backward pass, dense masks of packed rows and a regularizer's state come from the closed forms of
`flatshift.finetune.planner.footprint`. Not included: the allocator's overhead and the libraries. On a mesh everything
is counted on the split model, without activations; communication volumes are those of ring collectives: a rank sends (n
− 1)/n of the data gathered or reduced.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import RegularizerConfig

from ..adapters.adapter import trainable
from ..adapters.projector import blank_features
from ..compute.capabilities import preserve_rng_state
from ..compute.matmul_rate import time_interleaved
from ..compute.numerics import SHORT, attention_kernel, without_input_casts
from ..compute.precision import autocast, infer_precision
from ..config import WIDTHS, Adapter, Mesh, Optimizer, OptimizerKind, Train
from ..errors import UserError
from ..figures import format_bytes
from ..models.anatomy import transformer_blocks
from ..models.quantize import quantization_scales
from ..parallel.engine import Engine
from ..parallel.layout import local_part
from ..parallel.pipeline.pipeline_plan import bubble_fraction, pieces_per_micro, round_up_pieces, virtual_stages
from .footprint import BackboneSizes, mask_bytes, recomputed_bytes, work_bytes
from .perturbation import perturbation_bytes

if TYPE_CHECKING:
    from ..tasks import Task

_PROBE = (SHORT + 8, SHORT + 24)
"""Probe lengths in tokens: on a CPU, attention takes another path for shorter sequences."""
_NAMES = {"adamw": "AdamW"}

QUANTISED_BLOCK, QUANTISED_FROM = 256, 4096
"""Block size of 8-bit moments (bitsandbytes): values that share a scale; and the smallest tensor whose moments are
quantised, in values."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a stage in bytes, by cause."""

    backbone: int
    """Frozen parameters and buffers, and scales of quantised weights."""
    adapter: int
    """Trained parameters, float32."""
    gradients: int
    """Gradients, as large as the adapter."""
    optimizer: int
    """Two moments of the adapter, stored as `optimizer.kind` does."""
    activations: int
    """Kept between forward and backward by one micro-batch of maximum length."""
    work: int = 0
    """Temporaries of the loss, or of a block's backward pass, on top of the activations."""
    regularizer: int = 0
    """State of the regularizer: noise, momentum, a second adapter or dense gradients."""

    @property
    def total(self) -> int:
        """Sum of all causes."""
        return sum(self.causes.values())

    @property
    def causes(self) -> dict[str, int]:
        """Bytes by name of the cause."""
        return dict(vars(self))


def memory_plan(
    model: nn.Module,
    *,
    train: Train,
    kind: OptimizerKind = "adamw",
    task: Task | None = None,
    regularizer: RegularizerConfig | None = None,
) -> MemoryPlan:
    """Count and measure memory (see the module's docstring); the model's mode and the global random state are restored.

    task: sets which tokens the loss reads, and if rows are packed; None: one example per row, every token a target.
    """
    train = infer_precision(train, model)
    lora, device = lora_factors(model), next(model.parameters()).device
    narrow = train.precision != "fp32" and train.adapter_precision != "bf16" and train.checkpointing == "none"
    casts = 2 * sum(a.numel() + b.numel() for a, b in lora) if narrow else 0  # once, whatever the batch size
    adapter = sum(p.nbytes for p in trainable(model).values())
    frozen = {p.data_ptr(): p.nbytes for p in model.parameters() if not p.requires_grad}
    frozen |= {b.data_ptr(): b.nbytes for b in (*model.buffers(), *quantization_scales(model).values())}
    per_row = extrapolate_to_length(lambda tokens: _sequence_saved_bytes(model, tokens, train), train.max_length)
    return MemoryPlan(
        backbone=sum(frozen.values()),
        adapter=adapter,
        gradients=adapter,
        optimizer=optimizer_bytes([p.numel() for p in trainable(model).values()], kind),
        activations=round(max(0, per_row - casts) * train.batch_size)
        + casts
        + _packed_mask_bytes(model, train, task, device),
        work=_temporary_bytes(model, train, task, adapter, device),
        regularizer=_regularizer_bytes(model, train, regularizer),
    )


def lora_factors(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return A (r, n) and B (m, r) of every LoRA layer over a matrix."""
    found = []
    for module in model.modules():
        downs, ups = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
        if isinstance(downs, nn.ModuleDict) and isinstance(ups, nn.ModuleDict):
            pairs: list[Any] = [(downs[name], ups[name]) for name in downs if name in ups]
            found += [(a.weight, b.weight) for a, b in pairs if a.weight.ndim == 2]
    return found


def _packed_mask_bytes(model: nn.Module, train: Train, task: Task | None, device: torch.device) -> int:
    packed = task is not None and task.pack and device.type == "cpu"
    return mask_bytes(len(transformer_blocks(model)), train) * train.batch_size if packed else 0


def _temporary_bytes(model: Any, train: Train, task: Task | None, gradients: int, device: torch.device) -> int:
    """Return the bytes of temporaries by the closed forms; 0 if the configuration lacks the sizes they need."""
    factors = lora_factors(model)
    ranks = max((len(a) for a, _ in factors), default=0)
    shapes = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    adapter = Adapter(rank=max(ranks, 1))
    try:
        sizes = BackboneSizes.of(model.config.to_dict(), shapes, adapter)
    except UserError:
        return 0
    if task is not None:
        sizes = sizes.under(task, classes=getattr(model.config, "num_labels", None))
    found = work_bytes(sizes, Mesh(), adapter, train, train.batch_size, device.type)
    if train.checkpointing == "full":
        found += recomputed_bytes(sizes, Mesh(), adapter, train, train.batch_size * train.max_length)
    return max(0, found - gradients) if train.accumulate == 1 else found  # gradients grow while activations are freed


def _regularizer_bytes(model: nn.Module, train: Train, regularizer: RegularizerConfig | None) -> int:
    if regularizer is None:
        return 0
    factors = lora_factors(model)
    frozen = next((p for p in model.parameters() if not p.requires_grad), None)
    at_once = 1 / max(1, len(transformer_blocks(model))) if train.checkpointing == "full" else 1.0
    return perturbation_bytes(
        regularizer,
        [(len(b), a.shape[1]) for a, b in factors],
        adapter=sum(a.numel() + b.numel() for a, b in factors),
        held=1,
        tokens=train.batch_size * train.max_length * at_once,
        stored=4 if frozen is None else frozen.element_size(),
        width=WIDTHS[train.precision],
    )


def _sequence_saved_bytes(model: Any, tokens: int, train: Train) -> int:
    """Bytes of the storages that autograd keeps for one row of `tokens` tokens, parameters apart."""
    with _one_row(model, tokens, train) as forward:
        return count_saved_bytes(model, forward)


_TIMED_TOKENS, _QUICK = 128, 0.5
"""Tokens of a row that is timed, at most; seconds below which it is timed again, as first passes are slow."""


def token_seconds(model: nn.Module, tokens: int, train: Train) -> float:
    """Time of a forward and backward pass for one token, taken on a row of `tokens` tokens, at most 128; the global
    random state and all gradients are left as they were."""
    length, adapter = max(1, min(tokens, _TIMED_TOKENS)), list(trainable(model).values())
    with _one_row(model, length, train) as forward:

        def update() -> None:
            torch.autograd.grad(forward().float().sum(), adapter, allow_unused=True)

        started = time.perf_counter()
        update()
        taken = time.perf_counter() - started
        if taken < _QUICK:
            (taken,) = time_interleaved([update], turns=2)
    return taken / length


@contextlib.contextmanager
def _one_row(model: Any, tokens: int, train: Train) -> Iterator[Callable[[], Tensor]]:
    """Gives a training pass over one row of `tokens` tokens, up to its logits."""
    device = next(model.parameters()).device
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(model.config, "is_encoder_decoder", False):
        if model.can_generate():
            inputs["decoder_input_ids"] = ids
        else:  # a head reads the state of the end-of-sequence token, and its decoder gets the encoder's input
            ids[:, -1] = model.config.eos_token_id
    inputs |= blank_features(model, rows=1)
    training = model.training
    model.train()
    try:
        with (
            preserve_rng_state([device]),
            autocast(train, device),
            without_input_casts(model, train),
            attention_kernel(inputs),
        ):
            yield lambda: model(**inputs).logits
    finally:
        model.train(training)


def extrapolate_to_length(saved: Callable[[int], int], tokens: int) -> float:
    """Return `saved(tokens)`: measured if the length is short, else extrapolated from two short lengths, as bytes grow
    linearly."""
    if tokens <= _PROBE[1]:
        return saved(tokens)
    short, long = (saved(length) for length in _PROBE)
    return short + max(long - short, 0) / (_PROBE[1] - _PROBE[0]) * (tokens - _PROBE[0])


def count_saved_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes of the storages that autograd keeps while the output of `forward` is alive, the model's own
    excluded."""
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output saved by its own node would otherwise keep the graph alive in a cycle

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = forward()  # keep alive until the sum is taken: freed storages would have their addresses reused
        total = sum(storages.values())
        del output
    return total


def plan_lines(model: nn.Module, *, train: Train, optimizer: Optimizer, plan: MemoryPlan | None = None) -> list[str]:
    """Format the plan as lines, one per cause, for printing before step 1. plan: computed before; None: computed
    here."""
    plan = plan or memory_plan(model, train=train, kind=optimizer.kind)
    causes = [
        ("backbone, frozen", plan.backbone, f"{_describe_frozen(model)}"),
        ("adapter", plan.adapter, f"{sum(p.numel() for p in trainable(model).values()):,} parameters, float32"),
        ("gradients", plan.gradients, "of the adapter only"),
        (
            "optimizer state",
            plan.optimizer,
            f"{_NAMES.get(optimizer.kind, optimizer.kind)}, two moments, lr {optimizer.lr:g}, {optimizer.schedule}",
        ),
        ("activations", plan.activations, f"estimate, {train.batch_size} rows × {train.max_length} tokens"),
        ("work", plan.work, "the loss, or a block's backward pass, besides"),
        *([("regularizer", plan.regularizer, "its noise and state")] if plan.regularizer else []),
        ("together", plan.total, "without libraries and the allocator's slack"),
    ]
    width = max(len(name) for name, _, _ in causes)
    device = next(model.parameters()).device
    head = f"plan: {train.steps} steps × {train.accumulate} × {train.batch_size} rows on {device}, {train.precision}"
    return [head, *(f"  {name.ljust(width)}  {format_bytes(value):>11}  {note}" for name, value, note in causes)]


def condense_plan(lines: Sequence[str]) -> list[str]:
    """Condense the lines of a plan to one: its first line and the sum of its causes."""
    (total,) = [line.split() for line in lines if line.split()[0] == "together"]
    return [f"{lines[0]}; {' '.join(total[1:3])} of memory, {' '.join(total[3:])} (--verbose: by cause)"]


def _describe_frozen(model: nn.Module) -> str:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in frozen})
    return f"{sum(p.numel() for p in frozen):,} parameters, {'/'.join(kinds)}"


def mesh_plan_lines(engine: Engine, *, mesh: Mesh, train: Train, optimizer: Optimizer) -> list[str]:
    """Format the plan of one stage on a mesh as lines, one per cause."""
    world, sharding = engine.world, engine.sharding
    frozen = sum(local_part(p).nbytes for p in engine.model.parameters() if not p.requires_grad)
    frozen += sum(part.nbytes for part in quantization_scales(engine.model).values())
    adapter = sum(local_part(p).nbytes for p in engine.parameters.values())
    masters = 2 * adapter if train.adapter_precision == "bf16" else 0
    moments = 2 * (2 * adapter if train.adapter_precision == "bf16" else adapter)
    rows = [
        ("backbone, frozen", frozen, "on this rank"),
        ("adapter", adapter, "on this rank"),
        ("gradients", adapter, "of the adapter only"),
        ("optimizer state", moments + masters, f"AdamW, lr {optimizer.lr:g}, {optimizer.schedule}"),
    ]
    if sharding is not None and sharding.units:
        units = [sum(p.numel() * p.itemsize for p in unit.parameters()) for unit in transformer_blocks(engine.model)]
        rows.append(("gathered", 2 * max(units, default=0), "the largest block and its gather buffer"))
    rows.append(("together", sum(count for _, count, _ in rows), "without activations, temporaries and libraries"))
    head = f"plan: {train.steps} steps × {train.accumulate} × {train.batch_size} rows on {world}, {world.device.type}"
    width = max(len(name) for name, _, _ in rows)
    lines = [head, *(f"  {name.ljust(width)}  {format_bytes(count):>11}  {note}" for name, count, note in rows)]
    return [*lines, *(f"  sends per step: {line}" for line in _communication_lines(engine, mesh, train, adapter))]


def _communication_lines(engine: Engine, mesh: Mesh, train: Train, adapter: int) -> list[str]:
    world, sharding = engine.world, engine.sharding
    lines = []
    if sharding is not None and sharding.units:
        n = world.width("dp", "cp")
        axes = " × ".join(axis for axis in ("dp", "cp") if world.width(axis) > 1)
        gathers = 2 if mesh.reshard and mesh.pp == 1 else 1
        gathered = gathers * train.accumulate * sharding.sharded_bytes * (n - 1) // n
        # in a ring each rank passes on all shards but its own: once for a reduce-scatter, twice for an all-reduce
        reduced = adapter * (n - 1) if mesh.adapters == "shard" else 2 * adapter * (n - 1) // n
        lines.append(
            f"{format_bytes(gathered)} of weights gathered along {axes}, {format_bytes(reduced)} of adapter "
            "gradients reduced"
        )
    if mesh.replicate > 1:
        lines.append(
            f"{format_bytes(2 * adapter * (mesh.replicate - 1) // mesh.replicate)} of adapter gradients along replicate"
        )
    if mesh.tp > 1:
        each = _activation_bytes(engine, train) * train.accumulate * len(transformer_blocks(engine.model))
        lines.append(
            f"{format_bytes(8 * each * (mesh.tp - 1) // mesh.tp)} of activations along tp (4 all-reduces a block)"
        )
    if mesh.cp > 1:
        each = _key_value_bytes(engine, train) * train.accumulate * len(transformer_blocks(engine.model))
        lines.append(
            f"{format_bytes(2 * each * (mesh.cp - 1) // mesh.cp)} of keys and values along cp (one all-gather and one "
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
            requested=mesh.microbatches,
        )
        pieces = round_up_pieces(cut * train.accumulate, pp=mesh.pp, schedule=mesh.schedule)
        idle = bubble_fraction(mesh.pp, stages, pieces, mesh.schedule)
        lines.append(
            f"{format_bytes(2 * stages * _activation_bytes(engine, train) * train.accumulate)} of activations "
            "along pp; "
            f"{pieces} pieces through {mesh.pp} × {stages} stages leave a bubble of {idle:.1%}"
        )
    return lines


def _activation_bytes(engine: Engine, train: Train) -> int:
    """Return the bytes of the hidden states of one micro-batch of this rank, B·T/cp·D."""
    config: Any = engine.peft.config
    hidden = getattr(config, "hidden_size", None) or config.get_text_config().hidden_size
    rows = train.batch_size // engine.share[1]
    tokens = train.max_length // engine.world.width("cp")
    return rows * tokens * hidden * WIDTHS[train.precision]


def _key_value_bytes(engine: Engine, train: Train) -> int:
    """Return the bytes of one layer's keys and values for all tokens of one micro-batch of this rank, 2·B·T·H·D/tp."""
    config: Any = engine.peft.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = train.batch_size // engine.share[1]
    each = WIDTHS[train.precision]
    return 2 * rows * train.max_length * heads // engine.world.width("tp") * width * each


def optimizer_bytes(sizes: Sequence[int], kind: OptimizerKind) -> int:
    """Return the bytes of the moments of trained tensors with `sizes` values each; paged ones include host memory."""
    if kind == "gauss-newton":
        return 0
    if not kind.endswith("8bit"):
        return 8 * sum(sizes)
    return sum(8 * n if n < QUANTISED_FROM else 2 * (n + 4 * -(-n // QUANTISED_BLOCK)) for n in sizes)
