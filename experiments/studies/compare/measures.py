"""Measurements of a comparison's cells besides their metrics: step time, right and wrong answers, sharpness."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flatshift.finetune.seeds import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

    from flatshift.experiments.data.splits import PreparedData
    from flatshift.experiments.recipe.schema import Recipe
    from flatshift.finetune.parallel.engine import Engine

PAIRS = 3
ROWS = 48
_SETTLING = 3
"""First steps whose time is not counted."""


@dataclass
class ComparisonProbe:
    """`flatshift.experiments.workflows.context.FineTuneProbe` of one cell.

    final: keep its answers row by row. sharpness: σ of E[L(w+ε)] − L(w); None: not measured.
    """

    final: bool
    sharpness: float | None
    _began: float = field(default_factory=time.process_time)
    _steps: list[float] = field(default_factory=list)
    _found: dict[str, Any] = field(default_factory=dict)

    def step(self, line: Mapping[str, Any]) -> None:
        """Record the CPU time."""
        self._steps.append(time.process_time())

    def judged(self, recipe: Recipe, engine: Engine, tokenizer: Any, prepared: PreparedData) -> None:
        """Measure the trained adapter."""
        if self.final and recipe.task.one_class:
            self._found["items"] = _correct_answers(recipe, engine, tokenizer, prepared)
        if self.sharpness is not None and prepared.units is None:  # a regression's head is now in its targets' units
            self._found["sharpness"] = _measure_sharpness(recipe, engine, tokenizer, prepared, sigma=self.sharpness)

    def figures(self) -> dict[str, Any]:
        """Return CPU seconds of the cell and of a step (median; None for too few steps), and the measurements."""
        taken = np.diff(self._steps)[_SETTLING:]
        step = float(np.median(taken)) if len(taken) else None
        return {"cpu_s": round(time.process_time() - self._began, 3), "step_cpu_s": step, **self._found}


def _correct_answers(recipe: Recipe, engine: Engine, tokenizer: Any, prepared: PreparedData) -> str:
    """Return right (1) or wrong (0) for every evaluation row."""
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.evaluate.evaluator import head_scores

    with evaluation_mode(engine.eval_model):
        _, logits = head_scores(
            engine.eval_model,
            prepared.test,
            EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=engine.device),
            task=recipe.task,
        )
    return "".join(
        "1" if p == e.labels else "0" for p, e in zip(logits.argmax(-1).tolist(), prepared.test, strict=True)
    )


def _measure_sharpness(
    recipe: Recipe, engine: Engine, tokenizer: Any, prepared: PreparedData, *, sigma: float
) -> float:
    """Return the mean rise of the loss (nats per target token or example) over `PAIRS` antithetic pairs of noise.

    The noise is in the full weight space, on `ROWS` training rows: the same rows and raw draws for every method with
    one seed.
    """
    from flatshift.finetune.compute.loss import add_reference, batch_loss
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.compute.precision import autocast
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.regularizers.sharpness import FullSpace, LossFunction, expected_rise

    rows = [prepared.train[i] for i in range(min(ROWS, len(prepared.train)))]
    batches = list(EvalBatching.of(tokenizer, batch_size=recipe.eval.batch_size).batches(rows, recipe.task))
    count = sum(micro.supervised for micro in batches)
    if recipe.task.has_reference:  # log-probabilities of the unperturbed weights
        with autocast(recipe.train, engine.device):
            there = [micro.to(engine.device) for micro in batches]
            batches = add_reference(engine.model, there, task=recipe.task)

    def terms() -> Iterator[Tensor]:
        for micro in batches:
            with autocast(recipe.train, engine.device):
                yield batch_loss(engine.model, micro.to(engine.device), task=recipe.task) / count

    objective = LossFunction(engine.model, terms)
    with evaluation_mode(engine.model):
        (estimate,) = expected_rise(
            FullSpace(engine.model),
            objective,
            [sigma],
            base=objective.value(),
            draws=PAIRS,
            seed=derive_seed(recipe.train.seed, "sharpness") % 2**62,
            confidence=0.95,
        )
    return float(estimate.value)
