"""What commands end with: a small table of what was found, and commands that run as they stand."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flatshift.cli import run
from flatshift.outcome import NEW_ROWS
from tests.support.data_models import write_jsonl
from tests.support.patience import HANG_S

SMALL = "--train.steps 4 --train.batch_size 4 --train.max_length 32 --train.max_cut 1 --train.threads 1 "
SMALL += "--train.precision fp32 --data.train.limit 40 --data.dev.limit 20 --data.test.limit 30 --eval.bootstrap 50"


def ending(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[list[str]]]:
    """(lines before `next:`, commands after it) of what was said on stderr."""
    said, _, after = capsys.readouterr().err.rpartition("next:\n")
    return said.splitlines(), [shlex.split(line) for line in after.splitlines()]


@pytest.mark.usefixtures("warm_checks")
def test_a_training_ends_with_its_figures_and_with_commands_that_run(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "classify", *SMALL.split(), "--out", "a run"]) == 0
    lines, commands = ending(capsys)
    assert sum("epoch" in line for line in lines) == 1 and "4 steps: 0.40 epochs of 40 rows" in lines
    (told,) = [line for line in lines if line.startswith("  about ")]
    assert re.fullmatch(r"  about [\d.]+ \w+: 4 steps of [\d.]+ \w+, one row was timed", told)
    (row,) = [line.split() for line in lines[-3:] if line.startswith("test")]
    cell = json.loads(Path("a run/eval.json").read_text())["test"]
    assert row[:2] == ["test", "accuracy"] and row[-1] == str(cell["accuracy"]["n"])
    assert float(row[2]) == pytest.approx(cell["accuracy"]["value"], abs=0.005)
    assert row[-2] == f"{cell['majority_floor']['value']:.3f}"
    assert [words[:3] for words in commands] == [
        ["flatshift", verb, "a run"] for verb in ("predict", "merge", "export")
    ]
    for words in commands:
        assert run(words[1:]) == 0, words
        assert ending(capsys)[1], f"{words} names no next command"
    assert run(["train", "--resume", "a run", "--json"]) == 0
    assert "next:" not in capsys.readouterr().err
    assert run(["train", "--resume", "a run", "--train.steps", "6"]) == 0
    (left,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  about ")]
    assert re.fullmatch(r"  about [\d.]+ \w+: 2 steps after 4 of [\d.]+ \w+, one row was timed", left)


def test_a_sweep_ends_with_its_verdict_and_asks_for_more_seeds_where_it_is_undecided(tmp_path: Path, capsys) -> None:
    out = str(tmp_path / "sweep")
    words = ["classify", *SMALL.split(), "--grid", "adapter.rank=1,2,4", "--seeds", "1", "--out", out]
    assert run(["sweep", *words]) == 0
    lines, commands = ending(capsys)
    assert any(line.startswith("lowest test error") for line in lines[-4:])
    floors = pq.read_table(f"{out}/cells.parquet").column("test.majority_floor").to_pylist()
    (floor,) = [line for line in lines if line.startswith("majority baseline")]
    assert float(floor.split()[-1]) == pytest.approx(1 - sum(floors) / len(floors), abs=1e-3)
    assert commands[-1] == ["flatshift", "report", out]
    assert any(line.startswith("verdict") and re.search(r"undecided \([\d.]+( → [\d.]+){2}\)$", line) for line in lines)
    assert commands[0][:3] == ["flatshift", "sweep", "classify"] and commands[0][-2:] == ["--seeds", "5"]
    assert commands[0].count("--seeds") == 1


def test_a_point_of_a_sweep_without_a_result_is_a_dash(tmp_path: Path, capsys, recwarn) -> None:
    words = ["classify", *SMALL.split(), "--grid", "data.train.limit=10,20,100000", "--seeds", "1"]
    assert run(["sweep", *words, "--out", str(tmp_path / "sweep")]) == 1
    (verdict,) = [line for line in ending(capsys)[0] if line.startswith("verdict")]
    assert re.search(r"\(\S+ → \S+ → –\)$", verdict)
    assert not [warning for warning in recwarn if "empty slice" in str(warning.message)]


def test_a_change_is_over_documents_and_not_their_pieces(tmp_path: Path, capsys) -> None:
    rows = [{"text": " ".join(f"word{i * j}" for j in range(12))} for i in range(8)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = ["--data.train.files", str(data), "--data.dev.files", "[]", "--data.test.files", str(data)]
    words += ["--train.steps", "1", "--train.max_length", "8", "--train.overlong", "split", "--eval.bootstrap", "50"]
    words += ["--data.checks.copies", "warn", "--train.precision", "fp32", "--data.train.limit", "null"]
    assert run(["train", "language-model", *words, "--data.test.limit", "null", "--out", str(tmp_path / "run")]) == 0
    lines, _ = ending(capsys)
    assert [line.split()[-1] for line in lines if line.startswith("test")][-3:] == ["8", "8", "8"]
    assert pq.read_metadata(tmp_path / "run/predictions.parquet").num_rows > 16


def test_conversations_are_judged_beside_the_backbone_alone(tmp_path: Path, capsys) -> None:
    talks = [[{"role": "user", "content": f"Is it {i}?"}, {"role": "assistant", "content": f"{i}."}] for i in range(60)]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns} for turns in talks])
    small = SMALL.replace("--data.train.limit 40 --data.dev.limit 20 --data.test.limit 30 ", "").split()
    small = [*small[2:], "--train.epochs", "1"]
    assert run(["train", "chat", "--data", str(rows), *small, "--out", str(tmp_path / "run")]) == 0
    lines, commands = ending(capsys)
    assert [line.split()[1] for line in lines if "one epoch of 48 rows" in line] == ["steps:"]
    held = [line for line in lines if line.startswith("test, backbone alone  perplexity  ")]
    assert len(held) == 1 and commands[1][3:5] == ["--data", NEW_ROWS]
    (change,) = [line.split() for line in lines if line.startswith("test, change ")]
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert " ".join(change[3:7]) in page and change[-1] == "6", "on the page too"


def test_a_long_training_says_how_many_steps_take_ten_minutes(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("flatshift.experiments.workflows.context._predict_step_seconds", lambda *_: 250.0)
    words = ["train", "classify", *SMALL.split(), "--out", str(tmp_path / "run")]
    assert run(words) == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  about ")]
    assert (
        told
        == "  about 16.7 minutes: 4 steps of 4.17 minutes, one row was timed; --train.steps 2 would take 10 minutes"
    )
    assert run(["train", "--resume", str(tmp_path / "run"), "--train.steps", "10"]) == 0
    assert "would take" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["chat", "completion", "seq2seq"])
def test_a_training_ends_with_the_answers_that_predict_has(tmp_path: Path, capsys, kind: str) -> None:
    pairs = [(f"Is it {i}?", f"It is {i}.") for i in range(20)]
    rows = [{"text": asked, "prompt": asked, "label": said, "completion": said} for asked, said in pairs]
    if kind == "chat":
        rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in pairs]
    train, test = write_jsonl(tmp_path / "train.jsonl", rows[4:]), write_jsonl(tmp_path / "test.jsonl", rows[:4])
    small = "--train.steps 2 --train.batch_size 2 --train.max_cut 1 --train.precision fp32 --task.max_new_tokens 8"
    files = ["--data.train.files", str(train), "--data.dev.files", "[]", "--data.test.files", str(test)]
    words = [kind, *files, *small.split(), "--eval.bootstrap", "10"]
    assert run(["train", *words, "--eval.answers", "3", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err.splitlines()
    made = [line.partition(": ")[2] for line in said if line.startswith("  answered: ")]
    assert [line.partition(": ")[2] for line in said if line.startswith("  in its row: ")] == [b for _, b in pairs[:3]]
    assert all(pairs[i][0] in line for i, line in enumerate(line for line in said if line.startswith("test, asked: ")))
    assert run(["predict", str(tmp_path / "run"), "--data", str(test), "--out", str(tmp_path / "said.jsonl")]) == 0
    told = [json.loads(line)["answer"] for line in (tmp_path / "said.jsonl").read_text(encoding="utf-8").splitlines()]
    assert made == [" ".join(text.split()) for text in told[:3]] and any(made)
    last = told[3] if kind == "seq2seq" else None  # its score is of all generated answers
    assert pq.read_table(tmp_path / "run/predictions.parquet").column("answer").to_pylist() == [*told[:3], last]
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "Answers next to references" in page and ("in its row" in page) == (kind != "seq2seq")
    assert run(["train", *words, "--eval.answers", "0", "--out", str(tmp_path / "none")]) == 0
    assert "answered" not in capsys.readouterr().err


def test_two_runs_are_told_apart_by_paired_rows_and_a_sentence(tmp_path: Path, capsys) -> None:
    for rank in ("1", "2"):
        words = ["train", "classify", *SMALL.split(), "--adapter.rank", rank, "--out", str(tmp_path / rank)]
        assert run(words) == 0
    capsys.readouterr()
    assert run(["report", str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(tmp_path / "page.html")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split() == ["test", "run", "value", "minus", "1"]
    assert "A difference is that of the same 30 rows, drawn together." in lines[-2]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert lines[-1] in page


def test_a_forecast_names_no_rank_below_1(tmp_path: Path, capsys) -> None:
    rows = [{"text": f"is my card number {i} here", "label": ("card", "loss")[i % 2]} for i in range(30)]
    words = ["forecast", "classify", "--data", str(write_jsonl(tmp_path / "rows.jsonl", rows)), "--ranks", "1", "2"]
    words += ["--draws", "2", "--more", "20", "--train.max_length", "24", "--out", str(tmp_path / "out")]
    assert run(words) == 0
    said = "".join(capsys.readouterr())
    assert "the ranks 1 to 2 never cross the threshold, all of them fit the labels" in said
    assert "ranks below" not in said and "it is higher" in said


def test_a_plan_says_which_machine_was_taken_and_where_it_is_written(tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    assert run(["plan", "language-model", "--gpus", "here", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)["cluster"]
    card = "note: planned for 1xH100-80, as no --gpus is given; `--gpus here`"
    own = "note: planned for this machine, as no --gpus is given; `--gpus 1xH100-80`"
    for words, note, cluster in (
        ([], own, here),
        (["--nvlink", "100"], card, "1 × H100-80"),
        (["--model", "qwen3-0.6b"], card, "1 × H100-80"),
        (["--gpus", "1xH100-80"], "", "1 × H100-80"),
    ):
        assert run(["plan", "language-model", "--train.epochs", "null", "--train.steps", "9", *words, "--json"]) == 0
        said = capsys.readouterr()
        assert note in said.err and ("note: planned" in said.err) == bool(note)
        assert json.loads(said.out)["cluster"] == cluster, words
    steps = ["--train.epochs", "null", "--train.steps", "9"]
    assert (
        run(["plan", "language-model", *steps, "--train.checkpointing", "full", "--gpus", "1xH100-80", "--json"]) == 0
    )
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert {layout["checkpointing"] for layout in layouts} == {"full"}
    assert run(["plan", "--calibrate", "--json"]) == 2 and "--calibrate measures this" in capsys.readouterr().err
    assert run(["plan", "language-model", "--train.epochs", "null", "--train.steps", "9", "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out) and out.is_file()


def test_a_plan_of_own_rows_is_the_training_s_whatever_counts_its_steps(tmp_path: Path, capsys) -> None:
    rows = [{"text": "one two " * (1 + i % 7), "label": ("a", "b")[i % 2]} for i in range(60)]
    data = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    words = [
        "classify",
        "--data",
        data,
        "--train.batch_size",
        "4",
        "--train.precision",
        "fp32",
        "--train.device",
        "cpu",
    ]
    words += ["--regularizer", "plain", "--train.checkpointing", "none", "--data.checks.copies", "warn"]
    documents = []
    for length in (["--train.epochs", "1.5"], ["--train.steps", "17"]):
        assert run(["plan", *words, *length, "--gpus", "1xCPU", "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    one, two = documents
    assert one["data"]["updates"] == two["data"]["updates"] == 17 and one["tokens"] == two["tokens"]
    best = one["layouts"][one["best"]]
    assert one["hours"] == pytest.approx(17 * best["update_s"] * one["data"]["padded"] / 3600, rel=0.02)
    assert run(["train", *words, "--train.steps", "1", "--out", str(tmp_path / "run")]) == 0
    told = re.search(r"([\d.]+) MiB of memory, without libraries", capsys.readouterr().err)
    assert told is not None and float(told[1]) == pytest.approx(1024 * best["allocated_gib"], abs=6)


def test_a_selection_ends_with_its_first_choices(tmp_path: Path, capsys) -> None:
    out = tmp_path / "picked"
    words = "warmup --select.budget 20 --select.pool.limit 200 --select.embedder.dim 16 --select.checks false"
    assert run(["select", *words.split(), "--out", str(out)]) == 0
    lines, commands = ending(capsys)
    best = json.loads((out / "selected.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert lines[-3].split()[0] == "1" and best["text"].split()[0] in lines[-3]
    assert commands[1][3:5] == ["--data", str(out / "selected.jsonl")]
    more = SMALL.replace("--data.train.limit 40 --data.dev.limit 20 --data.test.limit 30 ", "").split()
    assert run([*commands[1][1:], *more, "--out", str(tmp_path / "run")]) == 0


def test_the_first_choices_are_told_by_their_texts(tmp_path: Path, capsys) -> None:
    for name, count in (("pool", 30), ("target", 4)):
        rows = [{"url": f"http://x/{i}", "text": f"word{i % 4} is what text {i} says"} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["select", "--pool", str(tmp_path / "pool.jsonl"), "--target", str(tmp_path / "target.jsonl")]
    words += ["--budget", "3", "--method", "dsir", "--data.holdout", "0", "--out", str(tmp_path / "picked")]
    assert run(words) == 0
    said = capsys.readouterr().err
    assert "says" in said and "http://x" not in said
    assert "The first 3 choices" in (tmp_path / "picked" / "report.html").read_text(encoding="utf-8")


def test_a_training_takes_over_a_finished_selection(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    pool = [{"text": f"the {word} of {n} grey birds"} for n in range(20) for word in ("song", "flight")]
    Path("pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pool), encoding="utf-8")
    words = "warmup --pool pool.jsonl --budget 12 --select.method.repeats 8 --select.checks false --out picked"
    assert run(["select", *words.split()]) == 0
    Path("pool.jsonl").unlink()  # nothing but the selection is read
    begin = ending(capsys)[1][0]
    assert begin == ["flatshift", "train", "warmup", "--select.from", "picked"]
    small = [*SMALL.split(), "--warmup.steps", "2", "--warmup.batch_size", "2", "--regularizer.kind", "plain"]
    assert run([*begin[1:], *small, "--out", "run"]) == 0
    assert Path("run/selection/selected.jsonl").read_bytes() == Path("picked/selected.jsonl").read_bytes()
    distinct = json.loads(Path("picked/manifest.json").read_text(encoding="utf-8"))["selection"]["distinct"]
    said = Path("run/log.txt").read_text(encoding="utf-8")
    assert f"selection: {distinct} records in 12 readings, taken over" in said and distinct < 12
    resolved = Path("run/recipe.resolved.yaml").read_text(encoding="utf-8")
    assert f'from: "{tmp_path / "picked"}"  # --select.from' in resolved
    assert "budget: 12  # picked/recipe.resolved.yaml" in resolved  # as it was made, not as warmup.yaml says
    assert run(["train", "--resume", "run"]) == 0
    for refused, says in (
        (["train", "warmup", "--select.from", "picked", "--select.budget", "5"], "select.budget would change it"),
        (["train", "warmup", "--select.from", "run"], "holds no finished selection"),
        (["train", "language-model", "--select.from", "picked"], "no `warmup` block"),
        (["select", "warmup", "--select.from", "picked"], "nothing to select"),
    ):
        assert run([*refused, "--out", "other"]) == 2
        assert says in capsys.readouterr().err
    with Path("picked/selected.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("{}\n")
    assert run([*begin[1:], *small, "--out", "other"]) == 2
    assert "is not what was saved" in capsys.readouterr().err and not Path("other").exists()


def test_an_interrupted_command_does_not_wait_for_libraries_to_end() -> None:
    """Which took seventeen seconds after the last word of a selection on a machine with twenty others at work."""
    code = """
        import atexit, sys
        from flatshift import cli
        atexit.register(print, "late")
        cli.run = lambda argv: print("said") or int(argv[0])
        cli.main()
    """
    for ending, shown in (("3", "said\n"), ("2", "said\nlate\n")):
        words = [sys.executable, "-c", textwrap.dedent(code), ending]
        found = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=HANG_S)
        assert (found.returncode, found.stdout) == (int(ending), shown)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_native_call_does_not_hold_back_the_end_of_a_selection(tmp_path: Path, number: signal.Signals) -> None:
    """A lock that is taken twice stands for it: no signal ends that call."""
    short = "warmup --select.budget 20 --select.pool.limit 200 --select.embedder.dim 16 --select.checks false"
    words = ["select", *short.split(), "--out", str(tmp_path / "picked")]
    code = f"""
        import ctypes, signal, sys, threading
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it ignored
        import flatshift.experiments.select.select as journey
        def uninterrupted(*_, **__):
            threading.Timer(1, print, ["inside"], {{"flush": True}}).start()
            ctypes.CDLL(None).pthread_mutex_lock(lock); ctypes.CDLL(None).pthread_mutex_lock(lock)
        lock = ctypes.create_string_buffer(64)
        journey.select_into = uninterrupted
        from flatshift.cli import main
        sys.argv = ["flatshift", *{words!r}]
        main()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "inside\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 3 and "continues with what was kept" in said
    assert run(words) == 0
