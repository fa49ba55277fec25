"""Optimizers of pairs of factors, losses by probability, moments, spikes and the record, through the command."""

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
        pytest.param(
            "lora-muon",
            {"regularizer.kind": "mgpo", "train.precision": "bf16", "optimizer.damping": 0.1},
            marks=pytest.mark.slow,
        ),
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


def test_a_fixed_factor_is_in_no_norm_and_no_perturbation(tmp_path: Path) -> None:
    fixed = SMALL | {"optimizer.fixed": "[a]", "adapter.dropout": 0}
    own = {"plain": {"regularizer.kind": "plain"}}
    own["checked"] = own["plain"] | {"train.skip_nonfinite": 3}
    own["sam"] = {"regularizer.kind": "lora-sam", "regularizer.rho": 1e-9}
    norms = {}
    for name, settings in own.items():
        assert run(["train", "classify", "--out", str(tmp_path / name), *flags(fixed | settings)]) == 0
        norms[name] = [line["grad_norm"] for line in lines(tmp_path / name, "train")]
    assert norms["plain"] == norms["checked"] == pytest.approx(norms["sam"], rel=1e-3)
    first_passes = [line["gradient_norm"] for line in lines(tmp_path / "sam", "train")]
    assert all(0 < at < norm for at, norm in zip(first_passes, norms["sam"], strict=True))  # the head is in one alone


def test_what_has_no_pairs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "language-model", "--optimizer.kind", "lora-muon", "--out", str(tmp_path / "out")]
    for others, said in (
        ({"mesh.tp": 2}, "optimizer.kind: riemannian or lora-muon does not go with mesh.tp > 1"),
        ({"optimizer.lora_plus": 4}, "lora-muon gives A and B half of each step; set lora_plus: null"),
        ({"adapter.targets": "[embed_tokens]"}, "lora-muon steps the factors of linear layers, and adapter.targets"),
    ):
        assert run([*words, *flags(SMALL | others)]) == 2
        assert said in capsys.readouterr().err


def test_settings_without_effect_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = {"optimizer.kind": "gauss-newton", "optimizer.clip": "null"}
    for others, said in (
        (own | {"optimizer.betas": "[0.5, 0.6]"}, "betas and eps are of averages of gradients"),
        (own | {"optimizer.eps": 0.5}, "betas and eps are of averages of gradients"),
        ({"record.steps": "[1]", "record.per_doubling": 5}, "per_doubling is of steps: log"),
        ({"warmup.own": 1, "warmup.task.share": 0.3}, "without warmup.task.kind there is no 'share'"),
    ):
        assert run(["train", "classify", "--out", str(tmp_path / "out"), *flags(SMALL | others)]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_backbone("llama", tmp_path_factory.mktemp("backbone"), vocab_size=len(byte_tokenizer()))
    byte_tokenizer().save_pretrained(path)
    return path


def test_moments_and_what_is_recorded_of_them(backbone: Path, tmp_path: Path) -> None:
    """Adam's first step is of one size whatever the decays; the record tells the rows of its curvature and no norms."""
    small = SMALL | {
        "backbone": backbone,
        "train.steps": 3,
        "train.eval_every": 0,
        "data.dev.files": "[]",
        "data.dev.limit": "null",
    }
    small |= {"optimizer.schedule": "constant", "optimizer.warmup": 0, "record.steps": "[1]", "record.sharpness": "[0]"}
    own = {"optimizer.betas": "[0.5, 0.9]", "record.sharpness_rows": 3, "record.dynamics": "false"}
    about, steps = {}, {}
    for name, more in (("usual", {}), ("own", own)):
        out = tmp_path / name
        assert run(["train", "language-model", "--out", str(out), *flags(small | more)]) == 0
        about[name] = json.loads((out / "trace.json").read_text(encoding="utf-8"))
        steps[name] = [json.loads(line) for line in (out / "trace.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {name: [line["loss"] for line in lines(tmp_path / name, "train")] for name in about}
    assert losses["own"][:2] == pytest.approx(losses["usual"][:2], rel=1e-4) and losses["own"][2] != losses["usual"][2]
    thresholds = {name: about[name]["stability_threshold"] for name in about}  # (2 + 2β₁)/(1 − β₁)
    assert thresholds == {"usual": pytest.approx(38), "own": pytest.approx(6)}
    assert about["own"]["sharpness_rows"] == 3 < about["usual"]["sharpness_rows"] <= 64
    assert "(6 over λ_max " in (said := (tmp_path / "own" / "log.txt").read_text(encoding="utf-8"))
    assert "of its preconditioned Hessian, 3 rows)" in said
    curvature = [found[0]["sharpness.lambda_max"] for found in (steps["usual"], steps["own"])]
    assert curvature[0] != curvature[1] and all(map(math.isfinite, curvature))
    dynamics = {"update.ratio", "balance", "stable_rank", "effective_params"}
    assert all(dynamics <= line.keys() for line in steps["usual"])
    assert not any(dynamics & line.keys() for line in steps["own"]) and "train.loss" in steps["own"][-1]


def test_a_spike_is_gone_back_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row of noise among the same sentences: each time the run goes back and leaves its batch out, `most` times."""
    noise = "Xq#7 ZZk@@ 0vB~ jJ|w %%Gx yQ9 ;;Lr "
    rows = [{"text": noise if i == 7 else "The king and the queen lived in the house."} for i in range(12)]
    small = SMALL | {"train.batch_size": 1, "train.accumulate": 1, "train.steps": 40, "train.eval_every": 0}
    small |= {"data.train.files": write_jsonl(tmp_path / "rows.jsonl", rows), "data.train.limit": "null"}
    small |= {"data.dev.files": "[]", "data.dev.limit": "null", "task.pack": "false", "optimizer.lr": 1e-5}
    spikes = {"window": 4, "threshold": 9, "back": 1, "skip": 2, "most": 9}
    words = flags(small | {"train.save_every": 2} | {f"train.spikes.{key}": value for key, value in spikes.items()})
    assert run(["train", "language-model", "--out", str(tmp_path / "run"), *words]) == 0
    applied, back = (lines(tmp_path / "run", split) for split in ("train", "spike"))
    assert len(back) >= 2 and all(line["loss"] > line["limit"] and line["rewound_to"] < line["step"] for line in back)
    assert applied[-1]["step"] == 40 and all(line["loss"] < back[0]["limit"] for line in applied if line["step"] > 12)
    assert "spike in step" in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    capsys.readouterr()
    words[words.index("--train.spikes.most") + 1] = "1"
    assert run(["train", "language-model", "--out", str(tmp_path / "stopped"), *words]) == 2
    assert "is a spike above" in (said := capsys.readouterr().err) and "the stage went back 1 times" in said
