"""What a bad input is, and the good rows, backbone and run that bad ones are made from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Prepare = Callable[[Path], None]
DIGITS = "9" * 400
MANY = "9" * 5000
ROWS = [{"text": f"row {i} of the sample", "label": "ab"[i % 2]} for i in range(12)]
TRAIN = ["train", "recipe.yaml", "--out", "out"]


def _nothing(_work: Path) -> None: ...


@dataclass(frozen=True)
class BadInput:
    """One command line that must be refused."""

    name: str
    argv: tuple[str, ...]
    places: tuple[str, ...]
    """What the sentence must name: one of these."""
    prepare: Prepare = field(default=_nothing)
    """Makes the files, in the folder that the command runs in."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What is other about the process while the command runs."""


def make_sandbox(root: Path) -> Path:
    """Good rows, a backbone and finished runs that sort and write in `root`, which the bad inputs are made from."""
    from flatshift.finetune import assets

    write_text(root / "rows.jsonl", jsonl(ROWS))
    write_text(root / "test.jsonl", jsonl([{**row, "text": f"unseen {row['text']}"} for row in ROWS]))
    source = assets.backbone_directory("flatshift-5m")
    assert source is not None
    shutil.copytree(source, root / "backbone")
    (root / "good.yaml").write_text(recipe(root), encoding="utf-8")
    for name, more in (("run", []), ("writer", ["--task", "language-model"])):
        command = ["train", str(root / "good.yaml"), "--out", str(root / name), "--train.peak_tflops", "1", *more]
        pid = os.fork()
        if pid == 0:
            from flatshift.cli import run

            os._exit(run(command))
        assert os.waitpid(pid, 0)[1] == 0, "a run that bad inputs are made from failed"
    return root


def recipe(root: Path, more: str = "") -> str:
    return (
        f"backbone: {root / 'backbone'}\ntask: {{kind: classify}}\n"
        f"data:\n  train: {{files: ['{root / 'rows.jsonl'}']}}\n  test: {{files: ['{root / 'test.jsonl'}']}}\n"
        "adapter: {rank: 2, targets: [q_proj]}\n"
        "train: {steps: 1, batch_size: 4, max_length: 16, max_cut: 1, device: cpu, precision: fp32, threads: 1}\n"
        f"eval: {{bootstrap: 2}}\n{more}"
    )


def good(root: Path, more: str = "") -> Prepare:
    return lambda work: write_text(work / "recipe.yaml", recipe(root, more))


def piped(root: Path) -> Prepare:
    def prepare(work: Path) -> None:
        os.mkfifo(work / "pipe")
        good(root)(work)

    return prepare


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def files(root: Path | None, contents: Mapping[str, bytes | str]) -> Prepare:
    """Write files by name, and the good recipe where the sandbox `root` is given."""

    def prepare(work: Path) -> None:
        if root is not None:
            good(root)(work)
        for name, content in contents.items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))

    return prepare


def backbone_with(root: Path, file: str, data: bytes, more: Mapping[str, bytes | str] | None = None) -> Prepare:
    """A copy of the sandbox's backbone with one file other, and the good recipe."""

    def prepare(work: Path) -> None:
        shutil.copytree(root / "backbone", work / "backbone", copy_function=os.link)
        (work / "backbone" / file).unlink()
        files(root, {f"backbone/{file}": data, **(more or {})})(work)

    return prepare


def jsonl(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
