"""Requests to `flatshift serve`: malformed, hostile, of OpenAI's forms, and clients that behave badly."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.faults.doors import PATIENCE, Case, Place, Service

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CARD = [{"role": "user", "content": "where is my card"}]
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
JSON_POST = POST + b"Content-Type: application/json\r\n"
HUGE = 10**400
_TURN = {"role": "user", "content": "x"}

WRONG: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "model": [[], ["a"], {}, 3, True],
        "messages": ["x", [], [3], {}, 3, [[]], True],
        "max_tokens": ["x", 1.5, True, -1, HUGE, [], {}, 0],
        "max_completion_tokens": ["x", 1.5, True, -1, HUGE, 0],
        "temperature": ["x", True, -1, 101, HUGE, [], {}],
        "top_p": ["x", True, -0.1, 2, [], 0.5],
        "seed": ["x", True, -1, 1.5, 2**63, []],
        "n": [0, -1, 129, 1.5, True, "1", [], HUGE],
        "stop": ["", ["a"] * 17, 3, [""], [3], {}, "x" * 201, [["a"]]],
        "stream": ["false", 1, 0, [], {}],
        "stream_options": [[], {"x": True}, {"include_usage": 1}, "x", {}],
        "logprobs": [1, "x", [], 0],
        "top_logprobs": [21, -1, "x", True, 1.5, 2],
        "prompt": ["x"],
        "echo": [True],
    },
    TEXT: {
        "prompt": [[], {}, 3, True, [1, "x"], [[]], [None], [1.5], [-1], [[1], ["x"]], [True], [[[1]]], ["x"] * 129],
        "max_tokens": [0, -1, HUGE, 1 << 21],
        "logprobs": [21, -1, True, "x", 1.5],
        "echo": [1, "x", []],
        "messages": [CARD],
        "max_completion_tokens": [2],
        "n": [128.0, 10**9],
    },
}
"""Parameters with values that are none: refused with status 400 by the parameter's name."""

REFUSED: dict[str, list[Any]] = {
    "presence_penalty": [0.5, -2, "x"], "frequency_penalty": [2, True], "logit_bias": [{"1": 5}, 3],
    "tools": [[{}], [{"type": "function"}]], "functions": [[{}]], "tool_choice": ["required", {"type": "function"}],
    "function_call": [{"name": "x"}], "response_format": [{"type": "json_object"}, {"type": "json_schema"}],
    "modalities": [["audio"], ["text", "audio"]], "store": [True], "service_tier": ["flex"], "suffix": ["x"],
    "best_of": [2], "audio": [{}], "prediction": [{}], "reasoning_effort": ["low"], "web_search_options": [{}],
    "verbosity": ["low"], "nonsense": [1], "__class__": [1], "\u202e": [1], "x" * 10_000: [1],
}  # fmt: skip
NEUTRAL: dict[str, list[Any]] = {
    "presence_penalty": [0, None], "frequency_penalty": [0.0], "logit_bias": [{}, None], "tools": [[], None],
    "functions": [[]], "tool_choice": ["none", "auto"], "function_call": ["none"], "parallel_tool_calls": [True, False],
    "response_format": [{"type": "text"}], "modalities": [["text"]], "store": [False], "service_tier": ["auto"],
    "user": ["me"], "metadata": [{"a": "b"}], "top_p": [1], "temperature": [0, 2], "stop": [[], None, "zzz"],
    "stream": [False], "logprobs": [False], "seed": [0], "n": [2], "max_completion_tokens": [2],
}  # fmt: skip
"""Parameters that OpenAI's clients send without asking for anything: answered."""

MESSAGES: list[tuple[Any, int]] = [
    ([{"role": "developer", "content": "Be brief."}, _TURN], 200),
    ([{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, _TURN], 200),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}], 200),
    ([_TURN, {"role": "assistant", "content": "y"}, _TURN], 200),
    ([{"role": "assistant", "content": "x"}], 400),
    ([{"role": "tool", "content": "x"}], 400),
    ([{"role": "function", "content": "x", "name": "f"}], 400),
    ([{"role": ["user"], "content": "x"}], 400),
    ([{"role": "user"}], 400),
    ([{"role": "user", "content": None}], 400),
    ([{"role": "user", "content": 3}], 400),
    ([{"role": "user", "content": {"type": "text"}}], 400),
    ([{"role": "user", "content": [{"type": "image_url"}]}], 400),
    ([{"role": "user", "content": [{"type": "text"}]}], 400),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], 400),
    ([{"role": "user", "content": ["x"]}], 400),
    ([{**_TURN, "tool_calls": [1]}], 400),
    ([{**_TURN, "nonsense": 1}], 400),
    ([{"content": "x"}], 400),
    ([{"role": "user", "content": "\ud800"}], 400),
    ([{"role": "user", "content": "x " * 500_000}], 400),
]

BODIES: list[tuple[str, bytes, int]] = [
    (CHAT, b"{", 400),
    (CHAT, b"[" * 100_000, 400),
    (CHAT, b'{"messages": ' + b"[" * 100_000, 400),
    (TEXT, b"[]", 400),
    (TEXT, b"null", 400),
    (TEXT, b'"x"', 400),
    (TEXT, b"{}", 400),
    (TEXT, b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", 400),
    (TEXT, b'{"prompt": "x", "top_p": NaN}', 400),
    (TEXT, b'{"prompt": "x", "temperature": 1e400}', 400),
    (TEXT, b'{"prompt": "x", "temperature": -Infinity}', 400),
    (TEXT, b'{"prompt": "x", "temperature": 1e-30}', 400),
    (TEXT, b'{"prompt": "\xff"}', 400),
    (TEXT, '{"prompt": "x", "max_tokens": 1}'.encode("utf-16"), 200),
    (TEXT, b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}', 200),
    (TEXT, b'{"prompt": "x", "max_tokens": 1, "prompt": "y"}', 200),
    (TEXT, b'{"prompt": "x' + b"x" * 2_100_000 + b'"}', 413),
    (TEXT, b'{"prompt": "' + b"x " * 500_000 + b'"}', 400),
    (TEXT, b'{"prompt": "' + b"x " * 20_000 + b'"}', 400),
    (TEXT, b'{"prompt": [1000000000]}', 400),
    (TEXT, b'{"prompt": "x", "max_tokens": 1048576}', 400),
    (TEXT, b'{"prompt": "x", "stream": true, "logprobs": 1}', 400),
    (TEXT, b'{"prompt": ["x", "x", "x"], "n": 100}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "max_completion_tokens": 2}', 400),
    (TEXT, b'{"prompt": "x", "model": "nobody"}', 404),
    (TEXT, b'{"prompt": "x", "model": "../writer"}', 404),
    (TEXT, b'{"prompt": "x", "model": "\\u001b[31m"}', 404),
    (TEXT, b"", 411),
    ("/v1/embeddings", b'{"input": "x"}', 404),
    ("/v1/responses", b'{"input": "x"}', 404),
    ("/", b"{}", 404),
    ("/v1/completions/../../etc/passwd", b"{}", 404),
]

HEADERS: list[tuple[dict[str, str], int]] = [
    ({"Host": "evil.example"}, 403),
    ({"Host": "evil.example:8000"}, 403),
    ({"Host": "127.0.0.1.evil.example"}, 403),
    ({"Host": "localhost.evil.example"}, 403),
    ({"Host": "evil.example@localhost:x"}, 403),
    ({"Host": "192.0.2.1"}, 403),
    ({"Host": "0.0.0.0"}, 403),
    ({"Host": "2130706433"}, 403),
    ({"Host": "[::ffff:192.0.2.1]"}, 403),
    ({"Host": "localhost, evil.example"}, 403),
    ({"Host": ""}, 403),
    ({"Host": "["}, 403),
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "file://"}, 403),
    ({"Origin": "http://localhost@evil.example"}, 403),
    ({"Origin": "http://localhost.evil.example"}, 403),
    ({"Origin": "chrome-extension://localhost"}, 403),
    ({"Origin": "http://["}, 403),
    ({"Origin": ""}, 403),
    ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "text/plain; application/json"}, 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    ({"Content-Type": "application/jsonx"}, 415),
    ({"Content-Type": ""}, 415),
    ({"Host": "localhost:1"}, 200),
    ({"Host": "LOCALHOST"}, 200),
    ({"Host": "[::1]:8000"}, 200),
    ({"Origin": "http://localhost:3000"}, 200),
    ({"Origin": "http://[::1]:3000"}, 200),
    ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ({"Authorization": "Bearer anything"}, 200),
]

LINES: list[tuple[str, str, dict[str, str], int]] = [
    ("GET", "/v1/models", {}, 200),
    ("GET", "/v1/models/writer", {}, 200),
    ("GET", "/v1/models/writer?x=1", {}, 200),
    ("GET", "/v1/models/nobody", {}, 404),
    ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", {}, 404),
    ("GET", "/v1/models/%00", {}, 404),
    ("GET", "/v1/models/%ff%fe", {}, 404),
    ("GET", "/v1/models/%1b%5b31m", {}, 404),
    ("GET", "/../../etc/passwd", {}, 404),
    ("GET", "http://evil.example/v1/models", {}, 403),
    ("GET", "/v1/models", {"Host": "evil.example"}, 403),
    ("GET", "/v1/models", {"Origin": "https://evil.example"}, 403),
    ("GET", "/v1/completions", {}, 404),
    ("OPTIONS", TEXT, {"Origin": "https://evil.example"}, 403),
    ("OPTIONS", TEXT, {"Host": "evil.example"}, 403),
    ("OPTIONS", TEXT, {"Origin": "http://localhost:3000"}, 204),
    *((method, TEXT, {}, 501) for method in ("PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "HEAD", "BREW")),
]

MALFORMED = [
    b"", b"\0" * 100, b"\r\n" * 100, b"GET", b"GET /v1/models\r\n\r\n", b"GET /v1/models HTTP/9.9\r\n\r\n",
    b"GET  HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"SSH-2.0-x\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(200)) + b"\r\n",
    b"GET / HTTP/1.1\r\na: " + b"b" * 70_000 + b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n Host: localhost\r\n\r\n",
    POST + b"Content-Length: -1\r\n\r\n", POST + b"Content-Length: +2\r\n\r\n{}",
    POST + b"Content-Length: 0x2\r\n\r\n{}", POST + "Content-Length: ²\r\n\r\n{}".encode(),
    POST + b"Content-Length: 9" + b"9" * 5000 + b"\r\n\r\n",
    POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    JSON_POST + b"Content-Length: 99\r\n\r\n{", JSON_POST + b"Content-Length: 2\r\n\r\n{}",
    JSON_POST + b"Content-Length: 3\r\n\r\n\xff\xfe\0",
    JSON_POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
]  # fmt: skip
"""Bytes that are no request, or half of one: an error in JSON or no answer."""


def ask(service: Service, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Return status and text of an answer. body: bytes, or what is sent as JSON; headers: with `_` for `-`."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    names = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(connection):
        connection.request(method, path, data, names)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def talk(service: Service, data: bytes) -> bytes:
    """Send bytes that need not be HTTP, and return all of the answer."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except ConnectionError:
            return b""


def _judge(answer: tuple[int, str], status: int, param: str | None = None) -> str:
    """Return what is wrong about an answer: another status, or an error that is not told as OpenAI tells one."""
    result, text = answer
    if result != status:
        return f"status {result}, not {status}: {text[:200]}"
    if status < 400 or not text:
        return ""
    error = json.loads(text)["error"]
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if error["type"] != kind or not 0 < len(error["message"]) < 800:
        return f"tells {text[:200]}"
    return "" if param is None or error["param"] == param[:100] else f"names {error['param']}"


def _send(name: str, method: str, path: str, body: Any, status: int, param: str | None = None, **headers: str) -> Case:
    def open_by(place: Place) -> str:
        return _judge(ask(place.service, method, path, body, **headers), status, param)

    return Case("serve", name, open_by)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 50 else f"{text[:30]}… ({len(text):,})"


def _good(path: str) -> dict[str, Any]:
    return {"max_tokens": 1, **({"messages": CARD} if path == CHAT else {"prompt": "x"})}


def _malformed(number: int, data: bytes) -> Case:
    def open_by(place: Place) -> str:
        answer = talk(place.service, data)
        body = answer.rpartition(b"\r\n\r\n")[2]
        return "" if not answer or json.loads(body)["error"]["message"] else f"answers {answer[:200]!r}"

    return Case("serve", f"bytes {number}: {_short(data)}", open_by)


# ------------------------------------------------------------------------------------------------------------ clients


def _wait_until_quiet(service: Service, threads: int) -> str:
    """Return what is left of connections: threads beyond those that there were."""
    ends = time.monotonic() + 20
    while (now := service.status("Threads")) > threads and time.monotonic() < ends:
        time.sleep(0.05)
    return "" if now <= threads else f"{now - threads} threads are left"


def _crowd(place: Place) -> str:
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: ask(place.service, "POST", TEXT, _good(TEXT))[0], range(64)))
    return "" if answers == [200] * 64 else f"{answers.count(200)} of 64 answered"


def _surplus(place: Place) -> str:
    """Open more connections than there are slots."""
    threads = place.service.status("Threads")
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", place.service.port), timeout=20))
            for _ in range(300)
        ]
        refused = 0
        for connection in opened[-44:]:
            with contextlib.suppress(ConnectionError):
                refused += b"503 Service Unavailable" in connection.recv(1 << 12)
    return _wait_until_quiet(place.service, threads) or ("" if refused >= 40 else f"{refused} of 44 refused")


def _halves(place: Place) -> str:
    """Send half requests, and nothing more."""
    threads = place.service.status("Threads")
    half = JSON_POST + b"Content-Length: 99\r\n\r\n{"
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", place.service.port), timeout=20))
            for _ in range(40)
        ]
        for number, connection in enumerate(opened):
            connection.sendall(half if number % 2 else half[:40])
        if ask(place.service, "GET", "/v1/models")[0] != 200:
            return "others are not answered"
        answers = [connection.recv(1 << 16) for connection in opened]
    if not all(b"408 Request Timeout" in answer for answer in answers[1::2]):
        return "no 408 for a half body"
    late = time.monotonic() - begun > 10 * PATIENCE
    return "they are kept" if late else _wait_until_quiet(place.service, threads)


def _leave(place: Place) -> str:
    """Ask for long answers and leave: the next one does not wait for them."""
    threads = place.service.status("Threads")
    body = json.dumps({"prompt": "x", "max_tokens": 400, "n": 16, "temperature": 1}).encode()
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", place.service.port), timeout=20) as connection:
            connection.sendall(JSON_POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.3)
    return _judge(ask(place.service, "POST", TEXT, _good(TEXT)), 200) or _wait_until_quiet(place.service, threads)


def _stare(place: Place) -> str:
    """Ask for streams and never read them: others are answered."""
    body = json.dumps({"prompt": "x", "max_tokens": 200, "n": 4, "stream": True}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", place.service.port), timeout=20))
            one.sendall(JSON_POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return _judge(ask(place.service, "POST", TEXT, _good(TEXT)), 200)


def _overflow(place: Place) -> str:
    """Ask for more answers than may wait."""
    body = {"prompt": "x", "max_tokens": 12, "n": 128, "temperature": 1}
    with ThreadPoolExecutor(6) as pool:
        results = [status for status, _ in pool.map(lambda _: ask(place.service, "POST", TEXT, body), range(6))]
    return "" if set(results) == {200, 429} else f"statuses {sorted(set(results))}"


def _flood(place: Place) -> str:
    """Send 2,000 malformed requests: no memory, no thread, no line of the log is left of them."""
    service = place.service
    for data in MALFORMED * 10:  # what grows once, such as the allocator's arenas of threads
        talk(service, data)
    threads, before = service.status("Threads"), service.status("VmRSS")
    for number in range(2000):
        talk(service, MALFORMED[number % len(MALFORMED)])
    grown = service.status("VmRSS") - before
    return _wait_until_quiet(service, threads) or ("" if grown < 16 << 10 else f"{grown:,} KiB more")


def _pipeline(place: Place) -> str:
    """Send many requests at once over one connection."""
    answer = talk(place.service, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
    return "" if answer.count(b"HTTP/1.1 200 OK") == 50 else f"{answer.count(b'200 OK')} of 50 answered"


def _stream(place: Place) -> str:
    """Read a stream to its end: its pieces are the answer that is given whole."""
    whole = json.loads(ask(place.service, "POST", TEXT, {"prompt": "x", "max_tokens": 8})[1])["choices"][0]["text"]
    events = ask(place.service, "POST", TEXT, {"prompt": "x", "max_tokens": 8, "stream": True})[1].split("\n\n")
    pieces = [json.loads(event[6:])["choices"][0]["text"] for event in events if event and "[DONE]" not in event]
    return "" if "".join(pieces) == whole else f"{pieces} is not {whole!r}"


def _quiet(place: Place) -> str:
    """Look at what all of this has printed."""
    lines = place.service.said.read_text(encoding="utf-8").splitlines()
    return "" if len(lines) == 1 else f"prints {lines[1:4]}"


CLIENTS = {
    "64 at once": _crowd,
    "300 connections": _surplus,
    "half requests": _halves,
    "clients that leave": _leave,
    "streams that nobody reads": _stare,
    "more answers than may wait": _overflow,
    "2,000 malformed requests": _flood,
    "50 requests over one connection": _pipeline,
    "a stream is the whole answer": _stream,
    "nothing is printed": _quiet,
}


def cases() -> Iterator[Case]:
    """Yield a case for each row of the tables."""
    for path, parameters in WRONG.items():
        for key, values in parameters.items():
            for value in values:
                body = {**_good(path), key: value}
                yield _send(f"{path} {key} {_short(value)}", "POST", path, body, 400, _parameter(key, value))
    for key, values in REFUSED.items():
        for value in values:
            yield _send(f"{_short(key)} {_short(value)}", "POST", CHAT, {**_good(CHAT), key: value}, 400, key)
    for key, values in NEUTRAL.items():
        for value in values:
            body = {**_good(CHAT), key: value}
            if key == "max_completion_tokens":
                del body["max_tokens"]
            yield _send(f"accepted {key} {_short(value)}", "POST", CHAT, body, 200)
    for turns, status in MESSAGES:
        yield _send(f"messages {_short(turns)}", "POST", CHAT, {"messages": turns, "max_tokens": 1}, status)
    for path, data, status in BODIES:
        yield _send(f"body of {path} {_short(data)}", "POST", path, data, status)
    for headers, status in HEADERS:
        yield _send(f"headers {headers}", "POST", TEXT, _good(TEXT), status, **headers)
    for method, path, headers, status in LINES:
        yield _send(f"{method} {path} {headers or ''}", method, path, None, status, **headers)
    yield from (_malformed(number, data) for number, data in enumerate(MALFORMED))
    yield from (Case("serve", name, open_by) for name, open_by in CLIENTS.items())


def _parameter(key: str, value: Any) -> str | None:
    """Return the parameter that a refusal has to name."""
    if key == "prompt" and isinstance(value, list) and len(value) > 128:
        return None
    return {"max_completion_tokens": None}.get(key, key) if value == 2 else key
