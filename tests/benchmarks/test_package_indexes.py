"""`make` asks a package index once: one that does not answer is named in one line, and pip is told of the others."""

from __future__ import annotations

import shlex
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scripts.package_indexes import index_failure, main, pip_settings


class _Refusal(BaseHTTPRequestHandler):
    """Answers, though with an error."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture(scope="module")
def alive():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://user:secret@127.0.0.1:{server.server_port}/simple"
    server.shutdown()


@pytest.fixture(scope="module")
def dead():
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        yield f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}/simple"


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """Configures pip by a file, and nothing else."""

    def configure(**options: str) -> None:
        lines = [f"{key.replace('_', '-')} = {value}" for key, value in options.items()]
        (tmp_path / "pip.conf").write_text("\n".join(["[global]", *lines]), encoding="utf-8")

    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "NO_INDEX", "PROXY"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    return configure


def shell(lines: str) -> dict[str, str]:
    """What the lines set, as /bin/sh reads them."""
    script = lines + '\nprintf "%s|" "$PIP_INDEX_URL" "$PIP_EXTRA_INDEX_URL" "$PIP_NO_INDEX" "$TORCH_FLAGS"'
    done = subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True)
    return dict(zip(("index", "extra", "none", "torch"), done.stdout.split("|"), strict=False))


def test_indexes_that_answer_change_nothing(alive, pip, capsys, tmp_path) -> None:
    pip(index_url=alive, extra_index_url=tmp_path.as_uri())
    main([alive])
    said = capsys.readouterr()
    assert said.err == ""
    assert shell(said.out) == {"index": "", "extra": "", "none": "", "torch": f"--extra-index-url {alive}"}


def test_a_silent_torch_index_is_one_line(alive, dead, pip, capsys) -> None:
    pip(index_url=alive)
    main([dead])
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert "Connection refused" in line and "secret" not in line and "torch comes from the others" in line
    assert shell(said.out) == {"index": "", "extra": "", "none": "", "torch": ""}


def test_silent_configured_indexes_are_left_out(alive, dead, pip, capsys, tmp_path) -> None:
    gone = (tmp_path / "no such folder").as_uri()
    pip(index_url=dead, extra_index_url=f"{alive} {gone} {tmp_path.as_uri()}")
    main([])
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert "Connection refused" in first and "no such directory" in second and "secret" not in said.err
    assert shell(said.out) == {"index": alive, "extra": tmp_path.as_uri(), "none": "", "torch": ""}
    pip(index_url=dead, extra_index_url=alive)
    main([])
    assert shell(capsys.readouterr().out)["extra"] == alive, "pip passes over an empty variable"
    pip(index_url=dead)
    main([])
    assert shell(capsys.readouterr().out)["none"] == "1"


def test_pip_obeys_what_is_written(alive, dead, pip, capsys, monkeypatch, tmp_path) -> None:
    """pip's own reading of its settings after ours: the environment outranks the file."""
    pip(index_url=dead, extra_index_url=f"{alive} {dead}")
    assert pip_settings() == {"index-url": dead, "extra-index-url": f"{alive} {dead}"}
    main([])
    for line in capsys.readouterr().out.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        monkeypatch.setenv(name, shlex.split(value)[0])
    assert pip_settings() == {"index-url": alive, "extra-index-url": alive}
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    main([])
    assert capsys.readouterr() == ("", ""), "nobody is asked where pip asks nobody"


def test_any_answer_is_one(alive, dead, tmp_path) -> None:
    assert index_failure(alive) is None
    assert index_failure(str(tmp_path)) is None and index_failure(str(tmp_path / "gone")) == "no such directory"
    assert index_failure("https" + alive.removeprefix("http")) is None, "a broken handshake: there is somebody"
    assert index_failure(dead) == "Connection refused"
    assert index_failure("http://127.0.0.1:1/", proxy=f"http://{alive.rpartition('@')[2]}") is None
    assert index_failure("no://where") is not None
