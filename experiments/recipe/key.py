"""What names a run's result: the hash of all that the result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatshift.experiments.recipe.schema import Recipe

_PLANS = ("sweep", "comparison", "extends")  # what decides which runs there are, not what one of them gives
_PLACES = ("device", "threads")
_WATCHED = ("tracker",)
"""What is told of a run, and changes none of its figures."""
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
"""(block, key) → default, where later versions added keys whose default is not null; at it they name no other run."""
_IDLE = (("hygiene", "memory_gib"),)
"""(block, key) whose value changes no result: where records' arrays lie, not which are dropped."""


def recipe_key(recipe: Recipe, inputs: Any) -> str:
    """16 hex digits of the resolved recipe and `inputs` (digests of the files it reads, and what else matters).

    Null and absent are the same, so a key that a later version adds, null by default, renames no finished run; other
    additions stand in `_LATER`.
    """
    tree = dataclasses.asdict(recipe)
    for name in (*_PLANS, *_WATCHED):
        tree.pop(name)
    for name in (*_PLACES, "peak_tflops", "max_cut", "extend"):  # refuses; of runs that go on: no figure of a cell
        tree["train"].pop(name)
    for name in ("cache", "checks"):  # the second refuses, and changes no figure
        tree["data"].pop(name)
    if tree["eval"]["train_limit"] is None:
        tree["eval"]["train_limit"] = TRAINING_ROWS
    tree["eval"].pop("cold")  # figures of the backbone, beside those of the run
    if tree["train"]["adapter_precision"] == "auto":
        tree["train"]["adapter_precision"] = "fp32"
    if tree["train"]["backbone_precision"] == "auto":
        tree["train"]["backbone_precision"] = "same"
    _forget(tree)
    return short_hash([_present(tree), inputs])


def short_hash(value: Any) -> str:
    """16 hex digits of plain values (mappings, sequences, numbers, text)."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings_tree(settings: Any) -> Any:
    """A settings dataclass as plain values, without what is null."""
    return _present(dataclasses.asdict(settings))


def block_tree(block: str, settings: Any) -> Any:
    """`settings_tree` of the recipe's block of that name, without what `recipe_key` leaves out of it."""
    tree = {block: dataclasses.asdict(settings)}
    _forget(tree)
    return _present(tree)[block]


def _forget(tree: dict[str, Any]) -> None:
    """Take what `_LATER` and `_IDLE` have out of the blocks that are called so, at any depth."""
    for block, values in tree.items():
        if not isinstance(values, dict):
            continue
        for (where, name), default in _LATER.items():
            if where == block and values.get(name) == default:
                values.pop(name)
        for where, name in _IDLE:
            if where == block:
                values.pop(name, None)
        _forget(values)


def _present(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _present(value) for key, value in tree.items() if value is not None}
    return tree
