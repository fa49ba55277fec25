"""`flatshift train chat` as it ships: panel, counts, judged answers, a template that travels, and refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from experiments.recipe import from_override, load_recipe, resume_recipe
from finetune import assets
from finetune.errors import UserError
from flatshift.cli import run
from tests.data_models import write_jsonl

SMALL = {
    "train.steps": 3,
    "train.batch_size": 2,
    "train.max_length": 320,
    "train.eval_every": 0,
    "train.precision": "fp32",
    "train.threads": 1,
    "data.train.limit": 12,
    "data.dev.limit": 4,
    "data.test.limit": 4,
    "task.max_new_tokens": 3,
    "eval.train_limit": 0,
    "eval.bootstrap": 10,
}


def flags(settings: dict) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the shipped recipe with a template file of the user's own."""
    home = tmp_path_factory.mktemp("chat")
    from finetune.data.chat.template import template_text

    (home / "mine.jinja").write_text(template_text("plain").replace("User: ", "Q: "), encoding="utf-8")
    task = {"task.template": home / "mine.jinja"}
    assert run(["train", "chat", "--out", str(home / "run"), *flags(SMALL | task)]) == 0
    return home / "run"


def test_the_log_shows_what_is_supervised(finished: Path) -> None:
    log = re.sub(r"^\S+Z ", "", (finished / "log.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for split, count in (("train", 12), ("dev", 4), ("test", 4)):
        assert f"{split}: {count} conversations: " in log
    assert "truncated answers, 0 without a supervised token (left out), 0 bad rows (left out)" in log
    panel = re.sub(r"(?m)^\d\S+Z ", "", log).split("first batch: ")[1]  # without times
    assert "Q: " in panel and "Assistant:⟦ " in panel and "<eos>⟧\n     Q: Just the number, please.\n" in panel


def test_the_last_turn_is_judged(finished: Path) -> None:
    figures = json.loads((finished / "eval.json").read_text(encoding="utf-8"))["test"]
    assert figures.keys() == {"loss", "perplexity", "bits_per_byte", "exact_match"}
    assert figures["exact_match"]["n"] == figures["loss"]["n"] == 4 and 0 < figures["loss"]["value"] < 12


def test_the_template_travels_and_is_watched(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(["export", str(finished), "--out", str(tmp_path / "hub")]) == 0
    template = finished.parent / "mine.jinja"
    assert (tmp_path / "hub" / "chat_template.jinja").read_text(encoding="utf-8") == template.read_text(
        encoding="utf-8"
    )
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    shutil.rmtree(copy / "stages" / "fine-tune")
    capsys.readouterr()
    (copy / "template.jinja").write_text("edited", encoding="utf-8")
    for command in (["train", "--resume", str(copy)], ["generate", str(copy), "--prompt", "Hi"]):
        assert run(command) == 2
        assert "task.template" in (said := capsys.readouterr().err) and "changed since the run began" in said


@pytest.mark.parametrize("edited", ["Q: {{ messages[0].content }}", None])
def test_a_run_reads_its_own_copy_of_the_template(
    finished: Path, edited: str | None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = finished.parent / "mine.jinja"
    before = template.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    try:
        if edited is None:
            template.unlink()
        else:
            template.write_text(edited, encoding="utf-8")
        assert run(["generate", str(finished), "--prompt", "Hi", "--max-new-tokens", "2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["prompt"] == "<bos>Q: Hi\nAssistant:"
        assert run(["export", str(finished), "--out", "hub"]) == 0
    finally:
        template.write_text(before, encoding="utf-8")
    assert (tmp_path / "hub" / "chat_template.jinja").read_text(encoding="utf-8") == before
    assert str(finished.parent) not in (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")


def test_a_run_of_an_earlier_version_refuses_an_edited_template(finished: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("recipe.resolved.yaml", "manifest.json"):
        shutil.copy(finished / name, old / name)
    template = finished.parent / "mine.jinja"
    assert resume_recipe(old).recipe.task.template == str(template)
    before = template.read_text(encoding="utf-8")
    try:
        template.write_text("edited", encoding="utf-8")
        with pytest.raises(UserError, match=r"^task\.template: .*mine\.jinja changed since the run began"):
            resume_recipe(old)
    finally:
        template.write_text(before, encoding="utf-8")


def test_a_relative_template_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = [from_override("task.kind", "chat"), from_override("task.template", "mine.jinja")]
    assert load_recipe(None, task).recipe.task.template == str(tmp_path / "mine.jinja")
    assert load_recipe("chat").recipe.task.template == "plain"


def test_it_answers_as_it_was_judged(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns}, {"messages": turns[:1]}])
    arguments = ["generate", str(finished), "--prompt", "Hi", "--data", str(path), "--json"]
    assert run([*arguments, "--max-new-tokens", "4"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [one["prompt"] for one in records] == ["<bos>Q: Hi\nAssistant:"] * 3
    assert len({one["text"] for one in records}) == 1 and 0 < records[0]["tokens"] <= 4
    assert run(["eval", str(finished), "--harness", "hellaswag"]) == 2
    assert "--harness" in capsys.readouterr().err


def test_it_merges_and_its_card_asks_it_as_it_was_trained(finished: Path, tmp_path: Path) -> None:
    assert run(["merge", str(finished), "--out", str(tmp_path / "merged")]) == 0
    record = json.loads((tmp_path / "merged" / "merge.json").read_text(encoding="utf-8"))
    assert record["rows"] == 8 and record["max_logit_difference"] < 0.01 * record["largest_logit"]
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()
    assert run(["export", str(finished), "--out", str(tmp_path / "hub")]) == 0
    snippet = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    scope: dict = {}
    here = snippet.replace("ADAPTER = '.'", f"ADAPTER = {str(tmp_path / 'hub')!r}")
    exec(here.replace("BACKBONE = 'flatshift-5m'", f"BACKBONE = {str(assets.backbone('flatshift-5m'))!r}"), scope)
    assert scope["tokenizer"].decode(scope["ids"][0]) == "<bos>Q: some text\nAssistant:"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task.template": "null"}, "the backbone's tokenizer has no chat template; name a file of Jinja text"),
        ({"task.template": "nowhere.jinja"}, "nowhere.jinja'; name a file of Jinja text, or 'plain'"),
        ({"data.label_noise": 0.2}, "data.label_noise: a conversation has no label to make wrong"),
        ({"train.max_length": 48}, "keep no supervised token at train.max_length 48, more than task.max_unsupervised"),
        ({"task.turns": "first"}, "task.turns"),
        ({"task.max_truncated": 2}, "task.max_truncated must be between 0 and 1"),
    ],
)
def test_what_cannot_be_trained_ends_before_a_directory_is_made(
    settings: dict, says: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run(["train", "chat", "--out", str(tmp_path / "run"), *flags(SMALL | settings)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_bad_rows_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    good = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": good}, {"messages": good[::-1]}, {"messages": good}, {"text": "no conversation"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    own = {"data.train.files": path, "data.dev.files": "[]", "data.test.files": "[]", "data.train.limit": "null"}
    arguments = ["train", "chat", "--out", str(tmp_path / "run"), *flags(SMALL | own)]
    assert run(arguments) == 2
    assert "rows.jsonl:4: no column 'messages'" in capsys.readouterr().err
    assert run([*arguments, "--data.bad_rows", "skip"]) == 0
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "skipped 2 bad rows, first " in log and "train: 2 conversations: " in log and "1 bad rows (left out)" in log
