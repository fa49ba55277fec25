"""`flatshift train chat` as it ships: panel, counts, judged answers, a template that travels, and refusals."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flatshift.cli import run
from flatshift.experiments.recipe import from_override, load_recipe, resume_recipe
from flatshift.experiments.workflows.generate import GenerativeRuns
from flatshift.finetune import assets
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from tests.support.chat_models import CONVERSATIONS, chat_tokenizer
from tests.support.commands import flags
from tests.support.data_models import tiny_model, write_jsonl

pytestmark = pytest.mark.usefixtures("warm_checks")

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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the shipped recipe with a template file of the user's own."""
    home = tmp_path_factory.mktemp("chat")
    from flatshift.finetune.data.chat.template import read_template

    (home / "mine.jinja").write_text(read_template("plain").replace("User: ", "Q: "), encoding="utf-8")
    task = {"task.template": home / "mine.jinja", "task.score": "generate"}
    assert run(["train", "chat", "--out", str(home / "run"), *flags(SMALL | task)]) == 0
    return home / "run"


def test_the_log_shows_what_is_supervised(finished: Path) -> None:
    log = re.sub(r"^\S+Z ", "", (finished / "log.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for split, count in (("train", 12), ("dev", 4), ("test", 4)):
        assert f"{split}: {count} conversations: " in log
    assert "truncated answers, 0 without a target token (left out), 0 bad rows (left out)" in log
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
    assert load_recipe("chat").recipe.task.template == "auto"


def test_it_answers_as_it_was_judged(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns}, {"messages": turns[:1]}])
    arguments = ["generate", str(finished), "--prompt", "Hi", "--data", str(path), "--json"]
    assert run([*arguments, "--max-new-tokens", "4"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [one["prompt"] for one in records] == ["<bos>Q: Hi\nAssistant:"] * 3
    assert len({one["text"] for one in records}) == 1 and 0 < records[0]["tokens"] <= 4
    assert run([*arguments, "--raw"]) == 2 and "--raw is of --prompt" in capsys.readouterr().err
    samples = ["eval", str(finished), "--data", str(path), "--samples", "1", "--out", str(tmp_path / "judged")]
    assert run([*samples, "--max-new-tokens", "2"]) == 0
    lines = (tmp_path / "judged" / "generations.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"]["messages"] for line in lines] == [turns, turns[:1]]
    capsys.readouterr()
    tested = write_jsonl(tmp_path / "tested.jsonl", [{"messages": turns, "test": "assert True"}])
    words = ["eval", str(finished), "--data", str(tested), "--samples", "1", "--programs", "--unsafe-programs"]
    assert run(words) == 2 and "this run reads no `text`" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"^the conversation: roles are out of order: [^;]*$"):
        GenerativeRuns([finished]).ask("run", [*turns[:1], *turns[:1]])
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
    exec(
        here.replace("BACKBONE = 'flatshift-5m'", f"BACKBONE = {str(assets.backbone_directory('flatshift-5m'))!r}"),
        scope,
    )
    assert scope["tokenizer"].decode(scope["ids"][0]) == "<bos>Q: some text\nAssistant:"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task.template": "chatlm"}, "chatlm'; did you mean 'chatml'?; name a file of Jinja text, auto (the "),
        (
            {"task.template": "nowhere.jinja"},
            "nowhere.jinja'; name a file of Jinja text, auto (the tokenizer's own), or",
        ),
        ({"task.template": "gemma"}, "gemma ends a turn with '<end_of_turn>', which is no token of the backbone's"),
        ({"task.template_arguments": "{enable_thinking: false}"}, "task.template reads no 'enable_thinking'; leave it"),
        ({"task.template_arguments": "{messages: []}"}, "task.template_arguments cannot set 'messages'"),
        ({"task.template_arguments": "thinking"}, "task.template_arguments must be a mapping"),
        ({"data.label_noise": 0.2}, "data.label_noise: a conversation has no label to make wrong"),
        ({"train.max_length": 48}, "keep no target token at train.max_length 48, more than task.max_unsupervised"),
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
    said = capsys.readouterr().err
    assert "rows.jsonl:4: no column 'messages'" in said and "leave such rows out with data.bad_rows: skip" in said
    assert run([*arguments, "--data.bad_rows", "skip"]) == 0
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "skipped 2 bad rows, first " in log and "train: 2 conversations: " in log and "1 bad rows (left out)" in log


# ----------------------------------------------------------------------------------- another model, and other columns

OWN = {"data.dev.files": "[]", "data.test.files": "[]", "data.train.limit": "null", "task.score": "perplexity"}
SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def prompts(found: Path, data: Path, capsys: pytest.CaptureFixture, *more: str) -> list[str]:
    """What the model reads of each row before it answers."""
    capsys.readouterr()
    assert run(["generate", str(found), "--data", str(data), "--max-new-tokens", "1", "--json", *more]) == 0
    return [one["prompt"] for one in json.loads(capsys.readouterr().out)]


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe on an instruct model, whose template thinks unless asked not to."""
    home = tmp_path_factory.mktemp("instruct")
    tokenizer = chat_tokenizer("qwen3")
    tiny_model("llama", len(tokenizer)).save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    rows = write_jsonl(home / "rows.jsonl", [{"messages": SAID}] * 6)
    given = {
        "backbone": home / "model",
        "data.train.files": rows,
        "task.template_arguments": "{enable_thinking: false}",
    }
    assert run(["train", "chat", "--out", str(home / "run"), *flags(SMALL | OWN | given)]) == 0
    return home / "run"


QWEN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_an_instruct_model_keeps_its_own_template_and_the_arguments_travel(
    instruct: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = (instruct / "log.txt").read_text(encoding="utf-8")
    assert "chat template: the tokenizer's own\n" in log and "⟦Hello<|im_end|>⟧" in log
    resolved = (instruct / "recipe.resolved.yaml").read_text(encoding="utf-8")
    assert "template: auto  # auto: the tokenizer's own" in resolved and '"enable_thinking": false' in resolved
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": SAID}])
    assert prompts(instruct, rows, capsys) == [QWEN]
    assert run(["train", "--resume", str(instruct), "--train.steps", "4"]) == 0
    # `chat`: a system turn that stays, and is there again after /new
    from flatshift.experiments.workflows.generate import GenerativeRuns

    asked: list = []
    ask = GenerativeRuns.ask
    monkeypatch.setattr(
        GenerativeRuns,
        "ask",
        lambda self, name, turns, **how: (asked.append(turns), ask(self, name, turns, **how))[1],
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/new\nHi\n"))
    assert run(["chat", str(instruct), "--system", "Be brief.", "--max-new-tokens", "2"]) == 0
    assert asked == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]] * 2
    # What is handed on asks in the same way without being told of the arguments.
    from transformers import AutoTokenizer

    assert run(["export", str(instruct), "--out", str(tmp_path / "hub")]) == 0
    assert run(["merge", str(instruct), "--out", str(tmp_path / "merged")]) == 0
    for folder in ("hub", "merged"):
        saved = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert saved.apply_chat_template(SAID[:1], tokenize=False, add_generation_prompt=True) == QWEN
    snippet = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    scope: dict = {}
    places = {"ADAPTER": tmp_path / "hub", "BACKBONE": instruct.parent / "model"}
    for name, place in places.items():
        snippet = re.sub(rf"{name} = .*", f"{name} = {str(place)!r}", snippet)
    exec(snippet, scope)
    assert scope["tokenizer"].decode(scope["ids"][0]) == QWEN.replace("Hi", "some text")


@pytest.fixture(scope="module")
def based(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe on a base model, with tools and with thoughts that the template leaves out."""
    home = tmp_path_factory.mktemp("based")
    call = json.loads(json.dumps(CONVERSATIONS["tools"]))
    function = call["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    thought = {"messages": [SAID[0], {**SAID[1], "reasoning_content": "a greeting"}]}
    rows = write_jsonl(home / "rows.jsonl", [call, thought] * 3)
    own = {"data.train.files": rows, "train.max_length": 448}
    assert run(["train", "chat", "--out", str(home / "run"), *flags(SMALL | OWN | own)]) == 0
    return home / "run"


def test_a_base_model_gets_a_template_in_text_that_ends_and_travels(
    based: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    log = (based / "log.txt").read_text(encoding="utf-8")
    assert "chat template: base, as the tokenizer has none: <|user|> and <|assistant|> in plain text, answers " in log
    assert "train: 3 turns have thoughts that the template leaves out" in log
    assert '{"name": "weather", "arguments": {"city": "Bonn"}}' in log and "</tool_call><eos>⟧" in log
    assert "template: base  # auto: the tokenizer has none" in (based / "recipe.resolved.yaml").read_text()
    assert run(["export", str(based), "--out", str(tmp_path / "hub")]) == 0
    from flatshift.finetune.data.chat.template import read_template

    assert (tmp_path / "hub" / "chat_template.jinja").read_text(encoding="utf-8") == read_template("base")
    files = {"data.train.files": based.parent / "rows.jsonl", "task.template": "plain"}
    capsys.readouterr()
    assert run(["train", "chat", "--out", str(tmp_path / "run"), *flags(SMALL | OWN | files)]) == 2
    assert "no tools); task.template: base ships and writes tools; or leave such rows out" in capsys.readouterr().err


ANSWER = "<|assistant|>\n"
BRIEF = "<bos><|system|>\nBe brief.\n<|user|>\nHi\n" + ANSWER
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call><eos>\n'
COLUMNS = {
    "sharegpt": ({"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"}]}, BRIEF),
    "messages": ({"system": "Be brief.", "messages": SAID}, BRIEF),
    "alpaca": (
        {"instruction": "Again.", "input": "", "output": "x", "system": "", "history": [["Hi", "Hello"], ["A", "B"]]},
        f"<bos><|user|>\nHi\n{ANSWER}Hello<eos>\n<|user|>\nA\n{ANSWER}B<eos>\n<|user|>\nAgain.\n{ANSWER}",
    ),
    "alpaca in text": (
        {"instruction": "Again.", "history": '[["Hi", "Hello"]]'},
        f"<bos><|user|>\nHi\n{ANSWER}Hello<eos>\n<|user|>\nAgain.\n{ANSWER}",
    ),
    "prompt and completion": (
        {"prompt": [{"role": "system", "content": "Be brief."}, SAID[0]], "completion": [SAID[1]]}, BRIEF,
    ),
    "prompt alone": ({"prompt": "Hi", "system": "Be brief."}, BRIEF),
    "sharegpt calls": (
        {"conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Bonn"}}'},
            {"from": "observation", "value": "sun"},
            {"from": "gpt", "value": "Sunny."},
        ]},
        f"<bos><|user|>\nHi\n{ANSWER}{CALL}<|tool|>\nsun\n{ANSWER}",
    ),
}  # fmt: skip


def test_columns_of_other_toolkits_are_all_read(based: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, (record, prompt) in COLUMNS.items():
        data = write_jsonl(tmp_path / f"{name}.jsonl", [record])
        assert prompts(based, data, capsys) == [prompt], name
    twice = {"system": "A", "messages": [{"role": "system", "content": "B"}, *SAID]}
    bad = {
        "two.jsonl": (twice, "two system turns"),
        "pairs.jsonl": ({"instruction": "x", "history": ["Hi"]}, "column 'history' is no list of pairs"),
        "also.jsonl": (
            {"messages": SAID, "instruction": "x", "output": "y"},
            "columns 'messages' and 'instruction' may each be the conversation; rename one of them",
        ),
        "both.jsonl": ({"messages": SAID, "conversations": SAID}, "name one: data.columns.messages"),
    }
    for name, (record, says) in bad.items():
        data = write_jsonl(tmp_path / name, [record])
        assert run(["generate", str(based), "--data", str(data)]) == 2
        assert f"{name}:1: " in (err := capsys.readouterr().err) and says in err
    words = ["--data", str(tmp_path / "both.jsonl"), "--data.columns.messages", "conversations"]
    assert run(["generate", str(based), *words, "--max-new-tokens", "1"]) == 0


def test_system_turns_and_tools_are_read_from_the_columns_that_are_named(
    based: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tool = CONVERSATIONS["tools"]["tools"]
    data = write_jsonl(tmp_path / "rows.jsonl", [{"intro": "Be brief.", "functions": tool, "messages": SAID}])
    assert prompts(based, data, capsys) == [BRIEF.replace("<|system|>\nBe brief.\n", "")]
    (said,) = prompts(based, data, capsys, "--data.columns.system", "intro")
    assert said == BRIEF
    (said,) = prompts(based, data, capsys, "--data.columns.tools", "functions")
    assert "Be brief." not in said and json.dumps(tool[0]["function"]["name"]) in said
    (said,) = prompts(based, data, capsys, "--data.columns.tools", "functions", "--data.columns.system", "intro")
    assert "Be brief." in said and json.dumps(tool[0]["function"]["name"]) in said


def test_of_a_prompt_of_several_turns_only_the_completion_is_supervised(tmp_path: Path) -> None:
    record = {"prompt": [*SAID, {"role": "user", "content": "And?"}], "completion": "Bye"}
    rows = write_jsonl(tmp_path / "rows.jsonl", [record] * 4)
    own = {"data.train.files": rows, "train.steps": 1, "task.template": "plain"}
    assert run(["train", "chat", "--out", str(tmp_path / "run"), *flags(SMALL | OWN | own)]) == 0
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "train: turns read from TRL's columns: prompt, completion, system" in log
    assert "Assistant: Hello<eos>" in log and "Assistant:⟦ Bye<eos>⟧" in log


def test_an_answer_is_told_without_the_blank_that_its_template_begins_it_with(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": SAID}] * 8)
    own = {"data.train.files": rows, "train.steps": 1, "task.template": "plain"}
    path = tmp_path / "run"
    assert run(["train", "chat", "--out", str(path), *flags(SMALL | OWN | own)]) == 0
    tokenizer = open_backbone("flatshift-5m").tokenizer
    answer = torch.tensor([[*tokenizer(" Hello", add_special_tokens=False).input_ids, tokenizer.eos_token_id]])

    def generate(model: Any, *, input_ids: torch.Tensor, stopping_criteria: Any = None, **_: Any) -> torch.Tensor:
        """Answer as a trained model would, on any processor."""
        ids = input_ids
        for token in answer[0]:
            ids = torch.cat([ids, token.view(1, 1)], 1)
            if stopping_criteria is not None:
                stopping_criteria(ids, None)
        return ids

    monkeypatch.setattr("peft.PeftModelForCausalLM.generate", generate)
    capsys.readouterr()
    assert run(["generate", str(path), "--prompt", "Hi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["text"] == " Hello"  # exactly the tokens of the model
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert run(["chat", str(path)]) == 0
    assert capsys.readouterr().out.strip("\n") == "Hello"
