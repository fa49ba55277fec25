"""What every benchmark shares: CPU-seconds, A B B A order, capped children, and the results file of the contract.

    bench = Benchmark("train_step")
    ours, peer = interleave(our_run, peer_run, rounds=2)           # A B B A, CPU-seconds each
    bench.row("step, fp32", "CPU-s", ours=ours, peer=peer, peer_name="Trainer", maximum=1.0)
    bench.row("step, bf16", "CPU-s", peer_name="Trainer", reason="needs a CUDA device")
    bench.finish()                                                 # table + benchmarks/results/train_step.json

A bar is judged on the median ratio where a row has a peer figure, else on `ours`; `holds` is always computed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import math
import operator
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from benchmarks import _instructions
from flatshift.finetune.atomic import write_json
from flatshift.finetune.compute.memory import process_bytes
from flatshift.finetune.machine import cpu_info

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BarOp = Literal["<=", "<", ">=", ">", "=="]
_JUDGE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
}
Figure = float | Sequence[float] | None


# --------------------------------------------------------------------------------------------- measuring


def cpu_clock() -> float:
    """CPU-seconds of this process so far: user + system, over all its threads and the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def held_bytes() -> float:
    """Bytes of all tensors that this process holds now, whoever made them."""
    import gc

    import torch

    gc.collect()
    alive = {}
    for tensor in (t for t in gc.get_objects() if isinstance(t, torch.Tensor)):
        with contextlib.suppress(RuntimeError):  # of a DTensor, whose part is a tensor of its own
            alive[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return float(sum(alive.values()))


def peak_bytes(step: Callable[[], Any]) -> float:
    """Bytes alive at the worst moment of `step()`, by the allocator's record: all tensors there are, and its own."""
    import torch

    held = held_bytes()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    kineto: Any = profiler.profiler
    events = [e for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return held + highest


def cpu_seconds(run: Callable[[], Any]) -> float:
    """CPU-seconds that `run()` costs; on a shared machine steadier than wall time."""
    start = cpu_clock()
    run()
    return cpu_clock() - start


def interleave(
    ours: Callable[[], Any], peer: Callable[[], Any], *, rounds: int = 2, measure: Callable[..., float] = cpu_seconds
) -> tuple[list[float], list[float]]:
    """Run `rounds` times A B B A; element i of both lists comes from neighbouring runs, so ratios may be paired."""
    result = in_turn({"ours": ours, "peer": peer}, 2 * rounds, measure=measure)
    return result["ours"], result["peer"]


def in_turn(
    ways: Mapping[str, Callable[[], Any]], rounds: int, *, measure: Callable[..., float] = cpu_seconds
) -> dict[str, list[float]]:
    """Measure each of `ways`, forwards and backwards through them; element i of all lists comes from one round."""
    results: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            results[name].append(measure(ways[name]))
    return results


def call(run: Callable[[], float]) -> float:
    """`measure` of runs that return their own figure."""
    return run()


def limit_threads(count: int) -> None:
    """Give this process `count` compute threads: torch, BLAS and OpenMP pools alike."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(count)
    threadpool_limits(count)


class PeakMemory:
    """Context manager: `.bytes` is the peak of the anonymous resident set above its level at entry (sampled), `.cpu`
    the CPU-seconds that the sampling took: the process spent them, and nobody who is measured did."""

    def __init__(self, interval_s: float = 0.005):
        self.interval_s = interval_s
        self.bytes = 0
        self.cpu = 0.0

    def __enter__(self) -> PeakMemory:
        self._base = anonymous_rss()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.bytes = max(self.bytes, anonymous_rss() - self._base)
        self.cpu = time.thread_time()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_rss() - self._base)  # a busy machine may never have let it look


def anonymous_rss() -> int:
    """Bytes of anonymous resident memory (mapped files do not count)."""
    result = process_bytes("RssAnon")
    if result is None:
        raise RuntimeError("RssAnon is not reported by this kernel")
    return result


# --------------------------------------------------------------------------------------------- children


class CapReached(Exception):
    """A child used up its CPU-seconds (or its memory) before it was done."""


def cap_cpu(seconds: float | None) -> None:
    """Called inside a child: from now on at most `seconds` of CPU; None lifts the cap again."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = resource.RLIM_INFINITY if seconds is None else math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def in_child(
    function: str,
    *,
    threads: int = 1,
    wall_cap_s: float = 1800.0,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """Run `module:function(**arguments)` in a fresh process with `threads` threads and return its JSON-able result.

    environment: variables that the process gets besides this one's (`benchmarks._instructions.rehearsal`).

    The function calls `cap_cpu` itself once its inputs are ready, so that imports and data are not charged.
    Raises CapReached when the child was stopped by a cap, RuntimeError with its last words when it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        code = (
            f"from benchmarks._harness import _child; _child({function!r}, {json.dumps(arguments)!r}, {str(answer)!r})"
        )
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env={**os.environ, **limits, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
                stderr=subprocess.PIPE,
                timeout=wall_cap_s,
            )
        except subprocess.TimeoutExpired as error:
            raise CapReached(f"stopped after {wall_cap_s:.0f} s of wall time") from error
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            cause = "its cap of CPU-seconds" if done.returncode == -signal.SIGXCPU else "the machine's memory"
            raise CapReached(f"stopped at {cause}")
        if done.returncode != 0:
            raise RuntimeError(f"{function} failed: {done.stderr.decode(errors='replace').strip()[-2000:]}")
        return json.loads(answer.read_text())


def _child(function: str, arguments: str, answer: str) -> None:
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(answer).write_text(json.dumps(result))


def on_ranks(function: str, ranks: int, *, wall_cap_s: float = 900.0, **arguments: Any) -> list[Any]:
    """Call `module:function(**arguments)` on fresh processes that form a gloo group; their results by rank.

    Raises RuntimeError with the last words of the rank that failed first, or that is not done when the time is up.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            place: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            place |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
            variables = {**os.environ, **{name: str(value) for name, value in place.items()}}
            code = f"from benchmarks._harness import _rank; _rank({function!r}, {json.dumps(arguments)!r}, {folder!r})"
            log = (Path(folder) / f"log{rank}").open("wb")
            command, result = [sys.executable, "-c", code], None if rank == 0 else log
            started.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=result, stderr=log))
        try:
            failed = _first_failure(started, deadline=time.monotonic() + wall_cap_s)
        finally:
            for process in started:
                process.kill()
        if failed is not None:
            words = (Path(folder) / f"log{failed}").read_text(encoding="utf-8", errors="replace")
            ended = f"ended with {started[failed].returncode}"
            raise RuntimeError(f"rank {failed} of {ranks} {ended}:\n{words[-3000:]}")
        return [json.loads((Path(folder) / f"result{rank}").read_text()) for rank in range(ranks)]


def _first_failure(processes: list[subprocess.Popen[bytes]], *, deadline: float) -> int | None:
    """The rank that ended badly before all others, whose ends are only its echo; None if all ended well."""
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            if process.poll():
                return rank
            if process.returncode == 0:
                del running[rank]
        if time.monotonic() > deadline:
            return min(running)
        time.sleep(0.05)
    return None


def _rank(function: str, arguments: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=datetime.timedelta(minutes=10)
    )
    _child(function, arguments, f"{folder}/result{rank}")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort at interpreter shutdown


# --------------------------------------------------------------------------------------------- the results file


class Benchmark:
    """Collects rows and writes `benchmarks/results/NAME.json` with machine, versions and commit."""

    def __init__(self, name: str, *, packages: Sequence[str] = ("torch", "numpy"), command: str | None = None):
        self.name = name
        self.command = command or f"python -m benchmarks.{name}"
        self.packages = packages
        self.rows: list[dict[str, Any]] = []

    def row(
        self,
        what: str,
        unit: str,
        *,
        ours: Figure = None,
        peer: Figure = None,
        peer_name: str | None = None,
        maximum: float | None = None,
        minimum: float | None = None,
        exactly: float | None = None,
        bar_op: BarOp | None = None,
        bar_value: float | None = None,
        bar: str | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """Add one row. Lists are repeated runs (paired in order); `ours` and `peer` are written as medians.

        maximum, minimum and exactly are the bars <=, >= and ==; any other is `bar_op` with `bar_value`.
        `reason` is demanded where a figure that the row is about is missing: `ours` is None, or a peer is named
        without a figure.
        """
        for op, value in (("<=", maximum), (">=", minimum), ("==", exactly)):
            if value is not None:
                bar_op, bar_value = cast(BarOp, op), value
        mine, theirs = _runs(ours), _runs(peer)
        if (not mine or (peer_name and not theirs)) and not reason:
            raise ValueError(f"row {what!r}: a missing figure needs a reason")
        if (bar_op is None) != (bar_value is None):
            raise ValueError(f"row {what!r}: bar_op and bar_value belong together")
        if len(theirs) == 1:
            theirs = theirs * len(mine)
        if mine and theirs and len(mine) != len(theirs):
            raise ValueError(f"row {what!r}: {len(mine)} runs of ours beside {len(theirs)} of the peer")
        ratios = [m / t for m, t in zip(mine, theirs, strict=False) if t]
        judged = ratios if peer_name else mine  # beside a peer a bar is on the ratio
        evaluation = statistics.median(judged) if judged else None
        if bar is None and bar_op is not None:
            bar = f"{'ratio' if ratios or peer_name else unit} {bar_op} {bar_value:g}"
        row: dict[str, Any] = {
            "what": what,
            "ours": statistics.median(mine) if mine else None,
            "peer": statistics.median(theirs) if theirs else None,
            "peer_name": peer_name,
            "unit": unit,
            "ratio_median": statistics.median(ratios) if ratios else None,
            "ratio_min": min(ratios) if ratios else None,
            "ratio_max": max(ratios) if ratios else None,
            "runs": len(mine),
            "bar_op": bar_op,
            "bar_value": bar_value,
            "bar": bar,
            "holds": bool(_JUDGE[bar_op](evaluation, bar_value))
            if bar_op and mine and evaluation is not None
            else None,
        }
        if reason:
            row["reason"] = reason
        self.rows.append(row)
        print(_line(row), flush=True)
        return row

    def compare(
        self,
        what: str,
        unit: str,
        ours: Callable[[], Any],
        peer: Callable[[], Any],
        peer_name: str,
        *,
        rounds: int = 2,
        measure: Callable[..., float] = cpu_seconds,
        **bar: Any,
    ) -> dict[str, Any]:
        """Run both A B B A and add the row of them."""
        mine, theirs = interleave(ours, peer, rounds=rounds, measure=measure)
        return self.row(what, unit, ours=mine, peer=theirs, peer_name=peer_name, **bar)

    def finish(self, path: Path | None = None, *, place: Mapping[str, Any] | None = None) -> Path:
        """Print the table, write the JSON, return its path.

        place: `commit`, `dirty`, `machine` and `versions` of rows that were measured earlier; None: here and now.
        """
        if not self.rows:
            raise ValueError(f"benchmark {self.name!r} has no rows")
        path = path or RESULTS / f"{self.name}.json"
        place = place or where(self.packages)
        write_json(path, {"name": self.name, "command": self.command, **place, "rows": self.rows})
        print(table(self.rows))
        failed = sum(row["holds"] is False for row in self.rows)
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        print(f"{shown}: {len(self.rows)} rows, {failed} bars missed")
        return path


def rows_by_group(bench: Benchmark, groups: Mapping[str, Callable[[Benchmark], object]], asked: Sequence[str]) -> None:
    """Measure the groups that are `asked` for (all where none is); rows of the others stay as this machine measured
    them. Each row gets its `group` and the `commit` that it is of."""
    file = RESULTS / f"{bench.name}.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    known = before.get("rows", []) if _whole_gib(before.get("machine")) == _whole_gib(machine()) else []
    for name, measure in groups.items():
        start = len(bench.rows)
        if asked and name not in asked:
            bench.rows += [row for row in known if row.get("group") == name]
            continue
        measure(bench)
        for row in bench.rows[start:]:
            row |= {"group": name, "commit": commit()}


def measure_groups(name: str, groups: Mapping[str, Callable[[Benchmark], object]], *, packages: Sequence[str]) -> None:
    """The command of a benchmark in groups: those that are named on the command line are measured, by default all."""
    parser = argparse.ArgumentParser(description="Rows of the other groups stay as this machine measured them.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", choices=[*groups, []], help=", ".join(groups))
    asked = parser.parse_args().groups
    limit_threads(1)
    bench = Benchmark(name, packages=packages)
    rows_by_group(bench, groups, asked)
    bench.finish()


def _whole_gib(place: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A machine with its memory in GiB: some KiB more or less are another start of the same."""
    return None if place is None else {**place, "memory": round(place.get("memory", 0) / 2**30)}


def where(packages: Sequence[str]) -> dict[str, Any]:
    """What the results file says of the tree, the machine and the packages that rows are measured with."""
    return {
        "commit": commit(),
        "dirty": bool(_git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")),
        "machine": machine(),
        "versions": versions(packages),
    }


def commit() -> str:
    """Of the tree that is measured; a bundle (`scripts/bundle.py`) has no repository, but a file."""
    file = ROOT / "commit"
    return file.read_text().strip() if file.is_file() else _git("rev-parse", "HEAD")


def machine() -> dict[str, Any]:
    """`cpu` name, `cores` usable, `memory` in bytes, `gpu` name or None; `instructions` that the CPU has for matrix
    products, and `rehearsal`, the variables that hide some of them from this process, or None."""
    gpu = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True)
        gpu = asked.stdout.strip().splitlines()[0] if asked.returncode == 0 and asked.stdout.strip() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_info()[0],
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "gpu": gpu,
        "instructions": _instructions.flags(),
        "rehearsal": _instructions.in_force() or None,
    }


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Installed version of each distribution (None: absent), and of Python."""
    results: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            results[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            results[package] = None
    return results


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as an aligned text table."""
    head = ["what", "ours", "peer", "unit", "ratio (min – max)", "runs", "bar", "holds"]
    body = []
    for r in rows:
        spread = (
            ""
            if r["ratio_median"] is None
            else f"{r['ratio_median']:.3g} ({r['ratio_min']:.3g} – {r['ratio_max']:.3g})"
        )
        peer = " ".join(filter(None, [_number(r["peer"]), r["peer_name"]]))
        holds = {True: "yes", False: "NO", None: "–"}[r["holds"]]
        body.append([r["what"], _number(r["ours"]), peer, r["unit"], spread, str(r["runs"]), r["bar"] or "", holds])
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [head, *body]]
    reasons = [f"  {r['what']}: {r['reason']}" for r in rows if r.get("reason")]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *(["notes:", *reasons] if reasons else [])])


def _runs(figure: Figure) -> list[float]:
    if figure is None:
        return []
    return [float(figure)] if isinstance(figure, int | float) else [float(value) for value in figure]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _line(row: dict[str, Any]) -> str:
    ratio = "" if row["ratio_median"] is None else f"  ratio {row['ratio_median']:.3g}"
    return f"· {row['what']}: {_number(row['ours'])} {row['unit']}{ratio}" + (
        f"  ({row['reason']})" if row.get("reason") else ""
    )


def _git(*arguments: str) -> str:
    """What git says; empty where there is no git, or no repository."""
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()
