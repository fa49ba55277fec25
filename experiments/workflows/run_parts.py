"""The parts of a run directory: finished parts, clean-up of a failed run, checks before a resume."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.initial_adapter import INITIAL, check_adapters_unchanged, check_backbone
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.digests import DONE, FILES, adapter_digest, check_files, file_digests
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.run_directory import METRICS, read_metrics, resume_command
from flatshift.finetune.train.checkpointer import read_checkpoint

WARM_UP, FINE_TUNE = "warm-up", "fine-tune"
_LAST = (FINE_TUNE, "train")
_PAGE = "report.html"
_KEPT = {".json", ".jsonl", ".yaml", ".txt", ".tsv", ".parquet", ".jinja"}
_ANEW = {"log.txt", "sharpness.json", "harness.json"}
"""Files that later commands write."""


def is_finished(path: Path, recipe: Recipe, before: Recipe, *, drawn: bool) -> bool:
    """Return True if every part of the run exists, with as many steps and the evaluation that the recipe asks for;
    `drawn`: its page too. before: the current recipe of the run."""
    if (recipe.eval, recipe.task) != (before.eval, before.task):
        return False
    done = path / "stages" / FINE_TUNE / DONE
    if not (done.is_file() and (path / "adapter").is_dir()):
        return False
    if not all((path / name).is_file() for name in ("eval.json", DONE)) or (
        drawn and not _is_complete_page(path / _PAGE)
    ):
        return False
    return bool(read_json_object(done, "target_steps")["target_steps"] == recipe.train.steps)


def awaits_evaluation(path: Path, recipe: Recipe) -> bool:
    """Return True if only the evaluation is missing: the fine-tune has made all its steps, and the run's adapter is its
    result.

    If a head was folded back into the units of the targets (`task.standardise`), its weights differ on purpose.
    """
    done, adapter = path / "stages" / FINE_TUNE / DONE, path / "adapter"
    if not (done.is_file() and adapter.is_dir()) or (path / "eval.json").exists():
        return False
    record = read_json_object(done, "target_steps", FILES)
    same = recipe.task.standardise or record[FILES].get("adapter/adapter_model.safetensors") == adapter_digest(path)
    return bool(record["target_steps"] == recipe.train.steps and same)


def check_run(path: Path, recipe: Recipe) -> None:
    """Raise UserError if the files that the run's adapter depends on have changed.

    These are its recipe, the label record of its data, and its backbone; the adapter is compared when it is read. For a
    run without a record of its files only the backbone can be compared; that, and a missing evaluation, is reported on
    stderr.
    """
    if not (path / DONE).is_file():
        if awaits_evaluation(path, recipe):
            note = f"note: {path} is trained, and its evaluation is not finished: `{resume_command(path)}` does it"
        else:
            note = (
                f"{path} has no {DONE}: it is unfinished or that file was removed, so nothing shows whether its other "
                f"files are as it left them; `{resume_command(path)}` finishes it"
            )
        Console().say(note)
    check_files(path, lambda name: "/" not in name or name.endswith(f"/{DONE}"))
    check_backbone(path, recipe)


@contextmanager
def with_resume_hint(path: Path) -> Iterator[None]:
    """Turn any interruption in the block into Interrupted with the command that resumes the run in `path`."""
    command = f"`{resume_command(path)}`"
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(f"finished parts are kept; {command} continues") from error
    except Interrupted as error:
        if command in str(error):
            raise
        raise Interrupted(f"{error}; {command} continues") from error


def _is_complete_page(page: Path) -> bool:
    """Return True if a page is complete to its last line; a truncated one is drawn again."""
    return page.is_file() and page.read_bytes().rstrip().endswith(b"</html>")


def check_finished(path: Path) -> None:
    """Raise UserError if a file of a finished run, or of a stage of it, has changed (`check_files`)."""
    for folder in (path, *sorted((path / "stages").glob("*/"))):
        check_files(folder)


def check_last_checkpoint(path: Path, steps: int) -> None:
    """Raise UserError if an ended run is to be trained to another `steps` and its last checkpoint is damaged.

    The steps since the checkpoint before it would be repeated with another schedule.
    """
    done = path / "stages" / FINE_TUNE / DONE
    if not done.is_file():
        return
    record = read_json_object(done, "target_steps", "steps")
    folder = path / "state" / f"step-{record['steps']}"
    if record["target_steps"] != steps and folder.is_dir() and read_checkpoint(folder) is None:
        raise UserError(
            f"{folder}/ is damaged or incomplete, and training for longer from the checkpoint before it would make "
            "other steps; restore it, or start a new run"
        )


def check_evaluation_changes(path: Path, recipe: Recipe, before: Recipe) -> None:
    """Raise UserError for changed evaluation settings that the rest of the training depends on.

    before: the current recipe of the run.
    """
    done = path / "stages" / FINE_TUNE / DONE
    if recipe.task == before.task or (done.is_file() and read_json_object(done)["target_steps"] == recipe.train.steps):
        return
    name = next(name for name, value in vars(recipe.task).items() if value != getattr(before.task, name))
    if recipe.task.figure_names != before.task.figure_names and "rank" in (recipe.task.score, before.task.score):
        why = "`rank` leaves prompts room for the longest label"
    elif recipe.train.best not in ("auto", "loss", "accuracy"):
        why = f"train.best: {recipe.train.best} is chosen by it"
    else:
        return
    raise UserError(f"--task.{name}: the training that is left depends on it ({why}); change it when the run has ended")


def compute_run_checksums(path: Path) -> dict[str, str]:
    """Return the SHA-256 of the files of a finished run that are read again: all but logs, checkpoints and pages."""
    found = [*(path / "adapter").glob("*"), *(path / INITIAL).glob("*")]
    for folder in (path, path / "selection", *(path / "stages").glob("*/")):
        found += [file for file in folder.glob("*") if file.suffix in _KEPT and not file.name.startswith(".")]
    return file_digests(
        path, [file for file in found if file.is_file() and file != path / DONE and file.name not in _ANEW]
    )


def count_steps_done(path: Path) -> int:
    """Return the number of optimizer steps of the run's fine-tune so far."""
    made = [line["step"] for line in read_metrics(path / METRICS) if (line.get("stage"), line.get("split")) == _LAST]
    return max((step for step in made if isinstance(step, int)), default=0)


def check_steps_not_reduced(path: Path, steps: int) -> None:
    """Raise UserError for fewer steps than the run has already made."""
    most = count_steps_done(path)
    if steps < most:
        raise UserError(
            f"train.steps: {steps} is below the {most} steps that {path} has made; give at least {most}, or start a "
            "new run for fewer"
        )


def list_input_files(recipe: Recipe) -> list[str]:
    """Return every input file that the recipe names, once each."""
    files = [*recipe.data.train.all_files, *recipe.data.dev.files, *recipe.data.test.files]
    if recipe.select is not None and recipe.select.from_ is not None:
        files.append(str(Path(recipe.select.from_) / "selected.jsonl"))
    elif recipe.select is not None:
        files += [*recipe.select.pool.files, *recipe.select.target.files, *recipe.select.eval.files]
        files += [*recipe.select.negative.files, *recipe.select.hygiene.drops]
    return list(dict.fromkeys(files))


def check_inputs_unchanged(path: Path) -> None:
    """Raise UserError if an input file of a resumed run has changed."""
    manifest = read_json_object(path / "manifest.json", "inputs")
    for before in manifest["inputs"]:
        (now,) = describe_files([before["path"]])
        if now["sha256"] != before["sha256"]:
            raise UserError(f"{before['path']} changed since the run began; restore it or start a new run")
    check_adapters_unchanged(path, manifest.get("adapters", {}))


def discard_failed_run(path: Path, console: Console) -> None:
    """Delete the directory of a run that failed by its settings, unless it holds a selection or metrics."""
    chosen = path / "selection"
    if not chosen.exists() and not (path / METRICS).exists():
        shutil.rmtree(path)
    elif (chosen / "manifest.json").is_file():
        console.say(
            f"the selection is finished and kept: {chosen / 'selected.jsonl'} can be the data.train.files of other "
            f"runs, and `{resume_command(path)}` continues after it, with another mesh, device or train.steps"
        )


def remove_weights(path: Path) -> None:
    """Delete checkpoints and adapters, which only continued training needs (sweep cells keep their metrics)."""
    for name in ("state", "adapter"):
        shutil.rmtree(path / name, ignore_errors=True)
    for stage in (path / "stages").glob("*/adapter"):
        shutil.rmtree(stage, ignore_errors=True)
