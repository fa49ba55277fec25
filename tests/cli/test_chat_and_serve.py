"""`flatshift chat` and `flatshift serve`: two real runs over one backbone, spoken to as a user and a client do."""

from __future__ import annotations

import http.client
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flatshift.cli import run
from flatshift.experiments.workflows.generate import GenerativeRuns, generate_from_run
from flatshift.experiments.workflows.serve import Server

SMALL = [
    *("--train.steps", "8", "--train.batch_size", "4", "--train.max_length", "64", "--train.eval_every", "0"),
    *("--train.precision", "fp32", "--eval.bootstrap", "10", "--train.threads", "1", "--eval.train_limit", "0"),
    *("--data.dev.limit", "4", "--data.test.limit", "4", "--train.max_cut", "1", "--regularizer.kind", "plain"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that complete requests, of other seeds."""
    home = tmp_path_factory.mktemp("runs")
    made = []
    for seed in ("0", "1"):
        out = home / f"seed-{seed}"
        words = ["--task.prompt", "Q: {text} A:", "--task.completion", " {label}", "--task.max_new_tokens", "6"]
        files = [
            word for part in ("train", "dev", "test") for word in (f"--data.{part}.files", f"sample:banking/{part}")
        ]
        steps = ["--optimizer.lr", "0.01", "--data.train.limit", "40", "--train.seed", seed]
        assert run(["train", "completion", *words, *files, *SMALL, *steps, "--out", str(out)]) == 0
        made.append(out)
    return made


def expected(path: Path, text: str) -> str:
    return generate_from_run(path, prompts=[text], quiet=True)[0]["text"]


def test_a_conversation_in_the_terminal(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "where is my card\n\n/use seed-1\nwhere is my card\n/nonsense\n/runs\n/new\n/quit\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(["chat", *map(str, runs)]) == 0
    said = capsys.readouterr()
    first, second = (expected(path, "where is my card") for path in runs)
    assert first != second and said.out == f"{first}\n{second}\nseed-0\nseed-1\n"
    assert "/nonsense: not a command" in said.err and "never read" not in said.out
    assert run(["chat", *map(str, runs), "--system", "Be brief."]) == 2
    assert "--system: seed-0 was not trained on conversations and reads no system turn" in capsys.readouterr().err


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> Iterator[tuple[str, int]]:
    server = Server(GenerativeRuns(runs), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[0], server.server_address[1]  # type: ignore[misc]
    server.shutdown()
    server.server_close()


def ask(address: tuple[str, int], method: str, path: str, body: Any = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=120)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_endpoint_answers_as_generate_does(runs: list[Path], address: tuple[str, int]) -> None:
    status, text = ask(address, "GET", "/v1/models")
    assert status == 200 and [model["id"] for model in json.loads(text)["data"]] == ["seed-0", "seed-1"]
    turn = {"role": "user", "content": "where is my card"}
    for path in (*runs, runs[0]):
        status, text = ask(address, "POST", "/v1/chat/completions", {"model": path.name, "messages": [turn]})
        found = json.loads(text)
        assert status == 200 and found["model"] == path.name and found["object"] == "chat.completion"
        assert found["choices"][0]["message"]["content"] == expected(path, "where is my card")
        assert found["usage"]["total_tokens"] == sum(
            found["usage"][key] for key in ("prompt_tokens", "completion_tokens")
        )
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "logprobs": False}
    status, text = ask(address, "POST", "/v1/completions", {"prompt": "The card", "max_tokens": 3, **neutral})
    raw = generate_from_run(runs[0], prompts=["The card"], raw=True, decoding={"max_new_tokens": 3}, quiet=True)
    assert status == 200 and json.loads(text)["choices"][0]["text"] == raw[0]["text"]


def test_pieces_of_a_stream_are_the_answer(runs: list[Path], address: tuple[str, int]) -> None:
    body = {"model": "seed-1", "messages": [{"role": "user", "content": "where is my card"}], "stream": True}
    status, text = ask(address, "POST", "/v1/chat/completions", body)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert status == 200 and events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(one["delta"].get("content", "") for one in choices) == expected(runs[1], "where is my card")
    assert len(choices) > 2 and choices[-1]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, "seed-0, seed-1"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}, "must be the user's"),
        ("/v1/chat/completions", {"messages": "x"}, "list of messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": []}, "'tools'"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "x", "presence_penalty": 0.5}, "'presence_penalty'"),
        ("/v1/chat/completions", b"{", "not valid JSON"),
        ("/v1/chat/completions", b"[" * 100_000, "not valid JSON"),
        ("/v1/completions", {"prompt": "x " * 5000}, "positions"),
        ("/v1/embeddings", {"input": "x"}, "no such path"),
    ],
)
def test_bad_requests_are_one_sentence(address: tuple[str, int], path: str, body: Any, said: str) -> None:
    status, text = ask(address, "POST", path, body)
    assert status in (400, 404) and said in json.loads(text)["error"]["message"]


def test_runs_that_write_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("chat", "serve"):
        assert run([command]) == 2
        assert run([command, str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
