"""A model hub on localhost, as much of it as an upload and its check ask for; everything is kept in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

COMMIT = "a" * 40


class Hub:
    """What was uploaded, and what is to go wrong."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}
        """Name → whether it is private."""
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.tokens: set[str] = set()
        self.denies = False
        self.loses: str | None = None
        """The file that comes to lie there cut short."""
        self.url = ""

    def answer(self, path: str, body: bytes) -> Any:
        """The JSON for a POST or PUT request."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization')}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.repositories[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
            return {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            return {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{self.url}/store/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return {"transfer": "basic", "objects": objects}
        if path.startswith("/store/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/store/")
            self.large[path.removeprefix("/store/")] = body
            return {}
        if "/commit/" in path:
            return self._commit([json.loads(line) for line in body.splitlines()])
        if "/paths-info/" in path:
            return [self._about(name) for name in parse_qs(body.decode())["paths"] if name in self.files]
        raise AssertionError(f"the stand-in knows no {path}")

    def _commit(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.large[value["oid"]]
        if self.loses is not None:
            self.files[self.loses] = self.files[self.loses][:-1]
        return {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.url}/org/mine/commit/{COMMIT}"}

    def _about(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        about: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": "b" * 40}
        if name.endswith((".safetensors", ".gguf")):
            about["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return about


@contextmanager
def hub() -> Iterator[Hub]:
    """A running stand-in; `url` is what HF_ENDPOINT has to name."""
    kept = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self._chunks()
            if self.headers.get("Authorization"):
                kept.tokens.add(str(self.headers["Authorization"]))
            code, found = (401, {"error": "no token"}) if kept.denies else (200, kept.answer(self._plain(), body))
            data = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_PUT = do_POST

        def do_GET(self) -> None:
            self.send_error(404)

        def _plain(self) -> str:
            return self.path.partition("?")[0]

        def _chunks(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return b""
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
