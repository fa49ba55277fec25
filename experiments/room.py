"""Rows against the backbone's positions, before anything is trained: answers that could not be judged are refused, and
samples beyond what a rotary backbone was made for are said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace

from experiments.config import Recipe
from experiments.sources import Split, judged_train
from finetune.data import Example, Examples


def check_answers(recipe: Recipe, splits: Mapping[Split, Sequence[Example]]) -> None:
    """Raise UserError for a judged row whose prompt leaves no room for its answer (score: generate)."""
    task = recipe.task
    if getattr(task, "score", None) != "generate":
        return
    from finetune.backbone import read_config
    from finetune.evaluate.generate import check_room

    counted = SimpleNamespace(
        config=read_config(recipe.backbone), soft_tokens=_taken(recipe), features_before=recipe.adapter.projector
    )
    for judged in (judged_train(recipe, splits["train"]), splits["dev"], splits["test"]):
        if judged:
            check_room(counted, judged, task.max_new_tokens)  # type: ignore[union-attr]


def beyond_positions(recipe: Recipe, splits: Iterable[Sequence[Example]]) -> Iterator[str]:
    """A sentence where the longest sample has more tokens than the backbone's config.json counts positions.

    Tables of learned positions are no case of it: `train.max_length` is held against them.
    """
    from finetune.backbone import read_config

    limit = getattr(read_config(recipe.backbone).get_text_config(), "max_position_embeddings", None)
    longest = max((_longest(examples) for examples in splits), default=0)
    if limit is not None and longest + _taken(recipe) > limit:
        yield (
            f"the longest sample has {longest:,} tokens, and this backbone was made for {limit:,} positions "
            "(max_position_embeddings), so what lies beyond is new to it; lower train.max_length to stay within"
        )


def _taken(recipe: Recipe) -> int:
    """Positions before every row: soft tokens, and features before them."""
    projector = recipe.adapter.projector
    return (recipe.adapter.soft_tokens or 0) + (0 if projector is None else projector.places)


def _longest(examples: Sequence[Example]) -> int:
    columns = Examples.of(examples)
    found = [columns.ragged(name) for name in ("input_ids", "decoder_ids")]
    return max((int(rows[2].max()) for rows in found if rows is not None and len(rows[2])), default=0)
