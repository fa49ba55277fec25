"""What a finished run gives away through the public command: answers, a merged model, a hub-ready folder."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from flatshift.cli import run
from flatshift.experiments.recipe import load_recipe, resume_recipe
from flatshift.experiments.workflows import folder_check
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.folder_check import to_single_float32_process
from flatshift.experiments.workflows.model_card import (
    _format_data,
    _format_settings,
    _format_usage,
    _usage_code,
    format_code_block,
    format_code_span,
)
from flatshift.finetune.assets import backbone_directory
from flatshift.finetune.atomic import write_json
from flatshift.finetune.data.config import Columns, Data, Source, TrainFiles
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.rows import Row, read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.tasks import Chat, Completion, Seq2Seq
from tests.support.chat_models import chat_tokenizer
from tests.support.commands import flags
from tests.support.data_models import bert_tokenizer, tiny_model

pytestmark = pytest.mark.usefixtures("warm_checks")

BASE = backbone_directory("flatshift-5m")
SMALL = {
    "train.steps": 4,
    "train.batch_size": 4,
    "train.max_length": 48,
    "train.max_cut": 1,
    "train.save_every": 0,
    "train.eval_every": 0,
    "train.threads": 1,
    "train.precision": "fp32",
    "optimizer.lr": 0.02,
    "data.dev.files": "[]",
    "eval.bootstrap": 20,
    "eval.train_limit": 8,
}
EVIL = "rows `x` | <img src=x onerror=alert(1)> ]( ---.jsonl"
ASK = "Q: {text}\nA:"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training rows in a file whose name tries to break out of whatever it is written into."""
    file = tmp_path_factory.mktemp("rows") / EVIL
    texts = [f"how do I reset number {i}" for i in range(24)]
    made = [{"text": text, "label": ["yes", "no", "a|b`c"][i % 3]} for i, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """A run of `task: completion`."""
    out = tmp_path_factory.mktemp("runs") / "completion"
    files = {f"data.{split}.files": f"[{json.dumps(str(rows))}]" for split in ("train", "test")}
    files["data.checks.copies"] = "warn"
    task = {"task.kind": "completion", "task.prompt": ASK, "task.max_new_tokens": 5}
    assert run(["train", "classify", "--out", str(out), *flags(SMALL | files | task)]) == 0
    return out


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    """A run of `task: classify`."""
    out = tmp_path_factory.mktemp("runs") / "classify"
    files = {f"data.{split}.files": f"[{json.dumps(str(rows))}]" for split in ("train", "test")}
    files["data.checks.copies"] = "warn"
    assert run(["train", "classify", "--out", str(out), *flags(SMALL | files)]) == 0
    return out


def plain(run_directory: Path) -> Any:
    """Backbone and adapter by nothing but transformers and PEFT."""
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    return PeftModel.from_pretrained(base, run_directory / "adapter").eval()


# --------------------------------------------------------------------------------------------- generate


def test_generate_writes_what_plain_transformers_writes(written: Path, rows: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "answers.jsonl"
    capsys.readouterr()
    words = ["generate", str(written), "--prompt", "Why", "--prompt", "how do I reset number 0", "--data", str(rows)]
    assert run([*words, "--batch-size", "7", "--json", "--out", str(out)]) == 0
    records = json.loads(capsys.readouterr().out)
    assert records == [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [r["id"] for r in records[:3]] == ["prompt-1", "prompt-2", "0-0"] and len(records) == 26
    assert records[1]["prompt"] == records[2]["prompt"] == "Q: how do I reset number 0\nA:"
    assert [records[1][name] for name in ("text", "tokens", "ended")] == [
        records[2][name] for name in ("text", "tokens", "ended")
    ]
    tokenizer, model = AutoTokenizer.from_pretrained(BASE), plain(written)
    for record in (records[0], records[1], records[2], records[25]):
        ids = [tokenizer.bos_token_id, *tokenizer(record["prompt"], add_special_tokens=False)["input_ids"]]
        said = []
        while len(said) < 5:
            with torch.no_grad():
                said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
            if said[-1] == tokenizer.eos_token_id:
                break
        ended = said[-1] == tokenizer.eos_token_id
        said = said[:-1] if ended else said
        assert (record["text"], record["tokens"], record["ended"]) == (tokenizer.decode(said), len(said), ended)
    assert run([*words, "--out", str(out)]) == 2
    assert "exists; name another file" in capsys.readouterr().err
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    assert run([*words, "--out", str(tmp_path / "link.jsonl")]) == 2
    assert "link.jsonl exists; name another file" in capsys.readouterr().err
    assert run(["generate", str(written), "--prompt", "Why", "--raw", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["prompt"] == "Why"


def test_a_run_of_a_mesh_writes_in_one_process(written: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "mesh"
    shutil.copytree(written, other)
    recipe = (other / "recipe.resolved.yaml").read_text(encoding="utf-8")
    changed = re.sub(r"^(mesh:\n(?:  .*\n)*?  dp: )1", r"\g<1>2", recipe, flags=re.M)
    assert changed != recipe
    (other / "recipe.resolved.yaml").write_text(changed, encoding="utf-8")
    (other / "done.json").unlink()  # which knows the recipe as it was
    assert resume_recipe(other).recipe.mesh.dp == 2
    said = []
    for run_directory in (written, other):
        capsys.readouterr()
        assert run(["generate", str(run_directory), "--prompt", "Why"]) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out and said[0].out.strip()
    assert "has no done.json" in said[1].err and "done.json" not in said[0].err


def test_generate_reads_lines_and_draws_by_its_seed(written: Path, capsys, monkeypatch) -> None:
    def drawn(*words: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo words\n"))
        capsys.readouterr()
        assert run(["generate", str(written), "--json", "--temperature", "1.5", "--max-new-tokens", "6", *words]) == 0
        return [record["text"] for record in json.loads(capsys.readouterr().out)]

    first = drawn("--seed", "3")
    assert len(first) == 2 and first == drawn("--seed", "3", "--batch-size", "1") != drawn("--seed", "4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "x", "--top-k", "5"], "top_k limits draws"),
        (["--prompt", "x", "--seed", "3"], "seed is of draws"),
        (["--prompt", "x", "--max-new-tokens", "1024"], "do not fit the backbone's 1024 positions"),
        (["--prompt", "x", "--num-beams", "0"], "--num-beams must be at least 1"),
        (["--data", "nowhere.jsonl"], "no such file"),
        ([], "there is no prompt"),
    ],
)
def test_generate_refuses_in_a_sentence(written: Path, capsys, monkeypatch, words: list[str], message: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["generate", str(written), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_generate_names_the_prompt_that_is_no_text(written: Path, capsys, monkeypatch) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"fine\n\na \xff b\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", given)
    assert run(["generate", str(written)]) == 2
    assert "standard input:3: not valid UTF-8" in capsys.readouterr().err
    assert run(["generate", str(written), "--prompt", "fine", "--prompt", "a \udcff b"]) == 2
    assert "--prompt 'a \\udcff b' is not valid UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["merge", "export"])
def test_a_folder_that_is_not_empty_is_refused_without_talk_of_resuming(written: Path, command: str, capsys) -> None:
    assert run([command, str(written), "--out", str(written)]) == 2
    error = capsys.readouterr().err
    assert "is not empty; name another directory" in error and "--resume" not in error


def test_one_text_fills_no_template_of_two_columns() -> None:
    task, tokenizer = Completion(prompt="{text} {more}"), open_backbone("flatshift-5m").tokenizer
    with pytest.raises(UserError, match=r"shows \{text\} and \{more\}; give rows .* by --data, or --raw"):
        task.input_format.build_text_prompts(["x"], tokenizer)
    assert [one.text for one in task.input_format.build_text_prompts(["x"], tokenizer, raw=True)] == ["x"]
    (asked,) = Seq2Seq(prompt="say {text}", prefix="do: ").input_format.build_text_prompts(["x"], tokenizer)
    assert asked.text == "do: say x"


def test_a_raw_text_of_a_chat_run_is_read_and_ends_as_in_training() -> None:
    tokenizer = chat_tokenizer("phi3")
    (asked,) = Chat().input_format.build_text_prompts(["x"], tokenizer)
    for text in (asked.text, asked.text.removeprefix("<s>")):
        (raw,) = Chat().input_format.build_text_prompts([text], tokenizer, raw=True)
        assert raw.ids == asked.ids and raw.text == text
        assert raw.stop == asked.stop == tokenizer.convert_tokens_to_ids("<|end|>") != tokenizer.eos_token_id
    tokenizer = open_backbone("flatshift-5m").tokenizer
    (raw,) = Chat(template="plain").input_format.build_text_prompts(["User: x\nAssistant:"], tokenizer, raw=True)
    assert tokenizer.decode(raw.ids) == "<bos>User: x\nAssistant:"


def test_a_classifier_writes_nothing(classes: Path, tmp_path: Path, capsys) -> None:
    assert run(["generate", str(classes), "--prompt", "x"]) == 2
    assert "flatshift eval" in capsys.readouterr().err
    assert run(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "is not a run directory" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- merge


def test_a_merge_reports_and_writes_its_rounding(written: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    out = tmp_path / "merged"
    capsys.readouterr()
    assert run(["merge", str(written), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    stored = json.loads((out / "merge.json").read_text(encoding="utf-8"))
    assert {"out": str(out), **stored} == result
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    adapted = plain(written)
    largest = 0.0
    for name, layer in adapted.get_base_model().named_modules():
        if hasattr(layer, "lora_A"):
            a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
            exact = layer.base_layer.weight.double() + layer.scaling["default"] * b @ a
            found = merged.get_parameter(f"{name}.weight")
            assert torch.equal(found, exact.to(torch.bfloat16)), name
            largest = max(largest, float((found.detach().double() - exact.detach()).abs().max()))
    assert stored["rounding"]["bfloat16"]["largest"] == pytest.approx(largest, rel=1e-12) and largest > 0
    assert stored["rounding"]["bfloat16"]["relative"] <= 2**-8
    prompt = AutoTokenizer.from_pretrained(out)("the cat sat", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        apart = merged.eval()(prompt).logits.float() - adapted(prompt).logits
    assert float(apart.abs().max()) < 0.1 * stored["largest_logit"]
    assert run(["merge", str(written), "--out", str(tmp_path / "again")]) == 0
    said = capsys.readouterr().out
    assert "rounding to bfloat16 moved merged weights by at most" in said
    assert re.search(r"in plain transformers logits differ from backbone \+ adapter by at most [\d.e-]+ \(", said)
    assert re.search(r"it answers 2 prompts as the run does.*, and stops at '<eos>'$", said, flags=re.M)
    share = stored["max_logit_difference"] / stored["largest_logit"]
    same = f"the likeliest token is the same at {stored['same_tokens']} of {stored['places']} places"
    usual = f"usual for bfloat16: {share:.2g} of the largest logit, where rounding gives up to 0.03; {same}"
    assert stored["judgement"] == usual and usual in said.splitlines() and 0 < share <= 0.03
    monkeypatch.setitem(folder_check.USUAL_DIFFERENCE, "bfloat16", share / 2)
    assert run(["merge", str(written), "--out", str(tmp_path / "far"), "--json"]) == 0
    judgement = json.loads(capsys.readouterr().out)["judgement"]
    assert judgement.startswith(f"more than usual for bfloat16: {share:.2g} of the largest logit")
    assert judgement.endswith(f"{same}; evaluate the merged model before you use it, or merge with --dtype float32")


def test_a_merge_needs_no_data(written: Path, classes: Path, rows: Path, tmp_path: Path) -> None:
    """The classes are in the run directory; logits are then compared on drawn tokens."""
    hidden = rows.with_name("elsewhere")
    rows.rename(hidden)
    try:
        for number, source in enumerate((written, classes)):
            assert run(["merge", str(source), "--out", str(tmp_path / str(number))]) == 0
            assert run(["export", str(source), "--out", str(tmp_path / f"export-{number}")]) == 0
    finally:
        hidden.rename(rows)
    assert list(AutoModelForSequenceClassification.from_pretrained(tmp_path / "1").config.id2label.values()) == [
        "a|b`c",
        "no",
        "yes",
    ]


def test_plain_transformers_gives_our_labels(classes: Path, rows: Path, tmp_path: Path, capsys) -> None:
    assert run(["merge", str(classes), "--out", str(tmp_path / "merged"), "--dtype", "float32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["tokenized_rows"], result["other_labels"], result["dtype"]) == (24, 0, "float32")
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "merged" / "model.safetensors").values()}
    assert kinds == {torch.float32}
    texts = [row.values["text"] for row in read_rows(["sample:banking/dev"], columns=Columns(), required=("text",))]
    texts = [*texts[:40], *(f"{text} {'and so on ' * 20}" for text in texts[:8])]  # the last beyond train.max_length
    ask = pipeline("text-classification", str(tmp_path / "merged"), device="cpu")
    assert ask.model.dtype == torch.float32
    said = ask(texts, truncation=True, batch_size=7, top_k=None, function_to_apply="none")
    names, logits = by_training(classes, texts)
    for row, answers in zip(logits, said, strict=True):
        assert [answer["label"] for answer in answers] == [names[i] for i in row.argsort(descending=True)]
        assert [answer["score"] for answer in answers] == pytest.approx(row.sort(descending=True)[0].tolist(), abs=1e-4)


def by_training(source: Path, texts: list[str]) -> tuple[list[str], torch.Tensor]:
    """Classes, and logits of backbone + adapter, row by row, on the tokens that training makes of each text."""
    recipe = to_single_float32_process(resume_recipe(source).recipe)
    names = json.loads((source / "manifest.json").read_text(encoding="utf-8"))["label_names"]
    engine, tokenizer = load_model(recipe, recipe.task, tuple(names), adapter=source / "adapter")
    made = encode(
        [Row({"text": text, "label": names[0]}, str(i), f"f:{i}") for i, text in enumerate(texts)],
        task=recipe.task,
        tokenizer=tokenizer,
        max_length=recipe.train.max_length,
        label_names=names,
    )
    with torch.no_grad():
        model = engine.model.eval()
        return names, torch.cat([model(input_ids=torch.tensor([one.input_ids])).logits for one in made.examples])


@pytest.mark.slow
@pytest.mark.parametrize("backbone_name", ["flatshift-5m", "flatshift-encoder-3m"])
def test_two_thousand_rows_get_no_other_label(backbone_name: str, tmp_path: Path) -> None:
    """Unseen texts, made of pairs of the sample's own; before the tokenizer was saved as training has it, 142 of 2,000
    got another label on the decoder."""
    out = tmp_path / "run"
    settings = {"backbone": backbone_name, "train.steps": 60, "train.eval_every": 0, "train.precision": "fp32"}
    assert run(["train", "classify", "--out", str(out), *flags(settings)]) == 0
    assert run(["merge", str(out), "--out", str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    own = [
        row.values["text"]
        for split in ("train", "dev", "test")
        for row in read_rows([f"sample:banking/{split}"], columns=Columns(), required=("text",))
    ]
    texts = [f"{own[i % len(own)]} {own[(7 * i + 3) % len(own)]}" for i in range(2000)]
    ask = pipeline("text-classification", str(tmp_path / "merged"), device="cpu")
    said = [answer["label"] for answer in ask(texts, truncation=True, batch_size=16)]
    names, logits = by_training(out, texts)
    ours = [names[i] for i in logits.argmax(-1)]
    assert sum(a != b for a, b in zip(said, ours, strict=True)) == 0 and len(set(said)) == 10


def test_a_model_that_answers_otherwise_is_not_written(classes: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    from flatshift.experiments.workflows import folder_check

    with monkeypatch.context() as patch:
        patch.setattr(folder_check, "MAX_DIFFERENCE", {False: 1e-9, True: 1e-9})
        assert run(["merge", str(classes), "--out", str(tmp_path / "merged")]) == 2
    error = capsys.readouterr().err
    assert "more than rounding explains" in error and error.rstrip().endswith("or merge with --dtype float32")
    monkeypatch.setattr(
        "flatshift.finetune.data.post_processor.adds_special_tokens", lambda *args, **more: True
    )  # leaves it as it is
    for command in ("merge", "export"):
        assert run([command, str(classes), "--out", str(tmp_path / "merged")]) == 2
        error = capsys.readouterr().err
        assert (
            "the saved tokenizer of backbone 'flatshift-5m' reads" in error and "otherwise than training did" in error
        )
    assert not (tmp_path / "merged").exists()


# --------------------------------------------------------------------------------------------- export


def snippet_of(card: str) -> str:
    (found,) = re.findall(r"^(`{3,})python\n(.*?)^\1$", card, flags=re.M | re.S)
    return found[1]


@pytest.mark.parametrize("kind", ["written", "classes"])
def test_the_cards_own_snippet_loads_the_adapter_in_plain_peft(
    kind: str, tmp_path: Path, monkeypatch, capsys, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(kind)
    assert run(["export", str(source), "--out", str(tmp_path / "hub")]) == 0
    snippet = snippet_of((tmp_path / "hub" / "README.md").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path / "hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    scope: dict[str, Any] = {}
    exec(snippet, scope)  # as it stands
    assert scope["BACKBONE"] == str(BASE)
    recipe = resume_recipe(source).recipe
    labels = ("a|b`c", "no", "yes") if kind == "classes" else None
    engine, tokenizer = load_model(recipe, recipe.task, labels, adapter=source / "adapter")
    assert scope["ids"][0, 0] == tokenizer.bos_token_id, "as in training"
    with torch.no_grad():
        ours = engine.model.eval()(input_ids=scope["ids"]).logits
    assert torch.equal(ours, scope["logits"])
    assert run(["merge", str(source), "--out", str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    card = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert "library_name: transformers" in card and str(tmp_path) not in card
    monkeypatch.chdir(tmp_path / "merged")
    merged: dict[str, Any] = {}
    exec(snippet_of(card), merged)
    assert torch.equal(merged["ids"], scope["ids"])
    torch.testing.assert_close(merged["logits"], ours, rtol=0, atol=1e-4)
    said = capsys.readouterr().out.strip().splitlines()[-1] if kind == "classes" else None
    assert said is None or said in labels


def test_soft_tokens_leave_with_a_card_that_writes_what_the_run_does(rows: Path, tmp_path: Path, monkeypatch) -> None:
    files = {f"data.{split}.files": f"[{json.dumps(str(rows))}]" for split in ("train", "test")}
    task = {"task.kind": "completion", "task.prompt": ASK, "task.max_new_tokens": 5, "task.pack": "false"}
    own = SMALL | files | task | {"data.checks.copies": "warn", "adapter.soft_tokens": 5, "regularizer.kind": "plain"}
    out, hub = tmp_path / "run", tmp_path / "hub"
    assert run(["train", "classify", "--out", str(out), *flags(own)]) == 0
    assert run(["export", str(out), "--out", str(hub)]) == 0
    snippet = snippet_of((hub / "README.md").read_text(encoding="utf-8"))
    monkeypatch.chdir(hub)
    scope: dict[str, Any] = {}
    exec(snippet, scope)
    (tmp_path / "ask.jsonl").write_text(json.dumps({"text": "some text"}) + "\n", encoding="utf-8")
    written = scope["answer"][0, scope["ids"].shape[1] :]
    (told,) = predicted(out, tmp_path / "ask.jsonl")
    assert told["answer"] == scope["tokenizer"].decode(written, skip_special_tokens=True).strip() != ""


def test_the_card_is_valid_whole_and_closed(written: Path, classes: Path, rows: Path, tmp_path: Path) -> None:
    for source in (written, classes):
        folder = tmp_path / source.name
        assert run(["export", str(source), "--out", str(folder)]) == 0
        text = (folder / "README.md").read_text(encoding="utf-8")
        _, head, body = text.split("---\n", 2)
        metadata = yaml.safe_load(head)
        assert metadata["base_model"] == "flatshift-5m" and metadata["library_name"] == "peft"
        assert metadata["pipeline_tag"] == ("text-classification" if source == classes else "text-generation")
        assert "lora" in metadata["tags"] and "license" not in metadata and "# license: TO FILL IN" in head
        (entry,) = json.loads((source / "manifest.json").read_text(encoding="utf-8"))["inputs"]
        assert entry["sha256"] in body and format_code_span(EVIL, table=True) in body and "| 24 |" in body
        for split, metrics in json.loads((source / "eval.json").read_text(encoding="utf-8")).items():
            for name, m in metrics.items():
                if name != "majority_floor":
                    interval = "–" if m["low"] is None else f"{m['low']:.4g} to {m['high']:.4g}"
                    assert f"| {split} | {name} | {m['value']:.4g} | {interval} |" in body
        if source == classes:
            floor = json.loads((source / "eval.json").read_text(encoding="utf-8"))["test"]["majority_floor"]["value"]
            assert re.search(rf"accuracy .* \| {floor:.4g} \| 24 \|", body)
        for setting in ("optimizer.lr", "adapter.rank", "train.seed", "regularizer.sigma", "task.kind"):
            assert f"| `{setting}` |" in body
        outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", re.sub(r"^(`{3,}).*?^\1$", "", body, flags=re.M | re.S))
        assert "<img" not in outside and "alert(1)" not in outside, "what the user named stays inside code"
        for file in folder.iterdir():
            if file.suffix != ".safetensors":
                found = file.read_text(encoding="utf-8")
                assert str(rows.parent) not in found and str(BASE) not in found, f"{file} names a directory of here"


def test_a_sum_says_that_its_figures_are_of_the_first_adapter(written: Path, tmp_path: Path) -> None:
    other = tmp_path / "second"
    shutil.copytree(written / "adapter", other / "adapter")
    folder = tmp_path / "hub"
    assert run(["export", str(written), "--add", f"{other}=0.5", "--out", str(folder)]) == 0
    text = (folder / "README.md").read_text(encoding="utf-8")
    rank = resume_recipe(written).recipe.adapter.rank
    assert json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"] == 2 * rank
    assert f"**A sum of adapters**, of rank {2 * rank}" in text and "`second` with weight 0.5" in text
    assert "has not been evaluated" in text.split("## How it was evaluated")[0]
    assert "metrics" not in yaml.safe_load(text.split("---\n")[1]) and str(tmp_path) not in text
    mine, summed = (
        plain(written),
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32), folder),
    )
    name, layer = next((n, m) for n, m in mine.named_modules() if hasattr(m, "lora_A"))
    found = summed.get_submodule(name).get_delta_weight("default")
    torch.testing.assert_close(found, 1.5 * layer.get_delta_weight("default"), rtol=1e-5, atol=1e-7)


def test_the_card_names_other_adapters_by_their_own_names(written: Path) -> None:
    recipe = resume_recipe(written).recipe
    for setting, path in (("start", "/srv/me/secret/first"), ("under", "/srv/me/secret/first/adapter")):
        adapter = dataclasses.replace(recipe.adapter, **{setting: path})
        text = _format_settings(dataclasses.replace(recipe, adapter=adapter))
        assert f'| `adapter.{setting}` | `"first"` |' in text and "secret" not in text


def test_the_card_says_which_rows_were_read_and_how_a_head_reads_a_text() -> None:
    recipe = load_recipe("classify").recipe
    data = Data(train=TrainFiles(files=("a",), first=50), holdout=0.1, label_noise=0.004)
    text = _format_data(dataclasses.replace(recipe, data=data), [])
    assert "- train: its first 50 rows were read.\n" in text and "**0.4% of the training labels" in text
    assert "A share of 0.1 of the training rows was set apart for dev and as much for test.\n" in text
    sources = {"a|b": Source(files=("a",), weight=3, limit=20), "c": Source(files=("c",), first=7)}
    data = Data(train=TrainFiles(sources=sources), holdout=0.2, holdout_splits=("dev",))
    text = _format_data(dataclasses.replace(recipe, data=data), [])
    for said in ("`a|b`: a source of the training rows, of weight 3.", "`a|b`: 20 rows of it", "`c`: its first 7 rows"):
        assert f"- {said}" in text
    assert "set apart for dev.\n" in text
    code = _usage_code(recipe, open_backbone(recipe.backbone).tokenizer, ("no", "yes"), recipe.backbone, merged=False)
    assert "tokenizer('some text', return_tensors='pt', truncation=True)" in code and "second text of a pair" in code


def test_the_card_asks_a_head_as_training_did(tmp_path: Path, monkeypatch) -> None:
    """With the segments of a pair, and with the padding by which a decoder's head finds the end of a text."""
    tokenizer, recipe = bert_tokenizer(), load_recipe("classify").recipe
    tiny_model("bert-classes", len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = _usage_code(recipe, tokenizer, ("a", "b", "c"), "org/base", merged=True)
    names: dict[str, Any] = {}
    exec(code.replace("tokenizer('some text'", "tokenizer('some', 'text'"), names)
    pair = tokenizer("some", "text", return_tensors="pt")
    assert pair["token_type_ids"].sum() > 0
    with torch.no_grad():
        assert torch.equal(names["logits"], names["model"](**pair).logits)
    code = _usage_code(recipe, tokenizer, ("a", "b", "c"), "org/base", merged=False)
    assert "\nbackbone.config.get_text_config().pad_token_id = tokenizer.pad_token_id\n" in code
    code = _usage_code(load_recipe("completion").recipe, tokenizer, None, "org/base", merged=False)
    assert "get_text_config" not in code


def test_a_local_backbone_gets_its_hub_name(tmp_path: Path, capsys) -> None:
    from flatshift.experiments.workflows.model_card import _without_directories, published_name

    own = tmp_path / "private" / "mine"
    own.mkdir(parents=True)
    for file in BASE.iterdir():
        (own / file.name).symlink_to(file)
    settings = SMALL | {"train.steps": 1, "data.train.limit": 8, "data.test.limit": 8, "backbone": own}
    source = tmp_path / "run"
    assert run(["train", "classify", "--out", str(source), *flags(settings)]) == 0
    capsys.readouterr()
    assert run(["export", str(source), "--out", str(tmp_path / "x"), "--base-model", "not a name"]) == 2
    assert "no name of the model hub" in capsys.readouterr().err
    named = ["--base-model", "org/mine", "--license", "mit"]
    assert run(["export", str(source), "--out", str(tmp_path / "a")]) == 0
    assert run(["export", str(source), "--out", str(tmp_path / "b"), *named]) == 0
    for folder, name in (("a", "mine"), ("b", "org/mine")):
        text = (tmp_path / folder / "README.md").read_text(encoding="utf-8")
        settings = json.loads((tmp_path / folder / "adapter_config.json").read_text(encoding="utf-8"))
        assert settings["base_model_name_or_path"] == name == yaml.safe_load(text.split("---\n")[1])["base_model"]
        assert ("the backbone was a local directory" in text) == (folder == "a")
        assert str(tmp_path) not in text
    assert "license: mit" in text and "sample:banking/train" in text
    assert published_name("org/name") == "org/name" and published_name(str(own)) == "mine"
    text = "yes/no? {text}"
    recipe = dataclasses.replace(resume_recipe(source).recipe, backbone="org/name", task=Completion(prompt=text))
    kept = ["--backbone", "org/name", "--u", "https://h/x/y", "s3://h/x/y", "sample:banking/train", "hub:a/b:train"]
    kept += ["package:mine/folder", "--task.prompt", text, f"--task.prompt={text}", "--grid", "optimizer.lr=0.1,0.2"]
    given = [
        ["flatshift", "train", f"{own}/r.yaml", "--a=~/b/c.json", "--x", '[/a/b, ./c, {d: "e/f g"}]', *kept],
        [
            "/usr/bin/flatshift",
            "train",
            "--resume",
            "runs/first/",
            "--data",
            "file:///mnt/ann/my files/x.jsonl",
            "/b c/d",
        ],
        ["flatshift", "train", "--like", "a\nb/c", "--out", "https://ann:pw@h/x"],
    ]
    shown = _without_directories("".join(f"{shlex.join(words)}\n" for words in given), recipe)
    assert [shlex.split(line) for line in shown.split("\n")] == [
        ["flatshift", "train", "r.yaml", "--a=c.json", "--x", "[b, c, {d: f g}]", *kept],
        ["flatshift", "train", "--resume", "first", "--data", "x.jsonl", "d"],
        ["flatshift", "train", "--like", "c", "--out", "https://h/x"],
    ]


def test_a_gguf_card_asks_a_chat_run_in_its_template() -> None:
    card = {}
    for name, task in {"chat": Chat(system="Be brief."), "completion": Completion(prompt="Q: {text}")}.items():
        recipe = dataclasses.replace(load_recipe("language-model").recipe, task=task)
        (card[name],) = _format_usage(recipe, None, None, "base", "gguf")
    assert "llama-cli -m model.gguf --temp 0 -cnv -sys 'Be brief.'" in card["chat"]
    assert "llama-cli -m model.gguf --temp 0 -no-cnv -p 'Q: some text'" in card["completion"]


def test_no_text_closes_its_code() -> None:
    assert format_code_span("a`b``c") == "```a`b``c```" and format_code_span("`a\n# b`") == "`` `a # b` ``"
    assert format_code_span("a|b", table=True) == "`a\\|b`"
    assert (
        format_code_block("x\n```\n# y").startswith("````\n")
        and format_code_block("x", "python") == "```python\nx\n```\n"
    )


def test_an_unfinished_run_is_refused(written: Path, tmp_path: Path, capsys) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "recipe.resolved.yaml").write_bytes((written / "recipe.resolved.yaml").read_bytes())
    write_json(half / "manifest.json", {"inputs": []})
    for words in (["merge", str(half)], ["export", str(half)], ["generate", str(half), "--prompt", "x"]):
        assert run(words) == 2
        assert f"flatshift train --resume {half}" in capsys.readouterr().err


# ----------------------------------------------------------------------------------- outputs that are no probabilities


def headed(rows: list[dict[str, Any]], folder: Path, *words: str) -> Path:
    """A run of a head on the small encoder, trained and evaluated on `rows`."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = {f"data.{split}.files": f"[{json.dumps(str(file))}]" for split in ("train", "test")}
    more = {"backbone": "flatshift-encoder-3m", "data.checks.copies": "warn", "regularizer.kind": "plain"}
    assert run(["train", "classify", "--out", str(folder / "run"), *flags(SMALL | files | more), *words]) == 0
    return folder / "run"


def predicted(run_directory: Path, file: Path) -> list[dict[str, Any]]:
    out = file.with_name("said.jsonl")
    assert run(["predict", str(run_directory), "--data", str(file), "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_numbers_far_from_zero_keep_their_digits_in_bf16(tmp_path: Path, capsys) -> None:
    rows = [{"text": f"the year {i % 12}", "label": 1994.0 + i % 12} for i in range(24)]
    out = headed(rows, tmp_path, "--task.kind", "regress", "--train.precision", "bf16", "--adapter.rank", "1")
    recipe = resume_recipe(out).recipe
    engine, _ = load_model(recipe, recipe.task, None, adapter=out / "adapter")
    hooked = [name for name, layer in engine.model.named_modules() if layer._forward_hooks]
    assert hooked and all("score" in name or "classifier" in name for name in hooked), "no factor of rank 1"
    assert run(["merge", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{out}/merged: float32" in said and "likeliest" not in said
    answer = pipeline("text-classification", str(out / "merged"))
    values = [row["value"] for row in predicted(out, tmp_path / "rows.jsonl")]
    assert values == pytest.approx([one["score"] for one in answer([row["text"] for row in rows])], abs=0.5)
    assert len(set(values)) > 6 and all(value % 1 for value in values), "bf16 has 1992 and 2000, and none between"
    assert json.loads((out / "eval.json").read_text())["test"]["pearson"]["value"] is not None
    assert run(["merge", str(out), "--dtype", "bfloat16", "--out", str(tmp_path / "narrow")]) == 0
    assert "where bfloat16 has steps of up to 2e+01: merge with --dtype float32" in capsys.readouterr().out


def test_outputs_of_a_squared_loss_leave_as_they_are(tmp_path: Path) -> None:
    rows = [{"text": f"is it number {i}", "label": ("odd", "even", "none")[i % 3]} for i in range(24)]
    out = headed(rows, tmp_path, "--task.loss", "squared")
    assert run(["merge", str(out)]) == 0
    answer = pipeline("text-classification", str(out / "merged"), top_k=None)
    for row, told in zip(rows[:4], predicted(out, tmp_path / "rows.jsonl"), strict=False):
        found = {one["label"]: one["score"] for one in answer([row["text"]])[0]}
        assert found == pytest.approx({name: told[f"output_{name}"] for name in found}, abs=0.02)
