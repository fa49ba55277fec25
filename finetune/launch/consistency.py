"""Consistency check over all ranks: one recipe, one seed, one source tree, one set of versions.

Ranks that differ would train the wrong thing, or hang in collectives that do not match. Each rank's facts are a flat
mapping of names to texts; digests are compared first, and the texts only if these differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import make_directory
from ..errors import UserError
from .job import JOIN_SECONDS, RankTimeout, is_multi_rank, rank, read_cause, require_board

if TYPE_CHECKING:
    from ..parallel.mesh import ProcessMesh

_ROOMS = ("", "experiments", "finetune", "selection", "regularizers")
_ATTEMPTS = 100
_LIBRARIES = ("torch", "transformers", "peft", "safetensors")


def collect_job_facts(recipe: Any, **facts: str) -> dict[str, str]:
    """Return the facts to compare: every key of `recipe` (a dataclass), the source tree's digest, library versions, and
    `facts`."""
    settings = {key: str(value) for key, value in flatten_settings(dataclasses.asdict(recipe)).items()}
    versions = {f"the version of {library}": importlib.metadata.version(library) for library in _LIBRARIES}
    return {**settings, "the source of flatshift": source_digest(), **versions, **facts}


def check_ranks_agree(world: ProcessMesh, facts: Mapping[str, str]) -> None:
    """Compare `facts` over all ranks. Collective. Raises UserError: they differ; the same sentence on every rank, with
    the first difference from rank 0."""
    import torch
    import torch.distributed as dist

    if world.size == 1:
        return
    text = json.dumps(facts, sort_keys=True)
    own = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8).to(world.device)
    digests = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(digests, own)
    different = [r for r, digest in enumerate(digests) if not torch.equal(digest, digests[0])]
    if not different:
        return
    texts: list[Any] = [None] * world.size
    dist.all_gather_object(texts, facts)
    main, differing = texts[0], texts[different[0]]
    key = min(key for key in main.keys() | differing.keys() if main.get(key) != differing.get(key))
    more = f" ({len(different) - 1} more ranks differ too)" if len(different) > 1 else ""
    raise UserError(
        f"rank {different[0]} runs {key}: {differing.get(key)}, rank 0 {key}: {main.get(key)}{more}; start every rank "
        "with the same recipe, flags and installation"
    )


def broadcast_from_main(name: str, text: str) -> str:
    """Return rank 0's `text` on every rank of the job, before any process group exists; `text` itself in a single
    process. Raises UserError: rank 0 did not provide it in time."""
    if not is_multi_rank():
        return text
    board = require_board()
    try:
        if rank() == 0:
            board.put(name, text)
            return text
        deadline = time.monotonic() + JOIN_SECONDS
        while time.monotonic() < deadline and read_cause(board) is None:
            received = board.get(name)
            if received is not None:
                return received
            time.sleep(0.1)
    except RankTimeout:
        pass
    raise UserError(f"rank {rank()} heard nothing from rank 0; look whether it was started")


@contextlib.contextmanager
def dated_directory(parent: str | Path, name: str) -> Iterator[Path]:
    """Create a directory `parent`/DATE-TIME-NAME, the same on every rank, and remove it on exit if it is empty.

    -2, -3, … is appended if others started in the same second.
    """
    created = _create_dated_directory(Path(parent), name) if rank() == 0 else []
    try:
        yield Path(broadcast_from_main("out", str(created[0]) if created else ""))
    finally:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _create_dated_directory(parent: Path, name: str) -> list[Path]:
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    parents: list[Path] = []
    for number in itertools.count(1):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        for _ in range(_ATTEMPTS):
            parents = [*make_directory(parent), *parents]
            try:
                path.mkdir()
            except FileNotFoundError:  # a failed command removed `parent` again
                continue
            except FileExistsError:  # another process created it first
                break
            return [path, *parents]
    raise AssertionError


def source_digest() -> str:
    """Return the SHA-256 over the path and content of every module of this distribution."""
    root = Path(__file__).parents[2]  # not resolved: in a checkout the packages are symlinks
    digest = hashlib.sha256()
    for file in sorted({file for room in _ROOMS for file in (root / room).rglob("*.py")}):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def flatten_settings(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted keys; an empty mapping has none."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        key: leaf
        for name, child in value.items()
        for key, leaf in flatten_settings(child, f"{path}.{name}" if path else str(name)).items()
    }
