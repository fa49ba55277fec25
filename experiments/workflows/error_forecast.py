"""Forecast of error curves before training: the model linearised at its start, solved in closed form along rows, rank,
noise and decay.

    flatshift forecast double-descent --out forecasts/first

One forward pass and one backward pass per output over the rows give the gradient of every output with respect to the
trained parameters; the rest is least squares on that kernel. A classification is fitted as least squares on its
classes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatshift.experiments.data.splits import PreparedData, prepare_data
from flatshift.experiments.recipe import Resolved
from flatshift.experiments.recipe.resolve import describe_held_out_rows
from flatshift.experiments.recipe.rules import check_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.results.cells import FORECAST
from flatshift.experiments.results.sweep import write_cells
from flatshift.experiments.run.console import Console, Draw
from flatshift.experiments.statistics.emc import find_crossing
from flatshift.experiments.statistics.kernel import KernelFit, extrapolate, fastest_setting, kernel_fits
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.run_parts import has_custom_init, lock_new_output
from flatshift.finetune.atomic import atomic_directory, write_json, write_text
from flatshift.finetune.compute.jacobian import jacobian
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.errors import UserError
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.run_directory import RECIPE
from flatshift.finetune.seeds import derive_seed, numpy_generator

_MIN_ROWS = 10
_MAX_KERNEL = 500
"""Rows × outputs up to which every output has its own kernel; above, all share the kernel of their sum."""
_SKETCH_WIDTH = 4096
"""Width to which the gradients of a group of ranks are hashed if they are wider."""
_DECAYS = (0.0, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Ridges in units of the kernel's mean eigenvalue; 0 is training to the end."""


@dataclass(frozen=True)
class ForecastAxes:
    """Settings for which the error is forecast."""

    rows: tuple[int, ...]
    ranks: tuple[int, ...]
    noises: tuple[float, ...]
    draws: int = 5
    extra_rows: int = 500
    """Additional rows that the learning curve is extrapolated to."""


def build_axes(
    recipe: Recipe, rows: int, *, ranks: Sequence[int], noises: Sequence[float], draws: int, more: int
) -> ForecastAxes:
    """Return the axes: rows in halves down to 10, and the given ranks and noise levels, or the recipe's own."""
    counts = tuple(sorted(rows // 2**k for k in range(6) if k == 0 or rows // 2**k >= _MIN_ROWS))
    chosen_ranks = tuple(sorted(set(ranks) or {recipe.adapter.rank}))
    if chosen_ranks[0] < 1 or any(not 0 <= noise < 1 for noise in noises) or draws < 2 or more < 1:
        raise UserError(
            "forecast: ranks are at least 1, noise from 0 to below 1, --draws at least 2, --more at least 1"
        )
    return ForecastAxes(counts, chosen_ranks, tuple(sorted(set(noises) or {recipe.data.label_noise})), draws, more)


def check_linear(recipe: Recipe) -> None:
    """Raise UserError for a recipe that a linear model cannot represent."""
    task, adapter = recipe.task, recipe.adapter
    obstacles = {
        f"task.kind: {task.name} has no fixed set of outputs; take classify or regress": (
            not task.traits.is_sequence_level or task.multi
        ),
        "adapter.dora is not linear in its factors, even at its start; set adapter.dora: false": adapter.dora,
        "adapter.soft_tokens are no linear layer; leave them out for LoRA": adapter.soft_tokens is not None,
        "adapter.init, start and under begin away from B = 0; leave them out": has_custom_init(adapter),
        "mesh: a forecast is made in one process; leave every axis at 1": recipe.mesh.size > 1 or recipe.mesh.auto,
        "warmup: a forecast begins at the backbone; leave the block out": recipe.warmup is not None,
    }
    for sentence, present in obstacles.items():
        if present:
            raise UserError(f"forecast: {sentence}")


@dataclass(frozen=True)
class GradientFeatures:
    """Gradient features of rows: one block that does not depend on rank, and one for each step from a rank to the
    next."""

    blocks: list[np.ndarray]
    """Blocks of shape [N·C', k]; the first is of all parameters but the factors B."""
    outputs: np.ndarray
    """Outputs at the start, [N, C]."""

    def kernel(self, features: GradientFeatures, count: int, scale: float) -> np.ndarray:
        """Return the kernel [N·C', M·C'] with the first `count` rank blocks; `scale` is the square of the factor of
        their gradients."""
        kernel = self.blocks[0] @ features.blocks[0].T
        for rows, columns in zip(self.blocks[1 : count + 1], features.blocks[1 : count + 1], strict=True):
            kernel += scale * (rows @ columns.T)
        return kernel


class _CountSketch:
    """A count sketch [P] → [k] (Charikar et al. 2002): inner products are unbiased."""

    def __init__(self, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.index = torch.randint(_SKETCH_WIDTH, (width,), generator=generator)
        self.sign = torch.randint(2, (width,), generator=generator).float().mul_(2).sub_(1)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros(len(rows), _SKETCH_WIDTH).index_add_(1, self.index, rows * self.sign)


def compute_features(
    engine: Engine, recipe: Recipe, examples: Sequence[Any], ranks: Sequence[int], *, pad_id: int, summed: bool
) -> GradientFeatures:
    """Compute the features of `examples` in order, at the largest of `ranks`, which the adapter has; smaller ranks are
    its first columns.

    Raises UserError for a layer that is not linear, and for gradients that are not finite.
    """
    trained = {
        name: p
        for name, p in engine.parameters.items()
        if not recipe.optimizer.is_fixed(name) and ".lora_A." not in name  # B = 0: A has no gradient
    }
    if not trained:
        raise UserError("forecast: nothing that trains has a gradient at the start; leave optimizer.fixed out")
    sketches: dict[int, _CountSketch] = {}
    blocks: list[list[torch.Tensor]] = [[] for _ in range(len(ranks) + 1)]
    order: list[int] = []
    outputs: list[torch.Tensor] = []
    engine.model.eval()
    for micro in EvalBatching(16, pad_id).batches(examples, recipe.task):
        logits, rows = jacobian(engine.model, trained, micro.to(engine.device).inputs, summed=summed)
        outputs.append(logits.cpu())
        order += [row[0] for row in micro.rows]
        gradients = torch.split(rows.flatten(0, 1).cpu(), [p.numel() for p in trained.values()], 1)
        groups: list[list[torch.Tensor]] = [[] for _ in blocks]
        for (name, p), gradient in zip(trained.items(), gradients, strict=True):
            if ".lora_B." not in name:
                groups[0].append(gradient)
                continue
            columns = gradient.view(len(gradient), *p.shape)
            for number, (low, high) in enumerate(zip((0, *ranks), ranks, strict=False), start=1):
                groups[number].append(columns[:, :, low:high].flatten(1))
        for number, group in enumerate(groups):
            block = torch.cat(group, 1) if group else torch.zeros(len(gradients[0]), 1)
            if (width := block.shape[1]) > _SKETCH_WIDTH:
                if number not in sketches:
                    sketches[number] = _CountSketch(width, derive_seed(recipe.train.seed, "forecast", number))
                block = sketches[number](block)
            blocks[number].append(block.view(-1, rows.shape[1], block.shape[1]))
    in_order = torch.argsort(torch.tensor(order))
    arrays = [torch.cat(block)[in_order].flatten(0, 1).double().numpy() for block in blocks]
    if not all(np.isfinite(array).all() for array in arrays):
        raise UserError("forecast: gradients at the start are NaN or infinite; try train.precision: fp32")
    return GradientFeatures(arrays, torch.cat(outputs)[in_order].double().numpy())


def _fit_targets(labels: np.ndarray, start: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets to fit, [N, C], and the offset that a prediction is added to, [N, C]."""
    if recipe.task.traits.has_targets:
        return labels[:, None] - start, start
    classes = start.shape[1]
    hot = np.eye(classes)[labels.astype(int)]
    if recipe.task.squares:
        return hot - start, start
    return hot - 1 / classes, np.full_like(start, 1 / classes)


def _label_array(examples: Sequence[Any]) -> np.ndarray:
    return np.array([example.labels for example in examples], dtype=np.float64)


def _forecast_draw(
    recipe: Recipe, axes: ForecastAxes, prepared: PreparedData, noisy: Mapping[float, np.ndarray]
) -> list[dict[str, Any]]:
    top = max(axes.ranks)
    recipe = dataclasses.replace(recipe, adapter=dataclasses.replace(recipe.adapter, rank=top))
    engine, tokenizer = load_model(recipe, recipe.task, prepared.label_names)
    held_out = prepared.test or prepared.dev
    count = 1 if recipe.task.traits.has_targets else len(prepared.label_names or ())
    summed = len(prepared.train) * count > _MAX_KERNEL
    pad_id = int(tokenizer.pad_token_id or 0)
    train, test = (
        compute_features(engine, recipe, examples, axes.ranks, pad_id=pad_id, summed=summed)
        for examples in (prepared.train, held_out)
    )
    order = numpy_generator(recipe.train.seed, "forecast", "rows").permutation(len(prepared.train))
    test_labels, rows = _label_array(held_out), []
    test_offset = _fit_targets(test_labels, test.outputs, recipe)[1]
    outputs = 1 if summed else count
    numerator, power = recipe.adapter.numerator_of, 0.5 if recipe.adapter.rslora else 1.0
    own_decay = recipe.optimizer.weight_decay if recipe.optimizer.kind == "gauss-newton" else 0.0
    for number, rank in enumerate(axes.ranks, start=1):
        ratio = (numerator(rank) / rank**power) / (numerator(top) / top**power)
        kernel, cross = train.kernel(train, number, ratio**2), test.kernel(train, number, ratio**2)
        for n in axes.rows:
            chosen = np.sort(order[:n])
            flat = (chosen[:, None] * outputs + np.arange(outputs)).ravel()
            inner, outer = kernel[np.ix_(flat, flat)], cross[:, flat]
            unit = float(np.trace(inner)) / len(inner)
            ridges = [unit * decay for decay in _DECAYS] if not own_decay else [own_decay]
            targets = {
                noise: _fit_targets(labels[chosen], train.outputs[chosen], recipe) for noise, labels in noisy.items()
            }
            columns = [target if summed else target.reshape(-1, 1) for target, _ in targets.values()]
            # all noise levels share one eigendecomposition
            fits = kernel_fits(inner, outer, np.hstack(columns), ridges)
            end = 0
            for (noise, (_, start)), own in zip(targets.items(), columns, strict=True):
                end += own.shape[1]
                for decay, fit in zip(_DECAYS, fits, strict=False):
                    fitted = fit.columns(slice(end - own.shape[1], end))
                    row = {
                        "adapter.rank": rank, "data.train.limit": n, "data.label_noise": noise,
                        "optimizer.weight_decay": own_decay or decay, "seed": recipe.train.seed, "speed": unit,
                    }  # fmt: skip
                    rows.append(
                        row | _fit_metrics(recipe, fitted, noisy[noise][chosen], start, test_labels, test_offset)
                    )
    return rows


def _fit_metrics(
    recipe: Recipe,
    fit: KernelFit,
    labels: np.ndarray,
    offset: np.ndarray,
    test_labels: np.ndarray,
    test_offset: np.ndarray,
) -> dict[str, float]:
    """Return the metrics of a fit; offsets, [N, C]: what a prediction is added to."""
    # a column name with a dot that is not a split's would be read as an axis
    metrics: dict[str, float] = {}
    for split, predicted, split_offset, split_labels in (
        ("train.", fit.train, offset, labels),
        ("left_out_", fit.left_out, offset, labels),
        ("test.", fit.test, test_offset, test_labels),
    ):
        values, is_regression = predicted.reshape(split_offset.shape) + split_offset, recipe.task.traits.has_targets
        hot = split_labels[:, None] if is_regression else np.eye(values.shape[1])[split_labels.astype(int)]
        if not is_regression:
            metrics[f"{split}error"] = float((values.argmax(1) != split_labels).mean())
        loss = float(np.square(values - hot).sum(1).mean())
        metrics[f"{split}loss"] = loss
        if split == "train.":
            variance = float(hot.var(0).sum())
            metrics["train.unexplained"] = loss / variance if variance else math.nan
    return {**metrics, "effective": fit.effective}


def _count_train_rows(recipe: Recipe) -> int:
    """Return the number of training rows. Raises UserError if they are too few or all have the same label."""
    prepared = prepare_data(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, label_noise=0.0)))
    held_out = prepared.test or prepared.dev
    if len(prepared.train) < _MIN_ROWS or not held_out:
        raise UserError(
            f"forecast: {len(prepared.train)} training and {len(held_out)} held-out rows; it needs {_MIN_ROWS} to fit "
            "and some to evaluate: name data.test.files, or more rows"
        )
    if len(np.unique(_label_array(prepared.train))) < 2:
        raise UserError("forecast: every training row has the same label, which any model fits; name rows that differ")
    return len(prepared.train)


def draw_rows(recipe: Recipe, axes: ForecastAxes, number: int) -> list[dict[str, Any]]:
    """Return a row for every setting of one draw: its axes, `seed`, metrics of train, test and left-out rows,
    `effective`."""
    train = dataclasses.replace(recipe.train, seed=recipe.train.seed + number)
    recipes = {
        noise: dataclasses.replace(recipe, train=train, data=dataclasses.replace(recipe.data, label_noise=noise))
        for noise in {0.0, *axes.noises}
    }
    prepared = prepare_data(recipes[0.0])
    noisy = {noise: _label_array((prepare_data(recipes[noise]) if noise else prepared).train) for noise in axes.noises}
    return _forecast_draw(recipes[0.0], axes, prepared, noisy)


def forecast_rows(resolved: Resolved, axes: ForecastAxes, console: Console, out: Path) -> list[dict[str, Any]]:
    """Return the rows of every draw, computed in this process."""
    rows: list[dict[str, Any]] = []
    with console.task("forecast", axes.draws, "draws") as progress:
        for number in range(axes.draws):
            rows += draw_rows(resolved.recipe, axes, number)
            progress(number + 1)
    return rows


def forecast_into(
    resolved: Resolved,
    out: Path,
    *,
    quiet: bool = False,
    draw: Draw,
    compute: Callable[[Resolved, ForecastAxes, Console, Path], list[dict[str, Any]]] = forecast_rows,
    **axes: Any,
) -> dict[str, Any]:
    """Forecast the error of a recipe into the new directory `out`, written completely or not at all: cells.parquet (a
    row per setting and draw), points.csv, forecast.json, which is returned, and a page.

    compute: returns the rows of all draws; it may use the unfinished directory for files of its own. axes: arguments of
    `build_axes`. Raises UserError for an `out` that holds anything or cannot be replaced, a recipe that is not
    linear, too few rows, or labels that are all alike.
    """
    check_linear(resolved.recipe)
    check_recipe(resolved.recipe)
    console = Console(quiet=quiet)
    train = dataclasses.replace(resolved.recipe.train, precision="fp32")  # least squares needs all digits
    resolved = dataclasses.replace(resolved, recipe=dataclasses.replace(resolved.recipe, train=train))
    with lock_new_output(out), atomic_directory(out) as temporary:
        for line in describe_held_out_rows(resolved):
            console.say(line)
        started = time.process_time()
        chosen = build_axes(resolved.recipe, _count_train_rows(resolved.recipe), **axes)
        rows = compute(resolved, chosen, console, temporary)
        document = summarise_forecast(resolved.recipe, chosen, rows)
        document["cpu_seconds"] = round(time.process_time() - started, 2)
        write_cells(temporary, [{"cell": f"forecast-{n}", "status": "done", **row} for n, row in enumerate(rows)])
        write_json(temporary / FORECAST, document)
        write_text(temporary / RECIPE, resolved.to_yaml())
    draw(out)
    return document


def summarise_forecast(recipe: Recipe, axes: ForecastAxes, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the forecast: the error at the recipe's own setting, the effect of more rows and rank, and the
    threshold."""
    metric = "loss" if recipe.task.traits.has_targets else "error"
    decays = sorted({row["optimizer.weight_decay"] for row in rows})
    own = decays[0] if len(decays) == 1 else None  # the recipe's weight decay, not in units of the kernel
    noise = min(axes.noises, key=lambda value: abs(value - recipe.data.label_noise))
    rank = min(axes.ranks, key=lambda value: abs(value - recipe.adapter.rank))

    def by_decay(decay: float, axis: str = "data.train.limit", column: str = f"test.{metric}") -> np.ndarray:
        """Return values of shape [draws, positions]."""
        fixed = {"adapter.rank": rank, "data.train.limit": axes.rows[-1], "data.label_noise": noise}
        fixed["optimizer.weight_decay"] = decay
        del fixed[axis]
        chosen = [row for row in rows if all(row[key] == value for key, value in fixed.items())]
        cells = {(row["seed"], row[axis]): row[column] for row in chosen}
        positions = axes.rows if axis == "data.train.limit" else axes.ranks
        return np.array([[cells[seed, value] for value in positions] for seed in sorted({row["seed"] for row in rows})])

    best = min(decays, key=lambda decay: float(by_decay(decay, column=f"left_out_{metric}")[:, -1].mean()))
    more = extrapolate(axes.rows, by_decay(best), axes.extra_rows) if len(axes.rows) > 2 else None
    fitted = by_decay(decays[0], "adapter.rank", "train.unexplained")
    crossed = find_crossing(axes.ranks, fitted, 0.1).value if len(axes.ranks) > 1 else None
    note = None
    if crossed is None and len(axes.ranks) > 1:
        mean = fitted.mean(0)
        fits = bool((mean <= 0.1).all())
        low, high = axes.ranks[0], axes.ranks[-1]
        would = f"ranks above {math.ceil(high / max(1 - mean[-1], 0.05))} would"
        if fits:
            would = f"ranks below {low} would" if low > 1 else "with more rows or more data.label_noise it is higher"
        note = (
            f"the ranks {low} to {high} never cross the threshold, all of them {'fit' if fits else 'leave'} the labels"
            f"{'' if fits else ' unfitted'}; {would}"
        )
    return {
        "metric": metric,
        "rows": list(axes.rows),
        "ranks": list(axes.ranks),
        "noises": list(axes.noises),
        "decays": decays,
        "draws": axes.draws,
        "rank": rank,
        "noise": noise,
        "own_decay": own,
        "best_decay": best,
        "end": None if own else float(by_decay(decays[0])[:, -1].mean()),
        "best": float(by_decay(best)[:, -1].mean()),
        "left_out": float(by_decay(best, column=f"left_out_{metric}")[:, -1].mean()),
        "effective": float(by_decay(best, column="effective")[:, -1].mean()),
        "threshold_rank": crossed,
        "threshold_note": note,
        "more_rows": axes.extra_rows,
        "more": None if more is None else dataclasses.asdict(more),
        "best_rank": axes.ranks[
            fastest_setting(by_decay(best, "adapter.rank"), by_decay(best, "adapter.rank", "speed").mean(0))
        ],
    }
