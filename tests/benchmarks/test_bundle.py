"""`make bundle`: a folder for a machine without an index says what that lacks, installs the rest and runs a command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from scripts import bundle
from scripts.bundle import TargetMachine, dependency_closure, extra_requirement, main, write_scripts
from scripts.package_indexes import pip_settings, reachable_index_lines

MINE = "{}.{}".format(*sys.version_info)
NUMPY = importlib.metadata.version("numpy")


def wheel(folder, name, version="1.0", needs=()):
    """A wheel with one module, which says its version, and a command that does."""
    file, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = "\n".join(
        [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    )
    with zipfile.ZipFile(file, "w") as made:
        made.writestr(
            f"{name}.py", f"def main():\n    print('{name} {version}')\n\nif __name__ == '__main__':\n    main()\n"
        )
        made.writestr(f"{about}/METADATA", f"{metadata}\n")
        made.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{about}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        made.writestr(f"{about}/RECORD", "")
    return file


def fake(folder, *, python=MINE, needs, optional_needs=None, version="1.0"):
    """A bundle of two tiny wheels."""
    (folder / "wheels").mkdir(parents=True, exist_ok=True)
    names = [wheel(folder / "wheels", name, version).name for name in ("tinytool", "tinypeer")]
    optional = {"tinypeer": {"wheels": names[1:], "needs": optional_needs or {}}}
    about = {"flatshift": "1.0", "python": python, "machine": "", "core": {"wheels": names[:1], "needs": needs}}
    (folder / "bundle.json").write_text(json.dumps({**about, "optional": optional}))
    write_scripts(folder)
    return folder


def run(folder, *words, cwd):
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PIP_REQUIRE_VIRTUALENV": "1",
        "PIP_INDEX_URL": "http://nowhere.invalid",
    }
    return subprocess.run([folder / "run.sh", *words], cwd=cwd, env=environment, capture_output=True, text=True)


def test_all_that_is_missing_is_one_list_and_nothing_is_installed(tmp_path):
    needs = {"numpy": ">=99", "no-such-thing": ">=1", "scipy": "", "packaging": ">=20"}
    done = run(fake(tmp_path / "b", python="3.1", needs=needs), "tinytool", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "b" / "site").exists()
    head, *lines = done.stderr.splitlines()
    assert head.endswith("nothing was installed:")
    assert [line.split(":")[0].strip() for line in lines] == ["Python 3.1", "numpy >=99", "no-such-thing >=1"]
    assert f"numpy >=99: {NUMPY} is there" in done.stderr and "no-such-thing >=1: not there" in done.stderr


def test_a_bundle_installs_once_beside_itself_and_runs_what_it_is_given(tmp_path):
    made = fake(tmp_path / "a b", needs={"numpy": ">=1"}, optional_needs={"numpy": ">=99"})
    done = run(made, "tinytool", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "tinytool 1.0\n"), done.stderr
    assert f"tinypeer is left out: numpy >=99: {NUMPY} is there" in done.stderr
    assert not (made / "site" / "tinypeer.py").exists()
    (made / "site" / "mark").touch()
    done = run(made, "python", "-m", "tinytool", cwd=tmp_path)
    assert done.stdout == "tinytool 1.0\n" and (made / "site" / "mark").exists()  # it was there already
    assert run(made, "python", "-c", "import sys; sys.exit(7)", cwd=tmp_path).returncode == 7

    for file in (made / "wheels").iterdir():
        file.unlink()
    fake(made, needs={}, version="2.0")  # another bundle in its place
    done = run(made, "tinytool", cwd=tmp_path)
    assert done.stdout == "tinytool 2.0\n" and (made / "site" / "tinypeer.py").exists()
    assert not (made / "site" / "mark").exists() and [p.name for p in made.glob("site*")] == ["site"]


def test_needs_are_those_of_the_metadata_for_the_machine_in_question(tmp_path, monkeypatch):
    lines = ['old; python_version < "3.12"', "numpy>=2", 'win; sys_platform == "win32"', 'more; extra == "x"']
    there = TargetMachine("3.12", "x86_64", frozenset({"numpy"}))
    assert [r.name for r in there.wanted(lines)] == ["numpy"]
    assert [r.name for r in TargetMachine("3.11", "x86_64", frozenset()).wanted(lines, ["x"])] == [
        "old",
        "numpy",
        "more",
    ]
    assert {"safetensors", "huggingface-hub"} <= dependency_closure(["transformers"]) and dependency_closure(
        ["no-such"]
    ) == {"no-such"}
    assert str(extra_requirement("trl")) == "trl<2,>=1.0" and str(extra_requirement("no-such")) == "no-such"

    index, into = tmp_path / "index", tmp_path / "into"
    index.mkdir(), into.mkdir()
    wheel(index, "aa", needs=["bb>=1", "numpy>=1.5"]), wheel(index, "cc", needs=["bb<2", "numpy<9"])
    wheel(index, "bb", "1.0"), wheel(index, "bb", "2.0", needs=["numpy>=1"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    group = bundle.resolve_wheels(there, there.wanted(["aa", "cc", "numpy>=1"]), into)
    assert sorted(p.name[:6] for p in into.iterdir()) == ["aa-1.0", "bb-1.0", "cc-1.0"]
    assert group.document()["needs"] == {"numpy": ">=1.5,>=1,<9"}
    with pytest.raises(
        SystemExit, match=r"no wheel of dd for Python 3\.12 on x86_64; if it has it, name it behind --there"
    ):
        bundle.resolve_wheels(there, there.wanted(["dd"]), into)


def test_what_cannot_be_a_bundle_is_refused(tmp_path, capsys):
    for flags, says in (
        (["--python", "2.7"], "write a version, as in make bundle PYTHON=3.12"),
        (["--python", "3.12", "--out", str(tmp_path)], "is there and no bundle"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(flags)
        assert stop.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.slow
def test_a_fresh_environment_without_an_index_runs_flatshift_and_a_rehearsal(tmp_path):
    settings = pip_settings()
    if "no-index" in settings or "export PIP_NO_INDEX=1" in reachable_index_lines(settings):
        pytest.skip("no package index answers")
    assert main(["--python", MINE, "--out", str(tmp_path / "bundle")]) == 0
    about = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    sizes = [f.stat().st_size for f in (tmp_path / "bundle/wheels").iterdir() if not f.name.startswith("flatshift-")]
    assert sum(sizes) <= 20 * 2**20 and "torch" in about["core"]["needs"]

    # a machine that has what is assumed, and nothing else
    venv.create(tmp_path / "machine", with_pip=True)
    python, links = tmp_path / "machine/bin/python", tmp_path / "links"
    links.mkdir()
    for name in dependency_closure(bundle.ASSUMED):
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            if not (links / top).exists():
                (links / top).symlink_to(installed.locate_file(top))
    (site,) = (tmp_path / "machine/lib").glob("python*/site-packages")
    (site / "links.pth").write_text(f"{links}\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PYTHON": str(python), "PIP_NO_INDEX": "1"}
    without = subprocess.run([python, "-c", "import tyro"], cwd=tmp_path, env=environment, capture_output=True)
    assert without.returncode == 1

    def there(*words):
        script = tmp_path / "bundle" / "run.sh"
        done = subprocess.run([script, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(tmp_path / "bundle" / "site") in there("flatshift", "doctor")
    kept = tmp_path / "kept.jsonl"
    for step in ("smoke/step/classify", "smoke/step/seq2seq"):  # the second's backbone is none of the wheel's
        there("python", "-m", "benchmarks.gpu", "--rehearse", "--rows", step, "--kept", str(kept))
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [line["failed"] for line in lines] == [None, None], lines
    for line in lines:
        assert line["place"]["commit"] == (Path(tmp_path) / "bundle/commit").read_text().strip()
