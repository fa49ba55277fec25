"""What tells one backbone's weights from another's without reading all of them, and what shows that none changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from .parallel.index import read_index
from .quantised import scales

_SAMPLE = 4096
"""Bytes read of each tensor's beginning and of its middle."""


def fingerprint(directory: Path) -> str:
    """SHA-256 over each tensor's name, dtype and shape and 4 KiB from its beginning and its middle, in name order.

    A fine-tuned copy of a model has another one; a file cut into shards has the same.

    Raises:
        UserError: as `finetune.parallel.index.read_index`.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(read_index(directory).items()):
        digest.update(f"{name}{entry.dtype}{tuple(entry.shape)}".encode())
        with entry.file.open("rb") as stream:
            for start in (0, entry.bytes // 2):
                stream.seek(entry.offset + start)
                digest.update(stream.read(min(_SAMPLE, entry.bytes - start)))
    return digest.hexdigest()


@torch.no_grad()
def checksum(model: torch.nn.Module) -> str:
    """SHA-256 over the bytes of every parameter that does not train, of every buffer and of every scale of quantised
    weights, in name order."""
    digest = hashlib.sha256()
    tensors: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    tensors |= dict(model.named_buffers()) | scales(model)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
