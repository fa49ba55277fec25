"""Backbones as feature extractors for selection."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from ..compute.cuda_status import resolve_device
from ..digests import file_sha256
from ..errors import UserError, first_error_line
from .anatomy import position_limit
from .backbone import REFUSED, open_backbone, quiet_transformers
from .families import usable_positions


def hidden_state_encoder(
    name: str | Path, *, max_length: int, device: str = "auto"
) -> Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]:
    """Return `encode(texts)` → (last hidden states [B, T, D] float32, mask [B, T]) of any transformers encoder or
    decoder.

    For selection, which pools the states and never loads a model itself. Texts are truncated to `max_length` tokens, or
    to the model's maximum (with a UserWarning if that is shorter), and padded on the right. T is 0 if no text has a
    token.

    Raises UserError as `open_backbone` and `resolve_device`.
    """
    from transformers import AutoModel

    target_device = resolve_device(device)
    backbone = open_backbone(name)
    tokenizer = backbone.tokenizer
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            model = AutoModel.from_pretrained(
                backbone.directory, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
    except (*REFUSED, SafetensorError) as error:
        raise UserError(f"encoder {str(name)!r} cannot be loaded: {first_error_line(error)}") from error
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    model.requires_grad_(False).eval().to(target_device)

    # its positions, minus those its family reserves for padding; else the tokenizer's limit
    limit = position_limit(model) or usable_positions(model.config) or int(tokenizer.model_max_length)
    if limit < max_length:
        warnings.warn(
            f"encoder {str(name)!r} reads no more than {limit} tokens: texts are cut there, not at {max_length}",
            UserWarning,
            stacklevel=2,
        )
        max_length = limit

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        batch = tokenizer(
            list(texts),
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=max_length,
            return_tensors="pt",
            return_token_type_ids=False,
        ).to(target_device)
        if not batch["input_ids"].shape[1]:  # an empty batch has no states: run one token for their width
            one = torch.full((1, 1), tokenizer.pad_token_id, device=target_device)
            width = model(input_ids=one, attention_mask=torch.ones_like(one)).last_hidden_state.shape[2]
            return np.zeros((len(texts), 0, width), np.float32), np.zeros((len(texts), 0), np.int64)
        states = model(**batch).last_hidden_state
        return states.float().cpu().numpy(), batch["attention_mask"].cpu().numpy()

    return encode


def model_fingerprint(directory: str | Path) -> str:
    """Return a SHA-256 of a directory's weights, configuration and tokenizer, which determine hidden states."""
    root = Path(directory)
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        if file.is_file() and file.suffix in (".safetensors", ".json", ".txt", ".model"):
            digest.update(str(file.relative_to(root)).encode() + bytes.fromhex(file_sha256(file)))
    return digest.hexdigest()
