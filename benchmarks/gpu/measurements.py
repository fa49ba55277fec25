"""A measurement, the rows of the results file that it fills, and the file that keeps what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._harness import BarOp, Benchmark
from flatshift.finetune.atomic import write_text

Figures = dict[str, dict[str, Any]]
"""By figure: `ours` and `peer` as `Benchmark.row` takes them, and `reason` where one of them is missing."""


@dataclass(frozen=True)
class Row:
    """One row of the results file, whether or not there is a figure for it."""

    figure: str
    """Its name in what the measurement returns."""
    what: str
    unit: str
    peer_name: str | None = None
    bar_op: BarOp | None = None
    bar_value: float | None = None
    bar: str | None = None


@dataclass(frozen=True)
class Measurement:
    """What is measured at once, and kept as soon as it is."""

    name: str
    """`idea/case/…`; what `--rows` patterns are matched with."""
    function: str
    """`module:function`, called as `function(device=…, **arguments)`; returns `ChartGroup`."""
    arguments: Mapping[str, Any]
    """JSON-able; others than those of a kept result make it stale."""
    rows: tuple[Row, ...]
    seconds: float
    """Guess at its time on an H200: it is not begun where less is left of the minutes."""


@dataclass(frozen=True)
class Best:
    """A row that is made of others: the largest of their figures."""

    row: Row
    of: tuple[str, ...]
    """Names of measurements."""

    def figures(self, kept: Mapping[str, Kept]) -> dict[str, Any]:
        """`ours`, and where it comes from; or the reason why there is none."""
        found = {
            name: kept[name].figures[self.row.figure]["ours"]
            for name in self.of
            if name in kept and kept[name].figures.get(self.row.figure, {}).get("ours") is not None
        }
        if not found:
            return {"reason": "none of the rows that it is the best of has a figure"}
        best = max(found, key=lambda name: _middle(found[name]))
        return {"ours": found[best], "reason": f"the best of {len(found)}: {best.rsplit('/', 1)[-1]}"}


def _middle(figure: Any) -> float:
    return sorted(figure)[len(figure) // 2] if isinstance(figure, list) else float(figure)


@dataclass(frozen=True)
class Kept:
    """The result of a measurement, as one line of the file."""

    name: str
    arguments: dict[str, Any]
    device: str
    """Name of the device that it was measured on."""
    figures: Figures
    seconds: float
    """What the measurement took."""
    place: dict[str, Any]
    """`machine`, `versions`, `commit` and `dirty` of the results file."""
    failed: dict[str, Any] | None = None
    """`reason` and `traceback` of a measurement that failed, and `stopped`, true where its minutes were over; it has no
    figures, and is tried again."""


class Store:
    """The file of what was measured, one JSON object a line; rewritten whole, so that a kill leaves the old or the new.

    A line that cannot be read (a copy that broke off) is left out: its measurement is made again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0
        """Lines that could not be read last time."""

    def read(self) -> dict[str, Kept]:
        """By name; of two lines for one name the later holds."""
        found: dict[str, Kept] = {}
        self.torn = 0
        lines = self.path.read_bytes().splitlines() if self.path.is_file() else []
        for line in lines:
            try:
                kept = Kept(**json.loads(line))
            except (ValueError, TypeError):
                self.torn += 1
                continue
            found[kept.name] = kept
        return found

    def add(self, kept: Kept) -> None:
        """Put `kept` in, in place of what there is of its name."""
        self._write({**self.read(), kept.name: kept}.values())

    def drop(self, names: Iterable[str]) -> None:
        """Forget the measurements of these names."""
        gone = set(names)
        found = self.read()
        if gone & found.keys():
            self._write([kept for name, kept in found.items() if name not in gone])

    def _write(self, lines: Iterable[Kept]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, "".join(json.dumps(asdict(kept)) + "\n" for kept in lines))


def still_holds(measurement: Measurement, kept: Mapping[str, Kept], device: str | None) -> bool:
    """Whether there is a result of this measurement, with these arguments, of this device (None: of any)."""
    found = _of(measurement, kept, device)
    return found is not None and found.failed is None


def failure(measurement: Measurement, kept: Mapping[str, Kept], device: str | None) -> dict[str, Any] | None:
    """`Kept.failed` of this measurement, with these arguments, on this device (None: on any)."""
    found = _of(measurement, kept, device)
    return None if found is None else found.failed


def _of(measurement: Measurement, kept: Mapping[str, Kept], device: str | None) -> Kept | None:
    found = kept.get(measurement.name)
    same = found is not None and found.arguments == json.loads(json.dumps(dict(measurement.arguments)))
    return found if same and found is not None and device in (None, found.device) else None


def fill(
    bench: Benchmark,
    plan: Sequence[Measurement | Best],
    kept: Mapping[str, Kept],
    *,
    device: str | None,
    reasons: Mapping[str, str],
    otherwise: str,
) -> None:
    """Every row of the plan into `bench`: with its figures, or null with the reason.

    device: whose results count; None: any. reasons: by name, why a measurement has no result; otherwise: the reason of
    those that have none there and did not fail.
    """
    here = {m.name: kept[m.name] for m in plan if isinstance(m, Measurement) and still_holds(m, kept, device)}
    for entry in plan:
        if isinstance(entry, Best):
            reason = {} if here else {"reason": otherwise}
            _put(bench, entry.row, reason or entry.figures(here))
            continue
        broken = failure(entry, kept, device)
        missing = {"reason": reasons.get(entry.name, otherwise if broken is None else broken["reason"])}
        for row in entry.rows:
            figures = here[entry.name].figures if entry.name in here else {row.figure: missing}
            _put(bench, row, figures.get(row.figure, {"reason": f"its measurement gave no {row.figure}"}))


def _put(bench: Benchmark, row: Row, figures: Mapping[str, Any]) -> None:
    bench.row(
        row.what,
        unit=row.unit,
        ours=figures.get("ours"),
        peer=figures.get("peer"),
        peer_name=row.peer_name,
        bar_op=row.bar_op,
        bar_value=row.bar_value,
        bar=row.bar,
        reason=figures.get("reason"),
    )
