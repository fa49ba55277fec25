"""The parts of a run directory: which are finished, what stays of a run that failed, what a resumed one must find."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.recipe.config import Recipe
from experiments.run.console import Console
from experiments.workflows.initial_adapter import INITIAL, check_unchanged
from finetune.atomic import read_object
from finetune.data.files import describe
from finetune.digests import DONE, check_files, sums
from finetune.errors import Interrupted, UserError
from finetune.run_directory import METRICS, read_metrics, resume_command
from finetune.train.checkpointer import is_valid

WARM_UP, FINE_TUNE = "warm-up", "fine-tune"
_LAST = (FINE_TUNE, "train")
_PAGE = "report.html"
_KEPT = {".json", ".jsonl", ".yaml", ".txt", ".tsv", ".parquet", ".jinja"}
_ANEW = {"log.txt", "sharpness.json", "harness.json"}
"""What later commands write."""


def is_finished(path: Path, recipe: Recipe, *, drawn: bool) -> bool:
    """Whether every part of the run is there, with as many steps as the recipe asks for; `drawn`: its page too."""
    done = path / "stages" / FINE_TUNE / DONE
    if not (done.is_file() and (path / "adapter").is_dir()):
        return False
    if not all((path / name).is_file() for name in ("eval.json", DONE)) or (drawn and not _is_whole(path / _PAGE)):
        return False
    return bool(read_object(done, "target_steps")["target_steps"] == recipe.train.steps)


@contextmanager
def saying_how_to_go_on(path: Path) -> Iterator[None]:
    """Ends an interruption inside, however it came, with the command by which the run in `path` goes on.

    Raises Interrupted for it.
    """
    command = f"`{resume_command(path)}`"
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(f"finished parts are kept; {command} goes on") from error
    except Interrupted as error:
        if command in str(error):
            raise
        raise Interrupted(f"{error}; {command} goes on") from error


def _is_whole(page: Path) -> bool:
    """Whether a page is there to its last line; one that is cut is drawn anew."""
    return page.is_file() and page.read_bytes().rstrip().endswith(b"</html>")


def check_finished(path: Path) -> None:
    """Raise UserError if a finished run, or a stage of it, is not as it was left (`check_files`)."""
    for folder in (path, *sorted((path / "stages").glob("*/"))):
        check_files(folder)


def check_going_on(path: Path, steps: int) -> None:
    """Raise UserError if a run that ended is to be trained up to another `steps`, and the checkpoint that it ended with
    is damaged: the updates since the one before would be made anew by another schedule."""
    done = path / "stages" / FINE_TUNE / DONE
    if not done.is_file():
        return
    record = read_object(done, "target_steps", "steps")
    folder = path / "state" / f"step-{record['steps']}"
    if record["target_steps"] != steps and folder.is_dir() and not is_valid(folder):
        raise UserError(
            f"{folder}/ is damaged or incomplete, and training for longer from the checkpoint before it would make "
            "other updates; restore it, or start a new run"
        )


def run_sums(path: Path) -> dict[str, str]:
    """SHA-256 of what stays of a finished run and is read again: all but logs, checkpoints and pages."""
    found = [*(path / "adapter").glob("*"), *(path / INITIAL).glob("*")]
    for folder in (path, path / "selection", *(path / "stages").glob("*/")):
        found += [file for file in folder.glob("*") if file.suffix in _KEPT and not file.name.startswith(".")]
    return sums(path, [file for file in found if file.is_file() and file != path / DONE and file.name not in _ANEW])


def refuse_fewer(path: Path, steps: int) -> None:
    """Raise UserError for fewer steps than the run has made: what it holds is of more."""
    made = [line["step"] for line in read_metrics(path / METRICS) if (line.get("stage"), line.get("split")) == _LAST]
    most = max((step for step in made if isinstance(step, int)), default=0)
    if steps < most:
        raise UserError(
            f"train.steps: {steps} is below the {most} updates that {path} has made; give at least {most}, or start a "
            "new run for fewer"
        )


def recipe_inputs(recipe: Recipe) -> list[str]:
    """Every input file that the recipe names, once each."""
    files = [*recipe.data.train.all_files, *recipe.data.dev.files, *recipe.data.test.files]
    if recipe.select is not None and recipe.select.from_ is not None:
        files.append(str(Path(recipe.select.from_) / "selected.jsonl"))
    elif recipe.select is not None:
        files += [*recipe.select.pool.files, *recipe.select.target.files, *recipe.select.eval.files]
        files += [*recipe.select.negative.files, *recipe.select.hygiene.drops]
    return list(dict.fromkeys(files))


def check_inputs(path: Path) -> None:
    """A resumed run must read what it read before."""
    manifest = read_object(path / "manifest.json", "inputs")
    for before in manifest["inputs"]:
        (now,) = describe([before["path"]])
        if now["sha256"] != before["sha256"]:
            raise UserError(f"{before['path']} changed since the run began; restore it or start a new run")
    check_unchanged(path, manifest.get("adapters", {}))


def leave(path: Path, console: Console) -> None:
    """What becomes of a run that failed by its settings: what was finished stays, else the directory goes."""
    chosen = path / "selection"
    if not chosen.exists() and not (path / METRICS).exists():
        shutil.rmtree(path)
    elif (chosen / "manifest.json").is_file():
        console.say(
            f"the selection is finished and kept: {chosen / 'selected.jsonl'} can be the data.train.files of other "
            f"runs, and `{resume_command(path)}` goes on after it, with another mesh, device or train.steps"
        )


def remove_weights(path: Path) -> None:
    """Drop what only a continued training needs: checkpoints and adapters (sweep cells keep their figures)."""
    for name in ("state", "adapter"):
        shutil.rmtree(path / name, ignore_errors=True)
    for stage in (path / "stages").glob("*/adapter"):
        shutil.rmtree(stage, ignore_errors=True)
