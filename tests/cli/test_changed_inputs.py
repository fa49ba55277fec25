"""Files that changed since a run began: it is neither evaluated nor trained on as if they were the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flatshift.cli import run
from flatshift.experiments.workflows import evaluate
from tests.support.commands import flags
from tests.support.data_models import write_jsonl

QUICK = {
    **{"train.steps": 2, "train.batch_size": 2, "train.max_length": 16, "train.max_cut": 1, "train.threads": 1},
    **{"train.precision": "fp32", "train.device": "cpu", "train.peak_tflops": 1, "train.eval_every": 0},
    **{"eval.bootstrap": 20, "eval.cold": 0, "adapter.rank": 1},
}


def write_rows(path: Path, count: int = 60, second: str = "neg") -> str:
    path.parent.mkdir(exist_ok=True)
    rows = [{"text": f"{('good', 'bad')[i % 2]} thing {i}", "label": ("pos", second)[i % 2]} for i in range(count)]
    return str(write_jsonl(path, rows))


def train(out: Path, data: str, recipe: str = "classify", **settings: object) -> Path:
    assert run(["train", recipe, "--data", data, "--out", str(out), *flags(QUICK | settings)]) == 0
    return out


def test_eval_refuses_its_own_rows_once_they_changed(tmp_path: Path, capsys) -> None:
    data = write_rows(tmp_path / "d" / "rows.jsonl")
    out = train(tmp_path / "run", data)
    assert run(["eval", str(out)]) == 0
    write_rows(tmp_path / "d" / "rows.jsonl", second="zneg")  # sorted after pos: the order of the classes turns
    for words in (["eval", str(out)], ["eval", str(out), "flatshift-5m"], ["eval", str(out), "--sharpness"]):
        capsys.readouterr()
        assert run(words) == 2
        assert (
            f"{data} changed since the run began; restore what was there, or name the rows" in capsys.readouterr().err
        )
    assert run(["eval", str(out), "--data", write_rows(tmp_path / "d" / "more.jsonl")]) == 0


def test_resume_refuses_a_file_that_came_to_the_directory_or_is_gone(tmp_path: Path, capsys) -> None:
    write_rows(tmp_path / "d" / "x.jsonl")
    out = train(tmp_path / "run", str(tmp_path / "d"))
    resume = ["train", "--resume", str(out), "--train.steps", "3"]
    added = write_rows(tmp_path / "d" / "y.jsonl")
    assert run(resume) == 2 and f"{added} was not there when the run began" in capsys.readouterr().err
    Path(added).unlink()
    assert run(resume) == 0
    (tmp_path / "d" / "x.jsonl").rename(tmp_path / "aside")
    write_rows(tmp_path / "d" / "z.jsonl")
    resume[-1] = "4"
    assert run(resume) == 2 and "was not there when the run began" in capsys.readouterr().err
    (tmp_path / "d" / "z.jsonl").rename(tmp_path / "d" / "x.jsonl")
    (tmp_path / "aside").rename(tmp_path / "d" / "w.jsonl")
    (tmp_path / "d" / "w.jsonl").unlink()
    assert run(resume) == 0  # the same bytes under the same name


@pytest.mark.parametrize("pattern", ["rows.jsonl", "*.jsonl"])
def test_rows_of_other_files_are_not_called_the_same(tmp_path: Path, pattern: str) -> None:
    for folder, count in (("a", 60), ("b", 60), ("c", 66)):
        write_rows(tmp_path / folder / "rows.jsonl", count)
    runs = [str(train(tmp_path / f"run-{name}", str(tmp_path / name / pattern))) for name in "abc"]
    for others, same in ((runs[:2], True), (runs[::2], False)):
        assert run(["report", *others, "--out", str(tmp_path / f"{same}.html")]) == 0
        page = (tmp_path / f"{same}.html").read_text(encoding="utf-8")
        assert ("A difference is that of the same" in page) == same


def test_kept_texts_belong_to_weights_and_not_to_a_name(tmp_path: Path, monkeypatch, capsys) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": f"a line of text {i}"} for i in range(24)])
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"text": "The man went"}])
    words = ["eval", str(tmp_path / "run"), "--data", str(prompts), "--samples", "2", "--max-new-tokens", "6", "--json"]

    def interrupt(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    train(tmp_path / "run", str(texts), "language-model")
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "build_document", interrupt)
        assert run([*words, "--out", str(tmp_path / "out")]) == 3
    shutil.rmtree(tmp_path / "run")
    train(tmp_path / "run", str(texts), "language-model", **{"optimizer.lr": 1, "train.seed": 9})
    found = []
    for name in ("out", "fresh"):
        assert run([*words, "--out", str(tmp_path / name)]) == 0
        lines = (tmp_path / name / "generations.jsonl").read_text(encoding="utf-8").splitlines()
        found.append([json.loads(line) for line in lines])
    assert found[0] == found[1] and found[0]
