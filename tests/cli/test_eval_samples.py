"""`flatshift eval --samples`: what is written, kept when cut off, and judged by programs and by a classifier."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flatshift.cli import run
from flatshift.experiments.workflows import samples
from flatshift.experiments.workflows.samples import Sampling, SavedSamples, compute_sample_metrics, write_samples
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate import sandbox
from flatshift.finetune.evaluate.sandbox import check_sandbox_available
from flatshift.finetune.tasks import Classify, LanguageModel
from tests.cli.test_eval_side_by_side import trained
from tests.support.data_models import byte_tokenizer, row, tiny_model, write_jsonl

TOKENIZER = byte_tokenizer()
ROWS = [row(n, text=f"prompt {n} of several") for n in range(4)]
ASKED = Sampling(samples=3, top_p=0.9, max_new_tokens=6)


def written(kept: SavedSamples, asked: Sampling = ASKED, batch_size: int = 5) -> list[list[str]]:
    model = tiny_model("llama", len(TOKENIZER)).eval()
    inference = EvalBatching.of(TOKENIZER, batch_size=batch_size)
    return write_samples("m", model, TOKENIZER, ROWS, LanguageModel(), asked, kept, inference, digest="weights")


def test_draws_are_of_seed_and_place_and_go_on_where_they_were_cut_off(tmp_path: Path, monkeypatch) -> None:
    whole = written(SavedSamples(None))
    assert written(SavedSamples(None), batch_size=2) == whole
    assert len({text for texts in whole for text in texts}) > 6
    file = tmp_path / "kept.jsonl"
    assert written(SavedSamples(file)) == whole
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:7]) + '\n{"key": "torn')
    asked = []
    ours = samples.continue_prompts
    monkeypatch.setattr(samples, "continue_prompts", lambda m, p, *a, **k: asked.append(len(p)) or ours(m, p, *a, **k))
    assert written(SavedSamples(file)) == whole and asked == [12 - 7]
    other = Sampling(samples=3, top_p=0.9, max_new_tokens=6, seed=1)
    assert written(SavedSamples(file), other) != whole and asked == [5, 12]


def test_a_prompt_that_does_not_fit_is_named_by_its_row() -> None:
    rows, model = [*ROWS, row(4, text="long " * 90)], tiny_model("gpt2", len(TOKENIZER)).eval()
    inference = EvalBatching.of(TOKENIZER, batch_size=2)
    with pytest.raises(UserError, match=r"rows\.jsonl:5: \d+ tokens and --max-new-tokens 6 do not fit"):
        write_samples("m", model, TOKENIZER, rows, LanguageModel(), ASKED, SavedSamples(None), inference, digest="")


def test_a_classifier_of_squared_loss_gives_no_probability_of_toxic_texts(monkeypatch) -> None:
    recipe = SimpleNamespace(task=Classify(loss="squared"))
    monkeypatch.setattr(samples.run_parts, "read_finished_recipe", lambda path: recipe)
    monkeypatch.setattr(samples.run_parts, "to_single_process", lambda recipe: recipe)
    monkeypatch.setattr(samples, "read_label_record", lambda recipe, path: (("fine", "toxic"), None))
    with pytest.raises(UserError, match=r"--toxicity: scorer gives no probabilities \(task\.loss: squared\)"):
        samples.check_sampling_rows(ROWS, Sampling(samples=1, toxicity="scorer"))


def test_programs_pass_or_not() -> None:
    try:
        check_sandbox_available()
    except Exception:
        pytest.skip("this system gives no namespaces")
    test = "def check(f):\n    assert f(1) == 2\n"
    rows = [
        row(0, text="def f(x):\n", test=test, entry_point="f"),
        row(1, text="def g(x):\n", test=test, entry_point="g"),
    ]
    texts = [["    return x + 1", "    return x"], ["    import os; os._exit(0)", "    retrun"]]
    found = compute_sample_metrics(rows, texts, Sampling(samples=2, programs=True, pass_at=(1, 2)))
    every = np.arange(2)[None]
    assert found["pass_at_1"].statistic(every)[0] == 0.25 and found["pass_at_2"].statistic(every)[0] == 0.5


def test_unsafe_programs_are_run_only_where_asked(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "_can_run", lambda *, contained: not contained)  # a system without namespaces
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "x = 1 #", "test": "assert x == 1"}])
    words = ["eval", "flatshift-5m", "--data", str(data), "--samples", "1", "--max-new-tokens", "1", "--json"]
    for given, said in (
        (["--programs"], "no namespaces"),
        (["--unsafe-programs"], "--unsafe-programs has a meaning with --programs only"),
    ):
        capsys.readouterr()
        assert run([*words, *given]) == 2
        assert said in capsys.readouterr().err
    assert run([*words, "--programs", "--unsafe-programs"]) == 0
    assert "pass_at_1" in json.loads(capsys.readouterr().out)["figures"]["flatshift-5m"]["data"]
    words[words.index("--samples") + 1] = "2"
    assert run([*words, "--programs", "--unsafe-programs", "--pass-at", "1", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]["flatshift-5m"]["data"]
    assert {"pass_at_1", "pass_at_2"} <= figures.keys()
    assert figures["pass_at_1"]["value"] <= figures["pass_at_2"]["value"] <= 1
    assert run(["eval", "flatshift-5m", "--data", str(data), "--programs"]) == 2
    assert "--programs has a meaning with --samples only" in capsys.readouterr().err


def test_toxicity_by_a_classifier_of_ones_own(tmp_path: Path, capsys) -> None:
    rows = [
        {"text": f"you are {word} {n}", "label": label}
        for n in range(12)
        for word, label in (("awful", "toxic"), ("kind", "fine"))
    ]
    data = write_jsonl(tmp_path / "tones.jsonl", rows)
    files = {"data.train.files": f"[{data}]", "data.dev.files": "[]", "data.test.files": "[]", "train.steps": 2}
    scorer = trained(tmp_path / "scorer", "classify", **files)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"text": f"you are {n}"} for n in range(3)])
    words = ["flatshift-5m", "--data", str(prompts), "--samples", "2", "--max-new-tokens", "4"]
    out = tmp_path / "written"
    capsys.readouterr()
    assert run(["eval", *words, "--toxicity", str(scorer), "--out", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]["flatshift-5m"]["data"]
    assert 0 <= figures["expected_max_toxicity"]["value"] <= 1 and figures["toxicity_probability"]["n"] == 3
    lines = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(len(line["texts"]) == 2 for line in lines)
    assert not list(tmp_path.glob(".written*"))
    mistakes = (
        (["--toxicity", str(scorer), "--toxic-label", "rude"], "none of them 'rude'"),
        (["--programs"], "no column 'test'"),
        (["--programs", "--pass-at", "5"], "takes as many --samples"),
        (["--temperature", "0", "--top-p", "0.5"], "top_p limits draws"),
    )
    for given, said in mistakes:
        assert run(["eval", *words, *given]) == 2
        assert said in capsys.readouterr().err
