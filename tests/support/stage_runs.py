"""A short stage in a run directory, which a test stops after some step and begins again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatshift.finetune.config import Evaluate
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.run_directory import RunDirectory
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import Plain, build
from tests.support.finetune_models import PadOnly


def run_or_stop(
    model: Any, directory: Path, *, stop_at: int | None = None, writes: bool = True, **stage: Any
) -> Path | None:
    """Begin the fine-tune stage of `directory`, or go on with it; the adapter's folder, None if it was stopped.

    writes: False on the ranks of a mesh that write nothing.
    stage: of `Trainer`: task, batches, optimizer and train, and what differs from a plain stage without dev rows.
    """
    if not writes:
        run = RunDirectory(directory, writes=False)
    else:
        run = RunDirectory.open(directory) if directory.exists() else RunDirectory.create(directory)
    last = [0]
    usual = {"dev": [], "evaluate": Evaluate(batch_size=4), "regularizer": build(Plain()), "seed": 0}
    try:
        Trainer(
            model,
            PadOnly(),
            TrainingStage(
                name="fine-tune",
                run=run,
                on_step=lambda line: last.__setitem__(0, line["step"]),
                stop=lambda: last[0] == stop_at,
                **{**usual, **stage},
            ),
        ).fit()
    except Interrupted:
        return None
    return directory / "stages" / "fine-tune" / "adapter"
