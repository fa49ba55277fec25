"""Statistics of the LoRA factors, computed without forming the product sBA.

The singular values of sBA are those of the core s·R_B·R_Aᵀ (at most r×r), where Aᵀ = Q_A R_A and B = Q_B R_B; in
float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatshift.regularizers.layers.sites import LoraSite, find_lora_sites, has_variant

from ...adapters.offsets import folded_offsets


@dataclass(frozen=True)
class LayerFactors:
    """Factors of one adapted linear layer: y = x (W0 + scale·BA)ᵀ; a (r, d_in), b (d_out, r).

    `scale` is α/r, or α/√r (rsLoRA); `w0_norm` is ‖W0‖_F.
    """

    name: str
    a: Tensor
    b: Tensor
    scale: float
    w0_norm: float


class AdaptedLayers:
    """Linear LoRA layers of a PEFT model; their W0 is read once, here."""

    def __init__(self, model: nn.Module) -> None:
        """Find the layers. Raises RegularizerError for a weight that cannot be read as a matrix."""
        self._sites, others = find_lora_sites(model)
        self._norms = [math.sqrt(float(site.bound(site.factors())[0].double().sum())) for site in self._sites]
        self.notes: tuple[str, ...] = tuple(_notes(model, self._sites, others))
        """A sentence on each kind of layer that is omitted, or whose metrics have another meaning."""

    def factors(self) -> list[LayerFactors]:
        """Return the current factors, detached and not copied. Layers with a disabled adapter are omitted."""
        return [
            LayerFactors(
                site.name,
                site.layer.lora_A[name].weight.detach(),
                site.layer.lora_B[name].weight.detach(),
                float(site.layer.scaling[name]),
                norm,
            )
            for site, norm in zip(self._sites, self._norms, strict=True)
            for name in site.active()
        ]


def _notes(model: nn.Module, sites: Sequence[LoraSite], others: Sequence[str]) -> Iterable[str]:
    if others:
        yield f"adapter figures leave out LoRA layers that are not linear: {', '.join(others)}"
    if any(has_variant(site.layer, name) for site in sites for name in site.active()):
        yield "sBA is the direction of DoRA, before the magnitude scales each row"
    if folded_offsets(model):
        yield (
            "W0 is each weight after what was folded into it before step 1: of PiSSA, OLoRA, CorDA and LoRA-GA less "
            "what sBA starts from, of adapter.under with the adapter beneath"
        )


def is_factor_a(name: str) -> bool:
    """Return True if a trained tensor of this name is the factor A of a linear LoRA layer."""
    return ".lora_A." in name


def is_factor_b(name: str) -> bool:
    """Return True if a trained tensor of this name is the factor B of a linear LoRA layer."""
    return ".lora_B." in name


def gradient_norms(gradients: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Return `grad.a` and `grad.b`: global norms of the gradients of all factors A, and of all B, by the parameters'
    names."""
    return {
        "grad.a": global_norm(gradient for name, gradient in gradients.items() if is_factor_a(name)),
        "grad.b": global_norm(gradient for name, gradient in gradients.items() if is_factor_b(name)),
    }


def global_norm(tensors: Iterable[Tensor]) -> float:
    """Return √Σ‖t‖², summed in float64."""
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))


def adapter_metrics(layers: Sequence[LayerFactors]) -> dict[str, float | None]:
    """Return `scale, update.ratio, balance, stable_rank, participation, effective_params` of all `layers` together.

    - scale: the s of all layers; None if they differ
    - update.ratio: ‖sBA‖_F / ‖W0‖_F over all layers
    - balance: Σ ‖A‖_F² − ‖B‖_F²
    - stable_rank, participation: means over the layers with a nonzero sBA of ‖sBA‖_F²/‖sBA‖_2² and of p = (Σσ²)²/Σσ⁴,
      σ the singular values of sBA; None if there are none
    - effective_params: Σ p (d_in + d_out − p) over the layers, the dimension of the set of matrices of rank p
    """
    scales = {layer.scale for layer in layers}
    update, backbone, balance, parameters = 0.0, 0.0, 0.0, 0.0
    stable, participation = [], []
    for layer, values in zip(layers, singular_values(layers), strict=True):
        squares = values.square()
        total = float(squares.sum())
        update += total
        backbone += layer.w0_norm**2
        balance += float(layer.a.double().square().sum() - layer.b.double().square().sum())
        if total == 0:
            continue
        directions = total**2 / float(squares.square().sum())
        stable.append(total / float(squares.max()))
        participation.append(directions)
        parameters += directions * (layer.a.shape[1] + layer.b.shape[0] - directions)
    return {
        "scale": scales.pop() if len(scales) == 1 else None,
        "update.ratio": math.sqrt(update / backbone) if backbone else None,
        "balance": balance,
        "stable_rank": _mean(stable),
        "participation": _mean(participation),
        "effective_params": parameters,
    }


def singular_values(layers: Sequence[LayerFactors]) -> list[Tensor]:
    """Return the singular values of each layer's sBA, descending, float64 (min(r, d_in, d_out),).

    NaN if a factor is not finite. Layers of one shape are decomposed together.
    """
    by_shape: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for index, layer in enumerate(layers):
        by_shape.setdefault((layer.a.shape, layer.b.shape), []).append(index)
    results: dict[int, Tensor] = {}
    for indices in by_shape.values():
        a = torch.stack([layers[index].a.double() for index in indices])
        b = torch.stack([layers[index].b.double() * layers[index].scale for index in indices])
        core = _qr_factor(b) @ _qr_factor(a.mT).mT
        values = torch.linalg.svdvals(core.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        values[~core.isfinite().all(dim=(1, 2))] = torch.nan
        results |= dict(zip(indices, values, strict=True))
    return [results[index] for index in range(len(layers))]


def _qr_factor(matrices: Tensor) -> Tensor:
    """Return R of the thin QR of each matrix (k, m, r) → (k, min(m, r), r)."""
    return torch.linalg.qr(matrices, mode="r").R


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
