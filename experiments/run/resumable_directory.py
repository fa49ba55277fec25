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

import yaml

from flatshift.finetune.atomic import atomic_directory, has_only_leftovers, make_directory, write_text
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.launch.consistency import flatten_settings
from flatshift.finetune.run_directory import RECIPE, check_empty, check_replaceable

_STATE, _DATA = "state", "kept"


@dataclass(frozen=True)
class ResumableWork:
    """Work in progress: `directory` for results, `state` for data that survives a kill; `continued`: it has some."""

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
    if (state / RECIPE).is_file():
        _check_same_recipe(out, recipe_yaml)
    # A kill in the first moment leaves only a state that names no recipe.
    elif not (state.is_dir() and has_only_leftovers(out, allowed=(_STATE,)) and has_only_leftovers(state)):
        check_replaceable(out)
    make_directory(state)
    write_text(state / RECIPE, recipe_yaml)
    # The same name that `atomic` gives to unfinished directories: a report written inside recognises `out` by it.
    result, data = state / f".{out.resolve().name}.00000000.tmp", state / _DATA
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    try:
        yield ResumableWork(result, data, continued=_holds_files(data))
        with atomic_directory(out.resolve()) as finished:  # --out may be a link to another disk
            for child in result.iterdir():
                child.replace(finished / child.name)
    except BaseException as error:
        if not _holds_files(data):
            shutil.rmtree(state, ignore_errors=True)
            if absent:
                with contextlib.suppress(OSError):
                    out.rmdir()
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(f"nothing was kept; {command} starts again") from None
        elif isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"what was reached is kept in {state}; {command} continues from there") from None
        raise


def _holds_files(directory: Path) -> bool:
    return any(path.is_file() and not path.name.startswith(".") for path in directory.rglob("*"))


def _check_same_recipe(out: Path, recipe_yaml: str) -> None:
    if not has_only_leftovers(out, allowed=(_STATE,)):
        check_empty(out)
    if not _holds_files(out / _STATE / _DATA):  # another command may take over: nothing is lost
        return
    texts = (out / _STATE / RECIPE).read_text(encoding="utf-8"), recipe_yaml
    before, now = (flatten_settings(yaml.safe_load(text)) for text in texts)
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        key = changed[0]
        values = [text if len(text) <= 60 else text[:59] + "…" for text in (str(before.get(key)), str(now.get(key)))]
        raise UserError(
            f"--out: {out} holds the unfinished work of another command ({key} {values[0]}, not {values[1]}); run that "
            "one again, name another directory, or delete it"
        )
