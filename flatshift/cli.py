"""The `flatshift` command: find the subcommand, run it, and map its outcome to an exit code.

    flatshift demo                         # the three journeys on shipped samples
    flatshift train warmup --train.seed 1  # a shipped recipe with one key changed

Exit codes: 0 done, 1 a negative answer, 2 a mistake in the input, 3 interrupted with resumable state, 70 our bug.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, cast

from flatshift import commands

_RESUMABLE = {"demo", "select", "train", "sweep", "compare"}
"""Commands that resume from what an earlier attempt left in their directory."""
_ON_RANKS = {"train", "eval", "select"}
_INTERRUPTED = 3
_INTERACTIVE = {"chat", "serve"}
_PATH_ERRORS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
}
"""Errno values caused by a path the user named; any other OSError is our bug."""


def _usage_text() -> str:
    width = max(map(len, commands.SUMMARIES))
    rows = "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in commands.SUMMARIES.items())
    epilogue = "`flatshift COMMAND --help` explains one. Start with `flatshift demo`, or `flatshift recipes`.\n"
    return f"usage: flatshift COMMAND [...]\n\n{rows}\n\n{epilogue}"


def _on_terminate(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _check_encoding(argv: Sequence[str]) -> None:
    """Raise UserError for a name that is not valid UTF-8: no recipe, manifest or page could store it."""
    from flatshift.finetune.errors import UserError, shorten

    try:
        directory = str(Path.cwd())
    except OSError:
        raise UserError("the current directory is gone; change into one that is there") from None
    flag = ""
    for text in (directory, *argv):
        flag = text.partition("=")[0] if text.startswith("--") else flag
        # Undecodable bytes of argv and cwd arrive as lone surrogates (os.fsdecode).
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            source = "the current directory" if text is directory else flag or f"`flatshift {argv[0]}`:"
            raise UserError(f"{source} {shorten(ascii(text))} is not valid UTF-8; rename the file, or retype the text")


def _check_local_output(argv: Sequence[str]) -> None:
    """Raise UserError for a results directory in an object store: results need locks, appends and renames."""
    from flatshift.finetune.errors import UserError

    for flag, name in itertools.pairwise((*argv, "")):
        flag, _, value = flag.partition("=")
        if flag in ("--out", "--resume") and "://" in (value := value or name):
            raise UserError(
                f"{flag} {value}: results are written to a local directory; name one, then `flatshift push` it there"
            )


def _report_os_error(error: Exception, argv: Sequence[str]) -> int:
    """Report trouble with the disk, memory, or a path the user named; anything else as our bug."""
    from flatshift.finetune import errors
    from flatshift.finetune.launch import job, watchdog

    path = (error.filename2 or error.filename) if isinstance(error, OSError) else None  # for a copy, its target
    no_memory = errors.is_out_of_memory(error) and argv[0] != "train"  # of which `report_error` knows more
    trouble = f"out of memory ({errors.first_error_line(error)})" if no_memory else errors.describe_disk_error(error)
    if trouble is not None:
        trouble += f" at {path}" if path else ""
        fix = "free some memory" if no_memory else "free some space" if errors.is_disk_full(error) else "see to it"
        message, code = f"error: {trouble}; {fix} and run the same command again", 2
        if argv[0] in _RESUMABLE:
            message, code = f"interrupted: {trouble}; {fix} and resume, finished parts are kept", _INTERRUPTED
    elif isinstance(error, OSError) and error.errno in _PATH_ERRORS and path:
        message, code = f"error: {path}: {error.strerror}", 2
    else:
        return job.report_error(error, watchdog.missing_ranks)
    return _report_exit(errors.format_error_message(message), code)


def _report_exit(message: str, code: int, *, patient: bool = False) -> int:
    """Report a failure and return `code`; on several ranks only the first prints."""
    from flatshift.finetune.launch import job

    return job.report_failure(f"flatshift: {message}", code, patient=patient)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; never raises."""
    from flatshift.finetune.errors import EscapedStream

    with contextlib.redirect_stderr(cast("TextIO", EscapedStream(sys.stderr, redact=True))):  # for libraries
        return _run(argv)


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage_text())
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        from flatshift import __version__

        print(f"flatshift {__version__}")
        return 0
    name = argv[0]
    if name not in commands.SUMMARIES:
        close = difflib.get_close_matches(name[:80], commands.SUMMARIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(commands.SUMMARIES)}"
        print(f"flatshift: error: unknown command {name[:80]!a}; {hint}", file=sys.stderr)
        return 2

    from flatshift.finetune.errors import (
        EscapedStream,
        Interrupted,
        OutOfMemory,
        UserError,
        first_error_line,
        format_error_message,
    )
    from flatshift.regularizers.config import RegularizerError
    from flatshift.selection.errors import SelectionError

    try:
        _check_encoding(argv)
        _check_local_output(argv)
        with contextlib.ExitStack() as stack:
            if not {"-h", "--help"} & {*argv}:  # whose colours are its own
                stack.enter_context(contextlib.redirect_stdout(cast("TextIO", EscapedStream(sys.stdout))))
            return commands.run(name, list(argv[1:]))
    except (UserError, SelectionError, RegularizerError) as error:
        return _report_exit(f"error: {format_error_message(str(error))}", 2)
    except Interrupted as error:
        return _report_exit(f"interrupted: {error}", _INTERRUPTED, patient=True)
    except OutOfMemory as error:
        outcome, code = ("interrupted", _INTERRUPTED) if error.resumable else ("error", 2)
        return _report_exit(f"{outcome}: {error}", code)
    except KeyboardInterrupt:
        words = shlex.join(["flatshift", *argv])
        return _report_exit(f"interrupted: continue with the same command: `{words}`", _INTERRUPTED)
    except BrokenPipeError:
        # The reader is gone: else the interpreter's flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as stop:  # raised by the argument parser for --help (0) and errors (2)
        return stop.code if isinstance(stop.code, int) else 2
    except Exception as error:  # trouble with the disk, or our bug
        return _report_os_error(error, argv)
    except BaseException as error:  # a Rust panic from pyo3 is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        message = (
            f"error: a tokenizer's library gave up ({first_error_line(error)}); its tokenizer.json holds what it "
            "cannot use; take the file that belongs to the weights"
        )
        return _report_exit(format_error_message(message), 2)


def _set_allocator() -> None:
    """Set the CUDA allocator's environment before anything imports torch; ranks and sweep cells inherit it."""
    from flatshift.finetune.compute.memory import cublas_workspace_env, expandable_segments_env

    os.environ.update(expandable_segments_env(os.environ) | cublas_workspace_env(os.environ))


def _with_heartbeat(argv: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    name = argv[0] if argv else ""
    if name not in commands.SUMMARIES or name in _INTERACTIVE or {"--json", "--quiet"} & {*argv}:
        return contextlib.nullcontext()
    from flatshift.experiments.run.console import print_heartbeat

    return print_heartbeat(f"flatshift {name}")


def main() -> None:
    """Entry point of the console script."""
    for number in (signal.SIGTERM, signal.SIGUSR1):  # Ctrl-C raises KeyboardInterrupt anyway
        signal.signal(number, _on_terminate)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`): its number must not become that of a file
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    # Messages may contain text from the user's files, which a terminal in another encoding must not make fail.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    _set_allocator()
    if "SLURM_PROCID" in os.environ and {*sys.argv[1:2]} & _ON_RANKS:
        from flatshift.finetune.errors import UserError
        from flatshift.finetune.launch.job import slurm_rank_variables

        try:
            os.environ.update(slurm_rank_variables(os.environ))
        except UserError as error:
            raise SystemExit(_report_exit(f"error: {error}", 2)) from None
    if "RANK" not in os.environ:
        with _with_heartbeat(sys.argv[1:]):
            code = run(sys.argv[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        if code == _INTERRUPTED:  # all is saved; the libraries' own shutdown would take a CPU-second more
            os._exit(code)
        raise SystemExit(code)
    from flatshift.finetune.launch import job, spawn

    spawn.tie_to_launcher()
    with _with_heartbeat(sys.argv[1:]) if os.environ["RANK"] == "0" else contextlib.nullcontext():
        code = run(sys.argv[1:])
    if job.is_multi_rank():
        job.end_rank(code)
    sys.stdout.flush()
    raise SystemExit(code)
