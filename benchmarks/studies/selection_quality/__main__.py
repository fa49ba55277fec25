"""The study of selectors on any recipe with a `quality` block; exit codes as those of `flatshift`.

python -m benchmarks.studies.selection_quality RECIPE --data DIR --out OUT [--set KEY=VALUE …]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.studies.selection_quality.study import study_quality
from flatshift.experiments.recipe import from_override
from flatshift.finetune.errors import Interrupted, UserError


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="selection_quality", description=__doc__)
    flags.add_argument("recipe", help="recipe file with a `quality` block")
    flags.add_argument("--data", type=Path, help="directory of pool and targets")
    flags.add_argument("--out", type=Path, required=True, help="directory to make or to continue")
    flags.add_argument("--selectors", nargs="+", default=[], help="only these arms and the baseline")
    flags.add_argument("--targets", nargs="+", default=[], help="only these targets")
    flags.add_argument("--budgets", nargs="+", type=int, default=[], help="only these budgets")
    flags.add_argument("--jobs", type=int, default=2, help="worker processes, one thread each")
    flags.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="recipe keys laid over the file")
    flags.add_argument("--json", action="store_true", help="print quality.json when done")
    given = flags.parse_args(argv)
    laid = [from_override(key, value, f"--set {key}") for key, _, value in (one.partition("=") for one in given.set)]
    try:
        document = study_quality(
            given.recipe,
            given.out,
            data=given.data,
            overrides=laid,
            selectors=given.selectors,
            targets=given.targets,
            budgets=given.budgets,
            jobs=given.jobs,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"interrupted: {error}", file=sys.stderr)
        return 3
    if given.json:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        print("\n".join(document["answers"] or ["no endpoint: no two arms ran at one budget"]))
        print(given.out / "report.html")
    return 1 if any(run["status"] == "failed" for run in document["failed"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
