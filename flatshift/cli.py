"""The `flatshift` command: finds the subcommand, runs it, and turns what it ends with into an exit code.

    flatshift demo                         # the three journeys on shipped samples
    flatshift train warmup --train.seed 1  # a shipped recipe with one key changed

Exit codes: 0 done, 1 a negative answer, 2 a mistake in the input, 3 interrupted with resumable state, 70 our bug.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
from collections.abc import Sequence

_COMMANDS = {
    "demo": "the three journeys on shipped samples; ends with a report",
    "select": "choose warm-up data from a pool for a target",
    "train": "fine-tune an adapter by a recipe, or resume a run",
    "sweep": "a resumable grid over recipe keys and seeds",
    "compare": "training methods against a baseline by one fair protocol",
    "eval": "judge a run directory on dev, test or your own rows",
    "generate": "let a finished run write: prompts in, answers out",
    "report": "one offline HTML page from run directories",
    "merge": "fold a run's adapter into its backbone",
    "export": "a run's adapter as a hub-ready folder with a card",
    "recipes": "list, show or copy the shipped recipes",
    "doctor": "environment, versions, devices, shadowed names",
}
_USERS_PATH = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
}
"""What the operating system says of a path that somebody named; anything else is our bug."""
_EPILOGUE = """
`flatshift COMMAND --help` explains one. Start with `flatshift demo`, or `flatshift recipes list`.
"""


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    rows = "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in _COMMANDS.items())
    return f"usage: flatshift COMMAND [...]\n\n{rows}\n{_EPILOGUE}"


def _on_terminate(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    print(f"flatshift: {message}", file=sys.stderr)
    return code


def _end(message: str, code: int, *, patient: bool = False) -> int:
    """As `_fail`, but of several ranks only the first says it."""
    from finetune.parallel import voice

    return voice.speak(f"flatshift: {message}", code, patient=patient)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; never raises."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        from flatshift import __version__

        print(f"flatshift {__version__}")
        return 0
    name = argv[0]
    if name not in _COMMANDS:
        close = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(_COMMANDS)}"
        return _fail(f"error: unknown command {name!r}; {hint}", 2)

    try:
        from finetune.errors import Interrupted, OutOfMemory, UserError
        from regularizers.errors import RegularizerError
        from selection.errors import SelectionError
    except ImportError as error:  # another distribution's `finetune` or `selection` stands in front of ours
        return _fail(f"error: {error}; see which package shadows ours with `python -m experiments.doctor`", 2)

    try:
        from flatshift import commands

        return commands.run(name, list(argv[1:]))
    except (UserError, SelectionError, RegularizerError) as error:
        return _end(f"error: {error}", 2)
    except Interrupted as error:
        return _end(f"interrupted: {error}", 3, patient=True)
    except OutOfMemory as error:
        return _end(f"{'interrupted' if error.resumable else 'error'}: {error}", 3 if error.resumable else 2)
    except KeyboardInterrupt:
        again = "finished parts are kept; a run with --out resumes with `flatshift train --resume`"
        return _end(f"interrupted: {again if name == 'train' else 'run the same command again'}", 3)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as stop:  # the argument parser's own --help (0) and errors (2)
        return stop.code if isinstance(stop.code, int) else 2
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = f" while writing {error.filename}" if error.filename else ""
            return _end(f"interrupted: the disk is full{place}; free some space and resume, finished parts are kept", 3)
        if error.errno in _USERS_PATH and error.filename:
            return _end(f"error: {error.filename}: {error.strerror}", 2)
        return _unexpected(error)
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    from finetune.parallel import voice

    return voice.speak_of(error)


def _set_allocator() -> None:
    """Before anything imports torch; ranks and cells of a sweep inherit it."""
    try:
        from finetune.devices.allocator import fixed_workspaces, growing_segments
    except ImportError:  # a foreign `finetune`, of which `run` tells
        return
    os.environ.update(growing_segments(os.environ) | fixed_workspaces(os.environ))


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _on_terminate)
    # A message with text from the user's files must not fail on a terminal of another encoding.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    _set_allocator()
    if "RANK" not in os.environ:
        code = run(sys.argv[1:])
        sys.stdout.flush()
        raise SystemExit(code)
    from finetune.parallel import launch, voice

    launch.tie_to_launcher()
    code = run(sys.argv[1:])
    if code and voice.several():
        voice.end_rank(code)
    sys.stdout.flush()
    raise SystemExit(code)
