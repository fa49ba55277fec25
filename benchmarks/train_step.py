"""Our training loop beside the Hugging Face Trainer + PEFT and TRL's SFTTrainer: the same losses and gradients, and
CPU-seconds and peak memory of an update.

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
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from benchmarks import _thousand
from benchmarks._harness import Benchmark, cpu_seconds, interleave, limit_threads, peak_bytes
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, Task
from flatshift.regularizers.config import GGPO, Plain, RegularizerConfig

BACKBONE, SEED = "flatshift-5m", 0
OPTIMIZER = Optimizer(lr=1e-3, schedule="cosine", warmup=0.0, clip=1.0)
PARITY_STEPS, SPEED_STEPS, MEMORY_STEPS, ROUNDS = 50, 8, 2, 3
VOCABULARIES = (32_000, 128_256)
Precision = Literal["fp32", "bf16"]


def batches_of(task: Task, *, rows: int, length: int, accumulate: int = 1) -> Any:
    """The shipped samples as the loop would see them: the pool for language modelling, SciCite for labels."""
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.rows import read_rows
    from flatshift.finetune.models.backbone import open_backbone

    labelled = "label" in task.columns()
    source = "sample:scicite/train" if labelled else "sample:pool"
    found = [row for row, _ in zip(read_rows([source]), range(2000), strict=False)]
    tokenizer = open_backbone(BACKBONE).tokenizer
    examples = encode(found, task=task, tokenizer=tokenizer, max_length=length).examples
    return TrainingDataLoader(
        examples,
        task=task,
        batch_size=rows,
        accumulate=accumulate,
        seed=SEED,
        max_length=length,
        pad_id=tokenizer.pad_token_id,
    )


def model_of(task: Task, precision: Precision, device: str = "cpu", backbone: str = BACKBONE) -> Any:
    """A backbone, by name or directory, with a fresh adapter, the same at every call."""
    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.models.load import load_backbone

    labels = ("background", "method", "result") if task.has_classes else None
    loaded = load_backbone(backbone, task=task, label_names=labels, precision=precision, device=device)
    return attach_adapter(loaded, Adapter(rank=8), task=task, seed=SEED)


def with_vocabulary(vocabulary: int, folder: Path) -> str:
    """A directory with a Llama of `vocabulary` tokens, random weights: 8 blocks of 512, embedding and head in one. The
    ids of its rows are the shipped tokenizer's; what the head costs does not depend on them."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def ours(
    task: Task,
    batches: Any,
    *,
    steps: int,
    precision: Precision = "fp32",
    device: str = "cpu",
    regularizer: RegularizerConfig | None = None,
    losses: list[float] | None = None,
    backbone: str = BACKBONE,
) -> Callable[[], Any]:
    """A ready run of our loop; calling it trains."""
    from flatshift.finetune.models.backbone import open_backbone
    from flatshift.finetune.run_directory import RunDirectory
    from flatshift.finetune.train.stage import TrainingStage
    from flatshift.finetune.train.trainer import Trainer
    from flatshift.regularizers import build

    model, tokenizer = model_of(task, precision, device, backbone), open_backbone(BACKBONE).tokenizer

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            Trainer(
                model,
                tokenizer,
                TrainingStage(
                    name="fine-tune",
                    task=task,
                    batches=batches,
                    dev=[],
                    optimizer=OPTIMIZER,
                    train=Train(steps=steps, precision=precision, accumulate=batches.accumulate),
                    evaluate=Evaluate(),
                    regularizer=build(regularizer or Plain()),
                    run=RunDirectory.create(Path(folder) / "run"),
                    seed=SEED,
                    on_step=None if losses is None else lambda line: losses.append(line["loss"]),
                ),
            ).fit()

    return run


def trainer(
    task: Task,
    batches: Any,
    *,
    steps: int,
    precision: Precision = "fp32",
    device: str = "cpu",
    losses: list[float] | None = None,
    model: Any = None,
    clip: float = 1.0,
    backbone: str = BACKBONE,
) -> Callable[[], Any]:
    """A ready run of the Trainer over the same micro-batches; calling it trains."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    rows = rows_of(batches, steps)
    arguments = transformers.TrainingArguments(
        **common_arguments(batches, steps=steps, precision=precision, device=device, clip=clip, log=losses is not None)
    )
    callbacks = [] if losses is None else [recorder(losses)]
    built = transformers.Trainer(
        model=model or model_of(task, precision, device, backbone),
        args=arguments,
        train_dataset=rows,
        data_collator=lambda batch: batch[0],
        callbacks=callbacks,
    )
    built.remove_callback(transformers.PrinterCallback)
    return built.train


def sft(
    task: Task,
    batches: Any,
    *,
    steps: int,
    precision: Precision = "fp32",
    device: str = "cpu",
    losses: list[float] | None = None,
    model: Any = None,
    clip: float = 1.0,
    backbone: str = BACKBONE,
) -> Callable[[], Any]:
    """A ready run of TRL's SFTTrainer over the same micro-batches; calling it trains."""
    import transformers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from flatshift.finetune.models.backbone import open_backbone

    transformers.utils.logging.set_verbosity_error()
    rows = rows_of(batches, steps)
    arguments = SFTConfig(
        **common_arguments(batches, steps=steps, precision=precision, device=device, clip=clip, log=losses is not None),
        gradient_checkpointing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    built = SFTTrainer(
        model=model or model_of(task, precision, device, backbone),
        args=arguments,
        train_dataset=Dataset.from_dict({"number": list(range(len(rows)))}),
        processing_class=open_backbone(BACKBONE).tokenizer,
        data_collator=lambda batch: dict(rows[batch[0]["number"]]),
        callbacks=[] if losses is None else [recorder(losses)],
    )
    built.remove_callback(transformers.PrinterCallback)
    return built.train


def rows_of(batches: Any, steps: int) -> list[dict[str, Any]]:
    """The micro-batches of `steps` updates as the trainers take them; each is one element of their data set."""
    return [{**micro.inputs, "labels": micro.labels} for step in range(steps) for micro in batches.at(step)]


def common_arguments(
    batches: Any, *, steps: int, precision: Precision, device: str, clip: float, log: bool
) -> dict[str, Any]:
    """What both trainers are told."""
    return {
        "output_dir": tempfile.gettempdir(),
        "max_steps": steps,
        "per_device_train_batch_size": 1,  # an element of the data set is a whole micro-batch
        "gradient_accumulation_steps": batches.accumulate,
        "learning_rate": OPTIMIZER.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0,
        "max_grad_norm": clip,
        "weight_decay": 0.0,
        "optim": "adamw_torch_fused",
        "bf16": precision == "bf16",
        "use_cpu": device == "cpu",
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "save_strategy": "no",
        "logging_strategy": "steps" if log else "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
    }


def recorder(losses: list[float]) -> Any:
    import transformers

    class Recorder(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    return Recorder()


def difference(task: Task, batches: Any, *, steps: int, precision: Precision = "fp32") -> float:
    """Largest relative difference of the two loss curves."""
    mine: list[float] = []
    theirs: list[float] = []
    ours(task, batches, steps=steps, precision=precision, losses=mine)()
    trainer(task, batches, steps=steps, precision=precision, losses=theirs)()
    if not len(mine) == len(theirs) == steps:
        raise RuntimeError(f"{len(mine)} losses of ours, {len(theirs)} of the Trainer, {steps} asked for")
    print(f"  loss {mine[0]:.4f} → {mine[-1]:.4f}, Trainer {theirs[0]:.4f} → {theirs[-1]:.4f}")
    return max(abs(m / t - 1) for m, t in zip(mine, theirs, strict=True))


def seconds(build: Callable[[], Callable[[], Any]]) -> float:
    """CPU-seconds per update of a run; building it is not counted."""
    return cpu_seconds(build()) / SPEED_STEPS


def peak(build: Callable[[], Callable[[], Any]]) -> float:
    """Bytes at the worst moment of a short run, its model included and nobody else's."""
    run = build()
    return peak_bytes(run)


PEERS = {"Trainer + PEFT": trainer, "TRL SFTTrainer": sft}


def peers() -> dict[str, Callable[..., Callable[[], Any]] | None]:
    """Those that are installed; None for one that is not."""
    import importlib.util

    here = all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))
    return {name: None if built is sft and not here else built for name, built in PEERS.items()}


NO_TRL = "the packages trl and datasets are not installed (the extra `bench`)"


def beside(
    bench: Benchmark, what: str, task: Task, batches: Any, precision: Precision, backbone: str = BACKBONE
) -> None:
    """CPU-seconds and peak memory of an update, ours beside each peer's on the same micro-batches."""
    common: dict[str, Any] = {"task": task, "batches": batches, "precision": precision, "backbone": backbone}
    judged: dict[str, Any] = {"maximum": 1.0}
    for name, built in peers().items():
        if built is None:
            bench.row(f"update, {what}", "CPU-s", peer_name=name, reason=NO_TRL, **judged)
            continue
        bench.compare(
            f"update, {what}",
            "CPU-s",
            lambda: ours(**common, steps=SPEED_STEPS),
            lambda built=built: built(**common, steps=SPEED_STEPS),
            name,
            rounds=ROUNDS,
            measure=seconds,
            **judged,
        )
        bench.compare(
            f"peak memory, {what}",
            "bytes",
            lambda: ours(**common, steps=MEMORY_STEPS),
            lambda built=built: built(**common, steps=MEMORY_STEPS),
            name,
            rounds=1,
            measure=peak,
            **judged,
        )


def real_vocabularies(bench: Benchmark) -> None:
    """The same at the vocabularies of Llama 2 and Llama 3, where the head is most of a small model's step."""
    batches = batches_of(LanguageModel(), rows=2, length=128)
    for vocabulary in VOCABULARIES:
        with tempfile.TemporaryDirectory() as folder:
            backbone = with_vocabulary(vocabulary, Path(folder))
            what = f"packed language model 2 × 128, V {vocabulary:,}, 8 blocks of 512, fp32"
            beside(bench, what, LanguageModel(), batches, "fp32", backbone)


def gpu_seconds(build: Callable[[], Callable[[], Any]]) -> float:
    """Wall seconds per update of a run on the GPU, after a run to warm up."""
    import torch

    build()()
    run = build()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / SPEED_STEPS


def main() -> None:
    """Measure and write benchmarks/results/train_step.json."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="*", default=[], help="files with rows of your own")
    parser.add_argument("--prompt", help="template over their columns; by default that of GSM8K")
    parser.add_argument("--completion", help="the same, of what is learnt")
    asked = parser.parse_args()
    limit_threads(1)
    command = " ".join(["python -m benchmarks.train_step", *(["--data", *(Path(f).name for f in asked.data)])])
    bench = Benchmark(
        "train_step",
        packages=("torch", "transformers", "peft", "accelerate", "trl"),
        command=command if asked.data else None,
    )
    thousand = _thousand.read(asked.data, prompt=asked.prompt, completion=asked.completion)
    packed, padded, classify = LanguageModel(), Completion(prompt="{text}\nintent:", pack=False), Classify()

    parity: list[tuple[str, Task, int, int, int]] = [
        ("packed language model", packed, 4, 128, 1),
        ("completion-only, padded, accumulation of 4", padded, 2, 128, 4),
        ("classification", classify, 8, 96, 1),
    ]
    for what, task, rows, length, accumulate in parity:
        bench.row(
            f"largest loss difference over {PARITY_STEPS} updates, {what}, fp32",
            "relative",
            ours=difference(
                task, batches_of(task, rows=rows, length=length, accumulate=accumulate), steps=PARITY_STEPS
            ),
            maximum=1e-5,
        )

    thousand.equalities(bench)
    long, answers = batches_of(packed, rows=8, length=256), batches_of(padded, rows=8, length=128)
    speed: list[tuple[str, Task, Any, Precision]] = [
        ("packed language model 8 × 256, fp32", packed, long, "fp32"),
        ("packed language model 8 × 256, bf16", packed, long, "bf16"),
        ("completion-only, padded 8 × ≤128, fp32", padded, answers, "fp32"),
    ]
    for what, task, batches, precision in speed:
        beside(bench, what, task, batches, precision)
    for what, task, batches in thousand.timed():
        beside(bench, what, task, batches, "fp32")

    real_vocabularies(bench)

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
    what = "update, packed language model 8 × 256, bf16, one GPU"
    judged: dict[str, Any] = {"peer_name": "Trainer + PEFT", "maximum": 1.0, "bar": "ratio <= 1"}
    if torch.cuda.is_available():
        common |= {"precision": "bf16", "device": "cuda"}
        mine, theirs = interleave(lambda: ours(**common), lambda: trainer(**common), rounds=ROUNDS, measure=gpu_seconds)
        bench.row(what, "s", ours=mine, peer=theirs, **judged)
    else:
        bench.row(what, "s", reason="no CUDA device on this machine", **judged)
    bench.finish()


if __name__ == "__main__":
    main()
