"""What a sweep and a comparison are asked for. Imports nothing heavy: the command line parses with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatshift.finetune.config import check_bounds


@dataclass(frozen=True, kw_only=True)
class StudyTask:
    """One task of a comparison: a file of rows and what it changes in the recipe."""

    file: str
    """Rows with their `split`, relative to the directory that `--data` names; or a path, or `sample:NAME`."""
    set: dict[str, Any] = field(default_factory=dict)
    """Recipe keys (dotted) and their values for this task."""
    train: int = 300
    """Labelled rows of one run, drawn by its seed from the rows that are neither validation nor test."""
    validation: int = 400
    """Rows that choose settings, drawn once for all."""
    test: int = 500
    """Rows that are judged once, drawn once for all from the split `test_split`."""
    test_split: str = "test"
    """The value of the column `split` that marks test rows; the training rows are those marked `train`."""

    def __post_init__(self) -> None:
        check_bounds(self, train=(1, None), validation=(1, None), test=(1, None))


@dataclass(frozen=True, kw_only=True)
class StudyMethod:
    """One method of a comparison: what it changes in the recipe, and which settings of it are tried."""

    set: dict[str, Any] = field(default_factory=dict)
    """Recipe keys (dotted) and their values for this method."""
    lr: tuple[float, ...] = ()
    """Learning rates of the first trials; empty: those of the comparison."""
    knobs: dict[str, tuple] = field(default_factory=dict)
    """The method's own keys (dotted) and the values tried, each with every learning rate."""
    confirmatory: bool = False
    """Named beforehand and run with all seeds; the others are exploratory, with `exploratory_seeds`."""
    tasks: tuple[str, ...] = ()
    """Tasks it is run on; empty: all."""
    note: str = ""
    """What it is, for the page."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods against a baseline on several tasks, by one protocol; `flatshift compare` runs it."""

    tasks: dict[str, StudyTask] = field(default_factory=dict)
    """Name → task."""
    methods: dict[str, StudyMethod] = field(default_factory=dict)
    """Name → method; all get the same number of trials on every task."""
    metric: str = "auto"
    """What methods are judged by, trials and final runs alike. `auto`: accuracy, where other tasks than classification
    are judged by their loss and stand beside the primary endpoint. Any other that all tasks are judged by, for example
    `f1_macro`, `numeric_match` or `loss`: the endpoint is its mean over all informative tasks."""
    baseline: str = "plain"
    """The method that the others are compared with."""
    controls: dict[str, str] = field(default_factory=dict)
    """Control → the method that must beat it for its idea to be the cause."""
    lr: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3)
    """Learning rates of the first trials."""
    rounds: int = 2
    """Further trials of every method, one after the other: beyond the edge of its learning rates if the best lies
    there, else between the best and its better neighbour."""
    seeds: int = 10
    """Runs of the baseline and the confirmatory methods: `train.seed` 0, 1, …"""
    exploratory_seeds: int = 5
    """Runs of the other methods, with the first of the same seeds."""
    tuning_seeds: tuple[int, ...] = (1_000_003, 1_000_033, 1_000_037)
    """`train.seed` of trials; never used for a final run. All trials run under the first, the `finalists` under all:
    near the edge of stability one seed may like a setting that breaks down under the next."""
    finalists: int = 2
    """Best trials of every method that run under all tuning seeds and are judged by their mean over them."""
    equal_time_above: float = 1.15
    """Methods whose step costs more CPU time than the baseline's by this factor run once more with as many steps as
    the baseline's time allows."""
    sharpness_sigma: float = 0.05
    """σ of E[L(w+ε)] − L(w): noise whose rows are σ times as long as the weight's."""
    sharpness_seeds: int = 2
    """Final runs of each method and task whose sharpness is measured; 0: none."""
    resamples: int = 2000
    """Bootstrap draws over seeds × test items."""

    def __post_init__(self) -> None:
        check_bounds(
            self, rounds=(0, None), seeds=(2, None), exploratory_seeds=(2, None), finalists=(1, None),
            equal_time_above=(1, None), sharpness_sigma=(0, None), sharpness_seeds=(0, None), resamples=(100, None),
        )  # fmt: skip
        check_bounds(
            self, rounds=(None, 1000), seeds=(None, 10_000), exploratory_seeds=(None, 10_000),
            sharpness_seeds=(None, 10_000), resamples=(None, 1_000_000),
        )  # fmt: skip
        _check_rates("lr", self.lr)
        for names in (self.tasks, self.methods):
            plain = [name.replace("_", "-") for name in names]
            for name in plain:
                if plain.count(name) > 1:
                    raise ValueError(
                        f"{'tasks' if names is self.tasks else 'methods'} has {name!r} twice (- and _ are equal)"
                    )
        if self.methods and self.baseline not in self.methods:
            raise ValueError(f"baseline is {self.baseline!r}, which is none of the methods {', '.join(self.methods)}")
        for control, of in self.controls.items():
            for name in (control, of):
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
            _check_rates(f"methods.{name}.lr", self.rates(method))
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
        """Learning rates of a method's first trials, rising."""
        return method.lr or self.lr

    @property
    def trials(self) -> int:
        """First trials of every method on every task."""
        method = self.methods.get(self.baseline, StudyMethod())
        return len(self.rates(method)) * math.prod(len(values) for values in method.knobs.values())

    def runs_on(self, name: str) -> list[str]:
        """Tasks of a method, in the order of `tasks`."""
        chosen = self.methods[name].tasks
        return [task for task in self.tasks if not chosen or task in chosen]

    def seeds_of(self, name: str) -> range:
        """Seeds of a method's final runs."""
        every = name == self.baseline or self.methods[name].confirmatory
        return range(self.seeds if every else min(self.exploratory_seeds, self.seeds))


def _check_rates(name: str, rates: tuple[float, ...]) -> None:
    if len(rates) < 2 or any(not rate > 0 for rate in rates) or list(rates) != sorted(set(rates)):
        raise ValueError(f"{name} must be at least two rising learning rates, got {list(rates)}")


# --------------------------------------------------------------------------------------------------------------- sweeps


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Which cells a sweep has, and how they are run; None: as the recipe's own `sweep` block says, or the default."""

    grid: tuple[str, ...] | None = None
    """key=v1,v2,… for each axis (random: also key=lo..hi and key=lo..hi:log); by default the recipe's own
    `sweep.grid`."""
    seeds: int | None = None
    """Values of train.seed, from the recipe's own (0) on; by default the recipe's own `sweep.seeds`."""
    design: Literal["grid", "paired", "random"] | None = None
    """All combinations, first values together and second together, or points drawn at random; grid by default."""
    points: int | None = None
    """How many points to draw (--design random)."""
    bisect: str | None = None
    """data.train.limit[=lo..hi]: find for each point how many training rows it still fits; written to emc.json."""
    epsilon: float | None = None
    """Mean train error up to which rows count as fitted (--bisect); 0.1 by default."""
    jobs: int | None = None
    """Processes that work on cells at the same time; by default one for each CUDA device, else 1."""
    devices: str = "auto"
    """auto (every CUDA device), cpu, or CUDA numbers such as 0,1; processes get them in turn."""
    max_cells: int | None = None
    """Refuse a plan of more cells (points times seeds) than this; 10000 by default."""
    part: str | None = None
    """i/n: run only this part of the cells, into a directory of its own (for arrays of jobs that share no disk)."""
    merge: tuple[Path, ...] = ()
    """Sweep directories whose finished cells are gathered in --out; nothing is trained, a missing cell is refused."""
    shared: bool = False
    """Take part in a sweep whose --out several hosts share: start the same command on each; a cell is trained by one of
    them, and what a dead host was at is taken over."""
    lease: float | None = None
    """Seconds without a sign of life after which another host's cell is taken over (--shared); 60 by default."""
    until: Literal["decided"] | None = None
    """decided: add seeds in steps, up to --seeds, until every curve has a verdict; the tests share their level out."""
    rerun_stale: bool = False
    """Run finished cells anew that another version of the code made."""
    rerun_failed: bool = False
    """Run cells anew that failed (no memory, a dead worker, rows that were refused), but for those that diverged."""
