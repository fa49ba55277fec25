"""Data position of a stage with skipped batches, and detection of loss spikes. Pure functions.

The batch of a step is a pure function of (step, skipped ranges), both of which a checkpoint holds, so a run that is
resumed after a spike sees the same batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..config import SpikeRecovery

Ranges = Sequence[Sequence[int]]
"""Skipped batches [first, stop), ascending, no two adjacent."""


def batch_index(step: int, skipped_ranges: Ranges) -> int:
    """Return the batch (from 0) of the step from `step` to `step + 1`: the step-th that is not skipped."""
    index = step
    for first, stop in skipped_ranges:
        if index < first:
            break
        index += stop - first
    return index


def merge_skipped_ranges(skipped_ranges: Ranges, first: int, stop: int) -> list[list[int]]:
    """Return the union of `skipped_ranges` and the batches [first, stop)."""
    merged: list[list[int]] = []
    for low, high in sorted([tuple(part) for part in skipped_ranges] + [(first, stop)]):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return merged


def spike_limit(losses: Sequence[float], spikes: SpikeRecovery) -> float:
    """Return the loss above which the next step is a spike (`flatshift.finetune.config.SpikeRecovery`); infinite before
    a full window.

    losses: of the last steps, at most `spikes.window` of them.
    """
    if len(losses) < spikes.window:
        return math.inf
    median = statistics.median(losses)
    # 1.4826 · MAD estimates the standard deviation; at least 1 %, so that noise on a flat stretch is no spike
    spread = max(1.4826 * statistics.median(abs(loss - median) for loss in losses), abs(median) / 100)
    return median + spikes.threshold * spread


def rollback_step(step: int, spikes: SpikeRecovery, save_every: int) -> int:
    """Return the step of the regular checkpoint to roll back to for a spike in the step from `step` to `step + 1`.

    The newest multiple of `save_every` that is at least `spikes.back` steps before, or 0. Not simply the newest file:
    an interrupted run, which saved at other steps too, must roll back as far as an uninterrupted one.
    """
    return max((step - spikes.back) // save_every * save_every, 0)
