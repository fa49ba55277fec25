"""The arms of the study along rank."""

from __future__ import annotations

import numpy as np

from benchmarks.rank_study import MIDDLE, RANKS, RATES, TRIAL, arms, curve_of, name_cell


def test_every_rank_has_its_own_rate_in_one_arm_alone_and_a_diverged_rate_is_never_chosen() -> None:
    best = {rank: RATES["adamw"][-1 - min(RANKS.index(rank), 3)] for rank in RANKS}  # the larger the rank, the lower
    cells = {
        name_cell("adamw", rank, rate, TRIAL): {"train.loss": abs(np.log(rate / best[rank]))}
        for rank in RANKS
        for rate in RATES["adamw"]
    }
    muon = {rate: {"train.loss": None if rate == RATES["lora-muon"][0] else rate} for rate in RATES["lora-muon"]}
    cells |= {name_cell("lora-muon", MIDDLE, rate, TRIAL): figure for rate, figure in muon.items()}
    chosen = arms(cells)
    assert chosen["AdamW, a rate for each rank"] == ("adamw", tuple(best.values()))
    assert chosen["AdamW, one rate"] == ("adamw", (best[MIDDLE],) * len(RANKS))
    assert chosen["LoRA-Muon, one rate"] == ("lora-muon", (RATES["lora-muon"][1],) * len(RANKS))


def test_a_curve_has_a_row_a_seed_and_a_diverged_run_is_not_a_number() -> None:
    rates = (1e-3,) * len(RANKS)
    figures = {"test.error": 0.2, "train.error": 0.0, "train.loss": 0.1, "tested": 595}
    cells: dict[str, dict[str, float | None]] = {
        name_cell("adamw", rank, 1e-3, seed): {**figures} for rank in RANKS for seed in range(3)
    }
    cells[name_cell("adamw", RANKS[-1], 1e-3, 2)] = dict.fromkeys(figures)
    curve = curve_of(cells, "adamw", rates, 3)
    assert curve.test.shape == (3, len(RANKS)) and curve.items == 595
    assert np.argwhere(np.isnan(curve.test)).tolist() == [[2, len(RANKS) - 1]]
