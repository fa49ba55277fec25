"""Which recipe keys an arm, a target and an embedder may set; any other would be ignored, or make arms unlike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_INSTEAD = {
    "select.pool": "name the pool in quality.pool",
    "select.target": "name targets in quality.targets",
    "select.budget": "set quality.budgets",
    "select.cache": "leave it out, features are kept in the study's own directory",
    "select.embedder": "set it at the top of the recipe, or compare embedders in quality.embedders",
    "select.method": "set it in quality.arms.NAME.set, for all targets",
    "select": "set it at the top of the recipe: one pool, cleaned once, serves all",
    "backbone": "set it at the top of the recipe",
    "data": "name files in quality.targets",
    "train.seed": "set quality.seeds and quality.tuning_seed",
    "warmup.lr": "set quality.lr, which every arm tunes over",
    "optimizer.lr": "set quality.fine_tune_lr, which every target tunes over",
}
"""Key, or the beginning of one → what to do instead; the longest that fits counts."""
_FOR_ALL = "set it at the top of the recipe, for every arm and target alike"

_OF_TARGETS = ("train", "warmup", "optimizer", "adapter", "regularizer", "task", "eval.batch_size")
_DRAWN_OR_TUNED = ("train.seed", "warmup.lr", "optimizer.lr")
_WITHOUT_DEV_ROWS = tuple(
    f"train.{name}" for name in ("eval_every", "best", "patience", "save_every", "keep", "peak_tflops")
)


def check_arm_keys(keys: Mapping[str, Any], source: str) -> None:
    """An arm is a method: arms that trained, cleaned or embedded otherwise could not be compared.

    Raises ValueError for a key outside `select.method`, and for any key of an arm that runs no selector.
    """
    if keys and source != "selector":
        raise ValueError(f"set has {next(iter(keys))!r}, but an arm of source {source} runs no selector; leave it out")
    _check_inside(keys, "select.method", "an arm sets select.method.* alone, so that all arms train alike")


def check_embedder_keys(keys: Mapping[str, Any]) -> None:
    """Raises ValueError for a key outside `select.embedder`."""
    _check_inside(keys, "select.embedder", "an embedder sets select.embedder.* alone")


def check_target_keys(keys: Mapping[str, Any]) -> None:
    """A target may train otherwise, as long as all its arms do.

    Raises ValueError for what selects (pool and features are made once, for all targets), for what the study draws or
    tunes itself, and for what its runs have no use for.
    """
    for key in _leaves(keys):
        if _begins(key, _DRAWN_OR_TUNED):
            raise ValueError(f"set has {key!r}, which the study overwrites in every run; {_instead(key)}")
        if _begins(key, _WITHOUT_DEV_ROWS):
            raise ValueError(
                f"set has {key!r}, but a study's runs have no dev rows, checkpoints or rates; leave it out"
            )
        if not _begins(key, _OF_TARGETS):
            raise ValueError(f"set has {key!r}, but a target sets how its runs train and nothing else; {_instead(key)}")


def _check_inside(keys: Mapping[str, Any], block: str, rule: str) -> None:
    for key in _leaves(keys):
        if not _begins(key, (block,)):
            raise ValueError(f"set has {key!r}, but {rule}; {_instead(key)}")


def _leaves(keys: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Dotted keys, however they were nested; `-` and `_` alike."""
    for key, value in keys.items():
        name = before + key.replace("-", "_")
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def _begins(key: str, blocks: tuple[str, ...]) -> bool:
    return any(key == block or key.startswith(f"{block}.") for block in blocks)


def _instead(key: str) -> str:
    fitting = [block for block in _INSTEAD if _begins(key, (block,))]
    return _INSTEAD[max(fitting, key=len)] if fitting else _FOR_ALL
