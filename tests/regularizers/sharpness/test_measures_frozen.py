"""Measuring leaves the model alone, and measures what is asked for of the loss that is given."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatshift.regularizers.sharpness import Sharpness, measure
from flatshift.regularizers.sharpness.spaces import AdapterSpace, FullSpace
from tests.support.sharpness_models import IDS, SMALL, SPACES, both_spaces, everything, loss_of, objective, tiny


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"lora_dropout": 0.5}], ids=["lora", "dora", "dropout"])
def test_measuring_leaves_no_trace(settings: dict[str, Any]) -> None:
    model = tiny(**settings)
    model.get_submodule("base_model.model.head").eval()  # a mode of its own stays
    before, generator = everything(model), torch.get_rng_state()
    found = measure(model, lambda: loss_of(model, IDS), SMALL, seed=3)
    assert everything(model) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert set(found.measures) == {"adapter", "full"}
    assert all(math.isfinite(e.value) for es in found.measures.values() for e in es.values())
    again = measure(model, lambda: loss_of(model, IDS), SMALL, seed=3)
    assert again.as_dict()["measures"] == found.as_dict()["measures"]  # dropout is off, draws are fixed
    other = measure(model, lambda: loss_of(model, IDS), SMALL, seed=4)
    for kind in SPACES:
        assert other.measures[kind]["trace"].value != found.measures[kind]["trace"].value


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@both_spaces
def test_an_exception_leaves_no_trace(kind: Any, error: type[BaseException]) -> None:
    model = tiny()
    before = everything(model)
    settings = Sharpness(spaces=(kind,), lanczos=2, probes=1, sigmas=(0.05,), draws=1, rhos=(0.1,), plane_points=0)
    calls: list[int] = []
    for at in (4, 18, 24, 28):  # in a gradient, the noise, the ascent, a slice
        calls.clear()

        def loss(at: int = at) -> Iterator[Tensor]:
            calls.append(1)
            yield 0.5 * loss_of(model, IDS)
            if len(calls) == at:
                raise error
            yield 0.5 * loss_of(model, IDS)

        with pytest.raises(error):
            measure(model, loss, settings)
        assert len(calls) == at
        assert everything(model) == before


def test_terms_of_a_loss_are_its_sum_and_progress_stays_within_what_was_announced() -> None:
    model = tiny()
    told: list[tuple[int, str]] = []
    halves = [IDS[:2], IDS[2:]]

    def terms() -> Iterator[Tensor]:
        for rows in halves:
            yield loss_of(model, rows) * len(rows) / len(IDS)

    parts = measure(model, terms, SMALL, progress=lambda passes, what: told.append((passes, what)))
    whole = measure(model, lambda: loss_of(model, IDS), SMALL)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    for kind in SPACES:
        for name, each in whole.measures[kind].items():
            assert parts.measures[kind][name].value == pytest.approx(each.value, rel=1e-4, abs=1e-10), name
    counts = [passes for passes, _ in told]
    assert counts == sorted(counts) and 0.8 * SMALL.passes() < counts[-1] <= SMALL.passes()
    assert {"adapter: λ_max", "full: plane"} <= {what for _, what in told}
    told.clear()
    few = replace(SMALL, lanczos=0, probes=0, rhos=())
    measure(model, lambda: loss_of(model, IDS), few, progress=lambda passes, what: told.append((passes, what)))
    assert told[-1][0] <= few.passes()


def test_what_is_only_asked_for_is_measured() -> None:
    model = tiny()
    settings = Sharpness(
        spaces=("adapter",), lanczos=0, probes=0, sigmas=(), rhos=(0.1,), ascent=1, lines=0, plane_points=0
    )
    found = measure(model, lambda: loss_of(model, IDS), settings)
    assert list(found.measures) == ["adapter"] and list(found.measures["adapter"]) == ["sam_rho_0.1"]
    assert not found.lines and not found.planes
    gradient = AdapterSpace(model).gradient(objective(model))[1]
    assert found.about["adapter"]["gradient_norm"] == pytest.approx(float(gradient.norm()))
    assert found.measures["adapter"]["sam_rho_0.1"].value == pytest.approx(0.1 * float(gradient.norm()), rel=0.5)


def test_a_head_trained_whole_is_held_fixed() -> None:
    model = tiny(modules_to_save=["head"])
    assert AdapterSpace(model).size == AdapterSpace(tiny()).size == 2 * (8 + 8) * 2 + 2 * (8 + 12)
    assert FullSpace(model).size == 8 * 8 * 2 + 12 * 8
