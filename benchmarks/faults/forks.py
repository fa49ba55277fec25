"""A command in a fork of a process that has imported what it needs: it costs what it computes, not what it loads."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BUG = 70
"""The exit code of a command that ends by our own bug, and of a fork that does not come to its command."""


def fork(
    argv: Sequence[str],
    *,
    cwd: Path,
    out: int,
    err: int | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
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
