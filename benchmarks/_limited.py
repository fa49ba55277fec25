"""A backbone too big for one process's memory limit, trained by the public command on four ranks under the same limit.

The limit is on private writable memory (RLIMIT_DATA), set for the command and so for each of its ranks. It is what one
process takes for the shipped backbone of 10 MiB plus a share of the big one's weights.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._harness import ROOT, Benchmark
from benchmarks._sized import Sizes, save_backbone
from flatshift.finetune import assets

SHIPPED = "flatshift-5m"
SIZES = Sizes(hidden=1024, inner=2816, blocks=16, vocabulary=4096, tokens=64)
RANKS, SHARE = 4, 0.7
SETTINGS = {
    "train.steps": 2,
    "train.save_every": 0,
    "train.batch_size": 4,
    "train.max_length": SIZES.tokens,
    "train.max_cut": 1,
    "train.threads": 1,
    "train.precision": "fp32",
    "train.device": "cpu",
    "data.train.limit": 60,
    "data.dev.limit": 4,
    "data.test.limit": 4,
    "eval.bootstrap": 10,
    "eval.train_limit": 0,
    "mesh.stall": 300,
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    errors: str
    """What it said on stderr."""
    data: int
    """The most private writable memory of any of its processes that was seen, bytes."""


def backbone(folder: str | Path, sizes: Sizes = SIZES) -> Path:
    """A random model of `sizes` in files of 64 MB, with the shipped tokenizer."""
    folder = Path(folder)
    save_backbone(sizes, folder, file_size="64MB")
    shipped = assets.backbone_directory(SHIPPED)
    assert shipped is not None
    for file in shipped.glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    return folder


def train(out: Path, *, model: str | Path, mesh: dict[str, int], limit: int | None = None) -> Ended:
    """`flatshift train language-model` with `model` into `out`, each process held to `limit` bytes."""
    words = [f"--{key}={value}" for key, value in {"backbone": model, **SETTINGS}.items()]
    words += [f"--mesh.{axis}={width}" for axis, width in mesh.items()]
    started = subprocess.Popen(
        [sys.executable, "-m", "flatshift", "train", "language-model", "--out", str(out), *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
            "ARROW_DEFAULT_MEMORY_POOL": "system",  # Arrow's own reserves 1 GiB of addresses, which hides the weights
        },
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))) if limit else None,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    data = 0
    while started.poll() is None:
        data = max(data, *map(_data, [started.pid, *_children(started.pid)]))
        time.sleep(0.02)
    assert started.stderr is not None
    return Ended(started.returncode, started.stderr.read(), data)


def _data(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), 0)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def limited_rows(bench: Benchmark, folder: str | Path) -> None:
    """Add the rows of this story to `bench`; `folder` is for its files."""
    folder = Path(folder)
    model = backbone(folder / "limited")
    base = train(folder / "base", model=SHIPPED, mesh={}).data
    limit = base + int(SHARE * SIZES.whole_bytes)
    one = train(folder / "one", model=model, mesh={}, limit=limit)
    four = train(folder / "four", model=model, mesh={"dp": RANKS}, limit=limit)
    said = [line for line in one.errors.splitlines() if line.startswith("flatshift: ")]
    bench.row("limit: weights of the backbone", ours=SIZES.whole_bytes, unit="bytes")
    bench.row("limit: private memory allowed above a small backbone's", ours=limit - base, unit="bytes")
    bench.row(
        "limit: exit code of one process, which says that memory ran out",
        ours=one.code if any("ran out of memory" in line for line in said) else -1,
        unit="code",
        bar_op="==",
        bar_value=3,
    )
    bench.row("limit: exit code of mesh.dp 4", ours=four.code, unit="code", bar_op="==", bar_value=0)
    bench.row("limit: private memory of a rank of mesh.dp 4, at most", ours=four.data - base, unit="bytes")
    if four.code:
        print(four.errors[-2000:], flush=True)
    if one.code != 3:
        print(one.errors[-2000:], flush=True)
