"""Initial values of a run's adapter, if they are more than a random draw: computed once, and stored in `initial/`.

    runs/first/initial/        a PEFT adapter: the values before step 1, and the change of the frozen weights

A resumed run and later stages read it there, so they need neither the calibration rows nor the other adapter again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.experiments.data.splits import PreparedData
from flatshift.experiments.recipe.schema import Recipe, warm_up_task
from flatshift.finetune.atomic import atomic_directory, read_json_object
from flatshift.finetune.config import Adapter
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import numpy_generator
from flatshift.finetune.tasks import Task

if TYPE_CHECKING:
    from flatshift.finetune.adapters.initial_values import Calibration, InitialAdapter
    from flatshift.finetune.parallel.engine import Engine

INITIAL = "initial"


def has_custom_init(adapter: Adapter) -> bool:
    """Return True if the adapter's first values come from weights, data or another adapter."""
    return adapter.init != "default" or adapter.under is not None or adapter.start is not None


def check_backbone(path: Path, recipe: Recipe) -> None:
    """Raise UserError if the recipe's backbone is not the one that the run directory `path` trained on.

    Compares the fingerprint of its weights, over every byte, and the SHA-256 of its configuration and tokenizer
    (`flatshift.finetune.models.fingerprint`). Values that the run did not record are not checked.
    """
    from flatshift.finetune.models.backbone import open_backbone

    file = path / "manifest.json"
    noted = read_json_object(file).get("backbone") if file.is_file() else None
    if not isinstance(noted, dict):
        return
    backbone = open_backbone(recipe.backbone)
    files, found = noted.get("files"), backbone.text_digests
    if isinstance(files, dict) and found != files:
        name = min(name for name in files.keys() | found.keys() if files.get(name) != found.get(name))
        what = "is gone" if name not in found else "is new" if name not in files else "is another one"
        raise UserError(
            f"{path}: {name} of its backbone {recipe.backbone!r} {what} since the run was trained; restore the "
            "files as they were, or train again"
        )
    before = noted.get("fingerprint")
    if before is not None and (now := backbone.fingerprint) != before:
        raise UserError(
            f"{path}: its backbone {recipe.backbone!r} has other weights than the run trained on (fingerprint "
            f"{now[:12]}…, then {before[:12]}…); restore them, or train again"
        )


def check_start_adapters(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Check the adapters that the run starts from; returns their record for manifest.json: setting → `path` and
    `sha256`.

    Raises:
        UserError: `adapter.start` or `adapter.under` is no LoRA adapter, of another backbone or of other settings.
    """
    from flatshift.finetune.adapters.adapter import attach_on_meta, read_adapter
    from flatshift.finetune.adapters.saved import SavedAdapter, check_same_settings
    from flatshift.finetune.models.backbone import open_backbone
    from flatshift.finetune.models.meta import build_skeleton

    found = {}
    for setting in ("start", "under"):
        name = getattr(recipe.adapter, setting)
        if name is None:
            continue
        where = f"adapter.{setting}"
        saved = SavedAdapter.find(name, context=where)
        saved.require_backbone(open_backbone(recipe.backbone), context=where, quantization=recipe.train.quantization)
        if setting == "start":
            import torch

            task: Task = recipe.task if recipe.warmup is None else warm_up_task(recipe)[0]
            labels = tuple(str(i) for i in range(2)) if task.has_classes else None
            skeleton = build_skeleton(recipe.backbone, task=task, label_names=labels)
            model = attach_on_meta(skeleton, recipe.adapter, task=task, dtype=torch.float32)
            check_same_settings(saved, read_adapter(saved.path), model, context=where)
        found[setting] = {"path": str(saved.path.resolve()), "sha256": saved.digest()}
    return found


def check_adapters_unchanged(path: Path, adapters: Mapping[str, Mapping[str, str]]) -> None:
    """Raise UserError if the run directory `path` has yet to read `adapters` of its manifest and one has changed."""
    from flatshift.finetune.adapters.saved import SavedAdapter

    if (path / INITIAL).is_dir():
        return
    for setting, before in adapters.items():
        if SavedAdapter.find(before["path"], context=f"adapter.{setting}").digest() != before["sha256"]:
            raise UserError(f"{before['path']} changed since the run began; restore it or start a new run")


def initial_adapter(
    path: Path, recipe: Recipe, task: Task, prepared: PreparedData, tokenizer: Callable[[], Any]
) -> InitialAdapter | None:
    """Return `initial/` of the run directory `path`, or the calibration rows; None if the first values are random."""
    if not has_custom_init(recipe.adapter) or recipe.adapter.start is not None:
        return None
    from flatshift.finetune.adapters.initial_values import InitialAdapter

    if (path / INITIAL).is_dir():
        return InitialAdapter(folder=path / INITIAL)
    return InitialAdapter(rows=draw_calibration(recipe, task, prepared, tokenizer()))


def draw_calibration(recipe: Recipe, task: Task, prepared: PreparedData, tokenizer: Any) -> Calibration:
    """Return the training rows that `adapter.init` needs, drawn by `train.seed`; none for most methods."""
    import functools

    from flatshift.finetune.adapters.initial_values import Calibration, calibration_rows
    from flatshift.finetune.compute.cuda_status import resolve_device
    from flatshift.finetune.compute.precision import autocast

    count = calibration_rows(recipe.adapter)
    order = numpy_generator(recipe.train.seed, "init-rows").permutation(len(prepared.train))[:count]
    return Calibration(
        rows=[prepared.train[int(i)] for i in order],
        task=task,
        pad_id=int(tokenizer.pad_token_id),
        batch_size=recipe.train.batch_size,
        precision=functools.partial(autocast, recipe.train, resolve_device(recipe.train.device)),
    )


def save_initial_adapter(path: Path, recipe: Recipe, engine: Engine, say: Callable[[str], None]) -> None:
    """Store the adapter's initial values in `path`/initial; an adapter to start from is copied. Collective.

    Heads and other whole modules of `adapter.start` are loaded too if the task has them in the same shape.
    """
    directory = path / INITIAL
    if recipe.adapter.start is None:
        if has_custom_init(recipe.adapter) and not directory.is_dir():
            engine.save_adapter(directory)
        return
    from flatshift.finetune.adapters.adapter import lora_only, read_adapter
    from flatshift.finetune.adapters.saved import SavedAdapter

    if engine.is_main and not directory.is_dir():
        check_start_adapters(recipe)
        saved = SavedAdapter.find(recipe.adapter.start, context="adapter.start")
        with atomic_directory(directory) as temporary:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copy2(saved.path / file, temporary / file)
    engine.world.wait()
    tensors = read_adapter(directory)
    heads = sorted(tensors.keys() - lora_only(tensors).keys())
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.full_tensors(engine.parameters).items()}
    fits = bool(heads) and all(shapes.get(name) == tuple(tensors[name].shape) for name in heads)
    if fits and any(".lora_" not in name and name not in tensors for name in shapes):
        fits = False
    reason = "does not fit this task"
    if fits and recipe.task.standardise:
        fits, reason = False, "answers in the units of its own targets"  # training uses standardised targets
    engine.load_adapter(directory, partial=not fits)
    left = "" if fits or not heads else f"; its {heads[0]} {reason} and stays behind"
    say(f"begins with the adapter of {recipe.adapter.start}{left}")
