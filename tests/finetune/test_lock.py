"""One owner for a path: who holds it, who is told so, and that a killed owner leaves nothing in the way."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flatshift.finetune import lock
from flatshift.finetune.atomic import atomic_directory, new_directory, remove_leftovers
from flatshift.finetune.errors import UserError
from flatshift.finetune.launch.consistency import dated_directory
from flatshift.finetune.lock import exclusive_lock, temporary_directory
from flatshift.finetune.run_directory import RunDirectory, check_empty, check_new_file, output_directory
from tests.support.kill_points import kill_points
from tests.support.patience import HANG_S


def other_owner(path: Path) -> subprocess.Popen[str]:
    """A process that owns `path` until it is killed."""
    code = (
        "import sys, time\nfrom flatshift.finetune.lock import exclusive_lock\n"
        "with exclusive_lock(sys.argv[1]):\n    print('held', flush=True); time.sleep(1000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def refused(path: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught, exclusive_lock(path):
        raise AssertionError("two owners")
    assert len(str(caught.value)) <= 300 + len(str(path)) and "\n" not in str(caught.value)


def test_a_second_command_is_told_who_is_at_work_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    path, link = tmp_path / "deep" / "out", tmp_path / "link"
    link.symlink_to(path)
    holder = other_owner(path)
    try:
        assert not path.exists(), "the directory itself is as it was"
        refused(path, rf"in use by another command \(process {holder.pid}\); wait for its end, or name another --out")
        refused(link, rf"process {holder.pid}\b")
        refused(tmp_path / "deep" / ".." / "deep" / "out", rf"process {holder.pid}\b")
        check_empty(path)
        with exclusive_lock(tmp_path / "deep" / "other"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(HANG_S)
        assert [entry.name for entry in path.parent.iterdir()] == [".out.lock"]
        with exclusive_lock(path):
            path.mkdir()
        assert [entry.name for entry in path.parent.iterdir()] == ["out"], "nor does it leave anything"
    finally:
        holder.kill()


def test_nothing_is_left_where_nothing_was_made(tmp_path: Path) -> None:
    for path in (tmp_path / "a" / "b" / "out", tmp_path / "a" / "file.jsonl"):
        with pytest.raises(UserError), exclusive_lock(path):
            raise UserError("bad input")
    assert not list(tmp_path.iterdir())


def test_one_owner_at_a_time_however_many_ask(tmp_path: Path) -> None:
    """Owners that come and go, their lock's name with them: none ever meets another."""
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            got, code = 0, 70
            try:
                for _ in range(60):
                    try:
                        with exclusive_lock(tmp_path / "out"):
                            os.close(os.open(tmp_path / "alone", os.O_CREAT | os.O_EXCL))
                            (tmp_path / "alone").unlink()
                            got += 1
                    except UserError:
                        continue
                code = 0 if got else 1
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert not list(tmp_path.iterdir())


def test_the_lock_of_an_owner_that_ended_is_not_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before its owner took it away, locked after: somebody else has made a new one by then."""
    ask, place, newer = lock.try_lock, tmp_path / ".out.lock", []

    def late(fd: int) -> bool | None:
        if not newer:
            place.unlink()
            newer.append(os.open(place, os.O_CREAT | os.O_RDWR))
            fcntl.flock(newer[0], fcntl.LOCK_EX)
        return ask(fd)

    monkeypatch.setattr(lock, "try_lock", late)
    refused(tmp_path / "out", "unknown process")
    os.close(newer[0])


def test_what_is_not_our_lock_is_left_alone(tmp_path: Path) -> None:
    mine, place = tmp_path / "mine", tmp_path / ".out.lock"
    mine.write_text("kept")
    place.write_text("notes")
    refused(tmp_path / "out", "is something else; move it away")
    assert place.read_text() == "notes"
    place.unlink()
    place.symlink_to(mine)
    refused(tmp_path / "out", "is something else; move it away")
    place.unlink()
    place.mkdir()
    refused(tmp_path / "out", r"cannot be written \(.*\.out\.lock: Is a directory\)")
    assert mine.read_text() == "kept"


def test_a_place_that_cannot_be_written_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "out", r"cannot be written \(.*file: File exists\)")

    def read_only(path: str, *_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    with monkeypatch.context() as vanishing:
        vanishing.setattr(lock, "make_directory", lambda path: [])
        with pytest.raises(FileNotFoundError), exclusive_lock(tmp_path / "never" / "out"):
            raise AssertionError
    monkeypatch.setattr(lock.os, "open", read_only)
    refused(tmp_path / "out", r"cannot be written \(.*\.out\.lock: Read-only file system\)")


def test_a_directory_in_surroundings_that_cannot_be_written_holds_its_lock_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock.os, "access", lambda path, mode: path != tmp_path)
    (tmp_path / "out").mkdir()
    with exclusive_lock(tmp_path / "out"):
        assert [entry.name for entry in (tmp_path / "out").iterdir()] == [".lock"]
        refused(tmp_path / "out", f"process {os.getpid()}")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_and_worked_on(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lock.fcntl, "flock", none)
    monkeypatch.setattr(lock, "_warned_devices", set())
    (tmp_path / ".out.12345678.tmp").mkdir()
    with exclusive_lock(tmp_path / "out"), exclusive_lock(tmp_path / "out"):
        assert (tmp_path / ".out.12345678.tmp").is_dir(), "it may be of another command, at work"
    warned = capsys.readouterr().err
    assert warned.count("keeps no locks: nothing stops a second command on out") == 1 == warned.count("\n")
    monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    with temporary_directory("flatshift-test-") as first, temporary_directory("flatshift-test-"):
        assert first.is_dir(), "whether it is abandoned cannot be known"
    assert not (tmp_path / "temporary").exists()


def test_what_two_processes_make_at_once_one_of_them_made(tmp_path: Path) -> None:
    """Also where there are no locks: the second finds the first one's directory, and leaves it as it is."""
    with (
        pytest.raises(UserError, match="was made by another command meanwhile"),
        output_directory(tmp_path / "out") as second,
    ):
        (second / "mine").touch()
        RunDirectory.create(tmp_path / "out")
    assert (tmp_path / "out" / "environment.json").is_file() and not (tmp_path / "out" / "mine").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".recipe.1.tmp").touch()  # a killed write's
    check_empty(tmp_path / "empty")
    with new_directory(tmp_path / "empty") as made:
        (made / "a").touch()
    assert [entry.name for entry in (tmp_path / "empty").iterdir()] == ["a"]


def test_nothing_is_replaced_behind_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """No look at MISSING/../NAME finds what is there, and a replacement would hit it."""
    (tmp_path / "mine").mkdir()
    path = tmp_path / "missing" / ".." / "mine"
    with pytest.raises(UserError, match="leads through a directory that is not there"), exclusive_lock(path):
        pass
    with pytest.raises(UserError, match="exists"):
        check_new_file(path)
    assert {file.name for file in tmp_path.iterdir()} == {"mine"}


def test_a_mount_point_cannot_be_made_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    check_empty(tmp_path)
    with pytest.raises(UserError, match="is a mount point, which cannot be replaced; name a directory in it"):
        RunDirectory.create(tmp_path)
    assert not list(tmp_path.iterdir())
    RunDirectory.create(tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is the working directory, which cannot be replaced"):
        RunDirectory.create(".")


def test_leftovers_of_a_killed_command_go_with_the_next_one_on_its_path(tmp_path: Path) -> None:
    for name in (".out.12345678.tmp", ".out.12345678.old.tmp", ".other.12345678.tmp", ".out.x.12345678.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "out").mkdir()
    with exclusive_lock(tmp_path / "out"):
        pass
    assert {entry.name for entry in tmp_path.iterdir()} == {"out", ".other.12345678.tmp", ".out.x.12345678.tmp"}


def test_a_directory_is_replaced_or_not_whenever_it_is_killed(tmp_path: Path) -> None:
    def write(directory: Path, text: str) -> None:
        with atomic_directory(directory) as made:
            (made / "a").write_text(text)
            (made / "b").mkdir()
            (made / "b" / "c").write_text(text)

    def twice(directory: Path) -> None:
        write(directory, "old")
        (directory.parent / f"begun-{directory.name}").touch()
        write(directory, "new")

    killed = set()
    for directory in kill_points(twice, tmp_path):
        remove_leftovers(tmp_path)
        found = {file.read_text() for file in directory.rglob("*") if file.is_file()}
        assert len(found) == (1 if (tmp_path / f"begun-{directory.name}").exists() else len(found)) and len(found) < 2
        assert not list(tmp_path.glob(".*"))
        killed |= found
    assert killed == {"old", "new"}


def test_scratch_directories_of_killed_processes_go_and_those_at_work_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = (
        "import time\nfrom flatshift.finetune.lock import temporary_directory\n"
        "with temporary_directory('flatshift-test-') as folder:\n"
        "    (folder / 'file').touch(); print(folder, flush=True); time.sleep(1000)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: str(tmp_path))
        with temporary_directory("flatshift-test-") as mine:
            assert theirs.is_dir() and mine.is_dir() and mine != theirs
        assert theirs.is_dir() and not mine.exists()
        holder.kill()
        holder.wait(HANG_S)
        (tmp_path / "flatshift-test-file").touch()
        with temporary_directory("flatshift-test-"):
            assert not theirs.exists()
        assert [entry.name for entry in tmp_path.iterdir()] == ["flatshift-test-file"]
    finally:
        holder.kill()


def test_default_names_are_unique_within_a_second(tmp_path: Path) -> None:
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            with dated_directory(tmp_path / "runs", "name") as made:
                (made / str(os.getpid())).touch()
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
    made = sorted((tmp_path / "runs").iterdir())
    assert len(made) == 8 and all(len(list(one.iterdir())) == 1 for one in made)
    assert any(one.name.endswith("-name-2") for one in made)
    with dated_directory(tmp_path / "runs", "unused") as unused:
        assert unused.is_dir()
    assert not unused.exists(), "nothing came into it"
    with dated_directory(tmp_path / "a" / "b", "unused"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]


def test_a_lock_is_asked_for_a_moment_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner at its end does not refuse the next one."""
    monkeypatch.setattr("flatshift.finetune.lock._PATIENCE_S", 60.0)  # on a busy machine the child's end comes late
    fd = os.open(tmp_path / ".out.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        time.sleep(0.05)
        os._exit(0)  # the last to have the file open
    os.close(fd)
    with exclusive_lock(tmp_path / "out"):
        pass
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("left", [b"", b"flat", b"\0" * 12, b"flatshift \0\0\0"])
def test_what_a_kill_or_a_power_cut_left_of_a_lock_is_nobodys(tmp_path, left):
    (tmp_path / ".out.lock").write_bytes(left)
    with exclusive_lock(tmp_path / "out"):
        assert (tmp_path / ".out.lock").read_bytes().startswith(b"flatshift ")
    assert not (tmp_path / ".out.lock").exists()
