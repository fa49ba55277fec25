"""One short stage of the public loop with any regularizer, for the tests of the methods of `regularizers/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import RegularizerConfig, build
from tests.support.finetune_models import PadOnly, RandomBatches, save_backbone

STEPS = 6


def run_stage(
    config: RegularizerConfig, folder: Path, *, stop_at: int | None = None, **backbone: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train a tiny llama for `STEPS` updates of two micro-batches; with `stop_at`, interrupted there and resumed.

    Returns the lines of metrics.jsonl and the adapter. The backbone's bytes are checked.
    """
    if not (folder / "backbone").exists():
        save_backbone("llama", folder / "backbone", **backbone)
    run = RunDirectory.create(folder / f"run-{len(list(folder.glob('run-*')))}")
    if stop_at is not None:
        try:
            _train(config, folder, run, stop=_after(stop_at))
        except Interrupted:
            pass
        else:
            raise AssertionError("the stage was to be interrupted")
    model = _train(config, folder, run, stop=lambda: False)
    return read_metrics(run.path / "metrics.jsonl"), {n: p.detach().clone() for n, p in trainable(model).items()}


def _after(steps: int) -> Callable[[], bool]:
    asked = iter(range(1, STEPS + 1))
    return lambda: next(asked) == steps


def _train(config: RegularizerConfig, folder: Path, run: RunDirectory, *, stop: Callable[[], bool]) -> Any:
    task = LanguageModel()
    model = attach_adapter(load_backbone(folder / "backbone", task=task), Adapter(rank=4), task=task, seed=0)
    before = checksum(model)
    try:
        Trainer(
            model,
            PadOnly(),
            TrainingStage(
                name="fine-tune",
                task=task,
                batches=RandomBatches(accumulate=2),
                dev=[],
                optimizer=Optimizer(lr=1e-2, schedule="constant"),
                train=Train(steps=STEPS),
                evaluate=Evaluate(batch_size=2),
                regularizer=build(config),
                run=run,
                seed=0,
                stop=stop,
            ),
        ).fit()
    finally:
        assert checksum(model) == before
    return model


def same_course(one: tuple[list[dict[str, Any]], dict[str, Any]], other: tuple[list[dict[str, Any]], Any]) -> bool:
    """Whether two runs of `run_stage` logged the same figures and ended with the same bits."""
    aside = ("time_s", "attempt")
    figures = [[{k: v for k, v in line.items() if k not in aside} for line in run[0]] for run in (one, other)]
    return figures[0] == figures[1] and all(tensor.equal(other[1][name]) for name, tensor in one[1].items())
