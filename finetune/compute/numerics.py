"""Casts, attention kernels, randomness and threads of a step. Independent of stages and files."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import Train
from .capabilities import capabilities

SHORT = 128
"""Longest row in tokens for which a CPU uses batched products for bf16 attention, if oneDNN computes these."""


@functools.cache
def has_bf16_matmul() -> bool:
    """Return True if oneDNN multiplies bf16 matrices here, by bf16 instructions or by AVX512 after widening.

    With AVX2 alone it falls back to torch's loop.
    """
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def without_input_casts(model: nn.Module, train: Train) -> Iterator[None]:
    """Disable PEFT's cast of each adapted layer's input to float32, which autocast would only cast down again.

    Both casts are exact, so this changes no bit and saves the copies that would be kept for the backward pass.
    """
    if train.precision in ("auto", "fp32"):
        yield
        return
    from peft.helpers import disable_input_dtype_casting

    with disable_input_dtype_casting(model):
        yield


def answer_in_float32(model: nn.Module) -> None:
    """Let the trained layers with one output, a regression's head, compute in float32 under autocast too.

    In the targets' own units their output may be thousands, where bf16 has steps of 8.
    """

    def compute(layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        with torch.autocast(output.device.type, enabled=False):
            bias = None if layer.bias is None else layer.bias.float()
            return nn.functional.linear(inputs[0].float(), layer.weight.float(), bias)

    for name, layer in model.named_modules():
        is_head = isinstance(layer, nn.Linear) and layer.out_features == 1 and ".lora_" not in name
        if is_head and layer.weight.requires_grad:
            layer.register_forward_hook(compute)


def uses_dropout(model: nn.Module) -> bool:
    """Return True if a training forward pass draws random numbers: a dropout layer, or attention dropout in the
    config, which each stage of a pipeline has."""
    layers = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())
    config = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    return layers or any(rate > 0 for _, _, rate in dropout_rates(config))


def draws_random_numbers(model: nn.Module) -> bool:
    """Return True if a training forward pass draws random numbers: it has dropout, or the source of its classes in
    transformers has noise for a router."""
    sources = {type(module).__module__ for module in model.modules()}
    return uses_dropout(model) or any(map(_source_draws, sources))


@functools.cache
def _source_draws(module: str) -> bool:
    return module.startswith("transformers.models.") and _has_draw(ast.parse(inspect.getsource(sys.modules[module])))


def _has_draw(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef) and "init" in node.name:
        return False
    draws = isinstance(node, ast.Attribute) and node.attr in _DRAWS
    return draws or any(map(_has_draw, ast.iter_child_nodes(node)))


_DRAWS = frozenset(
    [
        *("rand", "randn", "rand_like", "randn_like", "randint", "randperm", "uniform_", "normal_", "exponential_"),
        *("bernoulli", "bernoulli_", "multinomial", "gumbel_softmax"),
    ]
)


def find_generator_dropout(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the first module, with its name, whose dropout uses a generator even inside
    `flatshift.finetune.compute.dropout.DropoutPass`.

    These are channel-wise dropout and torch's own attention module; transformers' text models have neither.
    """
    for name, module in model.named_modules():
        rate = getattr(module, "dropout" if isinstance(module, nn.MultiheadAttention) else "p", 0.0)
        drops = isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention) and rate > 0
        if drops and not isinstance(module, nn.Dropout):
            return name, module
    return None


def dropout_rates(config: Any) -> Iterator[tuple[Any, str, float]]:
    """Yield (configuration, key, rate) of every dropout in `config` or a configuration nested in it."""
    for key, value in (vars(config) if config is not None else {}).items():
        if hasattr(value, "to_diff_dict"):
            yield from dropout_rates(value)
        elif "drop" in key and type(value) in (int, float):
            yield config, key, value


def attention_kernel(inputs: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Choose the `scaled_dot_product_attention` kernel for a training pass over `inputs`, model keyword arguments (B,
    T).

    torch's flash attention for CPUs calls five small matrix products for every row and head in its backward pass. In
    bf16 such a call costs more than the product itself if T is small: up to `SHORT` tokens batched products of oneDNN
    take a sixth to two thirds of the time, for more memory (`benchmarks.short_rows`). Without AVX512 they take twice as
    long instead (`benchmarks.any_machine`): there, and elsewhere, torch chooses.
    """
    widths = [
        value.shape[1] for value in inputs.values() if value.ndim > 1 and capabilities(value.device).short_products
    ]
    training = torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    if widths and max(widths) <= SHORT and training and has_bf16_matmul():
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Use `count` CPU threads inside and restore the previous number on exit; None changes nothing."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic_algorithms(train: Train, device: torch.device) -> Iterator[None]:
    """Allow only reproducible algorithms inside if `train.deterministic` is set; torch raises for an operation without
    one.

    On CUDA attention is flash or math: the backward passes of torch's other kernels add in no fixed order. cuBLAS needs
    `CUBLAS_WORKSPACE_CONFIG` before its first product (`flatshift.finetune.compute.memory`).
    """
    if not train.deterministic:
        yield
        return
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    cuda = capabilities(device).kind == "cuda"
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]) if cuda else contextlib.nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and on exit back into its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def forward_precision(device: torch.device | str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """Return autocast to `dtype` on the device; with None, a null context."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(capabilities(device).kind, dtype=dtype)
