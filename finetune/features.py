"""A backbone as a feature extractor, for selection."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .backbone import first_line, load_tokenizer, quiet_transformers, resolve_backbone, resolve_device
from .errors import UserError

if TYPE_CHECKING:
    import numpy as np


def hidden_state_encoder(
    name: str | Path, *, max_length: int, device: str = "auto"
) -> Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]:
    """`encode(texts)` → (last hidden states [B, T, D] float32, mask [B, T]) of any transformers encoder or decoder.

    For selection, which pools them and never loads a model itself. Texts are cut after `max_length` tokens and padded
    on the right.

    Raises:
        UserError: as `resolve_backbone` and `resolve_device`.
    """
    from transformers import AutoModel

    place = resolve_device(device)
    tokenizer = load_tokenizer(name)
    tokenizer.padding_side = "right"
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            model = AutoModel.from_pretrained(
                resolve_backbone(name), dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"encoder {str(name)!r} cannot be loaded: {first_line(error)}") from error
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    model.requires_grad_(False).eval().to(place)

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        batch = tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=max_length,
            return_tensors="pt",
            return_token_type_ids=False,
        ).to(place)
        states = model(**batch).last_hidden_state
        return states.float().cpu().numpy(), batch["attention_mask"].cpu().numpy()

    return encode


def model_fingerprint(directory: str | Path) -> str:
    """SHA-256 of a model directory's weights, configuration and tokenizer: what its hidden states depend on."""
    root = Path(directory)
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        if file.is_file() and file.suffix in (".safetensors", ".json", ".txt", ".model"):
            digest.update(str(file.relative_to(root)).encode())
            with file.open("rb") as handle:
                digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
