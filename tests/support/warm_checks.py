"""Checks of exported folders in forked children of one process that has imported plain transformers and PEFT.

A command starts a process for each check, and most of that process's seconds are imports. Modules with many checks take
the fixture `warm_checks` of `tests.conftest`; the others start the command's own process.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

IMPORTED = ["transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "peft"]


class Server:
    """A process that forks a child for each script; it ends with its stdin."""

    def __init__(self) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-P", __file__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, command: Sequence[str], *, env: Mapping[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` of `[sys.executable, "-P", script, *words]` with captured text."""
        python, flag, *words = command
        assert (python, flag) == (sys.executable, "-P") and how.keys() == {"capture_output", "text", "errors"}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([words, dict(env)]) + "\n")
        self.process.stdin.flush()
        code, said = json.loads(self.process.stdout.readline())
        return subprocess.CompletedProcess(command, code, "", said)

    def end(self) -> None:
        """End the process."""
        self.process.communicate()


def serve() -> None:
    """Answer each line of stdin, `[words, environment]`, by `[exit code, stderr]`."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        read, write = os.pipe()
        if not (pid := os.fork()):
            os.dup2(write, 2)
            os.dup2(write, 1)
            os.close(write)
            os.close(read)
            os._exit(_script(*json.loads(line)))
        os.close(write)
        with os.fdopen(read, encoding="utf-8", errors="replace") as said:
            text = said.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([code, text]), flush=True)


def _script(words: list[str], environment: dict[str, str]) -> int:
    """Run a script as `python -P` does; its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve()
