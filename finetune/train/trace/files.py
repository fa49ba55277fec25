"""Trace files of a run: `trace.jsonl`, one line per recorded step, and `trace.json`, which describes these lines.

A line has `stage, attempt, step, tokens, lr, time_s, record_s` and the metrics of `flatshift.finetune.train.trace`,
flat; missing values are null. After a resume the last line of a step wins. The description has the recorded steps,
numbers of rows, Adam's stability threshold, and notes on metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...config import TraceRecording
from ...run_directory import TRACE, read_metrics

ABOUT = "trace.json"


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run directory's trace by ascending step, one per stage and step; empty if nothing was
    recorded.

    A truncated last line (the process was killed while writing) is skipped; any other line that is not a JSON object is
    a UserError.
    """
    return sorted(read_metrics(Path(path) / TRACE), key=lambda line: int(line.get("step") or 0))


def align_to_plan(lines: Sequence[dict[str, Any]], steps: Sequence[int], status: str) -> list[dict[str, Any]]:
    """Return the recorded lines at the planned `steps`, then, marked with `status`, those that the run did not reach.

    A run that stopped early has a line of its last step too, which other runs may lack: it is omitted.
    """
    planned = set(steps)
    recorded = [line for line in lines if int(line["step"]) in planned]
    last = int(lines[-1]["step"]) if lines else -1
    stage = lines[-1].get("stage") if lines else "fine-tune"
    return [*recorded, *({"stage": stage, "step": step, "status": status} for step in steps if step > last)]


def recorded_steps(record: TraceRecording, total_steps: int) -> tuple[int, ...]:
    """Return the ascending numbers of completed steps to record, from 0 (before any) to `total_steps`.

    `log`: the powers of 2^(1/per_doubling), rounded. Listed steps beyond `total_steps` are omitted.
    """
    if record.steps == "log":
        steps, power = [], 0
        while (step := round(2 ** (power / record.per_doubling))) <= total_steps:
            steps.append(step)
            power += 1
    else:
        steps = list(record.steps)
    return tuple(sorted({0, total_steps, *(step for step in (*steps, *record.sharpness) if step <= total_steps)}))


def stability_threshold(beta1: float) -> float:
    """Return λ_max(P^-½ H P^-½) · lr above which Adam oscillates: (2 + 2β1)/(1 − β1), which is 38 for β1 = 0.9.

    P is the preconditioner √v̂ + ε, taken as frozen (Cohen et al., arXiv 2207.14484).
    """
    return (2 + 2 * beta1) / (1 - beta1)
