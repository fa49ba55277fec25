"""Runs whose adapter begins elsewhere: by the rows, on another run, over another run; resumed, judged, merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flatshift.cli import run
from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.studies.cell import _adapter_digest, make_cell
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.run_parts import check_adapters_unchanged
from flatshift.finetune.adapters.saved import SavedAdapter
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import LanguageModel
from tests.support.commands import flags

SMALL = {
    "train.steps": 6,
    "train.batch_size": 4,
    "train.max_length": 32,
    "train.max_cut": 1,
    "train.save_every": 2,
    "train.keep": 5,
    "train.threads": 1,
    "train.precision": "fp32",
    "data.train.limit": 40,
    "data.dev.limit": 12,
    "data.test.limit": 12,
    "eval.bootstrap": 20,
    "adapter.targets": "[q_proj, v_proj, up_proj]",
    "adapter.rank": 4,
}
GA = {"adapter.init": "lora-ga", "adapter.init_rows": 12, "adapter.ranks.q_proj": 6}


def train(out: Path, **settings) -> int:
    merged = SMALL | {key.replace("__", "."): value for key, value in settings.items()}
    return run(["train", "classify", "--out", str(out), *flags(merged)])


def adapter_bytes(path: Path) -> bytes:
    return (path / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "lora-ga"
    assert run(["train", "classify", "--out", str(out), *flags(SMALL | GA)]) == 0
    return out


@pytest.mark.slow
def test_stopped_and_resumed_gives_the_same_bits(finished: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    shutil.copytree(finished, stopped)
    stage = "stages/fine-tune"
    for name in ("done.json", "adapter", "eval.json", "report.html", f"{stage}/adapter", f"{stage}/done.json"):
        shutil.rmtree(stopped / name) if (stopped / name).is_dir() else (stopped / name).unlink()
    shutil.rmtree(stopped / "state" / "step-6")
    assert (stopped / "state" / "step-4").is_dir()
    assert run(["train", "--resume", str(stopped)]) == 0
    assert adapter_bytes(stopped) == adapter_bytes(finished)
    again = tmp_path / "again"  # from nothing: the rows and the gradient are drawn and summed as before
    assert run(["train", "classify", "--out", str(again), *flags(SMALL | GA)]) == 0
    assert adapter_bytes(again) == adapter_bytes(finished)
    for name, tensor in load_file(finished / "initial" / "adapter_model.safetensors").items():
        assert torch.equal(tensor, load_file(again / "initial" / "adapter_model.safetensors")[name])


@pytest.mark.slow
def test_judged_and_merged_like_any_other(finished: Path, tmp_path: Path, capsys) -> None:
    stored = json.loads((finished / "eval.json").read_text(encoding="utf-8"))
    assert run(["eval", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == stored
    assert run(["merge", str(finished), "--out", str(tmp_path / "merged"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["largest_rounding"] is not None, "merged file by file"
    assert result["max_logit_difference"] < 0.01 * result["largest_logit"], "up to the stored dtype"


@pytest.mark.slow
def test_start_takes_over_values_and_head(finished: Path, tmp_path: Path, capsys) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(first) == 0
    assert train(second, adapter__start=first, train__steps=1, optimizer__lr=1e-60) == 0
    mine, theirs = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (second, first))
    assert mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    manifest = json.loads((second / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["adapters"]["start"]["path"] == str((first / "adapter").resolve())
    assert len(manifest["backbone"]["fingerprint"]) == 64
    capsys.readouterr()
    assert train(tmp_path / "wide", adapter__start=first, adapter__rank=8) == 2
    assert "its rank is 4 and the recipe's 8 (adapter.rank)" in capsys.readouterr().err
    # begun by lora-ga: what it was saved as has twice the rank
    assert train(tmp_path / "third", adapter__start=finished) == 2
    assert "(adapter.rank)" in capsys.readouterr().err and not (tmp_path / "third").exists()
    edited = json.loads((first / "manifest.json").read_text(encoding="utf-8"))
    edited["backbone"] = {"name": "another-model", "fingerprint": "0" * 64}
    (first / "manifest.json").write_text(json.dumps(edited), encoding="utf-8")
    (first / "done.json").unlink()  # it tells of the manifest as it was
    assert train(tmp_path / "fourth", adapter__start=first) == 2
    assert "was trained on another-model, which is not the backbone" in capsys.readouterr().err


def other_adapter(directory: Path) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    (directory / "adapter_model.safetensors").write_bytes(b"first")
    return directory


@pytest.mark.parametrize("setting", ["start", "under"])
def test_the_other_adapter_is_known_by_its_content_and_place(setting: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = other_adapter(tmp_path / "other")
    plain = make_cell(load_recipe("classify"), point={}, seed=0)
    resolved = load_recipe("classify", [from_override(f"adapter.{setting}", "other")])
    assert getattr(resolved.recipe.adapter, setting) == str(other), "found again from another directory"
    before = make_cell(resolved, point={}, seed=0)
    known = {setting: {"path": str(other), "sha256": SavedAdapter.find(str(other), context="x").digest()}}
    check_adapters_unchanged(tmp_path, known)
    (other / "adapter_model.safetensors").write_bytes(b"second")
    _adapter_digest.cache_clear()
    assert len({plain.key, before.key, make_cell(resolved, point={}, seed=0).key}) == 3
    with pytest.raises(UserError, match="other changed since the run began"):
        check_adapters_unchanged(tmp_path, known)
    (tmp_path / "initial").mkdir()  # the run has a copy of its own
    check_adapters_unchanged(tmp_path, known)


def test_before_is_judged_on_the_cold_backbone(tmp_path: Path) -> None:
    settings = {"adapter.under": str(tmp_path / "gone"), "train.precision": "fp32", "train.device": "cpu"}
    recipe = load_recipe("classify", [from_override(key, value) for key, value in settings.items()]).recipe
    model = load_model(recipe, LanguageModel(pack=False), None)[0].model
    cold = load_backbone(recipe.backbone, task=LanguageModel(pack=False))
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, cold.eval()(ids).logits)


def test_missing_attrs_is_a_sentence(tmp_path: Path, capsys, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "attr", None)
    monkeypatch.delitem(sys.modules, "peft.tuners.lora.corda", raising=False)
    assert train(tmp_path / "corda", adapter__init="corda") == 2
    assert "pip install attrs" in capsys.readouterr().err and not (tmp_path / "corda").exists()
