"""Features through the public command: what only they tell is learned, judged again, and refused where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flatshift.cli import run
from flatshift.experiments.data import splits
from tests.support.commands import flags
from tests.support.data_models import write_jsonl

COLOURS = ("red", "green", "blue")
SMALL = {
    "train.steps": 30,
    "train.batch_size": 12,
    "train.max_length": 16,
    "train.max_cut": 1,
    "train.threads": 1,
    "train.precision": "fp32",
    "train.peak_tflops": 1,
    "train.save_every": 0,
    "eval.train_limit": 0,
}


def rows(count: int, seed: int) -> list[dict]:
    """The prompt is always the same; the answer is the largest of the first three numbers."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        vector = 3 * np.eye(6)[i % 3] + 0.3 * rng.standard_normal(6)
        made.append({"text": "The colour is", "label": COLOURS[i % 3], "clip": vector.tolist()})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("colours")
    train = write_jsonl(made / "train.jsonl", rows(96, 0))
    test = write_jsonl(made / "test.jsonl", rows(36, 1))
    (made / "own.yaml").write_text(
        "task: {kind: completion, pack: false, score: rank}\n"
        f"data: {{train: {{files: [{train}]}}, test: {{files: [{test}]}}}}\n"
        "adapter: {soft_tokens: 1, projector: {features: clip, width: 6}}\n"
        "optimizer: {lr: 0.3}\neval: {bootstrap: 20}\n",
        encoding="utf-8",
    )
    return made


def train(folder: Path, name: str, **more) -> Path:
    settings = SMALL | {key.replace("__", "."): value for key, value in more.items()}
    assert run(["train", str(folder / "own.yaml"), "--out", str(folder / name), *flags(settings)]) == 0
    return folder / name


def judged(path: Path) -> dict:
    return {k: v["value"] for k, v in json.loads((path / "eval.json").read_text(encoding="utf-8"))["test"].items()}


def test_what_only_the_features_tell_is_learned(folder: Path, capsys: pytest.CaptureFixture) -> None:
    out = train(folder, "with")
    said = capsys.readouterr().err
    assert said.endswith(f"next:\n  flatshift eval {out} --data {folder / 'test.jsonl'}\n"), (
        "nothing else takes features"
    )
    found, without = (
        judged(out),
        judged(train(folder, "without", adapter__projector="null", data__checks__copies="warn")),
    )
    assert found["accuracy"] >= 0.95 and without["accuracy"] <= 0.5
    assert found["loss"] < without["loss"] - 0.5
    assert {file.name for file in (out / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "projector.safetensors"
    }  # fmt: skip
    capsys.readouterr()
    swapped = [{**row, "clip": row["clip"][1:3] + row["clip"][:1] + row["clip"][3:]} for row in rows(36, 1)]
    file = write_jsonl(folder / "swapped.jsonl", swapped)
    assert run(["eval", str(out), "--data", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["accuracy"]["value"] < 0.1, "the features decide"
    for command, message in (
        (["merge", str(out), "--out", str(folder / "merged")], "cannot be merged"),
        (["export", str(out), "--out", str(folder / "exported")], "PEFT alone would load its soft tokens without"),
        (["generate", str(out), "--prompt", "The colour is"], "`flatshift generate` hands none in"),
    ):
        assert run(command) == 2
        assert message in capsys.readouterr().err


def test_block_by_block_from_parquet_and_the_cache(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, seed in (("train", 0), ("test", 1)):
        given = [{**row, "clip": [row["clip"], row["clip"][::-1]]} for row in rows(24, seed)]
        pq.write_table(pa.Table.from_pylist(given), folder / f"{name}.parquet")
    made = {
        "train__steps": 2,
        "adapter__projector__inject": "[2,4]",
        "data__train__files": folder / "train.parquet",
        "data__test__files": folder / "test.parquet",
    }
    out = train(folder, "blocks", **made, data__cache=folder / "cache")
    assert "token cache: kept in" in (out / "log.txt").read_text(encoding="utf-8")
    capsys.readouterr()
    monkeypatch.delattr(splits, "encode_rows")  # what lies in the cache is encoded no more
    assert run(["eval", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "eval.json").read_text(encoding="utf-8"))


def test_bad_input_is_refused_in_a_sentence(folder: Path, capsys: pytest.CaptureFixture) -> None:
    def refused(message: str, **more) -> None:
        settings = SMALL | {key.replace("__", "."): value for key, value in more.items()}
        assert run(["train", str(folder / "own.yaml"), "--out", str(folder / "bad"), *flags(settings)]) == 2
        assert message in capsys.readouterr().err
        assert not (folder / "bad").exists()

    refused("train.jsonl:1: no column 'clips'; did you mean 'clip'?", adapter__projector__features="clips")
    refused("train.jsonl:1: column 'clip' holds a vector of 6 numbers, not 5", adapter__projector__width=5)
    refused("no train row is left", adapter__projector__width=5, data__bad_rows="skip")
    refused("adapter.projector.inject: there is no block 6", adapter__projector__inject="[6]")
    refused("adapter.projector puts features before trained soft tokens", adapter__soft_tokens="null")
    refused("adapter.projector: the rows of a warm-up are texts", warmup__steps=2)
    refused("record: dynamics and sharpness are of LoRA factors", record__per_doubling=1)
    broken = write_jsonl(folder / "broken.jsonl", [*rows(3, 0), {"text": "The colour is", "label": "red"}, *rows(3, 2)])
    refused("broken.jsonl:4: no column 'clip'", data__train__files=broken)
