"""Tiny random backbones with adapters, for the tests of `regularizers/`; made in process, nothing is downloaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from flatshift.regularizers.methods.ggpo import GGPORegularizer
from flatshift.regularizers.methods.momentum import LayerMomentumRegularizer

VOCABULARY = 48


def tiny_llama(*, dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 32, layers: int = 2) -> nn.Module:
    """Llama blocks with grouped-query attention; all projections differ in shape."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width + 16,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    return _frozen(LlamaForCausalLM, config, dtype, seed)


def tiny_gpt2(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Two GPT-2 blocks: Conv1D layers, weights stored transposed, with biases."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.1,
    )
    return _frozen(GPT2LMHeadModel, config, dtype, seed)


def _frozen(kind: Any, config: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return kind(config).to(dtype).requires_grad_(False)


def with_lora(backbone: nn.Module, *, seed: int = 0, trained: bool = True, **settings: Any) -> Any:
    """A PEFT LoRA model; `trained` fills B, so that the update sBA is of the size of W0 and not zero."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings
    dtype = next(backbone.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed + 1)
        model = get_peft_model(backbone, LoraConfig(**settings))
        if dtype == torch.float64:
            model = model.double()
        if trained:
            for name, parameter in model.named_parameters():
                if "lora_B" in name or "lora_embedding_B" in name:
                    parameter.data.normal_(0, 0.1)
    return model.train()


def tokens(rows: int = 4, length: int = 10, *, seed: int = 0) -> Tensor:
    """Random token ids (rows, length)."""
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token loss."""
    return model(input_ids=ids, labels=ids).loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of the trainable parameters."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def clear(model: nn.Module) -> None:
    """Drop all gradients."""
    for parameter in model.parameters():
        parameter.grad = None


def frozen_checksums(model: nn.Module) -> dict[str, bytes]:
    """The bytes of every tensor that must not change."""
    return {
        n: p.detach().view(torch.uint8).numpy().tobytes() for n, p in model.named_parameters() if not p.requires_grad
    }


def fitted(model: Any, ids: Tensor, target: float) -> Any:
    """Train the adapter until the loss on `ids` is below `target`."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(400):
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        if float(loss.detach()) < target:
            return model
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the tiny model stopped at {float(loss.detach()):.3f}")


def base_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """W0 of every LoRA layer by the layer's name, as stored (Conv1D: transposed)."""
    return {
        n.removesuffix(".base_layer.weight"): p for n, p in model.named_parameters() if n.endswith("base_layer.weight")
    }


def densely_perturbed(model: Any, noise: dict[str, Tensor], sign: float = 1.0) -> Any:
    """A copy of `model` whose frozen weights really are W0 ± ε: the naive reference."""
    twin = copy.deepcopy(model)
    for name, weight in base_weights(twin).items():
        epsilon = sign * noise[name].to(weight.dtype)
        stored_transposed = type(twin.get_submodule(name).base_layer).__name__ == "Conv1D"
        weight.data += epsilon.T if stored_transposed else epsilon
    return twin


def perturbations(
    regularizer: GGPORegularizer | LayerMomentumRegularizer, sample: int = 0, samples: int = 1
) -> dict[str, Tensor]:
    """Return the dense ε (m, n) of every layer, inside a step only.

    If each micro-batch has its own noise, that of the current one; if each sample has, that of sample number `sample`
    of this process's `samples`.
    """
    if isinstance(regularizer, GGPORegularizer):
        branches = [branch for group in regularizer._groups for branch in group.branches]
    else:
        branches = regularizer._branches
    noise = {}
    for branch in branches:
        if branch.noise_out is not None and branch.noise_in is not None:
            out = branch.noise_out
            if branch.signs is not None:
                out = out * branch.signs(torch.empty(samples, 1))[sample]
            noise[branch.site.name] = out @ branch.noise_in.T
    return noise
