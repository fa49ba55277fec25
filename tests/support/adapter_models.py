"""What tests of adapters do with a model: move it, ask it, and load it as plain PEFT does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatshift.finetune.adapters.adapter import trainable

IDS = torch.arange(3, 27).reshape(2, 12)


def move(model: Any, seed: int = 1) -> Any:
    """The model with N(0, 0.05²) added to all that trains."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)
    return model


def plain_peft(source: Path, directory: Path) -> Any:
    """The adapter of `directory` on the backbone of `source`, without us."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), directory)


def logits(model: Any, **inputs: Any) -> Tensor:
    """Logits of `IDS` in evaluation mode."""
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **inputs).logits
