"""Our training loop beside the Hugging Face Trainer + PEFT and TRL's SFTTrainer: the same losses and gradients, and
CPU-seconds and peak memory of an update. On a GPU: `python -m benchmarks.gpu`.

    python -m benchmarks.train_step                                  # on a shipped sample
    python -m benchmarks.train_step --data gsm8k.jsonl.xz            # on your own rows (`question`, `answer`)

All train the shipped backbone with the same LoRA initialisation (ours, drawn by name) on the very same micro-batches in
the same order, AdamW (fused), cosine, clipping at 1.0, no dropout, no recomputation. The trainers neither save,
evaluate nor report, and log once at the end; ours writes its metrics line for every update, and its checkpoint and
adapter at the end, as always. TRL's also measures entropy and token accuracy in every update, which it cannot be told
not to, and has its fused head. Packed rows reach all of them as the same `position_ids`, so its own packing and
collation are not in it. Timed are the calls that train, with models and batches ready; memory is what the allocator had
given out at the worst moment of two updates, weights included. Plain LoRA layers run in the fused form of
`flatshift.regularizers.layers.fused`, which GGPO's layers share, so that "GGPO beside our plain update" compares the
noise alone. All but the rows at real vocabularies train the shipped backbone, whose V is 4,096; these have random
weights.

One thousand real rows are one optimizer step: loss and gradients however the rows are laid out, and by whom. The
reference is our own loop's pass over the rows one by one (1,000 micro-batches); beside it stand the same rows padded in
micro-batches of 8, packed, and the Trainer's and TRL's own accumulation of those micro-batches, caught before the
optimizer steps. The adapter is away from its start, so that every factor has a gradient. float32. The figures are
|loss / reference − 1|, and the largest ‖g − g₀‖ / ‖g₀‖ over the trained tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from benchmarks._harness import Benchmark, cpu_seconds, limit_threads, peak_bytes
from benchmarks._sized import random_llama
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.run_directory import RunDirectory
from flatshift.finetune.seeds import torch_generator
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, Task
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import GGPO, Plain, RegularizerConfig, build

BACKBONE, SEED = "flatshift-5m", 0
OPTIMIZER = Optimizer(lr=1e-3, schedule="cosine", warmup=0.0, clip=1.0)
PARITY_STEPS, SPEED_STEPS, MEMORY_STEPS, ROUNDS = 50, 8, 2, 3
Precision = Literal["fp32", "bf16"]
NO_TRL = "the packages trl and datasets are not installed (the extra `bench`)"


def batches_of(
    task: Task, *, rows: int, length: int, accumulate: int = 1, source: str | None = None, limit: int = 2000
) -> Any:
    """A shipped sample as the loop would see it: the pool for language modelling, SciCite for labels."""
    source = source or ("sample:scicite/train" if "label" in task.columns() else "sample:pool")
    results = [row for row, _ in zip(read_rows([source], required=task.columns()), range(limit), strict=False)]
    tokenizer = open_backbone(BACKBONE).tokenizer
    examples = encode(results, task=task, tokenizer=tokenizer, max_length=length).examples
    settings = {"batch_size": rows, "accumulate": accumulate, "seed": SEED, "max_length": length}
    return TrainingDataLoader(examples, task=task, pad_id=tokenizer.pad_token_id, **settings)


def model_of(task: Task, precision: Precision, backbone: str = BACKBONE, **options: Any) -> Any:
    """A backbone, by name or directory, with a fresh adapter, the same at every call. options: of loading."""
    labels = ("background", "method", "result") if task.has_classes else None
    loaded = load_backbone(backbone, task=task, label_names=labels, precision=precision, **options)
    return attach_adapter(loaded, Adapter(rank=8), task=task, seed=SEED)


def ours(
    task: Task,
    batches: Any,
    *,
    steps: int,
    precision: Precision = "fp32",
    regularizer: RegularizerConfig | None = None,
    losses: list[float] | None = None,
    backbone: str = BACKBONE,
    optimizer: Optimizer = OPTIMIZER,
    **options: Any,
) -> Callable[[], Any]:
    """A ready run of our loop; calling it trains."""
    model, tokenizer = model_of(task, precision, backbone, **options), open_backbone(BACKBONE).tokenizer

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            stage = TrainingStage(
                name="fine-tune",
                task=task,
                batches=batches,
                dev=[],
                optimizer=optimizer,
                train=Train(steps=steps, precision=precision, accumulate=batches.accumulate),
                evaluate=Evaluate(),
                regularizer=build(regularizer or Plain()),
                run=RunDirectory.create(Path(folder) / "run"),
                seed=SEED,
                on_step=None if losses is None else lambda line: losses.append(line["loss"]),
            )
            Trainer(model, tokenizer, stage).fit()

    return run


def peer(
    kind: str,
    task: Task,
    batches: Any,
    *,
    steps: int,
    precision: Precision = "fp32",
    losses: list[float] | None = None,
    model: Any = None,
    clip: float = 1.0,
    backbone: str = BACKBONE,
) -> Callable[[], Any]:
    """A ready run of the Trainer, or of TRL's SFTTrainer, over the same micro-batches; calling it trains."""
    transformers.utils.logging.set_verbosity_error()
    rows = rows_of(batches, steps)
    common = common_arguments(
        batches, steps=steps, precision=precision, device="cpu", clip=clip, log=losses is not None
    )
    given = {
        "model": model or model_of(task, precision, backbone),
        "callbacks": [] if losses is None else [recorder(losses)],
    }
    if kind == "TRL SFTTrainer":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        own = {"gradient_checkpointing": False, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        built = SFTTrainer(
            args=SFTConfig(**common, **own),
            train_dataset=Dataset.from_dict({"number": list(range(len(rows)))}),
            processing_class=open_backbone(BACKBONE).tokenizer,
            data_collator=lambda batch: dict(rows[batch[0]["number"]]),
            **given,
        )
    else:
        arguments = transformers.TrainingArguments(**common)
        built = transformers.Trainer(args=arguments, train_dataset=rows, data_collator=lambda batch: batch[0], **given)
    built.remove_callback(transformers.PrinterCallback)
    return built.train  # type: ignore[no-any-return, unused-ignore]


def rows_of(batches: Any, steps: int) -> list[dict[str, Any]]:
    """The micro-batches of `steps` updates as the trainers take them; each is one element of their data set."""
    return [{**micro.inputs, "labels": micro.labels} for step in range(steps) for micro in batches.at(step)]


def common_arguments(
    batches: Any, *, steps: int, precision: Precision, device: str, clip: float, log: bool
) -> dict[str, Any]:
    """What both trainers are told."""
    return {
        "output_dir": tempfile.gettempdir(), "max_steps": steps, "seed": SEED,
        "per_device_train_batch_size": 1,  # an element of the data set is a whole micro-batch
        "gradient_accumulation_steps": batches.accumulate, "train_sampling_strategy": "sequential",
        "remove_unused_columns": False, "dataloader_num_workers": 0,
        "learning_rate": OPTIMIZER.lr, "lr_scheduler_type": "cosine", "warmup_steps": 0, "max_grad_norm": clip,
        "weight_decay": 0.0, "optim": "adamw_torch_fused", "bf16": precision == "bf16", "use_cpu": device == "cpu",
        "save_strategy": "no", "logging_strategy": "steps" if log else "no", "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


def recorder(losses: list[float]) -> Any:
    """A callback that keeps the losses of all steps."""

    class Recorder(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    return Recorder()


def largest_difference(mine: list[float], theirs: list[float], steps: int) -> float:
    """Largest relative difference of two loss curves."""
    if not len(mine) == len(theirs) == steps:
        raise RuntimeError(f"{len(mine)} losses of ours, {len(theirs)} of the peer, {steps} asked for")
    print(f"  loss {mine[0]:.5f} → {mine[-1]:.5f}, peer {theirs[0]:.5f} → {theirs[-1]:.5f}")
    return max(abs(m / t - 1) for m, t in zip(mine, theirs, strict=True))


def seconds(build: Callable[[], Callable[[], Any]]) -> float:
    """CPU-seconds per update of a run; building it is not counted."""
    return cpu_seconds(build()) / SPEED_STEPS


def peak(build: Callable[[], Callable[[], Any]]) -> float:
    """Bytes at the worst moment of a short run, its model included and nobody else's."""
    run = build()
    return peak_bytes(run)


def peers() -> dict[str, bool]:
    """Whether each is installed."""
    here = all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))
    return {"Trainer + PEFT": True, "TRL SFTTrainer": here}


def beside(
    bench: Benchmark, what: str, task: Task, batches: Any, precision: Precision, backbone: str = BACKBONE
) -> None:
    """CPU-seconds and peak memory of an update, ours beside each peer's on the same micro-batches."""
    common: dict[str, Any] = {"task": task, "batches": batches, "precision": precision, "backbone": backbone}
    for name, here in peers().items():
        if not here:
            bench.row(f"update, {what}", "CPU-s", peer_name=name, reason=NO_TRL, maximum=1.0)
            continue
        for title, unit, steps, rounds, measure in (
            ("update", "CPU-s", SPEED_STEPS, ROUNDS, seconds),
            ("peak memory", "bytes", MEMORY_STEPS, 1, peak),
        ):
            bench.compare(
                f"{title}, {what}",
                unit,
                lambda steps=steps: ours(**common, steps=steps),
                lambda steps=steps, name=name: peer(name, **common, steps=steps),
                name,
                rounds=rounds,
                measure=measure,
                maximum=1.0,
            )


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
        result = TrainingDataLoader(self.examples, **settings)
        if not whole:
            return result
        count = len(result.epoch(0))
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
        padded = self.batches(packed=False, rows=MICRO, whole=True)
        reference, wanted = engine_step(self.batches(packed=False, rows=1, whole=True))
        pieces, bar = f"{COUNT // MICRO} micro-batches of {MICRO}", {"unit": "relative", "maximum": BAR}
        layouts: dict[str, Any] = {
            f"padded, {pieces}": lambda: engine_step(padded),
            "packed": lambda: engine_step(self.batches(packed=True, rows=1, whole=True)),
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


def read_thousand(files: Sequence[str]) -> Thousand:
    """The first thousand rows of `files` (`question`, `answer`) that fit; without files, of the sample that ships."""
    name = f"{COUNT:,} rows of {', '.join(Path(file).name.split('.')[0] for file in files) or SHIPPED}"
    if files:
        task = Completion(prompt="Question: {question}\nAnswer:", completion=" {answer}")
    else:
        task = Completion(prompt="{text}\nintent:", completion=" {label}")
        print(f"no --data: {SHIPPED}, which ships")
    tokenizer = open_backbone(BACKBONE).tokenizer
    results: list[Any] = []
    for row in read_rows(list(files) or [SHIPPED], required=task.columns()):
        encoded = encode([row], task=task, tokenizer=tokenizer, max_length=LENGTH)
        if not encoded.truncated:
            results += encoded.examples
        if len(results) == COUNT:
            return Thousand(results, name, tokenizer.pad_token_id, task)
    raise SystemExit(f"{name}: only {len(results)} fit {LENGTH} tokens")


def moved_model() -> Any:
    """The shipped backbone with an adapter whose every factor is away from its start."""
    built = model_of(Completion(), "fp32")
    with torch.no_grad():
        for name, parameter in trainable(built).items():
            drawn = torch.randn(parameter.shape, generator=torch_generator(SEED, "thousand", name))
            parameter.add_(0.02 * drawn)
    return built


def gradients_of(built: Any) -> dict[str, Any]:
    """By plain name."""
    return {name: p.grad.detach().clone() for name, p in trainable(built).items() if p.grad is not None}


def engine_step(batches: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one step over all rows, by the engine that trains."""
    built = moved_model().train()
    engine = Engine.alone(built)
    micros, task = batches.at(0), Completion()
    head = engine.find_head(micros[0].inputs, task=task)
    loss = engine.forward_backward(
        micros, batches.supervised(0), task=task, head=head, context=lambda index: contextlib.nullcontext()
    )
    return float(loss), gradients_of(built)


def by_trainer(name: str, batches: Any) -> tuple[float, dict[str, Any]]:
    """The same by a peer, its gradients caught before its optimizer steps."""
    caught: dict[str, Any] = {}
    losses: list[float] = []

    class Catch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            caught.update(gradients_of(kwargs["model"]))

    run = peer(name, Completion(), batches, steps=1, losses=losses, model=moved_model(), clip=0.0)
    run.__self__.add_callback(Catch())  # type: ignore[attr-defined]
    run()
    return losses[0], caught


def main() -> None:
    """Measure and write benchmarks/results/train_step.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="*", default=[], help="files with rows of your own")
    files = parser.parse_args().data
    limit_threads(1)
    command = " ".join(["python -m benchmarks.train_step --data", *(Path(f).name for f in files)]) if files else None
    bench = Benchmark("train_step", packages=("torch", "transformers", "peft", "accelerate", "trl"), command=command)
    thousand = read_thousand(files)
    packed, padded = LanguageModel(), Completion(prompt="{text}\nintent:", pack=False)

    parity: list[tuple[str, Task, int, int, int]] = [
        ("packed language model", packed, 4, 128, 1),
        ("completion-only, padded, accumulation of 4", padded, 2, 128, 4),
        ("classification", Classify(), 8, 96, 1),
    ]
    for what, task, rows, length, accumulate in parity:
        batches = batches_of(task, rows=rows, length=length, accumulate=accumulate)
        curves: tuple[list[float], list[float]] = ([], [])
        ours(task, batches, steps=PARITY_STEPS, losses=curves[0])()
        peer("Trainer + PEFT", task, batches, steps=PARITY_STEPS, losses=curves[1])()
        apart = largest_difference(*curves, PARITY_STEPS)
        what = f"largest loss difference over {PARITY_STEPS} updates, {what}, fp32"
        bench.row(what, "relative", ours=apart, maximum=1e-5)

    thousand.equalities(bench)
    long, answers = batches_of(packed, rows=8, length=256), batches_of(padded, rows=8, length=128)
    beside(bench, "packed language model 8 × 256, fp32", packed, long, "fp32")
    beside(bench, "packed language model 8 × 256, bf16", packed, long, "bf16")
    beside(bench, "completion-only, padded 8 × ≤128, fp32", padded, answers, "fp32")
    for what, task, batches in thousand.timed():
        beside(bench, what, task, batches, "fp32")
    # the vocabularies of Llama 2 and Llama 3, where the head is most of a small model's step; the ids of its rows are
    # the shipped tokenizer's, for what the head costs does not depend on them
    few = batches_of(packed, rows=2, length=128)
    for vocabulary in (32_000, 128_256):
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"hidden": 512, "inner": 1536, "blocks": 8, "heads": 8, "tie_word_embeddings": True}
            random_llama(vocabulary=vocabulary, **sizes).save_pretrained(folder)
            what = f"packed language model 2 × 128, V {vocabulary:,}, 8 blocks of 512, fp32"
            beside(bench, what, packed, few, "fp32", folder)

    common = {"task": packed, "batches": long, "steps": SPEED_STEPS}
    bench.compare(
        "update with GGPO, packed language model 8 × 256, fp32",
        "CPU-s",
        lambda: ours(**common, regularizer=GGPO()),
        lambda: ours(**common),
        "our plain update",
        rounds=ROUNDS,
        measure=seconds,
        maximum=1.10,
    )
    bench.finish()


if __name__ == "__main__":
    main()
