"""OpenAI-compatible HTTP endpoint, for trying adapters with any client.

flatshift serve runs/first --port 8000

`GET /v1/models`, `GET /v1/models/{id}`, `POST /v1/chat/completions` and `POST /v1/completions`, streamed by server-sent
events on request; the adapter is the `model` of a request. Requests that wait for the same adapter are answered in one
batch, those of similar length together; the next batch starts when the last answer of this one has ended.

A page in a browser reaches local addresses too, and by DNS rebinding under its own name: so `Host` and `Origin` must
name this machine, and the body must be declared as JSON, which a page cannot send to another site unasked. Connections,
bodies, prompts and waiting time are limited, and an answer is stopped when its client leaves.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import queue
import select
import socket
import socketserver
import sys
import threading
import time
import traceback
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from flatshift.experiments.workflows import openai_forms as forms
from flatshift.experiments.workflows.generate import GenerativeRuns, Question, UnknownRun
from flatshift.experiments.workflows.openai_forms import RefusalError
from flatshift.finetune.errors import UserError, is_out_of_memory

_CONNECTIONS = 256
_WAITING = 256
"""Maximum answers that wait; a request beyond them is refused."""
_PATIENCE = 30.0
"""Seconds in which a client must send its request, and take each part of the answer."""
_LOOK = 0.2
"""Seconds between looks at the client while its answer is generated."""
_GATHER = 0.01
"""Seconds without a further request after which a batch starts."""
_BATCH = 16
"""Maximum answers in a batch."""
_BATCH_TOKENS = 1 << 16
"""Maximum tokens of a batch, prompts and answers with padding; a single answer may have more."""


_Waiting = tuple[Question, Callable[[Exception | None], None]]
"""A question, and the function that gets its end: None, or the error."""


class Batcher(threading.Thread):
    """Thread that answers waiting questions, in batches of one run."""

    def __init__(self, runs: GenerativeRuns) -> None:
        super().__init__(name="answers", daemon=True)
        self.runs = runs
        self._waiting: list[_Waiting] = []
        self._current: list[Question] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def submit(self, questions: Sequence[_Waiting]) -> None:
        """Queue questions; each one's function is called when its answer is complete, with the error if it failed."""
        with self._changed:
            self.check_room(len(questions))
            self._waiting += questions
            self._changed.notify()

    def check_room(self, count: int) -> None:
        """Raise RefusalError if `count` more questions cannot wait."""
        if self._is_closed:
            raise RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is closing")
        if len(self._waiting) + count > _WAITING:
            raise RefusalError(
                HTTPStatus.TOO_MANY_REQUESTS, f"{_WAITING} answers wait already; ask again later", code="queue_full"
            )

    def close(self) -> None:
        """Stop the answers and the thread."""
        with self._changed:
            self._is_closed = True
            for question in [*self._current, *(question for question, _ in self._waiting)]:
                question.is_cancelled = True
            self._changed.notify()
        if self.is_alive():
            self.join()
        for _, done in self._waiting:
            done(None)

    def run(self) -> None:
        """Answer until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                count = 0
                while count < len(self._waiting) < _BATCH:  # clients that ask together come one by one
                    count = len(self._waiting)
                    self._changed.wait_for(lambda: len(self._waiting) > count or self._is_closed, _GATHER)  # noqa: B023
                batch = self._take()
                self._current = [question for question, _ in batch]
            if batch:
                self._answer(batch)

    def _take(self) -> list[_Waiting]:
        """Remove the next batch from the queue: the oldest question and those nearest to it in length."""
        for question, done in self._waiting:
            if question.is_cancelled:
                done(None)
        self._waiting = [pair for pair in self._waiting if not pair[0].is_cancelled]
        if not self._waiting:
            return []
        first = self._waiting[0][0]
        alike = [pair for pair in self._waiting if pair[0].batch_key == first.batch_key]
        alike.sort(key=lambda pair: abs(len(pair[0].prompt.ids) - len(first.prompt.ids)))
        batch = alike[:1]
        for pair in alike[1:]:
            questions = [question for question, _ in (*batch, pair)]
            width = max(len(q.prompt.ids) for q in questions) + max(q.decoding.max_new_tokens for q in questions)
            if len(batch) == _BATCH or len(questions) * width > _BATCH_TOKENS or not self.runs.can_join(questions):
                break
            batch.append(pair)
        answered = {id(pair[0]) for pair in batch}
        self._waiting = [pair for pair in self._waiting if id(pair[0]) not in answered]
        return batch

    def _answer(self, batch: list[_Waiting]) -> None:
        error: Exception | None = None
        try:
            self.runs.answer([question for question, _ in batch])
        except Exception as caught:  # for the threads that wait
            error = caught
        for question, done in batch:
            if error is not None and len(batch) > 1 and not question.tokens:
                self._answer([(question, done)])  # too much memory together, say
            else:
                done(error)


class Server(socketserver.ThreadingTCPServer):
    """HTTP server that answers requests for `runs` at `host:port` (0: any free port)."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        runs: GenerativeRuns,
        host: str,
        port: int,
        *,
        allow_origins: Sequence[str] = (),
        api_key: str | None = None,
    ) -> None:
        """allow_origins: further sites (`https://host:port`) whose pages may ask, and whose hosts are names of this
        server; `*`: any. api_key: key that a request must bring. Raises UserError for an address that cannot be used.
        """
        self.runs, self.api_key, self.batcher = runs, api_key, Batcher(runs)
        self.began = int(time.time())
        self.allow_origins = {origin.rstrip("/").lower() for origin in allow_origins}
        self.own_names = {"localhost", "127.0.0.1", "::1", host.lower()}
        self.proxy_names = {_host_name(origin.partition("://")[2]) for origin in self.allow_origins}
        self.deadlines: dict[socket.socket, float] = {}
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        try:
            address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = address[0]
            super().__init__(address[4], RequestHandler)  # type: ignore[arg-type]
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "no such host"
            raise UserError(f"--host {host} --port {port}: {why}; take another port or address") from None
        self._is_everywhere = ipaddress.ip_address(str(self.server_address[0]).partition("%")[0]).is_unspecified
        self.batcher.start()

    @property
    def url(self) -> str:
        """Address for clients."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/v1"

    def accepts_host(self, name: str | None) -> bool:
        """True if a client may call this server by `name`. If it listens at every address, each of them is one: a page
        cannot rebind an address."""
        if "*" in self.allow_origins or name in self.own_names or name in self.proxy_names:
            return name is not None
        try:
            return self._is_everywhere and bool(ipaddress.ip_address(name or ""))
        except ValueError:
            return False

    def accepts_origin(self, origin: str) -> bool:
        """True if pages of the site `origin` may ask."""
        scheme, _, address = origin.lower().partition("://")
        own = scheme in ("http", "https") and _host_name(address) in self.own_names
        return own or not self.allow_origins.isdisjoint(("*", origin.lower()))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or refuse it if there are too many."""
        if self._slots.acquire(blocking=False):
            try:
                return super().process_request(request, client_address)
            except RuntimeError:  # no thread can be started
                self._slots.release()
        body = forms.error_body(f"{_CONNECTIONS} connections are open already; try again later", "server_error")
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        request.setblocking(False)
        with contextlib.suppress(OSError):
            request.send(f"{head}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n".encode() + body)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def service_actions(self) -> None:
        """End reading from connections whose request is overdue."""
        now = time.monotonic()
        for connection, deadline in list(self.deadlines.items()):
            if now > deadline:
                self.deadlines.pop(connection, None)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of this program; clients that leave are none."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()

    def server_close(self) -> None:
        """Close the address and stop the answers."""
        super().server_close()
        self.batcher.close()


def _host_name(address: str | None) -> str | None:
    """Return the name or address in `host:port`, in lower case; None if there is none, or a user before it."""
    try:
        return None if "@" in (address or "") else urllib.parse.urlsplit(f"//{address or ''}").hostname
    except ValueError:
        return None


_POSTED = {"/v1/chat/completions": True, "/v1/completions": False}
"""Paths that take POST, and whether they are conversations."""
_LEFT = (ConnectionError, TimeoutError)
"""Errors of a client that has left, or takes too long."""


class RequestHandler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = _PATIENCE + 5  # the deadline comes first, with an answer
    disable_nagle_algorithm = True
    _left = 0
    """Bytes of the body that are not read."""
    _is_streaming = False

    def handle_one_request(self) -> None:
        """Answer one request, which must arrive in time."""
        self.server.deadlines[self.connection] = time.monotonic() + _PATIENCE
        self._left, self._is_streaming = 0, False
        try:
            super().handle_one_request()
        except _LEFT:
            self.close_connection = True

    def finish(self) -> None:
        """Forget the connection."""
        self.server.deadlines.pop(self.connection, None)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        """Return the list of runs, or one of them."""
        self._respond(self._get)

    def do_POST(self) -> None:
        """Return answers, or continuations."""
        self._respond(self._post)

    def do_OPTIONS(self) -> None:
        """Tell a browser which requests a page may send."""
        self._respond(lambda: self._answer(None, HTTPStatus.NO_CONTENT), is_preflight=True)

    def _respond(self, act: Callable[[], None], *, is_preflight: bool = False) -> None:
        """Check the sender, act, and turn every failure into an answer."""
        try:
            self._left = self._body_length()
            self._check_sender(with_key=not is_preflight)
            act()
        except RefusalError as error:
            self._refuse(error.status, str(error), error.param, error.code)
        except UnknownRun as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error), "model", "model_not_found")
        except UserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except _LEFT:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "memory ran out; ask for a shorter answer, or later")
            else:
                traceback.print_exc()
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error ({type(error).__name__})")

    def _body_length(self) -> int:
        lengths = self.headers.get_all("Content-Length") or []
        if "Transfer-Encoding" in self.headers or len(lengths) > 1:
            self.close_connection = True
            raise RefusalError(HTTPStatus.LENGTH_REQUIRED, "send the body whole, with one Content-Length")
        if not lengths:
            return 0
        if not (lengths[0].isascii() and lengths[0].isdigit() and len(lengths[0]) < 16):
            self.close_connection = True
            raise RefusalError(HTTPStatus.BAD_REQUEST, "Content-Length must be a number of bytes")
        return int(lengths[0])

    def _check_sender(self, *, with_key: bool) -> None:
        hosts, origin = self.headers.get_all("Host") or [], self.headers.get("Origin")
        if len(hosts) != 1 or not self.server.accepts_host(_host_name(hosts[0])):
            raise RefusalError(
                HTTPStatus.FORBIDDEN, "Host is no name of this server; use its address, or start it with --allow-origin"
            )
        if origin is not None and not self.server.accepts_origin(origin):
            raise RefusalError(HTTPStatus.FORBIDDEN, "pages of this Origin may not ask; --allow-origin lets them")
        if with_key and self.server.api_key is not None:
            given = (self.headers.get("Authorization") or "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, f"Bearer {self.server.api_key}".encode()):
                raise RefusalError(HTTPStatus.UNAUTHORIZED, "the API key is missing or wrong", code="invalid_api_key")

    def _get(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0]).rstrip("/")
        models = {
            name: {"id": name, "object": "model", "created": self.server.began, "owned_by": "flatshift"}
            for name in self.server.runs.names
        }
        if path == "/v1/models":
            return self._answer({"object": "list", "data": list(models.values())})
        if path in _POSTED:
            raise RefusalError(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes POST")
        name = path.removeprefix("/v1/models/")
        if name == path:
            raise RefusalError(HTTPStatus.NOT_FOUND, f"no such path: {path[:200]}; there is /v1/models")
        if name not in models:
            raise UnknownRun(f"no run is called {name[:200]!r}; there are {', '.join(models)}")
        return self._answer(models[name])

    def _post(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        chat = _POSTED.get(path)
        if chat is None:
            raise RefusalError(HTTPStatus.NOT_FOUND, f"no such path: {path[:200]}; POST /v1/chat/completions")
        if self.headers.get_content_type() != "application/json":
            raise RefusalError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON, with Content-Type: application/json")
        if self._left > forms.MAX_BODY:
            raise RefusalError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {forms.MAX_BODY:,} bytes")
        if not self._left:
            raise RefusalError(HTTPStatus.LENGTH_REQUIRED, "a request needs a body and its Content-Length")
        data, missing = self.rfile.read(self._left), self._left
        self._left = 0
        if len(data) < missing:
            self.close_connection = True
            raise RefusalError(HTTPStatus.REQUEST_TIMEOUT, "the body ended before its Content-Length")
        self.server.deadlines.pop(self.connection, None)
        self._write(forms.parse_fields(data, chat), chat)

    def _write(self, fields: dict[str, Any], chat: bool) -> None:
        runs, name = self.server.runs, fields.get("model") or self.server.runs.names[0]
        prompts: Any = [fields["messages"]] if chat else fields["prompt"]
        if not isinstance(prompts, list) or isinstance(prompts[0], int):
            prompts = [prompts]
        count, stop, streamed = fields.get("n", 1), fields.get("stop", []), fields.get("stream", False)
        if len(prompts) * count > forms.MAX_CHOICES:
            raise RefusalError(HTTPStatus.BAD_REQUEST, f"prompts times n are at most {forms.MAX_CHOICES} answers", "n")
        self.server.batcher.check_room(len(prompts) * count)
        pieces: queue.SimpleQueue[tuple[int, str | Exception | None]] = queue.SimpleQueue()

        def put(index: int, piece: Any) -> None:
            pieces.put((index, piece))

        tell = [partial(put, index) for index in range(len(prompts) * count)]
        stops, decoding = [stop] if isinstance(stop, str) else stop, forms.read_decoding(fields)
        asked = [runs.ask(name, prompt, raw=not chat, decoding=decoding, stop=stops) for prompt in prompts]
        questions = [
            replace(asked[index // count], number=index, on_text=tell[index] if streamed else None, tokens=[])
            for index in range(len(tell))
        ]
        about = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": ("chat.completion.chunk" if streamed else "chat.completion") if chat else "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        usage = count if (fields.get("stream_options") or {}).get("include_usage") else 0
        events: Iterator[tuple[int, str | None]] = iter(())
        try:
            if fields.get("max_tokens") != 0:
                self.server.batcher.submit(list(zip(questions, tell, strict=True)))
                events = self._wait(questions, pieces)
            if streamed:
                return self._stream(about, questions, events, chat=chat, usage=usage)
            for _ in events:
                pass
        finally:
            for question in questions:
                question.is_cancelled = True
        choices = [forms.format_choice(runs, question, index, fields, chat) for index, question in enumerate(questions)]
        return self._answer({**about, "choices": choices, "usage": forms.token_usage(questions, count)})

    def _wait(
        self, questions: Sequence[Question], pieces: queue.SimpleQueue[tuple[int, str | Exception | None]]
    ) -> Iterator[tuple[int, str | None]]:
        """Yield (index, piece) of the answers as they are generated, and (index, None) when one is complete. Raises
        ConnectionAbortedError if the client leaves."""
        missing = len(questions)
        while missing:
            try:
                index, piece = pieces.get(timeout=_LOOK)
            except queue.Empty:
                if self._has_left():
                    raise ConnectionAbortedError from None
                continue
            if isinstance(piece, Exception):
                raise piece
            missing -= piece is None
            yield index, piece
        if any(question.is_cancelled for question in questions):
            raise RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is closing")

    def _has_left(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

    def _stream(
        self,
        about: dict[str, Any],
        questions: Sequence[Question],
        events: Iterator[tuple[int, str | None]],
        *,
        chat: bool,
        usage: int,
    ) -> None:
        more: dict[str, Any] = {"usage": None} if usage else {}
        begun: set[int] = set()
        for index, piece in events:
            if not self._is_streaming:
                self._begin_stream()
            if chat and index not in begun:
                begun.add(index)
                delta = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                self._event({**about, "choices": [first], **more})
            text: dict[str, Any] = {"text": piece or ""}
            if chat:
                text = {"delta": {} if piece is None else {"content": piece}}
            reason = forms.finish_reason(questions[index]) if piece is None else None
            choice = {"index": index, **text, "logprobs": None, "finish_reason": reason}
            self._event({**about, "choices": [choice], **more})
        if usage:
            self._event({**about, "choices": [], "usage": forms.token_usage(questions, usage)})
        self._send(b"data: [DONE]\n\n")
        self._send(b"")  # the last chunk

    def _begin_stream(self) -> None:
        self._is_streaming = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        if self.request_version == "HTTP/1.1":
            self.send_header("Transfer-Encoding", "chunked")
        self._end_headers()

    def _event(self, value: dict[str, Any]) -> None:
        self._send(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    def _send(self, data: bytes) -> None:
        chunked = self.request_version == "HTTP/1.1"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n" if chunked else data)

    def _end_headers(self) -> None:
        """End the headers, with those that let an allowed page read the answer."""
        origin = self.headers.get("Origin") if hasattr(self, "headers") else None
        if origin is not None and self.server.accepts_origin(origin):
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Access-Control-Allow-Headers", "authorization, content-type")
            self.send_header("Access-Control-Allow-Methods", "GET, POST")
        self.send_header("Vary", "Origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _answer(self, value: dict[str, Any] | bytes | None, status: HTTPStatus = HTTPStatus.OK) -> None:
        data = json.dumps(value, ensure_ascii=False).encode() if isinstance(value, dict) else value or b""
        self._skip_body()
        self.send_response(status)
        if value is not None:
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self.send_header("Retry-After", "1")
        self._end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _skip_body(self) -> None:
        """Read the rest of a body that nobody needs, so that the client reads the answer before the connection ends."""
        while self._left:
            data = b"" if self._left > 8 * forms.MAX_BODY else self.rfile.read(min(self._left, 1 << 16))
            self._left -= len(data)
            if not data:
                self.close_connection = True
                self._left = 0

    def _refuse(self, status: HTTPStatus, why: str, param: str | None = None, code: str | None = None) -> None:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = forms.error_body(why, "rate_limit_error" if status == 429 else kind, param, code)
        if self._is_streaming:  # the status is sent already
            self._send(b"data: " + body + b"\n\n")
            self._send(b"")  # the last chunk
            self.close_connection = True
        else:
            self._answer(body, status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is no HTTP, or of an unknown method."""
        self.close_connection = True
        status = HTTPStatus(405 if code == 501 else code)  # http.server's for a method that it does not know
        self._refuse(status, (message or status.phrase)[:200])

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "flatshift"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: requests are private."""
