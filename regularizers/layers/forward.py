"""A layer's forward, replaced for the time of a step and put back without a trace; and a term added to its outputs.

What `flatshift.regularizers.layers.branch` is for GGPO's frozen noise, the added term is for methods whose term is
learned (Bi-LoRA) or as large as the weight (SAM over it). The frozen weight is neither read nor written, so it may be
quantised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.errors import RegularizerError
from flatshift.regularizers.layers.sites import LoraSite, find_lora_sites, refuse_none
from flatshift.regularizers.mesh import Placement

Forward = Callable[..., Tensor]


class ForwardSwap:
    """Holds what one layer's forward was while another stands in its place."""

    def __init__(self, site: LoraSite) -> None:
        self.site = site
        self.plain: Forward | None = None
        """The layer's own forward; None while nothing is replaced."""
        self.patched: Forward | None = None
        """What an earlier patch had put on the layer itself; None for the forward of its class."""

    def begin(self) -> Forward:
        """Remember the layer's forward and return it; `put` may follow.

        Raises RegularizerError if the adapter is merged into the backbone.
        """
        if getattr(self.site.layer, "merged", False):
            raise RegularizerError(
                f"the adapter of layer {self.site.name} is merged into the backbone; call model.unmerge_adapter() "
                "before training"
            )
        self.patched = vars(self.site.layer).get("forward")
        self.plain = plain = self.site.layer.forward
        return plain

    def put(self, forward: Forward) -> None:
        """The layer computes `forward` from now on."""
        self.site.layer.forward = forward

    def restore(self) -> None:
        """Put back what was there; harmless if nothing is replaced."""
        if self.plain is None:
            return
        if self.patched is None:
            del self.site.layer.forward
        else:
            self.site.layer.forward = self.patched
        self.plain = self.patched = None


_log = logging.getLogger(__name__)

Term = Callable[[Tensor, Tensor], Tensor]
"""(output y (..., m), input x (..., n) before any dropout) → the output to hand on."""


class WithTerm:
    """A layer's forward with a term behind it."""

    def __init__(self, layer: Any, own: Forward, term: Term) -> None:
        self.layer, self.term = layer, term
        self.own = own
        """The forward that stood there before; `flatshift.regularizers.layers.fused` may put an equal one in its
        place."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.own(x, *args, **kwargs)
        return y if self.layer.disable_adapters else self.term(y, x)


class AddedTerm:
    """Puts a term behind one layer's own forward, whatever that computes, and takes it out again without a trace."""

    def __init__(self, site: LoraSite) -> None:
        self.site = site
        self._swap = ForwardSwap(site)

    def install(self, term: Term) -> None:
        """From now on the layer's output goes through `term`, except where the adapters are switched off.

        Raises RegularizerError if the adapter is merged into the backbone.
        """
        self._swap.put(WithTerm(self.site.layer, self._swap.begin(), term))

    def remove(self) -> None:
        """Restore the layer's forward; harmless if nothing is installed."""
        self._swap.restore()


def linear_sites(model: nn.Module, placement: Placement, method: str) -> list[LoraSite]:
    """The linear LoRA layers of `model`; LoRA layers of other kinds are left alone, with a warning.

    Raises RegularizerError if there is none, in the name of `method`.
    """
    sites, others = find_lora_sites(model, placement)
    refuse_none(len(sites), others, f"{method} works on")
    if others:
        _log.warning(
            "%s leaves %d LoRA layers that are not linear alone, e.g. %s: they train unperturbed",
            method,
            len(others),
            others[0],
        )
    return sites


def refuse_cut_layers(placement: Placement, method: str) -> None:
    """Raises RegularizerError on a mesh whose processes have parts of the layers, or other layers. Collective."""
    ranks = torch.ones(2, device=placement.device)
    placement.sum_tensor(ranks[0])
    placement.sum_pipeline(ranks[1])
    for axis, width in zip(("tp", "pp"), ranks.tolist(), strict=True):
        if width > 1:
            raise RegularizerError(
                f"mesh.{axis}: {method} needs whole layers in every process; take another axis for this mesh, or a "
                "method of adapter space (regularizer.kind: lora-sam)"
            )
