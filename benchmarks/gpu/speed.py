"""Whole updates of LoRA on Llama shapes: ours beside the Trainer with PEFT and TRL's SFTTrainer, and with regularizers.

Each run has a model of its own, made on the device with the same weights and adapter, and the same rows; runs follow
one another as A B C C B A in one process. An update is timed from one metrics line to the next, the device waited for
each time; the first updates are not counted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.gpu.devices import PUBLISHED_TOKENS, Device, best_product, dense_peak, first_line, out_of_memory
from benchmarks.gpu.llama import LANGUAGE, SHAPES, Padder, Shape, adapted, batches, configuration, operations, stage
from benchmarks.gpu.measurements import Figures

if TYPE_CHECKING:
    from flatshift.finetune.train.stage import TrainingStage

Way = Literal["none", "selective", "full", "compiled"]
"""What is computed again in backward, or blocks compiled with nothing computed again."""
TRAINER, SFT = "Trainer + PEFT", "TRL SFTTrainer"
NEVER = 10_000
"""Updates that a stage is told of; it is left before."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how long it is watched."""

    shape: Shape
    sequence: int
    rows: int
    rank: int = 16
    way: Way = "none"
    warm: int = 2
    updates: int = 3
    precision: Literal["fp32", "bf16"] = "bf16"

    @property
    def checkpointing(self) -> Literal["none", "selective", "full"]:
        return "none" if self.way == "compiled" else self.way


def shape_of(name: str | Sequence[Any]) -> Shape:
    """A shape by its name, or by its sizes."""
    return SHAPES[name] if isinstance(name, str) else Shape(*name)


# --------------------------------------------------------------------------------------------- our updates


def settings(case: Case, device: str) -> Any:
    """The `Train` of a case."""
    from flatshift.finetune.config import Train

    return Train(
        steps=NEVER, batch_size=case.rows, max_length=case.sequence, precision=case.precision,
        checkpointing=case.checkpointing, compile=case.way == "compiled", save_every=0, device=device,
    )  # fmt: skip


def stage_of(case: Case, device: str, folder: Path, *, regularizer: Any = None, **more: Any) -> tuple[Any, Any, Any]:
    """Model, tokenizer and stage of a case, for `Trainer`. more: of `TrainingStage`, in place of the case's."""
    result = batches(case.shape, rows=case.rows, sequence=case.sequence)
    outcome = stage(LANGUAGE, result, settings(case, device), folder, regularizer=regularizer, **more)
    model = adapted(case.shape, device, rank=case.rank, checkpointing=case.checkpointing, precision=case.precision)
    return model, Padder(), outcome


class _Left(BaseException):
    """Ends a stage; nothing of it is saved."""


def update_seconds(
    model: Any, tokenizer: Any, stage: TrainingStage, device: str, *, warm: int, updates: int, new_peak: bool = False
) -> list[float]:
    """Seconds of each update after `warm` of them, the device waited for each time; the stage is left then.

    new_peak: begin the peak of memory anew after the first update: not that of reading and quantising.
    """
    from flatshift.finetune.train.trainer import Trainer

    where, stamps = Device(device), []

    def stop() -> bool:
        stamps.append(where.now())
        if new_peak and len(stamps) == 1:
            where.clear()
        if len(stamps) > warm + updates:
            raise _Left
        return False

    with contextlib.suppress(_Left):
        Trainer(model, tokenizer, replace(stage, stop=stop)).fit()
    return [later - sooner for sooner, later in itertools.pairwise(stamps)][warm:]


def ours(case: Case, device: str, regularizer: Any = None) -> list[float]:
    """Seconds of each counted update."""
    with tempfile.TemporaryDirectory() as folder:
        result = stage_of(case, device, Path(folder) / "run", regularizer=regularizer)
        return update_seconds(*result, device, warm=case.warm, updates=case.updates)


# --------------------------------------------------------------------------------------------- the peers'


def trainer(case: Case, device: str) -> list[float]:
    """The same of transformers' Trainer."""
    import transformers

    return _trained(case, device, transformers.TrainingArguments, transformers.Trainer, {}, {})


def sft(case: Case, device: str) -> list[float]:
    """The same of TRL's SFTTrainer."""
    from trl import SFTConfig, SFTTrainer

    settings = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False}
    return _trained(case, device, SFTConfig, SFTTrainer, settings, {"processing_class": _tokenizer()})


PEERS: dict[str, Callable[[Case, str], list[float]]] = {TRAINER: trainer, SFT: sft}
NEEDS = {TRAINER: (), SFT: ("trl", "datasets")}


def _trained(case: Case, device: str, arguments: Any, kind: Any, more: dict[str, Any], built: dict[str, Any]) -> Any:
    import transformers

    from benchmarks.train_step import common_arguments, rows_of

    transformers.utils.logging.set_verbosity_error()
    where, stamps = Device(device), []

    class Stamp(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stamps.append(where.now())

    result = batches(case.shape, rows=case.rows, sequence=case.sequence)
    rows = rows_of(result, case.warm + case.updates)
    data: Any = rows
    if kind.__name__ == "SFTTrainer":
        from datasets import Dataset
        from datasets.table import InMemoryTable

        numbers = InMemoryTable.from_pydict({"number": list(range(len(rows)))})
        data = Dataset(numbers, fingerprint="rows")  # its own would be a pickle of the table
    with tempfile.TemporaryDirectory() as folder:
        common = common_arguments(
            result,
            steps=case.warm + case.updates,
            precision="bf16",
            device=Device(device).torch.type,
            clip=1.0,
            log=False,
        )
        model = adapted(case.shape, device, rank=case.rank)
        if case.way == "full":  # by the model itself: what the arguments call it changes from version to version
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        run = kind(
            model=model,
            args=arguments(**{**common, "output_dir": folder}, **more),
            train_dataset=data,
            data_collator=lambda batch: dict(rows[batch[0]["number"]]) if "number" in batch[0] else batch[0],
            callbacks=[Stamp()],
            **built,
        )
        run.remove_callback(transformers.PrinterCallback)
        run.train()
    return [later - sooner for sooner, later in zip(stamps[case.warm - 1 :], stamps[case.warm :], strict=False)]


def _tokenizer() -> Any:
    from flatshift.finetune.models.backbone import open_backbone

    return open_backbone("flatshift-5m").tokenizer  # pads, and is asked for nothing else


# --------------------------------------------------------------------------------------------- figures


@dataclass
class Seen:
    """Runs of one participant: the median seconds of an update of each, its peak in bytes; or why there are none."""

    seconds: list[float]
    bytes: list[float]
    reason: str | None = None


def watched(run: Callable[[Case, str], list[float]], case: Case, device: str, seen: Seen) -> None:
    """Run once more and note it; what does not fit into the device's memory, or a peer that fails, is noted too."""
    where = Device(device)
    if seen.reason is not None:
        return
    where.clear()
    try:
        took = statistics.median(run(case, device))
    except Exception as error:
        fits = not out_of_memory(error)
        if fits and run is ours:
            raise
        seen.reason = f"failed: {type(error).__name__}: {first_line(error)}" if fits else "out of the device's memory"
    else:
        seen.seconds.append(took)
        seen.bytes.append(where.peak_bytes())
    where.clear()


def compared(case: Case, device: str, peers: Sequence[str], rounds: int) -> dict[str, Seen]:
    """Ours and the peers', `rounds` times A B C C B A; a peer that is not installed is noted as that."""
    seen = {"ours": Seen([], []), **{name: Seen([], []) for name in peers}}
    runs: dict[str, Callable[[Case, str], list[float]]] = {"ours": ours}
    for name in peers:
        absent = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
        if absent:
            seen[name].reason = f"not installed: {', '.join(absent)}"
        runs[name] = PEERS[name]
    for turn in range(2 * rounds):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            watched(runs[name], case, device, seen[name])
    return seen


def speed(
    *,
    device: str,
    shape: str | Sequence[Any],
    sequence: int,
    rows: int,
    way: Way = "none",
    rank: int = 16,
    peers: Sequence[str] = (),
    warm: int = 2,
    updates: int = 3,
    rounds: int = 1,
    product: Sequence[int] = (4096, 8192, 16384),
) -> Figures:
    """Tokens/s and peak memory of an update beside the peers', and its MFU by every convention."""
    case = Case(shape_of(shape), sequence, rows, rank, way, warm, updates)
    seen = compared(case, device, peers, rounds)
    mine, tokens = seen["ours"], rows * sequence
    results: Figures = {"tokens": _beside(mine, None, lambda s: [tokens / t for t in s.seconds])}
    results["memory"] = _beside(mine, None, lambda s: s.bytes)
    for name in peers:
        results[f"tokens|{name}"] = _beside(mine, seen[name], lambda s: [tokens / t for t in s.seconds])
        results[f"memory|{name}"] = _beside(mine, seen[name], lambda s: s.bytes)
    results["published"] = {**results["tokens"], "peer": PUBLISHED_TOKENS}
    cost = operations(case.shape, rows=rows, sequence=sequence, rank=rank)
    promised = dense_peak(Device(device).model)
    for figure, work, peak in (
        ("mfu", cost.causal, promised),
        ("mfu_full", cost.full, promised),
        ("mfu_weights", cost.weights, promised),
        ("mfu_product", cost.causal, best_product(device, tuple(product)) if mine.seconds else None),
    ):
        if mine.reason is not None:
            results[figure] = {"reason": mine.reason}
        elif peak is None:
            results[figure] = {"reason": "no data sheet's peak is known for this device"}
        else:
            results[figure] = {"ours": [work / t / 1e12 / peak for t in mine.seconds]}
    return results | _planned(case, device, mine)


def _planned(case: Case, device: str, mine: Seen) -> Figures:
    """By how much peak memory and seconds of an update are off what `flatshift plan --gpus here` says."""
    if mine.reason is not None:
        return {figure: {"reason": mine.reason} for figure in ("memory_plan", "seconds_plan")}
    from flatshift.finetune.config import Adapter, Mesh
    from flatshift.finetune.planner.devices import Cluster, detect_devices
    from flatshift.finetune.planner.layouts import price_layout
    from flatshift.finetune.planner.rules import RuleSettings
    from flatshift.finetune.planner.sizes import read_sizes

    adapter = Adapter(rank=case.rank)
    with tempfile.TemporaryDirectory() as folder:
        configuration(case.shape).save_pretrained(folder)
        sizes = read_sizes(folder, adapter).under(LANGUAGE)
    cluster = Cluster.at_hand(detect_devices(device), 1, 1)
    layout = price_layout(RuleSettings(Mesh(), settings(case, device), adapter, LANGUAGE), sizes, cluster)
    results: Figures = {}
    for figure, measured, planned, unit in (
        ("memory_plan", mine.bytes, float(layout.needs.total), 2**30),
        ("seconds_plan", mine.seconds, layout.time.total, 1.0),
    ):
        off = [abs(value / planned - 1) for value in measured]
        middle = statistics.median(measured) / unit
        results[figure] = {"ours": off, "reason": f"measured {middle:.4g}, planned {planned / unit:.4g}"}
    return results


def _beside(mine: Seen, theirs: Seen | None, figure: Callable[[Seen], list[float]]) -> dict[str, Any]:
    """`ours` and `peer`, or for one that is missing the reason."""
    results: dict[str, Any] = {"ours": figure(mine) or None}
    reasons = [f"ours: {mine.reason}"] if mine.reason else []
    if theirs is not None:
        results["peer"] = figure(theirs) or None
        reasons += [f"peer: {theirs.reason}"] if theirs.reason else []
    return {**results, **({"reason": "; ".join(reasons)} if reasons else {})}


# --------------------------------------------------------------------------------------------- regularizers


def regularized(
    *,
    device: str,
    kind: str,
    shape: str | Sequence[Any],
    sequence: int,
    rows: int,
    way: Way = "full",
    rank: int = 16,
    warm: int = 3,
    updates: int = 4,
) -> Figures:
    """An update with a regularizer beside a plain one: runs in the order A B B A."""
    from flatshift.regularizers import config

    noise = {"ggpo": config.GGPO, "mgpo": config.MGPO}[kind]()
    case = Case(shape_of(shape), sequence, rows, rank, way, warm, updates)
    took: dict[Any, list[float]] = {None: [], noise: []}
    for regularizer in (noise, None, None, noise):
        took[regularizer] += ours(case, device, regularizer)
        Device(device).clear()
    return {"seconds": {"ours": took[noise], "peer": took[None]}}
