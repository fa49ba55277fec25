"""Memory of a stage by cause, and on a mesh its communication, printed before step 1.

Weights, gradients and optimizer state are counted; activations are measured: autograd's saved tensors are summed in a
forward pass over a sequence of the run's own length, or over two short ones and extended along their line (with dropout
in attention three, and a parabola). The rest comes from `flatshift.finetune.planner.footprint`, without the allocator's
overhead and the libraries. On a mesh the split model is counted, without activations; in a ring collective a rank sends
(n − 1)/n of the data gathered or reduced.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatshift.regularizers.config import RegularizerConfig

from ..adapters.adapter import trainable
from ..adapters.soft_tokens import blank_features
from ..compute.capabilities import preserve_rng_state
from ..compute.dropout import KeyedDropout
from ..compute.numerics import SHORT, attention_kernel, without_input_casts
from ..compute.precision import autocast, infer_precision
from ..config import WIDTHS, Adapter, Mesh, Optimizer, OptimizerKind, Train
from ..errors import UserError
from ..figures import format_bytes
from ..models.anatomy import routed_experts, transformer_blocks
from ..models.quantize import quantization_scales
from ..parallel.engine import Engine
from ..parallel.layout import local_part
from ..parallel.mesh import SHARDS
from ..parallel.pipeline_plan import bubble_fraction, split_step, virtual_stages
from .footprint import mask_bytes, perturbation_bytes, recomputed_bytes, work_bytes
from .sizes import ROUTED, BackboneSizes, attention_dropout

if TYPE_CHECKING:
    from ..tasks import Task

_PROBE = (SHORT + 8, SHORT + 24, SHORT + 40)
"""Probe lengths in tokens: on a CPU, attention takes another path for shorter sequences."""
QUANTISED_BLOCK, QUANTISED_FROM = 256, 4096
"""Values of 8-bit moments that share a scale (bitsandbytes), and of the smallest tensor with such moments."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a stage in bytes, by cause.

    backbone: frozen parameters and buffers, and scales of quantised weights.
    adapter: trained parameters.
    optimizer: two moments of the adapter, stored as `optimizer.kind` does, and float32 masters of a bf16 adapter.
    activations: kept between forward and backward by one micro-batch of maximum length.
    work: temporaries of the loss, or of a block's backward pass, on top of the activations.
    regularizer: noise, momentum, a second adapter or dense gradients.
    """

    backbone: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    work: int = 0
    regularizer: int = 0

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
    optimizer: Optimizer | None = None,
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

    config: Any = model.config
    drops = bool(attention_dropout(config.get_text_config().to_dict()))
    keyed = KeyedDropout({module: name for name, module in model.named_modules()}, seed=0)
    lengths = (train.max_length,) if train.max_length <= _PROBE[1 + drops] else _PROBE[: 2 + drops]

    def saved_bytes(tokens: int) -> int:
        drawn = keyed.forward_pass(0, first_row=0, rows=1, tokens=tokens) if drops else contextlib.nullcontext()
        with _one_row(model, tokens, train) as forward, drawn:
            return count_saved_bytes(model, forward)

    through = np.polyfit(lengths, [saved_bytes(tokens) for tokens in lengths], len(lengths) - 1)
    per_row = float(np.polyval(through, train.max_length))
    masks = 0
    if task is not None and task.pack and device.type == "cpu":
        masks = mask_bytes(len(transformer_blocks(model)), train) * train.batch_size
    return MemoryPlan(
        backbone=sum(frozen.values()),
        adapter=adapter,
        gradients=adapter,
        optimizer=optimizer_state_bytes(trainable(model), optimizer or Optimizer(), train),
        activations=round(max(0, per_row - casts) * train.batch_size) + casts + masks,
        work=_temporary_bytes(model, train, task, adapter, device),
        regularizer=_regularizer_bytes(model, train, regularizer),
    )


def lora_factors(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return A (r, n) and B (m, r) of every LoRA layer over a matrix."""
    factors = []
    for module in model.modules():
        downs, ups = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
        if isinstance(downs, nn.ModuleDict) and isinstance(ups, nn.ModuleDict):
            pairs: list[Any] = [(downs[name], ups[name]) for name in downs if name in ups]
            factors += [(a.weight, b.weight) for a, b in pairs if a.weight.ndim == 2]
    return factors


def _temporary_bytes(model: Any, train: Train, task: Task | None, gradients: int, device: torch.device) -> int:
    """Return the bytes of temporaries by the closed forms; 0 if the configuration lacks the sizes they need."""
    shapes = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    dora = any(getattr(module, "lora_magnitude_vector", None) for module in model.modules())
    adapter = Adapter(rank=max((len(a) for a, _ in lora_factors(model)), default=1), dora=dora)
    try:
        sizes = BackboneSizes.of(model.config.to_dict(), shapes, adapter)
    except UserError:
        return 0
    if task is not None:
        sizes = sizes.under(task, classes=getattr(model.config, "num_labels", None))
    work = work_bytes(sizes, Mesh(), adapter, train, train.batch_size, device.type)
    if train.checkpointing == "full":
        work += recomputed_bytes(sizes, Mesh(), adapter, train, train.batch_size * train.max_length)
    return max(0, work - gradients) if train.accumulate == 1 else work  # gradients grow while activations are freed


def _regularizer_bytes(model: nn.Module, train: Train, regularizer: RegularizerConfig | None) -> int:
    if regularizer is None:
        return 0
    factors = lora_factors(model)
    frozen = next((p for p in model.parameters() if not p.requires_grad), None)
    blocks = max(1, len(transformer_blocks(model)))
    return perturbation_bytes(
        regularizer,
        [(len(b), a.shape[1]) for a, b in factors],
        adapter=sum(a.numel() + b.numel() for a, b in factors),
        shards=1,
        tokens=train.batch_size * train.max_length / (blocks if train.checkpointing == "full" else 1),
        weight_width=4 if frozen is None else frozen.element_size(),
        width=WIDTHS[train.precision],
    )


_TIMED_TOKENS, _PASSES, _ENOUGH_S = 128, 5, 2.0
"""Most tokens of a row that is timed, its most passes, and the seconds after which no other pass begins."""


def token_seconds(model: nn.Module, tokens: int, train: Train) -> float:
    """Time of a forward and backward pass for one token, taken on a row of `tokens` tokens, at most 128: the median of
    some passes, without the first, which is slow, if there is time for more. The global random state and all gradients
    are left as they were."""
    length, adapter = max(1, min(tokens, _TIMED_TOKENS)), list(trainable(model).values())
    seconds: list[float] = []
    with _one_row(model, length, train) as forward:
        while len(seconds) < _PASSES and sum(seconds) < _ENOUGH_S:
            started = time.perf_counter()
            torch.autograd.grad(forward().float().sum(), adapter, allow_unused=True)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:] or seconds) / length


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


def count_saved_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes that autograd keeps while the output of `forward` is alive, the model's own excluded."""
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    alive: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()  # without those of graphs that end within the pass

    def keep(tensor: Tensor) -> _SavedTensor:
        alive.add(entry := _SavedTensor(tensor))
        return entry

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda entry: entry.tensor):
        output = forward()  # keep alive until the sum is taken
        storages = {s.data_ptr(): s.nbytes() for s in (entry.tensor.untyped_storage() for entry in alive)}
        del output
    return sum(size for address, size in storages.items() if address not in weights)


class _SavedTensor:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output saved by its own node would otherwise keep the graph alive in a cycle


def plan_lines(model: nn.Module, *, train: Train, optimizer: Optimizer, plan: MemoryPlan | None = None) -> list[str]:
    """Format the plan as lines, one per cause, for printing before step 1; computed here if `plan` is None."""
    plan = plan or memory_plan(model, train=train, optimizer=optimizer)
    frozen, trained = ([p for p in model.parameters() if p.requires_grad == on] for on in (False, True))
    dtypes, own = ("/".join(sorted({str(p.dtype).removeprefix("torch.") for p in each})) for each in (frozen, trained))
    kind = "AdamW" if optimizer.kind == "adamw" else optimizer.kind
    moments = "one moment of factors" if optimizer.kind == "lora-muon" else "two moments"
    rows = [
        ("backbone, frozen", plan.backbone, f"{sum(p.numel() for p in frozen):,} parameters, {dtypes}"),
        ("adapter", plan.adapter, f"{sum(p.numel() for p in trained):,} parameters, {own}"),
        ("gradients", plan.gradients, "of the adapter only"),
        ("optimizer state", plan.optimizer, f"{kind}, {moments}, lr {optimizer.lr:g}, {optimizer.schedule}"),
        ("activations", plan.activations, f"estimate, {train.batch_size} rows × {train.max_length} tokens"),
        ("work", plan.work, "the loss, or a block's backward pass, besides"),
        *([("regularizer", plan.regularizer, "its noise and state")] if plan.regularizer else []),
        ("together", plan.total, "without libraries and the allocator's slack"),
    ]
    return _format_plan(train, f"{next(model.parameters()).device}, {train.precision}", rows)


def _format_plan(train: Train, device: str, rows: Sequence[tuple[str, int, str]]) -> list[str]:
    """Format rows of cause, bytes and note under the plan's first line."""
    width = max(len(name) for name, _, _ in rows)
    head = f"plan: {train.steps} steps × {train.accumulate} × {train.batch_size} rows on {device}"
    return [head, *(f"  {name.ljust(width)}  {format_bytes(count):>11}  {note}" for name, count, note in rows)]


def condense_plan(lines: Sequence[str]) -> list[str]:
    """Condense the lines of a plan to one: its first line and the sum of its causes."""
    (total,) = [line.split() for line in lines if line.split()[0] == "together"]
    return [f"{lines[0]}; {' '.join(total[1:3])} of memory, {' '.join(total[3:])} (--verbose: by cause)"]


def mesh_plan_lines(engine: Engine, *, mesh: Mesh, train: Train, optimizer: Optimizer) -> list[str]:
    """Format the plan of one stage on a mesh as lines, one per cause."""
    world, sharding = engine.world, engine.sharding
    frozen = sum(local_part(p).nbytes for p in engine.model.parameters() if not p.requires_grad)
    frozen += sum(part.nbytes for part in quantization_scales(engine.model).values())
    adapter = sum(local_part(p).nbytes for p in engine.parameters.values())
    kind = "AdamW" if optimizer.kind == "adamw" else optimizer.kind
    state = optimizer_state_bytes(engine.parameters, optimizer, train)
    rows = [
        ("backbone, frozen", frozen, "on this rank"),
        ("adapter", adapter, "on this rank"),
        ("gradients", adapter, "of the adapter only"),
        ("optimizer state", state, f"{kind}, lr {optimizer.lr:g}, {optimizer.schedule}"),
    ]
    if sharding is not None and sharding.units:
        units = (
            sum(p.numel() * p.itemsize for p in unit.parameters() if isinstance(p, DTensor))
            for unit in transformer_blocks(engine.model)
        )
        largest, note = max(units, default=0), "the largest block and its gather buffer"
        if not mesh.reshards:
            note = "all that is sharded, and a block's gather buffer"
        rows.append(("gathered", largest + (largest if mesh.reshards else sharding.sharded_bytes), note))
    rows.append(("together", sum(count for _, count, _ in rows), "without activations, temporaries and libraries"))
    lines = _format_plan(train, f"{world}, {world.device.type}", rows)
    return [*lines, *(f"  sends per step: {line}" for line in _communication_lines(engine, mesh, train, adapter))]


def _communication_lines(engine: Engine, mesh: Mesh, train: Train, adapter: int) -> list[str]:
    world, sharding = engine.world, engine.sharding
    rows, lines = train.batch_size // engine.share[1], []
    if sharding is not None and sharding.units:
        ranks = world.width(*SHARDS)
        axes = " × ".join(axis for axis in SHARDS if world.width(axis) > 1)
        passes = split_step(mesh, rows, train.accumulate)[1] if mesh.pp == 1 or mesh.reshards else 1
        gathers = (2 if mesh.reshards else 1) * passes
        gathered = gathers * sharding.sharded_bytes * (ranks - 1) // ranks
        # in a ring each rank passes on all shards but its own: once for a reduce-scatter, twice for an all-reduce
        reduced = adapter * (ranks - 1) if mesh.adapters == "shard" else 2 * adapter * (ranks - 1) // ranks
        weights, gradients = format_bytes(gathered), format_bytes(reduced)
        lines.append(f"{weights} of weights gathered along {axes}, {gradients} of adapter gradients reduced")
    if mesh.replicate > 1:
        gradients = format_bytes(2 * adapter * (mesh.replicate - 1) // mesh.replicate)
        lines.append(f"{gradients} of adapter gradients along replicate")
    if mesh.tp * mesh.cp * mesh.pp * mesh.ep == 1:
        return lines
    config: Any = engine.peft.config
    blocks = len(transformer_blocks(engine.model))
    width = WIDTHS[train.precision]
    hidden = getattr(config, "hidden_size", None) or config.get_text_config().hidden_size
    # hidden states of this rank's share of all micro-batches: B·T/cp·D
    states = rows * (train.max_length // world.width("cp")) * hidden * width * train.accumulate
    if mesh.ep > 1:
        text = config.get_text_config()
        chosen = next((getattr(text, name) for name in ROUTED if isinstance(getattr(text, name, None), int)), 1)
        exchanged = 4 * chosen * states * len(routed_experts(engine.model)) * (mesh.ep - 1) // mesh.ep
        lines.append(f"{format_bytes(exchanged)} of tokens to experts and back along ep")
    if mesh.tp > 1:
        sent = format_bytes(8 * states * blocks * (mesh.tp - 1) // mesh.tp)
        lines.append(f"{sent} of activations along tp (4 all-reduces a block)")
    if mesh.cp > 1:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # keys and values of a layer for all tokens: 2·B·T·H·D/tp
        cache = 2 * rows * train.max_length * heads // world.width("tp") * head_width * width * train.accumulate
        sent = format_bytes(2 * cache * blocks * (mesh.cp - 1) // mesh.cp)
        lines.append(f"{sent} of keys and values along cp (one all-gather and one reduce-scatter a block)")
    if mesh.pp > 1:
        stages, pieces = virtual_stages(mesh.schedule, mesh.virtual), split_step(mesh, rows, train.accumulate)[1]
        idle = bubble_fraction(mesh.pp, stages, pieces, mesh.schedule)
        cut = f"{pieces} pieces through {mesh.pp} × {stages} stages leave a bubble of {idle:.1%}"
        lines.append(f"{format_bytes(2 * stages * states)} of activations along pp; {cut}")
    return lines


def optimizer_state_bytes(parameters: Mapping[str, Tensor], optimizer: Optimizer, train: Train) -> int:
    """Return the bytes that the optimizer keeps on this rank for trained tensors; nothing for `optimizer.fixed`."""
    sizes = {name: local_part(p).numel() for name, p in parameters.items() if not optimizer.is_fixed(name)}
    return optimizer_bytes(sizes, optimizer.kind, masters=train.adapter_precision == "bf16")


def optimizer_bytes(sizes: Mapping[str, int], kind: OptimizerKind, *, masters: bool = False) -> int:
    """Return the bytes of the moments of trained tensors, `sizes` values each by name, and of their float32 `masters`;
    paged ones include host memory."""
    if masters:
        return 4 * sum(sizes.values()) + optimizer_bytes(sizes, kind)
    if kind == "gauss-newton":
        return 0
    if kind == "lora-muon":  # one moment of the factors of linear layers
        return sum(4 * n if ".lora_A." in name or ".lora_B." in name else 8 * n for name, n in sizes.items())
    if not kind.endswith("8bit"):
        return 8 * sum(sizes.values())
    return sum(8 * n if n < QUANTISED_FROM else 2 * (n + 4 * -(-n // QUANTISED_BLOCK)) for n in sizes.values())
