"""E[L(w+ε)] − L(w) of a trained adapter on some training rows, by `regularizers.sharpness` in the full weight space.

The same rows and raw draws for every method with one seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from experiments.comparison.data import Material
    from experiments.recipe.config import Recipe
    from finetune.parallel.engine import Engine

PAIRS = 3
ROWS = 48


def rise_of(engine: Engine, found: Material, recipe: Recipe, *, sigma: float, seed: int) -> float:
    """Mean rise of the loss (nats per supervised token or example) over `PAIRS` antithetic pairs, on `ROWS` rows."""
    from finetune.compute.loss import batch_loss
    from finetune.compute.precision import autocast
    from finetune.data import iterate_eval
    from regularizers.sharpness import FullSpace, Objective, expected_rise

    batches = list(
        iterate_eval(
            found.train[:ROWS],
            task=recipe.task,
            batch_size=recipe.eval.batch_size,
            pad_id=int(found.tokenizer.pad_token_id),
        )
    )
    count = sum(micro.supervised for micro in batches)

    def terms() -> Iterator[Tensor]:
        for micro in batches:
            with autocast(recipe.train, engine.device):
                yield batch_loss(engine.model, micro.to(engine.device), task=recipe.task) / count

    objective = Objective(engine.model, terms)
    space = FullSpace(engine.model)
    (estimate,) = expected_rise(
        space, objective, [sigma], base=objective.value(), draws=PAIRS, seed=seed % 2**62, confidence=0.95
    )
    return float(estimate.value)
