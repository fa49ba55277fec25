"""A backbone in NF4 on the GPU beside the same in bf16: what it learns, what an update takes, and memory."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.devices import Device
from benchmarks.gpu.llama import LANGUAGE, SEED, Padder, backbone, batches, stage
from benchmarks.gpu.measurements import Figures
from benchmarks.gpu.parity import objective
from benchmarks.gpu.speed import NEVER, shape_of, update_seconds

MISSING = "not installed: bitsandbytes (the extra `quant`)"


def _is_missing() -> bool:
    return importlib.util.find_spec("bitsandbytes") is None


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
    from flatshift.finetune.train.trainer import Trainer

    result = objective("completion", rows=rows, length=length, limit=limit)
    results: dict[Any, float] = {}
    for quantization in (None,) if _is_missing() else (kind, None):
        losses: list[float] = []
        model = _adapted(result.backbone, result.task, quantization, device, rank=8)
        with tempfile.TemporaryDirectory() as folder:
            run = _stage(result.task, result.batches, device, steps, Path(folder) / "run", 2e-3, losses)
            Trainer(model, result.tokenizer, run).fit()
        results[quantization] = sum(losses[-tail:]) / tail
    reason = {"reason": MISSING} if _is_missing() else {}
    return {"loss": {"ours": results.get(kind), "peer": [results[None]], **reason}}


def _adapted(source: Any, task: Any, kind: Any, device: str, *, rank: int) -> Any:
    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.config import Adapter
    from flatshift.finetune.models.load import load_backbone

    loaded = load_backbone(source, task=task, precision="bf16", quantization=kind, device=device)
    return attach_adapter(loaded, Adapter(rank=rank), task=task, seed=SEED)


def _stage(task: Any, rows: Any, device: str, steps: int, folder: Path, lr: float, losses: list[float]) -> Any:
    from flatshift.finetune.config import Optimizer, Train

    train = Train(
        steps=steps, precision="bf16", accumulate=rows.accumulate, max_length=rows.max_length, save_every=0,
        device=device,
    )  # fmt: skip
    optimizer = Optimizer(lr=lr, warmup=0.05)
    return stage(task, rows, train, folder, optimizer=optimizer, on_step=lambda line: losses.append(line["loss"]))


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
    if _is_missing():
        return {figure: {"reason": MISSING} for figure in ("seconds", "memory", "frozen")}
    from flatshift.finetune.models.backbone import quiet_transformers
    from flatshift.finetune.models.quantize import quantization_scales

    where, sizes = Device(device), shape_of(shape)
    results: dict[str, dict[Any, Any]] = {"seconds": {}, "memory": {}, "frozen": {}}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "backbone"
        with quiet_transformers():
            backbone(sizes, device).save_pretrained(source)
        for quantization in (None, kind):
            where.clear()
            model = _adapted(source, LANGUAGE, quantization, device, rank=rank)
            frozen = {p.data_ptr(): p.nbytes for p in model.parameters() if not p.requires_grad}
            scales = sum(t.nbytes for t in quantization_scales(model).values())
            results["frozen"][quantization] = float(sum(frozen.values()) + scales)
            result = batches(sizes, rows=rows, sequence=sequence)
            run = _stage(LANGUAGE, result, device, NEVER, Path(folder) / f"run-{quantization}", 1e-4, [])
            took = update_seconds(model, Padder(), run, device, warm=warm, updates=updates, new_peak=True)
            results["seconds"][quantization], results["memory"][quantization] = (
                statistics.median(took),
                where.peak_bytes(),
            )
            del model, run
    return {figure: {"ours": values[kind], "peer": [values[None]]} for figure, values in results.items()}
