"""A package of another distribution under one of our names is refused in one sentence."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from flatshift import installation


def installed(home: Path) -> Path:
    """A site directory with our four packages, as `pip` leaves them."""
    record = []
    for name in installation.NAMES:
        for file in (f"{name}/__init__.py", f"{name}/config.py"):
            (home / file).parent.mkdir(exist_ok=True)
            (home / file).write_text(f"# {file}")
            digest = base64.urlsafe_b64encode(hashlib.sha256((home / file).read_bytes()).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},1\n")
    about = home / "flatshift-0.1.0.dist-info"
    about.mkdir()
    (about / "RECORD").write_text("".join(record))
    return home


def shadows(names: list[str], home: Path, path: list[Path], owners: dict[str, list[str]] | None = None):
    return installation.shadows(home, [str(entry) for entry in path], names, owners or {})


def package(folder: Path, name: str, *, body: bool = True) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    (made / ("__init__.py" if body else "thing.py")).touch()
    return made


def test_ours_are_ours():
    assert installation.foreign() is None
    assert installation.shadows()[0] == []


@pytest.mark.parametrize("file", ["finetune/__init__.py", "selection/config.py"])
def test_what_another_package_wrote_over_is_named(tmp_path, file):
    home = installed(tmp_path)
    assert installation._overwritten(home) is None
    (home / file).write_text("import tensorflow")
    assert installation._overwritten(home) == file
    (home / file).unlink()  # it was uninstalled again
    assert installation._overwritten(home) == file


def test_a_module_in_the_current_directory_is_refused_by_every_way_in(tmp_path):
    (tmp_path / "selection.py").write_text("")
    root = installation.HOME
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]; "
    command = subprocess.run(
        [sys.executable, "-c", code + "from flatshift.cli import run; raise SystemExit(run(['recipes', 'list']))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert command.returncode == 2 and command.stdout == ""
    assert command.stderr.startswith("flatshift: error: `import selection` finds ") and len(command.stderr) < 400
    assert f"{tmp_path / 'selection.py'} instead of {root / 'selection'}" in command.stderr
    module = subprocess.run(
        [sys.executable, "-c", code + "import flatshift; flatshift.load_recipe"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "ImportError: `import selection` finds" in module.stderr


def test_the_doctor_says_it_too(tmp_path):
    (tmp_path / "regularizers.py").touch()
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(installation.HOME)!r}]; "
    done = subprocess.run(
        [sys.executable, "-c", code + "from flatshift.cli import run; raise SystemExit(run(['doctor']))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    for said in (done.stdout, done.stderr):
        assert f"`import regularizers` finds {tmp_path / 'regularizers.py'} instead of" in said


def test_the_doctor_sees_what_was_written_over(tmp_path):
    home = installed(tmp_path)
    (home / "finetune" / "config.py").write_text("import tensorflow")
    (problem,), notes = shadows(["finetune"], home, [home])
    assert "was installed over" in problem["what"] and "`pip uninstall finetune`" in problem["fix"] and notes == []


def test_module_found_earlier_is_a_problem(tmp_path: Path) -> None:
    home = tmp_path / "home"
    package(home, "finetune")
    package(home, "selection")
    package(tmp_path / "other", "finetune")
    (tmp_path / "other" / "selection.py").touch()
    problems, notes = shadows(["finetune", "selection"], home, [tmp_path / "other", home])
    for name, problem in zip(("finetune", "selection.py"), problems, strict=True):
        assert str(tmp_path / "other" / name) in problem["what"]
    assert notes == []
    assert all("run from another folder" in p["fix"] for p in problems)


def test_shadowing_distribution_is_named(tmp_path: Path) -> None:
    home = tmp_path / "home"
    package(home, "finetune")
    package(tmp_path / "site", "finetune")
    problems, _ = shadows(["finetune"], home, [tmp_path / "site", home], {"finetune": ["tuna"]})
    (problem,) = problems
    assert "installed by tuna" in problem["what"] and "pip uninstall tuna" in problem["fix"]


def test_module_found_later_is_a_note(tmp_path: Path) -> None:
    home = tmp_path / "home"
    package(home, "selection")
    package(tmp_path / "site", "selection")
    problems, notes = shadows(["selection"], home, [home, tmp_path / "site"])
    assert problems == [] and len(notes) == 1 and "hidden" in notes[0]["what"]


def test_bare_folder_yields_to_a_package(tmp_path: Path) -> None:
    home = tmp_path / "home"
    package(home, "experiments")
    package(tmp_path / "cwd", "experiments", body=False)
    (tmp_path / "cwd" / "selection").mkdir()  # only data in it: no module at all
    problems, notes = shadows(["experiments", "selection"], home, [tmp_path / "cwd", home])
    assert problems == [] and len(notes) == 1


def test_two_distributions_over_one_another(tmp_path: Path) -> None:
    package(tmp_path, "finetune")
    problems, _ = shadows(["finetune"], tmp_path, [tmp_path], {"finetune": ["flatshift", "tuna"]})
    assert "installed by tuna as well" in problems[0]["what"]
    assert "pip uninstall tuna" in problems[0]["fix"]
    assert shadows(["finetune"], tmp_path, [tmp_path], {"finetune": ["flatshift"]}) == ([], [])
