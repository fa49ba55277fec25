"""Directories of feature shards: read as one matrix, and every way in which one can be wrong told in a sentence."""

import json
import shutil

import numpy as np
import pytest

from flatshift import cli
from flatshift.selection import SelectionError
from flatshift.selection.features import open_directory, write_manifest

SIZES = (5, 1, 7)


def written(root, *, ids=True, dtype="float16"):
    r = np.random.default_rng(0)
    for number, count in enumerate(SIZES):
        np.save(root / f"part-{number}.npy", r.standard_normal((count, 4)).astype(dtype))
        if ids:
            names = (f"r{sum(SIZES[:number]) + i}\n" for i in range(count))
            (root / f"part-{number}.ids").write_text("".join(names), encoding="utf-8")
    write_manifest(root)
    return root


def test_shards_are_one_matrix(tmp_path):
    found = open_directory(written(tmp_path))
    whole = np.concatenate([np.load(tmp_path / f"part-{number}.npy") for number in range(3)])
    assert found.shape == (13, 4) and found.dtype == np.float16
    assert (np.asarray(found) == whole).all() and (found[3:9] == whole[3:9]).all()
    assert (found[[12, 0, 5]] == whole[[12, 0, 5]]).all()
    assert list(found.ids()) == [f"r{i}" for i in range(13)]
    told = json.loads((tmp_path / "manifest.json").read_text())
    assert (told["format"], told["version"], told["rows"], told["dim"]) == ("flatshift features", 1, 13, 4)


def manifest(root, **changes):
    path = root / "manifest.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | changes))


def of_shard(root, number, **changes):
    shards = json.loads((root / "manifest.json").read_text())["shards"]
    shards[number] |= changes
    manifest(root, shards=shards)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-3])


def flipped(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def twice(root):
    (root / "part-2.ids").write_text("r9\nr3\n" + "".join(f"s{i}\n" for i in range(5)))
    write_manifest(root)


FAULTS = {
    "no manifest": (lambda root: (root / "manifest.json").unlink(), "has no manifest.json"),
    "a missing shard": (lambda root: (root / "part-1.npy").unlink(), "part-1.npy does not exist"),
    "a shard cut off": (lambda root: cut_off(root / "part-2.npy"), "part-2.npy is not a readable .npy file"),
    "another value": (lambda root: flipped(root / "part-2.npy"), r"part-2.npy is not what manifest.json says"),
    "another dim": (
        lambda root: np.save(root / "part-1.npy", np.zeros((1, 5), "float16")),
        "part-1.npy has columns 5, and manifest.json says 4",
    ),
    "another dtype": (
        lambda root: np.save(root / "part-1.npy", np.zeros((1, 4), "float32")),
        "part-1.npy has dtype float32, and manifest.json says float16",
    ),
    "rows that lie": (lambda root: of_shard(root, 0, rows=6), "part-0.npy has rows 5, and manifest.json says 6"),
    "a sum that lies": (lambda root: manifest(root, rows=12), "says 12 rows, its shards 13"),
    "another version": (lambda root: manifest(root, version=2), "its version is 2, and this Flatshift reads 1"),
    "another format": (lambda root: manifest(root, format="x"), "its format is 'x'"),
    "no digest": (lambda root: of_shard(root, 0, sha256=None), "files and digests must be texts"),
    "a file elsewhere": (lambda root: of_shard(root, 0, file="../part-0.npy"), "must be different .npy files"),
    "no text": (lambda root: (root / "manifest.json").write_bytes(b"\xff{"), "cannot be used"),
    "lost ids": (lambda root: (root / "part-0.ids").unlink(), "part-0.ids does not exist"),
    "changed ids": (lambda root: (root / "part-0.ids").write_text("a\n"), "part-0.ids is not what manifest.json says"),
    "an id twice": (twice, "the id 'r3' comes twice"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_directory_that_lies_is_refused_in_one_sentence(tmp_path, name):
    break_it, told = FAULTS[name]
    break_it(written(tmp_path))
    with pytest.raises(SelectionError, match=told) as error:
        open_directory(tmp_path, "--pool-features")
    assert len(str(error.value).splitlines()) == 1


def test_what_cannot_be_sealed(tmp_path):
    with pytest.raises(SelectionError, match=r"holds no \.npy files"):
        write_manifest(tmp_path)
    written(tmp_path)
    np.save(tmp_path / "part-1.npy", np.zeros((1, 4), "float64"))
    with pytest.raises(SelectionError, match=r"part-1\.npy: 4 columns of float64, and part-0\.npy has 4 of float16"):
        write_manifest(tmp_path)
    (tmp_path / "part-1.ids").unlink()
    with pytest.raises(SelectionError, match=r"part-1.npy has no \.ids file"):
        write_manifest(tmp_path)
    (tmp_path / "part-1.ids").write_text("a\nb\n")
    with pytest.raises(SelectionError, match="has 2 ids for 1 rows"):
        write_manifest(tmp_path)
    for dtype in ("int8", ">f4"):
        np.save(tmp_path / "part-0.npy", np.zeros((1, 4), dtype))
        with pytest.raises(SelectionError, match=r"part-0\.npy: rows of .* are not read; write it as float32"):
            write_manifest(tmp_path)


def test_select_reads_it_as_it_reads_one_file(tmp_path, capsys):
    r = np.random.default_rng(1)
    x, y = r.standard_normal((60, 4)).astype("float32"), r.standard_normal((8, 4))
    for name, count in (("pool", 60), ("target", 8)):
        rows = (json.dumps({"id": f"{name}{i}", "text": f"{name} text {i}"}) for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    shards = tmp_path / "shards"
    shards.mkdir()
    for number, low in enumerate(range(0, 60, 25)):
        np.save(shards / f"{number:03}.npy", x[low : low + 25])
        names = "".join(f"pool{i}\n" for i in range(low, min(low + 25, 60)))
        (shards / f"{number:03}.ids").write_text(names)
    write_manifest(shards)

    def run(features, out):
        sides = [
            "--pool",
            str(tmp_path / "pool.jsonl"),
            "--data.holdout",
            "0",
            "--target",
            str(tmp_path / "target.jsonl"),
        ]
        own = ["--pool-features", str(features), "--target-features", str(tmp_path / "y.npy")]
        return cli.run(["select", *sides, *own, "--budget", "9", "--out", str(tmp_path / out)])

    assert run(tmp_path / "x.npy", "one") == 0 and run(shards, "many") == 0
    for name in ("scores.parquet", "selected.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    capsys.readouterr()
    shutil.copytree(shards, tmp_path / "other")
    names = (shards / "001.ids").read_text().splitlines()
    (tmp_path / "other" / "001.ids").write_text("\n".join([names[1], names[0], *names[2:]]) + "\n")
    write_manifest(tmp_path / "other")
    assert run(tmp_path / "other", "wrong") == 2
    assert "row 25 of" in (said := capsys.readouterr().err) and "'pool26'" in said and "'pool25'" in said
    pool = (tmp_path / "pool.jsonl").read_text()
    (tmp_path / "pool.jsonl").write_text(pool.replace('"pool25"', '"pool25#1"'))
    assert run(shards, "wrong") == 2 and "'pool25#1'" in capsys.readouterr().err
