"""What ships inside the package: small pretrained backbones, and sample pools and targets to try everything on.

Nothing heavy is imported and nothing is read: a name becomes a path.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from .errors import UserError

_HERE = Path(__file__).resolve().parent
_BACKBONES = _HERE / "backbones"
_SAMPLES = _HERE / "samples"
_SAMPLE_SUFFIX = ".jsonl.xz"
_TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken")


def backbones() -> list[str]:
    """Names of the shipped backbones, sorted."""
    return sorted(config.parent.name for config in _BACKBONES.glob("*/config.json"))


def backbone(name: str) -> Path | None:
    """The directory of the shipped backbone `name`; None for any other name (a hub name or a user's directory)."""
    return _BACKBONES / name if name in backbones() else None


def beside_weights(directory: Path) -> list[Path]:
    """A backbone's files that are no weights: its configuration, tokenizer and chat templates."""
    files = sorted([*directory.iterdir(), *directory.glob("additional_chat_templates/*")])
    return [file for file in files if file.is_file() and file.suffix in _TEXTS]


def samples() -> list[str]:
    """Names of the shipped samples, sorted: `pool`, and `TARGET/train`, `TARGET/dev`, `TARGET/test` per target."""
    files = _SAMPLES.rglob(f"*{_SAMPLE_SUFFIX}")
    return sorted(file.relative_to(_SAMPLES).as_posix().removesuffix(_SAMPLE_SUFFIX) for file in files)


def sample(name: str) -> Path:
    """The file of the shipped sample `name` (see `samples`).

    Raises:
        UserError: there is no such sample; the sentence names the nearest one.
    """
    known = samples()
    if name in known:
        return _SAMPLES / f"{name}{_SAMPLE_SUFFIX}"
    splits = [candidate for candidate in known if candidate.startswith(f"{name}/")]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if splits:
        hint = f"{name!r} is a target with several files: take one of {', '.join(splits)}"
    elif nearest:
        hint = f"did you mean {nearest[0]!r}?"
    else:
        hint = f"there are {', '.join(known)}"
    raise UserError(f"no shipped sample is called {name!r}; {hint}")


def pool_tags() -> Path:
    """The hidden tags of the shipped pool: .tsv.xz of `id, domain, source, licence`, rows in the pool's order.

    They are for judging a selection afterwards; no selector may read them.
    """
    return _SAMPLES / "pool-tags.tsv.xz"
