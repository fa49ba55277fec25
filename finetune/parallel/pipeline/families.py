"""Where a model has what a pipeline cuts: embeddings, blocks, final norm, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import UserError


@dataclass(frozen=True)
class Stack:
    """A run of blocks; names are relative to the model without its head."""

    blocks: str
    """The nn.ModuleList."""
    first: tuple[str, ...]
    """Modules before the first block that have parameters."""
    last: tuple[str, ...]
    """Modules after the last block that have parameters."""


_LLAMA = (Stack("layers", ("embed_tokens",), ("norm",)),)
_BERT = (Stack("encoder.layer", ("embeddings",), ("pooler",)),)
_FAMILIES: dict[str, tuple[Stack, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _LLAMA),
    "gpt2": (Stack("h", ("wte", "wpe"), ("ln_f",)),),
    "gpt_neox": (Stack("layers", ("embed_in",), ("final_layer_norm",)),),
    "bert": _BERT,
    "roberta": _BERT,
    "t5": (
        Stack("encoder.block", ("encoder.embed_tokens",), ("encoder.final_layer_norm",)),
        Stack("decoder.block", ("decoder.embed_tokens",), ("decoder.final_layer_norm",)),
    ),
}


def pipeline_families() -> tuple[str, ...]:
    """Model types that can be cut into stages."""
    return tuple(_FAMILIES)


@dataclass(frozen=True)
class Anatomy:
    """A model's parts, by their modules."""

    causal: Any
    """The backbone with its head, without PEFT around it."""
    base: Any
    """The backbone without its head; `causal` itself where the family has no such module."""
    stacks: tuple[Stack, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Anatomy:
        """Find the parts of a model, PEFT around it or not.

        Raises:
            UserError: its family is not known here.
        """
        causal: Any = getattr(model, "get_base_model", lambda: model)()
        kind = causal.config.model_type
        if kind not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise UserError(f"mesh.pp: {kind} models cannot be cut into pipeline stages ({known} can); use mesh.dp")
        return cls(causal, getattr(causal, causal.base_model_prefix, causal), _FAMILIES[kind])

    @property
    def blocks(self) -> list[nn.Module]:
        """All blocks in order; the encoder's before the decoder's."""
        return [block for stack in self.stacks for block in self.run(stack)]

    def run(self, stack: Stack) -> nn.ModuleList:
        """The blocks of one stack."""
        return self.base.get_submodule(stack.blocks)

    @property
    def head(self) -> list[str]:
        """Names of `causal`'s children with parameters behind the blocks."""
        own = {name.split(".")[0] for stack in self.stacks for name in (stack.blocks, *stack.first, *stack.last)}
        before = {*own, "shared"} if self.base is self.causal else {self.causal.base_model_prefix}
        children = self.causal.named_children()
        return [name for name, child in children if name not in before and next(child.parameters(), None) is not None]

    @property
    def width(self) -> int:
        """D."""
        return int(self.causal.config.hidden_size)
