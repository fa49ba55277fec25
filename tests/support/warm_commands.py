"""Commands of several ranks in forked children of the process that has imported torch and its like for the ranks of
`tests.support.distributed_ranks`: most of the seconds of a rank that is a Python of its own are imports.

`tests/distributed/test_launch.py` and `tests/cli/test_namesakes.py` start the command and its ranks as a user does.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatshift.cli import main
from flatshift.finetune.launch import spawn
from tests.support.patience import HANG_S


def flatshift(*words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run `python -m flatshift` with these words; its ranks are forked too. code: demanded of it; None: any."""
    mp.set_forkserver_preload(["tests.support.rank_imports"])
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        out.touch()
        errors.touch()
        place = (str(Path.cwd()), environment, str(out), str(errors))
        process = mp.get_context("forkserver").Process(target=_launch, args=(words, *place))
        process.start()
        process.join(timeout=HANG_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        done = subprocess.CompletedProcess(words, process.exitcode or 0, out.read_text(), errors.read_text())
    assert code is None or done.returncode == code, done.stderr[-3000:]
    return done


class ForkedRank:
    """What the launcher asks of `subprocess.Popen`, as a fork of the launcher."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: Any,
        stderr: Any,
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        python, safe, run_module, module, *words = command
        assert (python, safe, run_module, module) == (sys.executable, "-P", "-m", "flatshift")
        assert stdin == subprocess.DEVNULL and start_new_session
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        for stream, number in ((stdout, 1), (stderr, 2)):
            if stream is not None:
                os.dup2(stream.fileno(), number)
        kept = sorted(pass_fds)
        for low, high in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)  # as those of Python close where another program begins
        _run(words, env)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """Wait for the exit code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to a rank that runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the rank."""
        self.send_signal(signal.SIGKILL)


def _launch(words: Sequence[str], directory: str, environment: Mapping[str, str], out: str, errors: str) -> None:
    os.chdir(directory)
    for name, number in ((out, 1), (errors, 2)):
        with open(name, "wb") as file:  # noqa: PTH123 - as a shell's redirection
            os.dup2(file.fileno(), number)
    vars(spawn)["subprocess"] = types.SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL)
    _run(words, environment)


def _run(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the command as `python -m flatshift` and end this process with its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["flatshift", *words]
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
