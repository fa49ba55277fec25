"""The study of selectors on any recipe with a `quality` block; exit codes as those of `flatshift`.

python -m benchmarks.studies.selection_quality RECIPE --data DIR --out OUT [--set KEY=VALUE …]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.selection_quality.runner import study_quality
from flatshift.experiments.recipe import from_override
from flatshift.finetune.errors import Interrupted, UserError


def add_part_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say which part of a study runs, and how."""
    parser.add_argument("--jobs", type=int, default=2, help="worker processes, one thread each")
    parser.add_argument("--selectors", nargs="+", default=[], help="only these arms and the baseline")
    parser.add_argument("--targets", nargs="+", default=[], help="only these targets")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe keys laid over the file")


def part_of(given: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `study_quality` from `add_part_flags`."""
    laid = [from_override(key, value, f"--set {key}") for key, _, value in (one.partition("=") for one in given.set)]
    return {"overrides": laid, **{name: getattr(given, name) for name in ("data", "jobs", "selectors", "targets")}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="selection_quality", description=__doc__)
    parser.add_argument("recipe", help="recipe file with a `quality` block")
    parser.add_argument("--data", type=Path, help="directory of pool and targets")
    parser.add_argument("--out", type=Path, required=True, help="directory to make or to continue")
    add_part_flags(parser)
    given = parser.parse_args(argv)
    try:
        document = study_quality(given.recipe, given.out, **part_of(given))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"interrupted: {error}", file=sys.stderr)
        return 3
    print("\n".join(document["answers"] or ["no endpoint: no two arms ran at one budget"]))
    print(given.out / "report.html")
    return 1 if any(run["status"] == "failed" for run in document["failed"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
