"""A measurement, the rows of the results file that it fills, and the file that keeps what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import BarOp, Benchmark
from flatshift.finetune.atomic import write_text

Figures = dict[str, dict[str, Any]]
"""By figure: `ours` and `peer` as `Benchmark.row` takes them, and `reason` where one of them is missing."""


@dataclass(frozen=True)
class Row:
    """One row of the results file, whether or not there is a figure for it. figure: its name in what the measurement
    returns."""

    figure: str
    what: str
    unit: str
    peer_name: str | None = None
    bar_op: BarOp | None = None
    bar_value: float | None = None


@dataclass(frozen=True)
class Measurement:
    """What is measured at once, and kept as soon as it is.

    name: `idea/case/…`, for `--rows`. function: `module:function`, called as `function(device=…, **arguments)`;
    returns `Figures`. arguments: JSON-able; others than those of a kept result make it stale. seconds: guess at its
    time on an H200: it is not begun where less is left of the minutes.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]
    rows: tuple[Row, ...]
    seconds: float


@dataclass(frozen=True)
class Best:
    """A row that is made of others: the largest figure of the measurements `of`."""

    row: Row
    of: tuple[str, ...]

    def figures(self, previous: Mapping[str, Kept]) -> dict[str, Any]:
        """`ours`, and where it comes from; or the reason why there is none."""
        all_figures = {
            name: previous[name].figures.get(self.row.figure, {}).get("ours") for name in self.of if name in previous
        }
        results = {name: figure for name, figure in all_figures.items() if figure is not None}
        if not results:
            return {"reason": "none of the rows that it is the best of has a figure"}
        best = max(results, key=lambda name: np.median(results[name]))
        return {"ours": results[best], "reason": f"the best of {len(results)}: {best.rsplit('/', 1)[-1]}"}


@dataclass(frozen=True)
class Kept:
    """The result of a measurement, as one line of the file.

    device: name of the device that it was measured on. seconds: what the measurement took. place: `machine`,
    `versions`, `commit` and `dirty` of the results file. failed: `reason` and `traceback` of a measurement that failed,
    and `stopped`, true where its minutes were over; it has no figures, and is tried again.
    """

    name: str
    arguments: dict[str, Any]
    device: str
    figures: Figures
    seconds: float
    place: dict[str, Any]
    failed: dict[str, Any] | None = None


class Store:
    """The file of what was measured, one JSON object a line; rewritten whole, so that a kill leaves the old or the new.

    A line that cannot be read (a copy that broke off) is left out and counted in `torn`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0

    def read(self) -> dict[str, Kept]:
        """By name; of two lines for one name the later holds."""
        results: dict[str, Kept] = {}
        self.torn = 0
        for line in self.path.read_bytes().splitlines() if self.path.is_file() else []:
            try:
                entry = Kept(**json.loads(line))
                results[entry.name] = entry
            except (ValueError, TypeError):
                self.torn += 1
        return results

    def add(self, entry: Kept) -> None:
        """Put `kept` in, in place of what there is of its name."""
        self._write({**self.read(), entry.name: entry})

    def drop(self, names: Iterable[str]) -> None:
        """Forget the measurements of these names."""
        gone, result = set(names), self.read()
        if gone & result.keys():
            self._write({name: entry for name, entry in result.items() if name not in gone})

    def _write(self, results: Mapping[str, Kept]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, "".join(json.dumps(asdict(entry)) + "\n" for entry in results.values()))


def still_holds(measurement: Measurement, previous: Mapping[str, Kept], device: str | None) -> bool:
    """Whether there is a result of this measurement, with these arguments, of this device (None: of any)."""
    result = _of(measurement, previous, device)
    return result is not None and result.failed is None


def failure(measurement: Measurement, previous: Mapping[str, Kept], device: str | None) -> dict[str, Any] | None:
    """`Kept.failed` of this measurement, with these arguments, on this device (None: on any)."""
    result = _of(measurement, previous, device)
    return None if result is None else result.failed


def _of(measurement: Measurement, previous: Mapping[str, Kept], device: str | None) -> Kept | None:
    result = previous.get(measurement.name)
    same = result is not None and result.arguments == json.loads(json.dumps(dict(measurement.arguments)))
    return result if same and result is not None and device in (None, result.device) else None


def fill(
    bench: Benchmark,
    plan: Sequence[Measurement | Best],
    previous: Mapping[str, Kept],
    *,
    device: str | None,
    reasons: Mapping[str, str],
    otherwise: str,
) -> None:
    """Every row of the plan into `bench`: with its figures, or null with the reason.

    device: whose results count; None: any. reasons: by name, why a measurement has no result; otherwise: the reason of
    those that have none there and did not fail.
    """
    here = {m.name: previous[m.name] for m in plan if isinstance(m, Measurement) and still_holds(m, previous, device)}
    for entry in plan:
        if isinstance(entry, Best):
            reason = {} if here else {"reason": otherwise}
            _put(bench, entry.row, reason or entry.figures(here))
            continue
        broken = failure(entry, previous, device)
        missing = {"reason": reasons.get(entry.name, otherwise if broken is None else broken["reason"])}
        for row in entry.rows:
            figures = here[entry.name].figures if entry.name in here else {row.figure: missing}
            _put(bench, row, figures.get(row.figure, {"reason": f"its measurement gave no {row.figure}"}))


def _put(bench: Benchmark, row: Row, figures: Mapping[str, Any]) -> None:
    given = {name: figures.get(name) for name in ("ours", "peer", "reason")}
    bench.row(
        row.what, unit=row.unit, peer_name=row.peer_name, bar_op=row.bar_op, bar_value=row.bar_value, **given
    )  # fmt: skip
