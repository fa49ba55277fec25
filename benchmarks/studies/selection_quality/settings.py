"""Settings of a study of selectors: pool, targets, arms, budgets and seeds. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flatshift.experiments.recipe.rules import CELL_RULES, check_rules
from flatshift.experiments.recipe.schema import Recipe, Select, drop_nulls
from flatshift.finetune.config import DATA_INITS, MAX_LENGTH, check_bounds
from flatshift.finetune.data.config import Data
from flatshift.finetune.errors import UserError

Source = Literal["selector", "matched", "form", "pool", "target", "none"]
_READ = ("embedder", "feature_type", "hygiene", "method", "columns", "bad_rows")
"""Keys of `select` that a study reads; its own block has the others."""


@dataclass(frozen=True, kw_only=True)
class QualityTarget:
    """One target: a labelled file of one domain."""

    file: str
    """Rows with `text`, `label` and `split`, relative to `--data`; or a path, or `sample:NAME`."""
    domains: tuple[str, ...] = ()
    """Hidden domains of the pool that serve it; selectors never see them."""
    set: dict[str, Any] = field(default_factory=dict)
    """Recipe keys (dotted) and their values for this target: how its runs train, the same for every arm."""
    texts: int = 500
    """Training texts, without labels, that selectors see; drawn by the seed."""
    labels: int = 300
    """Labelled rows of the fine-tune: some of these texts, drawn by the seed."""
    validation: int = 200
    """Rows that choose learning rates, drawn once for all from the training rows."""
    test: int = 400
    """Rows of the split `test_split` that final runs are evaluated on, drawn once for all."""
    test_split: str = "test"
    budgets: tuple[int, ...] = ()
    """Budgets of this target; empty: those of the study."""

    def __post_init__(self) -> None:
        check_bounds(self, texts=(1, None), labels=(1, None), validation=(1, None), test=(1, None))
        if self.labels > self.texts:
            raise ValueError(f"labels: {self.labels} labelled rows are more than the {self.texts} texts they belong to")
        _check_rising("budgets", self.budgets, 0)
        for key in _leaves(self.set):
            if key in ("train.seed", "warmup.lr", "optimizer.lr"):
                raise ValueError(f"set has {key!r}, which the study overwrites in every run")
            if key.partition(".")[0] in ("select", "backbone", "data", "quality"):
                raise ValueError(f"set has {key!r}, but a target sets how its runs train and nothing else")


@dataclass(frozen=True, kw_only=True)
class QualityArm:
    """One way to warm up."""

    source: Source = "selector"
    """Where the warm-up's text comes from: a `selector`'s choice; a random draw `matched` to another arm's choice in
    hidden domain and length; what is nearest to the target in `form` alone: moore-lewis on case, digits, marks and
    spacing without any word; the whole `pool`; the `target` texts themselves; or `none`: no warm-up."""
    set: dict[str, Any] = field(default_factory=dict)
    """Recipe keys (dotted) of `select.method` and their values for this arm."""
    like: str = ""
    """The arm that a `matched` draw follows."""
    times: int = 1
    """How often the warm-up reads the choice: of budgets in tokens the best passages that hold budget/times of them."""
    own: float = 0.0
    """Share of the warm-up's tokens that are the target's own texts; the choice has the rest of the budget."""
    note: str = ""
    """One line about it for the page."""

    def __post_init__(self) -> None:
        check_bounds(self, times=(1, None))
        if not 0 <= self.own < 1:
            raise ValueError(f"own: {self.own} is no share from 0 to below 1; the texts alone are source: target")
        if self.own and self.source != "selector":
            raise ValueError(f"own: an arm of source {self.source} runs no selector; leave it out")
        for key in _leaves(self.set):
            if self.source != "selector":
                raise ValueError(f"set has {key!r}, but an arm of source {self.source} runs no selector; leave it out")
            if not f"{key}.".startswith("select.method."):
                raise ValueError(
                    f"set has {key!r}, but an arm sets select.method.* alone, so that all arms train alike"
                )
        if self.times > 1 and self.source != "selector":
            raise ValueError(f"times: an arm of source {self.source} runs no selector; leave it out")


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Selectors against a random draw on several targets, by one protocol."""

    pool: str = ""
    """The pool's passages, unlabelled: a file as for targets."""
    tags: str = ""
    """Their hidden domains: a .tsv (or .tsv.xz) of `id, domain, …` in the pool's order, without a head. Empty: the
    shipped pool's own."""
    pool_rows: int | None = None
    """Use this many passages, drawn once for all; null: all."""
    targets: dict[str, QualityTarget] = field(default_factory=dict)
    arms: dict[str, QualityArm] = field(default_factory=dict)
    """Name → arm; all get the same number of trials on every target."""
    baseline: str = "random"
    """The arm that the others are compared with."""
    focus: str = "gotd"
    """The arm that is compared with every other one."""
    budgets: tuple[int, ...] = (1000, 5000, 20000)
    primary_budget: int = 5000
    """The budget of the primary endpoint and of all trials."""
    unit: Literal["passages", "tokens"] = "passages"
    """Unit of budgets. `tokens` of the backbone: the best passages that hold so many, and the warm-up takes as many
    steps as read them through once."""
    form: bool = False
    """Whether final runs have a second endpoint, nats of texts in one plain form: the chosen passages and the test
    texts alike in lower case with one space between words and marks, so that only words can tell selectors apart."""
    form_after: bool = False
    """As `form`, but the same warm-up is evaluated on the test texts in plain form: none is read in that form."""
    forgetting: bool = False
    """Whether final runs have nats of passages of the pool as a further endpoint: what the warm-up costs elsewhere."""
    elsewhere: int = 300
    """Number of these passages."""
    packed: int = 256
    """Tokens of a warm-up row: passages end to end, cut to this length, so that every arm has as many tokens."""
    judged_length: int = 128
    """Tokens of an evaluated text that count for its perplexity."""
    lr: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Learning rates of the first warm-up trials."""
    tune_on: tuple[str, ...] = ()
    """Targets whose trials choose an arm's rate for all targets, by their mean; empty: each target chooses its own."""
    rounds: int = 1
    """Further trials of every arm: beyond the edge if the best lies there, else between it and its better neighbour."""
    fine_tune_lr: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Learning rates of the fine-tune, tried once per target without warm-up; the best serves every arm."""
    fine_tune: bool = True
    """Whether there is a fine-tune with labels at all."""
    fine_tune_budgets: tuple[int, ...] = ()
    """Budgets after which the fine-tune runs too; empty: all. Arms without a budget always have it."""
    seeds: int = 5
    """Final runs of every arm: `train.seed` 0, 1, …"""
    tuning_seed: int = 1_000_003
    """`train.seed` of all trials; never used for a final run."""
    notes: tuple[str, ...] = ()
    """Sentences that the protocol ends with: what a reader must know of how this study came about."""

    def __post_init__(self) -> None:
        check_bounds(
            self, pool_rows=(1, None), primary_budget=(1, None), packed=(2, MAX_LENGTH), judged_length=(2, MAX_LENGTH),
            rounds=(0, 1000), seeds=(2, 10_000), tuning_seed=(0, 2**63 - 1), elsewhere=(1, None),
        )  # fmt: skip
        if self.form and self.form_after:
            raise ValueError("form and form_after are two ways to one endpoint; take one")
        if unknown := [name for name in self.tune_on if name not in self.targets]:
            raise ValueError(f"tune_on: {unknown[0]!r} is no target of this study")
        _check_rising("lr", self.lr, 2)
        _check_rising("fine_tune_lr", self.fine_tune_lr, 2)
        _check_rising("budgets", self.budgets, 1)
        if self.tuning_seed < self.seeds:
            raise ValueError(f"tuning_seed {self.tuning_seed} is also the seed of a final run; take a larger one")
        for key in ("baseline", "focus") if self.arms else ():
            arm = self.arms.get(getattr(self, key))
            if arm is None or arm.source != "selector":
                raise ValueError(f"{key} is {getattr(self, key)!r}, which is no arm with a selector")
        for name, arm in self.arms.items():
            if arm.times > 1 and self.unit != "tokens":
                raise ValueError(f"arms: {name} reads its choice {arm.times} times, which needs unit: tokens")
            if arm.own and self.unit != "tokens":
                raise ValueError(f"arms: {name} mixes in own texts, which needs unit: tokens")
            if arm.source == "matched" and (arm.like not in self.arms or self.arms[arm.like].source != "selector"):
                raise ValueError(f"arms: {name} is matched to {arm.like!r}, which is no arm with a selector")
            if arm.source != "matched" and arm.like:
                raise ValueError(f"arms: {name} is like {arm.like!r}, but its source is {arm.source}, not matched")
        for name in self.targets:
            if self.primary_budget not in (own := self.budgets_of(name)):
                raise ValueError(f"primary_budget {self.primary_budget} is none of the budgets of target {name}: {own}")

    def budgets_of(self, target: str) -> tuple[int, ...]:
        """Budgets of a target, rising."""
        return self.targets[target].budgets or self.budgets

    def has_budget(self, arm: str) -> bool:
        """Return True for an arm that selects."""
        return self.arms[arm].source in ("selector", "matched", "form")

    def fine_tunes(self, budget: int | None) -> bool:
        """Return True where the fine-tune runs after this budget."""
        return self.fine_tune and (budget is None or not self.fine_tune_budgets or budget in self.fine_tune_budgets)

    def tuning_groups(self) -> list[tuple[str, ...]]:
        """Groups of targets whose trials choose one rate together."""
        return [self.tune_on] if self.tune_on else [(target,) for target in self.targets]


@dataclass(frozen=True, kw_only=True)
class StudyRecipe(Recipe):
    """A recipe that may have a study of selectors."""

    quality: Quality | None = None


def check_study(recipe: Recipe, study: Quality) -> None:
    """Raise UserError for a recipe whose blocks do not make a study."""
    if not study.targets or not study.arms or not study.pool:
        raise UserError("quality.pool, quality.targets and quality.arms must name a pool, a target and two arms")
    if recipe.select is None or recipe.warmup is None:
        raise UserError("a study of selectors needs the blocks `select` and `warmup`: both are its settings")
    if recipe.data != Data():
        raise UserError("data: a study of selectors does not read it; name its files in quality.targets")
    default = Select()
    for name in vars(default):
        if name not in _READ and getattr(recipe.select, name) != getattr(default, name):
            raise UserError(f"select.{name}: a study of selectors does not read it; see the block `quality`")
    near = recipe.select.hygiene.decontaminate
    if near is not None and near.action == "split":
        raise UserError("select.hygiene.decontaminate.action: passages of a study stay whole; set it to drop")
    check_cells(recipe)


def check_cells(recipe: Recipe, where: str = "") -> None:
    """Raise UserError for settings that the runs of a study cannot have. where: who set them."""
    from flatshift.finetune.planner.rules import RuleSettings, check_settings

    assert recipe.warmup is not None
    if not recipe.task.one_class:
        raise UserError(f"{where}a study of selectors fine-tunes classifiers of one class, not task.kind: "
                        f"{recipe.task.kind}{' with multi' * bool(recipe.task.multi)}")  # fmt: skip
    if recipe.warmup.task is not None:
        raise UserError(f"{where}warmup.task: a study of selectors warms up a decoder by packed rows; leave it out")
    if recipe.mesh.size > 1 or recipe.train.quantization is not None:
        raise UserError(f"{where}a study of selectors runs each cell in one process on the backbone as it is")
    for name in ("truncation", "overlong"):
        if getattr(recipe.train, name) is not None:
            raise UserError(f"{where}train.{name}: a study of selectors cuts texts at their right end; leave it out")
    refuse_in_study(recipe)
    check_settings(RuleSettings.of(recipe))


def refuse_in_study(recipe: Recipe) -> None:
    """Raise UserError for what the cells of a study, which train in memory, do not do."""
    check_rules(recipe, CELL_RULES)
    if recipe.adapter.projector is not None:
        raise UserError("adapter.projector: a study's cells encode their rows without features; leave it out")
    if recipe.train.compile:
        raise UserError("train.compile: a study's cells are too short to be compiled; leave it off")
    check_rules(recipe)
    if recipe.adapter.init in DATA_INITS or recipe.adapter.start is not None:
        raise UserError("adapter.start and an adapter.init that looks at data go with flatshift train and sweep only")
    if recipe.optimizer.kind != "adamw":
        raise UserError(f"optimizer.kind: a study trains with adamw, not {recipe.optimizer.kind}; leave it out")


def _leaves(keys: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Dotted keys, however they were nested; `-` and `_` alike."""
    for key, value in keys.items():
        name = before + key.replace("-", "_")
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def _check_rising(name: str, values: tuple[float, ...], least: int) -> None:
    if len(values) < least or any(not value > 0 for value in values) or list(values) != sorted(set(values)):
        raise ValueError(f"{name} must be rising numbers above 0, at least {least}; got {list(values)}")


def settings_tree(settings: Any) -> Any:
    """Return a settings dataclass as plain values, without nulls."""
    return drop_nulls(asdict(settings))
