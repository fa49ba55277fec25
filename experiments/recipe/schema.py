"""The recipe: frozen dataclasses that a YAML file fills, and the names of their keys. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import typing
from dataclasses import dataclass, field
from typing import Literal

from flatshift.experiments.recipe.studies import Comparison
from flatshift.experiments.recipe.tree import key_of
from flatshift.finetune.config import (
    MOST_STEPS,
    Adapter,
    Columns,
    Data,
    Evaluate,
    Files,
    Mesh,
    Optimizer,
    Record,
    Tracker,
    Train,
    check_bounds,
    refuse_zero,
)
from flatshift.finetune.models.families import LEAKS_PACKED
from flatshift.finetune.tasks import LanguageModel, MaskedLM, Task
from flatshift.regularizers.config import Plain, RegularizerConfig
from flatshift.selection.config import Chunk, Cynical, Embedder, Method, PrecomputedFeatures, Relevance, TfIdf
from flatshift.selection.hygiene.hygiene_config import Hygiene


@dataclass(frozen=True, kw_only=True)
class Select:
    """What is chosen from which pool for which target."""

    from_: str | None = None
    """Directory of a selection that is finished (`flatshift select --out`): `train` takes it as it is, with the
    settings it was made by, and reads no pool. Null: the selection is made."""
    pool: Files = field(default_factory=Files)
    """Candidate records, unlabelled."""
    target: Files = field(default_factory=Files)
    """Samples of the task; empty: the run's own training rows."""
    negative: Files = field(default_factory=Files)
    """Examples of what must not be learnt (gotd-contrast)."""
    eval: Files = field(default_factory=Files)
    """Texts that are judged on, beside the recipe's own dev and test rows: what `hygiene` keeps the pool clear of."""
    hygiene: Hygiene = field(default_factory=Hygiene)
    """What is removed from the pool before anything is chosen."""
    budget: int = 1000
    """Records to choose, no text twice; cynical with `select.method.repeats` counts readings."""
    method: Method = field(default_factory=Cynical)
    """How records are scored. Left out where an `embedder` is named: gotd, which works on its vectors."""
    embedder: Embedder = field(default_factory=TfIdf)
    """How texts become vectors (methods that need them)."""
    cache: str = ""
    """Directory that keeps vectors in shards, named by what they were made of and shared by any number of runs: a run
    that was killed goes on from there. Empty: nothing is kept. Also holds copies of your own features that lie in an
    object store."""
    feature_type: Literal["float32", "float16"] = "float32"
    """How vectors are stored; `float16`: half the space."""
    chunk: Chunk | None = None
    """Cut the pool's texts to one length before anything is chosen."""
    relevance: Relevance | None = None
    """Judge the pool's domains as wholes first: choose some of them, or weight them."""
    checks: bool = True
    """Lengths, scripts, sources and repeats of what was chosen beside target and pool, and what spoke for the first
    choices; for methods that work on features also whether the selection lowers the transport distance to the target,
    and which targets the pool cannot serve, on a few thousand rows."""
    columns: Columns = field(default_factory=Columns)
    """Column names of pool and target."""
    domain_column: str = "domain"
    """Column that names a record's domain: for the report, for the method `domains`, and for the subsets of `less`."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """A malformed record stops the run with its file:line, or is skipped and counted."""

    def __post_init__(self) -> None:
        check_bounds(self, budget=(1, None))

    @property
    def own(self) -> PrecomputedFeatures | None:
        """Features of the user's own, where no embedder makes any."""
        return self.embedder if isinstance(self.embedder, PrecomputedFeatures) else None


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """The light pre-fine-tune on the selection: language modelling with the same adapter and regularizer."""

    task: LanguageModel | MaskedLM | None = None
    """What the selection teaches; null: masked language modelling for an encoder, causal for a decoder."""
    steps: int = 100
    """Optimizer updates."""
    lr: float = 1e-3
    """Peak learning rate."""
    batch_size: int = 8
    """Rows of one micro-batch."""
    accumulate: int = 1
    """Micro-batches of one update."""

    def __post_init__(self) -> None:
        check_bounds(self, steps=(1, None), lr=(0, None), batch_size=(1, None), accumulate=(1, None))
        check_bounds(self, steps=(None, MOST_STEPS))
        refuse_zero(self, lr="the warm-up would train nothing; to go without one, leave the `warmup` block out")


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The grid that `flatshift sweep` runs when `--grid` and `--seeds` are not given."""

    grid: dict[str, tuple] = field(default_factory=dict)
    """Dotted key: values."""
    seeds: int = 5
    """Values of `train.seed`: the recipe's own (0), the next one, …; below five no verdict is given."""
    design: Literal["grid", "paired", "random"] = "grid"
    """All combinations of the values (grid), first values together, second together, … (paired), or points drawn from
    lists and from ranges `lo..hi` and `lo..hi:log` (random)."""
    points: int | None = None
    """How many points to draw (design: random)."""
    metric: str = "auto"
    """The held-out figure that curves, verdicts and the lowest setting are of: any that the task is judged by, for
    example `f1_macro`, drawn as 1 less the metric where higher is better. `auto`: error where there is one, else
    loss."""

    def __post_init__(self) -> None:
        check_bounds(self, seeds=(1, None), points=(1, None))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything one run needs."""

    extends: str | None = None
    """A recipe file (relative to this one) or shipped name whose values this recipe starts from."""
    backbone: str = "flatshift-5m"
    """A shipped name, a hub name, or a local directory."""
    task: Task = field(default_factory=LanguageModel)
    """What is learned."""
    data: Data = field(default_factory=Data)
    """Rows to train and judge on."""
    select: Select | None = None
    """Data selection before the warm-up; null: none."""
    warmup: WarmUp | None = None
    """Warm-up stage on the selection; null: fine-tune the cold backbone."""
    adapter: Adapter = field(default_factory=Adapter)
    """The LoRA adapter."""
    regularizer: RegularizerConfig = field(default_factory=Plain)
    """What is added to a training step."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW and its schedule."""
    train: Train = field(default_factory=Train)
    """Steps, batches, evaluation and checkpoints."""
    mesh: Mesh = field(default_factory=Mesh)
    """Device mesh axes."""
    eval: Evaluate = field(default_factory=Evaluate)
    """Metrics and intervals."""
    tracker: Tracker = field(default_factory=Tracker)
    """Where the lines of metrics.jsonl go besides."""
    record: Record | None = None
    """What is written down at log-spaced steps of fine-tuning; null: nothing but metrics.jsonl."""
    sweep: SweepConfig | None = None
    """Default grid of `flatshift sweep`."""
    comparison: Comparison | None = None
    """Methods, tasks and protocol of `flatshift compare`."""


def warm_up_task(recipe: Recipe) -> tuple[LanguageModel | MaskedLM, str]:
    """What the recipe's warm-up trains, and why."""
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
    """Every key that takes a value, as `train.steps`, in the order of the dataclasses; of a component with kinds, the
    settings of all of them."""
    return tuple(dict.fromkeys(_below(Recipe, "")))


def _below(cls: type, path: str) -> typing.Iterator[str]:
    hints = typing.get_type_hints(cls)
    for one in dataclasses.fields(cls):
        key = f"{path}.{key_of(one.name)}" if path else one.name
        hint = hints[one.name]
        options = typing.get_args(hint) or (hint,)
        components = [option for option in options if dataclasses.is_dataclass(option)]
        for component in components:
            yield from _below(typing.cast(type, component), key)
        if not components:
            yield key


def keys_by_room(width: int = 100) -> str:
    """Paragraphs `train: steps, batch_size, …`, a room each, no line longer than `width` characters."""
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


def ending_with(word: str) -> list[str]:
    """Keys whose last word is `word`: those of the training first, the deepest last."""
    found = [key for key in dotted_keys() if "." in key and key.rpartition(".")[2] == word]
    return sorted(found, key=lambda key: (not key.startswith("train."), key.count(".")))
