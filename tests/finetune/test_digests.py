"""What a finished run holds is compared with what it saved before it is read; damage is refused by the file's name."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.faults.tamper import READERS, Matrix
from flatshift.cli import run
from flatshift.finetune.adapters.adapter import WEIGHTS, read_adapter
from flatshift.finetune.atomic import atomic_directory, write_text
from flatshift.finetune.digests import (
    DONE,
    check_files,
    copy_recorded_files,
    file_digests,
    file_sha256,
    verify_sealed,
)
from flatshift.finetune.errors import UserError
from flatshift.finetune.models import fingerprint as fingerprints
from flatshift.finetune.models.fingerprint import fingerprint
from tests.support.finetune_models import save_backbone
from tests.support.run_records import record_anew

pytestmark = pytest.mark.usefixtures("warm_checks")


def here(argv: Sequence[str], said: Path) -> int:
    """A runner of commands in this process."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = run(list(argv))
    said.write_text(text.getvalue(), encoding="utf-8")
    return code


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix("train", tmp_path_factory.mktemp("tamper"), here)


ADAPTER = f"adapter/{WEIGHTS}"
CASES = [
    ("eval", ADAPTER, "flipped"),
    ("eval", "adapter/adapter_config.json", "missing"),
    ("eval", "manifest.json", "empty"),
    ("export", ADAPTER, "another run's"),
    ("export", DONE, "missing"),
    ("merge", DONE, "missing"),
    ("export", "adapter/adapter_config.json", "flipped"),
    ("merge", ADAPTER, "truncated"),
    ("report", "eval.json", "another run's"),
    ("report", "metrics.jsonl", "truncated"),
    ("resume", ADAPTER, "flipped"),
    ("resume", "recipe.resolved.yaml", "another run's"),
    ("resume for longer", "stages/fine-tune/done.json", "flipped"),
    ("sharpness", ADAPTER, "flipped"),
    ("adapter.start", ADAPTER, "flipped"),
    ("adapter.start", "manifest.json", "flipped"),
    ("merge", "stages/fine-tune/done.json", "another run's"),
    ("export", "stages/fine-tune/done.json", "another run's"),
    ("resume", f"stages/fine-tune/{ADAPTER}", "truncated"),
    ("resume for longer", "state/step-2/state.json", "missing"),
    ("resume for longer", "state/step-2/state.safetensors", "empty"),
]


@pytest.mark.parametrize(("reader", "file", "damage"), CASES)
def test_damage_is_refused_by_name(matrix: Matrix, reader: str, file: str, damage: str) -> None:
    found = next(one for one in READERS["train of three stages"] if one.name == reader)
    matrix.wanted.setdefault(reader, {})
    judged = matrix.judge(file, damage, found)
    assert not judged.wrong
    assert judged.refused, judged


def test_a_page_that_is_cut_is_drawn_anew(matrix: Matrix) -> None:
    found = next(one for one in READERS["train of three stages"] if one.name == "resume")
    judged = matrix.judge("report.html", "truncated", found)
    assert not judged.wrong and not judged.refused, judged


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", READERS)
def test_every_damage_of_every_file(scenario: str, tmp_path: Path) -> None:
    matrix = Matrix(scenario, tmp_path, here)
    found = [matrix.judge(*trial) for trial in matrix.trials(READERS[scenario])]
    missing = {one.file for one in found if one.damage == "missing"}
    this = matrix.runs["this"]
    assert missing == {str(file.relative_to(this)) for file in this.glob(matrix.damaged) if file.is_file()} and missing
    assert not [one for one in found if one.wrong]


def test_a_run_without_its_record_is_judged_with_a_word_and_completed_by_resume(matrix: Matrix, tmp_path: Path) -> None:
    run_, said = tmp_path / "run", tmp_path / "said"
    shutil.copytree(matrix.runs["this"], run_)
    assert here(["eval", str(run_), "--json"], said) == 0
    figures = said.read_text()
    (run_ / DONE).unlink()
    assert here(["eval", str(run_), "--json"], said) == 0
    notice, rest = said.read_text().split("\n", 1)
    assert notice.startswith(f"{run_} has no {DONE}: it is unfinished or that file was removed") and rest == figures
    other = tmp_path / "other"
    assert here(["export", str(matrix.runs["this"]), "--out", str(other), "--add", str(run_)], said) == 2
    assert f"--add: {run_} is not finished, it has no {DONE}" in said.read_text() and not other.exists()
    shutil.copyfile(matrix.runs["other"] / ADAPTER, run_ / ADAPTER)  # nothing tells, and nothing is taken from it
    assert here(["train", "--resume", str(run_)], said) == 0
    assert (run_ / ADAPTER).read_bytes() == (matrix.runs["this"] / ADAPTER).read_bytes()
    check_files(run_)


def test_an_adapter_that_is_not_finite_is_refused_by_name(matrix: Matrix, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(matrix.runs["this"] / "adapter", folder)
    tensors = load_file(folder / WEIGHTS)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match=rf"{WEIGHTS}: .* NaN or infinite"):
        read_adapter(folder)


def test_no_pickle_is_read_or_shipped(matrix: Matrix, tmp_path: Path) -> None:
    run_, said = tmp_path / "run", tmp_path / "said"
    shutil.copytree(matrix.runs["this"], run_)
    (run_ / "adapter" / "optimizer.pt").write_bytes(b"\x80\x04.")
    record_anew(run_)
    assert here(["export", str(run_), "--out", str(tmp_path / "out")], said) == 0
    assert {file.suffix for file in (tmp_path / "out").iterdir()} <= {".json", ".md", ".safetensors", ".jinja", ".txt"}
    (run_ / ADAPTER).rename(run_ / "adapter" / "adapter_model.bin")
    record_anew(run_)
    assert here(["export", str(run_), "--out", str(tmp_path / "more")], said) == 2
    assert "adapter_model.bin may be a pickle" in said.read_text()
    assert not (tmp_path / "more").exists()


def test_a_report_replaces_nothing_but_a_report(matrix: Matrix, tmp_path: Path) -> None:
    run_, said = str(matrix.runs["this"]), tmp_path / "said"
    page, mine = tmp_path / "page.html", tmp_path / "mine.html"
    assert here(["report", run_, "--out", str(page)], said) == 0
    assert here(["report", run_, "--out", str(page)], said) == 0
    mine.write_text("<html>my thesis</html>")
    assert here(["report", run_, "--out", str(mine)], said) == 2
    assert "mine.html is no report of ours" in said.read_text()
    assert mine.read_text() == "<html>my thesis</html>"
    (tmp_path / "link.html").symlink_to(page)
    os.mkfifo(tmp_path / "pipe.html")
    for name, what in (("link.html", "a link"), ("pipe.html", "a special file")):
        assert here(["report", run_, "--out", str(tmp_path / name)], said) == 2
        assert f"{name} is {what}" in said.read_text()
    assert (tmp_path / "link.html").is_symlink()


def test_no_writer_replaces_what_is_no_plain_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    for name, what in (("folder", "a directory"), ("nowhere", "a link"), ("pipe", "a special file")):
        with pytest.raises(UserError, match=f"{name} is {what} and is not replaced"):
            write_text(tmp_path / name, "text")
    write_text(tmp_path / "plain", "text")
    write_text(tmp_path / "plain", "more")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "nowhere", "pipe", "plain"]


def test_no_writer_replaces_what_is_no_plain_directory(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "kept").touch()
    (tmp_path / "link").symlink_to(tmp_path / "others")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(path.name for path in tmp_path.iterdir())
    for name, what in (("link", "a link"), ("nowhere", "a link"), ("file", "a file"), ("pipe", "a special file")):
        with (
            pytest.raises(UserError, match=f"{name} is {what} and is not replaced; name a directory"),
            atomic_directory(tmp_path / name) as made,
        ):
            (made / "new").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "others" / "kept").is_file()


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("1")
    check_files(tmp_path)  # nothing noted
    (tmp_path / DONE).write_text(json.dumps({"files": file_digests(tmp_path, [tmp_path / "kept"])}))
    check_files(tmp_path)
    for text in ("", "[]", "{}", '{"files": []}', '{"files": {"kept": 1}}'):
        (tmp_path / DONE).write_text(text)
        with pytest.raises(UserError, match=DONE):
            check_files(tmp_path)


# ---------------------------------------------------------------------------------------------- the whole backbone


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backbone whose files are old enough to be remembered."""
    monkeypatch.setenv("FLATSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "_known", {})
    monkeypatch.setattr(fingerprints, "_YOUNG_NS", -(10**12))
    return save_backbone("llama", tmp_path / "source", vocab_size=64)


def test_every_byte_of_the_weights_counts(weights: Path) -> None:
    before = fingerprint(weights)
    file = weights / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5000 - 100] ^= 1  # neither at the beginning nor in the middle of a tensor
    seen = file.stat()
    file.write_bytes(bytes(data))
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # a restored mtime hides nothing: the time of change counts
    assert fingerprint(weights) != before


def test_weights_are_read_once_and_a_torn_memory_is_nothing(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    plain = fingerprints._tensor_digest
    monkeypatch.setattr(fingerprints, "_tensor_digest", lambda entry: read.append("") or plain(entry))
    before = fingerprint(weights)
    first = len(read)
    assert first
    assert fingerprint(weights) == before
    fingerprints._known.clear()
    assert fingerprint(weights) == before
    assert len(read) == first, "another process takes what is remembered"
    (memory,) = (weights.parent / "cache").glob("weights-*.json")
    whole = memory.read_text()
    wrong = json.loads(whole)
    wrong["tensors"] = dict.fromkeys(wrong["tensors"], "0" * 64)
    for text in ("", whole[:-40], "[]", json.dumps(wrong)):
        memory.write_text(text)
        fingerprints._known.clear()
        assert fingerprint(weights) == before
    assert len(read) == 5 * first
    shutil.copytree(weights, weights.parent / "copy")
    assert fingerprint(weights.parent / "copy") == before


def test_what_changed_this_moment_is_not_remembered(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_YOUNG_NS", 10**15)
    fingerprint(weights)
    assert not list((weights.parent / "cache").glob("*"))


@pytest.mark.parametrize("name", ["../mine", "a/../../mine", "{outside}/mine", ".."])
def test_a_record_lists_no_file_outside_its_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    folder = tmp_path / "run"
    (folder / "a").mkdir(parents=True)
    listed = {name.replace("{outside}", str(tmp_path)): file_sha256(tmp_path / "mine")}
    (folder / "done.json").write_text(json.dumps({"files": listed}))
    for read in (check_files, lambda folder: copy_recorded_files(folder, tmp_path / "b" / "copy")):
        with pytest.raises(UserError, match=r"done\.json: lists '.*', which is no file of its directory"):
            read(folder)
    with pytest.raises(UserError, match="no file of its directory"):
        verify_sealed(folder / "result.json", {"value": 1, "seal": {**listed, "result.json": ""}}, fix="")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run"]


def test_a_directory_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    folder = tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "own").symlink_to("../inner")
    (tmp_path / "scratch").mkdir()
    (folder / "state").symlink_to(tmp_path / "scratch")
    check_files(folder)  # links of its own, and its checkpoints on another disk
    for number, target in enumerate((tmp_path / "mine", tmp_path, "/dev/zero", "../../mine", "/nowhere")):
        link = folder / "inner" / f"link-{number}"
        link.symlink_to(target)
        with pytest.raises(UserError, match=f"link-{number} is a link or no plain file"):
            check_files(folder)
        link.unlink()
    os.mkfifo(folder / "inner" / "pipe")
    with pytest.raises(UserError, match="pipe is a link or no plain file"):
        check_files(folder)
