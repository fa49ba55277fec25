"""Adapters on mixtures of experts: which parts get one, and in what form PEFT can hold it.

transformers keeps the experts of a block in fused parameters (E, out, in), which are no linear layers; PEFT adapts them
as parameters (`target_parameters`): an A and a B for each expert, r·E rows and columns in all. There PEFT
also renames linear layers called as experts once were (`gate_proj` of a shared expert), when an adapter is made and
when it is loaded, and would then leave them out and train the router; those too are adapted as parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from ..config import Adapter
from ..errors import UserError

_ROUTERS = ("gate", "router", "shared_expert_gate")
_RENAMED = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
_EXPERTS = re.compile(r"(^|\.)experts\.(gate_up_proj|down_proj|gate_proj|up_proj)$")


def fused_parameters(backbone: nn.Module) -> list[str]:
    """Names of the parameters (E, ·, ·) that hold the experts of a block each; empty without experts."""
    return [name for name, p in backbone.named_parameters() if p.ndim == 3 and _EXPERTS.search(name)]


def linear_names(backbone: nn.Module, names: Sequence[str], targets: str | tuple[str, ...]) -> list[str]:
    """`names` without routers.

    Raises:
        UserError: a router is named in `targets`, or nothing else is left.
    """
    routers = [name for name in names if name.rsplit(".", 1)[-1] in _ROUTERS]
    if routers and targets != "all-linear":
        raise UserError(
            f"adapter.targets: {routers[0]} decides which experts see a token and stays frozen; take "
            f"{routers[0].rsplit('.', 1)[-1]} out"
        )
    kept = [name for name in names if name not in set(routers)]
    if not kept:
        raise UserError("adapter.targets, adapter.layers and adapter.exclude leave no layer to adapt")
    return kept


def split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(modules, parameters) that PEFT is given for the linear layers `names`."""
    parameters = [name for name in names if name.rsplit(".", 1)[-1] in _RENAMED]
    return [name for name in names if name not in set(parameters)], [f"{name}.weight" for name in parameters]


def check(adapter: Adapter, parameters: Sequence[str]) -> None:
    """Raise UserError for settings that PEFT has only for linear layers where there are adapted `parameters`."""
    if not parameters:
        return
    settings = {
        "adapter.dropout": adapter.dropout > 0,
        "adapter.dora": adapter.dora,
        f"adapter.init: {adapter.init}": adapter.init != "default",
        "adapter.under": adapter.under is not None,
    }
    for name, used in settings.items():
        if used:
            raise UserError(
                f"{name} does not go with adapters on experts: {parameters[0]} is adapted as a whole tensor; set "
                "adapter.targets to the attention's layers and leave adapter.experts at null, or leave it off"
            )
