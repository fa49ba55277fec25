"""`import flatshift`: what its functions take, and how they answer what they do not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flatshift
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.finetune.errors import UserError
from flatshift.selection.methods.gotd import GotD

ROOT = Path(__file__).resolve().parents[2]


def test_a_mapping_says_what_flags_say() -> None:
    flags = ["train.steps", "optimizer.lr", "regularizer.kind", "regularizer.sigma", "data.train.files"]
    values = ["7", "5e-4", "ggpo", "0.1", "[sample:scicite/train]"]
    by_flags = load_recipe("classify", [from_override(k, v) for k, v in zip(flags, values, strict=True)])
    mapping = {
        "train": {"steps": np.int64(7)},
        "optimizer.lr": 5e-4,
        "regularizer": {"kind": "ggpo", "sigma": np.float32(0.5)},
        "data.train": {"files": ["sample:scicite/train"]},
    }
    assert flatshift.load_recipe("classify", mapping | {"regularizer": {"kind": "ggpo", "sigma": 0.1}}).recipe == (
        by_flags.recipe
    )
    assert flatshift.load_recipe("classify", mapping).recipe.regularizer.sigma == 0.5
    again = flatshift.load_recipe(
        "classify", {"train.steps": 7, "train": {"batch_size": 3}, "select": {"method": GotD(epsilon=0.2)}}
    )
    assert (again.recipe.train.steps, again.recipe.train.batch_size) == (7, 3)
    assert again.recipe.select is not None and again.recipe.select.method == GotD(epsilon=0.2)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: flatshift.train(5), "train: recipe must be what load_recipe returns, a Recipe, a shipped name or"),
        (lambda: flatshift.train("classify", out=3), "train: out must be a path, got 3 (int)"),
        (lambda: flatshift.load_recipe(5), "load_recipe: reference must be a shipped name, a file or None, got 5"),
        (lambda: flatshift.load_recipe("clasify"), "did you mean 'classify'"),
        (lambda: flatshift.load_recipe("classify", [1]), "overrides must be a mapping of recipe keys, got [1] (list)"),
        (lambda: flatshift.load_recipe("classify", {3: 1}), "a key must be a text such as 'train.steps', got 3"),
        (lambda: flatshift.load_recipe("classify", {"train": {"steps": "x"}}), "train.steps must be a whole number"),
        (lambda: flatshift.load_recipe("classify", {"train.steps": {1}}), "train.steps cannot be {1} (set); give"),
        (lambda: flatshift.load_recipe("classify", {"train": {"stepz": 1}}), "did you mean 'train.steps'"),
        (lambda: flatshift.load_recipe("classify", {"train": 3, "train.steps": 4}), "train is given twice"),
        (lambda: flatshift.load_recipe("classify", {"train.steps": 3, "train": {"steps": 4}}), "train.steps is given"),
        (lambda: flatshift.select(["a", 3], ["b"], budget=1), "select: pool[1] must be a text, got 3 (int)"),
        (lambda: flatshift.select("a", ["b"], budget=1), "select: pool must be a list of texts, got 'a' (str)"),
        (lambda: flatshift.select([], ["b"], budget=1), "select: pool is empty"),
        (lambda: flatshift.select(["a"], ["b"]), "select: budget is missing"),
        (lambda: flatshift.select(["a"]), "select: target is missing"),
        (lambda: flatshift.select(["a"], ["b"], budget="1"), "select.budget must be a whole number, got '1'"),
        (lambda: flatshift.select(["a"], ["b"], budget=1, method="gotdd"), "did you mean 'gotd'"),
        (lambda: flatshift.sweep("classify", {"adapter.rank": 3}, out="x"), "must be a list of values, or a range"),
        (lambda: flatshift.sweep("classify", 3, out="x"), "sweep: grid must be a mapping of recipe keys to lists"),
        (lambda: flatshift.sweep("classify", {"adapter.rank": ["1,2"]}, out="x"), "holds a comma"),
        (lambda: flatshift.Run("nowhere"), "nowhere is not a run directory"),
        (lambda: flatshift.Run(3), "Run: path must be a path, got 3 (int)"),
        (lambda: flatshift.Sweep("nowhere"), "nowhere has no cells.parquet"),
    ],
)  # fmt: skip
def test_wrong_types_are_answered_in_one_sentence(call, said, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(flatshift.UserError) as caught:
        call()
    assert said in str(caught.value) and len(str(caught.value)) <= 300 and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "something was left behind"


POOL = ["a cat sat on the mat", "gene expression in the cell", "dogs bark at night", "binding of the protein receptor"]
TARGET = ["protein expression in cells", "gene binding"]


def test_lists_of_texts_are_chosen_from_as_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = flatshift.select(POOL, TARGET, budget=2, method=GotD(epsilon=0.1))
    same = {"select.method": {"kind": "gotd", "epsilon": 0.1}}
    kept = flatshift.select(POOL, TARGET, budget=2, overrides=same, out="picked", quiet=True)
    assert short.indices == kept.indices and sorted(short.indices) == [1, 3]
    assert short.texts == [POOL[row] for row in short.indices] and short.scores == kept.scores
    assert short.path is None and kept.path == Path("picked") and (kept.path / "report.html").is_file()
    assert all(TARGET[int(near)] for near in short.nearest)
    files = [tmp_path / "picked-texts" / f"{side}.jsonl" for side in ("pool", "target")]
    assert [line["path"] for line in kept.manifest["inputs"]] == [str(file) for file in files]
    assert flatshift.select([files[0]], files[1], budget=2, overrides=same | {"data.holdout": 0}).ids == short.ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["picked", "picked-texts"]
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    flatshift.select(POOL, TARGET, budget=2, overrides=same, out="~/picked", quiet=True)
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["picked", "picked-texts"]
    breaks = [f"{text} of\u2028two\x85lines" for text in POOL]  # line ends to str.splitlines
    assert flatshift.select(breaks, TARGET, budget=2, overrides=same).texts[0] in breaks


def test_a_refused_selection_leaves_the_texts_of_a_finished_one(tmp_path: Path) -> None:
    out, texts = tmp_path / "picked", tmp_path / "picked-texts"
    with pytest.raises(UserError, match="above the pool's 2 records"):
        flatshift.select(POOL[:2], TARGET, budget=3, method="random", out=out, quiet=True)
    flatshift.select(POOL, TARGET, budget=3, method="random", out=out, quiet=True)
    before = {file.name: file.read_bytes() for file in texts.iterdir()}
    assert len(before) == 2 and before["pool.jsonl"].count(b"\n") == len(POOL)
    with pytest.raises(UserError, match="is not empty"):
        flatshift.select(["x y"] * 3, ["q"], budget=1, method="random", out=out, quiet=True)
    assert {file.name: file.read_bytes() for file in texts.iterdir()} == before


def test_pieces_have_the_position_of_their_text() -> None:
    cut = flatshift.select(POOL, TARGET, budget=4, method="random", overrides={"select.chunk.size": 3})
    assert all(piece in POOL[row] for piece, row in zip(cut.texts, cut.indices, strict=True))


def test_files_have_ids_and_their_own_columns(tmp_path: Path) -> None:
    sides = []
    for name, texts in (("pool", POOL), ("target", TARGET)):
        lines = [json.dumps({"id": f"10{row}", "body": text}) + "\n" for row, text in enumerate(texts)]
        sides.append(tmp_path / f"{name}.jsonl")
        sides[-1].write_text("".join(lines), encoding="utf-8")
    columns = {"select.columns.text": "body", "data.holdout": 0}
    picked = flatshift.select(*sides, budget=2, method=GotD(epsilon=0.1), overrides=columns)
    assert picked.texts == [POOL[int(id_) - 100] for id_ in picked.ids] and all(picked.texts)
    with pytest.raises(UserError, match="the pool was files, whose records have ids"):
        _ = picked.indices


def test_a_selector_takes_texts_with_any_embedder() -> None:
    words = sorted({word for text in POOL + TARGET for word in text.split()})

    def counts(texts: list[str]) -> np.ndarray:
        return np.array([[text.split().count(word) for word in words] for text in texts], dtype=float)

    class Counts:
        def transform(self, texts: list[str]) -> np.ndarray:
            return counts(texts)

    by_function = flatshift.GotDSelector().fit_texts(POOL, TARGET, embedder=counts)
    by_object = flatshift.GotDSelector().fit_texts(POOL, TARGET, embedder=Counts())
    by_hand = flatshift.GotDSelector().fit(
        flatshift.Pool(features=counts(POOL)), flatshift.Pool(features=counts(TARGET))
    )
    assert (by_function.scores_ == by_hand.scores_).all() and (by_object.scores_ == by_hand.scores_).all()
    for pool, embedder, said in (
        ("one text", None, "pool must be a list of texts, not str"),
        (POOL, 5, "embedder must be an embedder or a function of texts, not int"),
        ([1, 2], None, "texts: row 0 is 1"),
    ):
        with pytest.raises(flatshift.SelectionError, match=said):
            flatshift.GotDSelector().fit_texts(pool, TARGET, embedder=embedder)


def test_a_resolved_recipe_is_changed_and_keeps_its_origins() -> None:
    from flatshift.api import _resolve_recipe

    first = flatshift.load_recipe("classify", {"train.steps": 5})
    changed = _resolve_recipe(first, {"adapter.rank": 3}, "train")
    assert (changed.recipe.train.steps, changed.recipe.adapter.rank, changed.name) == (5, 3, "classify")
    assert changed.origins["adapter.rank"] == "overrides" == changed.origins["train.steps"]
    assert changed.origins["backbone"] == first.origins["backbone"]
    plain = _resolve_recipe(first.recipe, None, "train")
    assert plain.recipe == first.recipe and plain.origins["train.steps"] == "Recipe"


def test_importing_costs_nothing() -> None:
    code = (
        "import sys, time; began = time.process_time(); import flatshift; flatshift.load_recipe; flatshift.Run; "
        "print(json.dumps(sorted({'torch', 'numpy', 'transformers', 'pyarrow', 'yaml'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(done.stdout) == [], done.stderr


@pytest.mark.slow
def test_pyright_agrees(tmp_path: Path) -> None:
    program = shutil.which("pyright") or shutil.which("basedpyright")
    if program is None:
        pytest.skip("pyright is not installed")
    text = (ROOT / "tests" / "flatshift" / "public_types.py").read_text(encoding="utf-8")
    right, wrong = [line for line in text.splitlines() if "type: ignore" not in line], text.count("# type: ignore")
    for name, body, errors in (("right", "\n".join(right), 0), ("wrong", text.replace("# type: ignore", "#"), wrong)):
        (tmp_path / f"{name}.py").write_text(body, encoding="utf-8")
        told = subprocess.run(
            [program, "--outputjson", "--pythonpath", sys.executable, str(tmp_path / f"{name}.py")],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        found = [one for one in json.loads(told.stdout)["generalDiagnostics"] if one["severity"] == "error"]
        assert len({one["range"]["start"]["line"] for one in found}) == errors, found
