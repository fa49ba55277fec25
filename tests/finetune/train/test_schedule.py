"""Learning rates are a pure function of the step and agree with torch's own schedules."""

from __future__ import annotations

import math

import pytest

from flatshift.finetune.atomic import write_json
from flatshift.finetune.config import Optimizer, Train
from flatshift.finetune.train.schedule import Schedule, learning_rate


def rates(steps, **settings):
    optimizer = Optimizer(lr=2.0, **settings)
    return [learning_rate(step, steps=steps, optimizer=optimizer) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_rises_linearly_to_the_peak_and_is_never_zero(schedule):
    found = rates(100, schedule=schedule, warmup=0.1)
    assert found[:11] == pytest.approx([2.0 * (k + 1) / 11 for k in range(11)])
    assert max(found) == 2.0 and min(found) > 0.0


def test_cosine_and_linear_agree_with_transformers_after_warm_up():
    import torch
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    for name, make in (("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)):
        peer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        scheduler = make(peer, 0, 40)
        theirs = []
        for _ in range(40):
            theirs.append(peer.param_groups[0]["lr"])
            peer.step()
            scheduler.step()
        assert rates(40, schedule=name, warmup=0.0) == pytest.approx(theirs)


def test_extremes():
    assert rates(1) == [2.0] and rates(3, schedule="constant", warmup=0.0) == [2.0] * 3
    assert rates(4, warmup=1.0) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert all(map(math.isfinite, rates(2, warmup=0.5)))


def extended(folder, steps, extend, *, warmup=0.25, made=8, planned=8, schedule="cosine"):
    optimizer = Optimizer(lr=2.0, warmup=warmup, schedule=schedule)
    end = learning_rate(made - 1, steps=planned, optimizer=optimizer)
    write_json(folder / "done.json", {"steps": made, "target_steps": planned, "lr": end})
    found = Schedule.of(Train(steps=steps, extend=extend), optimizer, folder)
    return [found(step) for step in range(steps)], found


def test_a_run_that_goes_on_after_its_end(tmp_path):
    before = rates(8, warmup=0.25)
    stretched, found = extended(tmp_path, 12, "stretch")
    assert stretched == rates(12, warmup=0.25) and found.line().endswith("of 12 steps (train.extend: stretch)")
    kept, found = extended(tmp_path, 12, "keep-end")
    assert kept == [*before, *[before[-1]] * 4] and "as it ended" in found.line()
    warmed, found = extended(tmp_path, 12, "rewarm")
    assert warmed == [*before, *rates(4, warmup=0.25)] and max(warmed[8:]) == 2.0
    assert f"from {warmed[8]:.3g} to {warmed[11]:.3g}, by a schedule of their own" in found.line()
    early, _ = extended(tmp_path, 12, "rewarm", made=5)  # stopped early
    assert early == [*before[:5], *rates(7, warmup=0.25)]
    same, found = extended(tmp_path, 8, "rewarm")  # that has ended and does not go on
    assert same == before and found.begin == 0
    assert extended(tmp_path, 12, "keep-end", schedule="constant", warmup=0.0)[0] == [2.0] * 12
