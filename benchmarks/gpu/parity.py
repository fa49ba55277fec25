"""The same run on the CPU and on the GPU, for every objective, and a run that is killed and goes on.

The shipped backbones train a few updates on shipped rows: on the CPU in fp32, which is the reference, on the device in
fp32 and in bf16 autocast over a bf16 backbone. Compared are the losses of all updates, each relative to the
reference's, and what training changed: |Δ − Δ_ref| ÷ |Δ_ref| over all trained tensors together, Δ their distance from
where they started.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._harness import ROOT
from benchmarks.gpu.llama import SEED, stage
from benchmarks.gpu.measurements import Figures

EPS = 1e-5
"""AdamW's ε: a gradient that is nothing but rounding must not become as large a step as any."""
KINDS = (
    "language-model",
    "completion",
    "chat",
    "classify",
    "classify multi",
    "regress",
    "seq2seq",
    "masked-lm",
    "preference",
)
PACKED = ("language-model", "completion", "chat")
"""Kinds whose rows can be packed."""
REGULARIZERS = ("plain", "ggpo", "mgpo")
BACKBONES = {
    kind: str(ROOT / "finetune" / "backbones" / name)
    for kind, name in {"seq2seq": "flatshift-t5-3m", "masked-lm": "flatshift-encoder-3m"}.items()
}
"""Those that are not `flatshift-5m`: by directory, since the wheel of a bundle lacks them."""
SOURCES = {"chat": "sample:gsm8k/train", "preference": "sample:statements/train"}


@dataclass(frozen=True)
class Objective:
    """A task on a shipped backbone, with rows."""

    backbone: str
    task: Any
    batches: Any
    tokenizer: Any
    labels: tuple[str, ...] | None


def objective(kind: str, *, rows: int, length: int, limit: int, pack: bool | None = None) -> Objective:
    """The objective `kind` on shipped rows: `limit` of them, `rows` a micro-batch, of at most `length` tokens; packed
    or not (None: as the task's default is)."""
    from flatshift.finetune import tasks
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.rows import Row, read_rows
    from flatshift.finetune.models.backbone import open_backbone

    task: Any = {
        "language-model": tasks.LanguageModel(),
        "completion": tasks.Completion(prompt="{text}\nintent:"),
        "chat": tasks.Chat(template="plain", max_truncated=1.0, max_unsupervised=1.0),
        "classify": tasks.Classify(),
        "classify multi": tasks.Classify(multi=True),
        "regress": tasks.Regress(standardise=False),
        "seq2seq": tasks.Seq2Seq(prompt="{text}", target="{label}: {text}", max_truncated=1.0),
        "masked-lm": tasks.MaskedLM(),
        "preference": tasks.Preference(answer=" {answer}", max_truncated=1.0),
    }[kind]
    if pack is not None:
        task = dataclasses.replace(task, pack=pack)
    source = SOURCES.get(kind, "sample:scicite/train")
    rows_of_kind = read_rows([source], required=task.columns())
    results = [row for row, _ in zip(rows_of_kind, range(limit), strict=False)]
    labels: tuple[str, ...] | None = None
    if kind == "classify":
        labels = ("background", "method", "result")
    if kind == "classify multi":  # what can be told of a text without knowing it
        labels = ("long", "figures")
        results = [
            Row({**row.values, "label": _classes(row.values["text"])}, row.id, row.where, row.record, row.index)
            for row in results
        ]
    if kind == "regress":
        results = [
            Row({**row.values, "label": len(row.values["text"]) / 100}, row.id, row.where, row.record, row.index)
            for row in results
        ]
    backbone = BACKBONES.get(kind, "flatshift-5m")
    tokenizer = open_backbone(backbone).tokenizer
    examples = encode(
        results,
        task=task,
        tokenizer=tokenizer,
        max_length=length,
        label_names=labels,
        bad_rows="skip",
        decoder_start=open_backbone(backbone).decoder_start if kind == "seq2seq" else None,
    ).examples
    batches = TrainingDataLoader(
        examples,
        task=task,
        batch_size=rows,
        accumulate=2,
        seed=SEED,
        max_length=length,
        pad_id=int(tokenizer.pad_token_id),
        masking=task.masking(tokenizer),
    )
    return Objective(backbone, task, batches, tokenizer, labels)


def _classes(text: str) -> tuple[str, ...]:
    return tuple(name for name, has in (("long", len(text) > 150), ("figures", any(map(str.isdigit, text)))) if has)


def trained(
    made: Objective,
    *,
    updates: int,
    device: str,
    precision: Any,
    regularizer: str,
    folder: Path,
    save_every: int = 0,
    on_step: Any = None,
    deterministic: bool = False,
) -> tuple[list[float], dict[str, Any]]:
    """Losses of the updates, and by how much each trained tensor moved (CPU, float64)."""
    from benchmarks._rehearsal import REGULARIZERS as known
    from flatshift.finetune.adapters.adapter import attach_adapter, trainable
    from flatshift.finetune.config import Adapter, Optimizer, Train
    from flatshift.finetune.models.load import load_backbone
    from flatshift.finetune.train.trainer import Trainer

    backbone = load_backbone(
        made.backbone, task=made.task, label_names=made.labels, precision=precision, dropout=0.0, device=device
    )
    model = attach_adapter(backbone, Adapter(rank=8), task=made.task, seed=SEED)
    start = {name: p.detach().cpu().double() for name, p in trainable(model).items()}
    losses: list[float] = []

    def note(line: dict[str, Any]) -> None:
        losses.append(line["loss"])
        if on_step is not None:
            on_step(line)

    train = Train(
        steps=updates, precision=precision, accumulate=2, save_every=save_every, keep=2, device=device, threads=None,
        deterministic=deterministic,
    )  # fmt: skip
    optimizer, noise = Optimizer(lr=1e-3, warmup=0.0, eps=EPS), known[regularizer]
    run = stage(made.task, made.batches, train, folder, optimizer=optimizer, regularizer=noise, on_step=note)
    Trainer(model, made.tokenizer, run).fit()
    return losses, {name: p.detach().cpu().double() - start[name] for name, p in trainable(model).items()}


def distances(mine: tuple[list[float], Any], theirs: tuple[list[float], Any]) -> tuple[float, float]:
    """Largest relative difference of the losses, and of what training changed."""
    (losses, moved), (wanted, reference) = mine, theirs
    if not len(losses) == len(wanted) > 0:
        raise RuntimeError(f"{len(losses)} losses beside {len(wanted)}")
    apart = sum(float((moved[name] - by).square().sum()) for name, by in reference.items())
    whole = sum(float(by.square().sum()) for by in reference.values())
    if whole == 0:
        raise RuntimeError("the reference did not train")
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    return loss, (apart / whole) ** 0.5


def equal(
    *,
    device: str,
    kind: str,
    updates: int = 6,
    rows: int = 4,
    length: int = 96,
    limit: int = 200,
    regularizers: Sequence[str] = REGULARIZERS,
) -> Figures:
    """The worst distance over the regularizers, in fp32 and in bf16, from the CPU in fp32."""
    result = objective(kind, rows=rows, length=length, limit=limit)
    worst: dict[str, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for regularizer in regularizers:
            runs = {
                name: trained(
                    result, updates=updates, device=where, precision=precision, regularizer=regularizer,
                    folder=Path(folder) / f"{regularizer}-{name}",
                )
                for name, where, precision in (
                    ("reference", "cpu", "fp32"), ("fp32", device, "fp32"), ("bf16", device, "bf16"),
                )
            }  # fmt: skip
            for name in ("fp32", "bf16"):
                for figure, value in zip(("loss", "adapter"), distances(runs[name], runs["reference"]), strict=True):
                    worst[f"{figure}|{name}"] = max(worst.get(f"{figure}|{name}", (-1.0, "")), (value, regularizer))
    return {
        name: {"ours": value, "reason": f"the largest is that of {which}"} for name, (value, which) in worst.items()
    }


# --------------------------------------------------------------------------------------------- kill and resume


def resumed(
    *,
    device: str,
    precision: str = "bf16",
    updates: int = 8,
    killed_after: int = 5,
    rows: int = 4,
    length: int = 96,
    limit: int = 200,
) -> Figures:
    """Bits of a deterministic run that a process of its own is killed in, and that goes on, beside a run that nobody
    killed.

    The other figure is that of two runs that nobody killed: where those differ, it is not the resume that does it.
    """
    run = {"device": device, "precision": precision, "updates": updates, "rows": rows, "length": length, "limit": limit}
    with tempfile.TemporaryDirectory() as place:
        whole, again = (_deterministic(f"{place}/{name}", **run) for name in ("whole", "again"))
        arguments = {**run, "folder": f"{place}/killed", "killed_after": killed_after}
        code = f"from benchmarks.gpu.parity import _deterministic; _deterministic(**{arguments!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the run that was to be killed ended with {done.returncode}: {done.stderr[-300:]}")
        resumed = _deterministic(f"{place}/killed", **run)
    return {"resumed": {"ours": float(unlike(resumed, whole))}, "repeated": {"ours": float(unlike(again, whole))}}


def _deterministic(
    folder: str, *, device: str, precision: str, updates: int, rows: int, length: int, limit: int, killed_after: int = 0
) -> dict[str, Any]:
    """How each trained tensor moved in a deterministic GGPO run; killed_after: the update that ends this process."""

    def kill(line: dict[str, Any]) -> None:
        if line["step"] == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    return trained(
        objective("language-model", rows=rows, length=length, limit=limit), updates=updates, device=device,
        precision=precision, regularizer="ggpo", folder=Path(folder), save_every=2, deterministic=True, on_step=kill,
    )[1]  # fmt: skip


def unlike(mine: dict[str, Any], theirs: dict[str, Any]) -> int:
    """Trained numbers that are not the same."""
    assert mine.keys() == theirs.keys()
    return sum(int((mine[name] != other).sum()) for name, other in theirs.items())
