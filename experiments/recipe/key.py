"""Key of a run's result: the hash of everything the result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatshift.experiments.recipe.schema import Recipe

_PLANS = ("sweep", "comparison", "extends")  # these decide which runs exist, not the result of one
_PLACES = ("device", "threads")
_WATCHED = ("tracker",)
"""Blocks that report a run and do not change its metrics."""
TRAINING_ROWS = 1000
"""Training rows that a cell evaluates by default."""
_LATER: dict[tuple[str, str], Any] = {
    ("optimizer", "kind"): "adamw",
    ("train", "compile"): False,
    ("train", "skip_nonfinite"): 0,
    ("train", "weigh"): "rows",
    ("train", "tf32"): False,
    ("train", "backbone_precision"): "same",
    ("train", "deterministic"): False,
    ("task", "metrics"): (),
    ("columns", "messages"): "messages",
    ("columns", "tools"): "tools",
    ("columns", "system"): "system",
    ("hygiene", "drops"): (),
}
"""(block, key) → default, for keys added later whose default is not null. At its default such a key is left out of the
hash, so that earlier runs keep their key."""
_IDLE = (("hygiene", "memory_gib"),)
"""(block, key) whose value changes no result: where records' arrays are stored, not which are dropped."""


def recipe_key(recipe: Recipe, inputs: Any) -> str:
    """Return 16 hex digits: the hash of the resolved recipe and `inputs` (digests of the files it reads, and whatever
    else matters).

    Null and absent are the same, so a key that a later version adds with the default null changes no existing hash;
    other additions are in `_LATER`.
    """
    tree = dataclasses.asdict(recipe)
    for name in (*_PLANS, *_WATCHED):
        tree.pop(name)
    # `max_cut` only refuses, `extend` is for resumed runs: neither changes a metric of a cell
    for name in (*_PLACES, "peak_tflops", "max_cut", "extend"):
        tree["train"].pop(name)
    for name in ("cache", "checks"):  # `checks` only refuses and changes no metric
        tree["data"].pop(name)
    if tree["eval"]["train_limit"] is None:
        tree["eval"]["train_limit"] = TRAINING_ROWS
    tree["eval"].pop("cold")  # adds metrics of the base model, next to those of the run
    if tree["train"]["adapter_precision"] == "auto":
        tree["train"]["adapter_precision"] = "fp32"
    if tree["train"]["backbone_precision"] == "auto":
        tree["train"]["backbone_precision"] = "same"
    _drop_default_keys(tree)
    return short_hash([_drop_nulls(tree), inputs])


def short_hash(value: Any) -> str:
    """Return 16 hex digits: the hash of plain values (mappings, sequences, numbers, text)."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings_tree(settings: Any) -> Any:
    """Return a settings dataclass as plain values, without nulls."""
    return _drop_nulls(dataclasses.asdict(settings))


def block_tree(block: str, settings: Any) -> Any:
    """Return `settings_tree` of the recipe's block of that name, without the keys that `recipe_key` leaves out."""
    tree = {block: dataclasses.asdict(settings)}
    _drop_default_keys(tree)
    return _drop_nulls(tree)[block]


def _drop_default_keys(tree: dict[str, Any]) -> None:
    """Remove the keys in `_LATER` (at their default) and `_IDLE` from the blocks of that name, at any depth."""
    for block, values in tree.items():
        if not isinstance(values, dict):
            continue
        for (where, name), default in _LATER.items():
            if where == block and values.get(name) == default:
                values.pop(name)
        for where, name in _IDLE:
            if where == block:
                values.pop(name, None)
        _drop_default_keys(values)


def _drop_nulls(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _drop_nulls(value) for key, value in tree.items() if value is not None}
    return tree
