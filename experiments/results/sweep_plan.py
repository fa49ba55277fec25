"""What a sweep directory says of itself besides its tables: the plan, what was searched, and the recipe's Adam."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from experiments.results.cells import read_marker
from finetune.errors import UserError

AGAIN = "run the sweep again, it keeps its cells"


def read_plan(path: Path) -> dict[str, Any]:
    """sweep.json, or nothing if it is not there. Raises UserError as `flatshift sweep` does, and without a grid."""
    if not path.is_file():
        return {}
    plan = read_marker(path.parent)
    try:
        list(plan["grid"])
        if "keys" in plan:
            plan["keys"] = frozenset(plan["keys"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: has no `grid`; {AGAIN}") from error
    return plan


def declared_axes(plan: dict[str, Any]) -> list[str] | None:
    """Keys of the grid, and the one that is searched; None without a plan."""
    if not plan:
        return None
    search = plan.get("bisection")
    searched = [str(search["key"])] if isinstance(search, dict) and "key" in search else []
    return list(dict.fromkeys([*plan["grid"], *searched]))


def declared_epsilon(plan: dict[str, Any]) -> float | None:
    """Mean train error up to which a bisection counts rows as fitted; None where nothing is searched."""
    search = plan.get("bisection")
    return _epsilon(search.get("epsilon")) if isinstance(search, dict) else None


def _epsilon(found: Any) -> float | None:
    return float(found) if isinstance(found, int | float) and 0 < found < 1 else None


def planned_cells(plan: dict[str, Any]) -> int | None:
    """How many cells the plan has, as far as it says."""
    if isinstance(plan.get("cells"), int):
        return int(plan["cells"])
    grid, seeds = plan.get("grid"), plan.get("seeds")
    if not isinstance(grid, dict) or not isinstance(seeds, int) or plan.get("design", "grid") not in ("grid", "paired"):
        return None
    lengths = [len(values) for values in grid.values()]
    points = math.prod(lengths) if plan.get("design", "grid") == "grid" else max(lengths, default=0)
    return points * seeds or None


def rows_planned(rows: Iterable[dict[str, Any]], plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Those finished cells that are the plan's: a directory may hold cells of an earlier grid as well."""
    tests = _tests(plan).items()
    return [row for row in rows if all(key in row and fits(row[key]) for key, fits in tests)]


def only_planned(table: pa.Table, plan: dict[str, Any]) -> pa.Table:
    """`rows_planned` of a table of cells; a column is judged by its distinct values."""

    kept = np.ones(table.num_rows, dtype=bool)
    for key, fits in _tests(plan).items():
        if key not in table.column_names:
            kept[:] = False
            continue
        column = table.column(key).combine_chunks()
        if pa.types.is_nested(column.type) or pa.types.is_null(column.type):
            continue  # as for one row: lists and nothing are taken as planned
        encoded = column.dictionary_encode(null_encoding="encode")
        fitting = np.array([fits(value) for value in encoded.dictionary.to_pylist()], dtype=bool)
        kept &= fitting[encoded.indices.to_numpy(zero_copy_only=False)]
    return table if kept.all() else table.filter(pa.array(kept))


def _tests(plan: dict[str, Any]) -> dict[str, Callable[[Any], bool]]:
    """Column → whether a value in it is the plan's.

    By the keys of its cells; a plan of an earlier version, which lists none, is compared value by value.
    """
    if "keys" in plan:
        return {"cell": frozenset(plan["keys"]).__contains__}
    grid, seeds = plan.get("grid"), plan.get("seeds")
    if not isinstance(grid, dict):
        return {}
    tests: dict[str, Callable[[Any], bool]] = {key: partial(_among, written=values) for key, values in grid.items()}
    if isinstance(seeds, int) and "bisection" not in plan:  # which lists its cells at its end, and seeds may begin late
        tests["seed"] = lambda seed: not isinstance(seed, int) or seed < seeds
    return tests


def _among(value: Any, written: Any) -> bool:
    """Whether a resolved value may be one of those written in the plan, where `5e-4` and `0.0005` are the same.

    What a word (`alpha=rank`) or a relative path came to is not known here: such a value is taken as planned.
    """
    given = written if isinstance(written, list) else [written]
    texts = [str(text) for text in given]
    if not texts or any(".." in text for text in texts):  # nothing is said, or a range that values were drawn from
        return True
    # a table holds lists as text and components by their kind
    if isinstance(value, list | dict) or any(_is_collection(text) for text in given):
        return True
    if isinstance(value, str):
        return value in texts or any("/" in value and Path(value).name == Path(text).name for text in texts)
    if value is None or isinstance(value, bool):  # YAML spells them in more than one way
        return True
    return any(_same(text, value) or not _is_number(text) for text in texts)


def _is_collection(written: Any) -> bool:
    return isinstance(written, list | dict) or str(written).lstrip().startswith(("[", "{"))


def _same(text: str, value: Any) -> bool:
    return _is_number(text) and _is_number(value) and math.isclose(float(text), float(value), rel_tol=1e-12)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (ValueError, TypeError):
        return False
    return True


def read_searched(path: Path) -> tuple[list[dict[str, Any]], float | None]:
    """(points, ε) of emc.json, a point with `point`, `emc`, `low`, `high`, `side`, `tried`; none without the file."""
    if not path.is_file():
        return [], None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        points = document["points"]
        found = [{key: p[key] for key in ("point", "emc", "low", "high", "side", "tried")} for p in points]
        if any(not isinstance(t["rows"], int) for p in found for t in p["tried"]) or not all(p["tried"] for p in found):
            raise ValueError("no rows")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not what a bisection writes; {AGAIN}") from error
    return found, _epsilon(document.get("epsilon"))


def beta1(recipe: Path) -> float:
    """Adam's first decay rate, as the recipe says; 0.9 where it does not."""
    import yaml

    try:
        betas = yaml.safe_load(recipe.read_text(encoding="utf-8"))["optimizer"]["betas"]
        return float(betas[0])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, IndexError):
        return 0.9
