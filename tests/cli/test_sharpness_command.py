"""`flatshift eval RUN_DIR --sharpness` on a small run: files, figures, report, and mistakes."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from flatshift.api import draw_report
from flatshift.cli import run
from flatshift.experiments.workflows.sharpness import measure_run_sharpness
from flatshift.regularizers.sharpness import Sharpness
from tests.support.commands import flags
from tests.support.data_models import byte_tokenizer
from tests.support.finetune_models import save_backbone

SMALL = {
    "train.steps": 6,
    "train.batch_size": 4,
    "train.max_length": 32,
    "train.max_cut": 1,
    "train.threads": 1,
    "train.precision": "fp32",
    "data.train.limit": 40,
    "data.dev.limit": 20,
    "data.test.limit": 30,
    "eval.bootstrap": 50,
}
FEW = Sharpness(
    lanczos=4, probes=2, sigmas=(0.05, 0.2), draws=2, rhos=(0.05,), ascent=3, lines=2, line_points=5, plane_points=5
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    tokenizer = byte_tokenizer()
    backbone = save_backbone("llama", home / "tiny", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(backbone)
    settings = SMALL | {"backbone": backbone, "regularizer.kind": "plain"}
    words = flags(settings)
    assert run(["train", "classify", "--out", str(home / "plain"), *words]) == 0
    return home / "plain"


def test_the_run_directory_gets_measures_pictures_and_a_section(finished: Path) -> None:
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file() and p.name != "report.html"}
    result = measure_run_sharpness(finished, FEW, batches=1, quiet=True, draw=draw_report)
    assert json.loads((finished / "sharpness.json").read_text(encoding="utf-8")) == result
    assert {p for p in before if p.read_bytes() != before[p]} == set()  # nothing else of the run has changed
    about = result["about"]
    assert (about["split"], about["rows"], about["seed"]) == ("dev", 4, 0)
    assert list(result["measures"]) == ["adapter", "full"]
    for measures in result["measures"].values():
        assert list(measures) == [
            "lambda_max",
            "lambda_min",
            "trace",
            "rise_sigma_0.05",
            "rise_sigma_0.2",
            "sam_rho_0.05",
            "sam_rho_0.05_steps_3",
        ]
        for cell in measures.values():
            assert set(cell) == {"value", "low", "high", "n"}
            assert cell["low"] is None or cell["low"] <= cell["value"] <= cell["high"]
        assert measures["lambda_max"]["value"] > 0 and measures["lambda_max"]["value"] > measures["lambda_min"]["value"]
        assert measures["sam_rho_0.05_steps_3"]["value"] >= measures["sam_rho_0.05"]["value"] > 0
    for space, slices in result["slices"].items():  # a line's middle is the loss itself
        assert about["spaces"][space]["difference_error"] < 0.05
        assert [len(row) for row in slices["plane"]["losses"]] == [5] * 5
        assert {row[2] for row in slices["line"]["losses"]} == {result["loss"]}
    pictures = sorted(p.name for p in (finished / "plots").glob("sharpness-*.svg"))
    assert pictures == [
        "sharpness-line-adapter.svg",
        "sharpness-line-full.svg",
        "sharpness-plane-adapter.svg",
        "sharpness-plane-full.svg",
        "sharpness-rise.svg",
    ]
    for name in pictures:
        text = (finished / "plots" / name).read_text(encoding="utf-8")
        ET.fromstring(text)
        assert "nats per example" in text and "row norm" in text
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "Sharpness" in page and "λ_max" in page and "highest rise within ρ = 0.05, 3 steps" in page


@pytest.mark.bf16
def test_bf16_weights_are_measured_in_float32(finished: Path, tmp_path: Path) -> None:
    """The differences are as good as those of float32 weights, and a line's middle is the loss itself."""
    narrow = tmp_path / "narrow"
    shutil.copytree(finished, narrow)
    recipe = narrow / "recipe.resolved.yaml"
    before = recipe.read_text(encoding="utf-8")
    recipe.write_text(before.replace("precision: fp32", "precision: bf16", 1), encoding="utf-8")
    assert recipe.read_text(encoding="utf-8") != before
    (narrow / "done.json").unlink()  # it tells of the other precision
    result = measure_run_sharpness(narrow, FEW, batches=1, quiet=True)
    for space, slices in result["slices"].items():
        assert result["about"]["spaces"][space]["difference_error"] < 0.05
        assert {row[2] for row in slices["line"]["losses"]} == {result["loss"]}


def test_rows_and_directions_depend_on_the_seed_alone(finished: Path) -> None:
    one = Sharpness(spaces=("adapter",), lanczos=0, probes=2, sigmas=(), rhos=(), lines=0, plane_points=0)
    first, again, other = (measure_run_sharpness(finished, one, batches=1, seed=seed, quiet=True) for seed in (5, 5, 6))
    assert first["measures"] == again["measures"] and first["loss"] == again["loss"]
    assert other["loss"] != first["loss"]
    train = measure_run_sharpness(finished, one, batches=1, seed=5, split="train", quiet=True)
    assert train["about"]["split"] == "train" and train["loss"] != first["loss"]


def test_the_command_prints_what_the_file_holds(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--sharpness-spaces", "adapter", "--sharpness-batches", "1", "--sharpness-draws", "2"]
    flags += ["--sharpness-sigmas", "0.1", "--sharpness-rhos", "0.02", "--sharpness-seed", "1"]
    capsys.readouterr()
    assert run(["eval", str(finished), "--sharpness", "--sharpness-split", "test", "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((finished / "sharpness.json").read_text(encoding="utf-8"))
    assert (result["about"]["split"], result["about"]["rows"], result["about"]["seed"]) == ("test", 4, 1)
    assert {"rise_sigma_0.1", "sam_rho_0.02"} <= set(result["measures"]["adapter"])
    assert result["measures"]["adapter"]["rise_sigma_0.1"]["n"] == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--sharpness-batches", "2"], "--sharpness-batches has a meaning with --sharpness only"),
        (["--sharpness", "--sharpness-batches", "0"], "--sharpness-batches must be at least 1"),
        (["--sharpness", "--sharpness-sigmas", "-1"], "sharpness.sigmas"),
        (["--sharpness", "--sharpness-split", "dev", "--data", "rows.jsonl"], "exclude each other"),
        (["--sharpness", "--mesh.dp", "2"], "sharpness is measured in one process; add --mesh.dp 1"),
    ],
)
def test_mistakes(finished: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert run(["eval", str(finished), *flags]) == 2
    assert message in capsys.readouterr().err


def test_no_adapter_yet(tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.resolved.yaml").write_bytes((finished / "recipe.resolved.yaml").read_bytes())
    assert run(["eval", str(tmp_path), "--sharpness"]) == 2
    assert "no adapter yet" in capsys.readouterr().err


def test_a_report_of_a_broken_file_says_which(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = finished / "sharpness.json"
    kept = file.read_bytes() if file.is_file() else None
    file.write_text('{"loss": 1.0}', encoding="utf-8")
    try:
        assert run(["report", str(finished), "--out", str(finished / "other.html")]) == 2
        assert "sharpness.json has no 'about'" in capsys.readouterr().err
    finally:
        if kept is None:
            file.unlink()
        else:
            file.write_bytes(kept)
