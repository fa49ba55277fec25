"""Length checks before training: evaluated prompts that leave no room for their answer are refused, and a warning is
given for examples beyond the positions of a rotary backbone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace

import numpy as np

from flatshift.experiments.data.holdout import Split
from flatshift.experiments.data.sources import sample_train_for_eval
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.data.columns import ColumnarExamples
from flatshift.finetune.data.example import Example
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.answers import check_prompts_fit
from flatshift.finetune.figures import format_bytes
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.families import usable_positions
from flatshift.finetune.planner.footprint import plan_evaluation, predict_footprint
from flatshift.finetune.planner.sizes import BackboneSizes
from flatshift.finetune.train.stage import positions_left

_MAX_REPEATS = 10_000  # times that one optimizer step may use each training example
_ESTIMATE_MARGIN = 4  # factor by which an estimate of activations must exceed the machine's memory to be refused


def check_answer_room(recipe: Recipe, splits: Mapping[Split, Sequence[Example]]) -> None:
    """Raise UserError for an evaluated row whose prompt leaves no room for its answer (score: generate)."""
    task = recipe.task
    if task.score != "generate":
        return
    settings = _position_settings(recipe)
    for examples in (sample_train_for_eval(recipe, splits["train"]), splits["dev"], splits["test"]):
        if examples:
            check_prompts_fit(settings, examples, task.max_new_tokens)


def check_positions(recipe: Recipe) -> None:
    """Raise UserError for a `train.max_length` above the backbone's position table.

    For architectures whose sizes are unknown, the model itself is checked later
    (`flatshift.finetune.train.stage.check_length`).
    """
    try:
        sizes = BackboneSizes.read(open_backbone(recipe.backbone).directory, recipe.adapter)
    except UserError:
        return
    if not sizes.bounded or sizes.positions is None:
        return
    length, free = recipe.train.max_length, sizes.positions - _count_prefix_positions(recipe)
    if length > free:
        raise UserError(f"train.max_length: {length} is above {positions_left(free, _position_settings(recipe))}")


def iter_position_warnings(recipe: Recipe, splits: Iterable[Sequence[Example]]) -> Iterator[str]:
    """Yield a warning if the longest example has more tokens than the positions in the backbone's config.json.

    Does not apply to learned position tables: `check_positions` already refuses a larger `train.max_length`.
    """
    limit = usable_positions(open_backbone(recipe.backbone).config)
    longest = max((find_longest_length(examples) for examples in splits), default=0)
    if limit is not None and longest + _count_prefix_positions(recipe) > limit:
        yield (
            f"the longest sample has {longest:,} tokens, and this backbone was made for {limit:,} positions "
            "(max_position_embeddings), so positions beyond are new to it; lower train.max_length to stay within"
        )


def check_memory(recipe: Recipe, train: Sequence[Example]) -> None:
    """Refuse a rank or batch that exceeds this machine's memory, and an optimizer step that repeats rows too often.

    Anything that might fit is left to the plan and to the run itself: estimates are rough. Raises UserError.
    """
    from flatshift.finetune.compute.memory import machine_memory

    settings, memory = recipe.train, machine_memory()
    update = settings.batch_size * settings.accumulate
    if update > _MAX_REPEATS * len(train):
        raise UserError(
            f"train.batch_size times train.accumulate: a step of {update:,} rows goes more than {_MAX_REPEATS:,} times "
            f"round the {len(train):,} training samples; lower one of them, or give more rows"
        )
    try:
        backbone = BackboneSizes.read(open_backbone(recipe.backbone).directory, recipe.adapter).under(recipe.task)
        read = recipe.task.traits.count_token_rows(settings)
        footprint = predict_footprint(backbone, mesh=recipe.mesh, adapter=recipe.adapter, train=read)
    except UserError:  # an architecture whose sizes are unknown
        return
    if memory is None:
        return
    if footprint.adapter > memory:
        rank = max(1, int(recipe.adapter.rank * memory / footprint.adapter))
        raise UserError(
            f"adapter.rank: at {recipe.adapter.rank:,} the factors, their gradients and moments take "
            f"{format_bytes(footprint.adapter)}, and this machine has {format_bytes(memory)}; take at most {rank:,}"
        )
    lengths = ColumnarExamples.of(train).ragged("input_ids")
    share = 1.0 if recipe.task.pack or lengths is None else float(lengths[2].mean()) / settings.max_length
    activations = footprint.activations * share
    if activations > _ESTIMATE_MARGIN * memory:
        rows = max(1, int(settings.batch_size * memory / activations))
        raise UserError(
            f"train.batch_size: {settings.batch_size:,} rows at once keep about {format_bytes(activations)} "
            f"for the backward pass, and this machine has {format_bytes(memory)}; take {rows:,} or fewer and raise "
            "train.accumulate, or lower train.max_length"
        )


def format_evaluation_plan(
    recipe: Recipe,
    splits: Mapping[Split, Sequence[Example]],
    *,
    classes: int,
    device: str,
    share: int = 1,
    seconds: float | None = None,
) -> str | None:
    """Return the memory and time of the evaluation as a sentence; None without rows or known backbone sizes.

    share: ranks that have different rows. seconds: predicted time of an optimizer step, if known.
    """
    task, train = recipe.task, recipe.train
    train_rows, cold_rows = sample_train_for_eval(recipe, splits["train"]), splits["test"] or splits["dev"]
    evaluated = {"train": train_rows, "dev": splits["dev"], "test": splits["test"]}
    evaluated["cold"] = cold_rows[: recipe.eval.cold]
    evaluated = {name: rows for name, rows in evaluated.items() if len(rows)}
    if not evaluated:
        return None
    try:
        sizes = BackboneSizes.read(open_backbone(recipe.backbone).directory, recipe.adapter)
        sizes = sizes.under(task, classes=classes or None)
    except UserError:  # an architecture whose sizes are unknown
        return None
    tokens, interval = sum(map(_count_tokens, evaluated.values())), train.evaluation_interval
    times = (train.steps - 1) // interval if interval else 0
    plan = plan_evaluation(
        sizes, task, train, batch_size=max(1, recipe.eval.batch_size // share), rows=sum(map(len, evaluated.values())),
        tokens=tokens + times * _count_tokens(splits["dev"]), longest=max(map(find_longest_length, evaluated.values())),
        classes=classes if task.score == "rank" else 0, device=device, regularizer=recipe.regularizer,
    )  # fmt: skip
    whole = task.pack or not len(splits["train"])
    mean = train.max_length if whole else _count_tokens(splits["train"]) / len(splits["train"])
    update = train.batch_size * train.accumulate * mean
    named = ", ".join(f"{name} {len(rows):,}" for name, rows in evaluated.items())
    named += f" (dev also every {interval} steps)" if times and len(splits["dev"]) else ""
    return plan.line(named, tokens=update, seconds=seconds)


def _sequence_lengths(examples: Sequence[Example]) -> list[np.ndarray]:
    """Return the tokens of every example, for each of its sequences."""
    columns = ColumnarExamples.of(examples)
    sequences = [columns.ragged(name) for name in ("input_ids", "decoder_ids", "rejected_ids")]
    return [sequence[2] for sequence in sequences if sequence is not None]


def _count_tokens(examples: Sequence[Example]) -> int:
    return sum(int(lengths.sum()) for lengths in _sequence_lengths(examples))


def _position_settings(recipe: Recipe) -> SimpleNamespace:
    """Return a stand-in for the model, with the attributes that determine its positions."""
    config, places = open_backbone(recipe.backbone).config, _count_prefix_positions(recipe)
    return SimpleNamespace(config=config, soft_tokens=places, features_before=recipe.adapter.projector)


def _count_prefix_positions(recipe: Recipe) -> int:
    """Return the number of positions before every row: soft tokens and features."""
    projector = recipe.adapter.projector
    return (recipe.adapter.soft_tokens or 0) + (0 if projector is None else projector.places)


def find_longest_length(examples: Sequence[Example]) -> int:
    """Return the tokens of the longest example, or of the longer of its two sequences; 0 without examples."""
    return max((int(lengths.max()) for lengths in _sequence_lengths(examples) if len(lengths)), default=0)
