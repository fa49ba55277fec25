"""Traces of cells that finished after the tables of their sweep were written."""

import json
import math

import pytest

from flatshift.experiments.results.sweep import read_sweep
from flatshift.finetune.errors import UserError

STEPS = (0, 1, 2, 4, 8)


def line(step, value, **more):
    return json.dumps({"stage": "fine-tune", "attempt": 1, "step": step, "train.loss": value, "grad.a": None, **more})


def directory(out, traces, *, planned=STEPS, status="done", axes=None):
    """A killed sweep's directory: one cell for each text of `traces`; `axes` in place of their ranks."""
    for number, text in enumerate(traces):
        cell = out / "cells" / f"{number:016x}"
        cell.mkdir(parents=True)
        point = {"adapter.rank": 2**number} if axes is None else axes[number]
        result = {"point": point, "seed": number % 2, "status": status, "reason": None}
        result |= {"seconds": 1.0, "flatshift": "0.3.0", "metrics": {"test": {"loss": {"value": 0.5}}}}
        (cell / "result.json").write_text(json.dumps(result))
        (cell / "trace.jsonl").write_text(text)
        if planned is not None:
            (cell / "trace.json").write_text(json.dumps({"steps": list(planned)}))
    return out


WHOLE = "".join(line(step, 1 / (step + 1)) + "\n" for step in STEPS)
TRACES = {
    "numbers of two types": "".join(line(step, 1 if step == 0 else 0.5) + "\n" for step in STEPS),
    "no number": WHOLE.replace("0.5", "NaN"),
    "infinite": WHOLE.replace("0.5", "Infinity"),
    "torn": WHOLE + '{"stage": "fine',
    "no last line break": WHOLE[:-1],
    "written again": WHOLE + line(8, 0.7, attempt=2) + "\n",
    "undone": WHOLE[: WHOLE.rindex('{"stage')] + line(4, 9.0, rewound_to=2) + "\n" + line(4, 0.3) + "\n",
    "out of order": "\n".join(reversed(WHOLE.splitlines())) + "\n",
    "another step": WHOLE.replace('"step": 8', '"step": 7'),
    "further keys": WHOLE.replace('"grad.a": null', '"grad.a": null, "lambda_max": 3.5'),
    "a list": WHOLE.replace('"grad.a": null', '"grad.a": [1, 2]'),
    "a date": WHOLE.replace('"grad.a": null', '"grad.a": "2026-01-01"'),
    "an empty line": WHOLE.replace("\n", "\n\n", 1),
    "short": "".join(line(step, 0.5) + "\n" for step in STEPS[:3]),
    "none": "",
}


LOSSES = {0: 1.0, 1: 1 / 2, 2: 1 / 3, 4: 1 / 5, 8: 1 / 9}
EXPECTED = {
    "numbers of two types": {0: 1.0, 1: 0.5, 2: 0.5, 4: 0.5, 8: 0.5},
    "no number": LOSSES | {1: math.nan},
    "infinite": LOSSES | {1: math.inf},
    "written again": LOSSES | {8: 0.7},
    "undone": LOSSES | {4: 0.3, 8: None},
    "another step": LOSSES | {8: None},
    "short": {0: 0.5, 1: 0.5, 2: 0.5, 4: None, 8: None},
    "none": dict.fromkeys(STEPS),
}
"""Loss by step, None where the cell stopped before it; of all other forms it is that of a whole trace."""


def recorded(data, cell=1):
    """Step → loss in the rows of a cell's trace."""
    rows = [row for row in data.trace.table.to_pylist() if row["cell"] == f"{cell:016x}"]
    assert all((row.get("status") == "stopped early") == (row["train.loss"] is None) for row in rows)
    return {row["step"]: row["train.loss"] for row in rows}


@pytest.mark.parametrize("kind", TRACES)
def test_the_last_line_of_each_planned_step_counts(tmp_path, kind):
    data = read_sweep(directory(tmp_path, [WHOLE, TRACES[kind], WHOLE]))
    assert recorded(data) == pytest.approx(EXPECTED.get(kind, LOSSES), nan_ok=True)
    assert recorded(data, 0) == recorded(data, 2) == pytest.approx(LOSSES) and len(data.trace) == 15


def test_lists_become_text_and_further_keys_columns(tmp_path):
    data = read_sweep(directory(tmp_path, [TRACES["a list"], TRACES["further keys"]]))
    table = data.trace.table
    assert set(table.column("grad.a").to_pylist()) == {"1, 2", None}
    assert set(table.column("lambda_max").to_pylist()) == {3.5, None}


@pytest.mark.parametrize(
    ("status", "planned", "steps"),
    [
        ("done", STEPS, [*STEPS]),
        ("done", None, [0, 1, 2]),  # a cell that is done has no further steps without a plan
        ("done", (), [0, 1, 2]),
        ("failed", STEPS, [*STEPS]),
        ("failed", None, [*STEPS]),  # those that others recorded
        ("failed", (), [0, 1, 2]),
    ],
)
def test_a_cell_that_ended_early_has_the_steps_of_its_plan(tmp_path, status, planned, steps):
    data = read_sweep(directory(tmp_path, [WHOLE, TRACES["short"], TRACES["none"]], planned=planned, status=status))
    rows = [row for row in data.trace.table.to_pylist() if row["cell"] == f"{1:016x}"]
    assert [row["step"] for row in rows] == steps
    word = "stopped early" if status == "done" else "failed"
    assert {row.get("status") for row in rows if row["step"] > 2} <= {word}


def test_an_axis_of_words_and_numbers_is_text(tmp_path):
    axes = [{"optimizer.lr": value} for value in (0.001, "auto", 0.01)]
    data = read_sweep(directory(tmp_path, [WHOLE] * 3, axes=axes))
    assert data.trace.values("optimizer.lr") == data.values("optimizer.lr") == ["0.001", "auto", "0.01"]
    assert len(data.trace) == 15


def test_a_broken_line_is_named(tmp_path):
    broken = WHOLE.replace('"step": 2', '"step" 2')
    with pytest.raises(UserError, match=r"trace\.jsonl:3: not a JSON object"):
        read_sweep(directory(tmp_path, [WHOLE, broken]))
