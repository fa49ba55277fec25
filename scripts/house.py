"""Size of the code base: lines and modules of each top-level package, its import cycles, and its ceilings.

    python scripts/house.py            # one line per package, the sum, every cycle
    python scripts/house.py --rooms    # one line per folder
    python scripts/house.py --check    # also every excess over a ceiling; exit code 1 if there is one, or a cycle

The five packages in ROOMS count; tests, benchmarks and scripts do not. A cycle is a set of modules that can reach each
other by imports, including lazy ones within functions and those of types under TYPE_CHECKING. An import of a name that
a package only re-exports counts for the module that defines it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("flatshift", "experiments", "finetune", "selection", "regularizers")

# Ceilings of --check. Lower one when the tree is below it; raise one only with its reason in CHANGELOG.md.
MAX_LINES = 86_841
MAX_MODULES = 405
MAX_MEMBERS = 45
"""Names that a class body defines, without inherited ones."""
MAX_FUNCTION_LINES = 90
REPEATED_CLASSES = frozenset({"Flags", "Handler"})
"""Public class names that several modules may define."""


def product_modules(root: Path = ROOT) -> dict[str, Path]:
    """Return every product module by its dotted name inside `flatshift`; a package is its `__init__`."""
    results = {}
    for room in ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            parts = ("flatshift", *file.relative_to(root).with_suffix("").parts)[room == "flatshift" :]
            results[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return results


@cache
def _parse_file(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imported_names(name: str, file: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (module, imported name or None) for every import of the module `name`."""
    package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(_parse_file(file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield module, alias.name


def import_graph(known: dict[str, Path]) -> dict[str, set[str]]:
    """Return the known modules imported by each of them."""
    exported: dict[str, dict[str, str]] = {}
    for name, file in known.items():
        if file.name == "__init__.py":
            stub = file.with_suffix(".pyi")
            asked = _imported_names(name, stub if stub.is_file() else file)
            exported[name] = {what: module for module, what in asked if what and module in known}

    def home(module: str, what: str | None) -> str | None:
        if what is None:
            return module if module in known else None
        if f"{module}.{what}" in known:
            return f"{module}.{what}"
        while what in exported.get(module, {}):
            module = exported[module][what]
        return module if module in known else None

    results: dict[str, set[str]] = {}
    for name, file in known.items():
        results[name] = {h for module, what in _imported_names(name, file) if (h := home(module, what)) and h != name}
    return results


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, the largest first (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    results: list[list[str]] = []

    def visit(start: str) -> None:
        work = [(start, iter(sorted(graph[start])))]
        index[start] = low[start] = len(index)
        stack.append(start)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    part: list[str] = []
                    while not part or part[-1] != node:
                        part.append(stack.pop())
                    if len(part) > 1:
                        results.append(sorted(part))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(results, key=len, reverse=True)


def count_lines(file: Path) -> int:
    """Count the lines of a source file, including blank ones and docstrings."""
    return len(file.read_text(encoding="utf-8").splitlines())


def count_members(node: ast.ClassDef) -> int:
    """Count the names that a class body defines: methods and attributes."""
    names: set[str] = set()
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(part.name)
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return len(names)


def list_excesses(known: dict[str, Path]) -> list[str]:
    """Return one line for every excess of the modules over a ceiling."""
    excesses = []
    lines = sum(map(count_lines, known.values()))
    if lines > MAX_LINES:
        excesses.append(f"{lines:,} product lines, ceiling {MAX_LINES:,}")
    if len(known) > MAX_MODULES:
        excesses.append(f"{len(known)} modules, ceiling {MAX_MODULES}")
    homes: dict[str, list[str]] = {}
    for name, file in known.items():
        tree = _parse_file(file)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (members := count_members(node)) > MAX_MEMBERS:
                excesses.append(f"{name}.{node.name}: {members} members, ceiling {MAX_MEMBERS}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    excesses.append(f"{name}.{node.name}: {length} lines, ceiling {MAX_FUNCTION_LINES}")
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in REPEATED_CLASSES:
                homes.setdefault(node.name, []).append(name)
    return excesses + [f"class {name} in {' and '.join(where)}" for name, where in homes.items() if len(where) > 1]


def main() -> int:
    """Print lines and modules of each package, and the import cycles."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rooms", action="store_true", help="a line for each folder")
    parser.add_argument("--check", action="store_true", help="exit code 1 for an excess over a ceiling, or a cycle")
    asked = parser.parse_args()
    known = product_modules()
    depth: dict[str, list[int]] = {}
    for file in known.values():
        folder = file.parent.relative_to(ROOT).as_posix()
        depth.setdefault(folder if asked.rooms else folder.split("/")[0], []).append(count_lines(file))
    for folder, counts in sorted(depth.items()):
        print(f"{folder:<32} {len(counts):>4} modules {sum(counts):>7,} lines")
    print(f"{'product':<32} {len(known):>4} modules {sum(map(count_lines, known.values())):>7,} lines")
    faults = [f"circle of {len(part)}: {', '.join(part)}" for part in import_cycles(import_graph(known))]
    if asked.check:
        faults += list_excesses(known)
    for fault in faults:
        print(fault)
    return int(asked.check and bool(faults))


if __name__ == "__main__":
    sys.exit(main())
