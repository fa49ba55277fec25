"""A frozen adapter beneath the one that trains (`adapter.under`), folded into the frozen weights.

The layer then computes W + s_u·B_u A_u + s·BA, of which A and B train; saved is the sum of both as one adapter of rank
r_u + r, so that it stands for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UserError
from .offsets import ADAPTER, Offset, lora_layers
from .saved import SavedAdapter

if TYPE_CHECKING:
    from peft import PeftModel


def read_under(name: str, model: PeftModel) -> dict[str, Offset]:
    """What the adapter `name` folds into each layer of `model`, without the layer's own scale, in the dtype of the
    layer's factors: as it will be saved with them.

    Raises:
        UserError: no such adapter, one of another backbone, one that is more than a sum (DoRA, a head), or layers that
            `model` does not adapt.
    """
    from ..models.backbone import resolve_backbone
    from .adapter import read_adapter

    where = "adapter.under"
    saved = SavedAdapter.find(name, where=where)
    backbone = str(model.get_base_model().name_or_path)
    saved.require_backbone(resolve_backbone(backbone), backbone, where=where)
    tensors = read_adapter(saved.path)
    if saved.settings.get("use_dora"):
        raise UserError(f"{where}: {name} is of DoRA, whose update is no sum; merge it into the backbone first")
    if whole := sorted(tensor for tensor in tensors if ".lora_" not in tensor):
        raise UserError(f"{where}: {name} also holds {whole[0]}, which is no adapter; take one without a head")
    layers, offsets = lora_layers(model), {}
    for layer, (_, scale) in saved.scales(tensors).items():
        if layer not in layers:
            raise UserError(
                f"{where}: {name} adapts {layer}, and this recipe does not; add {layer.rsplit('.', 1)[-1]} to "
                "adapter.targets"
            )
        embedded = ADAPTER in layers[layer].lora_embedding_A
        ends = ("lora_embedding_A", "lora_embedding_B") if embedded else ("lora_A.weight", "lora_B.weight")
        a, b = (tensors[f"{layer}.{end}"].float() for end in ends)
        place = layers[layer].get_base_layer().weight
        live = layers[layer].lora_embedding_A[ADAPTER] if embedded else layers[layer].lora_A[ADAPTER].weight
        if a.shape[1] != live.shape[1] or b.shape[0] not in place.shape:
            raise UserError(f"{where}: {layer} of {name} has the shape {tuple(a.shape)}, which is of another backbone")
        ratio = scale / layers[layer].scaling[ADAPTER]
        offsets[layer] = Offset(a.to(place.device, live.dtype), (ratio * b).to(place.device, live.dtype))
    return offsets
