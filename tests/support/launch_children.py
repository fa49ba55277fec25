"""Ranks for the tests of launching: `python launch_children.py SCENARIO FOLDER STALL` is one of them.

Each joins the mesh and adds up a number per step through the front door's own error handling, as `flatshift train`
does; at its scenario's moment something happens to it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from flatshift import cli
from flatshift.commands import train
from flatshift.experiments.run.console import catch_stop_signals
from flatshift.finetune.config import Mesh
from flatshift.finetune.errors import Interrupted, UserError
from flatshift.finetune.launch import consistency, spawn, watchdog

STEPS, MOMENT = 600, 5


def body(scenario: str, folder: Path, stall: float) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if scenario == "early" and rank == 1:
        raise UserError("rank 1 cannot read its rows")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = spawn.join_mesh(Mesh(dp=3 if scenario == "product" else size, stall=stall), "cpu")
    facts = {"train.seed": str(rank // 2) if scenario == "recipe" else "0", "train.steps": "5"}
    consistency.check_ranks_agree(world, facts)
    with catch_stop_signals(lambda _: None) as stop, watchdog.progress_timeout("update"):
        for step in range(STEPS):
            flag = torch.tensor([float(stop())])
            dist.all_reduce(flag)
            if flag:
                raise Interrupted(f"stopped after step {step}; its state is saved")
            watchdog.report_progress(step, "update")
            if rank == 0:
                (folder / "step").write_text(str(step))
            if step == MOMENT and rank == size - 1:
                happen(scenario)
            if scenario == "done" and step == MOMENT:
                break
            time.sleep(0.02)
    print(f"rank {rank} is done")
    spawn.destroy_process_group(world)
    return 0


def happen(scenario: str) -> None:
    if scenario == "user":
        raise UserError("the rows of this rank are bad")
    if scenario == "bug":
        raise KeyError("ours")
    if scenario == "memory":
        raise MemoryError("nothing left")
    if scenario == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if scenario == "hang":
        time.sleep(3600)


if __name__ == "__main__":
    scenario, folder, stall = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    train.run = lambda _argv: body(scenario, folder, stall)
    sys.argv = ["flatshift", "train"]
    cli.main()
