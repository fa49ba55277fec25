"""Commands of Slurm on one machine, for submitit: sbatch, srun, sacct, scancel and scontrol, by the name of the link.

A job runs in a process of its own group: the tasks of its array one after another, once its dependency is COMPLETED. A
step of several tasks (--nodes, --ntasks-per-node) runs them side by side, with Slurm's variables.
State is kept in files of $STAND_IN_SLURM.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")


def install(folder: Path) -> dict[str, str]:
    """Write the commands to `folder`; return the environment in which they are found."""
    tools, state = folder / "tools", folder / "state"
    tools.mkdir()
    state.mkdir()
    for name in COMMANDS:
        text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {name} "$@"\n'
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod((tools / name).stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "STAND_IN_SLURM": str(state)}


def scripts(folder: Path) -> list[str]:
    """Texts of all submitted jobs, in their order."""
    return [file.read_text(encoding="utf-8") for file in sorted((folder / "state").glob("*.sh"))]


def states(folder: Path) -> dict[str, str]:
    """Job or task → state."""
    files = sorted((folder / "state").glob("*.state"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def _set_state(state: Path, job: str, text: str) -> None:
    temporary = state / f"{job}.{os.getpid()}.new"
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(state / f"{job}.state")


def sbatch(state: Path, script: str) -> int:
    if os.environ.get("STAND_IN_REFUSES"):
        print(
            "sbatch: error: Batch job submission failed: Requested node configuration is not available", file=sys.stderr
        )
        return 1
    number = 100 + len(list(state.glob("*.sh")))
    copy = state / f"{number}.sh"
    copy.write_text(Path(script).read_text(encoding="utf-8"), encoding="utf-8")
    _set_state(state, str(number), "PENDING")
    with (state / f"{number}.out").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, __file__, "job", str(number)], stdout=log, stderr=log, start_new_session=True
        )
    (state / f"{number}.pid").write_text(str(job.pid), encoding="utf-8")
    print(f"Submitted batch job {number}")
    return 0


def job(state: Path, number: str) -> int:
    text = (state / f"{number}.sh").read_text(encoding="utf-8")
    if (dependency := re.search(r"--dependency=afterok:(\S+)", text)) is not None:
        needed = dependency[1].split(":")
        while any((state / f"{name}.state").read_text() != "COMPLETED" for name in needed):
            time.sleep(0.1)
    array = re.search(r"--array=0-(\d+)", text)
    tasks = [None] if array is None else list(range(int(array[1]) + 1))
    for task in tasks:
        if task is not None:
            _set_state(state, f"{number}_{task}", "PENDING")
    _set_state(state, number, "RUNNING")
    codes = []
    for task in tasks:
        name = number if task is None else f"{number}_{task}"
        environment = {**os.environ, "SLURM_JOB_ID": number}
        if task is not None:
            environment |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(task)}
        while True:
            _set_state(state, name, "RUNNING")
            code = subprocess.call(["bash", str(state / f"{number}.sh")], env=environment)
            requeued = state / f"{name}.requeue"
            if not requeued.exists():
                break
            requeued.unlink()
        codes.append(code)
        _set_state(state, name, "FAILED" if code else "COMPLETED")
    _set_state(state, number, "FAILED" if any(codes) else "COMPLETED")
    return 0


def srun(state: Path, *words: str) -> int:
    rest, files = list(words), {}
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--output", "--error"):
            files[option] = rest.pop(0)
    number, task = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID", "")
    name = f"{number}_{task}" if task else number
    flags = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", (state / f"{number}.sh").read_text(), flags=re.M))
    nodes, share = int(flags.get("nodes", 1)), int(flags.get("ntasks-per-node", 1))
    size, rank = nodes * share, os.environ.get("SLURM_PROCID")
    if size > 1 and rank is None:
        os.environ.update(SLURM_NTASKS=str(size), SLURM_JOB_NUM_NODES=str(nodes))
        tasks = [
            subprocess.Popen(
                [sys.executable, __file__, "srun", *words],
                env={
                    **os.environ,
                    **{"SLURM_PROCID": str(number), "SLURM_NODEID": str(number // share)},
                    "SLURM_LOCALID": str(number % share),
                },
            )
            for number in range(size)
        ]
        return max(abs(process.wait()) for process in tasks)
    for option, descriptor in (("--output", 1), ("--error", 2)):
        path = files[option]
        for pattern, value in (("%A", number), ("%a", task), ("%j", number), ("%t", rank or "0")):
            path = path.replace(pattern, value)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    (state / (f"{name}.step" if rank is None else f"{name}.step.{rank}")).write_text(str(os.getpid()), encoding="utf-8")
    os.execvp(rest[0], rest)


def sacct(state: Path, *words: str) -> int:
    print("JobID|State|NodeList")
    jobs = [word for before, word in itertools.pairwise(words) if before == "-j"]
    for file in sorted(state.glob("*.state")):
        if file.stem.partition("_")[0] in jobs:
            print(f"{file.stem}|{file.read_text(encoding='utf-8')}|node")
    return 0


def scancel(state: Path, job: str) -> int:
    number, _, task = job.partition("_")
    pid = state / (f"{job}.step" if task else f"{number}.pid")
    if pid.is_file():
        try:
            if task:
                os.kill(int(pid.read_text()), signal.SIGKILL)
            else:
                os.killpg(int(pid.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            return 0
    _set_state(state, job, "CANCELLED")
    return 0


def scontrol(state: Path, word: str, job: str) -> int:
    assert word == "requeue"
    (state / f"{job}.requeue").touch()
    return 0


if __name__ == "__main__":
    action = {"sbatch": sbatch, "srun": srun, "sacct": sacct, "scancel": scancel, "scontrol": scontrol, "job": job}
    sys.exit(action[sys.argv[1]](Path(os.environ["STAND_IN_SLURM"]), *sys.argv[2:]))
