"""Which layers of each model family are cut, and how: one table, by transformers' model type.

A block has *regions*: an entry module whose input is whole, column layers that are cut by output rows, and one row
layer that is cut by input columns and whose output is summed over the ranks. Everything else stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...errors import UserError


@dataclass(frozen=True)
class Region:
    """Names are relative to the block. Of `columns` those that exist count (gated and plain feed-forward)."""

    entry: str
    columns: tuple[str, ...]
    row: str
    heads: bool = False
    """Attention: rows come in heads."""
    fused: int = 1
    """Equal blocks of rows in a column layer, each cut apart (GPT-2's query, key and value)."""
    counts: tuple[str, ...] = ()
    """Attributes of the entry module that count heads or channels and become local."""
    bias: str | None = None
    """An embedding of the entry module with one column a head (T5's relative position bias)."""


@dataclass(frozen=True)
class Plan:
    """Names are suffixes of module names in the backbone; `*` is a number."""

    about: str
    blocks: str
    regions: tuple[Region, ...]
    embeddings: tuple[str, ...] = ()
    """Embeddings over the vocabulary; a linear output head over it is cut as well."""
    norm: str | None = None
    """The norm after the last block; None where the residual stream cannot be split by tokens."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream may be split by tokens."""
        return self.norm is not None


_GATED = Region("mlp", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
_LLAMA = (
    Region("self_attn", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj", heads=True),
    _GATED,
)
_SELF = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
_BERT = (
    Region(
        "attention.self", _SELF, "attention.output.dense", heads=True, counts=("num_attention_heads", "all_head_size")
    ),
    Region("intermediate", ("intermediate.dense",), "output.dense"),
)
_VIT = (
    Region(
        "attention",
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attention.o_proj",
        heads=True,
        counts=("num_attention_heads",),
    ),
    Region("mlp", ("mlp.fc1",), "mlp.fc2"),
)
_GPT2 = (
    Region("attn", ("attn.c_attn",), "attn.c_proj", heads=True, fused=3, counts=("num_heads", "split_size")),
    Region("mlp", ("mlp.c_fc",), "mlp.c_proj"),
)
_NEOX = (
    # the rows of query_key_value are ordered by head, so an even cut keeps heads whole
    Region("attention", ("attention.query_key_value",), "attention.dense", heads=True),
    Region("mlp", ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"),
)


def _t5_attention(entry: str) -> Region:
    columns = tuple(f"{entry}.{name}" for name in ("q", "k", "v"))
    counts = ("n_heads", "inner_dim")
    return Region(entry, columns, f"{entry}.o", heads=True, counts=counts, bias="relative_attention_bias")


def _t5_feed_forward(entry: str) -> Region:
    return Region(entry, tuple(f"{entry}.{name}" for name in ("wi", "wi_0", "wi_1")), f"{entry}.wo")


_T5 = (
    _t5_attention("layer.0.SelfAttention"),
    _t5_attention("layer.1.EncDecAttention"),
    _t5_feed_forward("layer.1.DenseReluDense"),
    _t5_feed_forward("layer.2.DenseReluDense"),
)


def _decoder(about: str) -> Plan:
    return Plan(about, "layers.*", _LLAMA, ("embed_tokens",), "norm")


def _encoder(about: str) -> Plan:
    return Plan(about, "encoder.layer.*", _BERT, ("word_embeddings",))


_PLANS = {
    "llama": _decoder("Llama 1 to 3: grouped heads, gated feed-forward, vocabulary; sequence parallel"),
    "qwen2": _decoder("Qwen2 and 2.5: as Llama with biases; sequence parallel"),
    "qwen3": _decoder("Qwen3: as Llama with norms on queries and keys; sequence parallel"),
    "mistral": _decoder("Mistral: as Llama with sliding windows; sequence parallel"),
    "gemma": _decoder("Gemma 1: as Llama with scaled embeddings; sequence parallel"),
    "gemma2": _decoder("Gemma 2: norms before and after each region; sequence parallel"),
    "gemma3_text": _decoder("Gemma 3 (text): norms before and after each region; sequence parallel"),
    "gpt2": Plan("GPT-2: fused query, key and value, vocabulary", "h.*", _GPT2, ("wte",)),
    "gpt_neox": Plan("GPT-NeoX and Pythia: query, key and value fused by head", "layers.*", _NEOX, ("embed_in",)),
    "t5": Plan("T5: encoder, decoder and cross attention", "block.*", _T5, ("shared", "embed_tokens")),
    "bert": _encoder("BERT: encoder blocks and vocabulary; pooler and task head whole"),
    "roberta": _encoder("RoBERTa: encoder blocks and vocabulary; task head whole"),
    "vit": Plan("ViT: encoder blocks; patch embedding and task head whole", "layers.*", _VIT),
}


def tensor_plans() -> dict[str, str]:
    """Model types that tensor parallelism can cut, and a sentence about each."""
    return {kind: plan.about for kind, plan in _PLANS.items()}


def plan_of(model: nn.Module) -> Plan:
    """The plan of `model` (transformers or PEFT).

    Raises:
        UserError: its model type has none.
    """
    kind = getattr(backbone_of(model).config, "model_type", None)
    if kind not in _PLANS:
        raise UserError(
            f"mesh.tp: there is no tensor-parallel plan for model type {kind!r}; there is one for "
            f"{', '.join(_PLANS)}; leave mesh.tp at 1 and use mesh.dp"
        )
    return _PLANS[kind]


def backbone_of(model: nn.Module) -> Any:
    """The transformers model inside PEFT's wrapper, or the model itself."""
    get = getattr(model, "get_base_model", None)
    return model if get is None else get()


@dataclass
class FoundRegion:
    """A region of one block, as modules: LoRA layers where adapted, else plain linear layers."""

    region: Region
    entry: nn.Module
    columns: dict[str, nn.Module]
    row: nn.Module
    block: str


@dataclass
class Found:
    """What of a plan this model (or pipeline stage) has, in order."""

    plan: Plan
    blocks: dict[str, nn.Module] = field(default_factory=dict)
    regions: list[FoundRegion] = field(default_factory=list)
    biases: list[tuple[Region, nn.Module]] = field(default_factory=list)
    """Entry modules with a bias to cut: also of a block of which a pipeline stage has nothing else."""
    embeddings: dict[str, nn.Embedding] = field(default_factory=dict)
    wrapped: dict[str, nn.Module] = field(default_factory=dict)
    """Embeddings or an output head that PEFT has wrapped."""
    head: nn.Linear | None = None
    norm: nn.Module | None = None


def find(model: nn.Module) -> Found:
    """Match the plan of `model` with its modules; blocks of other pipeline stages have no parameters and are absent.

    Raises:
        UserError: no plan; or a layer in a block that the plan does not know.
    """
    base, plan = backbone_of(model), plan_of(model)
    found = Found(plan)
    for name, module in base.named_modules():
        if _ends(name, plan.blocks) and any(True for _ in module.parameters()):
            found.biases += _biases(plan, module)
            if any(True for _ in linears(module)):
                found.blocks[name] = module
                found.regions += _regions(plan, name, module)
        elif any(_ends(name, suffix) for suffix in plan.embeddings):
            if isinstance(module, nn.Embedding):
                found.embeddings[name] = module
            else:
                found.wrapped[name] = module
        elif plan.norm is not None and _ends(name, plan.norm) and any(True for _ in module.parameters()):
            found.norm = module
    head = base.get_output_embeddings() if plan.embeddings else None
    if isinstance(head, nn.Linear):
        found.head = head
    elif head is not None:
        found.wrapped["the output head"] = head
    return found


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers under `module` as the backbone has them, a LoRA layer counting as one."""
    inside: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        if hasattr(child, "lora_A") or isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D":
            inside.append(name)
            yield name, child


def _regions(plan: Plan, name: str, block: nn.Module) -> list[FoundRegion]:
    modules = dict(block.named_modules())
    present = [region for region in plan.regions if region.entry in modules and region.row in modules]
    known = {layer for region in present for layer in (*region.columns, region.row)}
    foreign = [layer for layer, _ in linears(block) if layer not in known]
    if foreign or len(present) < 2:
        raise UserError(
            f"mesh.tp: {name}.{foreign[0] if foreign else plan.regions[0].entry} of this model is not as the "
            "tensor-parallel plan of its type expects; leave mesh.tp at 1 and use mesh.dp"
        )
    return [
        FoundRegion(
            region,
            modules[region.entry],
            {layer: modules[layer] for layer in region.columns if layer in modules},
            modules[region.row],
            name,
        )
        for region in present
    ]


def _biases(plan: Plan, block: nn.Module) -> list[tuple[Region, nn.Module]]:
    modules = dict(block.named_modules())
    return [(r, modules[r.entry]) for r in plan.regions if r.bias and f"{r.entry}.{r.bias}" in modules]


def _ends(name: str, suffix: str) -> bool:
    return re.search(rf"(^|\.){re.escape(suffix).replace(re.escape('*'), '[0-9]+')}$", name) is not None
