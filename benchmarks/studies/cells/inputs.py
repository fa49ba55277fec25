"""Files that a study's block names: found, and digested for the keys of cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from finetune.errors import UserError


def locate(name: str, data: Path | None, where: str) -> str:
    """The file that `name` says: relative to `data` (None: the working directory), a path, or `sample:NAME`.

    where: the recipe key, for the refusal. Raises UserError if there is no such file.
    """
    from finetune.data.rows import expand

    if name.startswith(("sample:", "hub:")) or Path(name).is_absolute():
        place = name
    else:
        place = str(((data or Path()) / name).absolute())
    try:
        (found,) = expand([place])
    except UserError as error:
        hint = "; name the directory of the study's files with --data" if data is None else ""
        raise UserError(f"{where}: {error}{hint}") from None
    return place if name.startswith("hub:") else str(found)


def digest(file: str) -> list[str]:
    """SHA-256 of a data file (what `finetune.data.rows.describe` says of it)."""
    from finetune.data.rows import describe

    return [entry["sha256"] for entry in describe([file])]


def chosen(flag: str, given: Sequence[Any], known: Iterable[Any]) -> list[Any]:
    """`known` cut down to what a flag names (all where it names none). Raises UserError with the nearest."""
    from experiments.recipe.build import nearest

    known = list(known)
    for name in given:
        if name not in known:
            raise UserError(f"{flag}: the study has no {name!r}{nearest(str(name), map(str, known))}")
    return [name for name in known if not given or name in given]
