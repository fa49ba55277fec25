"""What a study of selectors is told: pool, targets, arms, budgets and seeds. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.studies.selection_quality.keys import check_arm_keys, check_embedder_keys, check_target_keys
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.config import MAX_LENGTH, check_bounds

Source = Literal["selector", "matched", "form", "pool", "target", "none"]


@dataclass(frozen=True, kw_only=True)
class QualityTarget:
    """One target: a labelled file of one domain."""

    file: str
    """Rows with `text`, `label` and `split`, relative to the directory that `--data` names; or a path, or
    `sample:NAME`."""
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
    """Rows that final runs and those of the embedder comparison are judged on, drawn once for all from the split
    `test_split`."""
    test_split: str = "test"
    """The value of the column `split` that marks test rows; the training rows are those marked `train`."""
    budgets: tuple[int, ...] = ()
    """Passages to select; empty: those of the study."""

    def __post_init__(self) -> None:
        check_bounds(self, texts=(1, None), labels=(1, None), validation=(1, None), test=(1, None))
        if self.labels > self.texts:
            raise ValueError(f"labels: {self.labels} labelled rows are more than the {self.texts} texts they belong to")
        _check_budgets(self.budgets)
        check_target_keys(self.set)


@dataclass(frozen=True, kw_only=True)
class QualityArm:
    """One way to warm up."""

    source: Source = "selector"
    """Where the warm-up's text comes from: a `selector`'s choice; a random draw `matched` to another arm's choice in
    hidden domain and length; what is nearest to the target in `form` alone: moore-lewis on case, digits, marks and
    spacing without any word; the whole `pool`; the `target` texts themselves; or `none`: no warm-up."""
    set: dict[str, Any] = field(default_factory=dict)
    """Recipe keys (dotted) and their values for this arm: those of `select.method`, and no others."""
    like: str = ""
    """The arm that a `matched` draw follows."""
    times: int = 1
    """How often the warm-up reads the choice: of budgets in tokens the best passages that hold budget/times of them."""
    note: str = ""
    """What it is, for the page."""

    def __post_init__(self) -> None:
        check_arm_keys(self.set, self.source)
        check_bounds(self, times=(1, None))
        if self.times > 1 and self.source != "selector":
            raise ValueError(f"times: an arm of source {self.source} runs no selector; leave it out")


@dataclass(frozen=True, kw_only=True)
class QualityEmbedder:
    """One embedder of the embedder comparison."""

    set: dict[str, Any] = field(default_factory=dict)
    """Recipe keys (dotted) and their values: those of `select.embedder`, and no others."""
    distil: str = ""
    """For static vectors: the encoder whose states of single tokens become the table, as model2vec does it."""
    note: str = ""
    """What it is, for the page."""

    def __post_init__(self) -> None:
        check_embedder_keys(self.set)


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
    """Name → target."""
    arms: dict[str, QualityArm] = field(default_factory=dict)
    """Name → arm; all get the same number of trials on every target."""
    baseline: str = "random"
    """The arm that the others are compared with."""
    focus: str = "gotd"
    """The arm that is compared with every other one."""
    budgets: tuple[int, ...] = (1000, 5000, 20000)
    """Passages to select."""
    primary_budget: int = 5000
    """The budget of the primary endpoint and of all trials."""
    unit: Literal["passages", "tokens"] = "passages"
    """What budgets count. `tokens` of the backbone: the best passages that hold so many, and the warm-up takes as many
    steps as read them through once."""
    form: bool = False
    """Whether final runs have a second endpoint, nats of texts in one plain form: the chosen passages and the judged
    texts alike in lower case with one space between words and marks, so that only words can tell selectors apart."""
    forgetting: bool = False
    """Whether final runs have nats of passages of the pool as a further endpoint: what the warm-up costs elsewhere."""
    packed: int = 256
    """Tokens of a warm-up row: passages end to end, cut to this length, so that every arm has as many tokens."""
    judged_length: int = 128
    """Tokens of a judged text that count for its perplexity."""
    lr: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Learning rates of the first warm-up trials."""
    rounds: int = 1
    """Further trials of every arm: beyond the edge if the best lies there, else between it and its better neighbour."""
    fine_tune_lr: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Learning rates of the fine-tune, tried once per target without warm-up; the best serves every arm."""
    fine_tune_budgets: tuple[int, ...] = ()
    """Budgets after which the fine-tune runs too; empty: all. Arms without a budget always have it."""
    seeds: int = 5
    """Final runs of every arm: `train.seed` 0, 1, …"""
    tuning_seed: int = 1_000_003
    """`train.seed` of all trials; never used for a final run."""
    embedders: dict[str, QualityEmbedder] = field(default_factory=dict)
    """Name → embedder; what `focus` selects with each is compared on a part of the pool."""
    embedder_rows: int = 40_000
    """Passages of that part, drawn once for all."""
    embedder_budget: int = 1000
    """Passages to select from it."""
    embedder_seeds: int = 3
    """Runs of each embedder, with the first of the same seeds."""
    notes: tuple[str, ...] = ()
    """Sentences that the protocol ends with: what a reader must know of how this study came about."""

    def __post_init__(self) -> None:
        check_bounds(
            self, pool_rows=(1, None), primary_budget=(1, None), packed=(2, None), judged_length=(2, None),
            rounds=(0, None), seeds=(2, None), tuning_seed=(0, 2**63 - 1), embedder_rows=(1, None),
            embedder_budget=(1, None), embedder_seeds=(1, None),
        )  # fmt: skip
        check_bounds(self, rounds=(None, 1000), seeds=(None, 10_000), embedder_seeds=(None, 10_000))
        check_bounds(self, packed=(None, MAX_LENGTH), judged_length=(None, MAX_LENGTH))
        for name in ("lr", "fine_tune_lr"):
            rates = getattr(self, name)
            if len(rates) < 2 or any(not rate > 0 for rate in rates) or list(rates) != sorted(set(rates)):
                raise ValueError(f"{name} must be at least two rising learning rates, got {list(rates)}")
        _check_budgets(self.budgets)
        if not self.budgets:
            raise ValueError("budgets must name at least one number of passages")
        if self.tuning_seed < self.seeds:
            raise ValueError(f"tuning_seed {self.tuning_seed} is also the seed of a final run; take a larger one")
        self._check_arms()
        for name in self.targets:
            if self.primary_budget not in self.budgets_of(name):
                raise ValueError(
                    f"primary_budget {self.primary_budget} is none of the budgets of target {name}: "
                    f"{', '.join(map(str, self.budgets_of(name)))}"
                )

    def _check_arms(self) -> None:
        if not self.arms:
            return
        for key in ("baseline", "focus"):
            arm = self.arms.get(getattr(self, key))
            if arm is None or arm.source != "selector":
                raise ValueError(f"{key} is {getattr(self, key)!r}, which is no arm with a selector")
        for name, arm in self.arms.items():
            if arm.times > 1 and self.unit != "tokens":
                raise ValueError(f"arms: {name} reads its choice {arm.times} times, which needs unit: tokens")
            if arm.source == "matched" and (arm.like not in self.arms or self.arms[arm.like].source != "selector"):
                raise ValueError(f"arms: {name} is matched to {arm.like!r}, which is no arm with a selector")
            if arm.source != "matched" and arm.like:
                raise ValueError(f"arms: {name} is like {arm.like!r}, but its source is {arm.source}, not matched")

    def budgets_of(self, target: str) -> tuple[int, ...]:
        """Budgets of a target, rising."""
        return self.targets[target].budgets or self.budgets

    def has_budget(self, arm: str) -> bool:
        """Whether an arm selects."""
        return self.arms[arm].source in ("selector", "matched", "form")

    def fine_tunes(self, budget: int | None) -> bool:
        """Whether the fine-tune runs after this budget."""
        return budget is None or not self.fine_tune_budgets or budget in self.fine_tune_budgets


@dataclass(frozen=True, kw_only=True)
class StudyRecipe(Recipe):
    """A recipe that may have a study of selectors."""

    quality: Quality | None = None
    """Selectors, targets and protocol of the study."""


def _check_budgets(budgets: tuple[int, ...]) -> None:
    if any(budget < 1 for budget in budgets) or list(budgets) != sorted(set(budgets)):
        raise ValueError(f"budgets must be rising numbers of passages, got {list(budgets)}")
