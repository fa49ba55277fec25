"""Run directory: the output of a command (design §4), self-contained, append-only, safe to copy.

run = RunDirectory.create("runs/first")         # refuses a non-empty directory
run.log_metrics("fine-tune", step=1, split="train", loss=3.2, ...)
read_metrics(run.path / "metrics.jsonl")        # the last line for a step wins, a torn tail is skipped
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import atomic
from .digests import check_files
from .errors import Interrupted, UserError, describe_disk_error, escape_control_characters, is_disk_full
from .machine import count_cores, cpu_info, installed_version
from .redaction import join_command

ENVIRONMENT, COMMAND, RECIPE, MANIFEST = "environment.json", "command.txt", "recipe.resolved.yaml", "manifest.json"
METRICS, TRACE, LOG = "metrics.jsonl", "trace.jsonl", "log.txt"
SPIKE = "spike"
"""Split of the metrics lines that report a loss spike and the rollback for it."""
_PACKAGES = ("flatshift", "torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "scikit-learn")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def disk_full_interrupts(activity: str) -> Iterator[None]:
    """Turn a full (or over-quota) or failing disk during `activity` into Interrupted; other errors pass through."""
    try:
        yield
    except Exception as error:
        if (problem := describe_disk_error(error)) is None:
            raise
        advice = "free some space and resume" if is_disk_full(error) else "resume when it is well again"
        raise Interrupted(f"{problem} while {activity}; {advice}, everything finished before is kept") from error


@dataclass(frozen=True)
class RunDirectory:
    """One run on disk. Create it with `create` or `open`."""

    path: Path
    writes: bool = True
    """False on all ranks of a mesh but the main one: they read the directory and log nothing."""

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        recipe_yaml: str | None = None,
        manifest: dict[str, Any] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> RunDirectory:
        """Create a run directory with command.txt, environment.json and, if given, recipe, manifest and other `texts`
        by file name.

        It appears whole or not at all: a run that is killed here can simply be started again.
        Raises UserError if `path` is not empty, including when another process created it meanwhile.
        """
        path = Path(path)
        check_replaceable(path, resumable=True)
        with disk_full_interrupts(f"creating {path}"), output_directory(path) as temporary:
            write_provenance(temporary, recipe_yaml=recipe_yaml)
            if manifest is not None:
                atomic.write_json(temporary / MANIFEST, manifest)
            for name, text in (texts or {}).items():
                atomic.write_text(temporary / name, text)
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open an existing run directory, repairing files that a killed process left torn.

        Raises UserError if `path` is not a run directory, or is a finished one whose files differ from what it saved.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path}: no such run directory")
        if not (path / ENVIRONMENT).is_file() or not (path / COMMAND).is_file():
            raise UserError(f"{path} is not a run directory: it has no {ENVIRONMENT} and {COMMAND}")
        for folder in (path, path / "state", path / "stages", *(path / "stages").glob("*/")):
            atomic.remove_leftovers(folder)
        torn = [path / METRICS, path / TRACE, *(path / "stages").glob(f"*/{METRICS}")]
        # A finished run has no torn files: a difference from its record was made by someone, and is left for the user
        # to see.
        check_files(path, {file.relative_to(path).as_posix() for file in torn}.__contains__)
        for file in torn:
            _cut_torn_tail(file)
        return cls(path)

    @property
    def state(self) -> Path:
        """Directory of the running stage's checkpoints."""
        return self.path / "state"

    def stage(self, name: str) -> Path:
        """Return `stages/<name>/`, created if needed by the process that writes."""
        folder = self.path / "stages" / name
        if self.writes:
            atomic.make_directory(folder)
        return folder

    def log_metrics(self, stage: str, **fields: Any) -> None:
        """Append one line to the run's and the stage's metrics.jsonl. NaN and infinities become null."""
        if not self.writes:
            return
        text = _format_line(stage, fields)
        for file in (self.path / METRICS, self.stage(stage) / METRICS):
            _append_line(file, text)

    def sync_metrics(self, stage: str) -> None:
        """Make the lines logged so far durable, before a checkpoint declares their steps done."""
        if self.writes:
            atomic.sync_files(self.path / METRICS, self.path / "stages" / stage / METRICS, self.path / TRACE)

    def log_trace(self, stage: str, **fields: Any) -> None:
        """Append one line to trace.jsonl. NaN and infinities become null."""
        if self.writes:
            _append_line(self.path / TRACE, _format_line(stage, fields))

    def log(self, message: str) -> None:
        """Append lines to log.txt, each with the time."""
        if not self.writes:
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        message = escape_control_characters(message)
        _append_line(self.path / LOG, "".join(f"{now} {line}\n" for line in message.splitlines() or [""]))


def check_empty(path: str | Path, *, resumable: bool = False) -> None:
    """Raise UserError unless `path` is absent or a directory empty except for leftovers of killed writes.

    resumable: the directory may be a run's, so the message suggests resuming it.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UserError(f"--out: {path} is a file; name a new or empty directory")
    if path.is_dir() and not atomic.has_only_leftovers(path):
        hint = f", or continue a run with `flatshift train --resume {path}`" if resumable else ""
        raise UserError(f"--out: {path} is not empty; name another directory{hint}")


def check_new_file(path: Path) -> None:
    """Raise UserError if there is a file, a directory or a link, even to nothing, at `path`."""
    if Path(os.path.realpath(path)).exists() or path.is_symlink():  # of MISSING/../NAME too
        raise UserError(f"--out: {path} exists; name another file or remove it")


def check_replaceable(path: str | Path, *, resumable: bool = False) -> None:
    """Raise UserError as `check_empty`, and for a directory that cannot be replaced as a whole: a mount point or
    this process's working directory."""
    check_empty(path, resumable=resumable)
    path = Path(path)
    is_mount = path.resolve().is_mount()  # of `.` itself, Path.is_mount is true everywhere
    if is_mount or (path.is_dir() and path.samefile(Path.cwd())):
        kind = "a mount point" if is_mount else "the working directory"
        raise UserError(f"--out: {path} is {kind}, which cannot be replaced; name a directory in it")


def resume_command(path: str | Path) -> str:
    """Return the shell command that resumes the run in `path`."""
    return shlex.join(["flatshift", "train", "--resume", str(path)])


@contextmanager
def output_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `path` as a whole at the end.

    Raises UserError if another command created `path` meanwhile; its content is kept.
    """
    try:
        with atomic.new_directory(path) as temporary:
            yield temporary
    except FileExistsError as error:
        if error.filename != os.path.realpath(path):
            raise
        raise UserError(f"--out: {path} was made by another command meanwhile; name another directory") from None


def write_provenance(directory: str | Path, *, recipe_yaml: str | None = None) -> None:
    """Write command.txt, environment.json and, if given, recipe.resolved.yaml into `directory`."""
    directory = Path(directory)
    atomic.write_text(directory / COMMAND, _command_line())
    atomic.write_json(directory / ENVIRONMENT, collect_environment())
    if recipe_yaml is not None:
        atomic.write_text(directory / RECIPE, recipe_yaml)


def add_provenance(directory: Path) -> None:
    """Append this command to command.txt, and to environment.json (`resumed`) what differs from before."""
    commands = (directory / COMMAND).read_text(encoding="utf-8")
    atomic.write_text(directory / COMMAND, commands + _command_line())
    environment = atomic.read_json_object(directory / ENVIRONMENT)
    initial, current = {**environment}, collect_environment()
    initial.pop("resumed", None)
    changes = {name: value for name, value in current.items() if name == "created" or initial.get(name) != value}
    atomic.write_json(directory / ENVIRONMENT, {**environment, "resumed": [*environment.get("resumed", []), changes]})


def _command_line() -> str:
    name = Path(sys.argv[0]).name
    program = "flatshift" if name == "__main__.py" else name  # `python -m flatshift` runs the same command
    return join_command([program, *sys.argv[1:]]) + "\n"


def collect_environment() -> dict[str, Any]:
    """Collect what results may depend on: versions, machine, threads, commit. Memory in bytes."""
    environment: dict[str, Any] = {
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_info()[0],
        "cores": count_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "commit": _source_commit(),
        "variables": {name: os.environ[name] for name in _THREADS if name in os.environ},
    }
    environment["versions"] = {package: installed_version(package) for package in _PACKAGES}
    torch = sys.modules.get("torch")  # only if already imported: a selection may run without it
    if torch is not None:
        environment["threads"] = torch.get_num_threads()
        environment["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return environment


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl in order of their last write, one per (stage, split, step); none if absent.

    A torn last line (the process was killed while writing) is skipped. A line with `rewound_to` (the stage rolled back
    for a loss spike) removes the stage's earlier lines of later steps.

    Raises UserError: any other line is not a metrics row.
    """
    path = Path(path)
    if not path.is_file():
        return []
    lines: dict[tuple[Any, Any, Any], dict[str, Any]] = {}
    texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, start=1):
        record = parse_metrics_line(text)
        if record is None:
            if text.strip() and number < len(texts):
                raise UserError(f"{path}:{number}: not a JSON object with a stage and a whole step")
            continue
        drop_rolled_back(lines, record)
        key = (record["stage"], record.get("split"), record["step"])
        lines.pop(key, None)
        lines[key] = record
    return list(lines.values())


def parse_metrics_line(line: bytes) -> dict[str, Any] | None:
    """Parse one line of metrics.jsonl, its `step` an integer ≥ 0; None if it is not such a line."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or not isinstance(record["stage"], str):
            return None
        steps = record["step"], record.get("rewound_to", 0)
        is_line = (
            isinstance(record.get("split", ""), str)  # a trace line has none
            and all(isinstance(step, int) and step >= 0 for step in steps)
            and all(abs(value) < 2**63 for value in record.values() if isinstance(value, int))  # a table's int64
        )
        return record if is_line else None
    except (ValueError, KeyError, RecursionError):
        return None


def drop_rolled_back(lines: dict[Any, dict[str, Any]], record: dict[str, Any]) -> None:
    """Remove from `lines`, keyed (stage, split, step), the steps that `record` rolled back."""
    if (back := record.get("rewound_to")) is None:
        return
    for key in [key for key in lines if key[0] == record.get("stage") and key[1] != SPIKE and key[2] > back]:
        del lines[key]


def last_attempt(records: Iterable[dict[str, Any]], stage: str) -> int:
    """Return the highest attempt that `stage` has logged; 0 if none."""
    return max((int(r.get("attempt") or 0) for r in records if r.get("stage") == stage), default=0)


def _cut_torn_tail(path: Path) -> None:
    """Drop everything after the last line break: each line is written in one piece with it. A zero byte, which no line
    has, marks data lost in a power cut before it was synced: everything after it is younger than any checkpoint."""
    if not path.is_file():
        return
    data = path.read_bytes()
    zero = data.find(b"\0")
    end = data.rfind(b"\n", 0, zero if zero >= 0 else len(data)) + 1
    if end < len(data):
        os.truncate(path, end)


def _append_line(path: Path, text: str) -> None:
    """Append in one write; a line for which the disk has no room is removed whole."""
    data = text.encode()
    with disk_full_interrupts(f"writing {path}"):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(fd).st_size
            try:
                if os.write(fd, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)


def _format_line(stage: str, fields: dict[str, Any]) -> str:
    line = {"stage": stage, **fields}
    line |= {key: None for key, value in fields.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"


def _source_commit() -> str | None:
    """Return the commit of the source tree that contains this package; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
