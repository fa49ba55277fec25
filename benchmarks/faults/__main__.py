"""Every promise attacked: durable calls struck, power cut, races, tampering, bad input, mutations of every parser.

    python -m benchmarks.faults                          # everything; hours on two cores
    python -m benchmarks.faults crash power --most 600   # these groups, so many faults of each, drawn by --seed
    python -m benchmarks.faults crash --only select      # one command, kind, parser or input, by its name

Groups that are not run keep the rows that this machine made. Each row counts what was not survived, and its bar is
none. A group is a module here with `rows(bench, *, most, seed, only)`.
"""

from __future__ import annotations

import argparse
import importlib
from functools import partial

from benchmarks._harness import Benchmark, rows_by_group

GROUPS = {
    "crash": "every durable call failed, killed or torn",
    "power": "power lost at any moment",
    "races": "two and three processes for one path",
    "tamper": "every file of a run damaged, for every command that reads it",
    "inputs": "bad input",
    "mutations": "mutations of every parser's input",
    "doors": "what a stranger sends, or leaves to be read",
}


def main() -> None:
    """Run groups and write benchmarks/results/faults.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; none: all")
    parser.add_argument("--most", type=int, help="faults of a group at most")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--only", action="append", default=[], help="case of the groups, by its name")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.groups) - set(GROUPS)):
        parser.error(f"{unknown[0]} is no group; known: {', '.join(GROUPS)}")
    bench = Benchmark("faults")
    rows_by_group(bench, {name: partial(_measure, name, chosen) for name in GROUPS}, chosen.groups)
    bench.finish()


def _measure(name: str, chosen: argparse.Namespace, bench: Benchmark) -> None:
    print(f"{name}: {GROUPS[name]}", flush=True)
    more = {"only": chosen.only} if chosen.only else {}
    first = len(bench.rows)
    importlib.import_module(f"benchmarks.faults.{name}").rows(bench, most=chosen.most, seed=chosen.seed, **more)
    for row in bench.rows[first:]:
        row["what"] = f"{name}: {row['what']}"


if __name__ == "__main__":
    main()
