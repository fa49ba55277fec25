"""One thousand real rows as one optimizer step: loss and gradients however the rows are laid out, and by whom.

The reference is our own loop's pass over the rows one by one (1,000 micro-batches); beside it stand the same rows
padded in micro-batches of 8, packed, and the Trainer's and TRL's own accumulation of those micro-batches, caught before
the optimizer steps. The adapter is away from its start, so that every factor has a gradient. float32. The figures are
|loss / reference − 1|, and the largest ‖g − g₀‖ / ‖g₀‖ over the trained tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks._harness import Benchmark
from flatshift.finetune.adapters.adapter import trainable
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.seeds import torch_generator
from flatshift.finetune.tasks import Completion

COUNT, MICRO, LENGTH = 1000, 8, 384
SHIPPED = "sample:banking/train"
BAR = 1e-5


@dataclass(frozen=True)
class Thousand:
    """The rows, encoded for completion, and what they are called."""

    examples: list[Any]
    name: str
    pad_id: int
    task: Completion

    def batches(self, *, packed: bool, rows: int, whole: bool = False) -> Any:
        """Micro-batches of `rows` rows; whole: one step is all of them, each once."""
        settings: dict[str, Any] = {"seed": 0, "max_length": LENGTH, "pad_id": self.pad_id, "batch_size": rows}
        settings["task"] = replace(self.task, pack=packed)
        made = TrainingDataLoader(self.examples, **settings)
        if not whole:
            return made
        count = len(made.epoch(0))
        if count % rows:
            raise ValueError(f"{count} rows do not divide into micro-batches of {rows}")
        return TrainingDataLoader(self.examples, accumulate=count // rows, **settings)

    def timed(self) -> list[tuple[str, Completion, Any]]:
        """What is timed: the first updates of these rows, packed and padded."""
        packed, padded = (replace(self.task, pack=packed) for packed in (True, False))
        return [
            (f"{self.name}, packed 4 × {LENGTH}, fp32", packed, self.batches(packed=True, rows=4)),
            (f"{self.name}, padded {MICRO}, fp32", padded, self.batches(packed=False, rows=MICRO)),
        ]

    def equalities(self, bench: Benchmark) -> None:
        """Two rows for each layout: loss and gradients against one row at a time."""
        from benchmarks.train_step import NO_TRL, peers

        padded = self.batches(packed=False, rows=MICRO, whole=True)
        reference, wanted = ours(self.batches(packed=False, rows=1, whole=True))
        pieces, bar = f"{COUNT // MICRO} micro-batches of {MICRO}", {"unit": "relative", "maximum": BAR}
        layouts: dict[str, Any] = {
            f"padded, {pieces}": lambda: ours(padded),
            "packed": lambda: ours(self.batches(packed=True, rows=1, whole=True)),
        }
        layouts |= {
            f"{name}, {pieces}": (lambda name=name: by_trainer(name, padded)) if here else None
            for name, here in peers().items()
        }
        for layout, run in layouts.items():
            what = f"of {self.name}: {layout}"
            if run is None:
                bench.row(f"loss and gradients {what}", reason=NO_TRL, **bar)
                continue
            loss, gradients = run()
            if gradients.keys() != wanted.keys() or len(wanted) < 2:
                raise RuntimeError(f"{layout}: other tensors than ours have a gradient")
            apart = max(float((gradients[name] - each).norm() / each.norm()) for name, each in wanted.items())
            bench.row(f"loss {what}", ours=abs(loss / reference - 1), **bar)
            bench.row(f"gradients {what}", ours=apart, **bar)


def read(files: Sequence[str]) -> Thousand:
    """The first thousand rows of `files` (`question`, `answer`) that fit; without files, of the sample that ships."""
    from benchmarks.train_step import BACKBONE

    name = f"{COUNT:,} rows of {', '.join(Path(file).name.split('.')[0] for file in files) or SHIPPED}"
    if files:
        task = Completion(prompt="Question: {question}\nAnswer:", completion=" {answer}")
    else:
        task = Completion(prompt="{text}\nintent:", completion=" {label}")
        print(f"no --data: {SHIPPED}, which ships")
    tokenizer = open_backbone(BACKBONE).tokenizer
    found: list[Any] = []
    for row in read_rows(list(files) or [SHIPPED], required=task.columns()):
        encoded = encode([row], task=task, tokenizer=tokenizer, max_length=LENGTH)
        if not encoded.truncated:
            found += encoded.examples
        if len(found) == COUNT:
            return Thousand(found, name, tokenizer.pad_token_id, task)
    raise SystemExit(f"{name}: only {len(found)} fit {LENGTH} tokens")


def model() -> Any:
    """The shipped backbone with an adapter whose every factor is away from its start."""
    from benchmarks.train_step import SEED, model_of

    built = model_of(Completion(), "fp32")
    with torch.no_grad():
        for name, parameter in trainable(built).items():
            drawn = torch.randn(parameter.shape, generator=torch_generator(SEED, "thousand", name))
            parameter.add_(0.02 * drawn)
    return built


def gradients_of(built: Any) -> dict[str, Any]:
    """By plain name."""
    return {name: p.grad.detach().clone() for name, p in trainable(built).items() if p.grad is not None}


def ours(batches: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one step over all rows, by the engine that trains."""
    built = model().train()
    engine = Engine.alone(built)
    micros, task = batches.at(0), Completion()
    head = engine.find_head(micros[0].inputs, task=task)
    loss = engine.forward_backward(
        micros, batches.supervised(0), task=task, head=head, context=lambda index: contextlib.nullcontext()
    )
    return float(loss), gradients_of(built)


def by_trainer(name: str, batches: Any) -> tuple[float, dict[str, Any]]:
    """The same by a peer, its gradients caught before its optimizer steps."""
    from benchmarks import train_step

    caught: dict[str, Any] = {}
    losses: list[float] = []

    class Catch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            caught.update(gradients_of(kwargs["model"]))

    run = train_step.peer(name, Completion(), batches, steps=1, losses=losses, model=model(), clip=0.0)
    run.__self__.add_callback(Catch())  # type: ignore[attr-defined]
    run()
    return losses[0], caught
