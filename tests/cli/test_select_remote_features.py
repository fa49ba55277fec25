"""`flatshift select` on features that lie in an object store: copied once, compared, gone on with; in memory."""

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
from flatshift.experiments.select import embedding
from flatshift.finetune.data import remote
from flatshift.selection.features import directory, write_manifest

fsspec = pytest.importorskip("fsspec")
STORE = fsspec.filesystem("memory")


@pytest.fixture
def place() -> Iterator[str]:
    name = f"memory:///{uuid.uuid4().hex}"
    yield name
    if STORE.exists(name):
        STORE.rm(name, recursive=True)


@pytest.fixture
def here(tmp_path: Path, place: str) -> Path:
    """Records and their features on disk, three shards with ids, and the same in the store."""
    r = np.random.default_rng(0)
    for name, count in (("pool", 60), ("target", 5)):
        rows = [json.dumps({"id": f"{name}-{i}", "text": f"{name} text {i}"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "features").mkdir()
    for i in range(3):
        np.save(tmp_path / "features" / f"part-{i}.npy", r.standard_normal((20, 8)).astype(np.float32))
        ids = "".join(f"pool-{k}\n" for k in range(20 * i, 20 * i + 20))
        (tmp_path / "features" / f"part-{i}.ids").write_text(ids, encoding="utf-8")
    write_manifest(tmp_path / "features")
    np.save(tmp_path / "target.npy", r.standard_normal((5, 8)))
    for file in (*(tmp_path / "features").iterdir(), tmp_path / "target.npy"):
        STORE.pipe_file(f"{place}/{file.relative_to(tmp_path).as_posix()}", file.read_bytes())
    return tmp_path


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Names of what is copied, in order; each time as another process begins."""
    names: list[str] = []
    copy = embedding._copy_object

    def noted(source: Any, *rest: Any) -> str:
        names.append(source.name)
        return copy(source, *rest)

    monkeypatch.setattr(embedding, "_copy_object", noted)
    return names


def anew() -> None:
    """As another process begins."""
    remote._VERSIONS.clear()
    remote._DIGESTS.clear()
    directory._open_checked.cache_clear()


def select(here: Path, features: object, target: object, out: str, *more: str) -> int:
    files = [
        "--pool",
        str(here / "pool.jsonl"),
        "--data.holdout",
        "0",
        "--target",
        str(here / "target.jsonl"),
        "--budget",
        "7",
    ]
    anew()
    given = ["--pool-features", str(features), "--target-features", str(target)]
    return run(["select", *files, *given, "--out", str(here / out), *more])


def test_the_selection_is_that_of_the_files_on_disk(here: Path, place: str, read: list[str]) -> None:
    cache = ["--select.cache", str(here / "cache")]
    assert select(here, here / "features", here / "target.npy", "local") == 0
    assert select(here, f"{place}/features/", f"{place}/target.npy", "remote", *cache) == 0
    for name in ("scores.parquet", "selected.jsonl"):
        assert (here / "local" / name).read_bytes() == (here / "remote" / name).read_bytes()
    assert sorted(read) == sorted([*(f"part-{i}.{end}" for i in range(3) for end in ("npy", "ids")), "target.npy"])
    told = json.loads((here / "remote" / "manifest.json").read_text(encoding="utf-8"))["features"]
    of_manifest = hashlib.sha256((here / "features" / "manifest.json").read_bytes()).hexdigest()
    assert told["pool"].pop("version")["modified"] and told["target"].pop("version")["modified"]
    size = (here / "features" / "manifest.json").stat().st_size
    assert told["pool"] == {
        **{"path": f"{place}/features", "sha256": of_manifest, "bytes": size, "shards": 3, "rows": 60}
    }
    content = (here / "target.npy").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert told["target"] == {"path": f"{place}/target.npy", "sha256": digest, "bytes": len(content)}
    assert "features" not in json.loads((here / "local" / "manifest.json").read_text(encoding="utf-8"))
    read.clear()
    assert select(here, f"{place}/features", f"{place}/target.npy", "again", *cache) == 0 and not read
    assert not list((here / "cache").rglob("*.part")) and not list((here / "cache").glob(".*"))


def test_a_copy_that_broke_off_goes_on(here: Path, place: str, read: list[str], monkeypatch) -> None:
    cache = ["--select.cache", str(here / "cache")]
    monkeypatch.setattr(remote, "BLOCK", 64)
    monkeypatch.setattr(embedding, "BLOCK", 64)
    part = remote._ObjectReader._read_block
    asked: list[int] = []

    def breaks(self: Any, size: int) -> bytes:
        asked.append(self._at)
        if self._url.endswith("part-1.npy") and self._at >= 320:
            raise ConnectionResetError("gone")
        return part(self, size)

    with monkeypatch.context() as patch:
        patch.setattr(remote._ObjectReader, "_read_block", breaks)
        assert select(here, f"{place}/features", f"{place}/target.npy", "out", *cache) == 2
    assert read == ["part-0.npy", "part-1.npy"] and not (here / "out").exists()
    (left,) = (here / "cache").rglob(".part-1.npy.part")
    assert left.stat().st_size == 320
    read.clear()
    starts: dict[str, int] = {}

    def noted(self: Any, size: int) -> bytes:
        starts.setdefault(self._url.rpartition("/")[2], self._at)
        return part(self, size)

    monkeypatch.setattr(remote._ObjectReader, "_read_block", noted)
    assert select(here, f"{place}/features", f"{place}/target.npy", "out", *cache) == 0
    assert "part-0.npy" not in read and starts["part-1.npy"] == 320 and starts["part-2.npy"] == 0
    assert select(here, here / "features", here / "target.npy", "local") == 0
    assert (here / "local" / "scores.parquet").read_bytes() == (here / "out" / "scores.parquet").read_bytes()


def test_what_cannot_be_used_is_one_sentence(here: Path, place: str, capsys) -> None:
    cache = ["--select.cache", str(here / "cache")]

    def told(features: object, target: object, *more: str) -> str:
        capsys.readouterr()
        assert select(here, features, target, "out", *more) == 2
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flatshift:")]
        assert len(said) == 1 and not (here / "out").exists()
        return said[0]

    shards, target = f"{place}/features", f"{place}/target.npy"
    assert f"--pool-features {shards}: rows are read from a disk again and again; name a place" in told(shards, target)
    assert "--target-features memory://" in told(here / "features", target)
    assert "no such object" in told(f"{place}/feature", target, *cache)
    assert "no such object; did you mean" in told(shards, f"{place}/targets.npy", *cache)
    short = np.ones((4, 8))
    np.save(here / "short.npy", short)
    STORE.pipe_file(f"{place}/short.npy", (here / "short.npy").read_bytes())
    assert f"{place}/short.npy has 4 rows for 5 records" in told(shards, f"{place}/short.npy", *cache)
    STORE.pipe_file(f"{place}/other/manifest.json", (here / "features" / "manifest.json").read_bytes() + b" ")
    STORE.pipe_file(f"{place}/other/part-0.npy", (here / "features" / "part-1.npy").read_bytes())
    assert f"{place}/other/part-0.npy is not what manifest.json says (SHA-256)" in told(
        f"{place}/other", target, *cache
    )
    STORE.pipe_file(f"{place}/odd/manifest.json", b"{}")
    assert "lacks 'format'; seal the directory again" in told(f"{place}/odd", target, *cache)


def test_a_damaged_copy_is_made_again(here: Path, place: str, read: list[str], capsys) -> None:
    cache = ["--select.cache", str(here / "cache")]
    given = (f"{place}/features", f"{place}/target.npy")
    assert select(here, *given, "one", *cache) == 0
    for name in ("part-2.npy", "target.npy"):
        (copy,) = (here / "cache").rglob(name)
        copy.write_bytes(copy.read_bytes()[:-1] + b"x")
    assert select(here, *given, "two", *cache) == 2
    assert "was damaged and is removed" in capsys.readouterr().err
    assert select(here, *given, "two", *cache) == 2
    said = capsys.readouterr().err
    assert "target.npy is no longer the copy of" in said and "delete" in said
    (kept,) = {path.parent for path in (here / "cache").rglob("target.npy")}
    for file in kept.iterdir():
        file.unlink()
    assert select(here, *given, "two", *cache) == 0
    assert (here / "one" / "scores.parquet").read_bytes() == (here / "two" / "scores.parquet").read_bytes()
