"""`flatshift eval` of several runs and bare backbones on the same rows."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.experiments.workflows.evaluation_document import format_document
from flatshift.experiments.workflows.samples import SavedSamples
from tests.support.commands import flags
from tests.support.data_models import byte_tokenizer, write_jsonl
from tests.support.finetune_models import save_backbone

SMALL = {
    "train.steps": 3, "train.batch_size": 4, "train.max_length": 32, "train.save_every": 0, "train.threads": 1,
    "train.precision": "fp32", "optimizer.lr": 0.02, "data.train.limit": 24, "eval.bootstrap": 20,
    "eval.train_limit": 0, "train.max_cut": 1,
}  # fmt: skip
ROWS = [
    {"lang": lang, "id": number, "text": f"{word} {number} " * 6}
    for lang, word in (("de", "Das ist ein Satz"), ("en", "This is a sentence"), ("xal", "one"))
    for number in range(1 if lang == "xal" else 12)
]


def trained(out: Path, recipe: str, **more: object) -> Path:
    words = flags(SMALL | more)
    assert run(["train", recipe, "--out", str(out), *words]) == 0
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    empty = {"data.dev.files": "[]", "data.test.files": "[]"}
    return [trained(place / f"seed-{seed}", "language-model", **empty, **{"train.seed": seed}) for seed in (0, 1)]


def asked(capsys: pytest.CaptureFixture, *words: object) -> dict:
    capsys.readouterr()
    assert run(["eval", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def kept(out: Path, split: str = "data") -> dict[str, dict[str, list]]:
    """What predictions.parquet says of a split, by subject."""
    found: dict[str, dict[str, list]] = {}
    for row in pq.read_table(out / "predictions.parquet").to_pylist():
        if row["split"] == split:
            for column, value in row.items():
                found.setdefault(row["subject"], {}).setdefault(column, []).append(value)
    assert len(found) > 1
    return found


def test_runs_and_backbone_over_one_load(runs, tmp_path, capsys, monkeypatch):
    from flatshift.experiments.workflows import evaluation_target as load

    loads = []
    whole = load.load_backbone
    monkeypatch.setattr(load, "load_backbone", lambda *a, **k: loads.append(a) or whole(*a, **k))
    data = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    out = tmp_path / "judged"
    found = asked(
        capsys, *runs, "flatshift-5m", "--data", data, "--group-by", "lang", "--trained", "en", "--out", out,
    )  # fmt: skip
    assert len(loads) == 1
    names = [str(path) for path in runs]
    assert set(found["figures"]) == {*names, "flatshift-5m"} and found["rows"] == {"data": len(ROWS)}
    assert list(found["differences"]) == [f"{name} − flatshift-5m" for name in names]
    for name in names:
        figure = {s: found["figures"][s]["data"]["bits_per_byte"]["value"] for s in (name, "flatshift-5m")}
        paired = found["differences"][f"{name} − flatshift-5m"]["data"]["bits_per_byte"]
        assert paired["value"] == pytest.approx(figure[name] - figure["flatshift-5m"])
        assert figure[name] != figure["flatshift-5m"] and paired["low"] <= paired["value"] <= paired["high"]
    grouped = found["group_by"]
    assert grouped["rows"] == {"de": 12, "en": 12, "xal": 1} and grouped["families"]["Germanic"] == ["de", "en"]
    assert grouped["figures"][names[0]]["data"]["xal"]["loss"]["low"] is None
    assert "not trained on" in grouped["macro_differences"][f"{names[0]} − flatshift-5m"]["data"]
    assert any("fewer than 10 rows" in note for note in found["notes"])
    # alone, each is the same: an adapter leaves nothing behind
    for name in (names[1], "flatshift-5m"):
        own = ["--train.threads", 1, "--train.precision", "fp32"] * (name == "flatshift-5m")
        alone = asked(capsys, name, "--data", data, "--group-by", "lang", *own)
        ours, theirs = alone["figures"][name]["data"], found["figures"][name]["data"]
        assert ours["loss"]["value"] == pytest.approx(theirs["loss"]["value"], rel=1e-6)
    page = (out / "report.html").read_text()
    assert "the map by lang" in page and "Forgotten" in page and "http://" not in page.replace("http://www.w3.org", "")
    flat = json.loads((out / "eval.json").read_text())
    assert f"{names[0]} data lang=de" in flat
    assert run(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0
    for name, said in kept(out).items():
        assert len(said["row"]) == len(ROWS) and said["row"][0] == "texts.jsonl:1" and all(said["text"])
        loss = sum(said["loss"]) / sum(said["loss.count"])
        assert loss == pytest.approx(found["figures"][name]["data"]["loss"]["value"])


def test_modules_and_biases_that_train_whole_leave_the_backbone_as_it_is(tmp_path, capsys):
    rows = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    own = save_backbone("bert", tmp_path / "own", vocab_size=352)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(own)
    empty = {"data.dev.files": "[]", "data.test.files": "[]"}
    masked = empty | {"task.kind": "masked-lm"}
    for name, backbone, more in (
        ("modules", "flatshift-5m", empty | {"adapter.train_whole": "[norm]"}),
        ("biases", str(own), masked | {"backbone": own, "adapter.bias": "adapted"}),
    ):
        path = trained(tmp_path / name, "language-model", **more)
        found = [asked(capsys, *names, "--data", rows)["figures"] for names in ((path, backbone), (backbone, path))]
        for subject in (str(path), backbone):
            first, second = (figures[subject]["data"]["loss"]["value"] for figures in found)
            assert first == pytest.approx(second, rel=1e-6), f"{subject} after the other"
        assert found[0][backbone]["data"]["loss"]["value"] != found[0][str(path)]["data"]["loss"]["value"]
    # exponentials of the loss of other tokens are not subtracted
    other = trained(tmp_path / "other", "language-model", **masked, backbone="flatshift-encoder-3m")
    found = asked(capsys, path, other, "--data", rows)
    assert "pseudo_perplexity" in found["figures"][str(other)]["data"]
    assert not {"loss", "pseudo_perplexity"} & found["differences"][f"{other} − {path}"]["data"].keys()


def test_texts_that_a_probe_kept_are_of_the_weights_that_wrote_them(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SavedSamples, "delete", lambda saved: None)  # as if the command were cut off
    written, out = [], tmp_path / "probed"
    for path in (*runs, runs[0]):
        shutil.copytree(path, tmp_path / "run")
        words = ["eval", str(tmp_path / "run"), "--probe", "occupations", "--samples", "1", "--max-new-tokens", "3"]
        assert run([*words, "--out", str(out)]) == 0
        written.append((out / "generations.jsonl").read_text(encoding="utf-8"))
        shutil.rmtree(out)
        shutil.rmtree(tmp_path / "run")
    assert written[0] == written[2] != written[1]


def test_ranked_completions_have_groups_and_a_bare_backbone(tmp_path, capsys):
    words = {"data.dev.limit": 4, "data.test.limit": 20, "train.steps": 1}
    path = trained(tmp_path / "rank", "classify", **words, **{"task.kind": "completion", "task.score": "rank"})
    out = tmp_path / "judged"
    found = asked(capsys, path, "flatshift-5m", "--group-by", "label", "--out", out)
    for name, said in kept(out, "test").items():
        hits = [label == predicted for label, predicted in zip(said["label"], said["predicted"], strict=True)]
        assert sum(hits) / 20 == pytest.approx(found["figures"][name]["test"]["accuracy"]["value"])
    assert {"accuracy", "f1_macro", "matthews"} <= set(found["figures"]["flatshift-5m"]["test"])
    difference = found["differences"][f"{path} − flatshift-5m"]["test"]
    assert "accuracy" in difference and "majority_floor" not in difference
    capsys.readouterr()
    for words in (["--window", "64"], ["--overlap", "0"]):
        assert run(["eval", str(path), *words]) == 2
        assert "--window and --overlap cut whole documents, and " in capsys.readouterr().err
    counts = found["group_by"]["rows_by_split"]
    assert {split: sum(own.values()) for split, own in counts.items()} == found["rows"] == {"dev": 4, "test": 20}
    assert all(sum(own[label] for own in counts.values()) == n for label, n in found["group_by"]["rows"].items())
    assert any("groups have fewer than 10 rows of dev (first" in note for note in found["notes"])
    assert run(["eval", str(path), "flatshift-5m", "--group-by", "label"]) == 0
    said = capsys.readouterr().out.splitlines()
    page = re.sub(r"<[^>]*>|\s+", " ", (out / "report.html").read_text(encoding="utf-8"))
    for label, count in counts["dev"].items():
        assert sum(line.split()[:3] == [label, str(count), "rows"] for line in said) >= 1, label
        assert re.search(rf" {label} +{count} ", page)
    by_label = found["group_by"]["figures"][str(path)]["test"]
    right = sum(group["accuracy"]["value"] * group["accuracy"]["n"] for group in by_label.values())
    assert right == pytest.approx(20 * found["figures"][str(path)]["test"]["accuracy"]["value"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["flatshift-5m"], "has no rows of its own; give --data"),
        (["flatshift-5m", "flatshift-5m", "--data", "DATA"], "named twice"),
        (["flatshift-5m", "--data", "DATA", "--group-by", "land"], "no column 'land' to group by"),
        (["flatshift-5m", "--data", "DATA", "--trained", "de"], "--trained"),
        (
            ["flatshift-5m", "--data", "DATA", "--group-by", "lang", "--trained", "fr"],
            "--trained: no row has lang 'fr'",
        ),
        (["flatshift-5m", "--data", "DATA", "--window", "9999"], "--window: 9999 is not from 2 to"),
        (["flatshift-5m", "--data", "DATA", "--task.kind", "classify"], "has no head for task.kind: classify"),
        (["nowhere-at-all", "--data", "DATA"], "is not a run directory, and"),
        (["flatshift-5m", "--data", "DATA", "--out", "HERE"], "is not empty"),
        (["flatshift-5m", "--data", "DATA", "--prompt", "nli", "--shot-seeds", "1", "2"], "--shot-seeds are of"),
    ],
)
def test_mistakes_are_one_sentence(words, said, tmp_path, capsys):
    data = write_jsonl(tmp_path / "texts.jsonl", ROWS[:3])
    given = {"DATA": str(data), "HERE": str(tmp_path)}
    assert run(["eval", *(given.get(word, word) for word in words)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1] and len(lines[-1]) < 330
    assert "--trained" not in words or "evaluating flatshift-5m" not in lines, "refused after work"


def test_a_row_without_a_group_is_named(tmp_path, capsys):
    data = write_jsonl(tmp_path / "texts.jsonl", [*ROWS[:2], {"lang": None, "text": "no language"}])
    assert run(["eval", "flatshift-5m", "--data", str(data), "--group-by", "lang"]) == 2
    assert "texts.jsonl:3: no value in column 'lang' to group by" in capsys.readouterr().err


@pytest.mark.slow
def test_rewards_of_different_losses_are_not_subtracted(tmp_path, capsys):
    """The base model is evaluated as the first run; a reward of another loss or beta has no difference from its own."""
    pairs = [{"prompt": f"say {n}", "chosen": f" yes {n}", "rejected": f" no {n}"} for n in range(12)]
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    files = {"data.train.files": f"[{data}]", "data.dev.files": "[]", "data.test.files": "[]", "train.steps": 1}
    files |= {"data.train.limit": 8}
    settings = {"dpo": {}, "steep": {"task.beta": 1}, "simpo": {"task.loss": "simpo"}}
    paths = {name: trained(tmp_path / name, "preference", **files, **more) for name, more in settings.items()}
    found = asked(capsys, *paths.values(), "flatshift-5m", "--data", data)["differences"]
    names = {name: found[f"{path} − flatshift-5m"]["data"].keys() for name, path in paths.items()}
    rewards = {"loss", "reward_margin", "chosen_reward", "rejected_reward"}
    assert names["dpo"] == rewards | {"preference_accuracy", "reference_distance"}
    assert names["steep"] == {"preference_accuracy", "reference_distance"} and not names["simpo"]


def test_best_step_and_patience_by_a_metric_of_what_is_written(tmp_path, capsys):
    """`train.best` takes any metric that the task is judged by; here numbers in written answers."""
    rows = [{"text": f"{n} + 1 =", "label": str(n + 1)} for n in range(8)]
    data = write_jsonl(tmp_path / "sums.jsonl", rows)
    words = {
        "task.kind": "completion", "task.score": "generate", "task.metrics": "[numeric_match, has_number]",
        "task.max_new_tokens": 3, "train.best": "numeric_match", "train.eval_every": 1, "train.patience": 2,
        "train.steps": 5, "data.train.limit": 8, "data.train.files": f"[{data}]", "data.dev.files": f"[{data}]",
        "optimizer.lr": 1e-6, "data.checks.copies": "warn",
    }  # fmt: skip
    path = trained(tmp_path / "sums", "language-model", **words, **{"data.test.files": "[]"})
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    judged = [line for line in lines if line["split"] == "dev"]
    assert all("numeric_match" in line for line in judged) and 3 <= len(judged) <= 5
    figures = json.loads((path / "eval.json").read_text())["dev"]
    assert {"numeric_match", "has_number", "exact_match"} <= figures.keys()
    for wrong, said in (("numeric_mach", "is not evaluated"), ("majority_floor", "is not evaluated")):
        assert run(["train", "language-model", "--out", str(tmp_path / "no"), "--train.best", wrong]) == 2
        assert said in capsys.readouterr().err
    given = ["--task.kind", "completion", "--task.score", "generate", "--task.metrics", "[numeric_mach]"]
    assert run(["train", "language-model", "--out", str(tmp_path / "no"), *given]) == 2
    assert "did you mean numeric_match?" in capsys.readouterr().err


def test_few_shot_by_a_prompt_with_its_page(runs, tmp_path, capsys):
    words = ["--prompt", "nli", "--shots", "2", "--shots-from", "sample:snli/train", "--shot-seeds", "0", "1"]
    data = write_jsonl(
        tmp_path / "nli.jsonl",
        [{"text": f"A man {n}", "text2": "sleeps", "label": ("entailment", "neutral")[n % 2]} for n in range(6)],
    )
    out = tmp_path / "judged"
    found = asked(capsys, runs[0], "flatshift-5m", "--data", data, "--score", "calibrated", *words, "--out", out)
    few = found["few_shot"]
    assert few["seeds"] == [0, 1] and len(few["subjects"]["flatshift-5m"]["data"]["by_seed"]) == 2
    assert set(few["subjects"]["flatshift-5m"]["data"]["by_score"]) == {"sum", "label", "mean", "byte", "calibrated"}
    test = few["mcnemar"][f"{runs[0]} − flatshift-5m"]["data"]
    assert 0 <= test["p"] <= 1 and test["seed"] == 0
    assert found["figures"]["flatshift-5m"]["data"]["chance"]["value"] == pytest.approx(1 / 3)
    for name, said in kept(out).items():
        assert set(said["predicted"]) <= {"entailment", "neutral", "contradiction"} and said["text"][5] == "A man 5"
        assert sum(said["accuracy"]) / 6 == pytest.approx(found["figures"][name]["data"]["accuracy"]["value"])
    page = (out / "report.html").read_text()
    assert "How it was asked" in page and "McNemar, seed 0" in page
    mistakes = (
        (["--shots", "2"], "--shots has a meaning with --prompt only"),
        (["--prompt", "nil"], "none of the shipped prompts"),
        (["--prompt", "nli", "--shots", "2"], "go together"),
        (["--prompt", "piqa"], "no column 'goal'"),
    )
    for given, said in mistakes:
        assert run(["eval", "flatshift-5m", "--data", str(data), *given]) == 2
        assert said in capsys.readouterr().err


def test_one_wording_of_the_prompt_for_every_row(tmp_path, capsys):
    """`--prompt-language` takes the place of each row's own language; here it swaps the words of the classes."""
    words = "yes: the, no: qzxjk", "yes: qzxjk, no: the"
    first, second = (f"{{text: '{{text}} {{label}} end', labels: {{{word}}}}}" for word in words)
    prompt = tmp_path / "own.yaml"
    prompt.write_text(
        f"text: '{{text}} {{label}} end'\nlabels: {{{words[0]}}}\nby: lang\nwordings: {{en: {first}, de: {second}}}\n"
    )
    rows = [{"text": f"The {what} went to", "label": "yes", "lang": "en"} for what in ("man", "cat", "king")]
    given = ["flatshift-5m", "--data", write_jsonl(tmp_path / "rows.jsonl", rows), "--prompt", prompt]
    right = [
        asked(capsys, *given, *more)["figures"]["flatshift-5m"]["data"]["accuracy"]["value"]
        for more in ([], ["--prompt-language", "en"], ["--prompt-language", "de"])
    ]
    assert right == [1, 1, 0]
    write_jsonl(tmp_path / "rows.jsonl", [{"text": row["text"], "label": "yes"} for row in rows])
    source = ["--shots", "1", "--shots-from", tmp_path / "rows.jsonl"]
    found = asked(capsys, *given, "--prompt-language", "en", *source)
    assert found["rows"] == {"data": 3}, "the column of the language is not read"
    assert run(["eval", *map(str, given), "--prompt-language", "fr"]) == 2
    assert "--prompt-language: 'fr' is none of the prompt's wordings (en, de)" in capsys.readouterr().err


def test_a_row_that_the_training_file_repeats_costs_no_worked_example(tmp_path, capsys, monkeypatch):
    from flatshift.experiments.workflows.few_shot import _Ranker

    contexts, score = [], _Ranker.score
    monkeypatch.setattr(_Ranker, "score", lambda ranker, shots: contexts.extend(shots) or score(ranker, shots))
    names = ("one", "one", "one", "one", "one", "two", "three")
    rows = [{"text": name, "text2": "sleeps", "label": "neutral"} for name in names]
    source = write_jsonl(tmp_path / "source.jsonl", rows)
    data = write_jsonl(tmp_path / "data.jsonl", [rows[0], rows[5]])
    asked(capsys, "flatshift-5m", "--data", data, "--prompt", "nli", "--shots", "2", "--shots-from", source)
    assert [len(shots) for shots in contexts] == [2, 2] and all("one" not in shot for shot in contexts[0])
    found = asked(capsys, "flatshift-5m", "--data", data, "--prompt", "nli", "--shots", "5", "--shots-from", source)
    assert found["few_shot"]["subjects"]["flatshift-5m"]["data"]["shots_missing"] == 3, "for `one` there are two others"
    assert "; 3 examples missing" in format_document(found)


def test_a_row_has_all_the_positions_of_its_backbone(tmp_path, capsys):
    rows = [{"text": "one two " * n, "text2": "sleeps", "label": "neutral"} for n in (330, 400)]
    data = write_jsonl(tmp_path / "long.jsonl", rows)
    for positions, cut in ((4096, 0), (1024, 2)):
        folder = save_backbone("llama", tmp_path / str(positions), vocab_size=352, max_position_embeddings=positions)
        byte_tokenizer().save_pretrained(folder)
        found = asked(capsys, folder, "--data", data, "--prompt", "nli", "--out", tmp_path / f"{positions}-judged")
        assert found["few_shot"]["subjects"][str(folder)]["data"]["rows_cut"] == cut
        assert ("; 2 rows cut" in format_document(found)) == bool(cut)
        assert "rows cut" in (tmp_path / f"{positions}-judged" / "report.html").read_text()
