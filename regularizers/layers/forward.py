"""Temporary replacement of a layer's forward during a step, and a term added to a layer's outputs.

`flatshift.regularizers.layers.fused` handles GGPO's frozen noise; the added term is for methods whose term is learned
(Bi-LoRA) or as large as the weight (SAM over it). The frozen weight is neither read nor written, so it may be
quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import RegularizerError
from flatshift.regularizers.layers.sites import LoraSite, check_linear_layers, find_lora_sites
from flatshift.regularizers.mesh import Placement

Forward = Callable[..., Tensor]
Term = Callable[[Tensor, Tensor], Tensor]
"""Function (output y (..., m), input x (..., n) before any dropout) → new output."""


class ForwardWithTerm:
    """A layer's forward followed by a term."""

    def __init__(self, swap: ForwardSwap, term: Term) -> None:
        self.swap, self.term = swap, term
        self.own = swap.begin()
        """The previous forward; `flatshift.regularizers.layers.fused` may substitute an equivalent one."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.own(x, *args, **kwargs)
        return self.term(y, x) if self.swap.applies() else y


class ForwardSwap:
    """Saves a layer's forward while another replaces it, and restores it without a trace."""

    def __init__(self, site: LoraSite) -> None:
        self.site = site
        self.plain: Forward | None = None
        """The layer's own forward; None while nothing is replaced."""
        self.patched: Forward | None = None
        """Forward that an earlier patch had set on the layer itself; None for the forward of its class."""
        self.adapters: list[str] = []
        """Active adapters when the forward was replaced."""

    def begin(self) -> Forward:
        """Save the layer's forward and return it; `put` may follow. Raises RegularizerError if the adapter is merged
        into the backbone."""
        if getattr(self.site.layer, "merged", False):
            raise RegularizerError(
                f"the adapter of layer {self.site.name} is merged into the backbone; call model.unmerge_adapter() "
                "before training"
            )
        self.patched = vars(self.site.layer).get("forward")
        self.adapters = list(self.site.layer.active_adapters)
        self.plain = plain = self.site.layer.forward
        return plain

    def applies(self) -> bool:
        """True unless the adapters are disabled, or switched to others (a reference) since the forward was replaced."""
        return not self.site.layer.disable_adapters and list(self.site.layer.active_adapters) == self.adapters

    def put(self, forward: Forward) -> None:
        """Make the layer compute `forward` from now on."""
        self.site.layer.forward = forward

    def add_term(self, term: Term) -> None:
        """Pass the layer's output through `term` from now on where it `applies`. Raises RegularizerError as `begin`."""
        self.put(ForwardWithTerm(self, term))

    def restore(self) -> None:
        """Restore the saved forward; no-op if nothing is replaced."""
        if self.plain is None:
            return
        if self.patched is None:
            del self.site.layer.forward
        else:
            self.site.layer.forward = self.patched
        self.plain = self.patched = None


def find_whole_layers(model: nn.Module, placement: Placement, method: str) -> list[ForwardSwap]:
    """Return the linear LoRA layers of `model`; warn about LoRA layers of other kinds, which stay unchanged.

    Raises RegularizerError, naming `method`, if there is none, or on a mesh whose processes hold parts of the layers,
    or different layers. Collective.
    """
    ranks = torch.ones(2, device=placement.device)
    placement.sum_tensor(ranks[0])
    placement.sum_pipeline(ranks[1])
    for axis, width in zip(("tp", "pp"), ranks.tolist(), strict=True):
        if width > 1:
            raise RegularizerError(
                f"mesh.{axis}: {method} needs whole layers in every process; take another axis for this mesh, or a "
                "method of adapter space (regularizer.kind: lora-sam)"
            )
    sites, others = find_lora_sites(model, placement)
    check_linear_layers(len(sites), others, method, "works on")
    return [ForwardSwap(site) for site in sites]
