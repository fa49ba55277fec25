"""What a running stage has come to, and its checkpoints: whole tensors of any mesh, taken over by any mesh."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, clone, drop_checkpoints, latest_checkpoint, pack, save_checkpoint, unpack
from .config import Optimizer, Train
from .optimizer import AdapterOptimizer
from .parallel import watch
from .parallel.engine import Engine
from .rundir import METRICS, RunDirectory, last_attempt, read_metrics

if TYPE_CHECKING:
    from regularizers.protocol import Regularizer


@dataclass
class Progress:
    """What a checkpoint says besides tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_dev_loss: float | None = None
    best_accuracy: float | None = None
    misses: int = 0
    stopped_early: bool = False
    best: dict[str, Tensor] = field(default_factory=dict)
    """The adapter after `best_step`, as this rank has it; empty while it is the live one or there is no dev set."""

    def meta(self) -> dict[str, Any]:
        """Everything but tensors and the step, for JSON."""
        return {k: v for k, v in vars(self).items() if k not in {"best", "step"}}


class Keeper:
    """Saves and restores a stage; every rank of a mesh calls both verbs, the main one writes."""

    def __init__(
        self,
        engine: Engine,
        optimizer: AdapterOptimizer,
        regularizer: Regularizer,
        run: RunDirectory,
        *,
        stage: str,
        train: Train,
        settings: Optimizer,
        seed: int,
    ) -> None:
        self.engine, self.optimizer, self.regularizer = engine, optimizer, regularizer
        self.run, self.stage, self.train, self.settings, self.seed = run, stage, train, settings, seed
        self.progress = Progress()
        self.saved_step = -1
        """Update of the newest checkpoint; −1 without one."""
        self.attempt = 1

    def restore(self) -> None:
        """Take over the newest valid checkpoint of the stage, if there is one; count the attempt."""
        if self.engine.is_main:  # sweeps what a killed save left, so one rank does it before the others look
            drop_checkpoints(self.run.state, other_than=self.stage)
            latest_checkpoint(self.run.state, stage=self.stage, warn=self.run.log)
        self.engine.world.wait()
        found = latest_checkpoint(self.run.state, stage=self.stage, warn=self.run.log)
        self.attempt = last_attempt(read_metrics(self.run.stage(self.stage) / METRICS), self.stage) + 1
        if found is None:
            self.run.log(f"{self.stage}: attempt {self.attempt} from step 0")
            return
        self._take(found)
        self.run.log(f"{self.stage}: attempt {self.attempt} continues after step {found.step}")

    def _take(self, found: Checkpoint) -> None:
        where, parameters = f"checkpoint {found.path}", self.engine.parameters
        self.engine.put(unpack(found.tensors, "adapter"), parameters, where=where)
        for kind, moments in self.optimizer.expect(unpack(found.tensors, "step")).items():
            self.engine.put(unpack(found.tensors, kind), moments, where=where)
        self.regularizer.load_state_dict(
            {name: tensor.to(self.engine.device) for name, tensor in unpack(found.tensors, "regularizer").items()}
        )
        place, before = self._place(), found.meta["place"]
        if place != before:
            self.run.log(f"warning: {before} before, {place} now: the same curve to rounding, not the same bits")
        self.progress = Progress(step=found.step, **found.meta["progress"])
        if best := unpack(found.tensors, "best"):
            self.progress.best = clone(parameters)
            self.engine.put(best, self.progress.best, where=where)
        self.attempt = max(self.attempt, int(found.meta["attempt"]) + 1)
        self.saved_step = found.step

    def save(self) -> None:
        """Write a checkpoint of the completed updates, unless this step has one or the engine keeps none."""
        if self.saved_step == self.progress.step or not self.engine.keeps:
            return
        whole = self.engine.whole
        tensors = pack(
            adapter=whole(self.engine.parameters),
            step=self.engine.union(self.optimizer.counters()),
            **{kind: whole(moments) for kind, moments in self.optimizer.moments().items()},
            best=whole(self.progress.best),
            regularizer=self.engine.union(self.regularizer.state_dict()),
        )
        meta = {
            "stage": self.stage,
            "attempt": self.attempt,
            "progress": self.progress.meta(),
            "data": {"step": self.progress.step},
            "random": {"seed": self.seed},
            "place": self._place(),
            "scheduler": {**asdict(self.settings), "steps": self.train.steps},
            "regularizer": type(self.regularizer).__name__,
        }
        with watch.unhurried("saving a checkpoint"):
            if self.engine.is_main:
                save_checkpoint(self.run.state, self.progress.step, tensors, meta, keep=self.train.keep)
            self.engine.world.wait()
        self.saved_step = self.progress.step

    def _place(self) -> dict[str, Any]:
        """What the last bits of a result depend on besides the state."""
        return {
            "device": self.engine.device.type,
            "mesh": str(self.engine.world),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
