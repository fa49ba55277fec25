"""Folders that are pushed to an object store: what goes, in which order, and what is refused. Objects in memory."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatshift.cli import run
from flatshift.finetune.data import remote as uploads
from flatshift.finetune.data.remote import UPLOAD_RECORD, upload_folder
from flatshift.finetune.digests import DONE, FILES, file_digests
from flatshift.finetune.errors import UserError
from flatshift.selection.features import directory, write_manifest

fsspec = pytest.importorskip("fsspec")
STORE = fsspec.filesystem("memory")


@pytest.fixture
def place() -> Iterator[str]:
    """An empty place in memory."""
    name = f"memory:///{uuid.uuid4().hex}"
    yield name
    if STORE.exists(name):
        STORE.rm(name, recursive=True)


def there(place: str) -> dict[str, bytes]:
    path = STORE._strip_protocol(place)
    return {name.removeprefix(f"{path}/"): STORE.cat_file(name) for name in STORE.find(path)}


def here(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """As a run leaves it, and some of what it does not hand on."""
    folder = tmp_path / "run"
    files = {
        "recipe.resolved.yaml": "train: {}\n",
        "manifest.json": '{"inputs": []}',
        "log.txt": "said\n",
        "adapter/adapter_config.json": "{}",
        "adapter/adapter_model.safetensors": "x" * 5000,
        "stages/fine-tune/metrics.jsonl": "{}\n",
        "state/step-2/state.json": "{}",
        ".lock": "flatshift 1 here\n",
        "stages/.fine-tune.12345678.tmp": "torn",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for part in (folder / "stages" / "fine-tune", folder):
        noted = [
            file for file in part.rglob("*") if file.is_file() and "state" not in file.parts and file.name[0] != "."
        ]
        (part / DONE).write_text(json.dumps({FILES: file_digests(part, noted)}), encoding="utf-8")
    return folder


LEFT_OUT = {"state/step-2/state.json", ".lock", "stages/.fine-tune.12345678.tmp"}


@pytest.fixture
def sent(monkeypatch) -> list[str]:
    """Names of what is put, in order."""
    names: list[str] = []
    put = uploads._StoreLocation.put

    def noted(self: Any, file: Path, name: str) -> None:
        names.append(name)
        put(self, file, name)

    monkeypatch.setattr(uploads._StoreLocation, "put", noted)
    return names


def test_a_run_goes_whole_and_what_says_finished_last(finished: Path, place: str, sent: list[str], capsys) -> None:
    assert run(["push", str(finished), f"{place}/"]) == 0
    told = capsys.readouterr().out
    expected = {name: content for name, content in here(finished).items() if name not in LEFT_OUT}
    found = there(place)
    record = json.loads(found.pop(UPLOAD_RECORD))
    assert found == expected and f"{len(expected)} files sent" in told
    assert record["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in expected.items()
    }
    last = ["stages/fine-tune/done.json", "adapter/adapter_config.json", "manifest.json", "done.json"]
    assert sorted(sent[-4:]) == sorted(last) and sent[-2:] == last[-2:]


def test_what_submitit_left_of_a_study_stays(finished: Path, place: str, capsys) -> None:
    expected = {*here(finished), "cells/a.json", UPLOAD_RECORD} - LEFT_OUT
    for name in ("cells/a.json", "slurm/7_0_result.pkl", "slurm/7_0_log.out"):
        (finished / name).parent.mkdir(exist_ok=True)
        (finished / name).write_text("x", encoding="utf-8")
    assert run(["push", str(finished), place]) == 0
    assert there(place).keys() == expected


def test_an_upload_that_broke_off_goes_on(finished: Path, place: str, sent: list[str], monkeypatch, capsys) -> None:
    put = uploads._StoreLocation.put

    def breaks(self: Any, file: Path, name: str) -> None:
        if name == "manifest.json":
            raise UserError("gone")
        put(self, file, name)

    with monkeypatch.context() as patch:
        patch.setattr(uploads._StoreLocation, "put", breaks)
        assert run(["push", str(finished), place]) == 2
    assert DONE not in there(place) and "log.txt" in there(place)
    torn = f"{place}/log.txt"
    STORE.pipe_file(torn, b"sa")  # as a store may leave it that has no whole writes
    real = STORE.find

    def telling(path: str, **how: Any) -> Any:
        """A store that says MD5s."""
        found = real(path, **how)
        return {
            name: about | {"ETag": f'"{hashlib.md5(STORE.cat_file(name)).hexdigest()}"'}
            for name, about in found.items()
        }

    monkeypatch.setattr(type(STORE), "find", lambda self, path, **how: telling(path, **how))
    sent.clear()
    assert run(["push", str(finished), place]) == 0
    assert sent == ["log.txt", "manifest.json", "done.json"]
    sent.clear()
    assert run(["push", str(finished), place]) == 0 and not sent
    assert "0 files sent, 0 bytes, 8 lay there" in capsys.readouterr().out


def test_what_a_store_tells_no_digest_of_is_sent_again(finished: Path, place: str, sent: list[str]) -> None:
    assert run(["push", str(finished), place]) == 0
    first = list(sent)
    assert run(["push", str(finished), place]) == 0 and sent == first * 2


def test_another_content_at_the_place_is_refused(finished: Path, place: str, capsys) -> None:
    assert run(["push", str(finished), place]) == 0
    before = there(place)
    capsys.readouterr()
    (finished / "log.txt").write_text("other", encoding="utf-8")
    (finished / DONE).write_text(json.dumps({FILES: {}}), encoding="utf-8")
    STORE.pipe_file(f"{place}x/other.txt", b"somebody's")
    STORE.pipe_file(f"{place}y/{UPLOAD_RECORD}", b"[]")
    for target, told in {
        place: "is the place of another upload (done.json differs); name another place",
        f"{place}x": "holds other.txt, which no upload left; name a place that is empty",
        f"{place}x/other.txt": "is an object; name a place that can hold a folder",
        f"{place}y": "is no record of an upload",
        "https://host/place": "https:// takes no uploads",
        "hf://org/name": "a hub is named ORGANISATION/NAME here",
        "cloud://x/y": "is no kind of store",
    }.items():
        assert run(["push", str(finished), target]) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1, said
    assert there(place) == before
    for suffix in "xy":
        STORE.rm(f"{place}{suffix}", recursive=True)


def test_a_stranger_beside_the_upload_is_refused(finished: Path, place: str, capsys) -> None:
    (finished / "README.md").write_bytes(b"f\xfcr alle, in Latin-1")
    assert run(["push", str(finished), place]) == 0
    STORE.pipe_file(f"{place}/adapter/more.bin", b"x")
    assert run(["push", str(finished), place]) == 2
    assert "also holds adapter/more.bin, which is not of this folder" in capsys.readouterr().err


def test_only_finished_folders_of_ours_go(finished: Path, tmp_path: Path, place: str, capsys) -> None:
    (tmp_path / "shards").mkdir()
    np.save(tmp_path / "shards" / "a.npy", np.ones((3, 2)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "recipe.resolved.yaml").write_text("", encoding="utf-8")
    asked = {
        "nowhere": "no such folder",
        "shards": "has shards and no manifest.json",
        "mine": "is no run, selection, sweep, directory of feature shards or export",
        "unfinished": "is not finished, it has no done.json",
    }
    for name, told in asked.items():
        assert run(["push", str(tmp_path / name), place]) == 2
        assert told in capsys.readouterr().err
    for flag in (["--public"], ["--message", "x"]):
        assert run(["push", str(finished), place, *flag]) == 2
        assert f"{flag[0]} is of a hub" in capsys.readouterr().err
    (finished / "stages" / "link").symlink_to(tmp_path / "mine" / "thesis.txt")
    assert run(["push", str(finished), place]) == 2
    assert "is a link or no plain file" in capsys.readouterr().err
    (finished / "stages" / "link").unlink()
    (finished / "log.txt").write_text("changed", encoding="utf-8")
    assert run(["push", str(finished), place]) == 2
    assert "log.txt is not what was saved" in capsys.readouterr().err
    assert not there(place)


def test_feature_shards_go_with_their_manifest_last(tmp_path: Path, place: str, sent: list[str], capsys) -> None:
    folder = tmp_path / "features"
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"part-{i}.npy", np.full((4, 2), i, dtype=np.float32))
    write_manifest(folder)
    assert run(["push", str(folder), place]) == 0
    assert sent[-1] == "manifest.json" and there(place).keys() == {*here(folder), UPLOAD_RECORD}
    np.save(folder / "part-1.npy", np.zeros((4, 2), dtype=np.float32))
    directory._open_checked.cache_clear()  # as another process begins
    assert run(["push", str(folder), f"{place}/again"]) == 2
    assert "part-1.npy is not what manifest.json says" in capsys.readouterr().err


def test_what_came_to_lie_there_otherwise_is_told(tmp_path: Path, place: str, monkeypatch) -> None:
    (tmp_path / "a").write_bytes(b"some words")
    put = uploads._StoreLocation.put

    def loses(self: Any, file: Path, name: str) -> None:
        put(self, file, name)
        STORE.pipe_file(f"{self.path}/{name}", b"same words")

    monkeypatch.setattr(uploads._StoreLocation, "put", loses)
    with pytest.raises(UserError, match="/a differs there from the file here; push it again"):
        upload_folder(tmp_path, [["a"]], place)


def test_marks_of_stores_are_known_where_they_are_digests(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(uploads, "_PART", 4)
    (tmp_path / "a").write_bytes(b"some words")
    one = uploads._digest_file(tmp_path / "a")
    whole = hashlib.md5(b"some words")
    parts = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in (b"some", b" wor", b"ds"))).hexdigest()
    assert uploads._has_same_content({"size": 10, "ETag": f'"{whole.hexdigest()}"'}, one)
    assert uploads._has_same_content({"size": 10, "ETag": f'"{parts}-3"'}, one)
    assert uploads._has_same_content({"size": 10, "content_md5": bytearray(whole.digest())}, one)
    assert not uploads._has_same_content({"size": 9, "ETag": whole.hexdigest()}, one)
    assert not uploads._has_same_content({"size": 10}, one) and not uploads._has_same_content(
        {"size": 10, "ETag": "0x8DD"}, one
    )
