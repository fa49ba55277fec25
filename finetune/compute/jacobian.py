"""Per-example Jacobians of a model's outputs with respect to the weights of linear layers.

    outputs, rows = jacobian(model, parameters, micro)     # [B, C], [B, C, P]

A layer's row is Σ_t g_t ⊗ u_t of its input u and the gradient g of one output: one backward pass per output for all
examples together instead of one per example. `torch.func.vmap` over `jacrev` gives the same numbers and is the
reference in the tests, but cannot map models that branch on their masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError


def jacobian(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], inputs: Mapping[str, Tensor], *, summed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, C] and their Jacobian [B, C, P], float32, P over `parameters` in order, each flattened.

    summed: differentiate the outputs' sum divided by √C instead, [B, 1, P]: the kernel of a network with a randomly
    initialised head is nearly the same for every output (Mohamadi et al. 2023, 2206.12543).

    Raises UserError for a parameter that is not of a linear layer, or a layer that is used twice in a pass.
    """
    owners = _find_linear_layers(model, parameters)
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if layer in calls:
            raise UserError(f"a Jacobian by example needs layers that are used once; {type(layer).__name__} is shared")
        calls[layer] = (args[0].detach(), output)

    hooks = [layer.register_forward_hook(keep) for layer in {layer for layer, _ in owners.values()}]
    try:
        with torch.enable_grad():
            logits = model(**inputs).logits
    finally:
        for hook in hooks:
            hook.remove()
    outputs = logits.float()
    count = outputs.shape[1]
    targets = [outputs.sum() / count**0.5] if summed else [outputs[:, c].sum() for c in range(count)]
    ends = [output for _, output in calls.values()]
    rows = []
    for index, target in enumerate(targets):
        grads = torch.autograd.grad(target, ends, retain_graph=index + 1 < len(targets), allow_unused=True)
        by_layer = dict(zip(calls, grads, strict=True))
        rows.append(torch.cat([_parameter_gradient(*owner, calls, by_layer) for owner in owners.values()], 1))
    return outputs.detach(), torch.stack(rows, 1)


def _find_linear_layers(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[nn.Module, str]]:
    owners: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            owners |= {id(p): (module, leaf) for leaf, p in module.named_parameters(recurse=False)}
    for name, parameter in parameters.items():
        if id(parameter) not in owners:
            raise UserError(f"a Jacobian by example is of linear layers, and {name} belongs to none; leave it fixed")
    return {name: owners[id(parameter)] for name, parameter in parameters.items()}


def _parameter_gradient(
    layer: nn.Module, leaf: str, calls: Mapping[nn.Module, tuple[Tensor, Tensor]], grads: Mapping[nn.Module, Any]
) -> Tensor:
    """Return the per-example gradient of one parameter, [B, numel]."""
    input_, output = (tensor.flatten(1, -2) if tensor.ndim > 2 else tensor[:, None] for tensor in calls[layer])
    grad = grads[layer]
    grad = torch.zeros_like(output) if grad is None else grad.reshape(output.shape)
    gradient = grad.sum(1) if leaf == "bias" else torch.einsum("bto,bti->boi", grad.float(), input_.float())
    return gradient.flatten(1).float()
