"""Makes the measurements that are missing; each result or failure is kept as soon as there is one.

A measurement is kept as begun before it starts, so that one that ends the process (a crash, the machine's memory)
counts as failed. What failed is tried again by the next run, after all others. Where a failure leaves a device that no
longer computes (an illegal access), the run ends.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import io
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._harness import Benchmark, table, where
from benchmarks.gpu.measurements import Best, Kept, Measurement, Store, failure, fill, still_holds

TRACEBACK = 8000
"""Characters that are kept of a traceback, its end."""
NO_DEVICE = "no CUDA device on this machine"
OUT_OF_MINUTES = "out of minutes: run the command again"
KILLED = "its process was killed (out of the machine's memory?): run the command again"
STOPPED = "stopped at the end of its minutes: run the command again"
PACKAGES = (
    *("torch", "triton", "transformers", "peft", "accelerate", "trl", "liger-kernel", "bitsandbytes"),
    *("geomloss", "pykeops", "numpy"),
)


@dataclass
class Run:
    """A run of a plan. pattern: of the names of the measurements to make. out: the results file; None: the committed
    one. commit: of this tree, where git does not know it. reasons: why a measurement has no result."""

    plan: Sequence[Measurement | Best]
    store: Store
    device: str = "cuda"
    pattern: str = "*"
    minutes: float | None = None
    out: Path | None = None
    commit: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    place: dict[str, Any] = field(default_factory=dict)

    @property
    def chosen(self) -> list[Measurement]:
        """The measurements that the pattern names."""
        results = [m for m in self.plan if isinstance(m, Measurement) and matches(m.name, self.pattern)]
        if not results:
            names = ", ".join(sorted({m.name.split("/")[0] for m in self.plan if isinstance(m, Measurement)}))
            raise SystemExit(f"--rows {self.pattern!r} names no measurement; ideas are {names} (as in 'speed/8b/*')")
        return results

    def missing(self, name: str) -> list[Measurement]:
        """Of the chosen those without a result of the device `name`, in the plan's order; those that failed last."""
        previous = self.store.read()
        if self.store.torn:
            print(f"{self.store.path}: {self.store.torn} torn lines left out; their measurements are made again")
        todo = [m for m in self.chosen if not still_holds(m, previous, name)]
        return sorted(todo, key=lambda m: failure(m, previous, name) is not None)

    def failed(self, name: str | None) -> dict[str, dict[str, Any]]:
        """`Kept.failed` of those that failed on the device `name` (None: on any), by measurement."""
        previous = self.store.read()
        results = {m.name: failure(m, previous, name) for m in self.chosen}
        return {measurement: broken for measurement, broken in results.items() if broken is not None}

    def all(self, *, fresh: bool = False) -> Path:
        """Measure what is missing as far as the minutes reach, and write the results file; returns its path."""
        from benchmarks.gpu.devices import Device, named_device

        chosen, name = self.chosen, named_device(self.device)
        if name is None:
            return self.write(None, NO_DEVICE)
        if fresh:
            self.store.drop([m.name for m in chosen])
        todo, previous = self.missing(name), self.store.read()
        print(f"{name}: {len(chosen) - len(todo)} of {len(chosen)} measurements are kept in {self.store.path}")
        self.place = where(PACKAGES)
        self.place["commit"] = self.place["commit"] or self.commit or "unknown"
        ends = float("inf") if self.minutes is None else time.time() + 60 * self.minutes
        for measurement in todo:
            if time.time() + _guess(measurement, previous.get(measurement.name)) > ends:
                self.reasons[measurement.name] = OUT_OF_MINUTES
                continue
            print(f"  {measurement.name} …", flush=True)
            worked = self.measure(measurement, name, ends)
            self.write(name, "not measured yet", quiet=True)
            if not worked and not Device(self.device).computes():
                print("the device computes no more: run the command again", flush=True)
                break
        path = self.write(name, "not measured yet: run the command again without --rows")
        for broken, why in self.failed(name).items():
            print(f"{broken}: {why['reason']}; its traceback is in {self.store.path}; the same command tries it again")
        return path

    def measure(self, measurement: Measurement, name: str, ends: float) -> bool:
        """Make one measurement and keep its result or failure; at `ends` this process does."""
        from benchmarks.gpu.devices import Device, first_line, out_of_memory

        began = time.perf_counter()

        def keep(figures: Any, reason: str = "", told: str = "", *, stopped: bool = False) -> None:
            failed = {"reason": reason, "traceback": told[-TRACEBACK:], "stopped": stopped} if reason else None
            took = round(time.perf_counter() - began, 2)
            self.store.add(Kept(measurement.name, dict(measurement.arguments), name, figures, took, self.place, failed))

        def stop() -> None:
            keep({}, STOPPED, stopped=True)
            self.write(name, "not measured yet", quiet=True)
            os._exit(0)

        keep({}, KILLED)
        Device(self.device).clear()
        clock = threading.Timer(max(ends - time.time(), 0.0), stop) if ends < float("inf") else None
        try:
            if clock is not None:
                clock.daemon = True
                clock.start()
            keep(call(measurement.function, device=self.device, **measurement.arguments))
        except Exception as error:
            what = "out of the device's memory" if out_of_memory(error) else f"failed: {type(error).__name__}"
            keep({}, f"{what}: {first_line(error)}", traceback.format_exc())
            print(f"  {measurement.name}: {what}: {first_line(error)}", flush=True)
            return False
        finally:
            if clock is not None:
                clock.cancel()
        return True

    def write(self, name: str | None, otherwise: str, *, quiet: bool = False) -> Path:
        """The results file from what is kept: of the device `name`, or of wherever it was measured."""
        previous = self.store.read()
        bench = Benchmark("gpu", packages=PACKAGES)
        with contextlib.redirect_stdout(io.StringIO()):
            fill(bench, self.plan, previous, device=name, reasons=self.reasons, otherwise=otherwise)
            held = [
                previous[m.name] for m in self.plan if isinstance(m, Measurement) and still_holds(m, previous, name)
            ]
            path = bench.finish(self.out, place=held[-1].place if held else None)
        if not quiet:
            measured = [row for row in bench.rows if row["runs"]]
            print(table(measured) if measured else "no row has a figure")
            for reason, rows in Counter(row["reason"] for row in bench.rows if not row["runs"]).most_common():
                print(f"{rows} rows without a figure: {reason}")
            print(f"{path}: {sum(row['holds'] is False for row in bench.rows)} bars missed")
        return path


def _guess(measurement: Measurement, previous: Kept | None) -> float:
    """Seconds that it may take: more than those after which it was stopped last time."""
    stopped = previous is not None and previous.failed is not None and previous.failed["stopped"]
    return max(measurement.seconds, 1.5 * previous.seconds) if stopped and previous is not None else measurement.seconds


def matches(name: str, pattern: str) -> bool:
    """Return True where a pattern (`*`, `?`, `[…]`; several with commas) names this measurement, or its idea."""
    return any(fnmatch.fnmatchcase(name, part) or name.startswith(f"{part}/") for part in pattern.split(",") if part)


def call(function: str, **arguments: Any) -> Any:
    """`module:function(**arguments)`."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)
