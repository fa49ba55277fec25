"""Addresses lose passwords and signatures before anything is written, and open their objects all the same."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from benchmarks.faults.door_texts import ADDRESSES, COMMANDS, SIGNED
from flatshift.cli import run
from flatshift.experiments.recipe import load_recipe, recipe_like, resume_recipe
from flatshift.experiments.recipe.tree import from_mapping, from_override
from flatshift.experiments.select.selection_checks import _truncate
from flatshift.experiments.studies.sweep.axes import parse_grid
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.data.remote import find_objects, upload_folder
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.redaction import find_secrets, hide_secrets, redact_urls, reveal_secrets

PLAIN = [
    *("https://h/a.jsonl", "https://h:8080/a@b/c.jsonl?part=1&expires=never", "s3://bucket/a=b/*.jsonl", "C://x@y"),
    *("hf://datasets/ann/rows@main/a.parquet", "http://[::1]:8000/a@b", "https://h/a?design=blue&keyboard=us"),
    *("ann@host.org", "a: b://", "https://huggingface.co/x/resolve/main/a.json?download=true", "memory://p/a?b#c"),
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_loses_its_secrets(address: str) -> None:
    assert redact_urls(address) == ADDRESSES[address]
    for text in ("see {} now", "('{}', status=403)", "[{}, 1]", '{{"a":"{}"}}', "`{}`: no", "{}."):
        assert redact_urls(text.format(address)) == text.format(ADDRESSES[address]), text


@pytest.mark.parametrize("address", PLAIN)
def test_an_address_without_secrets_stays(address: str) -> None:
    assert redact_urls(address) == address == hide_secrets(address) == reveal_secrets(address)


def test_lists_of_addresses() -> None:
    pair = "https://u:s3cret@h/a?part=1&sig=s3cret", "https://u:s3cret@h/b"
    assert redact_urls(",".join(pair)) == "https://h/a?part=1,https://h/b"
    assert redact_urls(str([*pair])) == "['https://h/a?part=1', 'https://h/b']"
    assert redact_urls("','".join(pair)) == "https://h/a?part=1','https://h/b"


def test_long_texts_take_no_time() -> None:
    start = time.process_time()
    for text in ("a" * 300_000, "a://" + "'," * 100_000, "x.y+" * 100_000 + "://", "http://" + ":@" * 50_000):
        redact_urls(text)
    assert time.process_time() - start < 5


def test_secrets_are_kept_for_children_only() -> None:
    given = "https://ann:s3cret@kept/a?sig=s3cret"
    hidden = hide_secrets(given)
    assert hidden == "https://kept/a" and reveal_secrets(hidden) == given
    code = "from flatshift.finetune.redaction import reveal_secrets; print(reveal_secrets('https://kept/a'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == given


def test_a_recipe_never_holds_them(tmp_path: Path) -> None:
    address = f"https://ann:s3cret@h/a.jsonl?{SIGNED}"
    (tmp_path / "own.yaml").write_text(f'extends: classify\ndata: {{train: {{files: ["{address}"]}}}}\n')
    recipes = [
        load_recipe(str(tmp_path / "own.yaml")),
        load_recipe("classify", [from_override("data.train.files", address)]),
        load_recipe("classify", [from_override("data.train.files", f"['{address}', b.jsonl]")]),
        load_recipe("classify", [from_override("data.train.files", (address,), "--data")]),
        load_recipe("classify", [from_mapping({"data.train.files": [address]})]),
    ]
    for recipe in recipes:
        assert recipe.recipe.data.train.files[0] == "https://h/a.jsonl" and "s3cret" not in recipe.to_yaml()
    text = load_recipe("chat", [from_override("task.system", "Read https://h/?key=1 first.")]).recipe.task.system
    assert text == "Read https://h/?key=1 first."


@pytest.mark.parametrize("key", ["prompt", "completion"])
def test_a_template_may_look_like_an_address(key: str, tmp_path: Path) -> None:
    text, address = "https://x.org/?token={text}", "https://ann:s3cret@x.org/?token=s3cret"
    (tmp_path / "own.yaml").write_text(f'task: {{kind: completion, {key}: "{text}"}}\n', encoding="utf-8")
    ways = [
        load_recipe(str(tmp_path / "own.yaml"), [from_override("data.train.files", address)]),
        load_recipe(None, [from_override("task.kind", "completion"), from_override(f"task.{key}", text)]),
        load_recipe(None, [from_mapping({"task": {"kind": "completion", key: text}})]),
    ]
    for resolved in ways:
        assert getattr(resolved.recipe.task, key) == text and "s3cret" not in resolved.to_yaml()
        (tmp_path / "recipe.resolved.yaml").write_text(resolved.to_yaml(), encoding="utf-8")
        assert getattr(resume_recipe(tmp_path).recipe.task, key) == text
        assert getattr(recipe_like(tmp_path).recipe.task, key) == text
    assert ways[0].recipe.data.train.files == ("https://x.org/",)


def test_a_grid_never_holds_them() -> None:
    axes = parse_grid(["data.train.files=https://ann:s3cret@h/a,[https://h/b?sig=s3cret]"])
    assert axes == {"data.train.files": ["https://h/a", "[https://h/b]"]}
    assert reveal_secrets("https://h/b") == "https://h/b?sig=s3cret"


@pytest.mark.parametrize("name", ["select", "train, a key", "sweep --grid", "predict", "push"])
def test_errors_hold_none(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"ftp://ann:s3cret@127.0.0.1:9/a.jsonl?{SIGNED}"
    assert run([word.replace("{}", address) for word in COMMANDS[name]]) == 2
    out, err = capsys.readouterr()
    assert "s3cret" not in out + err and len(err.splitlines()) <= 3
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and b"s3cret" in file.read_bytes()]


def test_stores_that_take_none_in_an_address(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^s3://bucket/a: s3:// takes no user and password in an address; set AWS_"):
        find_objects("s3://AKIA:s3cret@bucket/a")
    with pytest.raises(UserError, match=r"^s3://bucket/a: s3:// takes no user"):
        upload_folder(tmp_path, [], "s3://AKIA:s3cret@bucket/a")


def test_old_directories_are_searched(tmp_path: Path, capsys) -> None:
    (tmp_path / "run").mkdir()
    files = {
        "manifest.json": json.dumps({"inputs": [{"path": f"https://h/a?{SIGNED}"}]}, indent=1),
        "command.txt": "flatshift train --data 'https://ann:s3cret@h/a'\n",
        "report.html": f"<p>fine</p>\n<td>https://h/a?{SIGNED.replace('&', '&amp;')}</td>\n",
        "recipe.resolved.yaml": 'files: ["https://h/a"]\n',
        "selected.jsonl": json.dumps({"text": "rows are data: https://h/a?key=1"}) + "\n",
        "README.md": "see https://ann:s3cret@h/a\n",
    }
    for name, text in files.items():
        (tmp_path / "run" / name).write_text(text)
    places = [f"{file.name}:{line}" for file, line in find_secrets(tmp_path)]
    assert places == ["README.md:1", "command.txt:1", "manifest.json:4", "report.html:2"]
    assert run(["doctor", str(tmp_path / "run")]) == 1
    out = capsys.readouterr().out
    assert all(place in out for place in places) and "s3cret" not in out and "withdraw it" in out
    assert run(["doctor", str(tmp_path / "run"), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["secrets"]) == 4
    for name in ("README.md", "command.txt", "manifest.json", "report.html"):
        (tmp_path / "run" / name).write_text("{}\n")
    assert run(["doctor", str(tmp_path / "run")]) == 0
    assert run(["doctor", str(tmp_path / "absent")]) == 2 and run(["doctor", str(tmp_path), "--deep"]) == 2


ROW = "go to https://shop.example/login?code=123 or https://h/a.jsonl?code=5 &c."


def search(folder: Path, **files: str) -> list[str]:
    """Lines of `find_secrets` in a folder whose command read https://h/in/*.jsonl and https://h/b?part=1&of=2."""
    manifest = {"inputs": [{"path": "https://h/in/a.jsonl"}], "text": "https://shop.example/"}
    files |= {
        "manifest.json": json.dumps(manifest, indent=1),
        "recipe.resolved.yaml": 'files: ["https://h/in/*.jsonl"]\n',
        "command.txt": "flatshift train --data 'https://h/b?part=1&of=2'\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return [f"{file.relative_to(folder).as_posix()}:{line}" for file, line in find_secrets(folder)]


@pytest.mark.parametrize(
    "name",
    [
        *("selected.jsonl", "selection/targets.jsonl", "drops.jsonl", "generations.jsonl", "predictions.jsonl"),
        *("rows/trec-0a/train.jsonl", "rows/trec-0a/validation.jsonl", "rows/trec-0a/test.jsonl", "reference.json"),
        *("chosen-texts/pool.jsonl", "log.txt", "cells/0a/log.txt", "report.html"),
    ],
)
def test_addresses_of_rows_are_data(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(tmp_path / "run", **{name: ROW}) == []
    monkeypatch.chdir(tmp_path / "run")
    assert list(find_secrets(Path())) == []


@pytest.mark.parametrize("name", ["manifest.json", "recipe.resolved.yaml", "command.txt", "notes.jsonl", "README.md"])
def test_any_address_counts_in_other_records(tmp_path: Path, name: str) -> None:
    (tmp_path / "of another command").mkdir()
    (tmp_path / "of another command" / name).write_text(ROW, encoding="utf-8")
    assert search(tmp_path) == [f"of another command/{name}:1"]


@pytest.mark.parametrize("name", ["log.txt", "report.html"])
@pytest.mark.parametrize(
    "address",
    [
        *("https://h/in/a.jsonl?code=5", "https://h/in/b.jsonl?key=1", "https://h/b?part=1&amp;of=2&amp;token=x"),
        *("https://h/b?part=1&token=x&of=2", f"https://h/a?{SIGNED}", f"https://h/a?{SIGNED.replace('&', '&amp;')}"),
        *("https://ann:s3cret@h/a", "s3://AKIA:s3cret@bucket/key", "https://h/a?sv=2024&sig=s3cret%3D"),
        *("https://h/a?X-Goog-Credential=me&X-Goog-Signature=s3cret", "https://h/a?X%2DAmz%2DSignature=s3cret"),
        "https://h/a?Expires=9&Signature=s3cret&Key-Pair-Id=me",
    ],
)
def test_a_log_and_a_page_hold_no_secret_of_an_input_and_none_of_a_store(
    tmp_path: Path, name: str, address: str
) -> None:
    text = f"{ROW}\n<td>{address}</td> {address}\n{ROW}"
    assert search(tmp_path, **{name: text}) == [f"{name}:2"]


def test_a_manifest_quotes_addresses_without_their_secrets() -> None:
    assert _truncate(ROW) == "go to https://shop.example/login or https://h/a.jsonl &c."


@pytest.mark.parametrize("hub", [True, False])
def test_push_refuses_a_folder_that_holds_one(hub: bool, tmp_path: Path, capsys) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "README.md").write_text("made by\n`flatshift train --data https://ann:s3cret@h/a`\n")
    assert run(["push", str(tmp_path), "me/name" if hub else "memory://place/secrets"]) == 2
    err = capsys.readouterr().err
    assert "README.md:2 holds a password or signature" in err and "s3cret" not in err


class _Guarded(SimpleHTTPRequestHandler):
    """Gives files and listings to who sends the password, or the signature of the file."""

    protocol_version = "HTTP/1.1"

    def send_head(self):
        known = {"Basic " + base64.b64encode(b"ann:s3cret").decode(), "Bearer s3cret"}
        query = parse_qs(urlsplit(self.path).query)
        if self.headers.get("Authorization") not in known and query.get("sig") != ["s3cret"]:
            self.send_error(403)
            return None
        return super().send_head()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """Host and port of a server that asks for a password or a signature."""
    pytest.importorskip("aiohttp")
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": f"row of {name}"}) + "\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *words: _Guarded(*words, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_https_with_password_signature_and_headers(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec_config = pytest.importorskip("fsspec.config")
    for given in (f"http://ann:s3cret@{guarded}/a.jsonl", f"http://{guarded}/a.jsonl?sig=s3cret"):
        assert [row.values["text"] for row in read_rows([given])] == ["row of a.jsonl"]
        assert describe_files([given])[0]["path"] == f"http://{guarded}/a.jsonl"
    listed = describe_files([f"http://ann:s3cret@{guarded}/*.jsonl"])
    assert [record["path"] for record in listed] == [f"http://{guarded}/{name}.jsonl" for name in "ab"]
    with pytest.raises(UserError, match=re.escape(f"http://{guarded}/b.jsonl: the store refuses access")) as error:
        list(read_rows([f"http://ann:wr0ng@{guarded}/b.jsonl"]))
    assert "give the address with it again" in str(error.value) and "wr0ng" not in str(error.value)
    for name in [name for name in os.environ if name.startswith("FLATSHIFT_ADDRESS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(fsspec_config.conf, "http", {"headers": {"Authorization": "Bearer s3cret"}})
    assert [row.values["text"] for row in read_rows([f"http://{guarded}/b.jsonl"])] == ["row of b.jsonl"]
