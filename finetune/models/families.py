"""Model families: how each architecture is divided along the axes of a mesh, by transformers' model type.

A plan is read from the configuration class of the installed transformers (`base_model_tp_plan`, `base_model_pp_plan`);
a table has those that transformers has no plan for, or divides otherwise.

A block has *regions*: an entry module whose input is replicated, column layers that are split by output rows, and one
row layer that is split by input columns and whose output is summed over the ranks. Everything else is replicated.
Nothing here imports torch before a family is looked up.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Mesh
from ..errors import UserError


@dataclass(frozen=True)
class TensorParallelRegion:
    """One tensor-parallel region of a block; names are relative to the block. Names in `columns` that do not exist are
    ignored (gated and plain feed-forward)."""

    entry: str
    columns: tuple[str, ...]
    row: str
    heads: bool = False  # True for attention: output rows are grouped by head
    fused: int = 1  # equal groups of rows in a column layer, each split separately (GPT-2's query, key and value)
    counts: tuple[str, ...] = ()
    """Attributes of the entry module that count heads or channels and become per-rank counts."""
    bias: str | None = None  # an embedding of the entry module with one column per head (T5's relative position bias)
    gathered: bool = False
    """True if what lies between column and row layers is whole on every rank (norms over all heads, packed rows)."""


@dataclass(frozen=True)
class ExpertRegion:
    """Stacked experts of a block, each of which is split like a feed-forward; the router is whole on every rank."""

    entry: str
    parameters: tuple[tuple[str, int, int], ...]
    """Name of each stacked parameter (E, ., .), the dim that is split, and the equal groups along it that are split
    separately."""

    @property
    def block(self) -> str:
        """Return the module with the experts and their router."""
        return self.entry.rpartition(".")[0]


@dataclass(frozen=True)
class TensorPlan:
    """Tensor-parallel plan of a family. Names are suffixes of module names in the backbone; `*` is a number."""

    blocks: str
    regions: tuple[TensorParallelRegion, ...]
    embeddings: tuple[str, ...] = ()  # embeddings over the vocabulary; a linear output head over it is split as well
    norm: str | None = None
    """The norm after the last block, "" without one; None if the residual stream cannot be split by tokens."""
    whole: str = "no plan says after which norm they are whole again"
    """The reason why it cannot."""
    experts: tuple[ExpertRegion, ...] = ()

    @property
    def sequence_parallel(self) -> bool:
        """True if the residual stream may be split by tokens."""
        return self.norm is not None


@dataclass(frozen=True)
class BlockStack:
    """Sequence of blocks that a pipeline splits; names are relative to the model without its head."""

    blocks: str  # name of the nn.ModuleList
    first: tuple[str, ...]  # modules with parameters before the first block
    last: tuple[str, ...]  # modules with parameters after the last block


@dataclass(frozen=True)
class Family:
    """Division of one architecture along the axes of a mesh."""

    tensor: TensorPlan | None  # split of its layers along `mesh.tp`; None if they cannot be split
    stacks: tuple[BlockStack, ...] = ()
    """Blocks that `mesh.pp` splits, the encoder's before the decoder's; empty if it cannot be split."""
    context: bool = False
    """True if `mesh.cp` may split its tokens: they interact only in causal self-attention, through transformers'
    attention interface."""
    refusal: str = ""
    """The reason why `tensor` is None."""


_SELF = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
_BERT = (
    TensorParallelRegion(
        "attention.self", _SELF, "attention.output.dense", heads=True, counts=("num_attention_heads", "all_head_size")
    ),
    TensorParallelRegion("intermediate", ("intermediate.dense",), "output.dense"),
)
_VIT = (
    TensorParallelRegion(
        "attention",
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attention.o_proj",
        heads=True,
        counts=("num_attention_heads",),
    ),
    TensorParallelRegion("mlp", ("mlp.fc1",), "mlp.fc2"),
)
_GPT2 = (
    TensorParallelRegion(
        "attn", ("attn.c_attn",), "attn.c_proj", heads=True, fused=3, counts=("num_heads", "split_size")
    ),
    TensorParallelRegion("mlp", ("mlp.c_fc",), "mlp.c_proj"),
)


def _t5_attention(entry: str) -> TensorParallelRegion:
    columns = tuple(f"{entry}.{name}" for name in ("q", "k", "v"))
    counts = ("n_heads", "inner_dim")
    return TensorParallelRegion(entry, columns, f"{entry}.o", heads=True, counts=counts, bias="relative_attention_bias")


def _t5_feed_forward(entry: str) -> TensorParallelRegion:
    return TensorParallelRegion(entry, tuple(f"{entry}.{name}" for name in ("wi", "wi_0", "wi_1")), f"{entry}.wo")


_T5 = (
    _t5_attention("layer.0.SelfAttention"),
    _t5_attention("layer.1.EncDecAttention"),
    _t5_feed_forward("layer.1.DenseReluDense"),
    _t5_feed_forward("layer.2.DenseReluDense"),
)


_ENCODER = Family(
    TensorPlan("encoder.layer.*", _BERT, ("word_embeddings",), norm=""),
    (BlockStack("encoder.layer", ("embeddings",), ("pooler",)),),
)
FAMILIES = {
    "gpt2": Family(
        TensorPlan("h.*", _GPT2, ("wte",), norm="ln_f"), (BlockStack("h", ("wte", "wpe"), ("ln_f",)),), context=True
    ),
    "t5": Family(
        TensorPlan(
            "block.*", _T5, ("shared", "embed_tokens"), whole="each block of the decoder reads all of the encoder's"
        ),
        (
            BlockStack("encoder.block", ("encoder.embed_tokens",), ("encoder.final_layer_norm",)),
            BlockStack("decoder.block", ("decoder.embed_tokens",), ("decoder.final_layer_norm",)),
        ),
    ),
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "vit": Family(TensorPlan("layers.*", _VIT, whole="patches and a class token are rarely a multiple of mesh.tp")),
}
"""Model type of transformers → family, where its own plan is missing or another one. To add a family that has none, add
one entry here."""


TRIED = frozenset(
    [
        *("apertus", "arcee", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5"),
        *("ernie4_5_moe", "eurobert", "exaone", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe"),
        *("gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "helium", "hunyuan_v1_moe"),
        *("hyperclovax", "internlm3", "iquestcoder", "jais2", "jamba", "llama", "llama4_text", "minimax"),
        *("ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3"),
        *("olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe"),
        *("seed_oss", "smollm3", "starcoder2", "vaultgemma"),
    ]
)
"""Model types whose plans in transformers gave the losses of one process (`benchmarks/mesh_families.py`). Others are
compared before the first step (`flatshift.finetune.parallel.mesh_check`)."""
_TRIED_SHARDED = frozenset({"bert", "gpt2", "llama", "qwen3", "t5"})
"""Model types of `benchmarks/sharding_equalities.py`, whose rows were divided too."""


def is_tried(kind: str, mesh: Mesh) -> bool:
    """True if benchmarks have compared a model type with one process on all axes of `mesh`."""
    tried = kind in TRIED or (kind in FAMILIES and kind != "vit")
    return tried and (mesh.replicate * mesh.dp == 1 or kind in _TRIED_SHARDED)


_NOT_CUT = frozenset({"llama4_text"})
"""Model types without a pipeline plan whose forward pass reads a weight that other stages do not have."""


@functools.cache
def find_family(kind: str) -> Family:
    """Return the family of a model type; without a tensor plan and stacks if nothing is known of it."""
    if kind in FAMILIES:
        return FAMILIES[kind]
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401 - its `get` loads nothing
    stages = getattr(config, "base_model_pp_plan", None)
    llama: Any = CONFIG_MAPPING["llama"]  # whose names others have that have no pipeline plan
    stack = _read_stack(stages or llama.base_model_pp_plan)
    styles = getattr(config, "base_model_tp_plan", None) or {}
    experts = _read_experts(styles, stack.blocks)
    regions, refusal = _read_regions(styles, stack.blocks, experts)
    if refusal or not (regions or experts):
        why = refusal or "transformers has no plan for its blocks"
        return Family(None, (stack,) if stages else (), refusal=why)
    norm = stack.last[-1] if stages else None
    plan = TensorPlan(f"{stack.blocks}.*", regions, stack.first[:1], norm, experts=experts)
    attends = any(region.heads for region in regions)
    cut = stages or (regions and kind not in _NOT_CUT)
    return Family(plan, (stack,) if cut else (), attends and config in MODEL_FOR_CAUSAL_LM_MAPPING)


def _read_stack(plan: Mapping[str, tuple[list[str], list[str]]]) -> BlockStack:
    """Return the blocks of a pipeline plan of transformers: module → (names of inputs, names of outputs), in order."""
    names = list(plan)
    at = next(index for index, name in enumerate(names) if "attention_mask" in plan[name][0])
    return BlockStack(names[at], tuple(names[:at]), tuple(names[at + 1 :]))


def _read_experts(plan: Mapping[str, str], blocks: str) -> tuple[ExpertRegion, ...]:
    """Return the stacked experts of a tensor plan of transformers (layer → style)."""
    regions = []
    for name, style in plan.items():
        stack, _, entry = name.partition(".*.")
        if style == "moe_tp_experts" and stack == blocks:
            inner = {key.removeprefix(f"{name}."): own for key, own in plan.items() if key.startswith(f"{name}.")}
            if inner.keys() == {"gate_up_proj", "down_proj"} and _STACKED.keys() >= set(inner.values()):
                regions.append(ExpertRegion(entry, tuple((key, *_STACKED[own]) for key, own in inner.items())))
    return tuple(regions)


def _read_regions(
    plan: Mapping[str, str], blocks: str, experts: tuple[ExpertRegion, ...]
) -> tuple[tuple[TensorParallelRegion, ...], str]:
    """Return the regions of linear layers of a tensor plan of transformers (layer → style), or none and the reason."""
    entries: dict[str, dict[str, str]] = {}
    stacked = {region.entry for region in experts}
    for name, style in plan.items():
        stack, _, layer = name.partition(".*.")
        if style == "replicated_with_grad_allreduce" or not layer:  # norms of a region's entry; the vocabulary
            continue
        entry = layer.rpartition(".")[0]
        if stack == blocks and stacked & {layer, entry}:
            continue
        if stack != blocks or not entry or style not in (*_SPLIT, *_GATHERED):
            return (), f"transformers splits its {layer} as {style}"
        entries.setdefault(entry, {})[layer] = style
    regions = []
    for entry, styles in entries.items():
        column, row = _GATHERED if set(styles.values()) <= {*_GATHERED} else _SPLIT
        columns = tuple(layer for layer, style in styles.items() if style == column)
        rows = [layer for layer, style in styles.items() if style == row]
        if len(rows) != 1 or len(columns) + 1 != len(styles):
            return (), f"transformers splits its {entry} as {', '.join(dict.fromkeys(styles.values()))}"
        heads = "att" in entry
        regions.append(TensorParallelRegion(entry, columns, rows[0], heads=heads, gathered=column in _GATHERED))
    return tuple(regions), ""


_SPLIT = ("colwise", "rowwise")
_GATHERED = ("colwise_gather_output", "rowwise_split_input")
_STACKED = {"packed_colwise": (1, 2), "packed_rowwise": (2, 2), "colwise": (1, 1), "rowwise": (2, 1)}
"""Style of a stacked parameter → the dim that is split, and the groups along it."""


def tensor_plan(kind: str, *, sequence_parallel: bool = False) -> TensorPlan:
    """Return the tensor-parallel plan of a model type. Raises UserError if it has none, or is to split tokens and
    cannot."""
    family = find_family(kind)
    if family.tensor is None:
        raise UserError(f"mesh.tp: model type {kind!r} cannot be split: {family.refusal}; leave it at 1, use mesh.dp")
    if sequence_parallel and not family.tensor.sequence_parallel:
        raise UserError(
            f"mesh.sequence_parallel: the tokens of model type {kind!r} cannot be split: {family.tensor.whole}; leave "
            "it off"
        )
    return family.tensor


def has_expert_plan(kind: str) -> bool:
    """True if transformers has an expert-parallel plan for a model type: its experts take the tokens routed to them."""
    from transformers import CONFIG_MAPPING

    return kind in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[kind], "base_model_ep_plan", None))


def block_stacks(kind: str) -> tuple[BlockStack, ...]:
    """Return the blocks of a model type that pipeline stages take. Raises UserError if it cannot be cut."""
    family = find_family(kind)
    if not family.stacks:
        why = family.refusal or "the table of families has no blocks of it"
        raise UserError(f"mesh.pp: {kind} models cannot be cut into pipeline stages: {why}; use mesh.dp")
    return family.stacks


COUNTED_FROM_PAD = frozenset(
    [
        *("altclip_text_model", "bridgetower_text_model", "camembert", "clap_text_model", "data2vec-text"),
        *("esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta"),
        *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    ]
)
"""Model types with a position table of `max_position_embeddings` rows in which the first text token takes the row after
the pad token's."""


BOUNDED = frozenset({"codegen", "ctrl", "gptj", "mpt"})
"""Model types with precomputed positions for the length in config.json: beyond it they raise an index error."""


LEAKS_PACKED = frozenset(
    [
        *("biogpt", "bloom", "falcon_h1", "falcon_mamba", "jamba", "mamba", "minimax", "mpt", "nemotron_h"),
        *("olmo_hybrid", "openai-gpt", "opt", "qwen3_5_text", "recurrent_gemma", "rwkv", "xglm", "xlstm"),
    ]
)
"""Model types of decoders that take no notice of positions which begin again, so samples of one row see each other.
What is not here is measured before the first step (`flatshift.finetune.evaluate.packing_check`)."""


def usable_positions(config: Any) -> int | None:
    """Return the maximum sequence length of a backbone, in tokens, by its config.json (parsed, or transformers' own).

    None if it is not specified.
    """
    if not isinstance(config, Mapping):
        config = vars(config.get_text_config()) | {"model_type": config.get_text_config().model_type}
    positions = next((config[name] for name in _POSITIONS if isinstance(config.get(name), int)), None)
    if positions is None or positions < 1:  # XLNet has -1
        return None
    pad = config.get("pad_token_id")
    return (
        positions - (pad if isinstance(pad, int) else 1) - 1
        if config.get("model_type") in COUNTED_FROM_PAD
        else positions
    )


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
