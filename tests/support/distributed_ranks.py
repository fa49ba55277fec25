"""Run one function on several processes of this machine that form a gloo process group."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support.patience import HANG_S


def run_ranks(function: Callable | str, world_size: int, *args: Any, anew: bool = False) -> list[Any]:
    """Call `function(*args)` on `world_size` fresh processes and return what each rank returned, in rank order.

    The default process group (gloo, one compute thread) exists while `function` runs; a rank reads its place with
    `torch.distributed.get_rank()`.

    Args:
        function: a module-level function, or "module:function". Its file is loaded anew in each process.
        args: picklable.
        anew: start each rank as a Python of its own, where its memory or its environment matters; otherwise ranks are
            forked off one process of a single thread, which imported torch and its like for all tests of a file.

    Raises:
        RuntimeError: a rank raised (with its traceback), died, or did not finish in time.
    """
    if callable(function):
        function = f"{Path(function.__code__.co_filename).resolve()}:{function.__qualname__}"
    context = mp.get_context("spawn" if anew else "forkserver")
    if not anew:
        mp.set_forkserver_preload(["tests.support.rank_imports"])
    packed = pickle.dumps(
        args
    )  # multiprocessing would hand each tensor over as an open file, and of those there are few
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            setup = (function, rank, world_size, f"{folder}/store", packed)
            processes.append(context.Process(target=_rank, args=(theirs, *setup), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _collect(pipes, deadline=time.monotonic() + HANG_S)
        finally:
            for process in processes:
                process.join(timeout=0 if sys.exc_info()[0] else 10)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], *, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RuntimeError(f"ranks {missing} of {len(pipes)} did not finish in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from our own child
            except EOFError:
                raise RuntimeError(f"rank {rank} of {len(pipes)} died without a message") from None
            if not ok:
                raise RuntimeError(f"rank {rank} of {len(pipes)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _load(function: str) -> Callable:
    place, _, name = function.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    spec = importlib.util.spec_from_file_location(f"ranks_{Path(place).stem}", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _rank(pipe: Connection, function: str, rank: int, world_size: int, store: str, packed: bytes) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=HANG_S)
        )
        value = _load(function)(*pickle.loads(packed))  # noqa: S301 - from our own parent
        dist.barrier()
        pipe.send_bytes(pickle.dumps((True, value)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)
    os._exit(0)  # no interpreter shutdown: gloo's threads may abort in it
