"""One thousand real rows as one optimizer step: loss and gradients however the rows are laid out, and by whom.

The reference is our own loop's pass over the rows one by one (1,000 micro-batches); beside it stand the same rows
padded in micro-batches of 8, packed, and the Trainer's and TRL's own accumulation of those micro-batches, caught before
the optimizer steps. The adapter is away from its start, so that every factor has a gradient. float32. The figures are
|loss / reference − 1|, and the largest ‖g − g₀‖ / ‖g₀‖ over the trained tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._harness import Benchmark
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
        from flatshift.finetune.data.batches import TrainingDataLoader

        settings: dict[str, Any] = {"seed": 0, "max_length": LENGTH, "pad_id": self.pad_id}
        task = Completion(prompt=self.task.prompt, completion=self.task.completion, pack=packed)
        made = TrainingDataLoader(self.examples, task=task, batch_size=rows, **settings)
        if not whole:
            return made
        count = len(made.epoch(0))
        if count % rows:
            raise ValueError(f"{count} rows do not divide into micro-batches of {rows}")
        return TrainingDataLoader(self.examples, task=task, batch_size=rows, accumulate=count // rows, **settings)

    def timed(self) -> list[tuple[str, Completion, Any]]:
        """What is timed: the first updates of these rows, packed and padded."""
        packed = Completion(prompt=self.task.prompt, completion=self.task.completion)
        padded = Completion(prompt=self.task.prompt, completion=self.task.completion, pack=False)
        return [
            (f"{self.name}, packed 4 × {LENGTH}, fp32", packed, self.batches(packed=True, rows=4)),
            (f"{self.name}, padded {MICRO}, fp32", padded, self.batches(packed=False, rows=MICRO)),
        ]

    def equalities(self, bench: Benchmark) -> None:
        """Two rows for each layout: loss and gradients against one row at a time."""
        from benchmarks.train_step import NO_TRL, peers

        single = self.batches(packed=False, rows=1, whole=True)
        padded = self.batches(packed=False, rows=MICRO, whole=True)
        reference = ours(single)
        layouts: dict[str, Any] = {
            f"padded, {COUNT // MICRO} micro-batches of {MICRO}": lambda: ours(padded),
            "packed": lambda: ours(self.batches(packed=True, rows=1, whole=True)),
        }
        for name, built in peers().items():
            layouts[f"{name}, {COUNT // MICRO} micro-batches of {MICRO}"] = (
                None if built is None else lambda name=name: by_trainer(name, padded)
            )
        for layout, run in layouts.items():
            what = f"of {self.name}: {layout}"
            judged: dict[str, Any] = {"unit": "relative", "maximum": BAR}
            if run is None:
                bench.row(f"loss and gradients {what}", reason=NO_TRL, **judged)
                continue
            loss, gradients = run()
            apart = {
                name: float((gradients[name] - wanted).norm() / wanted.norm()) for name, wanted in reference[1].items()
            }
            if gradients.keys() != reference[1].keys() or len(apart) < 2:
                raise RuntimeError(f"{layout}: other tensors than ours have a gradient")
            bench.row(f"loss {what}", ours=abs(loss / reference[0] - 1), **judged)
            bench.row(f"gradients {what}", ours=max(apart.values()), **judged)


def read(files: Sequence[str], *, prompt: str | None, completion: str | None) -> Thousand:
    """The first thousand rows of `files` that fit; without files, of the sample that ships."""
    from benchmarks.train_step import BACKBONE
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.rows import read_rows
    from flatshift.finetune.models.backbone import open_backbone

    name = f"{COUNT:,} rows of {', '.join(Path(file).name.split('.')[0] for file in files) or SHIPPED}"
    if files:
        task = Completion(prompt=prompt or "Question: {question}\nAnswer:", completion=completion or " {answer}")
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
    import torch

    from benchmarks.train_step import SEED, model_of
    from flatshift.finetune.adapters.adapter import trainable
    from flatshift.finetune.seeds import torch_generator

    built = model_of(Completion(), "fp32")
    with torch.no_grad():
        for name, parameter in trainable(built).items():
            drawn = torch.randn(parameter.shape, generator=torch_generator(SEED, "thousand", name))
            parameter.add_(0.02 * drawn)
    return built


def gradients_of(built: Any) -> dict[str, Any]:
    """By plain name."""
    from flatshift.finetune.adapters.adapter import trainable

    return {name: p.grad.detach().clone() for name, p in trainable(built).items() if p.grad is not None}


def ours(batches: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one step over all rows, by the engine that trains."""
    from flatshift.finetune.parallel.engine import Engine

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
    import transformers

    from benchmarks import train_step

    caught: dict[str, Any] = {}
    losses: list[float] = []

    class Catch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            caught.update(gradients_of(kwargs["model"]))

    run = train_step.PEERS[name](Completion(), batches, steps=1, losses=losses, model=model(), clip=0.0)
    run.__self__.add_callback(Catch())  # type: ignore[attr-defined]
    run()
    return losses[0], caught
