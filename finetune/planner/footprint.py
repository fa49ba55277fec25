"""Memory of a rank of a mesh in closed form, from config.json and the headers of the weight files.

Nothing is loaded and torch is not imported. The actual memory of a run is counted once its model is loaded
(`flatshift.finetune.planner.memory`); this estimate serves to choose the mesh. The formulas are those of ZeRO
(1910.02054), Megatron-LM (1909.08053) and Korthikanti et al. (2205.05198), for frozen weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.regularizers.config import GGPO, MGPO, BiLora, FlatLora, Plain, RegularizerConfig

from ..atomic import read_json_object
from ..compute.memory import slice_rows
from ..config import WIDTHS, Adapter, Mesh, Train, match_pattern
from ..errors import UserError
from ..figures import format_bytes
from ..models.families import BOUNDED, usable_positions
from .perturbation import perturbation_bytes

if TYPE_CHECKING:
    from ..tasks import Task

_BLOCK = re.compile(r"^(?:(?P<stack>.*?)\.)?(?P<number>\d+)\.")
_NO_LAYER = re.compile(r"(norm|embed|bias|wte|wpe)[^.]*(\.weight)?$|\.bias$", re.IGNORECASE)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ROUTED = ("num_experts_per_tok", "moe_k", "top_k")
_EXPERT = re.compile(r"\.experts\.(?!.*router)")
_ROUTER = re.compile(r"\.(gate|router)(\.[^.]+)?$")
_OUTPUT = re.compile(r"^(lm_head|embed_out|output_projection|cls)\b")
"""Tensors outside the blocks that compute logits of words; a model with its own head does not load them."""
_WIDE = {"gelu_new": 5, "gelu": 2, "relu": 2}
"""Number of feed-forward-wide tensors that a block without a gate keeps, by activation, its output included."""
_LEARNED = re.compile(r"\b(wpe|position_embeddings?|embed_positions|positions_embed)\.weight$")
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format
_LOGITS_BYTES = 1 << 30
"""Upper bound on the bytes of logits in evaluation (`flatshift.finetune.evaluate.perplexity`)."""
_PACKED_BYTES = {"nf4": 0.5 + 4 / 64, "nf4-double": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
"""Bytes per value of a quantised block, scales included."""
_STATE_BYTES = 16
"""Bytes per adapter parameter: weight, gradient, two moments, and the float32 master if weight and gradient are
bf16."""


@dataclass(frozen=True)
class BackboneSizes:
    """Sizes of a backbone, in elements rather than bytes."""

    kind: str
    """Model type of transformers."""
    hidden: int
    feed_forward: int
    heads: int
    groups: int
    """Key-value heads."""
    vocabulary: int
    wide: int
    """Feed-forward-wide tensors that a block keeps for backward."""
    blocks: tuple[int, ...]
    """Elements of each block."""
    ends: tuple[int, ...]
    """Elements of each tensor outside the blocks: embeddings, head, norms."""
    adapter: int
    """Elements of the adapter."""
    inputs: int
    """Input channels of all adapted layers of a block."""
    below: int
    """Blocks below the lowest adapted one."""
    products: int = 0
    """Elements of the matrices in a block that one token is multiplied with."""
    experts: int = 0
    """Experts per block; 0: not a mixture of experts."""
    routed: int = 0
    """Experts that a token is routed to."""
    expert_elements: int = 0
    """Elements of all experts of a block."""
    head: int = 0
    """Channels of an attention head."""
    normed: bool = False
    """True if queries and keys are normalised per head (Qwen3)."""
    ranks: tuple[int, int] = (0, 0)
    """Sum of the ranks of a block's adapted layers: (attention, other)."""
    trained: tuple[int, int] = (0, 0)
    """Elements of a block's adapters: (attention, other)."""
    positions: int | None = None
    """Maximum sequence length the backbone supports, in tokens; None: not specified."""
    bounded: bool = False
    """True if positions are a table, with no entries beyond `positions`."""
    layers: tuple[tuple[int, int], ...] = ()
    """Shape (rows, columns) of each adapted matrix."""
    outputs: int = 0
    """Output width of the last layer: words, or classes of a head."""
    output: tuple[int, ...] = ()
    """Elements of each tensor of `ends` that computes logits of words and is not the embedding itself."""
    supervised: float = 1.0
    """Fraction of the tokens that contribute to the loss."""
    whole_rows: bool = False
    """True if a head scores whole sequences: the loss reads one state of each, and no logits of words are computed."""

    @classmethod
    def read(cls, directory: Path, adapter: Adapter) -> BackboneSizes:
        """Read the sizes of the backbone in `directory` under `adapter`.

        Raises:
            UserError: config.json or the header of a weight file is missing or damaged.
        """
        return cls.of(_read_config(directory / "config.json"), _read_shapes(directory), adapter, str(directory))

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        adapter: Adapter,
        where: str = "the backbone",
    ) -> BackboneSizes:
        """Return the sizes of a backbone with this configuration and these tensors (name → shape)."""
        blocks: dict[tuple[str | None, int], int] = {}
        ends, trained, inputs, multiplied, gated, adapted, normed = [], [0, 0], 0, 0, False, set(), False
        ranks, routed, layers, output = [0, 0], 0, [], []
        for name, shape in shapes.items():
            place = _BLOCK.match(name)
            if place is None:
                ends.append(math.prod(shape))
                if _OUTPUT.match(name):
                    output.append(math.prod(shape))
                continue
            if len(shape) > 3:  # causal masks stored in older GPT-2 files
                continue
            key = (place["stack"], int(place["number"]))
            blocks[key] = blocks.get(key, 0) + math.prod(shape)
            if _EXPERT.search(name):
                routed += math.prod(shape)
                gated |= "gate" in name or "w3" in name
                continue
            multiplied += math.prod(shape) if len(shape) == 2 else 0
            gated |= bool(re.search(r"gate_proj|wi_1|w1\.weight", name))
            normed |= bool(re.search(r"\bq_norm\.weight", name))
            if len(shape) == 2 and _is_adapted(name, adapter):
                rank = match_pattern(adapter.ranks, name.removesuffix(".weight"), adapter.rank)
                outside = not re.search(r"attn|attention", name, re.IGNORECASE)
                trained[outside] += rank * sum(shape) + (shape[0] if adapter.dora else 0)
                ranks[outside] += rank
                inputs += shape[1]
                layers.append((shape[0], shape[1]))
                adapted.add(key[1])
        if not blocks:
            raise UserError(f"{where}: its weights show no blocks, so nobody can tell what fits")
        experts = max((config[name] for name in _EXPERTS if isinstance(config.get(name), int)), default=0)
        chosen = _first_integer(config, *_ROUTED) if routed else 0
        hidden = _first_integer(config, "hidden_size", "n_embd", "d_model")
        heads = _first_integer(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
        return cls(
            kind=str(config.get("model_type")),
            hidden=hidden,
            feed_forward=_feed_forward_width(config, hidden, chosen),
            heads=heads,
            groups=_first_integer(config, "num_key_value_heads", default=heads),
            vocabulary=(words := _first_integer(config, "vocab_size", default=1)),
            wide=4 if gated else next((kept for name, kept in _WIDE.items() if name in config.values()), 3),
            blocks=tuple(blocks.values()),
            ends=tuple(sorted(ends, reverse=True)),
            adapter=sum(trained),
            inputs=inputs // len(blocks),
            below=min(adapted, default=0),
            products=(multiplied + routed * chosen // max(experts, 1)) // len(blocks),
            head=_first_integer(config, "head_dim", default=hidden // heads),
            normed=normed,
            ranks=(ranks[0] // len(blocks), ranks[1] // len(blocks)),
            trained=(trained[0] // len(blocks), trained[1] // len(blocks)),
            experts=experts if routed else 0,
            routed=chosen,
            expert_elements=routed // len(blocks),
            positions=usable_positions(config),
            bounded=str(config.get("model_type")) in BOUNDED or any(map(_LEARNED.search, shapes)),
            layers=tuple(layers),
            outputs=words,
            output=tuple(output),
        )

    def under(self, task: Task, *, classes: int | None = None) -> BackboneSizes:
        """Return the sizes with the task's own head, newly initialised and trained in full, in place of the output
        layer for words.

        classes: outputs of the head; None: as many classes as the task names, else two, or one for a number.
        """
        if task.is_sequence_level:
            names = task.given_classes
            classes = classes or (len(names) if names else 2 if task.has_classes else 1)
            ends = list(self.ends)
            for elements in self.output:
                ends.remove(elements)
            new = classes * self.hidden
            return dataclasses.replace(
                self, ends=tuple(ends), output=(), outputs=classes, adapter=self.adapter + new, whole_rows=True
            )
        return dataclasses.replace(self, supervised=task.supervised)

    @property
    def elements(self) -> int:
        """Elements Ψ of the whole backbone."""
        return sum(self.blocks) + sum(self.ends)


@dataclass(frozen=True)
class Footprint:
    """Bytes on the fullest rank, by cause, each with its title on a page."""

    weights: int = field(metadata={"title": "frozen weights"})
    """This rank's shard of the frozen backbone."""
    gathered: int = field(metadata={"title": "gathered weights"})
    """Gathered weights of the current unit and the buffer that they are gathered in."""
    adapter: int = field(metadata={"title": "adapter, gradients, optimizer"})
    """Adapter, gradients and optimizer state."""
    activations: int = field(metadata={"title": "activations kept for backward"})
    """Kept between forward and backward."""
    work: int = field(metadata={"title": "loss and backward pass at work"})
    """Temporaries of the loss, or of a block's backward pass, on top of the activations."""
    logits: int = field(metadata={"title": "logits of an evaluation"})
    """Logits of an evaluation; training computes them in slices."""
    regularizer: int = field(default=0, metadata={"title": "regularizer's noise and state"})
    """State of the regularizer: noise, momentum, a second adapter or dense gradients."""

    @property
    def total(self) -> int:
        """Total bytes; activations and the logits of an evaluation never exist at the same time."""
        kept = self.weights + self.gathered + self.adapter + self.regularizer
        return kept + max(self.activations + self.work, self.logits)

    def __str__(self) -> str:
        causes = {"weights": self.weights, "gathered": self.gathered, "adapter": self.adapter}
        causes |= {"regularizer": self.regularizer}
        training = {"activations": self.activations, "work": self.work}
        causes |= training if self.activations + self.work > self.logits else {"logits": self.logits}
        return " + ".join(f"{format_bytes(count)} {cause}" for cause, count in causes.items() if count)


def predict_footprint(
    backbone: BackboneSizes,
    *,
    mesh: Mesh,
    adapter: Adapter,
    train: Train,
    rows: int | None = None,
    device: str = "cuda",
    expert_parallel: int = 1,
    packed: bool = False,
    regularizer: RegularizerConfig | None = None,
) -> Footprint:
    """Return the memory of a rank of `mesh`.

    Args:
        rows: sequences of a micro-batch on one rank; by default its share of `train.batch_size`.
        device: kind of device, which sets how many logits are computed at once.
        expert_parallel: data ranks that share the experts of every block, and so never gather those of others.
        packed: True if rows hold several examples, which a CPU separates by a dense mask.
        regularizer: the regularizer whose state is included; None: none.
    """
    width = WIDTHS[train.precision]
    stored = 2 if train.backbone_precision == "bf16" else width
    each = _PACKED_BYTES.get(train.quantization or "", stored)
    shards = mesh.dp * mesh.cp
    block, end = max(backbone.blocks) * each, max(backbone.ends, default=0) * stored
    others = backbone.expert_elements * (1 - 1 / expert_parallel) * each
    unit = int(max(block - others, end)) // mesh.tp
    layers = math.ceil(len(backbone.blocks) / mesh.pp)
    outside = sum(backbone.ends) * stored if mesh.pp == 1 else end
    stage = int(layers * block + outside) // mesh.tp
    gathered = 0
    if shards > 1 and mesh.zero == 3:
        whole = stage - int(layers * others) // mesh.tp
        gathered = whole + unit if mesh.pp > 1 or not mesh.reshard else 2 * unit
    held = shards if mesh.zero == 3 and mesh.adapters == "shard" else 1
    rows = rows or math.ceil(train.batch_size / (mesh.replicate * mesh.dp))
    tokens = rows * train.max_length
    kept = int(_activation_bytes(backbone, mesh, adapter, train) * _sequences_in_flight(mesh, train, rows))
    if packed and device == "cpu":
        kept += int(mask_bytes(layers, train) * _sequences_in_flight(mesh, train, rows))
    state = _STATE_BYTES * backbone.adapter // (mesh.pp * held)
    work = work_bytes(backbone, mesh, adapter, train, rows, device)
    if mesh.pp == 1 and train.accumulate == 1:  # gradients grow while activations are freed
        work = max(0, work - state // 4)
    regularizer = regularizer or Plain()
    parts = mesh.tp * mesh.pp
    at_once = 1 / layers if train.checkpointing == "full" else 1.0
    held_for = perturbation_bytes(
        regularizer,
        backbone.layers,
        adapter=backbone.adapter,
        held=held,
        tokens=tokens / mesh.cp * at_once,
        stored=stored,
        width=width,
    )
    casts = _cast_bytes(backbone, mesh, train)
    fused = isinstance(regularizer, GGPO | FlatLora) or (isinstance(regularizer, MGPO) and regularizer.form == "code")
    if fused and not (adapter.dora or adapter.dropout):  # one product computes noise and adapter, without copies
        casts = 0
    if isinstance(regularizer, BiLora) and train.precision != "fp32":
        casts += 2 * regularizer.rank * sum(map(sum, backbone.layers)) // parts
    return Footprint(
        weights=stage // (shards if mesh.zero == 3 else 1),
        gathered=gathered,
        adapter=state,
        activations=kept + casts,
        work=work,
        logits=min(_LOGITS_BYTES, 4 * (rows if backbone.whole_rows else tokens) * backbone.outputs),
        regularizer=held_for // parts,
    )


def mask_bytes(layers: int, train: Train) -> int:
    """Return the bytes of the dense masks of one packed row on a CPU: the token-by-token mask, and for each of `layers`
    layers the bias added to its scores (`flatshift.finetune.compute.attention`). With recomputed attention only one
    layer's exists at a time."""
    kept = layers if train.checkpointing == "none" else 1
    return train.max_length**2 * (1 + kept * WIDTHS[train.precision])


def _activation_bytes(backbone: BackboneSizes, mesh: Mesh, adapter: Adapter, train: Train) -> float:
    """Return the bytes that the blocks of one rank keep for the backward pass of one sequence."""
    block = _block_bytes(backbone, mesh, adapter, train)
    layers = math.ceil(len(backbone.blocks) / mesh.pp)
    between = WIDTHS[train.precision] / (mesh.tp if mesh.sequence_parallel else 1)  # a recomputed block's input
    kept = between * layers + block if train.checkpointing == "full" else block * layers
    return kept * train.max_length * backbone.hidden / mesh.cp


def _block_bytes(backbone: BackboneSizes, mesh: Mesh, adapter: Adapter, train: Train) -> float:
    """Return the bytes that a block keeps for backward, in units of T·D.

    Inputs of two norms in float32; query, key, value (per group, which a kernel without a mask does not repeat) and the
    attention's output, and inputs of their norms in float32; the tensors that the feed-forward's activation needs and
    its output; the inputs of the adapters and the outputs of their A; the sums of softmax and norms. Within 0.5 % of
    what autograd keeps for Llama, Qwen2 and Qwen3 blocks with all linear layers adapted
    (tests/unit/test_plan_trace.py); with fewer adapted layers an overestimate.
    """
    hidden, heads, attends = backbone.hidden, backbone.heads, train.checkpointing != "selective"
    width = WIDTHS[train.precision]
    whole = 8.0 + 2 * width + (8 + width * (backbone.ranks[0] * attends + backbone.ranks[1])) / hidden
    cut = backbone.wide * backbone.feed_forward / hidden * width
    if attends:
        cut += (2 * width * (heads + backbone.groups) * backbone.head + 4 * heads) / hidden
        cut += 4 * (heads + backbone.groups) * (backbone.head + 1) / hidden if backbone.normed else 0
    whole += 2 * width * backbone.routed  # tokens as dispatched to experts, and the experts' outputs
    if adapter.dropout > 0:
        whole += (width + 1) * backbone.inputs / backbone.hidden
    return (whole + cut) / mesh.tp if mesh.sequence_parallel else whole + cut / mesh.tp


def work_bytes(backbone: BackboneSizes, mesh: Mesh, adapter: Adapter, train: Train, rows: int, device: str) -> int:
    """Return the bytes at the worst of three moments, beyond the activations kept by then.

    The loss: a slice of logits in float32, and of its inputs in fewer bits; states of target tokens, their gradient and
    the last norm's output (a head over whole sequences reads one state of each, and has few logits). The last norm's
    backward pass: its sums in float32 and three gradients of states. A block's backward pass: two feed-forward-wide
    gradients, or those of its norms. If blocks are recomputed, one is kept only by the last of these moments.
    """
    width = WIDTHS[train.precision]
    piece = rows if mesh.pp == 1 else math.ceil(rows / (mesh.microbatches or min(rows, 4 * mesh.pp)))
    tokens = piece * train.max_length // mesh.cp
    states = tokens * backbone.hidden
    cut = -(-backbone.outputs // mesh.tp)
    read = piece if backbone.whole_rows else backbone.supervised * tokens
    logits = min(slice_rows(cut, device, width), read) * cut * (4 + (width if width < 4 else 0))
    loss = int(width * (states + 2 * read * backbone.hidden) + logits)
    norm = (20 if width < 4 else 16) * states
    block = max(2 * width * tokens * backbone.feed_forward // mesh.tp, 12 * states)
    if train.checkpointing != "full":
        return max(loss, norm, block)
    recomputed = recomputed_bytes(backbone, mesh, adapter, train, tokens)
    return max(loss - recomputed, norm - recomputed, block)


def recomputed_bytes(backbone: BackboneSizes, mesh: Mesh, adapter: Adapter, train: Train, tokens: int) -> int:
    """Return the bytes of the one block that `train.checkpointing: full` recomputes, over `tokens` tokens."""
    return int(_block_bytes(backbone, mesh, adapter, train) * tokens * backbone.hidden)


def _cast_bytes(backbone: BackboneSizes, mesh: Mesh, train: Train) -> int:
    """Return the bytes of the lower-precision copies that autocast keeps of float32 adapters, independent of the batch
    size."""
    if train.precision == "fp32" or train.adapter_precision == "bf16":
        return 0
    attention, rest = backbone.trained
    layers = 1 if train.checkpointing == "full" else math.ceil(len(backbone.blocks) / mesh.pp)
    return 2 * layers * (rest + (attention if train.checkpointing != "selective" else 0))


def _sequences_in_flight(mesh: Mesh, train: Train, rows: int) -> float:
    """Return the number of sequences whose activations a rank keeps at once."""
    if mesh.pp == 1:
        return rows
    if mesh.schedule == "gpipe":
        return rows * train.accumulate
    piece = math.ceil(rows / (mesh.microbatches or min(rows, 4 * mesh.pp)))
    looped = 1 if mesh.schedule == "1f1b" else 1 + (mesh.pp - 1) / (mesh.pp * (mesh.virtual or 2))
    return min(rows * train.accumulate, looped * piece * mesh.pp)


def _feed_forward_width(config: Mapping[str, Any], hidden: int, routed: int) -> int:
    """Return the channels between a block's two feed-forward maps; with experts, of all that a token is routed to plus
    the shared ones."""
    dense = _first_integer(config, "intermediate_size", "n_inner", "d_ff", default=4 * hidden)
    if not routed:
        return dense
    each = _first_integer(config, "moe_intermediate_size", default=dense)
    shared = _first_integer(config, "shared_expert_intermediate_size", default=0) or each * _first_integer(
        config, "n_shared_experts", default=0
    )
    return routed * each + shared


def _is_adapted(name: str, adapter: Adapter) -> bool:
    module = name.removesuffix(".weight")
    if _NO_LAYER.search(name) or _ROUTER.search(module):
        return False
    if any(f".{module}".endswith(f".{suffix}") for suffix in adapter.exclude or ()):
        return False
    if adapter.targets == "all-linear":
        return True
    wanted = (adapter.targets,) if isinstance(adapter.targets, str) else adapter.targets
    return any(f".{module}".endswith(f".{suffix}") for suffix in wanted)


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json_object(path, fix="fetch the backbone again")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor name → shape, from the headers of all weight files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{file} is damaged or cut short; fetch the backbone again") from error
    return shapes


def _first_integer(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    values = (config.get(name) for name in names)  # Gemma 3n lists one value per layer: take the largest
    numbers = (max(value) if isinstance(value, list) and value else value for value in values)
    found = next((number for number in numbers if isinstance(number, int) and number > 0), default)
    if found is None:
        raise UserError(f"config.json says nothing of {names[0]}, so mesh.auto cannot tell what fits; set the axes")
    return found
