"""A backbone too big for one process's memory limit, trained by the public command on four ranks under the same limit.

The limit is on private writable memory (RLIMIT_DATA), set for the command and so for each of its ranks. It is what one
process takes for the shipped backbone of 10 MiB plus a share of the big one's weights.
"""

from __future__ import annotations

import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._commands import QUICK, children_of, flags, start
from benchmarks._harness import Benchmark
from benchmarks._sized import Sizes, save_backbone
from flatshift.finetune import assets

SHIPPED = "flatshift-5m"
SIZES = Sizes(hidden=1024, inner=2816, blocks=16, vocabulary=4096, tokens=64)
RANKS, SHARE = 4, 0.7
SETTINGS = f"""{QUICK} --eval.train_limit 0 --train.max_length {SIZES.tokens} --train.steps 2 --train.save_every 0
    --train.batch_size 4 --mesh.stall 300 --data.train.limit 60 --data.dev.limit 4 --data.test.limit 4"""


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
    more = flags({"backbone": model, **{f"mesh.{axis}": width for axis, width in mesh.items()}})
    # Arrow's own memory pool reserves 1 GiB of addresses, which hides the weights
    environment = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    started = start(
        *("train", "language-model", "--out", str(out), *SETTINGS.split(), *more),
        environment=environment,
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))) if limit else None,
    )
    data = 0
    while started.poll() is None:
        data = max(data, *map(private_bytes, [started.pid, *children_of(started.pid)]))
        time.sleep(0.02)
    assert started.stderr is not None
    return Ended(started.returncode, started.stderr.read(), data)


def private_bytes(pid: int) -> int:
    """Private writable memory of a process, 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), 0)


def limited_rows(bench: Benchmark, folder: str | Path) -> None:
    """Add the rows of this story to `bench`; `folder` is for its files."""
    folder = Path(folder)
    model = backbone(folder / "limited")
    base = train(folder / "base", model=SHIPPED, mesh={}).data
    limit = base + int(SHARE * SIZES.whole_bytes)
    one = train(folder / "one", model=model, mesh={}, limit=limit)
    four = train(folder / "four", model=model, mesh={"dp": RANKS}, limit=limit)
    lines = [line for line in one.errors.splitlines() if line.startswith("flatshift: ")]
    bench.row("limit: weights of the backbone", "bytes", ours=SIZES.whole_bytes)
    bench.row("limit: private memory allowed above a small backbone's", "bytes", ours=limit - base)
    code = one.code if any("ran out of memory" in line for line in lines) else -1
    bench.row("limit: exit code of one process, which says that memory ran out", "code", ours=code, exactly=3)
    bench.row("limit: exit code of mesh.dp 4", "code", ours=four.code, exactly=0)
    bench.row("limit: private memory of a rank of mesh.dp 4, at most", "bytes", ours=four.data - base)
    if four.code or one.code != 3:
        print(four.errors[-2000:], one.errors[-2000:], flush=True)
