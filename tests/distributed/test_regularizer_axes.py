"""The rules about regularizers and axes are the truth: what they allow equals one process, what they refuse cannot run.

Every kind and scope meets every axis, with dropout, by the training loop on two ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from flatshift.finetune.config import Mesh
from flatshift.finetune.planner.rules import RuleSettings, broken_rule
from flatshift.regularizers import ASAM, BAR, GGPO, MGPO, MSAM, RegularizerConfig, RegularizerError
from tests.distributed.test_dropout_mesh import ADAPTER, Case, apart, course, save
from tests.support.distributed_ranks import run_ranks

AXES: dict[str, Mesh] = {
    "replicate": Mesh(replicate=2),
    "dp": Mesh(dp=2),
    "dp, zero 1": Mesh(dp=2, zero=1),
    "tp": Mesh(tp=2),
    "tp, tokens split": Mesh(tp=2, sequence_parallel=True),
    "pp": Mesh(pp=2),
    "cp": Mesh(cp=2),
    "cp, zero 2": Mesh(cp=2, zero=2),
}
METHODS: dict[str, RegularizerConfig] = {
    **{kind.kind: kind() for kind in get_args(RegularizerConfig)},
    "ggpo, microbatch": GGPO(scope="microbatch"),
    "ggpo, sample": GGPO(scope="sample"),
    "ggpo, over the model": GGPO(normalize="model", control="shuffled"),
    "mgpo, code": MGPO(form="code"),
    "obar": BAR(form="obar", alpha=10.0),
    "asam, far": ASAM(rho=2.0),
    "msam, up": MSAM(sign=1),
}
BOUND = 1e-5


def case(method: str, axis: str) -> Case:
    # the bound of NEFTune's noise is that of a rank's own padding
    kind = "llama-even" if method == "neftune" else "llama"
    return Case(kind, AXES[axis], regularizer=METHODS[method])


def tried(pairs: list[tuple[str, str]], sources: dict[str, str], folder: str) -> dict[tuple[str, str], Any]:
    """What each pair computes, or what it is refused with."""
    found: dict[tuple[str, str], Any] = {}
    for number, (method, axis) in enumerate(pairs):
        one = case(method, axis)
        try:
            found[method, axis] = course(one, sources[one.kind], Path(folder) / str(number))
        except RegularizerError as error:
            found[method, axis] = str(error)
    return found


def refused(method: str, axis: str) -> bool:
    one = case(method, axis)
    recipe = RuleSettings(AXES[axis], one.train(), ADAPTER, one.task, regularizer=METHODS[method])
    return broken_rule(recipe) is not None


@pytest.mark.slow
def test_what_is_allowed_equals_one_process_and_what_is_refused_cannot_run(tmp_path: Path) -> None:
    sources = {kind: str(save(kind, tmp_path / kind)) for kind in ("llama", "llama-even")}
    pairs = [(method, axis) for method in METHODS for axis in AXES]
    alone = {}
    for method in METHODS:
        one = replace(case(method, "dp"), mesh=Mesh())
        alone[method] = course(one, sources[one.kind], tmp_path / f"alone, {method}")
    found = run_ranks(tried, 2, pairs, sources, str(tmp_path))
    wrong = {}
    for method, axis in pairs:
        first, second = (rank[method, axis] for rank in found)
        if isinstance(first, str) or isinstance(second, str):
            if not (refused(method, axis) and isinstance(first, str) and isinstance(second, str)):
                wrong[method, axis] = first
        elif refused(method, axis):
            wrong[method, axis] = "refused by the rules, but it runs"
        elif (far := apart(first, alone[method])) > BOUND:
            wrong[method, axis] = far
    assert not wrong, wrong
