"""Optimizers of pairs of factors and the loss by probability, through the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flatshift.cli import run
from flatshift.experiments.workflows.sharpness import measure_run_sharpness
from flatshift.regularizers.sharpness import Sharpness
from tests.support.commands import flags
from tests.support.data_models import byte_tokenizer, write_jsonl
from tests.support.finetune_models import save_backbone

pytestmark = pytest.mark.usefixtures("warm_checks")

FEW = Sharpness(spaces=("adapter",), lanczos=2, probes=1, sigmas=(), rhos=(), lines=0, plane_points=0)
SMALL = {
    **{"train.steps": 4, "train.batch_size": 2, "train.accumulate": 2, "train.max_length": 48, "train.max_cut": 1},
    **{"train.eval_every": 4, "train.threads": 1, "train.precision": "fp32", "train.device": "cpu"},
    **{"eval.bootstrap": 10, "eval.cold": 0, "eval.train_limit": 0, "data.train.limit": 24, "data.dev.limit": 8},
    **{"data.test.files": "[]", "optimizer.lr": 0.01},
}


def lines(out: Path, split: str) -> list[dict]:
    every = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in every if line["split"] == split]


def adapter(out: Path) -> dict:
    return load_file(out / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("riemannian", {"regularizer.kind": "ggpo"}),
        ("lora-muon", {"regularizer.kind": "mgpo", "train.precision": "bf16", "optimizer.damping": 0.1}),
        ("lora-muon", {"optimizer.fixed": "[a]", "optimizer.weight_decay": 0.1}),
    ],
)
def test_a_run_by_pairs_of_factors(kind: str, others: dict, tmp_path: Path) -> None:
    """Classification, whose head AdamW moves as ever."""
    steps = {"one": {"optimizer.kind": kind}, "adamw": {}}
    for name, own in steps.items():
        settings = {key: value for key, value in (SMALL | others | own).items() if own or key != "optimizer.damping"}
        assert run(["train", "classify", "--out", str(tmp_path / name), *flags(settings)]) == 0
    ours, theirs = adapter(tmp_path / "one"), adapter(tmp_path / "adamw")
    changed = {name for name in ours if not ours[name].equal(theirs[name])}
    assert ours.keys() == theirs.keys() and any("lora_B" in name for name in changed)
    assert all(math.isfinite(line["loss"]) for line in lines(tmp_path / "one", "train"))
    log = (tmp_path / "one" / "log.txt").read_text(encoding="utf-8")
    assert f"{kind}, " + ("one moment of factors" if kind == "lora-muon" else "two moments") in log
    assert run(["train", "--resume", str(tmp_path / "one"), "--train.steps", "6"]) == 0
    assert [line["step"] for line in lines(tmp_path / "one", "train")] == [1, 2, 3, 4, 5, 6]


def test_what_has_no_pairs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "language-model", "--optimizer.kind", "lora-muon", "--out", str(tmp_path / "out")]
    for others, said in (
        ({"mesh.tp": 2}, "optimizer.kind: riemannian or lora-muon does not go with mesh.tp > 1"),
        ({"optimizer.lora_plus": 4}, "lora-muon gives A and B half of each step; set lora_plus: null"),
        ({"adapter.targets": "[embed_tokens]"}, "lora-muon steps the factors of linear layers, and adapter.targets"),
    ):
        assert run([*words, *flags(SMALL | others)]) == 2
        assert said in capsys.readouterr().err


def test_a_loss_weighted_by_probability(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first loss is that of the same tokens times their probabilities; evaluation knows no weights."""
    backbone = str(save_backbone("llama", tmp_path / "model", vocab_size=352))
    byte_tokenizer().save_pretrained(backbone)
    rows = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": f"the cat {i} sat on the mat"} for i in range(24)]))
    own = {"backbone": backbone, "data.train.files": rows, "data.dev.files": rows, "data.checks.copies": "warn"}
    for name, dft in (("dft", "true"), ("plain", "false")):
        words = ["train", "language-model", "--out", str(tmp_path / name), "--task.dft", dft]
        assert run([*words, *flags(SMALL | own | {"train.steps": 1, "train.eval_every": 0})]) == 0
    (ours,), (plain,) = (lines(tmp_path / name, "train") for name in ("dft", "plain"))
    assert ours["tokens"] == plain["tokens"] and 0 < ours["loss"] < 0.2 * plain["loss"]  # p is about 1 in 352
    (ours,), (plain,) = (lines(tmp_path / name, "dev") for name in ("dft", "plain"))
    assert abs(ours["loss"] - plain["loss"]) < 0.2 * plain["loss"] and ours["loss"] != plain["loss"]
    measured = measure_run_sharpness(tmp_path / "dft", FEW, batches=1, quiet=True)  # of the loss without weights
    assert abs(measured["loss"] - plain["loss"]) < 0.2 * plain["loss"]
    words = ["train", "classify", "--task.dft", "true", "--out", str(tmp_path / "no")]
    assert run([*words, *flags(SMALL)]) == 2 and "dft" in capsys.readouterr().err
