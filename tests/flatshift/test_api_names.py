"""Every name that a room promises is there when it is asked for."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("room", ["", ".finetune", ".selection", ".regularizers", ".regularizers.sharpness"])
def test_every_public_name_leads_somewhere(room: str) -> None:
    module = importlib.import_module(f"flatshift{room}")
    assert module.__all__ and all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nobody'"):
        _ = module.nobody
