"""Build the wheel, check its contents, install it into a fresh environment elsewhere and use it there.

    python scripts/check_wheel.py           # --demo: also runs the whole demo there
    python scripts/check_wheel.py --release    # wheel and sdist of a clean clone of HEAD into dist/, checked; no upload

The fresh environment sees the heavy dependencies of this one through a `.pth` file, but not this source tree; a second
check imports every module with only the declared core dependencies visible.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import house

from flatshift.finetune.assets import SOURCE_ONLY

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"flatshift"}
MUST_HOLD = (
    "flatshift/finetune/backbones/flatshift-5m/model.safetensors",
    "flatshift/finetune/samples/pool.jsonl.xz",
    "flatshift/experiments/recipe/gallery.yaml",
    "flatshift/experiments/recipes/warmup.yaml",
    "flatshift/py.typed",
)
DATA = ("flatshift/finetune/backbones/", "flatshift/finetune/samples/")
MAX_DATA_BYTES = 10_900_000
"""Ceiling of DATA, packed. Lower it when the wheel is below."""


_TEXT: dict[str, Any] = {"check": True, "capture_output": True, "text": True}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel = build_release(folder) if "--release" in sys.argv[1:] else build_wheel(folder)
        check_contents(wheel)
        python = install_wheel(wheel, folder)
        check_versions(wheel, python, folder)
        run_smoke_test(python, folder)
        if "--demo" in sys.argv[1:]:
            subprocess.run([python.parent / "flatshift", "demo", "--out", "shown"], check=True, cwd=folder)
        check_namesakes(python, folder)
    check_minimal_dependencies()
    print("wheel: built, installed elsewhere, smoke-run; core dependencies suffice for every module")


def build_wheel(folder: Path) -> Path:
    """Build the sdist and the wheel out of it, as a release is built: with an address for its links."""
    environment = {"PROJECT_URL": "https://example.org/flatshift"} | os.environ
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    # stdout=-3 is subprocess.DEVNULL.
    subprocess.run(command, check=True, stdout=-3, env=environment)
    (wheel,) = folder.glob("*.whl")
    check_links(wheel, environment["PROJECT_URL"])
    return wheel


def build_release(folder: Path) -> Path:
    """Build sdist and wheel of a clean clone into dist/, and print their sizes and hashes."""
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, **_TEXT).stdout:
        raise SystemExit("the tree has changes that are not committed; commit them, a release is built from HEAD")
    clone, dist = folder / "clone", ROOT / "dist"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    shutil.rmtree(dist, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(dist), str(clone)], check=True, stdout=-3)
    for file in sorted(dist.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 2**20:.1f} MiB  sha256 {digest}")
    (wheel,) = dist.glob("*.whl")
    if address := os.environ.get("PROJECT_URL"):
        check_links(wheel, address)
    else:
        print("PROJECT_URL is not set: these files have no links to the project, and are not for an upload")
    return wheel


def check_links(wheel: Path, address: str) -> None:
    """Check that the page of a package index has links to the project, and none to files that are not there."""
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    metadata = zipfile.ZipFile(wheel).read(name).decode("utf-8")
    relative = re.findall(r"\]\((?!https?://|#)[^)]*\)", metadata)
    if relative:
        raise SystemExit(f"the package's page would have links to no address: {relative}")
    for line in (f"Project-URL: Source, {address}", f"]({address}/raw/v"):
        if line not in metadata:
            raise SystemExit(f"the package's page lacks {line}")


def check_contents(wheel: Path) -> None:
    entries = zipfile.ZipFile(wheel).infolist()
    names = [entry.filename for entry in entries]
    tops = {name.split("/", 1)[0] for name in names if ".dist-info" not in name}
    if tops != PACKAGES:
        raise SystemExit(f"the wheel holds {sorted(tops)}, wanted {sorted(PACKAGES)}")
    missing = [name for name in MUST_HOLD if name not in names]
    if missing:
        raise SystemExit(f"the wheel lacks {missing}")
    check_rooms(set(names))
    if more := [name for name in names if is_source_only(name)]:
        raise SystemExit(f"the wheel holds backbones that only the source has: {more[:3]}")
    size = sum(entry.compress_size for entry in entries if entry.filename.startswith(DATA))
    if size > MAX_DATA_BYTES:
        raise SystemExit(f"backbones and samples take {size:,} bytes of the wheel, more than {MAX_DATA_BYTES:,}")


def is_source_only(name: str) -> bool:
    return any(backbone in name for backbone in SOURCE_ONLY)


def check_rooms(names: set[str]) -> None:
    """Check that the wheel holds every file of the rooms that git tracks, code and data, but SOURCE_ONLY."""
    if not (ROOT / ".git").exists():
        return
    listed = subprocess.run(["git", "ls-files", "-z", "--", *house.ROOMS], cwd=ROOT, **_TEXT).stdout.split("\0")
    files = [name for name in listed if name and (ROOT / name).is_file()]  # but the links to rooms
    wanted = {name if name.startswith("flatshift/") else f"flatshift/{name}" for name in files}
    if lacking := sorted(name for name in wanted - names if not is_source_only(name)):
        raise SystemExit(f"the wheel lacks {len(lacking)} files of the rooms: {lacking[:9]}")


def check_versions(wheel: Path, python: Path, folder: Path) -> None:
    """Check that the installed package and CITATION.cff say the wheel's own version."""
    code = "import flatshift; print(flatshift.__version__)"
    citation = re.search(r"^version: *(\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.M)
    said = {
        "flatshift.__version__": subprocess.run([python, "-c", code], cwd=folder, **_TEXT).stdout.strip(),
        "CITATION.cff": citation[1].strip("\"'") if citation else "none",
    }
    own = wheel.name.split("-")[1]
    if wrong := {where: version for where, version in said.items() if version != own}:
        raise SystemExit(f"the wheel is version {own}, but {wrong}")


def install_wheel(wheel: Path, folder: Path) -> Path:
    target = folder / "elsewhere"
    venv.create(target)
    python = target / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-deps", str(wheel)], check=True)
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    # Listed after the new site-packages; a .pth inside that directory (our editable install) is not followed.
    (site / "host.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    return python


def run_smoke_test(python: Path, folder: Path) -> None:
    command = python.parent / "flatshift"
    for arguments in (["--help"], ["doctor"], ["recipes", "list"], ["train", "--help"]):
        subprocess.run([command, *arguments], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    refused = subprocess.run([command, "train", "seq2seq", "--out", "none"], cwd=folder, capture_output=True, text=True)
    if refused.returncode != 2 or "source archive" not in refused.stderr:
        raise SystemExit(f"a recipe whose backbone only the source has is not refused: {refused.stderr}")
    where = subprocess.run(
        [python, "-c", "from flatshift import finetune; print(finetune.__file__)"],
        check=True,
        cwd=folder,
        capture_output=True,
        text=True,
    ).stdout
    if str(folder) not in where:
        raise SystemExit(f"the smoke run used {where.strip()}, not the installed wheel")
    subprocess.run(
        [
            command,
            "select",
            "--pool",
            "sample:banking/train",
            "--target",
            "sample:banking/dev",
            "--budget",
            "20",
            "--out",
            "picked",
        ],
        check=True,
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )
    if len((folder / "picked" / "selected.jsonl").read_text(encoding="utf-8").splitlines()) != 20:
        raise SystemExit("the installed wheel did not select 20 records")


def check_namesakes(python: Path, folder: Path) -> None:
    """Check that other distributions and user files with the names of our packages are not imported."""
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.run(asked, **_TEXT).stdout.strip())
    for name in ("finetune", "experiments", "selection", "regularizers"):
        (site / f"{name}.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    code = "import flatshift; flatshift.train; from flatshift.regularizers import GGPO"
    for command in ([python.parent / "flatshift", "recipes", "list"], [python, "-c", code]):
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)


def check_minimal_dependencies() -> None:
    """Import every module while only the distributions reachable from our core requirements are importable."""
    allowed = {"flatshift"}
    todo = ["flatshift"]
    while todo:
        for requirement in importlib.metadata.requires(todo.pop()) or []:
            if "extra ==" in requirement:
                continue
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
            if name not in allowed:
                try:
                    importlib.metadata.distribution(name)
                except importlib.metadata.PackageNotFoundError:
                    continue
                allowed.add(name)
                todo.append(name)
    blocked = sorted(
        top
        for top, owners in importlib.metadata.packages_distributions().items()
        if not {owner.lower().replace("_", "-") for owner in owners} & allowed
    )
    modules = [name for name in house.product_modules(ROOT) if not name.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
