"""`flatshift chat` and `flatshift serve`: two real runs over one backbone, spoken to as a user and a client do."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.door_requests import CARD, CHAT, JSON_POST, MALFORMED, TEXT
from flatshift.cli import run
from flatshift.experiments.workflows.generate import GenerativeRuns, Question, generate_from_run
from flatshift.experiments.workflows.serve import Server
from flatshift.finetune.errors import UserError

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
    assert said.err.startswith(f"loading {runs[0]}, {runs[1]}\n"), "the first line, before any prompt"
    assert "/nonsense: not a command" in said.err and "never read" not in said.out
    assert run(["chat", *map(str, runs), "--seed", "5"]) == 2
    assert "--seed is of draws" in capsys.readouterr().err
    assert run(["chat", *map(str, runs), "--system", "Be brief."]) == 2
    assert "--system: seed-0 was not trained on conversations and reads no system turn" in capsys.readouterr().err


def test_runs_of_one_name_are_all_there(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, name in zip(runs, ("sub/first", "first"), strict=True):
        shutil.copytree(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    named = GenerativeRuns([Path("sub/first"), Path("first")])
    assert named.names == ("first", str(tmp_path / "first"))
    answers = []
    for name in named.names:
        question = named.ask(name, "where is my card")
        named.answer([question])
        answers.append(question.text)
    assert answers == [expected(path, "where is my card") for path in runs]
    with pytest.raises(UserError, match="first is named twice"):
        GenerativeRuns([Path("sub/first"), Path("first"), tmp_path / "first"])


def test_of_a_long_session_the_last_turn_counts(server: Server) -> None:
    before = [{"role": "user", "content": "word " * 20_000}, {"role": "assistant", "content": "yes"}]
    assert server.runs.ask("seed-0", [*before, *CARD]).prompt == server.runs.ask("seed-0", CARD).prompt
    with pytest.raises(UserError, match="shorten it"):
        server.runs.ask("seed-0", before[:1])


@pytest.fixture(scope="module")
def server(runs: list[Path]) -> Iterator[Server]:
    with serving(Server(GenerativeRuns(runs), "127.0.0.1", 0)) as server:
        yield server


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=120)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    names = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(connection):
        connection.request(method, path, data, names)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """Return the answer to a completion, or with messages a chat completion, which must succeed."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    status, text = ask(server, "POST", path, fields)
    assert status == 200, text
    return json.loads(text)


def talk(server: Server, data: bytes) -> bytes:
    """Send bytes that need not be HTTP, and return all of the answer."""
    with socket.create_connection(server.server_address[:2], timeout=20) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except ConnectionError:
            return b""


def test_the_endpoint_answers_as_generate_does(runs: list[Path], server: Server) -> None:
    status, text = ask(server, "GET", "/v1/models")
    assert status == 200 and [model["id"] for model in json.loads(text)["data"]] == ["seed-0", "seed-1"]
    assert json.loads(ask(server, "GET", "/v1/models/seed-1")[1])["id"] == "seed-1"
    for path in (*runs, runs[0]):
        found = complete(server, model=path.name, messages=CARD)
        assert found["model"] == path.name and found["object"] == "chat.completion"
        assert found["choices"][0]["message"]["content"] == expected(path, "where is my card")
        assert found["usage"]["total_tokens"] == sum(
            found["usage"][key] for key in ("prompt_tokens", "completion_tokens")
        )
    neutral = {
        **{"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "tools": [], "n": 1, "stop": []},
        **{"response_format": {"type": "text"}, "temperature": 0, "top_p": 1, "user": "me", "tool_choice": "none"},
    }
    found = complete(server, prompt="The card", max_tokens=3, **neutral)
    raw = generate_from_run(runs[0], prompts=["The card"], raw=True, decoding={"max_new_tokens": 3}, quiet=True)
    assert found["choices"][0]["text"] == raw[0]["text"]


def test_pieces_of_a_stream_are_the_answer(runs: list[Path], server: Server) -> None:
    body = {"model": "seed-1", "messages": CARD, "stream": True}
    for usage in (False, True):
        more = {"stream_options": {"include_usage": True}} if usage else {}
        status, text = ask(server, "POST", "/v1/chat/completions", body | more)
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert status == 200 and events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        last = chunks.pop() if usage else {}
        assert not usage or (last["choices"] == [] and last["usage"]["completion_tokens"] > 0)
        assert all(chunk.get("usage") is None for chunk in chunks)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[0]["delta"]["role"] == "assistant"
        assert "".join(one["delta"].get("content", "") for one in choices) == expected(runs[1], "where is my card")
        assert len(choices) > 2 and choices[-1]["finish_reason"] in ("stop", "length")


def test_messages_in_the_forms_that_clients_send(server: Server) -> None:
    plain = complete(server, messages=CARD)["choices"]
    parts = [{"type": "text", "text": "where is "}, {"type": "text", "text": "my card"}]
    for role in ("system", "developer"):
        turns = [{"role": role, "content": "Be brief."}, {"role": "user", "content": parts, "name": None}]
        assert complete(server, messages=turns, max_completion_tokens=6)["choices"] == plain


def test_a_stop_text_ends_the_answer_before_it(server: Server) -> None:
    whole = complete(server, messages=CARD)["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:3]
    cut = whole[: whole.find(stop)]
    found = complete(server, messages=CARD, stop=["never", stop])["choices"][0]
    assert len(stop) == 3 and found["message"]["content"] == cut and found["finish_reason"] == "stop"
    events = ask(server, "POST", CHAT, {"messages": CARD, "stop": stop, "stream": True})[1].split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == cut


def test_several_answers_and_prompts(server: Server) -> None:
    sampled = {"max_tokens": 4, "temperature": 2, "seed": 3}
    found = complete(server, prompt=["The card", "A fee"], n=2, **sampled)
    texts = [choice["text"] for choice in found["choices"]]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3] and texts[0] != texts[1]
    assert [one["text"] for one in complete(server, prompt="The card", n=2, **sampled)["choices"]] == texts[:2]
    assert found["usage"]["completion_tokens"] <= 16
    status, text = ask(server, "POST", "/v1/chat/completions", {"messages": CARD, "n": 2, "stream": True, **sampled})
    events = [json.loads(line[6:]) for line in text.splitlines() if line and "[DONE]" not in line]
    assert status == 200 and {event["choices"][0]["index"] for event in events} == {0, 1}
    body = {
        "prompt": ["The card", "A fee of the other card"],
        "max_tokens": 1,
        "stream_options": {"include_usage": True},
    }
    used = complete(server, **{"prompt": body["prompt"], "max_tokens": 1})["usage"]
    text = ask(server, "POST", "/v1/completions", body | {"stream": True})[1]
    assert json.loads(text.split("\n\n")[-3].removeprefix("data: "))["usage"] == used


def test_a_batch_has_one_end_of_turn(server: Server) -> None:
    """A text that goes on is not cut at the end token of a chat that waits beside it."""
    chat, text = (server.runs.ask("seed-0", "The card", raw=True) for _ in range(2))
    chat.prompt = replace(chat.prompt, stop=5)
    assert not server.runs.can_join([chat, text]) and server.runs.can_join([text, text])


def test_log_probabilities_judge_a_prompt_of_tokens(runs: list[Path], server: Server) -> None:
    tokenizer = server.runs.ask("seed-0", "x").tokenizer
    tokens = tokenizer("where is my card", add_special_tokens=False)["input_ids"]
    found = complete(server, prompt=[tokens, tokens[:3]], max_tokens=1, logprobs=2, echo=True)
    scores = found["choices"][0]["logprobs"]
    assert len(scores["tokens"]) in (len(tokens), len(tokens) + 1) and scores["token_logprobs"][0] is None
    assert "".join(scores["tokens"]) == found["choices"][0]["text"] and scores["text_offset"][0] == 0
    assert scores["token_logprobs"][1:3] == pytest.approx(
        found["choices"][1]["logprobs"]["token_logprobs"][1:3], abs=1e-4
    )
    plain = complete(server, prompt="where is my card", max_tokens=2, logprobs=0, echo=True)["choices"][0]
    offsets, parts = plain["logprobs"]["text_offset"], plain["logprobs"]["tokens"]
    assert parts[0] not in plain["text"] and offsets[:2] == [0, 0], "the text lacks its beginning token"
    assert all(plain["text"].startswith(*pair) for pair in zip(parts[1:], offsets[1:], strict=True))
    only = complete(server, prompt=tokens, max_tokens=0, logprobs=0, echo=True)["choices"][0]
    end = len(tokens)
    assert only["logprobs"]["token_logprobs"][1:] == pytest.approx(scores["token_logprobs"][1:end], abs=1e-4)
    content = complete(server, messages=CARD, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert content and all(one["logprob"] == one["top_logprobs"][0]["logprob"] <= 0 for one in content)


def test_waiting_requests_share_a_batch_and_get_their_own_answers(
    runs: list[Path], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["where is my card", "a fee", "I want to top up my account with cash, is that possible", "help", "x", "y z"]
    sizes: list[int] = []
    answer = server.runs.answer
    monkeypatch.setattr(server.runs, "answer", lambda questions: (sizes.append(len(questions)), answer(questions)))
    asked = [(path, text, longest) for longest in (6, 3) for path in runs for text in texts]

    def get(case: tuple[Path, str, int]) -> str:
        path, text, longest = case
        found = complete(server, model=path.name, messages=[{"role": "user", "content": text}], max_tokens=longest)
        return found["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(get, asked))
    assert sum(sizes) == len(asked) and len(sizes) < len(asked) / 2
    for path in runs:
        for longest in (6, 3):
            alone = generate_from_run(
                path, prompts=texts, decoding={"max_new_tokens": longest}, batch_size=1, quiet=True
            )
            own = [text for case, text in zip(asked, found, strict=True) if case[::2] == (path, longest)]
            assert own == [record["text"] for record in alone]


def test_an_answer_stops_when_its_client_leaves(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []
    answer, begun, ended = server.runs.answer, threading.Event(), threading.Event()

    def record(questions: list[Question]) -> None:
        asked.extend(questions)
        begun.set()
        answer(questions)
        ended.set()

    add = Question.add
    monkeypatch.setattr(Question, "add", lambda self, token: time.sleep(0.01) or add(self, token))
    monkeypatch.setattr("flatshift.experiments.workflows.generate.get_end_token", lambda tokenizer: None)
    monkeypatch.setattr(server.runs, "answer", record)
    body = json.dumps({"prompt": "The card", "max_tokens": 200}).encode()
    with socket.create_connection(server.server_address[:2], timeout=60) as connection:
        connection.sendall(JSON_POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert begun.wait(60)
    assert ended.wait(60) and asked[0].is_cancelled and len(asked[0].tokens) < 200


BAD_REQUESTS: list[tuple[str, Any, int, str]] = [
    (CHAT, {"model": "nobody", "messages": CARD}, 404, "seed-0, seed-1"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x"}]}, 400, "must be the user's"),
    (CHAT, {"messages": "x"}, 400, "list of messages"),
    (CHAT, {"messages": CARD, "tools": [{}]}, 400, "'tools' can only be []"),
    (CHAT, {"messages": CARD, "temperature": -1}, 400, "temperature"),
    (TEXT, {"prompt": "x", "presence_penalty": 0.5}, 400, "'presence_penalty' can only be 0"),
    (CHAT, b"{", 400, "not valid JSON"),
    (CHAT, b"[" * 100_000, 400, "not valid JSON"),
    (TEXT, {"prompt": "x " * 2000}, 400, "positions"),
    ("/v1/embeddings", {"input": "x"}, 404, "no such path"),
]


@pytest.mark.parametrize(("path", "body", "code", "said"), BAD_REQUESTS)
def test_bad_requests_are_one_sentence(server: Server, capfd, path: str, body: Any, code: int, said: str) -> None:
    status, text = ask(server, "POST", path, body)
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (code, "invalid_request_error") and said in error["message"]
    assert not capfd.readouterr().err


def test_a_foreign_page_gets_no_answer(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for headers, code in (
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "192.0.2.1"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost@evil.example"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Content_Type": "application/json; charset=utf-8"}, 200),
    ):
        assert ask(server, "POST", TEXT, body, **headers)[0] == code, headers
    for method, path in (("GET", CHAT), ("GET", TEXT), ("PUT", CHAT), ("DELETE", "/v1/models")):
        status, text = ask(server, method, path)
        assert (status, json.loads(text)["error"]["type"]) == (405, "invalid_request_error")
    assert ask(server, "GET", "/v1/models", Host="evil.example")[0] == 403
    assert ask(server, "OPTIONS", TEXT, Origin="https://evil.example")[0] == 403
    assert ask(server, "OPTIONS", TEXT, Origin="http://localhost:3000")[0] == 204


def test_malformed_requests_leave_nothing(server: Server, capfd) -> None:
    for data in MALFORMED:  # what grows once
        answer = talk(server, data)
        assert not answer or json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["message"], data
    before, threads = resident_bytes(), threading.active_count()
    for number in range(72):
        talk(server, MALFORMED[number % len(MALFORMED)])
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads and not server.deadlines
    assert resident_bytes() - before < 16 << 20
    assert not capfd.readouterr().err and ask(server, "GET", "/v1/models")[0] == 200


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_slow_and_surplus_requests_are_refused(
    runs: list[Path], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatshift.experiments.workflows.serve._PATIENCE", 0.3)
    half = JSON_POST + b"Content-Length: 99\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        connect = lambda: stack.enter_context(socket.create_connection(server.server_address[:2], timeout=20))  # noqa: E731
        halves = [connect() for _ in range(20)]
        for number, connection in enumerate(halves):
            connection.sendall(half if number % 2 else half[:40])
        answers = [connection.recv(1 << 16) for connection in halves]
    assert all(b"408 Request Timeout" in answer for answer in answers[1::2])
    monkeypatch.undo()
    monkeypatch.setattr("flatshift.experiments.workflows.serve._WAITING", 1)
    status, text = ask(server, "POST", TEXT, {"prompt": "x", "n": 2})
    assert (status, json.loads(text)["error"]["type"]) == (429, "rate_limit_error")
    monkeypatch.setattr("flatshift.experiments.workflows.serve._CONNECTIONS", 1)
    with serving(Server(server.runs, "127.0.0.1", 0)) as small, socket.create_connection(small.server_address[:2]):
        time.sleep(0.2)
        status, text = ask(small, "GET", "/v1/models")
        assert status == 503 and "connections" in json.loads(text)["error"]["message"]


def serve(argv: list[str], act: Callable[[Server], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `flatshift serve`, and `act` as its client."""
    forever = Server.serve_forever

    def serve_forever(self: Server) -> None:
        thread = threading.Thread(target=forever, args=(self, 0.05))
        thread.start()
        try:
            act(self)
        finally:
            self.shutdown()
            thread.join()

    with monkeypatch.context() as patch:
        patch.setattr(Server, "serve_forever", serve_forever)
        assert run(["serve", *argv, "--port", "0"]) == 0


def test_the_options_of_the_command(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_key(server: Server) -> None:
        assert ask(server, "GET", "/v1/models")[0] == 401
        assert ask(server, "GET", "/v1/models", Authorization="Bearer \xe9")[0] == 401
        assert ask(server, "GET", "/v1/models", Authorization="Bearer sk-1")[0] == 200
        assert ask(server, "GET", "/v1/models", Authorization="Bearer sk-1", Origin="https://me.example")[0] == 200
        assert ask(server, "GET", "/v1/models", Authorization="Bearer sk-1", Host="me.example")[0] == 200
        assert ask(server, "GET", "/v1/models", Authorization="Bearer sk-1", Origin="http://me.example")[0] == 403

    serve([str(runs[0]), "--api-key", "sk-1", "--allow-origin", "https://me.example"], with_key, monkeypatch)

    def everywhere(server: Server) -> None:
        assert ask(server, "GET", "/v1/models", Host="192.0.2.1:80", Origin="https://evil.example")[0] == 200
        assert ask(server, "GET", "/v1/models", Host="evil.example")[0] == 200

    serve([str(runs[0]), "--host", "0.0.0.0", "--allow-origin", "*"], everywhere, monkeypatch)
    assert "no --api-key is set" in capsys.readouterr().err

    def any_address(server: Server) -> None:
        assert ask(server, "GET", "/v1/models", Host="192.0.2.1:80")[0] == 200
        assert ask(server, "GET", "/v1/models", Host="evil.example")[0] == 403

    serve([str(runs[0]), "--host", "0.0.0.0"], any_address, monkeypatch)
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
        serve(
            [str(runs[0]), "--host", "::1"],
            lambda own: ask(own, "GET", "/v1/models")[0] == 200 or pytest.fail(),
            monkeypatch,
        )
        assert "http://[::1]:" in capsys.readouterr().err

    def on_the_cpu(server: Server) -> None:
        assert complete(server, messages=CARD)["choices"][0]["message"]["content"] == expected(
            runs[0], "where is my card"
        )
        assert [subject.recipe.train.device for subject in server.runs._subjects.values()] == ["cpu"]

    serve([str(runs[0]), "--device", "cpu"], on_the_cpu, monkeypatch)
    for words in (
        ["--api-key", "a b"],
        ["--device", "tpu"],
        ["--allow-origin", "evil.example"],
        ["--host", "no.such.host.invalid"],
    ):
        assert run(["serve", str(runs[0]), *words, "--port", "0"]) == 2
        assert words[0].replace("--device", "train.device: 'tpu' is no device") in capsys.readouterr().err


def test_runs_that_write_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("chat", "serve"):
        assert run([command]) == 2
        assert run([command, str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
