"""Progress of a study and its remaining time: a live table on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flatshift.experiments.run.console import Console, drawn
from flatshift.experiments.studies.cell import Cell, point_label
from flatshift.finetune.figures import format_duration

_MIN_FITTED = 4
"""Fewest finished cells to fit the three coefficients of a `CostModel`; below, time is proportional to the tokens."""
_LINE_INTERVAL_S = 10.0
_COUNTS = "of", "done", "running", "failed", "diverged"
"""Numbers of cells that are kept for a point; `done` and the last two are statuses of results."""
_MAX_ROWS = 20
"""Most points in the live table; with more, active ones are shown."""


def cost_terms(cell: Cell) -> tuple[float, float, float]:
    """Return the terms of a cell's time: (1, tokens of all steps at most, those tokens · rank)."""
    recipe = cell.resolved.recipe
    train, warmup = recipe.train, recipe.warmup
    rows = train.steps * train.batch_size * train.accumulate
    if warmup is not None:
        rows += warmup.steps * warmup.batch_size * warmup.accumulate
    tokens = float(rows * train.max_length)
    return 1.0, tokens, tokens * recipe.adapter.rank


class CostModel:
    """Predict the seconds of cells. A point with finished cells gets their median. Others: seconds ≈ a + b·tokens +
    c·tokens·rank with a, b, c ≥ 0, fitted to the relative error of the finished cells."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float]] = []
        self._seconds: list[float] = []
        self._points: dict[str, list[float]] = defaultdict(list)
        self._fitted: tuple[int, tuple[float, float, float]] | None = None

    def observe(self, cell: Cell, seconds: float) -> None:
        """Record that a cell took `seconds`."""
        if seconds > 0:
            self._rows.append(cost_terms(cell))
            self._seconds.append(seconds)
            self._points[point_label(cell.point)].append(seconds)

    def predict(self, cells: Iterable[Cell]) -> float | None:
        """Return the seconds of all `cells` together, one after another; None while nothing has finished."""
        if not self._seconds:
            return None
        if self._fitted is None or self._fitted[0] != len(self._seconds):
            self._fitted = (len(self._seconds), self._fit())
        total = 0.0
        for cell in cells:
            if measured := self._points.get(point_label(cell.point)):
                total += statistics.median(measured)
            else:
                total += sum(w * x for w, x in zip(self._fitted[1], cost_terms(cell), strict=True))
        return total

    def _fit(self) -> tuple[float, float, float]:
        if len(self._seconds) < _MIN_FITTED:
            return 0.0, sum(self._seconds) / sum(row[1] for row in self._rows), 0.0
        import numpy as np
        from scipy.optimize import nnls

        seconds = np.array(self._seconds)
        relative = np.array(self._rows) / seconds[:, None]
        scale = relative.max(axis=0)  # tokens are millions: scale the columns to one size
        weights, _ = nnls(relative / scale, np.ones(len(seconds)))
        a, b, c = (weights / scale).tolist()
        return a, b, c


class CellProgress:
    """Count cells by point and state, and estimate the remaining time. cells: the plan. results: of its cells that were
    finished before. workers: cells at the same time."""

    def __init__(
        self,
        cells: Sequence[Cell],
        results: Mapping[str, Mapping[str, Any]],
        console: Console,
        *,
        label: str,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.label, self.workers, self._clock = console, label, max(workers, 1), clock
        self._point = {cell.key: point_label(cell.point) for cell in cells}
        self._counts = {name: [0] * len(_COUNTS) for name in dict.fromkeys(self._point.values())}
        self._unfinished = {cell.key: cell for cell in cells}
        self._running: dict[str, Cell] = {}
        self._costs = CostModel()
        for cell in list(self._unfinished.values()):
            self._counts[self._point[cell.key]][0] += 1
            if (result := results.get(cell.key)) is not None:
                self._count(cell, result)
        self.before = self.finished
        self._start = self._last_line = clock()
        self._refresh: Callable[[], None] | None = None

    @property
    def total(self) -> int:
        """Number of cells in the plan."""
        return len(self._point)

    @property
    def finished(self) -> int:
        """Number of cells with a result."""
        return self.total - len(self._unfinished)

    def began(self, cell: Cell) -> None:
        """Count a cell that a worker took."""
        self._running[cell.key] = cell
        self._counts[self._point[cell.key]][2] += 1
        self.tick()

    def returned(self, cell: Cell) -> None:
        """Count a cell that no worker is at any more, whatever came of it."""
        if self._running.pop(cell.key, None) is not None:
            self._counts[self._point[cell.key]][2] -= 1

    def ended(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Count a cell that has its result."""
        self.returned(cell)
        self._count(cell, result)
        if result["status"] != "done":
            self.console.say(f"{result['status']} {cell.key} ({cell.label}): {result['reason']}")
        self.tick(cell.label)

    def _count(self, cell: Cell, result: Mapping[str, Any]) -> None:
        self._unfinished.pop(cell.key, None)
        status = result["status"]
        self._counts[self._point[cell.key]][_COUNTS.index(status)] += 1
        if status == "done":
            self._costs.observe(cell, float(result.get("wall_s", result.get("seconds")) or 0))

    def eta(self) -> float | None:
        """Return seconds until the last cell is finished; None while nothing has finished. Running cells count half."""
        waiting = self._costs.predict(cell for key, cell in self._unfinished.items() if key not in self._running)
        running = self._costs.predict(self._running.values())
        if waiting is None or running is None:
            return None
        return (waiting + running / 2) / min(self.workers, max(len(self._unfinished), 1))

    def line(self, note: str = "") -> str:
        """Return one line for a log."""
        finished = self.finished
        minutes = (self._clock() - self._start) / 60
        rate = f", {(finished - self.before) / minutes:.3g} cells/min" if finished > self.before and minutes > 0 else ""
        seconds = self.eta()
        eta = f", ETA {format_duration(round(seconds))}" if seconds is not None and finished < self.total else ""
        totals = [(name, sum(counts[i] for counts in self._counts.values())) for i, name in enumerate(_COUNTS)]
        failed = "".join(f", {count} {name}" for name, count in totals[3:] if count)
        return f"{self.label}: {finished}/{self.total} cells{failed}{rate}{eta}{'  ' + note if note else ''}"

    def rows(self, limit: int = _MAX_ROWS) -> tuple[list[tuple[str, int, int, int, int, int]], int]:
        """Return ((point, of, done, running, failed, diverged), …) of at most `limit` points in plan order, and how
        many not. With more points, running ones come first, then those partly done, failed, and waiting."""
        names = list(self._counts)
        if len(names) > limit:

            def urgency(name: str) -> int:
                total, done, running, *failed = self._counts[name]
                return 0 if running else 1 if 0 < done + sum(failed) < total else 2 if any(failed) else 4 if done else 3

            chosen = set(sorted(names, key=urgency)[:limit])
            names = [name for name in names if name in chosen]
        rows = [(name, *self._counts[name]) for name in names]
        return rows, len(self._counts) - len(rows)  # type: ignore[return-value]

    def tick(self, note: str = "") -> None:
        """Update the display if it is due."""
        if self._refresh is not None:
            self._refresh()
        elif not self.console.terminal and self._clock() - self._last_line > _LINE_INTERVAL_S:
            self._last_line = self._clock()
            self.console.say(self.line(note))

    @contextmanager
    def displayed(self) -> Iterator[None]:
        """Show the table (terminal) while inside; print a last line at the end."""
        if self.console.terminal:
            from rich.live import Live

            with drawn(lambda console: Live(console=console, auto_refresh=False, transient=True)) as live:
                self._refresh = lambda: live.update(self._renderable(), refresh=True)
                self._refresh()
                try:
                    yield
                finally:
                    self._refresh = None
        else:
            yield
        self.console.say(self.line())

    def _renderable(self) -> Any:
        from rich.table import Table

        rows, hidden = self.rows()
        table = Table(caption=self.line(), caption_justify="left", box=None, pad_edge=False)
        table.add_column("point" if not hidden else f"point ({hidden} more not shown)", overflow="fold")
        for name in (*_COUNTS[1:], "of"):
            table.add_column(name, justify="right")
        for name, total, done, running, *failed in rows:
            red = [f"[red]{count}[/]" if count else "" for count in failed]
            table.add_row(name, str(done), str(running or ""), *red, str(total))
        return table
