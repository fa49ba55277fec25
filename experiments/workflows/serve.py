"""OpenAI-compatible HTTP endpoint, for trying adapters with any client.

flatshift serve runs/first --port 8000

`GET /v1/models`, `POST /v1/chat/completions` and `POST /v1/completions`, streamed by server-sent events on request; the
adapter is the `model` of a request. One answer is generated at a time: for many users take vLLM (docs/out.md).
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flatshift.experiments.workflows.generate import GenerativeRuns, Reply
from flatshift.finetune.errors import UserError

_LONGEST = 4 << 20
"""Maximum bytes of a request."""
_DECODING = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
_TAKEN = ("temperature", "top_p", "seed")
_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "logprobs": False, "logit_bias": {}}
"""Parameters that clients send at their defaults: accepted at these values, or null."""
_IGNORED = {"model", "messages", "prompt", "stream", "user", "n", "stop", "stream_options", *_DECODING, *_TAKEN}


class Server(ThreadingHTTPServer):
    """HTTP server that answers requests for `runs` at `host:port` (0: any free port)."""

    daemon_threads = True

    def __init__(self, runs: GenerativeRuns, host: str, port: int) -> None:
        """Raise UserError for an address that cannot be used."""
        self.runs = runs
        self.began = int(time.time())
        try:
            super().__init__((host, port), RequestHandler)
        except OSError as error:
            raise UserError(f"--host {host} --port {port}: {error.strerror}; take another port") from None


class RequestHandler(BaseHTTPRequestHandler):
    """Handler of one request."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Return the list of runs."""
        if self.path.rstrip("/") != "/v1/models":
            return self._refuse(HTTPStatus.NOT_FOUND, f"no such path: {self.path}; there is /v1/models")
        models = [
            {"id": name, "object": "model", "created": self.server.began, "owned_by": "flatshift"}
            for name in self.server.runs.names
        ]
        return self._answer({"object": "list", "data": models})

    def do_POST(self) -> None:
        """Return an answer, or a continuation."""
        chat = {"/v1/chat/completions": True, "/v1/completions": False}.get(self.path.rstrip("/"))
        try:
            length = int(self.headers.get("Content-Length") or 0)
            if not 0 < length <= _LONGEST:
                raise UserError(f"a request needs a body of at most {_LONGEST:,} bytes and its Content-Length")
            body = json.loads(self.rfile.read(length))
            if chat is None:
                return self._refuse(HTTPStatus.NOT_FOUND, f"no such path: {self.path}; POST /v1/chat/completions")
            if not isinstance(body, dict):
                raise UserError("the body must be a JSON object")
            return self._write(body, chat)
        except UserError as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (ValueError, RecursionError):
            return self._refuse(HTTPStatus.BAD_REQUEST, "the body is not valid JSON")

    def _write(self, body: dict[str, Any], chat: bool) -> None:
        asks = {key for key, value in body.items() if value is not None and value != _NEUTRAL.get(key)}
        if odd := sorted(asks - _IGNORED):
            raise UserError(f"{odd[0]!r} is not known here; known are {', '.join(sorted(_IGNORED))}")
        if body.get("n", 1) != 1 or body.get("stop"):
            raise UserError("one answer is written, up to the run's own end: leave n and stop out")
        name = body.get("model") or self.server.runs.names[0]
        asked = body.get("messages" if chat else "prompt")
        if not isinstance(asked, list if chat else str) or (chat and not all(isinstance(m, dict) for m in asked)):
            raise UserError("messages must be a list of messages" if chat else "prompt must be a text")
        decoding = {own: body[key] for key, own in _DECODING.items() if body.get(key) is not None}
        decoding |= {key: body[key] for key in _TAKEN if body.get(key) is not None}
        # A temperature of 0 means greedy decoding, for which `top_p` has no meaning.
        if not decoding.get("temperature"):
            decoding.pop("top_p", None)
        about = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        begun = threading.Event()

        def told(piece: str) -> None:
            if not begun.is_set():
                begun.set()
                self._begin_stream()
            delta = {"delta": {"role": "assistant", "content": piece}} if chat else {"text": piece}
            self._event({**about, **_chunk_type(chat), "choices": [{"index": 0, **delta, "finish_reason": None}]})

        streamed = bool(body.get("stream"))
        reply = self.server.runs.reply(
            name, asked, raw=not chat, decoding=decoding, on_text=told if streamed else (lambda piece: None)
        )
        reason = "stop" if reply.ended else "length"
        if not streamed:
            said = {"message": {"role": "assistant", "content": reply.text}} if chat else {"text": reply.text}
            choices = [{"index": 0, **said, "finish_reason": reason}]
            return self._answer({**about, "choices": choices, "usage": _token_usage(reply)})
        if not begun.is_set():
            self._begin_stream()
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        choices = [{"index": 0, **last, "finish_reason": reason}]
        self._event({**about, **_chunk_type(chat), "choices": choices, "usage": _token_usage(reply)})
        self._send(b"data: [DONE]\n\n")
        self._send(b"")
        return None

    def _begin_stream(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _event(self, value: dict[str, Any]) -> None:
        self._send(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    def _send(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, value: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        data = json.dumps(value, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True  # the rest of the request body was not read
        self._answer({"error": {"message": why, "type": "invalid_request_error"}}, status)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: requests are private."""


def _chunk_type(chat: bool) -> dict[str, str]:
    return {"object": "chat.completion.chunk"} if chat else {}


def _token_usage(reply: Reply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.tokens, "total_tokens": total}
