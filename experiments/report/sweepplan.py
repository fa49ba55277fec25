"""What a sweep directory says of itself besides its tables: the plan, what was searched, and the recipe's Adam."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from finetune.errors import UserError

AGAIN = "run the sweep again, it keeps its cells"


def read_plan(path: Path) -> dict[str, Any]:
    """sweep.json, or nothing if it is not there."""
    if not path.is_file():
        return {}
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        list(plan["grid"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: has no `grid`; {AGAIN}") from error
    return dict(plan)


def declared_axes(plan: dict[str, Any]) -> list[str] | None:
    """Keys of the grid, and the one that is searched; None without a plan."""
    if not plan:
        return None
    search = plan.get("bisection")
    searched = [str(search["key"])] if isinstance(search, dict) and "key" in search else []
    return list(dict.fromkeys([*plan["grid"], *searched]))


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


def is_planned(row: dict[str, Any], plan: dict[str, Any]) -> bool:
    """Whether a finished cell is one of the plan's: a directory may hold cells of an earlier grid as well."""
    grid, seeds = plan.get("grid"), plan.get("seeds")
    if not isinstance(grid, dict):
        return True
    if isinstance(seeds, int) and isinstance(row["seed"], int) and row["seed"] >= seeds:
        return False
    return all(key in row and _among(row[key], values) for key, values in grid.items())


def _among(value: Any, written: Any) -> bool:
    """Whether a resolved value is one of those written in the plan, where `5e-4` and `0.0005` are the same."""
    texts = [str(text) for text in written] if isinstance(written, list) else [str(written)]
    if any(".." in text for text in texts):  # a range that values were drawn from
        return True
    if isinstance(value, str):
        return value in texts
    if value is None or isinstance(value, bool):  # YAML spells them in more than one way
        return True
    return any(_same(text, value) for text in texts)


def _same(text: str, value: float) -> bool:
    try:
        return math.isclose(float(text), value, rel_tol=1e-12)
    except (ValueError, TypeError):
        return False


def read_searched(path: Path) -> list[dict[str, Any]]:
    """The points of emc.json: `point`, `emc`, `low`, `high`, `side`, `tried`; none if nothing was searched."""
    if not path.is_file():
        return []
    try:
        points = json.loads(path.read_text(encoding="utf-8"))["points"]
        found = [{key: p[key] for key in ("point", "emc", "low", "high", "side", "tried")} for p in points]
        if any(not isinstance(t["rows"], int) for p in found for t in p["tried"]) or not all(p["tried"] for p in found):
            raise ValueError("no rows")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not what a bisection writes; {AGAIN}") from error
    return found


def beta1(recipe: Path) -> float:
    """Adam's first decay rate, as the recipe says; 0.9 where it does not."""
    import yaml

    try:
        betas = yaml.safe_load(recipe.read_text(encoding="utf-8"))["optimizer"]["betas"]
        return float(betas[0])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, IndexError):
        return 0.9
