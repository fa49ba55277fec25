"""The parts of a run directory: recipe, finished parts and initial adapter; checks before it is read or resumed."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flatshift.experiments.data.splits import PreparedData, read_label_record
from flatshift.experiments.recipe import list_input_files, resume_recipe
from flatshift.experiments.recipe.auto import resolve_device_precision
from flatshift.experiments.recipe.schema import Recipe, warm_up_task
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.finetune.adapters.adapter import WEIGHTS, attach_on_meta, lora_only, read_adapter
from flatshift.finetune.adapters.initial_values import Calibration, InitialAdapter, calibration_rows
from flatshift.finetune.adapters.saved import SavedAdapter, check_same_settings
from flatshift.finetune.atomic import atomic_directory, read_json_object
from flatshift.finetune.compute.cuda_status import resolve_device
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Adapter, Mesh
from flatshift.finetune.data.files import expand_files, file_digest, has_named
from flatshift.finetune.data.formats import SAMPLE
from flatshift.finetune.digests import DONE, FILES, adapter_digest, check_files, file_digests
from flatshift.finetune.errors import Interrupted, OutOfMemory, UserError
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.run_directory import METRICS, check_replaceable, read_metrics, resume_command
from flatshift.finetune.seeds import numpy_generator
from flatshift.finetune.tasks import Task
from flatshift.finetune.train.checkpointer import read_checkpoint

WARM_UP, FINE_TUNE = "warm-up", "fine-tune"
INITIAL = "initial"
"""Folder of a run with the initial values of its adapter, if they are more than a random draw, as a PEFT adapter: the
values before step 1, and the change of the frozen weights. A resumed run and later stages read it, so they need neither
the calibration rows nor the other adapter again."""
_RECORDED_SUFFIXES = {".json", ".jsonl", ".yaml", ".txt", ".tsv", ".parquet", ".jinja"}
_WRITTEN_LATER = {"log.txt", "sharpness.json", "harness.json"}  # by other commands


def is_finished(path: Path, recipe: Recipe, before: Recipe, *, with_page: bool) -> bool:
    """Return True if every part of the run exists, with as many steps and the evaluation that the recipe asks for;
    `with_page`: its page too. before: the current recipe of the run."""
    if (recipe.eval, recipe.task) != (before.eval, before.task):
        return False
    done = path / "stages" / FINE_TUNE / DONE
    if not (path / "adapter").is_dir() or not all(file.is_file() for file in (done, path / "eval.json", path / DONE)):
        return False
    page = path / "report.html"  # a page truncated before its last line is drawn again
    if with_page and not (page.is_file() and page.read_bytes().rstrip().endswith(b"</html>")):
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


def check_run(path: Path, recipe: Recipe, *, rows: bool = False) -> None:
    """Raise UserError if the files that the run's adapter depends on have changed.

    These are its recipe, the label record of its data, its backbone, and if `rows` the files of its splits, which are
    read again; the adapter is compared when it is read. For a run without a record of its files only the backbone can
    be compared; that, and a missing evaluation, is reported on stderr.
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
    if rows:
        own = list_input_files(dataclasses.replace(recipe, select=None))
        check_inputs_unchanged(path, own, "name the rows to evaluate with --data")


@contextmanager
def lock_new_output(out: Path | None) -> Iterator[None]:
    """Lock the directory `out`, which a command is to create, if it is given. Raises UserError if it is not empty, or
    cannot be replaced as a whole."""
    with nullcontext() if out is None else exclusive_lock(out):
        if out is not None:
            if out.is_symlink() or (out.exists() and any(out.iterdir() if out.is_dir() else [out])):
                kind = "a link" if out.is_symlink() else "not empty"
                raise UserError(f"--out: {out} is {kind}; name a new directory")
            check_replaceable(out)
        yield


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
        reason = "`rank` leaves prompts room for the longest label"
    elif recipe.train.best not in ("auto", "loss", "accuracy"):
        reason = f"train.best: {recipe.train.best} is chosen by it"
    else:
        return
    raise UserError(
        f"--task.{name}: the training that is left depends on it ({reason}); change it when the run has ended"
    )


def compute_run_checksums(path: Path) -> dict[str, str]:
    """Return the SHA-256 of the files of a finished run that are read again: all but logs, checkpoints and pages."""
    files = [*(path / "adapter").glob("*"), *(path / INITIAL).glob("*")]
    for folder in (path, path / "selection", *(path / "stages").glob("*/")):
        files += [f for f in folder.glob("*") if f.suffix in _RECORDED_SUFFIXES and not f.name.startswith(".")]
    return file_digests(path, [f for f in files if f.is_file() and f != path / DONE and f.name not in _WRITTEN_LATER])


def count_steps_done(path: Path) -> int:
    """Return the number of optimizer steps of the run's fine-tune so far."""
    lines = read_metrics(path / METRICS)
    steps = [line["step"] for line in lines if (line.get("stage"), line.get("split")) == (FINE_TUNE, "train")]
    return max((step for step in steps if isinstance(step, int)), default=0)


def check_steps_not_reduced(path: Path, steps: int) -> None:
    """Raise UserError for fewer steps than the run has already made."""
    done = count_steps_done(path)
    if steps < done:
        raise UserError(
            f"train.steps: {steps} is below the {done} steps that {path} has made; give at least {done}, or start a "
            "new run for fewer"
        )


def check_inputs_unchanged(path: Path, names: Sequence[str], way_out: str = "start a new run") -> None:
    """Raise UserError if a file of `names`, from the recipe of the run in `path`, has changed, came to it, or is gone.

    way_out: said in the error, besides restoring the file.
    """
    before = {entry["path"]: entry["sha256"] for entry in read_json_object(path / "manifest.json", "inputs")["inputs"]}
    there = {name if name.startswith(SAMPLE) else str(file): file for name in names for file in expand_files([name])}
    listed = [label for label in before if any(has_named(name, label) for name in names)]
    for label in dict.fromkeys([*there, *listed]):
        what = "is gone" if label not in there else "was not there" if label not in before else ""
        if not what and before[label] is not None and file_digest(there[label])[0] != before[label]:
            what = "changed"
        if what:
            since = "when" if what == "was not there" else "since"
            raise UserError(f"{label} {what} {since} the run began; restore what was there, or {way_out}")


def discard_failed_run(path: Path, console: Console, error: Exception) -> None:
    """Delete the directory of a run that failed by its settings, unless it holds a selection or metrics."""
    selection = path / "selection"
    if not selection.exists() and not (path / METRICS).exists():
        shutil.rmtree(path.resolve())  # --out may be a link to another disk
    elif (selection / "manifest.json").is_file():
        text = f"the selection is finished and kept: {selection / 'selected.jsonl'} can be other runs' data.train.files"
        if isinstance(error, OutOfMemory) or re.search(r"\bmesh\b|train\.(device|steps)", str(error)):
            text += f", and `{resume_command(path)}` continues after it, with another mesh, device or train.steps"
        console.say(text)


def remove_weights(path: Path) -> None:
    """Delete checkpoints and adapters, which only continued training needs (sweep cells keep their metrics)."""
    for name in ("state", "adapter"):
        shutil.rmtree(path / name, ignore_errors=True)
    for stage in (path / "stages").glob("*/adapter"):
        shutil.rmtree(stage, ignore_errors=True)


def has_custom_init(adapter: Adapter) -> bool:
    """Return True if the adapter's first values come from weights, data or another adapter."""
    return adapter.init != "default" or adapter.under is not None or adapter.start is not None


def check_backbone(path: Path, recipe: Recipe) -> None:
    """Raise UserError if the recipe's backbone is not the one that the run directory `path` trained on.

    Compares the fingerprint of its weights, over every byte, and the SHA-256 of its configuration and tokenizer
    (`flatshift.finetune.models.fingerprint`). Values that the run did not record are not checked.
    """
    file = path / "manifest.json"
    recorded = read_json_object(file).get("backbone") if file.is_file() else None
    if not isinstance(recorded, dict):
        return
    backbone = open_backbone(recipe.backbone)
    files, present = recorded.get("files"), backbone.text_digests
    if isinstance(files, dict) and present != files:
        name = min(name for name in files.keys() | present.keys() if files.get(name) != present.get(name))
        change = "is gone" if name not in present else "is new" if name not in files else "is another one"
        raise UserError(
            f"{path}: {name} of its backbone {recipe.backbone!r} {change} since the run was trained; restore the "
            "files as they were, or train again"
        )
    before = recorded.get("fingerprint")
    if before is not None and (now := backbone.fingerprint) != before:
        raise UserError(
            f"{path}: its backbone {recipe.backbone!r} has other weights than the run trained on (fingerprint "
            f"{now[:12]}…, then {before[:12]}…); restore them, or train again"
        )


def check_start_adapters(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Check the adapters that the run starts from; returns their record for manifest.json: setting → `path` and
    `sha256`. Raises UserError: `adapter.start` or `adapter.under` is no LoRA adapter, of another backbone or of other
    settings."""
    records = {}
    for setting in ("start", "under"):
        name = getattr(recipe.adapter, setting)
        if name is None:
            continue
        context = f"adapter.{setting}"
        saved = SavedAdapter.find(name, context=context)
        saved.require_backbone(open_backbone(recipe.backbone), context=context, quantization=recipe.train.quantization)
        if setting == "start":
            task: Task = recipe.task if recipe.warmup is None else warm_up_task(recipe)[0]
            skeleton = build_skeleton(recipe.backbone, task=task, label_names=("0", "1") if task.has_classes else None)
            model = attach_on_meta(skeleton, recipe.adapter, task=task, dtype=torch.float32)
            check_same_settings(saved, read_adapter(saved.path), model, context=context)
        records[setting] = {"path": str(saved.path.resolve()), "sha256": saved.digest()}
    return records


def check_adapters_unchanged(path: Path, adapters: Mapping[str, Mapping[str, str]]) -> None:
    """Raise UserError if the run directory `path` has yet to read `adapters` of its manifest and one has changed."""
    if (path / INITIAL).is_dir():
        return
    for setting, before in adapters.items():
        if SavedAdapter.find(before["path"], context=f"adapter.{setting}").digest() != before["sha256"]:
            raise UserError(f"{before['path']} changed since the run began; restore it or start a new run")


def initial_adapter(
    path: Path, recipe: Recipe, task: Task, prepared: PreparedData, tokenizer: Callable[[], Any]
) -> InitialAdapter | None:
    """Return `initial/` of the run directory `path`, or calibration rows, the training rows that `adapter.init` needs,
    drawn by `train.seed` (none for most methods); None if the first values are random."""
    if not has_custom_init(recipe.adapter) or recipe.adapter.start is not None:
        return None
    if (path / INITIAL).is_dir():
        return InitialAdapter(folder=path / INITIAL)
    order = numpy_generator(recipe.train.seed, "init-rows").permutation(len(prepared.train))
    rows = [prepared.train[int(i)] for i in order[: calibration_rows(recipe.adapter)]]
    pad, size = int(tokenizer().pad_token_id), recipe.train.batch_size
    precision = functools.partial(autocast, recipe.train, resolve_device(recipe.train.device))
    return InitialAdapter(rows=Calibration(rows=rows, task=task, pad_id=pad, batch_size=size, precision=precision))


def save_initial_adapter(path: Path, recipe: Recipe, engine: Engine, log: Callable[[str], None]) -> None:
    """Store the adapter's initial values in `path`/initial; an adapter to start from is copied. Collective.

    Heads and other whole modules of `adapter.start` are loaded too if the task has them in the same shape, and the same
    classes.
    """
    directory = path / INITIAL
    if recipe.adapter.start is None:
        if has_custom_init(recipe.adapter) and not directory.is_dir():
            engine.save_adapter(directory)
        return
    if engine.is_main and not directory.is_dir():
        check_start_adapters(recipe)
        saved = SavedAdapter.find(recipe.adapter.start, context="adapter.start")
        with atomic_directory(directory) as temporary:
            shutil.copy2(saved.path / "adapter_config.json", temporary / "adapter_config.json")
            if recipe.task.has_classes and saved.classes not in (None, read_label_record(recipe, path)[0]):
                save_file(lora_only(load_file(saved.path / WEIGHTS)), temporary / WEIGHTS)
                log(f"the head of {recipe.adapter.start} has other classes, or in another order, and stays behind")
            else:
                shutil.copy2(saved.path / WEIGHTS, temporary / WEIGHTS)
    engine.world.wait()
    tensors = read_adapter(directory)
    heads = sorted(tensors.keys() - lora_only(tensors).keys())
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.full_tensors(engine.parameters).items()}
    fits = bool(heads) and all(shapes.get(name) == tuple(tensors[name].shape) for name in heads)
    fits = fits and all(".lora_" in name or name in tensors for name in shapes)
    reason = "does not fit this task"
    if fits and recipe.task.standardise:
        fits, reason = False, "answers in the units of its own targets"  # training uses standardised targets
    engine.load_adapter(directory, partial=not fits)
    note = "" if fits or not heads else f"; its {heads[0]} {reason} and stays behind"
    log(f"begins with the adapter of {recipe.adapter.start}{note}")


def answers_in_text(task: Task) -> bool:
    """Return True if the prediction for a row is generated text."""
    traits = task.traits
    return traits.is_generative and not (traits.reads_documents or traits.is_answer_level) and task.score != "rank"


def check_generative(task: Task) -> None:
    """Raise UserError unless the models of `task` continue a prompt."""
    if not task.traits.is_generative:
        raise UserError(
            f"task.kind: {task.kind} trains a model that writes no text, so there is nothing to generate; evaluate it "
            "on rows of yours with `flatshift eval RUN_DIR --data FILE`"
        )


def read_finished_recipe(path: Path, overrides: Sequence[Branch] = (), *, other_rows: bool = False) -> Recipe:
    """Return the recipe of a run that has an adapter, unchanged since it ended; raises UserError otherwise. Arguments
    as of `resume_recipe`."""
    recipe = read_adapted_recipe(path, overrides, other_rows=other_rows)
    check_run(path, recipe)
    return recipe


def read_adapted_recipe(path: Path, overrides: Sequence[Branch] = (), *, other_rows: bool = False) -> Recipe:
    """Return the recipe of a run that has an adapter, without a comparison of its files; raises UserError without an
    adapter. Arguments as of `resume_recipe`."""
    recipe = resolve_device_precision(resume_recipe(path, overrides, other_rows=other_rows).recipe)
    if (path / "scores.parquet").is_file():
        command = shlex.join(["flatshift", "train", "warmup", "--select.from", str(path)])
        raise UserError(f"{path} is a selection and has no adapter; `{command}` trains one")
    if not (path / "adapter").is_dir():
        raise UserError(f"{path} has no adapter yet; finish it with `{resume_command(path)}`")
    return recipe


def to_single_process(recipe: Recipe) -> Recipe:
    """Return the recipe for one process."""
    return dataclasses.replace(recipe, mesh=Mesh())
