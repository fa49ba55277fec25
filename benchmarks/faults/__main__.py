"""Every promise attacked: durable calls struck, power cut, races, tampering, bad input, mutations of every parser.

    python -m benchmarks.faults                          # everything; hours on two cores
    python -m benchmarks.faults crash power --most 600   # these groups, so many faults of each, drawn by --seed
    python -m benchmarks.faults crash --only select      # one command (`benchmarks.faults.scenarios`)

Groups that are not run keep their rows. Each row counts what was not survived, and its bar is none.
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from benchmarks._harness import RESULTS, Benchmark

GROUPS = {
    "crash": "every durable call failed, killed or torn",
    "power": "power lost at any moment",
    "races": "two and three processes for one path",
    "tamper": "every file of a run damaged, for every command that reads it",
    "inputs": "bad input",
    "mutations": "mutations of every parser's input",
}


def main() -> None:
    """Run groups and write benchmarks/results/faults.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; none: all")
    parser.add_argument("--most", type=int, help="faults of a group at most")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--only", action="append", default=[], help="command of crash and power, by its name")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.groups) - set(GROUPS)):
        parser.error(f"{unknown[0]} is no group; known: {', '.join(GROUPS)}")
    bench = Benchmark("faults")
    before = _kept_rows()
    for name in GROUPS:
        if chosen.groups and name not in chosen.groups:
            bench.rows += [row for row in before if row["what"].startswith(f"{name}: ")]
            continue
        print(f"{name}: {GROUPS[name]}", flush=True)
        module = importlib.import_module(f"benchmarks.faults.{name}")
        more = {"only": chosen.only} if chosen.only and name in ("crash", "power") else {}
        first = len(bench.rows)
        module.rows(bench, most=chosen.most, seed=chosen.seed, **more)
        for row in bench.rows[first:]:
            row["what"] = f"{name}: {row['what'].removeprefix(f'{name}: ')}"
    bench.finish()


def _kept_rows() -> list[dict[str, Any]]:
    file = RESULTS / "faults.json"
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []


if __name__ == "__main__":
    main()
