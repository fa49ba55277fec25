"""A backbone in NF4 on the GPU beside the same in bf16: what it learns, what an update takes, and memory."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.devices import Device
from benchmarks.gpu.llama import SEED, Padder, backbone, batches
from benchmarks.gpu.measurements import Figures
from benchmarks.gpu.parity import objective
from benchmarks.gpu.speed import NEVER, Updates, shape_of

if TYPE_CHECKING:
    from flatshift.finetune.train.stage import TrainingStage

MISSING = "not installed: bitsandbytes (the extra `quant`)"


def learnt(
    *,
    device: str,
    kind: str = "nf4",
    steps: int = 100,
    tail: int = 20,
    rows: int = 4,
    length: int = 128,
    limit: int = 2000,
) -> Figures:
    """Mean loss of the last updates on shipped rows, in 4 bits and in bf16."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {
            "loss": {"ours": None, "peer": [_mean(None, device, steps, tail, rows, length, limit)], "reason": MISSING}
        }
    found = {kept: _mean(kept, device, steps, tail, rows, length, limit) for kept in (kind, None)}
    return {"loss": {"ours": found[kind], "peer": [found[None]]}}


def _mean(kind: Any, device: str, steps: int, tail: int, rows: int, length: int, limit: int) -> float:
    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.config import Adapter
    from flatshift.finetune.models.load import load_backbone
    from flatshift.finetune.train.trainer import Trainer

    made = objective("completion", rows=rows, length=length, limit=limit)
    loaded = load_backbone(made.backbone, task=made.task, precision="bf16", quantization=kind, device=device)
    model = attach_adapter(loaded, Adapter(rank=8), task=made.task, seed=SEED)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        stage = _stage(made.task, made.batches, device, steps, Path(folder) / "run")
        Trainer(model, made.tokenizer, replace(stage, on_step=lambda line: losses.append(line["loss"]))).fit()
    return sum(losses[-tail:]) / tail


def _stage(task: Any, batches: Any, device: str, steps: int, folder: Path) -> TrainingStage:
    from flatshift.finetune.config import Evaluate, Optimizer, Train
    from flatshift.finetune.run_directory import RunDirectory
    from flatshift.finetune.train.stage import TrainingStage
    from flatshift.regularizers import Plain, build

    return TrainingStage(
        name="fine-tune",
        task=task,
        batches=batches,
        dev=[],
        optimizer=Optimizer(lr=2e-3 if steps < NEVER else 1e-4, warmup=0.05),
        train=Train(
            steps=steps,
            precision="bf16",
            accumulate=batches.accumulate,
            max_length=batches.max_length,
            save_every=0,
            device=device,
        ),
        evaluate=Evaluate(),
        regularizer=build(Plain()),
        run=RunDirectory.create(folder),
        seed=SEED,
    )


def sized(
    *,
    device: str,
    shape: str | Sequence[Any],
    sequence: int,
    rows: int,
    kind: Any = "nf4",
    rank: int = 16,
    warm: int = 2,
    updates: int = 4,
) -> Figures:
    """Seconds of an update and its peak memory, in 4 bits and in bf16, of a Llama that is written down and read."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {figure: {"reason": MISSING} for figure in ("seconds", "memory", "frozen")}
    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.config import Adapter
    from flatshift.finetune.models.backbone import quiet_transformers
    from flatshift.finetune.models.load import load_backbone
    from flatshift.finetune.models.quantize import quantization_scales
    from flatshift.finetune.tasks import LanguageModel

    where, sizes, task = Device(device), shape_of(shape), LanguageModel(pack=False)
    found: dict[str, dict[Any, Any]] = {"seconds": {}, "memory": {}, "frozen": {}}
    with tempfile.TemporaryDirectory() as folder:
        with quiet_transformers():
            backbone(sizes, device).save_pretrained(Path(folder) / "backbone")
        for kept in (None, kind):
            where.clear()
            loaded = load_backbone(
                Path(folder) / "backbone",
                task=task,
                precision="bf16",
                quantization=kept,
                device=device,
            )
            model = attach_adapter(loaded, Adapter(rank=rank), task=task, seed=SEED)
            frozen = {p.data_ptr(): p.nbytes for p in model.parameters() if not p.requires_grad}
            found["frozen"][kept] = float(
                sum(frozen.values()) + sum(t.nbytes for t in quantization_scales(model).values())
            )
            rows_of = batches(sizes, rows=rows, sequence=sequence)
            run = Updates(model, Padder(), _stage(task, rows_of, device, NEVER, Path(folder) / f"run-{kept}"))
            run.update()
            where.clear()  # the peak is that of updates, not of reading and quantising
            took = [where.seconds(run.update) for _ in range(warm + updates)]
            found["seconds"][kept] = statistics.median(took[warm:])
            found["memory"][kept] = where.peak_bytes()
            run.close()
            del loaded, model, run
            where.clear()
    return {figure: {"ours": values[kind], "peer": [values[None]]} for figure, values in found.items()}
