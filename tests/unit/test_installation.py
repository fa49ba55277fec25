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


def test_ours_are_ours():
    assert installation.foreign() is None


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
