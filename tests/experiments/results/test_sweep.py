"""Traces read many at a time say what they say read line by line."""

import json
import math

import pyarrow as pa
import pytest

from flatshift.experiments.results import sweep
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
        result = {"point": point, "seed": number % 2, "status": status, "reason": None, "diverged": status != "done"}
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


def rows(data):
    """The rows of the trace as sorted texts: NaN is not equal to itself."""
    return sorted(json.dumps(dict(sorted(row.items()))) for row in data.trace.table.to_pylist())


def both(folder, monkeypatch):
    """(rows as read, rows read line by line)."""
    fast = rows(read_sweep(folder))
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "_read_complete", lambda folders: (None, {}))
        return fast, rows(read_sweep(folder))


@pytest.mark.parametrize("kind", TRACES)
def test_traces_read_together_are_those_read_line_by_line(tmp_path, monkeypatch, kind):
    fast, slow = both(directory(tmp_path, [WHOLE, TRACES[kind], WHOLE]), monkeypatch)
    assert fast == slow
    assert len(fast) == 15


@pytest.mark.parametrize("status", ["done", "failed"])
@pytest.mark.parametrize("planned", [STEPS, None, ()])
def test_also_of_cells_that_end_early_or_have_no_plan(tmp_path, monkeypatch, status, planned):
    folder = directory(tmp_path, [WHOLE, TRACES["short"], TRACES["none"]], planned=planned, status=status)
    fast, slow = both(folder, monkeypatch)
    assert fast == slow


def test_also_where_a_value_of_an_axis_is_a_word(tmp_path, monkeypatch):
    axes = [{"optimizer.lr": value} for value in (0.001, "auto", 0.01)]
    fast, slow = both(directory(tmp_path, [WHOLE] * 3, axes=axes), monkeypatch)
    assert fast == slow


def test_whole_traces_are_read_together_and_the_others_one_by_one(tmp_path, monkeypatch):
    seen = []
    plain = sweep._read_individually

    def noting(folders, *rest):
        seen.extend(folders)
        return plain(folders, *rest)

    monkeypatch.setattr(sweep, "_read_individually", noting)
    monkeypatch.setattr(sweep, "_BATCH", 2)
    read_sweep(directory(tmp_path, [WHOLE, TRACES["written again"], TRACES["numbers of two types"], WHOLE, WHOLE]))
    assert [folder.name for folder in seen] == [f"{1:016x}"]


def test_a_broken_line_is_named(tmp_path):
    broken = WHOLE.replace('"step": 2', '"step" 2')
    with pytest.raises(UserError, match=r"trace\.jsonl:3: not a JSON object"):
        read_sweep(directory(tmp_path, [WHOLE, broken]))


def test_what_arrow_makes_of_a_line_without_value():
    """The parser takes Python's NaN; where it would not, a file is read line by line."""
    table = sweep._parse_lines(TRACES["no number"].encode())
    assert isinstance(table, pa.Table)
    assert math.isnan(table.column("train.loss")[1].as_py())
    assert sweep._parse_lines(b"") is None
    assert sweep._parse_lines(TRACES["a list"].encode()) is None
