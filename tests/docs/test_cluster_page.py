"""The page on clusters: its templates parse, and its array does with a stand-in for Slurm what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from flatshift.command_line import parse_flags, split_overrides
from flatshift.commands.select import Flags
from flatshift.commands.sweep import Flags as SweepFlags
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
SMALL = (
    "--grid adapter.rank=1,2 --seeds 1 --train.steps 2 --data.train.limit 12 --data.test.limit 8 --data.dev.limit 8 "
    "--train.batch_size 4 --train.max_length 16 --train.max_cut 1 --train.precision fp32 "
    "--record null --eval.bootstrap 10 --devices cpu"
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


ARRAY = blocks("bash")[0]


@pytest.mark.parametrize("script", blocks("bash"), ids=("array", "run"))
def test_scripts_parse_and_requeue_what_was_stopped(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "--signal=USR1" in script and "scontrol requeue" in script


def test_manifests_parse_and_their_commands_are_ours() -> None:
    job, task = (yaml.safe_load(block) for block in blocks("yaml"))
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert job["spec"]["completionMode"] == "Indexed"
    for line in (container["args"][0], task["run"]):
        assert line.startswith("flatshift sweep double-descent --part ")
    assert f"/{job['spec']['completions']}" in container["args"][0]


SLURM = """#!/bin/bash
# sbatch: every task of the array one after another; srun: the command itself; scontrol: notes what it is asked.
if [ "$(basename "$0")" = srun ]; then exec "$@"; fi
if [ "$(basename "$0")" = scontrol ]; then echo "$@" >> "$ASKED"; exit 0; fi
last=$(sed -n 's/^#SBATCH --array=1-//p' "$1")
export SLURM_ARRAY_JOB_ID=77 SLURM_ARRAY_TASK_COUNT=$last
for SLURM_ARRAY_TASK_ID in $(seq 1 "$last"); do export SLURM_ARRAY_TASK_ID; bash "$1" || echo "task ended with $?"; done
"""


def _cluster(tmp_path: Path, flatshift: str) -> dict[str, str]:
    """An environment with Slurm's commands and a `flatshift` that does what it is given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"sbatch": SLURM, "srun": SLURM, "scontrol": SLURM, "flatshift": flatshift}.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "ASKED": str(tmp_path / "asked"),
        "PYTHONPATH": str(ROOT),
        "RECIPE": "double-descent",
    }


def test_a_task_that_was_stopped_is_requeued(tmp_path: Path) -> None:
    script = tmp_path / "sweep.sbatch"
    script.write_text(ARRAY.replace("--array=1-8", "--array=1-2"), encoding="utf-8")
    stopped = '#!/bin/bash\n[ "$SLURM_ARRAY_TASK_ID" = 2 ] && exit 3\nexit 0\n'
    subprocess.run(["sbatch", str(script)], cwd=tmp_path, env=_cluster(tmp_path, stopped), check=True)
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "requeue 77_2\n"


@pytest.mark.slow
def test_the_array_and_its_merge_make_one_sweep(tmp_path: Path) -> None:
    script = tmp_path / "sweep.sbatch"
    script.write_text(ARRAY.replace("--array=1-8", "--array=1-2"), encoding="utf-8")
    ours = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m flatshift "$@" {SMALL}\n'
    environment = _cluster(tmp_path, ours)
    for line in next(block for block in blocks("console") if block.startswith("RECIPE=")).splitlines():
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
    whole = pq.read_table(tmp_path / "whole" / "cells.parquet").to_pydict()
    parts = [pq.read_table(tmp_path / "parts" / i / "cells.parquet").to_pydict() for i in ("1", "2")]
    assert sorted(whole["cell"]) == sorted(parts[0]["cell"] + parts[1]["cell"]) and len(whole["cell"]) == 2
    assert set(whole["status"]) == {"done"}
    assert not (tmp_path / "asked").exists()


def test_the_commands_of_a_selection_over_processes_are_ours() -> None:
    block = next(block for block in blocks("console") if block.startswith("flatshift select")).replace("\\\n", " ")
    for line in block.strip().splitlines():
        words = shlex.split(line)
        flags = words[words.index("select") + 1 :]
        own, overrides = split_overrides(flags, Flags)
        assert parse_flags(Flags, "select", own).out == Path("selection") and not overrides


def test_the_page_begins_with_three_commands_of_ours() -> None:
    lines = [shlex.split(line) for line in blocks("console")[0].splitlines() if line.startswith("flatshift sweep")]
    kinds = []
    for words in lines:
        own, overrides = split_overrides(words[2:], SweepFlags)
        flags = parse_flags(SweepFlags, "sweep", own)
        assert not overrides
        kinds.append(flags.on if flags.part is None else flags.part)
    assert kinds == ["ray", "slurm", "1/8"]
