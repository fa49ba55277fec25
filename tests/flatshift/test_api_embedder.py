"""The embedder of a recipe as a function: the vectors that `select` makes, in any process, however the pool is cut."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flatshift
from flatshift.experiments.recipe import from_mapping, load_recipe
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.embedding import Vectors
from flatshift.experiments.select.pool import read_pool, read_records, target_columns
from flatshift.finetune.errors import UserError
from flatshift.selection.config import Gradients
from flatshift.selection.features import ShardWriter, open_directory, write_manifest

TEXTS = [f"The {a} of the {b} was measured." for a in ("rate", "shape", "cost") for b in ("cell", "bank", "river")]


def selected(tmp_path: Path, embedder: object) -> np.ndarray:
    """The pool's vectors of a selection."""
    files = {}
    for name, texts in (("pool", TEXTS), ("target", TEXTS[:2])):
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(f'{{"text": "{text}"}}\n' for text in texts), encoding="utf-8")
    named = {f"select.{side}.files": [str(file)] for side, file in files.items()}
    recipe = load_recipe(None, [from_mapping({**named, "select.embedder": embedder, "select.budget": 2})]).recipe
    spec, seed, console = recipe.select, recipe.train.seed, Console(quiet=True)
    assert spec is not None
    pool = read_pool(spec, seed, tmp_path, console)
    target = read_records(spec.target, spec, seed, "target", target_columns(recipe))
    return np.asarray(Vectors(recipe, pool, target, None, tmp_path, console).pool())


@pytest.mark.parametrize("embedder", ["backbone", Gradients(dim=64, rank=2, moment_texts=5)], ids=["states", "grads"])
def test_shards_of_a_map_hold_the_vectors_of_a_selection(tmp_path: Path, embedder: object) -> None:
    made = flatshift.embedder(embedder, moments=TEXTS)
    for rank, part in enumerate((slice(0, 4), slice(4, None))):
        step = pickle.loads(pickle.dumps(ShardWriter(tmp_path / "shards", made)))  # noqa: S301, as it travels
        rows = [SimpleNamespace(text=text, id=text, metadata={"file_path": rank}) for text in TEXTS[part]]
        assert len(list(step(rows, rank=rank, world_size=2))) == len(rows)
    write_manifest(tmp_path / "shards")
    found = np.asarray(open_directory(tmp_path / "shards")[:])
    wanted = selected(tmp_path, embedder)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_a_kind_takes_its_settings_from_overrides(tmp_path: Path) -> None:
    (tmp_path / "words.vec").write_text("rate 3 4\ncell 4 -3\n", encoding="utf-8")
    words = {"select.embedder.path": str(tmp_path / "words.vec")}
    np.testing.assert_allclose(
        flatshift.embedder("static", overrides=words)(["rate", "cell"]), [[0.6, 0.8], [0.8, -0.6]]
    )
    pool = ["rate rate", "cell cell"]
    picked = flatshift.select(pool, ["cell"], budget=1, method="knn", embedder="static", overrides=words)
    assert picked.texts == ["cell cell"] and picked.manifest["selection"]["embedder"] == "static"


def test_what_no_text_has_by_itself_is_refused() -> None:
    with pytest.raises(UserError, match=r"select\.embedder\.kind: tfidf is no function of a text alone; take backbone"):
        flatshift.embedder("tfidf")
    with pytest.raises(UserError, match=r"^moments: gradients are scaled .* or set select\.embedder\.adam to false"):
        flatshift.embedder("gradients")
    with pytest.raises(UserError, match=r"^embedder: moments must be a list of texts, got 'one'"):
        flatshift.embedder("gradients", moments="one")
    assert flatshift.embedder(Gradients(adam=False)) is not None
