"""Settings of sweeps and comparisons. Imports nothing heavy, since the command line parses with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatshift.finetune.config import check_bounds


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
        check_bounds(
            self, rounds=(0, None), seeds=(2, None), exploratory_seeds=(2, None), finalists=(1, None),
            equal_time_above=(1, None), sharpness_sigma=(0, None), sharpness_seeds=(0, None), resamples=(100, None),
        )  # fmt: skip
        check_bounds(
            self, rounds=(None, 1000), seeds=(None, 10_000), exploratory_seeds=(None, 10_000),
            sharpness_seeds=(None, 10_000), resamples=(None, 1_000_000),
        )  # fmt: skip
        _check_learning_rates("lr", self.lr)
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
class SweepOptions:
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
    """Mean train error up to which rows count as fitted (--bisect); 0.1 by default."""
    jobs: int | None = None
    """Processes that work on cells at the same time; by default one for each CUDA device, else 1."""
    devices: str = "auto"
    """auto (every CUDA device), cpu, or CUDA numbers such as 0,1; processes get them in turn."""
    max_cells: int | None = None
    """Refuse a plan of more cells (points times seeds) than this; 10000 by default."""
    part: str | None = None
    """i/n: run only this part of the cells, in a separate directory (for job arrays without a shared disk)."""
    merge: tuple[Path, ...] = ()
    """Sweep directories whose finished cells are gathered in --out; nothing is trained, a missing cell is refused."""
    shared: bool = False
    """Take part in a sweep whose --out is shared by several hosts: start the same command on each. Each cell is trained
    by one host; the cells of a dead host are taken over."""
    lease: float | None = None
    """Seconds without a heartbeat after which another host's cell is taken over (--shared); 60 by default."""
    until: Literal["decided"] | None = None
    """decided: add seeds in steps, up to --seeds, until every curve has a verdict; the error level is split among the
    tests."""
    rerun_stale: bool = False
    """Rerun finished cells that another version of the code produced."""
    rerun_failed: bool = False
    """Rerun cells that failed (out of memory, a dead worker, refused rows), except those that diverged."""
