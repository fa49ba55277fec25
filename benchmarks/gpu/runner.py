"""Runs the measurements that are missing, in child processes that keep each result as soon as there is one.

A child goes on with the next measurement after one that ran out of the device's memory, and ends after any other
failure: an illegal access leaves a CUDA context in which nothing works any more. What ends without a word (a crash, the
machine's memory, its time) costs the measurement under way alone.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._harness import ROOT, Benchmark, where
from benchmarks.gpu.measurements import Best, Kept, Measurement, Store, fill, still_holds

GRACE_S = 20.0
"""How long after the end of its minutes a measurement may go on before it is stopped."""
NO_DEVICE = "no CUDA device on this machine"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl", "bitsandbytes", "geomloss", "pykeops", "numpy")


@dataclass
class Run:
    """What is asked for."""

    plan: Sequence[Measurement | Best]
    store: Store
    device: str = "cuda"
    pattern: str = "*"
    """Of the names of the measurements to make."""
    minutes: float | None = None
    out: Path | None = None
    """The results file; None: the committed one."""
    commit: str | None = None
    """Of this tree, where git does not know it."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By measurement, why it has no result."""

    # ------------------------------------------------------------------ choice

    @property
    def chosen(self) -> list[Measurement]:
        """The measurements that the pattern names."""
        found = [m for m in self.plan if isinstance(m, Measurement) and matches(m.name, self.pattern)]
        if not found:
            names = ", ".join(sorted({m.name.split("/")[0] for m in self.plan if isinstance(m, Measurement)}))
            raise SystemExit(f"--rows {self.pattern!r} names no measurement; ideas are {names} (as in 'speed/8b/*')")
        return found

    def missing(self, name: str) -> list[Measurement]:
        """Of the chosen those without a result of the device `name`."""
        kept = self.store.read()
        if self.store.torn:
            print(f"{self.store.path}: {self.store.torn} torn lines left out; their measurements are made again")
        return [m for m in self.chosen if not still_holds(m, kept, name)]

    # ------------------------------------------------------------------ the whole

    def all(self, *, fresh: bool = False) -> Path:
        """Measure what is missing as far as the minutes reach, and write the results file; returns its path."""
        from benchmarks.gpu.devices import named_device

        ends = None if self.minutes is None else time.time() + 60 * self.minutes
        name = named_device(self.device)
        if name is None:
            self.chosen  # noqa: B018  a pattern that names nothing is refused everywhere
            return self.write(None, NO_DEVICE)
        if fresh:
            self.store.drop([m.name for m in self.chosen])
        todo = self.missing(name)
        total = len(self.chosen)
        print(f"{name}: {total - len(todo)} of {total} measurements are kept in {self.store.path}", flush=True)
        while todo and (ends is None or time.time() < ends):
            todo = self.child(todo, ends, name)
        for measurement in todo:
            self.reasons.setdefault(measurement.name, "out of minutes: run the command again")
        return self.write(name, "not measured yet: run the command again without --rows")

    def child(self, todo: Sequence[Measurement], ends: float | None, name: str) -> list[Measurement]:
        """One process for as many of `todo` as it manages; returns those that are left to another."""
        under_way, done = None, set()
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+b") as errors:
            task = Path(folder) / "todo.json"
            task.write_text(
                json.dumps(
                    {
                        "device": self.device,
                        "store": str(self.store.path.resolve()),
                        "ends": ends,
                        "commit": self.commit,
                        "todo": [[m.name, m.function, dict(m.arguments), m.seconds] for m in todo],
                    }
                )
            )
            process = subprocess.Popen(
                [sys.executable, "-c", f"from benchmarks.gpu.runner import work; work({str(task)!r})"],
                cwd=ROOT,
                env=_environment(),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            with _ended(process, None if ends is None else ends + GRACE_S - time.time()):
                assert process.stdout is not None
                for line in process.stdout:
                    kind, _, rest = line.rstrip("\n").partition(" ")
                    if kind == "BEGIN":
                        under_way = rest
                        print(f"  {rest} …", flush=True)
                    elif kind in ("KEPT", "LEFT"):
                        measured, _, reason = rest.partition(" ")
                        done.add(measured)
                        under_way = None
                        if reason:
                            self.reasons[measured] = reason
                            print(f"  {measured}: {reason}", flush=True)
                        self.write(name, "not measured yet", quiet=True)
                    else:
                        print(f"    {line.rstrip()}", flush=True)
                code = process.wait()
            if under_way is not None:
                done.add(under_way)
                self.reasons[under_way] = _cause(code, errors)
                print(f"  {under_way}: {self.reasons[under_way]}", flush=True)
            elif code != 0 and not done:
                raise RuntimeError(f"the measuring process ended before it began: {_cause(code, errors)}")
        return [m for m in todo if m.name not in done]

    def write(self, name: str | None, otherwise: str, *, quiet: bool = False) -> Path:
        """The results file from what is kept: of the device `name`, or of wherever it was measured."""
        kept = self.store.read()
        bench = Benchmark("gpu", packages=PACKAGES)
        with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
            fill(bench, self.plan, kept, device=name, reasons=self.reasons, otherwise=otherwise)
            held = [kept[m.name] for m in self.plan if isinstance(m, Measurement) and still_holds(m, kept, name)]
            return bench.finish(self.out, place=held[-1].place if held else None)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern (`*`, `?`, `[…]`; several with commas) names this measurement, or an idea that it is of."""
    return any(fnmatch.fnmatchcase(name, part) or name.startswith(f"{part}/") for part in pattern.split(",") if part)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str], after: float | None) -> Iterator[None]:
    """The child and its children end with this block, or `after` seconds."""

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    clock = None if after is None else threading.Timer(max(after, 0.0), end)
    if clock is not None:
        clock.daemon = True
        clock.start()
    try:
        yield
    finally:
        if clock is not None:
            clock.cancel()
        if process.poll() is None:
            end()
            process.wait()


def _environment() -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    found.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return {**found, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _cause(code: int, errors: Any) -> str:
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    if code == -signal.SIGKILL:
        return "its process was killed (out of minutes, or of the machine's memory): run the command again"
    return f"failed: {said[-1][:300] if said else f'its process ended with code {code}'}"


# --------------------------------------------------------------------------------------------- inside the child


def work(file: str) -> None:
    """Make the measurements of a list in order, as far as its time reaches; each result is kept at once."""
    from benchmarks.gpu.devices import Device, first_line, out_of_memory

    asked = json.loads(Path(file).read_text())
    parent, device, store = os.getppid(), Device(asked["device"]), Store(Path(asked["store"]))
    place = where(PACKAGES)
    place["commit"] = place["commit"] or asked["commit"] or "unknown"
    for name, function, arguments, guess in asked["todo"]:
        if asked["ends"] is not None and time.time() + guess > asked["ends"]:
            print(f"LEFT {name} out of minutes: run the command again", flush=True)
            continue
        if os.getppid() != parent:
            return  # nobody listens any more
        print(f"BEGIN {name}", flush=True)
        began = time.perf_counter()
        device.clear()
        try:
            figures = call(function, device=asked["device"], **arguments)
        except Exception as error:
            if out_of_memory(error):
                print(f"LEFT {name} out of the device's memory: {first_line(error)}", flush=True)
                continue
            print(f"LEFT {name} failed: {type(error).__name__}: {first_line(error)}", flush=True)
            raise
        took = time.perf_counter() - began
        store.add(Kept(name, arguments, device.model, figures, round(took, 2), place))
        print(f"KEPT {name}", flush=True)


def call(function: str, **arguments: Any) -> Any:
    """`module:function(**arguments)`."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)
