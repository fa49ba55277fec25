"""`flatshift eval --harness`: lm-eval's figures on a local task are those of a naive reading of the same model."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from flatshift.cli import run
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.workflows.lm_eval import run_harness
from flatshift.finetune.assets import backbone_directory
from flatshift.finetune.errors import UserError
from tests.support.commands import flags

HERE = all(importlib.util.find_spec(name) is not None for name in ("lm_eval", "datasets"))
needs_package = pytest.mark.skipif(not HERE, reason="needs the extra `harness` (lm-eval, datasets)")
BASE = backbone_directory("flatshift-5m")
SMALL = {
    "train.steps": 3,
    "train.batch_size": 4,
    "train.max_length": 32,
    "train.max_cut": 1,
    "train.save_every": 0,
    "train.threads": 1,
    "train.precision": "fp32",
    "optimizer.lr": 0.02,
    "data.train.limit": 24,
    "data.dev.files": "[]",
    "data.test.files": "[]",
    "eval.bootstrap": 10,
    "eval.train_limit": 4,
}
CHOICES = (" king", " water", " the house")
TASK = """task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: {choices}
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "lm"
    words = flags(SMALL)
    assert run(["train", "language-model", "--out", str(out), *words]) == 0
    return out


@needs_package
def test_a_local_task_gives_the_figures_of_a_naive_reading(trained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    docs = [{"question": f"In the year {1800 + 7 * i} they saw", "answer": i % 3} for i in range(12)]
    file = tmp_path / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "local.yaml").write_text(TASK.format(file=file, choices=json.dumps(CHOICES)), encoding="utf-8")
    words = ["eval", str(trained), "--harness", "local_choice", "--harness-include", str(tasks), "--json"]
    capsys.readouterr()
    assert run(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((trained / "harness.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, trained / "adapter").eval()

    def nats(question: str, choice: str, begin: list[int]) -> float:
        ids = [*begin, *tokenizer(question + choice, add_special_tokens=False)["input_ids"]]
        from_ = len(begin) + len(tokenizer(question, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return float(sum(logs[t - 1, ids[t]] for t in range(from_, len(ids))))

    def accuracy(begin: list[int]) -> float:
        right = [int(np.argmax([nats(d["question"], c, begin) for c in CHOICES])) == d["answer"] for d in docs]
        return sum(right) / len(docs)

    assert record["results"]["local_choice"]["acc,none"] == pytest.approx(accuracy([tokenizer.bos_token_id]))
    assert record["prefix"] == [tokenizer.bos_token_id] and record["limit"] is None
    assert record["items"]["local_choice"]["effective"] == 12
    assert record["versions"]["lm-eval"] and record["task_versions"]["local_choice"] == 1.0
    states = (random.getstate(), np.random.get_state()[1].copy(), torch.random.get_rng_state())  # noqa: NPY002
    again = run_harness(trained, ["local_choice"], include=tasks, limit=2, seed=3, quiet=True)
    assert states[0] == random.getstate() and (states[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert torch.equal(states[2], torch.random.get_rng_state())
    assert again["items"]["local_choice"] == {"original": 12, "effective": 2} and again["seed"] == 3
    assert run([*words[:-1], "--harness-limit", "2"]) == 0
    assert "not to be compared with published figures" in capsys.readouterr().out
    assert run(["eval", str(trained), "--harness", "locl_choice", "--harness-include", str(tasks)]) == 2
    assert "lm-eval has no task 'locl_choice'" in capsys.readouterr().err


@needs_package
def test_texts_begin_as_in_training() -> None:
    from flatshift.experiments.workflows.lm_eval import _add_training_prefix
    from tests.support.data_models import bert_tokenizer, byte_tokenizer

    for tokenizer, expected in ((byte_tokenizer(), [1]), (byte_tokenizer(bos=False), []), (bert_tokenizer(), [2])):
        before = tokenizer("the cat")["input_ids"]
        changed, prefix = _add_training_prefix(tokenizer, begin=True)
        assert prefix == expected and tokenizer("the cat")["input_ids"] == before
        assert changed("the cat")["input_ids"][: len(prefix)] == prefix
        assert (
            changed("the cat", add_special_tokens=False)["input_ids"]
            == tokenizer("the cat", add_special_tokens=False)["input_ids"]
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--harness-limit", "3"], "--harness-limit has a meaning with --harness only"),
        (["--harness", "x", "--data", "f"], "--data does not go with --harness"),
        (["--harness", "x", "--mesh.dp", "2"], "--mesh.dp does not go with --harness"),
        (["--harness", "x", "--sharpness"], "--sharpness does not go with --harness"),
        (["--harness", "x", "--samples", "3"], "--samples does not go with --harness"),
        (["--sharpness", "--out", "y"], "--out does not go with --sharpness"),
        (["--max-new-tokens", "200"], "--max-new-tokens has a meaning with --samples only"),
        (["--score", "mean"], "--score has a meaning with --prompt only"),
        (["--samples", "1", "--window", "64"], "--window does not go with --samples"),
        (["--samples", "1", "--pass-at", "2"], "--pass-at has a meaning with --programs only"),
    ],
)
def test_what_does_not_go_is_refused(tmp_path: Path, capsys: Any, words: list[str], message: str) -> None:
    assert run(["eval", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"), [("", "soft_tokens"), (", projector: {features: x, width: 2}", "projector")]
)
def test_what_lies_before_every_text_is_refused(words: str, what: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "own.yaml").write_text(f"task: {{pack: false}}\nadapter: {{soft_tokens: 2{words}}}\n", encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "own.yaml")).recipe
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: True if name == "lm_eval" else real(name, *a))
    monkeypatch.setattr("flatshift.experiments.workflows.lm_eval.read_finished_recipe", lambda *_: recipe)
    with pytest.raises(
        UserError, match=f"--harness: lm-eval pads .*adapter.{what} puts before .*`flatshift eval RUN_D"
    ):
        run_harness(tmp_path, ["hellaswag"])


def test_a_missing_package_is_one_sentence(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else real(name, *a))
    assert run(["eval", str(tmp_path), "--harness", "hellaswag"]) == 2
    assert "needs the package lm-eval; pip install 'flatshift[harness]'" in capsys.readouterr().err
