"""Commands in forks of a process that has imported everything: they cost what they compute, not what they load."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._harness import ROOT

BUG = 70
"""The exit code of a command that ends by our own bug, and of a fork that does not come to its command."""
STUCK_S = 240.0
"""A command on inputs of a campaign takes seconds."""
Around = Callable[[], contextlib.AbstractContextManager[Any]]
_LIBRARIES = ("peft", "safetensors.torch", "pyarrow.parquet", "sklearn.decomposition", "scipy.stats")


class Ended(NamedTuple):
    """Exit code of a command, negative for a signal; CPU-seconds of it and what it started."""

    code: int
    cpu: float


def import_all() -> None:
    """Import whatever any command imports, so that no fork pays for it; with one thread, which a fork survives."""
    import gc

    import torch
    import transformers

    torch.set_num_threads(1)
    home = importlib.import_module("flatshift")
    for module in pkgutil.walk_packages(home.__path__, "flatshift."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in (*_LIBRARIES, "rich.progress"):
        importlib.import_module(name)
    _ = transformers.AutoTokenizer, transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    gc.freeze()


def fork(
    argv: Sequence[str], *, cwd: Path, out: int, err: int | None = None, around: Around = contextlib.nullcontext
) -> int:
    """Run `flatshift` with `argv` in a child, in a group of its own; returns its process id.

    out, err: open files that get what it says; without `err` all goes into `out`. around: makes the context that the
    command runs in, in the child.
    """
    child = os.fork()
    if child:
        return child
    code = BUG
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(out if err is None else err, 2)
        os.chdir(cwd)
        sys.argv = ["flatshift", *argv]
        from flatshift.cli import run

        with around():
            code = run(list(argv))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = BUG
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def wait(child: int, limit_s: float = STUCK_S) -> Ended | None:
    """Wait for a fork and end its group; None for one that had to be ended after `limit_s`."""
    ends = time.monotonic() + limit_s
    done = 0
    while not done and time.monotonic() < ends:
        done, status, usage = os.wait4(child, os.WNOHANG)
        time.sleep(0 if done else 0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # ranks that it left
    if not done:
        os.waitpid(child, 0)
        return None
    return Ended(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)


def run_forked(argv: Sequence[str], said: Path, around: Around, disk: Path) -> int:
    """The exit code of a command in a fork of this process; −9 for a killed one.

    said: file that gets its output. around: makes the context that it runs in. Raises TimeoutError if it does not end.
    """

    @contextlib.contextmanager
    def child_of_disk() -> Iterator[None]:
        os.environ["FLATSHIFT_CACHE"] = str(disk / "cache")
        os.environ["PYTHONPATH"] = str(ROOT)
        from flatshift.cli import _on_terminate

        signal.signal(signal.SIGTERM, _on_terminate)
        with around():
            yield

    with said.open("ab") as out:
        ended = wait(fork(argv, cwd=disk, out=out.fileno(), around=child_of_disk))
    if ended is None:
        raise TimeoutError(f"{argv[0]} did not end in {STUCK_S:.0f} s")
    return ended.code


def cpu_limit(seconds: float) -> None:
    """End this process after so many CPU-seconds, even where nobody waits for it."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))


# --------------------------------------------------------------------------------------------- a server


class Server:
    """A process that has imported everything and calls functions, which run commands in forks of it."""

    def __init__(self, library: Path | None = None) -> None:
        """library: in front of libc (`durable_calls`)."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        if library is not None:
            environment["LD_PRELOAD"] = str(library)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.faults.forks import serve; serve()"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, function: str, **arguments: Any) -> Any:
        """What `module:function(**arguments)` returns there; both sides are JSON."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"function": function, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"failed": "the server ended"}')
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["done"]

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def serve() -> None:
    """Answer jobs from standard input, one JSON document a line, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_all()
    for line in sys.stdin:
        job = json.loads(line)
        module, _, name = job["function"].partition(":")
        try:
            answer = {"done": getattr(importlib.import_module(module), name)(**job["arguments"])}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
