"""Where a stage is in its data when batches are left out, and which losses are spikes. Pure functions.

The batch of an update is a pure function of (update, ranges left out), both of which a checkpoint holds, so a run that
is resumed after a spike sees the batches that it would have seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..config import Spikes

Ranges = Sequence[Sequence[int]]
"""Batches [first, stop) that are left out, ascending, none touching the next."""


def batch_index(step: int, left_out: Ranges) -> int:
    """The batch (from 0) of the update from `step` to `step + 1`: the step-th that is not left out."""
    index = step
    for first, stop in left_out:
        if index < first:
            break
        index += stop - first
    return index


def merge_skipped_ranges(left_out: Ranges, first: int, stop: int) -> list[list[int]]:
    """`left_out` and the batches [first, stop) together."""
    merged: list[list[int]] = []
    for low, high in sorted([tuple(part) for part in left_out] + [(first, stop)]):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return merged


def spike_limit(losses: Sequence[float], spikes: Spikes) -> float:
    """The loss above which the next update is a spike (`flatshift.finetune.config.Spikes`); infinite before a full
    window.

    losses: of the last updates, at most `spikes.window` of them.
    """
    if len(losses) < spikes.window:
        return math.inf
    median = statistics.median(losses)
    # 1.4826 · MAD is the standard deviation of normal values; a flat stretch does not make noise of 1 % a spike
    spread = max(1.4826 * statistics.median(abs(loss - median) for loss in losses), abs(median) / 100)
    return median + spikes.threshold * spread


def rollback_step(step: int, spikes: Spikes, save_every: int) -> int:
    """The regular checkpoint that a spike in the update from `step` to `step + 1` leads back to.

    The newest multiple of `save_every` that is at least `spikes.back` updates before, or 0. Not simply the newest file:
    a run that was interrupted, and so saved at other steps too, must go back as far as one that was not.
    """
    return max((step - spikes.back) // save_every * save_every, 0)
