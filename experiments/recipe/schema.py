"""The recipe: frozen dataclasses that a YAML file fills, and the names of their keys. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import typing
from dataclasses import dataclass, field
from typing import Literal

from flatshift.experiments.recipe.studies import Comparison
from flatshift.experiments.recipe.tree import setting_key
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
    """Column names of pool and target."""
    domain_column: str = "domain"
    """Column with a record's domain: for the report, for the method `domains`, and for the subsets of `less`."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Action on a malformed record: stop the run with its file:line, or skip and count it."""

    def __post_init__(self) -> None:
        check_bounds(self, budget=(1, None))

    @property
    def own(self) -> PrecomputedFeatures | None:
        """Precomputed features of the user; None if an embedder makes them."""
        return self.embedder if isinstance(self.embedder, PrecomputedFeatures) else None


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Light fine-tune on the selection before the main one: language modelling with the same adapter and
    regularizer."""

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

    def __post_init__(self) -> None:
        check_bounds(self, steps=(1, None), lr=(0, None), batch_size=(1, None), accumulate=(1, None))
        check_bounds(self, steps=(None, MAX_STEPS))
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


# -------------------------------------------------------------------------------------------------------- names of keys


@functools.cache
def dotted_keys() -> tuple[str, ...]:
    """Return every key that takes a value, such as `train.steps`, in the order of the dataclasses; for a component with
    kinds, the settings of all kinds."""
    return tuple(dict.fromkeys(_iter_dotted_keys(Recipe, "")))


def _iter_dotted_keys(cls: type, path: str) -> typing.Iterator[str]:
    hints = typing.get_type_hints(cls)
    for one in dataclasses.fields(cls):
        key = f"{path}.{setting_key(one.name)}" if path else one.name
        hint = hints[one.name]
        options = typing.get_args(hint) or (hint,)
        components = [option for option in options if dataclasses.is_dataclass(option)]
        for component in components:
            yield from _iter_dotted_keys(typing.cast(type, component), key)
        if not components:
            yield key


def format_keys_by_block(width: int = 100) -> str:
    """Return paragraphs `train: steps, batch_size, …`, one per block, no line longer than `width` characters."""
    rooms: dict[str, list[str]] = {}
    for key in dotted_keys():
        room, _, rest = key.partition(".")
        rooms.setdefault(room if rest else "", []).append(rest or room)
    lines = ["recipe keys, each a flag, as --train.steps 100 (docs/recipes.md says what they mean):"]
    for room, names in sorted(rooms.items()):
        head = f"--{room}." if room else "--"
        lines += textwrap.wrap(
            f"{head} {', '.join(names)}",
            width,
            initial_indent="  ",
            subsequent_indent="      ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def find_keys_ending_with(word: str) -> list[str]:
    """Return the keys whose last part is `word`: those of `train` first, the deepest last."""
    found = [key for key in dotted_keys() if "." in key and key.rpartition(".")[2] == word]
    return sorted(found, key=lambda key: (not key.startswith("train."), key.count(".")))
