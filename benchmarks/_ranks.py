"""A benchmark's function on several processes that form a gloo group, one compute thread each.

seconds = on_ranks("benchmarks.sharding_speed:ours", 2, mesh={"dp": 2}, steps=6)    # what each rank returned
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._harness import ROOT


def on_ranks(
    function: str, ranks: int, *, python: str = sys.executable, wall_cap_s: float = 900.0, **arguments: Any
) -> list[Any]:
    """Call `function` ("module:name") with JSON `arguments` on `ranks` fresh processes; their results by rank.

    Raises RuntimeError with the last words of the rank that failed first, or that is not done when the time is up.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            call = [python, "-m", "benchmarks._ranks", function, json.dumps(arguments), folder]
            log = (Path(folder) / f"log{rank}").open("wb")
            started.append(subprocess.Popen(call, env=variables, cwd=ROOT, stdout=log, stderr=log))
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
            code = process.poll()
            if code:
                return rank
            if code == 0:
                del running[rank]
        if time.monotonic() > deadline:
            return min(running)
        time.sleep(0.05)
    return None


def _main(function: str, arguments: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(minutes=10)
    )
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    (Path(folder) / f"result{rank}").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort at interpreter shutdown


if __name__ == "__main__":
    _main(*sys.argv[1:])
