"""Locate the parts of a model: blocks, attention, positions, vocabulary, linear layers, cache, and pipeline split
points.

transformers 5.24 renamed `past_key_values` to `cache`, in the arguments and in the outputs of every model.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .families import BOUNDED, BlockStack, block_stacks, usable_positions


def unwrap_peft(model: nn.Module) -> Any:
    """Return the transformers model inside PEFT's wrapper, or the model itself."""
    get = getattr(model, "get_base_model", None)
    return model if get is None else get()


def called_modules(model: nn.Module) -> list[nn.Module]:
    """Return the stages of a pipeline rank, each of which is called by itself, or the model alone."""
    return [child for name, child in model.named_children() if re.fullmatch(r"part\d+", name)] or [model]


def is_conv1d(module: Any) -> bool:
    """True for transformers' Conv1D (GPT-2): a linear layer with its weight stored as (inputs, outputs)."""
    return type(module).__name__ == "Conv1D"


def is_linear(module: Any) -> bool:
    """True for a linear layer, however its weight is stored."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of any transformers model: the members of its outermost module lists that have
    parameters (encoder and decoder of T5; those of other pipeline stages have none)."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks += [block for block in child if next(block.parameters(), None) is not None]
        else:
            blocks += transformer_blocks(child)
    return blocks


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the attention module of each block that has one."""

    def outermost(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child).__name__.endswith("Attention") and any(True for _ in child.parameters()):
                yield child
            else:
                yield from outermost(child)

    return [attention for block in transformer_blocks(model) for attention in outermost(block)]


def routed_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that compute a block's routed experts from parameters (E, ., .), by name, with PEFT's layers
    around them."""
    return {
        name: module
        for name, module in model.named_modules()
        if re.search(r"(^|\.)experts$", name) and stacked_parameters(module)
    }


def stacked_parameters(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with a first dim for each of the `routed_experts`, by their name in the backbone."""
    base: Any = experts.get_base_layer() if hasattr(experts, "lora_A") else experts  # type: ignore[operator]
    own = {name: parameter for name, parameter in base._parameters.items() if parameter is not None}
    counts = {len(parameter) for parameter in own.values() if parameter.ndim == 3}
    return {name: p for name, p in own.items() if p.ndim and len(counts) == 1 and len(p) in counts}


def vocabulary_size(model: Any) -> int:
    """Return V, the same on every rank: the width of the input embedding, if this process has one, else from the
    config."""
    get = getattr(model, "get_input_embeddings", None)
    if get is None:
        return int(model.config.get_text_config().vocab_size)
    held = getattr(get(), "vocabulary", None)  # flatshift.finetune.parallel.tensor.vocabulary
    return int(get().weight.shape[0] if held is None else held.size)


def _model_config(model: nn.Module) -> Any:
    """Return the model's configuration, which each piece of a pipeline has."""
    return next(module.config for module in unwrap_peft(model).modules() if hasattr(module, "config"))


def non_language_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a multimodal model's modules other than its language model: a vision tower, its projector."""
    config = _model_config(model)
    text = config.get_text_config()
    if text is config:
        return ()
    kind = type(text)
    language = next((n for n, m in model.named_modules() if n and isinstance(getattr(m, "config", None), kind)), "")
    owner = language.rpartition(".")[0]
    others = model.get_submodule(owner).named_children() if language else ()
    return tuple(name for name in (f"{owner}.{child}".lstrip(".") for child, _ in others) if name != language)


def head_module(model: Any) -> str:
    """Return the name of the outermost module with a classification model's outputs (`classifier`,
    `classification_head`), new or not; empty if there is none."""
    tops = [
        name.split(".")[0]
        for name, module in model.named_modules()
        if getattr(module, "out_features", None) == model.config.num_labels
    ]
    return next((top for top in reversed(tops) if top != model.base_model_prefix), "")


_TABLES = ("wpe", "position_embedding", "position_embeddings", "embed_positions", "positions_embed")


def position_limit(model: nn.Module) -> int | None:
    """Return the rows of a learned position table that are for text tokens; None if positions are computed (rotary)."""
    other_prefixes = tuple(f"{name}." for name in non_language_modules(model))  # an image's patches are not text tokens
    tables = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and not name.startswith(other_prefixes)
        and name.rsplit(".", 1)[-1] in _TABLES
    ]
    # RoBERTa counts from padding_idx + 1, OPT keeps `offset` rows to itself
    reserved = [t.padding_idx + 1 if t.padding_idx is not None else getattr(t, "offset", 0) for t in tables]
    soft_tokens = getattr(model, "soft_tokens", 0)  # soft tokens take positions before every sequence
    rows = [t.num_embeddings - u for t, u in zip(tables, reserved, strict=True)]
    config = _model_config(model)
    if (rows or config.get_text_config().model_type in BOUNDED) and (usable := usable_positions(config)) is not None:
        rows.append(usable)  # Nyströmformer's table has extra rows that it never reads
    return min(rows) - soft_tokens if rows else None


def describe_prefix(model: Any) -> str:
    """Describe the positions before every text, as `2 soft tokens and 3 places of features`; empty if none."""
    soft_tokens = getattr(model, "soft_tokens", 0)
    projector = getattr(model, "features_before", None)
    feature_places = 0 if projector is None else projector.places
    counts = [(soft_tokens - feature_places, "soft token", ""), (feature_places, "place", " of features")]
    return " and ".join(f"{n} {noun}{'s' if n > 1 else ''}{suffix}" for n, noun, suffix in counts if n)


@dataclass(frozen=True)
class ModelParts:
    """Parts of a model, as modules.

    causal: backbone with its head, without the PEFT wrapper.
    base: backbone without its head; `causal` itself if the family has no such module.
    """

    causal: Any
    base: Any
    stacks: tuple[BlockStack, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelParts:
        """Find the parts of a model, with or without a PEFT wrapper. Raises UserError: its family is not supported."""
        causal = unwrap_peft(model)
        return cls(causal, getattr(causal, causal.base_model_prefix, causal), block_stacks(causal.config.model_type))

    @property
    def blocks(self) -> list[nn.Module]:
        """All blocks in order; the encoder's before the decoder's."""
        return [block for stack in self.stacks for block in self.run(stack)]

    def run(self, stack: BlockStack) -> nn.ModuleList:
        """Return the blocks of one stack."""
        return self.base.get_submodule(stack.blocks)

    @property
    def head(self) -> list[str]:
        """Names of `causal`'s children with parameters after the blocks."""
        own = {name.split(".")[0] for stack in self.stacks for name in (stack.blocks, *stack.first, *stack.last)}
        before = {*own, "shared"} if self.base is self.causal else {self.causal.base_model_prefix}
        children = self.causal.named_children()
        return [name for name, child in children if name not in before and next(child.parameters(), None) is not None]

    @property
    def width(self) -> int:
        """Hidden size D."""
        return int(self.causal.config.hidden_size)


NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Names of the cache argument of a block or a model, across versions of transformers."""


@functools.cache
def cache_name() -> str:
    """Return the name of a model's cache argument in the installed transformers, also the field of its output."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    fields = CausalLMOutputWithPast.__dataclass_fields__
    return next(name for name in NAMES if name in fields)


def output_cache(output: Any) -> Any:
    """Return the cache from the output of a model called with `use_cache=True`."""
    return getattr(output, cache_name())


def cache_argument(cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes the cache to the model."""
    return {cache_name(): cache}
