"""Files shipped with the code: small pretrained backbones, sample pools and target data to try everything on.

Maps names to paths; reads no file and imports nothing heavy.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from .errors import UserError

_HERE = Path(__file__).resolve().parent
_BACKBONES = _HERE / "backbones"
_SAMPLES = _HERE / "samples"
_SAMPLE_SUFFIX = ".jsonl.xz"
SOURCE_ONLY = ("flatshift-encoder-3m", "flatshift-t5-3m")  # backbones that an installed package lacks, for its size
_TEXTS = (".json", ".txt", ".model", ".spm", ".codes", ".jinja", ".tiktoken")


def list_backbones() -> list[str]:
    """Names of the shipped backbones, sorted."""
    return sorted(config.parent.name for config in _BACKBONES.glob("*/config.json"))


def backbone_directory(name: str) -> Path | None:
    """Return the directory of the shipped backbone `name`; None for a hub name or a user's directory."""
    return _BACKBONES / name if name in list_backbones() else None


def non_weight_files(directory: Path) -> list[Path]:
    """Return a backbone's files other than weights: configuration, tokenizer and chat templates."""
    files = sorted([*directory.iterdir(), *directory.glob("additional_chat_templates/*")])
    return [file for file in files if file.is_file() and file.suffix in _TEXTS]


def list_samples() -> list[str]:
    """Return the shipped samples, sorted: `pool`, and `TARGET/train`, `TARGET/dev`, `TARGET/test` per target."""
    files = _SAMPLES.rglob(f"*{_SAMPLE_SUFFIX}")
    return sorted(file.relative_to(_SAMPLES).as_posix().removesuffix(_SAMPLE_SUFFIX) for file in files)


def sample_path(name: str) -> Path:
    """Return the file of the shipped sample `name` (see `list_samples`). Raises UserError with the nearest name."""
    names = list_samples()
    if name in names:
        return _SAMPLES / f"{name}{_SAMPLE_SUFFIX}"
    hint = f"there are {', '.join(names)}"
    if splits := [candidate for candidate in names if candidate.startswith(f"{name}/")]:
        hint = f"{name!r} is a target with several files: take one of {', '.join(splits)}"
    elif nearest := difflib.get_close_matches(name, names, n=1, cutoff=0.4):
        hint = f"did you mean {nearest[0]!r}?"
    raise UserError(f"no shipped sample is called {name!r}; {hint}")


def pool_tags_path() -> Path:
    """Return the hidden tags of the shipped pool, to evaluate a selection; no selector may read them.

    .tsv.xz of `id, domain, source, licence`, in the pool's order."""
    return _SAMPLES / "pool-tags.tsv.xz"
