"""Tiny random backbones with adapters whose gradients are all alive, for the tests of tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

VOCABULARY = 96
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_HEADS = {"num_key_value_heads": 4, "head_dim": 8}
_WINDOW = {"sliding_window": 5, "max_position_embeddings": 64}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "initializer_factor": 0.4,
}

_DROPPED = {"residual_dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64}
_BY_THEIR_OWN_PLANS = {
    **{"granite": "Granite", "smollm3": "SmolLM3", "olmo": "Olmo", "cohere": "Cohere", "phi": "Phi"},
    **{"starcoder2": "Starcoder2", "helium": "Helium", "nemotron": "Nemotron", "arcee": "Arcee"},
    **{"seed_oss": "SeedOss", "ministral": "Ministral", "ernie4_5": "Ernie4_5"},
    **{"phi3": "Phi3", "olmo2": "Olmo2", "glm4": "Glm4", "exaone4": "Exaone4"},
}
"""Families without an entry in the table, the last ones with regions that are gathered inside or norms on heads."""

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_IDS, **_HEADS}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_IDS, **_HEADS, "tie_word_embeddings": True}),
    "llama-classify": ("LlamaForSequenceClassification", "LlamaConfig", {**_SIZES, **_IDS, **_HEADS, "num_labels": 3}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_SIZES, **_IDS, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SIZES, **_IDS, "num_key_value_heads": 4, "head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_SIZES, **_IDS, **_HEADS, **_WINDOW}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_SIZES, **_IDS, **_HEADS}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_SIZES, **_IDS, **_HEADS, **_WINDOW}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_SIZES, **_IDS, **_HEADS, **_WINDOW}),
    "llama-one-key": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_IDS, **_HEADS, "num_key_value_heads": 1}),
    "qwen2-three-keys": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_SIZES, **_IDS, "hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3},
    ),
    "llama-uneven": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_SIZES, **_IDS, **_HEADS, "vocab_size": 97, "intermediate_size": 49, "tie_word_embeddings": True},
    ),
    "gpt2-uneven": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_IDS, "attn_pdrop": 0.0, "vocab_size": 97}),
    **{
        kind: (f"{name}ForCausalLM", f"{name}Config", {**_SIZES, **_IDS, **_HEADS, **_DROPPED})
        for kind, name in _BY_THEIR_OWN_PLANS.items()
    },
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_IDS, "attn_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SIZES, **_IDS}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, **_IDS, "decoder_start_token_id": 0}),
    "t5-gated": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **_T5,
            **_IDS,
            "decoder_start_token_id": 0,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
    ),
    "bert": ("BertForSequenceClassification", "BertConfig", {**_SIZES, **_IDS, **_DRY, "num_labels": 3}),
    "bert-masked": ("BertForMaskedLM", "BertConfig", {**_SIZES, **_IDS, **_DRY}),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", {**_SIZES, **_IDS, **_DRY, "num_labels": 3}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_SIZES, **_DRY, "num_labels": 3, "image_size": 16, "patch_size": 4},
    ),
}


def backbone(kind: str, *, meta: bool = False, **overrides: Any) -> Any:
    """A random float32 `kind`, frozen; its weights are a pure function of `kind`."""
    import transformers

    model_class, config_class, settings = KINDS[kind]
    config = getattr(transformers, config_class)(**{**settings, **overrides})
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.default_generator.manual_seed(0)
        model = getattr(transformers, model_class)(config)
    if not meta:
        _enliven(model)
    return model.requires_grad_(False).eval()


def adapted(kind: str, *, meta: bool = False, rank: int = 3, **overrides: Any) -> PeftModel:
    """`backbone(kind)` with LoRA on all linear layers (and a trainable task head), A and B non-zero."""
    base = backbone(kind, meta=meta, **overrides)
    task = "SEQ_CLS" if "SequenceClassification" in KINDS[kind][0] else None
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear" if kind != "vit" else ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
        modules_to_save=["classifier"] if kind == "vit" else None,
        task_type=task,
        fan_in_fan_out=kind == "gpt2",
    )
    model = get_peft_model(base, config, low_cpu_mem_usage=meta, autocast_adapter_dtype=False)
    if not meta:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def inputs(kind: str, *, rows: int = 3, tokens: int = 8) -> dict[str, Tensor]:
    """Model keyword arguments with labels; the last row is padded."""
    generator = torch.Generator().manual_seed(2)
    if kind == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator), "labels": torch.arange(rows) % 3}
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    ids[-1, -2:], mask[-1, -2:] = 0, 0
    labels = torch.arange(rows) % 3 if "SequenceClassification" in KINDS[kind][0] else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _enliven(model: torch.nn.Module) -> None:
    """Biases and norms that transformers starts at 0 or 1 get random values; matrices grow until they matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.mul_(3.0 if parameter.std() < 0.05 else 1.0)
