"""A directory that is created completely or not at all, and whose creation resumes after a kill.

with unfinished(out, resolved.to_yaml()) as work:
    ...                     # write results into work.directory, data for a later try into work.state

Until it is done, `out` holds only `state/`: `recipe.resolved.yaml` (the recipe of the result), `kept/` (data that
survives a kill) and the results so far under a hidden name. At the end these replace `out` in one rename.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flatshift.finetune.atomic import atomic_directory, has_only_leftovers, make_directory, write_text
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.run_directory import RECIPE, check_empty, check_replaceable

_STATE, _KEPT = "state", "kept"


@dataclass(frozen=True)
class ResumableWork:
    """Directories of work in progress: `directory` for results, `state` for data that survives a kill. `continued` is
    True if an earlier try left some."""

    directory: Path
    state: Path
    continued: bool


@contextlib.contextmanager
def open_resumable(out: Path, recipe_yaml: str, *, command: str = "the same command") -> Iterator[ResumableWork]:
    """Start or resume the work on `out`, which the caller owns (`flatshift.finetune.lock`). A failure before anything
    was kept leaves `out` as it was.

    recipe_yaml: identifies the result. command: the command that an interrupted user is advised to repeat.

    Raises:
        UserError: `out` holds something else, or data kept by another recipe's unfinished work.
        Interrupted: Ctrl-C or a stop signal; the message states whether something was kept.
    """
    state = out / _STATE
    absent = not out.exists()
    began = (state / RECIPE).is_file()
    if began:
        _check_same_recipe(out, recipe_yaml)
    elif not _is_bare_state(out, state):
        check_replaceable(out)
    make_directory(state)
    write_text(state / RECIPE, recipe_yaml)
    # The same name that `atomic` gives to unfinished directories: a report written inside recognises `out` by it.
    result, kept = state / f".{out.resolve().name}.00000000.tmp", state / _KEPT
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    continued = _holds_files(kept)
    try:
        yield ResumableWork(result, kept, continued)
        with atomic_directory(out.resolve()) as finished:  # --out may be a link to another disk
            for child in result.iterdir():
                child.replace(finished / child.name)
    except BaseException as error:
        if not _holds_files(kept):
            shutil.rmtree(state, ignore_errors=True)
            if absent:
                with contextlib.suppress(OSError):
                    out.rmdir()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(f"nothing was kept; {command} starts again") from None
        elif isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"what was reached is kept in {state}; {command} continues from there") from None
        raise


def _is_bare_state(out: Path, state: Path) -> bool:
    """Return True if `out` is as a kill in the first moment leaves it: with a state that does not name its recipe
    yet."""
    return state.is_dir() and has_only_leftovers(out, allowed=(_STATE,)) and has_only_leftovers(state)


def _holds_files(directory: Path) -> bool:
    return any(path.is_file() and not path.name.startswith(".") for path in directory.rglob("*"))


def _check_same_recipe(out: Path, recipe_yaml: str) -> None:
    """Raise UserError if `out` holds results, or data kept by another recipe's unfinished work."""
    if not has_only_leftovers(out, allowed=(_STATE,)):
        check_empty(out)
    if not _holds_files(out / _STATE / _KEPT):  # another command may take over: nothing is lost
        return
    theirs = _flatten(yaml.safe_load((out / _STATE / RECIPE).read_text(encoding="utf-8")))
    ours = _flatten(yaml.safe_load(recipe_yaml))
    other = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    if other:
        key = other[0]
        raise UserError(
            f"--out: {out} holds the unfinished work of another command ({key} {_shorten_value(theirs.get(key))}, not "
            f"{_shorten_value(ours.get(key))}); run that one again, name another directory, or delete it"
        )


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value
        for name, part in tree.items()
        for key, value in _flatten(part, f"{prefix}.{name}".lstrip(".")).items()
    }


def _shorten_value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:59] + "…"
