"""Commands whose inputs lie in a store do what they do with the same files on disk: an S3 server on localhost, and
stand-ins of the clients of gs:// and az:// in memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flatshift.cli import run
from flatshift.finetune.data import remote
from flatshift.selection.features import write_manifest
from tests.support.commands import flags

pytest.importorskip("fsspec")
from tests.support.object_store import (
    ObjectStore,
    Put,
    bucket,
    forget_clients,
    memory_bucket,
    object_store,
)

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
ROWS = [{"text": " ".join(WORDS[(i + k * (i % 3)) % 8] for k in range(8)), "label": "ab"[i % 2]} for i in range(60)]
SMALL = {
    **{"train.steps": 2, "train.batch_size": 4, "train.max_length": 32, "train.save_every": 2, "train.threads": 1},
    **{"train.precision": "fp32", "train.eval_every": 2, "data.holdout": 0.4, "eval.bootstrap": 20},
}


def packed(rows: list[dict]) -> bytes:
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0)


EVAL = [{"text": ROWS[10]["text"]}]
FILES = {"train.jsonl.gz": packed(ROWS), "target.jsonl.gz": packed(ROWS[:6]), "eval.jsonl.gz": packed(EVAL)} | {
    f"pool/{i}.jsonl.gz": packed(ROWS[i::3]) for i in range(3)
}


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture(params=["s3", "gs", "az", "abfs"])
def lake(request, monkeypatch) -> Iterator[Put]:
    """A bucket of its own."""
    if request.param != "s3":
        yield from memory_bucket(request.param, monkeypatch)
        return
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    yield from bucket(request.getfixturevalue("server"), monkeypatch)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The same files on disk."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def train(place: object, out: Path) -> int:
    words = flags(SMALL)
    files = ["--data.train.files", f"{place}/train.jsonl.gz", "--data.dev.files", "[]", "--data.test.files", "[]"]
    return run(["train", "classify", *files, *words, "--out", str(out)])


def inputs(directory: Path) -> list[dict]:
    return json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["inputs"]


def adapter(directory: Path) -> bytes:
    return (directory / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("lake", ["s3", "gs", "az"], indirect=True)
def test_a_run_is_that_of_the_same_file_on_disk_and_goes_on(lake, here: Path, capsys) -> None:
    place = lake(FILES)
    assert train(here, here / "local") == train(place, here / "remote") == 0
    (local,), (told,) = inputs(here / "local"), inputs(here / "remote")
    assert told["path"] == f"{place}/train.jsonl.gz" and told["version"]["etag"]
    assert all(told[key] == local[key] for key in ("sha256", "bytes", "rows"))
    assert adapter(here / "local") == adapter(here / "remote")
    for out in ("local", "remote"):
        assert run(["train", "--resume", str(here / out), "--train.steps", "4"]) == 0
        assert '"step": 4' in (here / out / "metrics.jsonl").read_text(encoding="utf-8")
    assert adapter(here / "local") == adapter(here / "remote")
    assert run(["predict", str(here / "remote"), "--data", f"{place}/pool/", "--out", str(here / "said.jsonl")]) == 0
    assert len((here / "said.jsonl").read_text(encoding="utf-8").splitlines()) == len(ROWS)
    lake({"train.jsonl.gz": FILES["target.jsonl.gz"]})
    remote._VERSIONS.clear()  # as another process begins
    remote._DIGESTS.clear()
    capsys.readouterr()
    assert run(["train", "--resume", str(here / "remote"), "--train.steps", "6"]) == 2
    assert f"{place}/train.jsonl.gz changed since the run began" in capsys.readouterr().err


def test_a_selection_from_a_pattern_is_that_of_the_same_shards_on_disk(lake, here: Path) -> None:
    place = lake(FILES)
    for start, out in ((here, "local"), (place, "remote")):
        files = ["--pool", f"{start}/pool/*.jsonl.gz", "--data.holdout", "0", "--target", f"{start}/target.jsonl.gz"]
        files += ["--select.hygiene.exact", "true", "--select.eval.files", f"{start}/eval.jsonl.gz"]
        assert run(["select", *files, "--budget", "10", "--out", str(here / out)]) == 0
    for name in ("selected.jsonl", "scores.parquet", "drops.jsonl"):
        assert (here / "local" / name).read_bytes() == (here / "remote" / name).read_bytes()
    drops = (here / "remote" / "drops.jsonl").read_text(encoding="utf-8")
    assert '"match_in":"pool"' in drops.replace(" ", "") and '"match_in":"eval"' in drops.replace(" ", "")
    assert [line["path"] for line in inputs(here / "remote")[:3]] == [f"{place}/pool/{i}.jsonl.gz" for i in range(3)]
    assert all(line["version"]["etag"] for line in inputs(here / "remote"))


def test_what_a_store_refuses_ends_a_command_with_one_sentence(lake, here: Path, capsys, monkeypatch) -> None:
    place = lake(FILES)
    asked = {
        f"{place}/pol/0.jsonl.gz": "no such object; check the name",
        f"{place}x/pool/0.jsonl.gz": "no such bucket" if place.startswith("s3") else "no such object",
        f"{place}/pool/*.csv": "no object matches this pattern",
    }
    for pool, told in asked.items():
        words = [
            "select",
            "--pool",
            pool,
            "--data.holdout",
            "0",
            "--target",
            f"{place}/target.jsonl.gz",
            "--budget",
            "3",
        ]
        assert run([*words, "--out", str(here / "out")]) == 2
        said = capsys.readouterr().err
        assert said.startswith("flatshift: error: ") and told in said and said.count("\n") == 1
        assert not (here / "out").exists()


def test_a_selection_is_pushed_compared_and_not_sent_twice(lake, here: Path, capsys, monkeypatch) -> None:
    place = lake({"other/there.txt": b"x"})
    files = ["--pool", f"{here}/pool/*.jsonl.gz", "--data.holdout", "0", "--target", f"{here}/target.jsonl.gz"]
    assert run(["select", *files, "--budget", "10", "--out", str(here / "chosen")]) == 0
    scheme = place.partition("://")[0]
    (here / "chosen" / "plots" / "large.bin").write_bytes(bytes(range(256)) * (11 << 12))  # 11 MiB: in parts
    monkeypatch.setattr(remote, "_PART", 5 << 20)
    read: list[str] = []
    digest = remote._StoreLocation.digest
    monkeypatch.setattr(remote._StoreLocation, "digest", lambda self, name: read.append(name) or digest(self, name))
    assert run(["push", str(here / "chosen"), f"{place}/selections/first"]) == 0
    client = remote.open_store(place)[0]
    there = {name.partition("/selections/first/")[2] for name in client.find(f"{place}/selections/first")}
    made = {file.relative_to(here / "chosen").as_posix() for file in (here / "chosen").rglob("*") if file.is_file()}
    assert there == made | {remote.UPLOAD_RECORD}
    if scheme == "s3":  # etags of whole objects and of those in parts are known
        assert client.info(f"{place}/selections/first/plots/large.bin")["ETag"].strip('"').endswith("-3")
    assert set(read) == (made if scheme in ("az", "abfs") else set())
    for name in made:
        assert client.cat_file(f"{place}/selections/first/{name}") == (here / "chosen" / name).read_bytes()
    client.rm(f"{place}/selections/first/done.json")
    capsys.readouterr()
    assert run(["push", str(here / "chosen"), f"{place}/selections/first"]) == 0
    sent = ["done.json"] if scheme in ("s3", "gs") else made  # the others report no digest
    size = sum((here / "chosen" / name).stat().st_size for name in sent)
    assert f": {len(sent)} files sent, {size:,} bytes" in capsys.readouterr().out


def test_what_a_store_refuses_of_an_upload_is_one_sentence(lake, here: Path, capsys, monkeypatch) -> None:
    place = lake({"other/there.txt": b"x"})
    (here / "features").mkdir()
    np.save(here / "features" / "a.npy", np.ones((3, 2), dtype=np.float32))
    write_manifest(here / "features")

    def told(target: str) -> str:
        assert run(["push", str(here / "features"), target]) == 2
        said = capsys.readouterr().err
        assert said.startswith("flatshift: error: ") and said.count("\n") == 1, said
        return said

    if place.startswith("s3"):
        assert "no such bucket" in told(f"{place}-x/first")
    assert "holds there.txt, which no upload left" in told(f"{place}/other")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(remote.open_store(place)[0], "pipe_file", denied)
        assert "the store refuses access (Access Denied); check the credentials and what they may read and write" in (
            told(f"{place}/mine")
        )
    if not place.startswith("s3"):
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    forget_clients()
    assert "no credentials for s3:// " in told(f"{place}/mine")


def test_features_that_were_pushed_are_selected_by(lake, here: Path) -> None:
    place = lake({"other/there.txt": b"x"})
    random = np.random.default_rng(0)
    (here / "features").mkdir()
    for i in range(3):
        np.save(here / "features" / f"part-{i}.npy", random.standard_normal((20, 8)).astype(np.float32))
    write_manifest(here / "features")
    np.save(here / "target.npy", random.standard_normal((6, 8)))
    assert run(["push", str(here / "features"), f"{place}/features"]) == 0
    lake({"target.npy": (here / "target.npy").read_bytes()})
    cache = ["--select.cache", str(here / "cache")]
    for start, out, more in ((here, "local", []), (place, "remote", cache)):
        files = [
            "--pool",
            f"{here}/pool/*.jsonl.gz",
            "--data.holdout",
            "0",
            "--target",
            f"{here}/target.jsonl.gz",
            "--budget",
            "10",
        ]
        given = ["--pool-features", f"{start}/features", "--target-features", f"{start}/target.npy"]
        assert run(["select", *files, *given, "--out", str(here / out), *more]) == 0
    for name in ("selected.jsonl", "scores.parquet"):
        assert (here / "local" / name).read_bytes() == (here / "remote" / name).read_bytes()
    told = json.loads((here / "remote" / "manifest.json").read_text(encoding="utf-8"))["features"]
    assert all(told[side]["version"]["etag"] for side in ("pool", "target"))


def test_a_pool_of_a_store_is_selected_from_by_shards_and_a_changed_object_is_named(
    lake, here: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    pytest.importorskip("datatrove")
    place = lake(FILES)

    def select(out: str, pool: object, *more: str) -> int:
        words = ["--pool", f"{pool}/pool/*.jsonl.gz", "--target", str(here / "target.jsonl.gz"), "--budget", "5"]
        return run(["select", *words, "--data.holdout", "0", "--method", "dsir", "--out", str(tmp_path / out), *more])

    with monkeypatch.context() as patch:
        patch.setattr("flatshift.selection.methods.dsir._sum_gains", interrupt)
        assert select("shards", place, "--on", "local:1") == 3
    lake({"pool/1.jsonl.gz": packed(ROWS[1:20])})
    forget_versions()
    capsys.readouterr()
    assert select("shards", place, "--on", "local:1") == 2
    assert f"{place}/pool/1.jsonl.gz has changed since the unfinished selection read it" in capsys.readouterr().err
    lake({"pool/1.jsonl.gz": FILES["pool/1.jsonl.gz"]})
    forget_versions()
    assert select("again", place, "--on", "local:1") == 0
    assert select("disk", here) == 0
    chosen = [(tmp_path / out / "selected.jsonl").read_bytes() for out in ("again", "disk")]
    assert chosen[0] == chosen[1]


def interrupt(shard: object) -> None:
    raise KeyboardInterrupt


def forget_versions() -> None:
    """Forget the versions that this process has seen, as another process would."""
    remote._VERSIONS.clear()
    forget_clients()
