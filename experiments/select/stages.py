"""Stages of a selection over shards of the pool, run by datatrove: on this machine, on Slurm or on Ray.

A stage maps a function over the files of the pool (the first stage) or over ranges of its rows (all others). Each task
writes its arrays and, last, a record of them into a directory of the stage; its name has a digest of everything that
the result depends on, so the same command finds what is finished and computes only the rest. The directories and the
pool must be on a disk that every worker sees.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.recipe.schema import Select
from flatshift.experiments.results.cells import flatshift_version
from flatshift.experiments.run.console import Console
from flatshift.experiments.run.ray_cluster import count_room, ray_cluster, require_ray
from flatshift.finetune.atomic import atomic_file as atomic_path
from flatshift.finetune.atomic import make_directory, read_json_object, write_json, write_text
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.files import describe_content, expand_files, file_digest
from flatshift.finetune.data.formats import HUB
from flatshift.finetune.data.remote import RemoteFile
from flatshift.finetune.data.rows import Row, count_records, missing_column_message, read_rows, repeated_id_message
from flatshift.finetune.data.view import RowStore, RowView, write_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.launch.spawn import THREAD_VARIABLES
from flatshift.selection.config import Gradients
from flatshift.selection.errors import SelectionError
from flatshift.selection.features.cache import atomic_file
from flatshift.selection.shards import Arrays, Shard, ShardMap

METHODS = ("classifier", "cynical", "dsir", "gotd", "knn", "moore-lewis")
_SHARD_ROWS = 1 << 17
"""Most rows of a shard, as far as its borders may be chosen; a pool of many files has as many shards as files."""
_TASKS_A_WORKER, _MOST_TASKS = 8, 1000
"""Most tasks of a stage: for each worker of this machine, and on a cluster (the usual limit of a Slurm array)."""
_MEMORY_GB = 2
_POLL_S = 2.0
_SETTLE_S = 10.0
"""Seconds that a network file system may take to show a file of another machine."""


def _check_settings(spec: Select) -> None:
    """Raise UserError for a selection whose stages cannot be run by shards."""
    if spec.method.kind not in METHODS:
        raise UserError(
            f"--on: {spec.method.kind} is scored by one process; leave --on out, or take a method whose stages are "
            f"divided: {', '.join(METHODS)}"
        )
    if isinstance(spec.embedder, Gradients):
        raise UserError(
            "--on: the second moments of gradients are taken by one process; leave --on out, or make the vectors by "
            "flatshift.embedder (docs/feature-shards.md) and give them by --pool-features"
        )
    if spec.cache and spec.own is None:
        raise UserError(
            "select.cache: with --on the vectors of finished shards are in the state of the selection; leave it out"
        )


@dataclass(frozen=True)
class ShardExecutor:
    """Executor of `--on`: its kind, and the number of workers, the partition or the address that follows a colon."""

    kind: str
    detail: str = ""

    @classmethod
    def parse(cls, text: str) -> ShardExecutor:
        """Parse `--on`. Raises UserError if it is malformed, or a package or program is missing."""
        kind, colon, detail = text.partition(":")
        if kind not in ("local", "slurm", "ray") or (colon and not detail):
            raise UserError(f"--on {text!r} is no executor; take local[:WORKERS], slurm[:PARTITION] or ray[:ADDRESS]")
        if kind == "local" and detail and not (detail.isascii() and detail.isdigit() and int(detail) > 0):
            raise UserError(f"--on {text}: the number of workers must be at least 1, as in local:4")
        try:
            import datatrove.executor  # noqa: F401
        except ImportError:
            raise UserError("--on runs stages by datatrove: pip install 'flatshift[datatrove]'") from None
        if kind == "slurm" and shutil.which("sbatch") is None:
            raise UserError(f"--on {text}: there is no sbatch here; start the command on a machine that submits jobs")
        if kind == "ray":
            require_ray()
        return cls(kind, detail)


class StageResults(Sequence[Arrays]):
    """Arrays of every shard in order, mapped from the files in `directory` when they are asked for."""

    def __init__(self, directory: Path, count: int):
        self.directory, self._numbers = directory, range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: Any) -> Any:
        assert isinstance(key, int)
        return _read_arrays(self.directory, self._numbers[key])


class Stages:
    """Stages of one selection, with their results in `directory` until it is complete.

    on: as `--on`. Use as a context manager: at its end the workers end. Raises UserError for an `on` that is no
    executor or is not there, and for settings whose stages are not divided.
    """

    def __init__(self, on: str, spec: Select, directory: Path, console: Console):
        _check_settings(spec)
        self.executor, self.directory, self.console = ShardExecutor.parse(on), directory.absolute(), console
        self._stack = contextlib.ExitStack()
        self._pool: _StoredPool | None = None
        self._pool_digest = ""
        self.contents: list[dict[str, Any]] = []
        """Of `describe_content`, for each file of the pool that was read."""
        self._ray: Any = None

    def __enter__(self) -> Stages:
        if self.executor.kind == "ray":
            self._ray = self._stack.enter_context(ray_cluster(self.executor.detail))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def _worker_count(self) -> int:
        """Number of workers on this machine."""
        return int(self.executor.detail or len(os.sched_getaffinity(0)))

    @cached_property
    def _workers(self) -> ProcessPoolExecutor | None:
        """Processes of this machine, for all stages; None: one worker, this process."""
        if self._worker_count == 1:
            return None
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self._worker_count, mp_context=context, initializer=_end_with_parent)
        self._stack.callback(pool.shutdown, cancel_futures=True)
        unset = [name for name in THREAD_VARIABLES if name not in os.environ]
        os.environ.update(dict.fromkeys(unset, "1"))
        try:
            pool.submit(os.getpid).result()  # starts all of them, one thread each
        finally:
            for name in unset:
                del os.environ[name]
        return pool

    def read(self, spec: Select, named: Mapping[str, str]) -> tuple[RowView, list[str]]:
        """Read the pool, a task for each file; return its rows and the reasons of those skipped.

        named: as in `read_rows`. Raises UserError for a bad row, a repeated id, or a file that is missing or has
        changed since it was read.
        """
        paths = expand_files(spec.pool.files)
        names = [str(path) for path in paths]
        listed = self.directory / "files.json"
        if listed.is_file():
            _check_same_files(read_json_object(listed, "files")["files"], names)
        else:
            write_json(listed, {"files": names})
        directory = self.directory / "read"
        for number, path in enumerate(paths):
            if _is_whole(directory, number):
                _check_unchanged(path, _read_record(_read_arrays(directory, number)))
        work = _ReadFile(
            spec.pool.files, listed, spec.columns, spec.domain_column, spec.bad_rows, directory, bool(named)
        )
        results = self._run("read pool", directory, work, len(paths))
        records = [_read_record(result) for result in results]
        try:
            _check_named_columns(spec.pool.files, records, named)
        except UserError:
            shutil.rmtree(self.directory)  # the right name is another recipe, which cannot continue from here
            raise
        firsts = np.array([0, *accumulate(record["records"] for record in records)][:-1])
        lengths = np.array([record["rows"] for record in records])
        self._pool = _StoredPool(directory, spec.columns, self._keep(np.stack([firsts, lengths])))
        self._pool_digest = _digest([record["sha256"] for record in records])
        self.contents = [record["content"] for record in records]
        rows = RowView(self._pool.open())
        borders = np.cumsum(lengths)
        digests = np.empty(len(rows), np.uint64)
        for result, end, length in zip(results, borders.tolist(), lengths.tolist(), strict=True):
            digests[end - length : end] = result["ids"]
        if (twins := _first_repeated_id(rows, digests)) is not None:
            for number in np.searchsorted(borders, twins, side="right").tolist():
                _record_file(directory, number).unlink(missing_ok=True)  # to be read again, mended
            first, second = (rows[row] for row in twins)
            raise UserError(repeated_id_message(second.id, second.where, first.where))
        return rows, [reason for record in records for reason in record["skipped"]]

    def over(self, rows: RowView) -> ShardMap:
        """Return the map over the shards of `rows`, a view of the pool that `read` returned."""
        assert self._pool is not None
        stored = self._pool
        arrays = {name: self._keep(array) for name, array in rows.arrays().items()}
        identity = _digest([self._pool_digest, *(f"{name} {path.name}" for name, path in arrays.items())])

        def map_shards(
            stage: str,
            function: Callable[[Shard], Arrays],
            *,
            inputs: Arrays | None = None,
            earlier: Sequence[Arrays] | None = None,
            align: int = 1,
        ) -> StageResults:
            paths = {name: self._keep(array) for name, array in (inputs or {}).items()}
            before = earlier.directory if isinstance(earlier, StageResults) else None
            edges = _shard_edges(len(rows), stored.files, align)
            given = [f"{name} {path.name}" for name, path in paths.items()]
            key = _digest([identity, str(align), pickle.dumps(function).hex(), str(before), *given])
            directory = self.directory / f"{stage.replace(' ', '-')}-{key[:16]}"
            work = _MapShard(function, stored, self._keep(np.array(edges)), arrays, paths, before)
            return self._run(stage, directory, work, len(edges) - 1)

        return map_shards

    def _keep(self, array: np.ndarray) -> Path:
        """Store an array for the workers, named by its content."""
        array = np.ascontiguousarray(array)
        digest = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
        digest.update(array.data.cast("B") if array.size else b"")
        path = self.directory / "inputs" / f"{digest.hexdigest()[:40]}.npy"
        if not path.is_file():
            with atomic_file(path) as handle:
                np.save(handle, array, allow_pickle=False)
        return path

    def _run(self, stage: str, directory: Path, work: Callable[[int], Arrays], shards: int) -> StageResults:
        """Compute the shards that have no result yet. Raises UserError for the first that failed or got lost.

        A task computes several shards where there are many.
        """
        most = _TASKS_A_WORKER * self._worker_count if self.executor.kind == "local" else _MOST_TASKS
        step = _Step(directory, work, shards, -(-shards // most))
        tasks = -(-shards // step.size)
        executor = self._build_executor(step, directory / "datatrove", tasks, stage)
        make_directory(directory)
        missing = {number for number in range(shards) if not _is_whole(directory, number)}
        for number in missing:
            _error_file(directory, number).unlink(missing_ok=True)
        for task in range(tasks):
            if missing.isdisjoint(step.numbers(task)):
                executor.mark_rank_as_completed(task)
            else:
                (directory / "datatrove" / "completions" / f"{task:05d}").unlink(missing_ok=True)
        if 0 < len(missing) < shards:
            self.console.say(f"{stage}: {shards - len(missing)} of {shards} shards are finished")
        began = time.monotonic()
        if missing:
            try:
                if self.executor.kind == "slurm":
                    _run_on_slurm(executor, stage)
                else:
                    executor.run()
            except BrokenProcessPool:
                raise UserError(
                    f"--on local: a worker was killed in the stage {stage!r} (out of memory?); finished shards are "
                    "kept: run the same command again"
                ) from None
            self.console.say(f"{stage}: {len(missing)} shards in {time.monotonic() - began:.1f} s")
        for number in sorted(missing):
            if (error := _error_file(directory, number)).is_file():
                raise UserError(error.read_text(encoding="utf-8"))
        for number in sorted(missing):
            if not _is_whole(directory, number):
                raise UserError(
                    f"--on {self.executor.kind}: shard {number} of {shards} of the stage {stage!r} was not finished "
                    f"(logs: {directory / 'datatrove'}); finished shards are kept: run the same command again"
                )
        return StageResults(directory, shards)

    def _build_executor(self, step: _Step, logs: Path, tasks: int, stage: str) -> Any:
        from datatrove.executor import RayPipelineExecutor
        from loguru import logger

        common: dict[str, Any] = {"pipeline": [step], "tasks": tasks, "logging_dir": str(logs)}
        if self.executor.kind == "local":
            return _local_executor(self._workers, **common)
        # Its messages about the whole job are ours to print; those of tasks are in their logs.
        logger.disable("datatrove")
        if self.executor.kind == "ray":
            count_room(self._ray, {"CPU": 1, "memory": _MEMORY_GB << 30}, "task")
            return RayPipelineExecutor(**common, mem_per_cpu_gb=_MEMORY_GB)
        return _slurm_executor(self.executor.detail, stage, **common)


@dataclass(frozen=True)
class _Step:
    """Step of a datatrove pipeline that writes the results of `work` for the shards of a task.

    shards: their number in all; size: number of shards of a task. A mistake of the user's is written to a file of its
    own, for the one process that reports it.
    """

    directory: Path
    work: Callable[[int], Arrays]
    shards: int
    size: int
    version: str = field(default_factory=flatshift_version)

    def __repr__(self) -> str:
        return f"stage {self.directory.name}"

    def numbers(self, task: int) -> range:
        """Return the numbers of a task's shards."""
        return range(task * self.size, min((task + 1) * self.size, self.shards))

    def __call__(self, documents: Any = None, rank: int = 0, world_size: int = 1) -> None:
        for number in self.numbers(rank):
            if not _is_whole(self.directory, number):
                self._compute(number)

    def _compute(self, number: int) -> None:
        try:
            if self.version != (own := flatshift_version()):
                raise UserError(
                    f"--on: a worker runs Flatshift {own}, and this command {self.version}; install the same version"
                )
            arrays = self.work(number)
        except (UserError, SelectionError) as error:
            write_text(_error_file(self.directory, number), str(error))
            return
        sizes = {}
        for name, array in arrays.items():
            path = _array_file(self.directory, number, name)
            with atomic_file(path) as handle:
                np.save(handle, np.asarray(array), allow_pickle=False)
            sizes[name] = path.stat().st_size
        write_json(_record_file(self.directory, number), {"bytes": sizes})


@dataclass(frozen=True)
class _StoredPool:
    """Rows of the pool in `directory`, a file for each of its own; files of millions of shards need no list.

    counts: array of two rows: position of each file's first record among all, and number of its rows.
    """

    directory: Path
    columns: Columns
    counts: Path

    @property
    def files(self) -> int:
        """Number of files."""
        return int(np.load(self.counts, mmap_mode="r", allow_pickle=False).shape[1])

    def open(self) -> RowStore:
        """Return all rows; files are opened when they are read."""
        firsts, lengths = np.load(self.counts, allow_pickle=False)
        return RowStore(lambda number: _rows_file(self.directory, number), self.columns, firsts, lengths)


@dataclass(frozen=True)
class _MapShard:
    """Work of a stage over rows: `function` of the shard with this number."""

    function: Callable[[Shard], Arrays]
    pool: _StoredPool
    edges: Path
    rows: Mapping[str, Path]
    inputs: Mapping[str, Path]
    earlier: Path | None

    def __call__(self, number: int) -> Arrays:
        low, high = np.load(self.edges, mmap_mode="r", allow_pickle=False)[number : number + 2].tolist()
        rows, inputs = (
            {name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in paths.items()}
            for paths in (self.rows, self.inputs)
        )
        texts = RowView.of(self.pool.open(), rows, low, high).texts
        earlier = {} if self.earlier is None else _read_arrays(self.earlier, number)
        return self.function(Shard(texts, low, high, inputs, earlier))


@dataclass(frozen=True)
class _ReadFile:
    """Work of the stage that reads the pool: writes the rows of a file, and returns digests of their ids and a record.

    listed: file with the names of those that `files` stand for. directory: of the written rows. lists_columns: the
    record lists the columns of the rows.
    """

    files: Sequence[str]
    listed: Path
    columns: Columns
    domain_column: str
    bad_rows: Any
    directory: Path
    lists_columns: bool

    def __call__(self, number: int) -> Arrays:
        paths = expand_files(self.files)
        _check_same_files(read_json_object(self.listed, "files")["files"], [str(path) for path in paths])
        identity = _identity(paths[number])
        skipped: list[str] = []
        ids: list[bytes] = []
        columns: dict[str, None] = {}

        def rows() -> Iterator[Row]:
            read = read_rows(
                self.files, columns=self.columns, bad_rows=self.bad_rows, skipped=skipped, setting="select.columns",
                only=number,
            )  # fmt: skip
            for row in read:
                ids.append(hashlib.blake2b(row.id.encode("utf-8", "surrogatepass"), digest_size=8).digest())
                if self.lists_columns:
                    columns.update(dict.fromkeys(row.record))
                yield row

        with atomic_path(_rows_file(self.directory, number)) as path:
            write_rows(rows(), path, columns=self.columns, domain_column=self.domain_column)
        content = describe_content(paths[number])
        record = {
            "identity": identity,
            "sha256": content["sha256"] or identity,
            "content": content,
            "records": count_records(len(ids), skipped),
            "rows": len(ids),
            "skipped": skipped,
            "columns": list(columns),
        }
        text = json.dumps(record).encode()
        return {"ids": np.frombuffer(b"".join(ids), "<u8"), "record": np.frombuffer(text, np.uint8)}


def _read_record(arrays: Arrays) -> dict[str, Any]:
    return dict(json.loads(arrays["record"].tobytes()))


def _identity(path: Any) -> str:
    """Return what changes with a file: size and time of modification, or a store's version."""
    if isinstance(path, RemoteFile):
        path.open().close()  # a store reports the version at the first opening
        return json.dumps(path.version)
    if str(path).startswith(HUB):
        return str(path)
    if path.is_dir():
        return file_digest(path)[0]
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _check_unchanged(path: Any, record: Mapping[str, Any]) -> None:
    is_remote = isinstance(path, RemoteFile) or str(path).startswith(HUB)
    if _identity(path) != record["identity"] and (is_remote or file_digest(path)[0] != record["sha256"]):
        raise UserError(f"{path} has changed since the unfinished selection read it; restore it, or name another --out")


def _check_same_files(before: Sequence[str], now: Sequence[str]) -> None:
    """Raise UserError if the pool's files are not those that the unfinished selection read."""
    if missing := [name for name in before if name not in now]:
        raise UserError(
            f"{missing[0]} is missing, and the unfinished selection reads it; restore it, or name another --out"
        )
    if list(before) != list(now):
        new = next((name for name in now if name not in before), now[0])
        raise UserError(
            f"{new}: the unfinished selection reads other files, or another order of them; restore them, or name "
            "another --out"
        )


def _check_named_columns(files: Sequence[str], records: Sequence[Mapping[str, Any]], named: Mapping[str, str]) -> None:
    columns = list(dict.fromkeys(name for record in records for name in record["columns"]))
    for own, origin in named.items() if columns else ():
        if own not in columns:
            raise UserError(f"{', '.join(map(str, files))}: {missing_column_message(own, columns, origin)}")


def _first_repeated_id(rows: RowView, digests: np.ndarray) -> tuple[int, int] | None:
    """Return the first row whose id an earlier row has, after that row; None: ids are unique. digests: (N,) of ids."""
    ordered = np.sort(digests)
    shared = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    first: dict[str, int] = {}
    for number in np.flatnonzero(np.isin(digests, shared, kind="sort")).tolist() if len(shared) else ():
        before = first.setdefault(rows.ids[number], number)
        if before != number:
            return before, number
    return None


def _shard_edges(rows: int, files: int, align: int) -> list[int]:
    """Return the borders of the shards of `rows` rows, multiples of `align` but for the last."""
    count = max(files, -(-rows // _SHARD_ROWS))
    return sorted({*(rows * number // count // align * align for number in range(count)), rows})


def _rows_file(directory: Path, number: int) -> Path:
    return directory / f"{number:05d}.arrow"


def _array_file(directory: Path, number: int, name: str) -> Path:
    return directory / f"{number:05d}.{name}.npy"


def _record_file(directory: Path, number: int) -> Path:
    return directory / f"{number:05d}.json"


def _error_file(directory: Path, number: int) -> Path:
    return directory / f"{number:05d}.error"


def _is_whole(directory: Path, number: int) -> bool:
    """Return True if a task's record is there, and all arrays that it lists."""
    try:
        sizes = json.loads(_record_file(directory, number).read_text(encoding="utf-8"))["bytes"]
        return all(_array_file(directory, number, name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _read_arrays(directory: Path, number: int) -> Arrays:
    sizes = json.loads(_record_file(directory, number).read_text(encoding="utf-8"))["bytes"]
    return {name: np.load(_array_file(directory, number, name), mmap_mode="r", allow_pickle=False) for name in sizes}


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _end_with_parent() -> None:
    """End this worker when the process that started it is killed; its queue would wait for ever."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _local_executor(workers: ProcessPoolExecutor | None, **settings: Any) -> Any:
    from datatrove.executor import LocalPipelineExecutor

    class PooledExecutor(LocalPipelineExecutor):
        """datatrove's executor on processes that serve all stages; its own pool waits for ever for a killed worker."""

        def run(self) -> None:
            # Local rank 1: rank 0 would print its log.
            if workers is None:
                for rank in self.get_incomplete_ranks():
                    self._run_for_rank(rank, 1)
                return
            for future in [workers.submit(_run_task, settings, rank) for rank in self.get_incomplete_ranks()]:
                future.result()

    return PooledExecutor(**settings)


def _run_task(settings: Mapping[str, Any], rank: int) -> None:
    from datatrove.executor import LocalPipelineExecutor

    LocalPipelineExecutor(**settings)._run_for_rank(rank, 1)


def _slurm_executor(partition: str, stage: str, **settings: Any) -> Any:
    from datatrove.executor import SlurmPipelineExecutor

    class DefaultsExecutor(SlurmPipelineExecutor):
        """datatrove's executor without the directives that nobody set: the cluster's defaults count."""

        def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
            return {name: value for name, value in super().get_sbatch_args(max_array).items() if value is not None}

    return DefaultsExecutor(
        **settings, partition=partition or None, time=None, qos=None, mem_per_cpu_gb=_MEMORY_GB,
        job_name=f"flatshift-{stage.replace(' ', '-')}", env_command=f"export PATH={Path(sys.executable).parent}:$PATH",
    )  # fmt: skip


def _run_on_slurm(executor: Any, stage: str) -> None:
    """Submit the job of a stage, or find the one that a killed command submitted, and wait until it left the queue."""
    submitted = Path(executor.logging_dir.resolve_paths("job"))
    if not submitted.is_file() or not _is_queued(submitted.read_text(encoding="utf-8")):
        try:
            executor.launch_job()
        except subprocess.CalledProcessError as error:
            raise UserError(
                f"--on slurm: sbatch refuses the job of the stage {stage!r} with exit code {error.returncode}; its "
                "reason is above"
            ) from None
        write_text(submitted, str(executor.job_id))
    job = submitted.read_text(encoding="utf-8")
    settled = None
    while executor.get_incomplete_ranks():
        if not _is_queued(job):
            settled = settled or time.monotonic() + _SETTLE_S
            if time.monotonic() > settled:
                return
        time.sleep(_POLL_S)


def _is_queued(job: str) -> bool:
    """Return True unless Slurm says that the job has ended."""
    asked = subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True, check=False)
    return bool(asked.stdout.strip()) if asked.returncode == 0 else "Invalid job id" not in asked.stderr
