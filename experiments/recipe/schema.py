"""The recipe: frozen dataclasses that a YAML file fills, the names of their keys, and the key of a run's result.

Imports nothing heavy, since the command line parses with it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import textwrap
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatshift.finetune.config import (
    MAX_STEPS,
    Adapter,
    Evaluate,
    Mesh,
    Optimizer,
    TraceRecording,
    Tracker,
    Train,
    check_bounds,
    check_nonzero,
)
from flatshift.finetune.data.config import Columns, Data, Files
from flatshift.finetune.models.families import LEAKS_PACKED
from flatshift.finetune.tasks import LanguageModel, MaskedLM, Task
from flatshift.regularizers.config import Plain, RegularizerConfig
from flatshift.selection.config import Cynical, Embedder, Method, PrecomputedFeatures, Relevance, TextChunks, TfIdf
from flatshift.selection.hygiene.hygiene_config import Hygiene

_NAME = "NAME"
"""Part of a key in place of a name of the user's own."""


def setting_key(field: str) -> str:
    """Return a settings field's name in recipes and flags, without the `_` that avoids a Python keyword (`from_`)."""
    return field.removesuffix("_")


def hint_options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


@dataclass(frozen=True, kw_only=True)
class Select:
    """Data selection: pool, target and method."""

    from_: str | None = None
    """Directory of a finished selection (`flatshift select --out`): `train` uses it with the settings it was made with,
    and reads no pool. Null: the selection is made."""
    pool: Files = field(default_factory=Files)
    """Candidate records, unlabelled."""
    target: Files = field(default_factory=Files)
    """Examples of the task; empty: the run's own training rows."""
    negative: Files = field(default_factory=Files)
    """Examples of text that must not be learnt (gotd-contrast)."""
    eval: Files = field(default_factory=Files)
    """Evaluation texts, in addition to the recipe's dev and test rows, that `hygiene` removes from the pool."""
    hygiene: Hygiene = field(default_factory=Hygiene)
    """Removed from the pool before anything is chosen."""
    budget: int = 1000
    """Records to choose, without duplicate texts; cynical with `select.method.repeats` counts repetitions too."""
    method: Method = field(default_factory=Cynical)
    """Scoring method. Default if an `embedder` is named: gotd, which works on its vectors."""
    embedder: Embedder = field(default_factory=TfIdf)
    """Embedder of the texts (for methods that need vectors)."""
    cache: str = ""
    """Directory for vectors, stored in shards that are named by their inputs and shared by any number of runs; an
    interrupted run resumes from there. Empty: nothing is stored. Also holds copies of your own features that are in an
    object store."""
    feature_type: Literal["float32", "float16"] = "float32"
    """Storage type of vectors; `float16` halves the space."""
    chunk: TextChunks | None = None
    """Cut the pool's texts to one length before anything is chosen."""
    relevance: Relevance | None = None
    """Score whole domains of the pool first: choose some of them, or weight them."""
    checks: bool = True
    """Report lengths, scripts, sources and repeats of the chosen records compared with target and pool, and the reasons
    for the first choices. For methods that work on features also report whether the selection lowers the transport
    distance to the target, and which targets the pool cannot serve, on a few thousand rows."""
    columns: Columns = field(default_factory=Columns)
    """Column names of pool and target; a target whose columns have other names is read by `data.columns`."""
    domain_column: str = "domain"
    """Column with a record's domain: for the report, for the method `domains`, and for the subsets of `less`."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Action on a malformed record: stop the run with its file:line, or skip and count it."""

    def __post_init__(self) -> None:
        check_bounds(self, budget=(1, None))
        for name in ("target", "negative", "eval"):
            if (side := getattr(self, name)).limit is not None and not side.files:
                raise ValueError(f"{name}.limit has no effect without {name}.files; name files, or leave it out")
        written = {"score", "rank", "repeat_of"} | ({"id"} if self.columns.id != "id" else set())
        cut = self.hygiene.decontaminate
        if self.chunk is not None or (cut is not None and cut.action == "split"):
            written |= {"source_id", "start", "end"}
        for name in sorted(written & {self.columns.text, self.columns.id, self.domain_column}):
            raise ValueError(f"selected.jsonl has a column {name!r} of its own; rename that of pool and target")

    @property
    def own(self) -> PrecomputedFeatures | None:
        """Precomputed features of the user; None if an embedder makes them."""
        return self.embedder if isinstance(self.embedder, PrecomputedFeatures) else None

    @property
    def is_target_alone(self) -> bool:
        """True for a block that names a target and its columns, and nothing that a selection needs."""
        return self == Select(target=self.target, columns=self.columns, bad_rows=self.bad_rows)


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Light fine-tune on the selection, the target's own texts or both before the main one: language modelling with the
    same adapter and regularizer."""

    task: LanguageModel | MaskedLM | None = None
    """Objective of the warm-up; null: masked language modelling for an encoder, causal for a decoder."""
    steps: int = 100
    """Optimizer steps."""
    lr: float = 1e-3
    """Peak learning rate."""
    batch_size: int = 8
    """Examples of one micro-batch."""
    accumulate: int = 1
    """Micro-batches of one optimizer step."""
    own: float = 0.0
    """Share of the warm-up's tokens that come from the target's own texts, without their labels
    (`select.target.files`, else the training rows); they are repeated where they are few. 1 reads them alone, and
    the `select` block names no more than the target (task-adaptive pretraining, 2004.10964)."""

    def __post_init__(self) -> None:
        check_bounds(self, steps=(1, MAX_STEPS), lr=(0, None), batch_size=(1, None), accumulate=(1, None), own=(0, 1))
        check_nonzero(self, lr="the warm-up would train nothing; to go without one, leave the `warmup` block out")


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Grid that `flatshift sweep` runs without `--grid` and `--seeds`."""

    grid: dict[str, tuple] = field(default_factory=dict)
    """Dotted key: values."""
    seeds: int = 5
    """Number of values of `train.seed`: the recipe's own (0), the next one, …; fewer than five give no verdict."""
    design: Literal["grid", "paired", "random"] = "grid"
    """All combinations of the values (grid), first values together, second together, … (paired), or points drawn from
    lists and from ranges `lo..hi` and `lo..hi:log` (random)."""
    points: int | None = None
    """Number of points to draw (design: random)."""
    metric: str = "auto"
    """The held-out figure that curves, verdicts and the lowest setting are of: any metric of the task, for
    example `f1_macro`, drawn as 1 less the metric where higher is better. `auto`: error where there is one, else
    loss."""

    def __post_init__(self) -> None:
        check_bounds(self, seeds=(1, None), points=(1, None))


@dataclass(frozen=True, kw_only=True)
class StudyTask:
    """One task of a comparison: a file of rows and its changes to the recipe."""

    file: str
    """Rows with a `split` column: a path relative to the directory that `--data` names, another path, or
    `sample:NAME`."""
    set: dict[str, Any] = field(default_factory=dict)
    """Recipe keys (dotted) and their values for this task."""
    train: int = 300
    """Labelled training examples of one run, drawn by its seed from the rows that are neither validation nor test."""
    validation: int = 400
    """Examples that settings are chosen on, drawn once for all runs."""
    test: int = 500
    """Examples of the final evaluation, drawn once for all runs from the split `test_split`."""
    test_split: str = "test"
    """Value of the column `split` that marks test rows; training rows are those marked `train`."""

    def __post_init__(self) -> None:
        check_bounds(self, train=(1, None), validation=(1, None), test=(1, None))


@dataclass(frozen=True, kw_only=True)
class StudyMethod:
    """One method of a comparison: its changes to the recipe and the settings tried."""

    set: dict[str, Any] = field(default_factory=dict)
    """Recipe keys (dotted) and their values for this method."""
    lr: tuple[float, ...] = ()
    """Learning rates of the first trials; empty: those of the comparison."""
    knobs: dict[str, tuple] = field(default_factory=dict)
    """Method-specific keys (dotted) and the values tried, each combined with every learning rate."""
    confirmatory: bool = False
    """True for a method named beforehand and run with all seeds; the others are exploratory, with
    `exploratory_seeds`."""
    tasks: tuple[str, ...] = ()
    """Tasks to run it on; empty: all."""
    note: str = ""
    """Description of the method, for the page."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods compared with a baseline on several tasks under one protocol; `flatshift compare` runs it."""

    tasks: dict[str, StudyTask] = field(default_factory=dict)
    """Name → task."""
    methods: dict[str, StudyMethod] = field(default_factory=dict)
    """Name → method; all get the same number of trials on every task."""
    metric: str = "auto"
    """Metric that methods are compared by, in trials and final runs alike. `auto`: accuracy; tasks other than
    classification are compared by their loss and reported next to the primary endpoint. Any other metric that all tasks
    have, for example `f1_macro`, `numeric_match` or `loss`: the endpoint is its mean over all informative tasks."""
    baseline: str = "plain"
    """Method that the others are compared with."""
    controls: dict[str, str] = field(default_factory=dict)
    """Control → the method that must beat it for its idea to be the cause."""
    lr: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3)
    """Learning rates of the first trials."""
    rounds: int = 2
    """Further trials of every method, one after the other: beyond the edge of its learning rates if the best is at the
    edge, else between the best and its better neighbour."""
    seeds: int = 10
    """Runs of the baseline and of the confirmatory methods: `train.seed` 0, 1, …"""
    exploratory_seeds: int = 5
    """Runs of the other methods, with the first of the same seeds."""
    tuning_seeds: tuple[int, ...] = (1_000_003, 1_000_033, 1_000_037)
    """`train.seed` of trials; never used for a final run. All trials run under the first, the `finalists` under all:
    near the edge of stability a setting may work with one seed and break down with the next."""
    finalists: int = 2
    """Best trials of every method that run under all tuning seeds and are compared by their mean over them."""
    equal_time_above: float = 1.15
    """Methods whose step costs more CPU time than the baseline's by this factor run once more with as many steps as the
    baseline's time allows."""
    sharpness_sigma: float = 0.05
    """σ of E[L(w+ε)] − L(w): the norm of the noise of a row, relative to that of the weight's row."""
    sharpness_seeds: int = 2
    """Final runs of each method and task whose sharpness is measured; 0: none."""
    resamples: int = 2000
    """Bootstrap draws over seeds × test items."""

    def __post_init__(self) -> None:
        check_bounds(self, rounds=(0, 1000), seeds=(2, 10_000), exploratory_seeds=(2, 10_000), finalists=(1, None))
        check_bounds(self, equal_time_above=(1, None), sharpness_sigma=(0, None))
        check_bounds(self, sharpness_seeds=(0, 10_000), resamples=(100, 1_000_000))
        _check_learning_rates("lr", self.lr)
        for names in (self.tasks, self.methods):
            kind, plain = "tasks" if names is self.tasks else "methods", [name.replace("_", "-") for name in names]
            for name in plain:
                if plain.count(name) > 1:
                    raise ValueError(f"{kind} has {name!r} twice (- and _ are equal)")
        if self.methods and self.baseline not in self.methods:
            raise ValueError(f"baseline is {self.baseline!r}, which is none of the methods {', '.join(self.methods)}")
        if self.methods and self.methods[self.baseline].tasks:
            raise ValueError(f"methods.{self.baseline}.tasks: the baseline runs on all tasks; leave it out")
        for control, method_name in self.controls.items():
            for name in (control, method_name):
                if self.methods and name not in self.methods:
                    raise ValueError(f"controls names {name!r}, which is none of the methods")
        if not self.tuning_seeds or len(set(self.tuning_seeds)) < len(self.tuning_seeds):
            raise ValueError(f"tuning_seeds must be at least one seed and all different, got {list(self.tuning_seeds)}")
        for seed in self.tuning_seeds:
            if not max(self.seeds, self.exploratory_seeds) <= seed < 2**63:
                raise ValueError(f"tuning_seeds: {seed} is also the seed of a final run, or above 2^63; take another")
        if self.methods and self.finalists > self.trials + self.rounds:
            raise ValueError(f"finalists is {self.finalists}, but a method has {self.trials + self.rounds} trials")
        for name, method in self.methods.items():
            _check_learning_rates(f"methods.{name}.lr", self.rates(method))
            count = len(self.rates(method)) * math.prod(len(values) for values in method.knobs.values())
            if count != self.trials:
                raise ValueError(
                    f"methods.{name} would have {count} first trials and {self.baseline} has {self.trials}: every "
                    "method gets equally many; change its lr or knobs"
                )
            for task in method.tasks:
                if task not in self.tasks:
                    raise ValueError(f"methods.{name}.tasks has {task!r}, which is none of {', '.join(self.tasks)}")

    def rates(self, method: StudyMethod) -> tuple[float, ...]:
        """Return the learning rates of a method's first trials, ascending."""
        return method.lr or self.lr

    @property
    def trials(self) -> int:
        """Number of first trials of every method on every task."""
        method = self.methods.get(self.baseline, StudyMethod())
        return len(self.rates(method)) * math.prod(len(values) for values in method.knobs.values())

    def runs_on(self, name: str) -> list[str]:
        """Return the tasks of a method, in the order of `tasks`."""
        chosen = self.methods[name].tasks
        return [task for task in self.tasks if not chosen or task in chosen]

    def seeds_of(self, name: str) -> range:
        """Return the seeds of a method's final runs."""
        every = name == self.baseline or self.methods[name].confirmatory
        return range(self.seeds if every else min(self.exploratory_seeds, self.seeds))


def _check_learning_rates(name: str, rates: tuple[float, ...]) -> None:
    if len(rates) < 2 or any(not rate > 0 for rate in rates) or list(rates) != sorted(set(rates)):
        raise ValueError(f"{name} must be at least two rising learning rates, got {list(rates)}")


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """Place where the cells of a study, or the ranks of a training run, are processes, and the resources of each."""

    on: str = "local"
    """local: processes of this machine; ray, or ray:HOST:PORT: those of a Ray cluster (the one this machine belongs
    to, or the one at that address); slurm, or slurm:PARTITION: jobs of Slurm, where --out is on a disk that all nodes
    see, as it is for train and compare on Ray."""
    cpus: int | None = None
    """CPUs, and threads, of each process (--on ray or slurm); 1 by default."""
    gpus: int | None = None
    """GPUs of each process (--on ray or slurm); by default 1 if train.device is cuda, else 0."""
    memory: float | None = None
    """GiB of memory of each process (--on ray or slurm); by default the most that `flatshift plan` predicts, if this
    machine was calibrated (`flatshift plan --calibrate`)."""
    time: int | None = None
    """Minutes after which Slurm requeues a job (--on slurm); 60 by default."""
    retries: int = 1
    """Times that a cell, or all ranks, start again because a worker died."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ExecutorOptions):
    """Cells of a sweep and the way they are run; None: the value in the recipe's `sweep` block, or the default."""

    grid: tuple[str, ...] | None = None
    """key=v1,v2,… for each axis (random: also key=lo..hi and key=lo..hi:log); by default the recipe's `sweep.grid`."""
    seeds: int | None = None
    """Number of values of train.seed, from the recipe's own (0) upwards; by default the recipe's `sweep.seeds`."""
    design: Literal["grid", "paired", "random"] | None = None
    """All combinations, first values together and second together, or points drawn at random; grid by default."""
    points: int | None = None
    """Number of points to draw (--design random)."""
    bisect: str | None = None
    """data.train.limit[=lo..hi]: find for each point the number of training rows it can still fit; written to
    emc.json."""
    epsilon: float | None = None
    """Mean train error (squared loss: unexplained share) up to which rows are fitted (--bisect); 0.1 by default."""
    jobs: int | None = None
    """Cells that run at the same time; by default one for each CUDA device, else 1, and as many as a cluster has room
    for."""
    devices: str = "auto"
    """auto (every CUDA device), cpu, or CUDA numbers such as 0,1; processes get them in turn."""
    max_cells: int | None = None
    """Refuse a plan of more cells (points times seeds) than this; 10000 by default."""
    part: str | None = None
    """i/n: run only this part of the cells, in a separate directory (for job arrays without a shared disk)."""
    merge: tuple[Path, ...] = ()
    """Sweep directories whose finished cells are gathered in --out; nothing is trained, a missing cell is refused."""
    until: Literal["decided"] | None = None
    """decided: add seeds in steps, up to --seeds, until every curve has a verdict; the error level is split among the
    tests."""
    rerun_stale: bool = False
    """Rerun finished cells that another version of the code produced."""
    rerun_failed: bool = False
    """Rerun cells that failed (out of memory, a dead worker, refused rows), except those that diverged."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of one run."""

    extends: str | None = None
    """Recipe file (relative to this one) or shipped name whose values this recipe starts from."""
    backbone: str = "flatshift-5m"
    """A shipped name, a hub name, or a local directory."""
    task: Task = field(default_factory=LanguageModel)
    """Training task."""
    data: Data = field(default_factory=Data)
    """Rows to train and evaluate on."""
    select: Select | None = None
    """Data selection before the warm-up; null: none."""
    warmup: WarmUp | None = None
    """Warm-up stage on the selection; null: fine-tune the base model directly."""
    adapter: Adapter = field(default_factory=Adapter)
    """The LoRA adapter."""
    regularizer: RegularizerConfig = field(default_factory=Plain)
    """Addition to a training step."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """Optimizer and its schedule."""
    train: Train = field(default_factory=Train)
    """Steps, batches, evaluation and checkpoints."""
    mesh: Mesh = field(default_factory=Mesh)
    """Device mesh axes."""
    eval: Evaluate = field(default_factory=Evaluate)
    """Metrics and intervals."""
    tracker: Tracker = field(default_factory=Tracker)
    """Experiment trackers that also receive the rows of metrics.jsonl."""
    record: TraceRecording | None = None
    """Quantities recorded at log-spaced steps of fine-tuning; null: nothing but metrics.jsonl."""
    sweep: SweepConfig | None = None
    """Default grid of `flatshift sweep`."""
    comparison: Comparison | None = None
    """Methods, tasks and protocol of `flatshift compare`."""

    @property
    def selection(self) -> Select | None:
        """The `select` block, unless it only names the own texts of a warm-up that reads nothing else."""
        return self.select if self.warmup is None or self.warmup.own < 1 else None


def warm_up_task(recipe: Recipe) -> tuple[LanguageModel | MaskedLM, str]:
    """Return the task of the recipe's warm-up, and the reason for it."""
    from flatshift.finetune.models.backbone import open_backbone

    if recipe.warmup is not None and recipe.warmup.task is not None:
        return recipe.warmup.task, "as warmup.task says"
    backbone = open_backbone(recipe.backbone)
    if backbone.reads_both_ways:
        return MaskedLM(), f"because {recipe.backbone} is an encoder"
    if (kind := backbone.config.get_text_config().model_type) in LEAKS_PACKED:
        return LanguageModel(pack=False), f"because {recipe.backbone} is a decoder; {kind} cannot pack"
    return LanguageModel(), f"because {recipe.backbone} is a decoder"


@functools.cache
def dotted_keys() -> tuple[str, ...]:
    """Return every key that a flag sets, such as `train.steps`, in the order of the dataclasses; for a component with
    kinds, the settings of all kinds."""
    return tuple(dict.fromkeys(key for key, _ in _iter_dotted_keys(Recipe, "") if key != "extends"))


@functools.cache
def list_keys() -> frozenset[str]:
    """Return the keys of `dotted_keys` that take several values."""
    return frozenset(key for key, form in _iter_dotted_keys(Recipe, "") if form is tuple)


@functools.cache
def _map_keys() -> frozenset[str]:
    """Return the keys of `dotted_keys` below which names are the user's own."""
    return frozenset(key for key, form in _iter_dotted_keys(Recipe, "") if form is dict)


def _iter_dotted_keys(cls: type, path: str) -> typing.Iterator[tuple[str, type | None]]:
    """Yield each key, and `tuple` or `dict` if it takes a list or a mapping of names of the user's own."""
    hints = typing.get_type_hints(cls)
    for entry in dataclasses.fields(cls):
        key = f"{path}.{setting_key(entry.name)}" if path else entry.name
        for option in hint_options(hints[entry.name]):
            form = typing.get_origin(option) or option
            if dataclasses.is_dataclass(option):
                yield from _iter_dotted_keys(typing.cast(type, option), key)
            elif form is not type(None):
                yield key, form if form in (tuple, dict) else None
            if form is dict and dataclasses.is_dataclass(inner := typing.get_args(option)[1]):
                yield from _iter_dotted_keys(typing.cast(type, inner), f"{key}.{_NAME}")


def split_key(dotted: str) -> tuple[list[str], str]:
    """Return the parts of a dotted key, with `_` for `-` but in names of the user's own, and its key in `dotted_keys`,
    where such a name is NAME."""
    parts, key = list[str](), ""
    for part in dotted.split("."):
        is_name = key in _map_keys()
        parts.append(part if is_name else part.replace("-", "_"))
        key = f"{key}.{_NAME if is_name else parts[-1]}".lstrip(".")
    return parts, key


def format_keys_by_block(width: int = 100) -> str:
    """Return paragraphs `train: steps, batch_size, …`, one per block, no line longer than `width` characters."""
    blocks: dict[str, list[str]] = {}
    for key in dotted_keys():
        block, _, name = key.partition(".")
        blocks.setdefault(f"--{block}." if name else "--", []).append(name or block)
    lines = ["recipe keys, each a flag, as --train.steps 100 (docs/recipes.md says what they mean):"]
    wrapper = textwrap.TextWrapper(
        width, initial_indent="  ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
    for block, names in sorted(blocks.items()):
        lines += wrapper.wrap(f"{block} {', '.join(names)}")
    return "\n".join(lines)


def find_keys_ending_with(word: str) -> list[str]:
    """Return the keys whose last part is `word`: those of `train` and `optimizer` first, the deepest last."""
    keys = [key for key in dotted_keys() if "." in key and key.rpartition(".")[2] == word]
    return sorted(keys, key=lambda key: (not key.startswith(("train.", "optimizer.")), key.count(".")))


TRAINING_ROWS = 1000
"""Training rows that a cell evaluates by default."""
_LATER: dict[tuple[str, str], Any] = {
    ("optimizer", "kind"): "adamw",
    ("mesh", "ep"): 1,
    ("warmup", "own"): 0.0,
    ("train", "compile"): False,
    ("train", "skip_nonfinite"): 0,
    ("train", "weigh"): "rows",
    ("train", "tf32"): False,
    ("train", "backbone_precision"): "same",
    ("train", "deterministic"): False,
    ("task", "metrics"): (),
    ("task", "dft"): False,
    ("data", "holdout_splits"): ("dev", "test"),
    ("columns", "messages"): "messages",
    ("columns", "tools"): "tools",
    ("columns", "system"): "system",
    ("hygiene", "drops"): (),
}
"""(block, key) → default, for keys added later whose default is not null. At its default such a key is left out of the
hash, so that earlier runs keep their key."""


def recipe_key(recipe: Recipe, inputs: Any) -> str:
    """Return 16 hex digits: the hash of all that a result depends on, the resolved recipe and `inputs` (digests of the
    files it reads, and whatever else matters).

    Null and absent are the same, so a key that a later version adds with the default null changes no existing hash;
    other additions are in `_LATER`.
    """
    tree = dataclasses.asdict(recipe)
    # these decide which runs exist, or report a run: no metric depends on them
    for name in ("sweep", "comparison", "extends", "tracker"):
        tree.pop(name)
    # `max_cut` only refuses, `extend` is for resumed runs: neither changes a metric of a cell
    for name in ("device", "threads", "peak_tflops", "max_cut", "extend"):
        tree["train"].pop(name)
    for name in ("cache", "checks"):  # `checks` only refuses and changes no metric
        tree["data"].pop(name)
    if tree["eval"]["train_limit"] is None:
        tree["eval"]["train_limit"] = TRAINING_ROWS
    if tree["mesh"]["reshard"] is None:  # the default was true, and is the same for every mesh of one stage
        tree["mesh"]["reshard"] = True
    for name in ("cold", "answers"):  # they add what is next to the metrics of the run
        tree["eval"].pop(name)
    for name, value in (("adapter_precision", "fp32"), ("backbone_precision", "same")):
        if tree["train"][name] == "auto":
            tree["train"][name] = value
    drop_default_keys(tree)
    return short_hash([drop_nulls(tree), inputs])


def short_hash(value: Any) -> str:
    """Return 16 hex digits: the hash of plain values (mappings, sequences, numbers, text)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def drop_default_keys(tree: dict[str, Any]) -> None:
    """Remove the keys in `_LATER` (at their default) from the blocks of that name, at any depth."""
    for block, values in tree.items():
        if not isinstance(values, dict):
            continue
        for (owner, name), default in _LATER.items():
            if owner == block and values.get(name) == default:
                values.pop(name)
        if block == "hygiene":  # where records' arrays are stored, not which are dropped
            values.pop("memory_gib", None)
        drop_default_keys(values)


def drop_nulls(tree: Any) -> Any:
    """Return plain values without the keys that are null, at any depth of mappings."""
    if isinstance(tree, dict):
        return {key: drop_nulls(value) for key, value in tree.items() if value is not None}
    return tree
