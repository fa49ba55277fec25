"""Activation checkpointing: backward recomputes activations instead of storing them.

A module's `forward` is replaced on the instance by one that runs it under torch's non-reentrant checkpoint. Its own
hooks stay outside, those of its submodules inside: FSDP2 gathers a block's weights before backward recomputes it, and
the collectives within a block run again on every rank in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ..compute.dropout import recompute_factory
from ..errors import UserError
from ..models.anatomy import NAMES, attention_modules, transformer_blocks

_NO_CACHE = {"use_cache": False} | dict.fromkeys(NAMES)
_ENABLED = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}
"""Flags of the kernels that `scaled_dot_product_attention` may choose from; they apply to every device
(`flatshift.finetune.compute.numerics.attention_kernel`)."""


def checkpoint_activations(model: nn.Module, mode: Literal["none", "selective", "full"]) -> int:
    """Recompute whole blocks (full), or the attention modules in them (selective; the costly part that is cheap to
    redo, Korthikanti et al. 2205.05198); return the number of modules. Acts in training mode with gradients only.

    Raises UserError for `selective` if no block has an attention module that is recognised by its name.
    """
    if mode == "none":
        return 0
    modules = transformer_blocks(model) if mode == "full" else attention_modules(model)
    if mode == "selective" and transformer_blocks(model) and not modules:
        raise UserError(
            "train.checkpointing: selective finds no attention modules in this backbone; take full, which recomputes "
            "whole blocks"
        )
    for module in modules:
        _recompute_in_backward(module)
    return len(modules)


def _recompute_in_backward(module: nn.Module) -> None:
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        # no cache: the second run would find the keys and values that the first one stored
        kwargs |= {name: _NO_CACHE[name] for name in kwargs.keys() & _NO_CACHE.keys()}
        # torch saves the random state and the autocast of the device that it finds among the positional arguments:
        # attention gets keyword arguments only, so on CUDA its dropout would differ in backward
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in kwargs.items() if name not in tensors}

        def run(*positional: Any) -> Any:
            named = dict(zip(tensors, positional[len(args) :], strict=True))
            return plain(*positional[: len(args)], **named, **others)

        # backward runs outside of the current contexts: torch restores autocast, but not the attention kernels
        kernels = [kernel for kernel, enabled in _ENABLED.items() if enabled()]
        context = partial(_checkpoint_contexts, kernels, recompute_factory())
        return checkpoint(run, *args, *tensors.values(), use_reentrant=False, context_fn=context)

    module.forward = forward


def _checkpoint_contexts(
    kernels: list[SDPBackend], dropout: Callable[[], AbstractContextManager[Any]] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the first run and of the recomputation: the same attention kernels, the same dropout
    masks."""
    factories: list[Callable[[], AbstractContextManager[Any]]] = [] if dropout is None else [dropout]
    if len(kernels) < len(_ENABLED):
        factories.append(partial(sdpa_kernel, kernels))
    return nullcontext(), _ReenterableContext(factories) if factories else nullcontext()


class _ReenterableContext(AbstractContextManager[None]):
    """Re-enterable wrapper around single-use context managers: backward may go through the same graph several times."""

    def __init__(self, factories: list[Callable[[], AbstractContextManager[Any]]]) -> None:
        self._factories = factories
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._factories:
                stack.enter_context(make())
            self._stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._stacks.pop().__exit__(*error)
