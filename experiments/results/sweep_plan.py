"""What a sweep directory says of itself besides its tables: the plan, what was searched, and the recipe's Adam."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from experiments.results.cells import read_marker
from finetune.errors import UserError
from finetune.evaluate.metrics import METRICS, lack_of

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


def declared_level(plan: dict[str, Any]) -> float:
    """Of every test: what the plan's look at its seeds may spend (`experiments.statistics.sequential`), else 5 %."""
    found = plan.get("level")
    return float(found) if isinstance(found, float) and 0 < found < 0.5 else 0.05


def declared_metric(plan: dict[str, Any]) -> str | None:
    """What the plan asked to be judged by, as the figure that falls as it gets better; None: what there is."""
    found = plan.get("metric")
    return lack_of(found) if isinstance(found, str) and found in METRICS else None


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
    """Those finished cells that are the plan's: a directory may hold cells of an earlier grid as well.

    All where the plan does not name its cells.
    """
    return [row for row in rows if "keys" not in plan or row["cell"] in plan["keys"]]


def only_planned(table: pa.Table, plan: dict[str, Any]) -> pa.Table:
    """`rows_planned` of a table of cells."""
    if "keys" not in plan or "cell" not in table.column_names:
        return table
    return table.filter(pc.is_in(table.column("cell"), value_set=pa.array(sorted(plan["keys"]), pa.string())))


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
