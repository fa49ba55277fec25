"""What a page shows of single rows: confusions, classes, examples, answers, choices with their targets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from flatshift.experiments.report.blocks import Table
from flatshift.experiments.report.chapters import predictions, selection, sweep_verdicts
from flatshift.experiments.report.page import build_report
from flatshift.experiments.results.predictions import Predictions
from flatshift.experiments.results.run import read_run


def page_of(folder: Path, columns: dict[str, list]) -> dict[str, object]:
    """Section titles with their first block, of a run that said this of its rows."""
    folder.mkdir()
    (folder / "eval.json").write_text('{"test": {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6, "n": 4}}}')
    count = len(next(iter(columns.values())))
    rows = {"split": ["test"] * count, "row": [f"t.jsonl:{i}" for i in range(count)], **columns}
    pq.write_table(pa.table(rows), folder / "predictions.parquet", row_group_size=2)  # read a part at a time
    part = predictions.part(read_run(folder))
    assert part is not None
    return {section.title: section for section in part.sections}


def test_confusions_and_classes_are_scikit_learns(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    names = ["a<b>", "b", "c", "never said"]
    label = [names[i] for i in rng.choice(4, 200, p=[0.4, 0.3, 0.2, 0.1])]
    predicted = [name if rng.random() < 0.6 else names[rng.integers(3)] for name in label]
    predicted = ["b" if name == "never said" else name for name in predicted]
    rows = Predictions(pa.table({"row": list(map(str, range(200))), "label": label, "predicted": predicted}))
    assert (rows.confusion == confusion_matrix(label, predicted, labels=rows.classes)).all()
    said = {"text": [f"text {i}" for i in range(200)], "label": label, "predicted": predicted}
    found = page_of(tmp_path / "run", {**said, "probability": rng.random(200).tolist()})
    table = found["By class, test"].blocks[0]
    expected = precision_recall_fscore_support(label, predicted, labels=rows.classes, zero_division=0)
    for place, row in enumerate(table.rows):
        for column, values in zip((4, 5, 6), expected[:3], strict=True):
            assert row[column] == "–" or abs(float(row[column]) - values[place]) < 6e-4
    cards = found["Rows, wrong and right"].blocks[0].cards
    assert [card.rank for card in cards] == ["✗"] * 6 + ["✓"] * 3
    shown = [dict(card.facts) for card in cards]
    assert all(facts["class"] != facts["said"] for facts in shown[:6]) and not any("said" in f for f in shown[6:])
    sure = [float(facts["probability"].split()[0]) for facts in shown[:6]]
    assert sure == sorted(sure, reverse=True)
    text = build_report([tmp_path / "run"], out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert "a&lt;b&gt;, said" in text and "a<b>" not in text and 'class="matrix"' in text


def test_answers_stand_beside_references(tmp_path: Path) -> None:
    columns = {"text": ["1+1", "2+2", "3+3"], "answer": ["2", "5", None], "reference": ["2", "4", None]}
    found = page_of(tmp_path / "run", {**columns, "exact_match": [1.0, 0.0, None]})
    cards = found["Answers next to references"].blocks[0].cards
    assert [(card.rank, card.text, card.facts[0][1], card.facts[1][1]) for card in cards] == [
        ("✗", "2+2", "5", "4"),
        ("✓", "1+1", "2", "2"),
    ]


def test_texts_are_shown_by_what_a_token_costs(tmp_path: Path) -> None:
    columns = {"text": ["easy", "hard", "long"], "loss": [1.0, 9.0, 20.0], "loss.count": [2.0, 3.0, 10.0]}
    found = page_of(tmp_path / "run", columns)
    assert [card.text for card in found["Hardest and easiest rows"].blocks[0].cards] == ["hard", "long", "easy"]


def test_choices_show_their_targets_and_can_be_searched(tmp_path: Path) -> None:
    folder = tmp_path / "sel"
    folder.mkdir()
    ids = [f"r{i}" for i in range(20)]
    table = {"id": ids, "score": np.arange(20.0) - 30, "rank": range(1, 21), "selected": [True] * 20}
    pq.write_table(pa.table({**table, "nearest_target": ["t0", "t1"] * 10}), folder / "scores.parquet")
    lines = [{"id": i, "text": f"text of {i}", "score": -1.0, "rank": n} for n, i in enumerate(ids, 1)]
    (folder / "selected.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "targets.jsonl").write_text('{"id": "t0", "text": "first <target>"}\n{"id": "t1", "text": "second"}\n')
    sections = {section.title: section for section in selection.part(read_run(folder)).sections}
    assert dict(sections["First choices"].blocks[0].cards[0].facts)["nearest target"] == "t0: first <target>"
    everything = sections["All choices"].blocks[0]
    assert len(everything.rows) == 20 and everything.columns == ["rank", "score", "text", "nearest target"]
    text = build_report([folder], out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'type="search"' in text and "first &lt;target&gt;" in text


def test_choices_that_are_not_on_the_page_are_counted_and_their_file_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("flatshift.experiments.results.run._MAX_RECORDS", 12)
    ids = [f"r{i}" for i in range(20)]
    table = {"id": ids, "score": np.arange(20.0) - 30, "rank": range(1, 21), "selected": [True] * 18 + [False] * 2}
    pq.write_table(pa.table(table), tmp_path / "scores.parquet")
    lines = [{"id": i, "text": f"text of {i}", "score": -1.0, "rank": n} for n, i in enumerate(ids[:18], 1)]
    (tmp_path / "selected.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = {section.title: section for section in selection.part(read_run(tmp_path)).sections}
    found = sections["The first 12 of 18 choices"]
    assert len(found.blocks[0].rows) == 12 and "All choices" not in sections
    assert "The other 6 are not on this page" in found.lead and "selected.jsonl has all" in found.lead


def test_empty_columns_are_left_out() -> None:
    table = Table(
        ["a", "b", "c", "d"], [["", "–", "1", ""], ["", "", "2", "x"]], numeric=frozenset({2, 3})
    ).without_empty_columns()
    assert (table.columns, table.rows, table.numeric) == (["a", "c", "d"], [["", "1", ""], ["", "2", "x"]], {1, 2})


def test_a_caption_of_verdicts_explains_the_columns_that_are_there(monkeypatch) -> None:
    monkeypatch.setattr(sweep_verdicts, "_verdict_row", lambda judged: judged.row)

    def table(*row: str) -> Table:
        return sweep_verdicts.verdict_table([SimpleNamespace(row=row, curve=SimpleNamespace(fit="fit"))], 0.01, 0.0033)

    bare = table("rank", "–", "undecided", *["–"] * 6)
    assert bare.columns == ["along", "verdict"] and bare.caption.startswith("One verdict per curve")
    words = ("Height", "80 % power", "Threshold", "Training loss p")
    assert not any(word in bare.caption for word in words)
    full = table("rank", "a = 1", "peak", "0.01", "4", "0.2", "0.1", "8", "0.5")
    assert all(word in full.caption for word in words) and "the mean fit crosses 0.01" in full.caption
    assert "with its 99.67 % interval" in full.caption


def test_the_page_says_what_the_adapter_changed(tmp_path: Path) -> None:
    """A run of a language model that judges the cold backbone: the difference is that of the same rows."""
    import flatshift

    short = {
        "data": {"train": {"limit": 16}, "dev": {"limit": 4}, "test": {"limit": 12}},
        "train": {"steps": 6, "batch_size": 4, "max_length": 128, "precision": "fp32", "threads": 1, "eval_every": 0},
        "eval": {"cold": 8, "bootstrap": 50, "train_limit": 0},
    }
    run = flatshift.train("language-model", tmp_path / "run", overrides=short, quiet=True)
    cold = json.loads((run.path / "cold.json").read_text(encoding="utf-8"))["test"]
    ours, base = (pq.read_table(run.path / name).to_pydict() for name in ("predictions.parquet", "cold.parquet"))
    mine = [i for i, split in enumerate(ours["split"]) if split == "test"][:8]
    assert [ours["row"][i] for i in mine] == base["row"]
    assert cold["loss"]["n"] == len({row.partition("#")[0] for row in base["row"]}) <= 8 == len(mine)  # of documents
    tokens = sum(base["loss.count"])
    change = (sum(ours["loss"][i] for i in mine) - sum(base["loss"])) / tokens
    text = (run.path / "report.html").read_text(encoding="utf-8")
    assert "Compared with the base model without adapter" in text and f"{change:+.2f}"[:4].replace("-", "−") in text
    assert "Hardest and easiest rows" in text and run.evaluate()["test"] == run.metrics["test"]
