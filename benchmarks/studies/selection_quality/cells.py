"""The four kinds of cells: the pool, its features, a selection, a training run. Frozen, small, sent to workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flatshift.experiments.recipe.schema import Recipe


@dataclass(frozen=True)
class TargetRows:
    """A target's file and how its rows are split."""

    file: str
    sha256: str
    texts: int
    labels: int
    validation: int
    test: int
    test_split: str
    domains: tuple[str, ...]

    @property
    def identity(self) -> list[Any]:
        """What its rows depend on, wherever the file lies."""
        return [self.sha256, self.texts, self.labels, self.validation, self.test, self.test_split]


@dataclass(frozen=True)
class PoolCell:
    """The pool, cleaned and stored."""

    key: str
    file: str
    tags: str
    rows: int | None
    recipe: Recipe
    targets: tuple[TargetRows, ...]
    """Targets whose texts and judged rows the pool is kept clear of."""

    kind: Literal["pool"] = "pool"

    def __hash__(self) -> int:  # settings hold mappings
        return hash(self.key)

    @property
    def label(self) -> str:
        """For a person."""
        return "pool"


@dataclass(frozen=True)
class FeaturesCell:
    """The pool's features by one embedder."""

    key: str
    name: str
    """Of the embedder; empty: the study's own."""
    recipe: Recipe
    pool: PoolCell
    distil: str
    rows: int | None
    """A part of the pool; None: all."""

    kind: Literal["features"] = "features"

    def __hash__(self) -> int:  # settings hold mappings
        return hash(self.key)

    @property
    def label(self) -> str:
        """For a person."""
        return f"features {self.name}".strip()


@dataclass(frozen=True)
class SelectionCell:
    """What one arm selects for one target under one seed, for all budgets."""

    key: str
    arm: str
    target: str
    seed: int
    embedder: str | None
    recipe: Recipe
    pool: PoolCell
    features: FeaturesCell
    rows: TargetRows
    budgets: tuple[int, ...]
    each: bool
    """Whether every budget has a selection of its own, as the method shapes it for one size; else one order serves
    all, and a smaller budget takes its beginning."""
    like: str | None
    """Key of the selection that a matched draw follows."""
    unit: str = "passages"
    """What budgets count."""
    form: bool = False
    """Whether form alone is looked at."""
    times: int = 1
    """How often a budget in tokens reads the choice."""

    kind: Literal["selection"] = "selection"

    @property
    def label(self) -> str:
        """For a person."""
        by = f" by {self.embedder}" if self.embedder else ""
        return f"selection {self.arm}{by} for {self.target}, seed {self.seed}"


@dataclass(frozen=True)
class TrainingCell:
    """One run: warm-up, perplexity, and where asked for the fine-tune."""

    key: str
    kind: str
    """`trial`, `fine-tune trial`, `final` or `embedder`."""
    arm: str
    source: str
    target: str
    budget: int | None
    seed: int
    lr: float | None
    """Of the warm-up; None: there is none."""
    fine_tune_lr: float | None
    """None: no fine-tune."""
    embedder: str | None
    recipe: Recipe
    selection: str | None
    """Key of the selection."""
    pool: PoolCell
    rows: TargetRows
    packed: int
    judged_length: int
    form: bool = False
    """Whether it is judged in one plain form, too."""
    forgetting: bool = False
    """Whether it is judged on passages of the pool, too."""

    @property
    def judged(self) -> Literal["validation", "test"]:
        """Which rows it is judged on: trials never see test rows."""
        return "validation" if self.kind.endswith("trial") else "test"

    @property
    def label(self) -> str:
        """For a person."""
        name = self.arm or "no warm-up"
        size = f" {self.budget:,}" if self.budget else ""
        rates = "".join(f", {what} {lr:g}" for what, lr in (("lr", self.lr), ("fine-tune", self.fine_tune_lr)) if lr)
        return f"{self.kind} {name}{size} on {self.target}{rates}, seed {self.seed}"
