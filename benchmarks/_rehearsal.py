"""Training stages of every kind, rehearsed for a CUDA device that is not here (`benchmarks.cuda_rehearsal`).

    python -m benchmarks._rehearsal      every case of `all_cases`, and what waits were found

A case is an objective, a regularizer, an activation checkpointing, a number of micro-batches, packed rows or not, and a
precision. Its tiny backbone and its rows are made here; the stage is `flatshift.finetune.train.trainer.Trainer`
itself.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from benchmarks.cuda_rehearsal import Rehearsal, Wait
from benchmarks.gpu.llama import Padder, stage
from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.compute.capabilities import CUDA, T4, Capabilities
from flatshift.finetune.compute.matmul_rate import DTYPES
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.masking import Masking
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.tasks import Chat, Classify, Completion, LanguageModel, MaskedLM, Regress, Seq2Seq, Task
from flatshift.finetune.train import trainer
from flatshift.finetune.train.checkpointer import Checkpointer
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import (
    ASAM,
    BAR,
    GGPO,
    MGPO,
    MSAM,
    SAM,
    BiLora,
    FlatLora,
    LoraSAM,
    NEFTune,
    Plain,
    RegularizerConfig,
)

VOCABULARY = 64
_LENGTH = 24
_SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}

OBJECTIVES: dict[str, Task] = {
    "language-model": LanguageModel(),
    "completion": Completion(),
    "chat": Chat(template="plain"),
    "classify": Classify(),
    "classify-multi": Classify(multi=True),
    "regress": Regress(),
    "seq2seq": Seq2Seq(label_smoothing=0.1),
    "masked-lm": MaskedLM(),
}
REGULARIZERS: dict[str, RegularizerConfig] = {
    "plain": Plain(),
    "ggpo": GGPO(refresh=2),
    "ggpo-model": GGPO(refresh=2, normalize="model", scope="microbatch"),
    "ggpo-sample": GGPO(refresh=2, scope="sample", sketch_every=2),
    "flat-lora": FlatLora(refresh=2),
    "mgpo": MGPO(),
    "mgpo-code": MGPO(form="code"),
    "msam": MSAM(),
    "sam": SAM(),
    "asam": ASAM(),
    "lora-sam": LoraSAM(),
    "bar": BAR(),
    "bi-lora": BiLora(),
    "neftune": NEFTune(),
}
CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Case:
    """What is rehearsed."""

    objective: str
    regularizer: str = "plain"
    checkpointing: Literal["none", "selective", "full"] = "none"
    accumulate: int = 1
    packed: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"

    def __str__(self) -> str:
        rows = "packed" if self.packed else "padded"
        return f"{self.objective}-{self.regularizer}-{self.checkpointing}-{self.accumulate}-{rows}-{self.precision}"

    @property
    def task(self) -> Task:
        """Its objective's, packed or not."""
        task = OBJECTIVES[self.objective]
        return replace(task, pack=self.packed) if task.traits.causal else task


def all_cases() -> Iterator[Case]:
    """The whole product. Only causal objectives have packed rows."""
    for objective, regularizer, checkpointing, accumulate in itertools.product(
        OBJECTIVES, REGULARIZERS, CHECKPOINTING, (1, 2)
    ):
        packable = OBJECTIVES[objective].traits.causal
        for packed in (False, True) if packable else (False,):
            yield Case(objective, regularizer, checkpointing, accumulate, packed)  # type: ignore[arg-type]


def covering_cases() -> list[Case]:
    """Some of `all_cases`: every objective with every checkpointing, causal ones packed and padded, every regularizer,
    one and two micro-batches, bf16 and float32."""
    chosen, regularizers = [], itertools.cycle(REGULARIZERS)
    for index, (objective, checkpointing) in enumerate(itertools.product(OBJECTIVES, CHECKPOINTING)):
        packed = OBJECTIVES[objective].traits.causal and index % 2 == 0
        case = Case(objective, next(regularizers), checkpointing, 1 + index % 2, packed)  # type: ignore[arg-type]
        chosen.append(case if index % 5 else replace(case, precision="fp32"))
    return chosen


@dataclass
class Found:
    """What a rehearsal came to."""

    case: Case
    updates: list[list[Wait]] = field(default_factory=list)
    """The waits of each update but the first, which also finds out what lasts for the stage."""
    start: list[Wait] = field(default_factory=list)
    """Those before the second update."""
    end: list[Wait] = field(default_factory=list)
    """Those after the last: the dev evaluation and what is saved."""
    lines: list[int] = field(default_factory=list)
    """Steps in the order in which their lines were written."""

    @property
    def most(self) -> int:
        """Waits of the update that had most."""
        return max(map(len, self.updates))


@contextlib.contextmanager
def dry_stage() -> Iterator[None]:
    """Let stages inside go without checkpoints, saved adapters, loss kernels and streams, which need values or a
    device."""
    with (
        mock.patch.object(Checkpointer, "save", lambda self: None),
        mock.patch.object(Engine, "save_adapter", lambda self, directory: None),
        mock.patch.object(trainer, "choose_loss_kernel", lambda engine, head, *_, **__: head),
        mock.patch.object(trainer, "with_prefetch", lambda batches, *_, **__: contextlib.nullcontext(batches)),
    ):
        yield


def rehearse(
    case: Case,
    *,
    record: Capabilities = CUDA,
    on: str = "meta",
    steps: int = 3,
    settings: dict[str, Any] | None = None,
    callbacks: Sequence[Any] = (),
) -> Found:
    """Train a stage of `case` for `steps` updates.

    Args:
        settings: of `Train`, beside those of the case.
        callbacks: of transformers.
    Raises:
        RuntimeError: tensors of the host and of the device met, or a generator of the host drew on the device.
        ValueError: bf16 on a device without it.
    """
    if case.precision == "bf16" and not record.bf16:
        raise ValueError(f"{case}: this device has no bf16 instructions; rehearse it in fp16 or fp32")
    task = case.task
    model, examples = _adapted(case), rows(case.objective, 14)
    train = Train(
        steps=steps,
        batch_size=2,
        accumulate=case.accumulate,
        precision=case.precision,
        checkpointing=case.checkpointing,
        max_length=_LENGTH,
        **(settings or {}),
    )
    masking = Masking(3, np.arange(4, VOCABULARY)) if task.traits.masks_tokens else None
    batches = TrainingDataLoader(
        examples,
        task=task,
        batch_size=2,
        accumulate=case.accumulate,
        seed=0,
        max_length=_LENGTH,
        pad_id=0,
        masking=masking,
    )
    result, marks = Found(case), [0]
    with Rehearsal(record, on=on) as seen, dry_stage(), tempfile.TemporaryDirectory() as folder:

        def passed() -> bool:
            marks.append(len(seen.waits))
            return False

        outcome = stage(
            task, batches, train, Path(folder) / "run", optimizer=Optimizer(lr=1e-3, weight_decay=0.01),
            regularizer=REGULARIZERS[case.regularizer], dev=examples[:3], evaluate=Evaluate(batch_size=2),
            on_step=lambda line: result.lines.append(line["step"]), stop=passed, callbacks=callbacks,
        )  # fmt: skip
        Trainer(Engine(model.to(on), ProcessMesh.alone(on)), Padder(), outcome).fit()  # type: ignore[arg-type]
    del marks[steps + 1 :]  # the evaluation at the end asks after each batch
    result.start, result.end = seen.waits[: marks[1]], seen.waits[marks[-1] :]
    result.updates = [seen.waits[first:last] for first, last in itertools.pairwise(marks[1:])]
    return result


def _adapted(case: Case) -> Any:
    """A backbone for the case with LoRA on all linear layers, on the CPU."""
    import copy

    model = copy.deepcopy(_backbone(case.objective, case.precision))
    model = attach_adapter(model, Adapter(rank=4, dropout=0.1), task=case.task, seed=0)
    checkpoint_activations(model, case.checkpointing)
    return model


@cache
def _backbone(objective: str, precision: str) -> Any:
    import transformers as tf

    llama = tf.LlamaConfig(**_SMALL, **_SIZES, num_key_value_heads=2, use_cache=False)
    bert = tf.BertConfig(**_SMALL, **_SIZES, max_position_embeddings=64)
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if objective == "seq2seq":
            model: Any = tf.T5ForConditionalGeneration(tf.T5Config(**{**_SMALL, **t5}, use_cache=False))
        elif objective == "masked-lm":
            model = tf.BertForMaskedLM(bert)
        elif objective.startswith("classify") or objective == "regress":
            bert.num_labels = 1 if objective == "regress" else 3
            model = tf.BertForSequenceClassification(bert)
            model.new_parameters = ("classifier.weight", "classifier.bias")
        else:
            model = tf.LlamaForCausalLM(llama)
    model.requires_grad_(False)
    return model.to(DTYPES[precision])


def rows(objective: str, count: int) -> list[Example]:
    """`count` rows of random tokens for an objective, of 5 to 12 tokens each."""
    rng, results = np.random.default_rng(0), []
    for i in range(count):
        ids = rng.integers(4, VOCABULARY, int(rng.integers(5, 13))).tolist()
        more: dict[str, Any] = {}
        labels: Any = [-100, *ids[1:]]
        if objective in ("completion", "chat"):
            labels = [-100] * 3 + ids[3:]
        elif objective == "classify":
            labels = i % 3
        elif objective == "classify-multi":
            labels = (i % 2, 1, 0)
        elif objective == "regress":
            labels = float(i)
        elif objective == "seq2seq":
            labels = ids[: 2 + i % 3]
            more["decoder_ids"] = [0, *labels[:-1]]
        elif objective == "masked-lm":
            labels = [-100, ids[1], *[-100] * (len(ids) - 2)]
            more["words"] = [-1, *range(len(ids) - 1)]
        results.append(Example(ids, labels, f"row-{i}", f"rows:{i + 1}", **more))
    return results


def figures(cases: Sequence[Case] | None = None) -> dict[str, Any]:
    """Of the rehearsed cases (by default `covering_cases`, two stages long enough for lines to be read, and every
    objective for a T4): how many passed, of how many, and the most waits of one update."""
    plan = [(case, CUDA, 3) for case in cases or covering_cases()]
    if cases is None:
        plan += [(Case("language-model", name, packed=True, accumulate=2), CUDA, 13) for name in ("plain", "ggpo")]
        plan += [(Case(name, precision="fp16"), T4, 3) for name in OBJECTIVES]
    most, broken = 0, []
    for case, record, steps in plan:
        try:
            most = max(most, rehearse(case, record=record, steps=steps).most)
        except Exception as error:  # what went wrong is the figure
            broken.append(f"{case}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return {"cases": len(plan), "passed": len(plan) - len(broken), "waits_per_update": most, "broken": broken}


def main() -> None:
    """Rehearse the whole product and print every place that waits."""
    places: Counter[str] = Counter()
    count = 0
    for case in all_cases():
        result, count = rehearse(case), count + 1
        places.update(str(wait) for update in result.updates for wait in update)
        if result.most > 1:
            print(f"{case}: {result.most} waits in an update")
    print(f"{count} cases")
    for place, times in places.most_common():
        print(f"{times:6}  {place}")


if __name__ == "__main__":
    main()
