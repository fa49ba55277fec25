"""Where a stage is in its data when batches are left out, and which losses are spikes. Pure functions.

The batch of an update is a pure function of (update, ranges left out), both of which a checkpoint holds, so a run that
is resumed after a spike sees the batches that it would have seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..bounds import check_bounds


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """What to do when the loss jumps: go back and leave out the batches around (PaLM, arXiv 2204.02311, §5.1).

    An update is a spike where its loss is above m + `threshold` · max(1.4826 · MAD, m/100), m the median of the losses
    of the last `window` updates and MAD their median distance from it.
    """

    window: int = 64
    """Updates whose losses say what is usual; none is a spike before so many."""
    threshold: float = 8.0
    """Robust standard deviations above the median."""
    back: int = 100
    """Updates before the spike that are undone at least: training goes on from the newest regular checkpoint (a
    multiple of `train.save_every`) that is so old."""
    skip: int = 200
    """Batches that are left out from there on; always at least those up to the spike."""
    most: int = 3
    """Spikes that a stage goes back for; the next one stops it."""

    def __post_init__(self) -> None:
        check_bounds(self, window=(4, None), threshold=(1, None), back=(0, None), skip=(1, None), most=(1, None))


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


def leave_out(left_out: Ranges, first: int, stop: int) -> list[list[int]]:
    """`left_out` and the batches [first, stop) together."""
    merged: list[list[int]] = []
    for low, high in sorted([tuple(part) for part in left_out] + [(first, stop)]):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return merged


def spike_limit(losses: Sequence[float], spikes: Spikes) -> float:
    """The loss above which the next update is a spike (`finetune.config.Spikes`); infinite before a full window.

    losses: of the last updates, at most `spikes.window` of them.
    """
    if len(losses) < spikes.window:
        return math.inf
    median = statistics.median(losses)
    # 1.4826 · MAD is the standard deviation of normal values; a flat stretch does not make noise of 1 % a spike
    spread = max(1.4826 * statistics.median(abs(loss - median) for loss in losses), abs(median) / 100)
    return median + spikes.threshold * spread


def way_back(step: int, spikes: Spikes, save_every: int) -> int:
    """The regular checkpoint that a spike in the update from `step` to `step + 1` leads back to.

    The newest multiple of `save_every` that is at least `spikes.back` updates before, or 0. Not simply the newest file:
    a run that was interrupted, and so saved at other steps too, must go back as far as one that was not.
    """
    return max((step - spikes.back) // save_every * save_every, 0)
