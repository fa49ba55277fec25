"""A directory that is made whole or not at all, and whose making goes on after a kill when it is asked for again.

with unfinished(out, resolved.to_yaml()) as work:
    ...                     # write results into work.directory, what a later try needs into work.state

Until it is done, `out` holds nothing but `state/`: `recipe.resolved.yaml` (what is being made), `kept/` (what survives
a kill) and the results so far under a hidden name. At the end these take the place of `out` in one rename.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flatshift.finetune.atomic import is_bare, make_directory, replacing_directory, write_text
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.run_directory import RECIPE, refuse_nonempty, refuse_old

_STATE, _KEPT = "state", "kept"


@dataclass(frozen=True)
class ResumableWork:
    """directory: where results go. state: what is left there outlives a kill. continued: an earlier try left some."""

    directory: Path
    state: Path
    continued: bool


@contextlib.contextmanager
def unfinished(out: Path, recipe_yaml: str, *, command: str = "the same command") -> Iterator[ResumableWork]:
    """The work on `out`, which the caller owns (`flatshift.finetune.lock`), begun or gone on with. What fails before
    anything was kept leaves `out` as it was.

    recipe_yaml: names what is being made. command: what an interrupted user is told to go on with.

    Raises:
        UserError: `out` holds something else, or what another recipe's unfinished work kept.
        Interrupted: Ctrl-C or a stop signal; says whether something was kept.
    """
    state = out / _STATE
    absent = not out.exists()
    began = (state / RECIPE).is_file()
    if began:
        _refuse_others(out, recipe_yaml)
    elif not _bare(out, state):
        refuse_old(out)
    make_directory(state)
    write_text(state / RECIPE, recipe_yaml)
    # The name that `atomic` gives to directories in the making: a report written inside knows `out` by it.
    result, kept = state / f".{out.resolve().name}.00000000.tmp", state / _KEPT
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    continued = _holds_files(kept)
    try:
        yield ResumableWork(result, kept, continued)
        with replacing_directory(out.resolve()) as finished:  # a user may link --out to another disk
            for child in result.iterdir():
                child.replace(finished / child.name)
    except BaseException as error:
        if not _holds_files(kept):
            shutil.rmtree(state, ignore_errors=True)
            if absent:
                with contextlib.suppress(OSError):
                    out.rmdir()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(f"nothing was kept; {command} begins anew") from None
        elif isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"what was reached is kept in {state}; {command} goes on from there") from None
        raise


def _bare(out: Path, state: Path) -> bool:
    """Whether `out` is what a kill in the first moment leaves: a state that does not say yet of what."""
    return state.is_dir() and is_bare(out, but=(_STATE,)) and is_bare(state)


def _holds_files(directory: Path) -> bool:
    return any(path.is_file() and not path.name.startswith(".") for path in directory.rglob("*"))


def _refuse_others(out: Path, recipe_yaml: str) -> None:
    """Raise UserError if `out` holds results, or what another recipe's unfinished work kept."""
    if not is_bare(out, but=(_STATE,)):
        refuse_nonempty(out)
    if not _holds_files(out / _STATE / _KEPT):  # nothing is lost to a changed command
        return
    theirs = _flat(yaml.safe_load((out / _STATE / RECIPE).read_text(encoding="utf-8")))
    ours = _flat(yaml.safe_load(recipe_yaml))
    other = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    if other:
        key = other[0]
        raise UserError(
            f"--out: {out} holds the unfinished work of another command ({key} {_shown(theirs.get(key))}, not "
            f"{_shown(ours.get(key))}); run that one again, name another directory, or delete it"
        )


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value for name, part in tree.items() for key, value in _flat(part, f"{prefix}.{name}".lstrip(".")).items()
    }


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:59] + "…"
