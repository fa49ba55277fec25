"""Checks of a selection for manifest and report: `flatshift.selection.checks` on a run's own data."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from flatshift.experiments.recipe.schema import Select
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.pool import PoolAndTarget
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.seeds import derive_seed
from flatshift.selection import Pool, build_selector
from flatshift.selection.config import Domains, GotD, GotDContrast, Method, ranking_method, required_inputs
from flatshift.selection.errors import ConvergenceWarning, SelectionError
from flatshift.selection.methods.base import Selector

_SHOWN = 10
"""Most targets listed in the manifest."""
_CHARACTERS = 200
"""Most characters of a text."""
_TOLERANCE = 1e-4
"""Marginal error of selectors that are refitted on parts of the data."""


def can_check(spec: Select) -> bool:
    """Return True if the method works on features with a meaningful distance."""
    wanted = required_inputs(spec.method)
    return spec.checks and "features" in wanted and not {"gradients", "tokens"} & wanted


def run_selection_checks(
    spec: Select,
    selector: Selector,
    sides: PoolAndTarget,
    *,
    seed: int,
    console: Console,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any] | None:
    """Return the manifest entry of `flatshift.selection.checks`; None if all features coincide or a check failed.

    Prints warnings. A finished selection never fails because of its check: errors in it are printed, too.
    """
    with non_fatal(console):
        from flatshift.selection.checks import check_selection, target_coverage

        started = time.monotonic()
        x, y = sides.x, sides.y
        assert y is not None
        potentials = getattr(selector, "potentials_", getattr(getattr(selector, "inside", None), "potentials_", None))
        inner = ranking_method(spec.method)
        cost = getattr(inner, "cost", "sqeuclidean")
        seed = derive_seed(seed, "checks")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a tolerance missed on a part is in `marginal_error`
            found = check_selection(
                x,
                y,
                np.argsort(selector.ranks()),
                budget=spec.budget,
                refit=_refit_function(spec, sides, seed),
                weights=sides.weights,
                epsilon=potentials.epsilon if potentials is not None and potentials.epsilon > 0 else None,
                cost=cost,
                in_rounds=isinstance(inner, GotD) and inner.rounds > 1,
                seed=seed,
                progress=progress,
            )
        if found is None:
            console.say("note: all features coincide; the selection was not checked")
            return None
        rows, g = found.targets, found.g
        # With rounds the selector's own potentials cover only a part of the target.
        if potentials is not None and len(potentials.g) == len(y):
            rows, g = np.arange(len(y)), potentials.g
        coverage = target_coverage(x, y[rows], g, cost=cost, seed=seed, progress=progress)
        about = _coverage_record(coverage, rows, sides)
        told = found.warnings()
        for sentence in told:
            console.say(f"warning: {sentence}")
        if about["unserved"]:
            worst = about["worst"][0]
            console.say(
                f"note: {about['unserved']:,} of {about['looked_at']:,} targets have no pool record as near as targets "
                f"are to one another, the worst is {worst['id']!r}; report.html names more"
            )
        about["of"] = len(rows)
        return {
            **found.summary(),
            "of_targets": len(y),
            "warnings": told,
            "coverage": about,
            "seconds": round(time.monotonic() - started, 3),
        }
    return None


@contextmanager
def non_fatal(console: Console) -> Iterator[None]:
    """Print errors of a check instead of raising them: the selection stands."""
    try:
        yield
    except SelectionError as error:  # the method may need more than a part of the data
        console.say(f"note: the selection was not checked on parts of the data: {error}")
    except (Interrupted, OSError):  # such as a full disk: the run can be resumed later
        raise
    except Exception as error:
        console.say(f"warning: the selection was not checked, by a fault of the check: {type(error).__name__}: {error}")
        if console.log is not None:
            console.log(traceback.format_exc().rstrip())


def _refit_function(
    spec: Select, sides: PoolAndTarget, seed: int
) -> Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]:
    """Return the recipe's own method as a function that refits on some rows of pool and target."""
    x, y = sides.x, sides.y
    assert y is not None
    more: dict[str, Any] = {} if sides.z is None else {"negative": Pool(features=sides.z)}
    given = spec.method
    method: Method = (
        replace(given, inside=_with_coarse_tolerance(given.inside))
        if isinstance(given, Domains)
        else _with_coarse_tolerance(given)
    )

    def choose(rows: np.ndarray, targets: np.ndarray, mass: np.ndarray, budget: int) -> np.ndarray:
        part = Pool(
            ids=sides.pool.rows.take(rows).ids[:],
            features=np.asarray(x[rows]),
            domains=_names_at(sides.domains[0], rows),
            weights=mass,
        )
        aims = Pool(features=y[targets], domains=_names_at(sides.domains[1], targets))
        chooser = build_selector(method, seed=seed, budget=budget)
        chooser.fit(part, aims, **more)
        return chooser.select(budget)

    return choose


def _names_at(names: Sequence[str | None] | None, rows: np.ndarray) -> list[str | None] | None:
    return None if names is None else [names[row] for row in rows.tolist()]


def _with_coarse_tolerance(method: Any) -> Any:
    """Return the method with a coarser tolerance that is enough for selecting."""
    if isinstance(method, GotD | GotDContrast):
        return replace(method, tolerance=max(method.tolerance or 0.0, _TOLERANCE))
    return method


def _coverage_record(coverage: Any, rows: np.ndarray, sides: PoolAndTarget) -> dict[str, Any]:
    """Return counts, and the worst served targets with their ids, texts and nearest records."""
    unserved = coverage.unserved
    first = np.lexsort((-coverage.g, ~unserved))[:_SHOWN]
    nearest = [sides.pool.rows[int(row)] for row in coverage.rows[first]]
    worst = []
    for place, record in zip(first.tolist(), nearest, strict=True):
        row = sides.target.rows[int(rows[coverage.targets[place]])]
        worst.append(
            {
                "id": row.id,
                "g": float(coverage.g[place]),
                "unserved": bool(unserved[place]),
                "cost": float(coverage.costs[place]),
                "text": _truncate(row.values["text"]),
                "nearest": record.id,
                "nearest_text": _truncate(record.values["text"]),
            }
        )
    return {
        "looked_at": len(coverage.targets),
        "limit": coverage.limit,
        "unserved": int(unserved.sum()),
        "worst": worst,
    }


def _truncate(text: str) -> str:
    text = " ".join(text[: 4 * _CHARACTERS].split())
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
