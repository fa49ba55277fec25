"""Fingerprints of a backbone's files, with cached digests, and a checksum of frozen weights in memory."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import torch

from ..assets import non_weight_files
from ..cache_directory import cache_root, write_cached_json
from ..digests import file_digests, record_digest
from ..machine import count_cores
from .checkpoint import TensorEntry, read_index
from .quantize import quantization_scales

_READ = (
    *("*config.json", "token*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template*", "*.model", "*.spm", "*.codes", "*.tiktoken", "*.jinja"),
)
_CHUNK = 1 << 22
_YOUNG_NS = 2_000_000_000
"""Minimum age of a file whose digests are cached: right after a change, the next may keep the timestamps."""
_known: dict[tuple[str, tuple[int, ...]], dict[str, str]] = {}
"""Digests computed by this process: (file, its state) → digest of each tensor."""


def fingerprint(directory: Path) -> str:
    """Return a SHA-256 over each tensor's name, dtype, shape and bytes, in name order.

    A fine-tuned copy of a model has a different fingerprint; the same weights split into shards have the same one.
    Digests are cached by path, size, inode and modification times of the weight file, so a file is read once.

    Raises UserError as `flatshift.finetune.models.checkpoint.read_index`.
    """
    index = read_index(directory)
    digests: dict[str, str] = {}
    for file in {entry.file for entry in index.values()}:
        entries = {name: entry for name, entry in index.items() if entry.file == file}
        digests |= _tensor_digests(Path(os.path.realpath(file)), entries)
    total = hashlib.sha256()
    for name, entry in sorted(index.items()):
        total.update(f"{name}{entry.dtype}{tuple(entry.shape)}{digests[name]}".encode())
    return total.hexdigest()


def text_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256, by name, of the files other than weights that define the model and its tokenization:
    configuration, generation settings, tokenizer and chat templates."""
    files = [file for file in non_weight_files(directory) if any(fnmatch(file.name, name) for name in _READ)]
    return file_digests(directory, files)


def _tensor_digests(file: Path, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the SHA-256 of each tensor of a weight file, from memory, from the cache or from the file."""
    state = _file_state(file)
    key = (str(file), state)
    identity = {"file": str(file), "state": list(state)}
    cache_file = cache_root() / f"weights-{hashlib.sha256(str(file).encode()).hexdigest()[:32]}.json"
    if (
        known := _known.get(key) or _read_cached_digests(cache_file, identity)
    ) is not None and known.keys() == entries.keys():
        _known[key] = known
        return known
    started = time.time_ns()
    names = sorted(entries)
    with ThreadPoolExecutor(min(8, count_cores())) as pool:  # hashing releases the GIL
        digests = dict(zip(names, pool.map(_tensor_digest, (entries[name] for name in names)), strict=True))
    # cache only if the file did not change while it was read, or shortly before
    if _file_state(file) == state and max(state[2:]) < started - _YOUNG_NS:
        _known[key] = digests
        record = {**identity, "tensors": digests}
        write_cached_json(cache_file, {**record, "self": record_digest(record)})
    return digests


def _file_state(file: Path) -> tuple[int, ...]:
    """Return size, inode, and times of last content and metadata change (ns); every write changes one of them."""
    status = file.stat()
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _tensor_digest(entry: TensorEntry) -> str:
    digest = hashlib.sha256()
    for chunk in entry.chunks(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _read_cached_digests(cache_file: Path, identity: Mapping[str, object]) -> dict[str, str] | None:
    """Return the digests in a cache file; None if it is torn, or belongs to another file or another state."""
    try:
        record = json.loads(cache_file.read_bytes())
        if record.pop("self") != record_digest(record) or {name: record[name] for name in identity} != identity:
            return None
        return {str(name): str(value) for name, value in record["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@torch.no_grad()
def checksum(model: torch.nn.Module) -> str:
    """Return a SHA-256 of all frozen parameters, buffers and scales of quantised weights, in name order."""
    digest = hashlib.sha256()
    tensors: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    tensors |= dict(model.named_buffers()) | quantization_scales(model)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
