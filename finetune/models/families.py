"""Model families: one table by transformers' model type, with the properties that each mesh axis depends on.

A block has *regions*: an entry module whose input is replicated, column layers that are split by output rows, and one
row layer that is split by input columns and whose output is summed over the ranks. Everything else is replicated.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class TensorPlan:
    """Tensor-parallel plan of a family. Names are suffixes of module names in the backbone; `*` is a number."""

    description: str
    blocks: str
    regions: tuple[TensorParallelRegion, ...]
    embeddings: tuple[str, ...] = ()  # embeddings over the vocabulary; a linear output head over it is split as well
    norm: str | None = None  # the norm after the last block; None if the residual stream cannot be split by tokens

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
    """Properties of one architecture that cannot be derived from the model itself."""

    tensor: TensorPlan  # split of its layers along `mesh.tp`
    stacks: tuple[BlockStack, ...] = ()
    """Blocks that `mesh.pp` splits, the encoder's before the decoder's; empty if it cannot be split."""
    context: bool = False
    """True if `mesh.cp` may split its tokens: they interact only in causal self-attention, through transformers'
    attention interface."""


_GATED = TensorParallelRegion("mlp", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
_LLAMA = (
    TensorParallelRegion(
        "self_attn", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj", heads=True
    ),
    _GATED,
)
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
_NEOX = (
    # the rows of query_key_value are ordered by head, so an even split keeps heads whole
    TensorParallelRegion("attention", ("attention.query_key_value",), "attention.dense", heads=True),
    TensorParallelRegion("mlp", ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"),
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


def _decoder_family(description: str, *, context: bool = True) -> Family:
    plan = TensorPlan(description, "layers.*", _LLAMA, ("embed_tokens",), "norm")
    return Family(plan, (BlockStack("layers", ("embed_tokens",), ("norm",)),), context)


def _encoder_family(description: str) -> Family:
    plan = TensorPlan(description, "encoder.layer.*", _BERT, ("word_embeddings",))
    return Family(plan, (BlockStack("encoder.layer", ("embeddings",), ("pooler",)),))


FAMILIES = {
    "llama": _decoder_family("Llama 1 to 3: grouped heads, gated feed-forward, vocabulary; sequence parallel"),
    "qwen2": _decoder_family("Qwen2 and 2.5: as Llama with biases; sequence parallel"),
    "qwen3": _decoder_family("Qwen3: as Llama with norms on queries and keys; sequence parallel"),
    "mistral": _decoder_family("Mistral: as Llama with sliding windows; sequence parallel"),
    "gemma": _decoder_family("Gemma 1: as Llama with scaled embeddings; sequence parallel"),
    "gemma2": _decoder_family("Gemma 2: norms before and after each region; sequence parallel", context=False),
    "gemma3_text": _decoder_family("Gemma 3 (text): norms before and after each region; sequence parallel"),
    "gpt2": Family(
        TensorPlan("GPT-2: fused query, key and value, vocabulary", "h.*", _GPT2, ("wte",)),
        (BlockStack("h", ("wte", "wpe"), ("ln_f",)),),
        context=True,
    ),
    "gpt_neox": Family(
        TensorPlan("GPT-NeoX and Pythia: query, key and value fused by head", "layers.*", _NEOX, ("embed_in",)),
        (BlockStack("layers", ("embed_in",), ("final_layer_norm",)),),
        context=True,
    ),
    "t5": Family(
        TensorPlan("T5: encoder, decoder and cross attention", "block.*", _T5, ("shared", "embed_tokens")),
        (
            BlockStack("encoder.block", ("encoder.embed_tokens",), ("encoder.final_layer_norm",)),
            BlockStack("decoder.block", ("decoder.embed_tokens",), ("decoder.final_layer_norm",)),
        ),
    ),
    "bert": _encoder_family("BERT: encoder blocks and vocabulary; pooler and task head whole"),
    "roberta": _encoder_family("RoBERTa: encoder blocks and vocabulary; task head whole"),
    "vit": Family(TensorPlan("ViT: encoder blocks; patch embedding and task head whole", "layers.*", _VIT)),
}
"""Model type of transformers → family. To add a family, add one entry here."""


def tensor_plans() -> dict[str, str]:
    """Return the model types that tensor parallelism can split, with a sentence about each."""
    return {kind: family.tensor.description for kind, family in FAMILIES.items()}


def pipeline_families() -> tuple[str, ...]:
    """Return the model types that can be split into pipeline stages."""
    return tuple(kind for kind, family in FAMILIES.items() if family.stacks)


def context_families() -> tuple[str, ...]:
    """Return the model types whose tokens can be split."""
    return tuple(kind for kind, family in FAMILIES.items() if family.context)


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
