"""Runs the measurements that are missing, in child processes that keep each result as soon as there is one.

A measurement that fails is kept with its traceback, and tried again by the next run. A child goes on with the next one
where the device still computes: an illegal access leaves a CUDA context in which nothing works any more. What ends
without a word (a crash, the machine's memory, its time) costs the measurement under way alone.
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
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._harness import ROOT, Benchmark, table, where
from benchmarks.gpu.measurements import Best, Kept, Measurement, Store, failure, fill, still_holds
from flatshift.finetune.compute.memory import cublas_workspace_env, expandable_segments_env

TRACEBACK = 8000
"""Characters that are kept of a traceback, its end."""
NO_DEVICE = "no CUDA device on this machine"
OUT_OF_MINUTES = "out of minutes: run the command again"
PACKAGES = (
    *("torch", "triton", "transformers", "peft", "accelerate", "trl", "liger-kernel", "bitsandbytes"),
    *("geomloss", "pykeops", "numpy"),
)


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
        """Of the chosen those without a result of the device `name`, in the plan's order."""
        kept = self.store.read()
        if self.store.torn:
            print(f"{self.store.path}: {self.store.torn} torn lines left out; their measurements are made again")
        return [m for m in self.chosen if not still_holds(m, kept, name)]

    def failed(self, name: str | None) -> dict[str, dict[str, Any]]:
        """`Kept.failed` of those that failed on the device `name` (None: on any), by measurement."""
        kept = self.store.read()
        found = {m.name: failure(m, kept, name) for m in self.chosen}
        return {measurement: broken for measurement, broken in found.items() if broken is not None}

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
            self.reasons.setdefault(measurement.name, OUT_OF_MINUTES)
        path = self.write(name, "not measured yet: run the command again without --rows")
        for measurement, broken in self.failed(name).items():
            print(f"{measurement}: {broken['reason']}")
        if self.failed(name):
            print(f"tracebacks: {self.store.path}; the same command tries these again")
        return path

    def _guess(self, measurement: Measurement, kept: Kept | None) -> float:
        """Seconds that it may take: more than those after which it was stopped last time."""
        stopped = kept is not None and kept.failed is not None and kept.failed["stopped"]
        return max(measurement.seconds, 1.5 * kept.seconds) if stopped and kept is not None else measurement.seconds

    def child(self, todo: Sequence[Measurement], ends: float | None, name: str) -> list[Measurement]:
        """One process for as many of `todo` as it manages; returns those that are left to another."""
        under_way, began, done, kept = None, 0.0, set(), self.store.read()
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+b") as errors:
            task = Path(folder) / "todo.json"
            task.write_text(
                json.dumps(
                    {
                        "device": self.device,
                        "store": str(self.store.path.resolve()),
                        "ends": ends,
                        "commit": self.commit,
                        "todo": [
                            [m.name, m.function, dict(m.arguments), self._guess(m, kept.get(m.name))] for m in todo
                        ],
                    }
                )
            )
            process = subprocess.Popen(
                [sys.executable, "-c", f"from benchmarks.gpu.runner import work; work({str(task)!r})"],
                cwd=ROOT,
                env=_environment(self.device),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            with _ended(process, None if ends is None else ends - time.time()):
                assert process.stdout is not None
                for line in process.stdout:
                    kind, _, rest = line.rstrip("\n").partition(" ")
                    if kind == "BEGIN":
                        under_way, began = rest, time.time()
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
                stopped = ends is not None and time.time() >= ends
                said = _last(errors)
                reason = self.reasons[under_way] = _cause(code, said, stopped)
                (broken,) = (m for m in todo if m.name == under_way)
                failed = {"reason": reason, "traceback": said, "stopped": stopped}
                took = round(time.time() - began, 2)
                place = _place(self.commit)
                self.store.add(Kept(under_way, dict(broken.arguments), name, {}, took, place, failed))
                print(f"  {under_way}: {reason}", flush=True)
            elif code != 0 and not done and (ends is None or time.time() < ends):
                raise RuntimeError(f"the measuring process ended before it began: {_last(errors)}")
        return [m for m in todo if m.name not in done]

    def write(self, name: str | None, otherwise: str, *, quiet: bool = False) -> Path:
        """The results file from what is kept: of the device `name`, or of wherever it was measured."""
        kept = self.store.read()
        bench = Benchmark("gpu", packages=PACKAGES)
        with contextlib.redirect_stdout(io.StringIO()):
            fill(bench, self.plan, kept, device=name, reasons=self.reasons, otherwise=otherwise)
            held = [kept[m.name] for m in self.plan if isinstance(m, Measurement) and still_holds(m, kept, name)]
            path = bench.finish(self.out, place=held[-1].place if held else None)
        if not quiet:
            measured = [row for row in bench.rows if row["runs"]]
            print(table(measured) if measured else "no row has a figure")
            for reason, rows in Counter(row["reason"] for row in bench.rows if not row["runs"]).most_common():
                print(f"{rows} rows without a figure: {reason}")
            print(f"{path}: {sum(row['holds'] is False for row in bench.rows)} bars missed")
        return path


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


def _environment(device: str) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    found |= expandable_segments_env(found) | cublas_workspace_env(found)
    if device == "cpu":  # toy sizes: threads that wait for one another cost more than they compute
        found.setdefault("OMP_NUM_THREADS", "1")
    return {**found, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _last(errors: Any) -> str:
    """The end of what a child wrote to its standard error."""
    errors.seek(0)
    return str(errors.read().decode(errors="replace").strip()[-TRACEBACK:])


def _cause(code: int, said: str, stopped: bool) -> str:
    if stopped:
        return "stopped at the end of its minutes: run the command again"
    if code == -signal.SIGKILL:
        return "its process was killed (out of the machine's memory?): run the command again"
    return f"failed: {said.splitlines()[-1][:300] if said else f'its process ended with code {code}'}"


def _place(commit: str | None) -> dict[str, Any]:
    """Tree and machine of a kept result."""
    place = where(PACKAGES)
    return {**place, "commit": place["commit"] or commit or "unknown"}


# --------------------------------------------------------------------------------------------- inside the child


def work(file: str) -> None:
    """Make the measurements of a list in order, as far as its time reaches; each result or failure is kept at once."""
    from benchmarks.gpu.devices import Device, first_line, out_of_memory

    asked = json.loads(Path(file).read_text())
    parent, device, store = os.getppid(), Device(asked["device"]), Store(Path(asked["store"]))
    place = _place(asked["commit"])
    for name, function, arguments, guess in asked["todo"]:
        if asked["ends"] is not None and time.time() + guess > asked["ends"]:
            print(f"LEFT {name} {OUT_OF_MINUTES}", flush=True)
            continue
        if os.getppid() != parent:
            return  # nobody listens any more
        print(f"BEGIN {name}", flush=True)
        began, figures, reason, failed = time.perf_counter(), {}, "", None
        device.clear()
        try:
            figures = call(function, device=asked["device"], **arguments)
        except Exception as error:
            full = out_of_memory(error)
            what = "out of the device's memory" if full else f"failed: {type(error).__name__}"
            reason = f"{what}: {first_line(error)}"
            failed = {"reason": reason, "traceback": traceback.format_exc()[-TRACEBACK:], "stopped": False}
        took = time.perf_counter() - began
        store.add(Kept(name, arguments, device.model, figures, round(took, 2), place, failed))
        print(f"KEPT {name}" if failed is None else f"LEFT {name} {reason}", flush=True)
        if failed is not None and not device.computes():
            return  # the next child begins with a context of its own


def call(function: str, **arguments: Any) -> Any:
    """`module:function(**arguments)`."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)
