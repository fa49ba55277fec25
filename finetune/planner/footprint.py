"""Memory in closed form: of a rank of a mesh, of a regularizer's state, and of an evaluation, also its duration.

Nothing is loaded and torch is not imported; a run counts its memory once its model is loaded
(`flatshift.finetune.planner.memory`). The formulas are those of ZeRO (1910.02054), Megatron-LM (1909.08053) and
Korthikanti et al. (2205.05198), for frozen weights. The peak of an evaluation is one block's activations for a batch of
the longest sequences, or the key-value cache and logits of generated answers; its duration is in optimizer steps, each
of which computes about twice as much as reading its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flatshift.regularizers.config import (
    ASAM,
    GGPO,
    MGPO,
    MSAM,
    SAM,
    BiLora,
    FlatLora,
    LoraSAM,
    Plain,
    RegularizerConfig,
    default_rank,
)

from ..compute.memory import slice_columns, slice_rows
from ..config import WIDTHS, Adapter, Mesh, OptimizerKind, Train
from ..figures import format_bytes
from ..models.families import find_family
from ..parallel.pipeline_plan import BlockCosts, split_blocks, split_step, stages_of, virtual_stages
from .sizes import BackboneSizes

if TYPE_CHECKING:
    from ..tasks import Task

_LOGITS_BYTES = 1 << 30  # upper bound on the bytes of logits in evaluation (`flatshift.finetune.evaluate.perplexity`)
PACKED_BYTES = {"nf4": 0.5 + 4 / 64, "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
"""Bytes per value of a quantised block, scales included."""
_STATE_BYTES = 8  # per adapter parameter: weight and gradient, and the master of a bf16 adapter
_MOMENT_BYTES = {"lora-muon": 4, "adamw-8bit": 2 + 8 / 256, "gauss-newton": 0, "paged-adamw": 0, "paged-adamw-8bit": 0}
"""Bytes of moments per adapter parameter on the device, where not 8 (two in float32); paged ones are in host memory."""
_ROW, _COLUMN = 40, 16
"""Bytes per row of a GGPO layer: its owner and the key of its signs (int64), row norm, averaged gradient and its form,
two shares of power, and scale (float32); per column: the keys of its signs in noise and probe columns (int64)."""
_PASSES = 2  # forward passes over as many tokens that cost as much as a step
_FEWEST = 16  # tokens of a pass below which it takes no less time: reading the weights dominates


@dataclass(frozen=True)
class Footprint:
    """Bytes on the fullest rank, by cause, each with its title on a page."""

    weights: int = field(metadata={"title": "frozen weights"})
    gathered: int = field(metadata={"title": "gathered weights"})
    """Gathered weights of the current unit and the buffer that they are gathered in."""
    adapter: int = field(metadata={"title": "adapter, gradients, optimizer"})
    activations: int = field(metadata={"title": "activations kept for backward"})
    work: int = field(metadata={"title": "loss and backward pass at work"})
    """Temporaries of the loss, or of a block's backward pass, on top of the activations."""
    logits: int = field(metadata={"title": "logits of an evaluation"})
    regularizer: int = field(default=0, metadata={"title": "regularizer's noise and state"})

    @property
    def total(self) -> int:
        """Total bytes; activations and the logits of an evaluation never exist at the same time."""
        state = self.weights + self.gathered + self.adapter + self.regularizer
        return state + max(self.activations + self.work, self.logits)

    def __str__(self) -> str:
        is_training = self.activations + self.work > self.logits
        causes = ["weights", "gathered", "adapter", "regularizer"]
        causes += ["activations", "work"] if is_training else ["logits"]
        return " + ".join(f"{format_bytes(getattr(self, cause))} {cause}" for cause in causes if getattr(self, cause))


def predict_footprint(
    backbone: BackboneSizes,
    *,
    mesh: Mesh,
    adapter: Adapter,
    train: Train,
    rows: int | None = None,
    device: str = "cuda",
    packed: bool = False,
    regularizer: RegularizerConfig | None = None,
    optimizer: OptimizerKind = "adamw",
) -> Footprint:
    """Return the memory of a rank of `mesh`.

    rows: sequences of a micro-batch on one rank; by default its share of `train.batch_size`.
    device: kind of device, which sets how many logits are computed at once.
    packed: True if rows hold several examples, which a CPU separates by a dense mask.
    regularizer: the regularizer whose state is included; None: none.
    optimizer: its kind, which sets the bytes of moments.
    """
    width = WIDTHS[train.precision]
    weight_width = 2 if train.backbone_precision == "bf16" else width
    packed_width = PACKED_BYTES.get(train.quantization or "", weight_width)
    shards = mesh.dp * mesh.cp
    experts = backbone.expert_elements * weight_width  # stacked experts are no linear layers, and stay floats
    block = (max(backbone.blocks) - backbone.expert_elements) * packed_width + experts
    end = max(backbone.ends, default=0) * weight_width
    absent_experts = experts * (1 - 1 / mesh.ep)
    # a head that is the embedding itself is split by tokens, not gathered
    is_split = not (backbone.output or backbone.whole_rows or mesh.offload) and mesh.tp * mesh.pp == 1
    unit = int(max(block - absent_experts, 0 if is_split else end)) // mesh.tp
    layers, ends = _fullest_rank(backbone, mesh, train)
    outer = sum(backbone.ends) * weight_width if mesh.pp == 1 else ends * end
    stage = int(layers * block + outer) // mesh.tp
    gathered = 0
    if shards > 1 and mesh.zero == 3:
        stage_share = stage - int(layers * absent_experts) // mesh.tp
        gathered = 2 * unit if mesh.reshards else stage_share + unit
    adapter_shards = shards if mesh.adapters == "shard" else 1
    rows = rows or math.ceil(train.batch_size / (mesh.replicate * mesh.dp))
    tokens = rows * train.max_length
    sequences = _sequences_in_flight(mesh, train, rows)
    activations = int(_activation_bytes(backbone, mesh, adapter, train) * sequences)
    block_experts = 0
    if adapter.experts is not None:  # PEFT adds BA to the experts of a block, which are kept so for backward
        block_experts = backbone.expert_elements * weight_width // (mesh.tp * mesh.ep)
        activations += block_experts * (1 if train.checkpointing == "full" else layers)
    if packed and device == "cpu":
        activations += int(mask_bytes(layers, train) * sequences)
    state = int((_STATE_BYTES + _MOMENT_BYTES.get(optimizer, 8)) * backbone.adapter) // (mesh.pp * adapter_shards)
    weights = stage // (shards if mesh.zero == 3 else 1)
    if mesh.offload:  # shards are in host memory, but for those of the blocks that are gathered
        weights, state = 2 * unit // shards, state if mesh.adapters == "replicate" else 0
    # the gradient of the largest of their two maps, from which those of A and B are computed
    work = max(work_bytes(backbone, mesh, adapter, train, rows, device), block_experts * 2 // 3)
    if mesh.pp == 1 and train.accumulate == 1:  # gradients grow while activations are freed
        work = max(0, work - 4 * backbone.adapter // adapter_shards)
    regularizer = regularizer or Plain()
    noise = perturbation_bytes(
        regularizer,
        backbone.layers,
        adapter=backbone.adapter,
        shards=adapter_shards,
        tokens=tokens / mesh.cp / (layers if train.checkpointing == "full" else 1),
        weight_width=weight_width,
        width=width,
    )
    casts = _cast_bytes(backbone, mesh, train)
    is_fused = isinstance(regularizer, GGPO | FlatLora)
    is_fused |= isinstance(regularizer, MGPO) and regularizer.form == "code"
    if is_fused and not (adapter.dora or adapter.dropout):  # one product computes noise and adapter, without copies
        casts = 0
    if isinstance(regularizer, BiLora) and train.precision != "fp32":
        casts += 2 * regularizer.rank * sum(map(sum, backbone.layers)) // (mesh.tp * mesh.pp)
    return Footprint(
        weights=weights,
        gathered=gathered,
        adapter=state,
        activations=activations + casts,
        work=work,
        logits=min(_LOGITS_BYTES, 4 * (rows if backbone.whole_rows else tokens) * backbone.outputs),
        regularizer=noise // (mesh.tp * mesh.pp),
    )


def recipe_footprint(backbone: BackboneSizes, recipe: Any, train: Train, *, device: str) -> Footprint:
    """Return the memory of a rank of a recipe (or `RuleSettings`) with `train` in place of its own."""
    return predict_footprint(
        backbone, mesh=recipe.mesh, adapter=recipe.adapter, train=recipe.task.traits.count_token_rows(train),
        device=device, packed=recipe.task.pack, regularizer=recipe.regularizer, optimizer=recipe.optimizer.kind,
    )  # fmt: skip


def _fullest_rank(backbone: BackboneSizes, mesh: Mesh, train: Train) -> tuple[int, int]:
    """Return the number of blocks, and of embedding and head, of the pipeline rank with most elements.

    The head of a large vocabulary costs as much time as several blocks, which the last stage then lacks.
    """
    if mesh.pp == 1:
        return len(backbone.blocks), 2
    virtual = virtual_stages(mesh.schedule, mesh.virtual)
    count, block, end = mesh.pp * virtual, max(backbone.blocks), max(backbone.ends, default=0)
    if count > len(backbone.blocks):  # no pipeline, which `mesh` is refused for elsewhere
        return math.ceil(len(backbone.blocks) / mesh.pp), 1
    attention = 6.0 * train.max_length * backbone.hidden
    costs = BlockCosts(
        blocks=tuple(4.0 * elements + attention for elements in backbone.blocks),
        last=4.0 * backbone.outputs * backbone.hidden,
    )
    runs = split_blocks(costs, count)
    ranks = []
    for rank in range(mesh.pp):
        stages = stages_of(rank, pp=mesh.pp, virtual=virtual, schedule=mesh.schedule)
        ranks.append((sum(len(runs[stage]) for stage in stages), sum(stage in (0, count - 1) for stage in stages)))
    return max(ranks, key=lambda held: held[0] * block + held[1] * end)


def mask_bytes(layers: int, train: Train) -> int:
    """Return the bytes of the dense masks of one packed row on a CPU: the token-by-token mask, and for each of `layers`
    layers the bias added to its scores (`flatshift.finetune.compute.attention`). With recomputed attention only one
    layer's exists at a time."""
    masks = layers if train.checkpointing == "none" else 1
    return train.max_length**2 * (1 + masks * WIDTHS[train.precision])


def _activation_bytes(backbone: BackboneSizes, mesh: Mesh, adapter: Adapter, train: Train) -> float:
    """Return the bytes that the blocks of one rank keep for the backward pass of one sequence."""
    block = _block_bytes(backbone, mesh, adapter, train)
    layers, _ = _fullest_rank(backbone, mesh, train)
    block_input = WIDTHS[train.precision] / (mesh.tp if mesh.sequence_parallel else 1)
    stored = block_input * layers + block if train.checkpointing == "full" else block * layers
    # blocks that are computed again need the mask that all layers share, a byte for a token and each of the others
    mask = train.max_length**2 / mesh.cp if mesh.cp > 1 and train.checkpointing != "none" else 0
    return stored * train.max_length * backbone.hidden / mesh.cp + mask


def _block_bytes(backbone: BackboneSizes, mesh: Mesh, adapter: Adapter, train: Train) -> float:
    """Return the bytes that a block keeps for backward, in units of T/cp·D.

    Inputs of two norms in float32; query, key, value (per group, which a kernel without a mask does not repeat) and the
    attention's output, and inputs of their norms in float32; what the feed-forward's activation needs and its output;
    inputs of the adapters and outputs of their A; sums of softmax and norms (tests/finetune/planner/
    test_footprint_trace.py). Along cp attention is two products, each with its outputs, mask and keys and values up to
    the last that a query meets: (2·cp + 1)/2·cp of T, or T at once if no head is repeated for its group. With dropout,
    attention keeps its weights for each pair of tokens, in float32 and dropped, and which were kept.
    """
    hidden, heads, attends = backbone.hidden, backbone.heads, train.checkpointing != "selective"
    width = WIDTHS[train.precision]
    groups = heads if backbone.groups % mesh.tp else backbone.groups  # if they do not divide, each query has its own
    unsplit = 8.0 + 2 * width + (8 + width * (backbone.ranks[0] * attends + backbone.ranks[1])) / hidden
    feed_forward = backbone.wide * backbone.feed_forward / hidden * width
    attention = 0.0
    if attends:
        own, shared = (2 * heads, groups) if mesh.cp == 1 else (3 * heads, heads * (mesh.cp + (groups < heads) / 2))
        attention = (width * (own + 2 * shared) * backbone.head + 4 * heads) / hidden
        keys = train.max_length * (1 if mesh.cp == 1 else (2 * mesh.cp + 1) / (4 * mesh.cp))  # that a query meets
        if mesh.cp > 1:
            unsplit += width * keys / hidden
        rate = backbone.dropout if train.backbone_dropout is None else train.backbone_dropout
        if backbone.dropout is not None and rate:
            attention += heads * keys * (4 + width + 1) / hidden
        attention += 4 * (heads + groups) * (backbone.head + 1) / hidden if backbone.normed else 0
    split = feed_forward + attention
    if mesh.tp > 1 and (plan := find_family(backbone.kind).tensor) is not None:
        whole = sum(attention if region.heads else feed_forward for region in plan.regions if region.gathered)
        unsplit, split = unsplit + whole, split - whole
    unsplit += 2 * width * backbone.routed  # tokens as dispatched to experts, and the experts' outputs
    if adapter.dropout > 0:
        unsplit += (width + 1) * backbone.inputs / backbone.hidden
    if adapter.dora:  # the magnitudes' gradient takes the outputs of the layer and of its B
        unsplit += 2 * width * (backbone.adapted_widths[0] * attends + backbone.adapted_widths[1]) / hidden
    return (unsplit + split) / mesh.tp if mesh.sequence_parallel else unsplit + split / mesh.tp


def work_bytes(backbone: BackboneSizes, mesh: Mesh, adapter: Adapter, train: Train, rows: int, device: str) -> int:
    """Return the bytes at the worst of three moments, beyond the activations kept by then.

    The loss: a slice of logits, and a tile of it in float32 if it has fewer bits; states of target tokens, their
    gradient and the last norm's output (a head over whole sequences reads one state of each, and has few logits). The
    last norm's backward pass: its sums in float32 and three gradients of states. A block's backward pass: two
    feed-forward-wide gradients, or those of its norms. If blocks are recomputed, one is kept only by the last of these
    moments.
    """
    width = WIDTHS[train.precision]
    piece, _ = split_step(mesh, rows, train.accumulate)
    tokens = piece * train.max_length // mesh.cp
    states = tokens * backbone.hidden
    cut = -(-backbone.outputs // mesh.tp)
    read = piece if backbone.whole_rows else backbone.supervised * tokens
    tile = 4 * slice_columns(cut, device) if width < 4 else 0
    logits = min(slice_rows(cut, device, width), read) * (cut * width + tile)
    loss = int(width * (states + 2 * read * backbone.hidden) + logits)
    norm = (20 if width < 4 else 16) * states
    block = max(2 * width * tokens * backbone.feed_forward // mesh.tp, 12 * states)
    if adapter.dora:
        block = max(block, _dora_bytes(backbone, train, tokens))
    elif train.quantization in ("nf4", "nf4-double"):  # a layer's weights are unpacked while it computes
        block += width * max((math.prod(shape) for shape in backbone.layers), default=0) // mesh.tp
    if train.checkpointing != "full":
        return max(loss, norm, block)
    recomputed = recomputed_bytes(backbone, mesh, adapter, train, tokens)
    return max(loss - recomputed, norm - recomputed, block)


def _dora_bytes(backbone: BackboneSizes, train: Train, tokens: int) -> int:
    """Return the bytes of temporaries of PEFT's DoRA in its largest layer (m, n): an identity (n, n), from which it
    computes BA, with BA and two sums of W0 and BA, or with BA and four outputs in float32."""
    width = WIDTHS[train.precision]
    is_quantized = train.quantization is not None

    def layer(rows: int, columns: int) -> int:
        sums = (2 + is_quantized) * width * rows * columns
        return width * (columns + rows) * columns + max(sums, 16 * tokens * rows, 4 * columns**2)

    return max((layer(*shape) for shape in set(backbone.layers)), default=0)


def recomputed_bytes(backbone: BackboneSizes, mesh: Mesh, adapter: Adapter, train: Train, tokens: int) -> int:
    """Return the bytes of the one block that `train.checkpointing: full` recomputes, over `tokens` tokens."""
    return int(_block_bytes(backbone, mesh, adapter, train) * tokens * backbone.hidden)


def _cast_bytes(backbone: BackboneSizes, mesh: Mesh, train: Train) -> int:
    """Return the bytes of autocast's lower-precision copies of float32 adapters, whatever the batch size."""
    if train.precision == "fp32" or train.adapter_precision == "bf16":
        return 0
    attention, other = backbone.trained
    layers = 1 if train.checkpointing == "full" else _fullest_rank(backbone, mesh, train)[0]
    return 2 * layers * (other + (attention if train.checkpointing != "selective" else 0))


def _sequences_in_flight(mesh: Mesh, train: Train, rows: int) -> float:
    """Return the number of sequences whose activations a rank keeps at once."""
    if mesh.pp == 1:
        return rows
    if mesh.schedule == "gpipe":
        return rows * train.accumulate
    loops = 1 if mesh.schedule == "1f1b" else 1 + (mesh.pp - 1) / (mesh.pp * (mesh.virtual or 2))
    return min(rows * train.accumulate, loops * split_step(mesh, rows, train.accumulate)[0] * mesh.pp)


def perturbation_bytes(
    config: RegularizerConfig,
    layers: Sequence[tuple[int, int]],
    *,
    adapter: int,
    shards: int,
    tokens: float,
    weight_width: int,
    width: int,
) -> int:
    """Return the bytes that a regularizer holds on top of plain LoRA during a step, for a whole model's layers; divide
    by the ranks that split it into stages or tensors.

    layers: (rows, columns) of each adapted matrix.
    adapter: elements of LoRA's factors.
    shards: ranks that the factors are sharded over; momentum is sharded likewise, noise is whole on every rank.
    tokens: tokens whose activations are kept for backward at once, in all of the layers.
    weight_width: bytes per frozen weight, whose dtype the noise has.
    width: bytes per activation.

    Momentum methods and SAM over factors hold a momentum or gradient and the unperturbed factors (float32); MGPO's form
    `code` the momentum and both sides of its rank-2r branch; Bi-LoRA a second adapter with moments and outputs of its
    A; SAM over weights their dense gradient; GGPO and Flat-LoRA noise, probe columns and statistics of each row.
    """
    rows, columns = (sum(each) for each in zip(*layers, strict=True)) if layers else (0, 0)
    if isinstance(config, MGPO) and config.form == "code":
        return 4 * adapter // shards + 8 * adapter
    if isinstance(config, MGPO | MSAM | LoraSAM | ASAM):
        return 8 * adapter // shards
    if isinstance(config, BiLora):
        return 12 * config.rank * (rows + columns) + int(width * tokens * config.rank * len(layers))
    if isinstance(config, SAM):
        return 4 * sum(m * n for m, n in layers)
    if isinstance(config, GGPO | FlatLora):
        probes = config.probes if isinstance(config, GGPO) and config.beta > 0 else 0
        noise = weight_width * sum((config.rank or default_rank(m, n)) * (m + n) for m, n in layers)
        sketch = probes * (weight_width * columns + 4 * rows) + int(width * tokens * probes * len(layers))
        return noise + _ROW * rows + _COLUMN * columns + sketch
    return 0


def step_passes(task: Task, regularizer: RegularizerConfig) -> tuple[int, int]:
    """Return a step's forward and backward passes, and its forward passes for a reference, which kto also asks, with
    and without the adapter, about answers to other prompts."""
    references = (3 if task.is_unpaired else 1) if task.has_reference else 0
    return 1 + isinstance(regularizer, SAM | ASAM | LoraSAM), references


@dataclass(frozen=True)
class EvaluationPlan:
    """Cost of evaluating all splits together.

    read: tokens processed in parallel with others of their sequence.
    written: tokens generated one after the other, at most.
    memory: bytes on top of weights and adapter.
    passes: computation, in tokens read.
    step: computation of an optimizer step, in its tokens read.
    """

    read: int
    written: int
    memory: int
    passes: float
    step: int = _PASSES

    def updates(self, tokens: float) -> float:
        """Return the number of optimizer steps of `tokens` tokens that take as long."""
        return self.passes / (self.step * max(tokens, 1))

    def line(self, rows: str, *, tokens: float, seconds: float | None) -> str:
        """Format in one line. rows: description such as `dev 12, test 16`; tokens, seconds: of one optimizer step."""
        count = self.updates(tokens)
        steps = f"{count:,.0f} steps" if count >= 1.5 else "a step" if count >= 0.5 else "a part of a step"
        duration = "" if seconds is None else f" ({seconds * count:.3g} s)"
        written = f" and at most {self.written:,} written" if self.written else ""
        return (
            f"evaluation: rows of {rows}: {self.read:,} tokens are read{written}, about as long as {steps}{duration}; "
            f"{format_bytes(self.memory)} of memory next to the weights"
        )


def plan_evaluation(
    sizes: BackboneSizes,
    task: Task,
    train: Train,
    *,
    batch_size: int,
    rows: int,
    tokens: int,
    longest: int,
    classes: int = 0,
    device: str = "cuda",
    regularizer: RegularizerConfig | None = None,
) -> EvaluationPlan:
    """Estimate the evaluation of `rows` examples with `tokens` tokens in total, the longest with `longest`;
    `batch_size` examples at once on this rank.

    classes: completions ranked per example.
    """
    width, batch = WIDTHS[train.precision], min(batch_size, max(rows, 1))
    token_cache = 2 * width * len(sizes.blocks) * sizes.groups * sizes.head  # keys and values
    writes = task.score == "generate"
    beams = (task.num_beams or 1) if writes else 1
    new = task.max_new_tokens if writes else 0
    block = width * (3 * sizes.hidden + 3 * sizes.feed_forward + 2 * (sizes.heads + sizes.groups) * sizes.head)
    block_bytes = batch * longest * (block + 8 * sizes.hidden) + width * batch * longest**2
    logit_rows = batch if sizes.whole_rows else min(batch * longest, slice_rows(sizes.outputs, device, width))
    reading = block_bytes + logit_rows * sizes.outputs * (4 + width)
    caching = 0
    if writes:
        caching = batch * beams * ((longest + new) * token_cache + sizes.outputs * (8 + width)) + block_bytes
    elif classes:
        caching = batch * classes * (longest * token_cache + sizes.outputs * (4 + width)) + block_bytes
    read = tokens * (1 + (writes or bool(classes)) + task.has_reference)
    steps = -(-rows // batch) * new
    repeats, references = step_passes(task, regularizer or Plain())
    return EvaluationPlan(
        read=read,
        written=rows * new,
        memory=max(reading, caching),
        passes=read + steps * max(batch * beams, _FEWEST) + rows * classes,
        step=_PASSES * repeats + references,
    )
