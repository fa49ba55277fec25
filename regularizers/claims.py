"""Which layer serves which regularizer. Kept here, so that the model carries no mark."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from regularizers.errors import RegularizerError

_SERVED: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def claim(layers: Mapping[str, Any], owner: object) -> None:
    """Take `layers` (modules by name) for the regularizer `owner`, all or none.

    Raises RegularizerError if one of them serves another regularizer that is still attached.
    """
    for name, layer in layers.items():
        held = _SERVED.get(layer)
        if held is not None and held() is not None:
            raise RegularizerError(
                f"layer {name} serves another regularizer already; detach that one before attaching a second"
            )
    for layer in layers.values():
        _SERVED[layer] = weakref.ref(owner)


def release(owner: object) -> None:
    """Let go of all layers of `owner`; harmless if it has none."""
    for layer in [layer for layer, held in _SERVED.items() if held() is owner]:
        del _SERVED[layer]
