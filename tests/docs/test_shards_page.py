"""The page on feature shards: its script makes the directory that it says, on one machine and through Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flatshift.selection.features import open_directory
from tests.support.patience import HANG_S

pytest.importorskip("datatrove")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "feature-shards.md").read_text(encoding="utf-8")
_, COMMON, LOCAL, SLURM, GRADIENTS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
STANDIN = """#!/bin/bash
# sbatch: every task of the array one after another; srun: the command itself; the others as far as datatrove asks them.
case "$(basename "$0")" in
  srun) while [[ "$1" == -* ]]; do [ "$1" = -n ] && shift; shift; done; exec "$@" ;;
  scontrol) echo localhost; exit 0 ;;
  merge_stats) exit 0 ;;
  launch_pickled_pipeline) exec "$PYTHON" -m datatrove.tools.launch_pickled_pipeline "$@" ;;
esac
script="${@: -1}"
last=$(sed -n 's/^#SBATCH --array=0-//p' "$script")
export RUN_OFFSET=0 SLURM_NODELIST=localhost SLURM_JOB_ID=77
for SLURM_ARRAY_TASK_ID in $(seq 0 "$last"); do
  export SLURM_ARRAY_TASK_ID
  bash "$script" >> tasks.log 2>&1 || { cat tasks.log >&2; exit 1; }
done
echo "Submitted batch job 77"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    texts = [f"row{i} " + " ".join(words[(i + k * (i % 3)) % 8] for k in range(8)) for i in range(40)]
    (tmp_path / "pool").mkdir()
    for file in range(2):
        lines = [json.dumps({"text": texts[i], "id": f"r{i}"}) + "\n" for i in range(20 * file, 20 * file + 20)]
        (tmp_path / "pool" / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
    target = "".join(json.dumps({"text": text}) + "\n" for text in texts[:4])
    (tmp_path / "target.jsonl").write_text(target, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun", "scontrol", "merge_stats", "launch_pickled_pipeline"):
        (tmp_path / "bin" / name).write_text(STANDIN, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("ending", [pytest.param(LOCAL, marks=pytest.mark.slow), SLURM], ids=["local", "slurm"])
def test_the_script_leaves_a_sealed_directory(home: Path, ending: str) -> None:
    script = (COMMON + (GRADIENTS if ending == LOCAL else "") + ending).replace("dim=128", "dim=8")
    (home / "features.py").write_text(script, encoding="utf-8")
    environment = os.environ | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    told = subprocess.run(
        [sys.executable, "features.py"], cwd=home, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert told.returncode == 0, told.stdout + told.stderr
    found = open_directory(home / "features")
    assert found.shape == (40, 8) and list(found.ids()) == [f"r{i}" for i in range(40)]
    if ending == LOCAL:
        assert np.load(home / "target-gradients.npy").shape == (4, 1024)
    assert len(list((home / "logs" / "features" / "completions").iterdir())) == 2
