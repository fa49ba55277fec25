"""Install a bundle's wheels into a folder, after checking the machine; called by `run.sh`.

    python3 install.py FOLDER

Needs pip and the standard library. Lists everything that is missing before anything is written, and then exits with 2.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAMP = ".bundle"


def main(site: Path) -> int:
    """Install into `site` the wheels that fit this machine; return the exit code."""
    about = json.loads((HERE / "bundle.json").read_text(encoding="utf-8"))
    missing = [*check_interpreter(about), *unmet_requirements(about["core"]["needs"])]
    if missing:
        print(f"this machine lacks what flatshift {about['flatshift']} needs; nothing was installed:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in missing), file=sys.stderr)
        return 2
    chosen = list(about["core"]["wheels"])
    for name, group in about["optional"].items():
        if why := unmet_requirements(group["needs"]):
            print(f"{name} is left out: {'; '.join(why)}", file=sys.stderr)
        else:
            chosen += [wheel for wheel in group["wheels"] if wheel not in chosen]
    install_wheels([HERE / "wheels" / wheel for wheel in chosen], site)
    return 0


def check_interpreter(about: Mapping[str, str]) -> list[str]:
    """Return the reasons for which the wheels do not fit this Python or machine."""
    results = []
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version != about["python"]:
        results.append(
            f"Python {about['python']}: {sys.executable} is {version}; set PYTHON, or make the bundle for it"
        )
    if about["machine"] and (sys.platform, platform.machine()) != ("linux", about["machine"]):
        results.append(f"Linux on {about['machine']}: this is {sys.platform} on {platform.machine()}")
    try:
        import pip  # noqa: F401
    except ImportError:
        results.append(f"pip: {sys.executable} does not have it")
    return results


def unmet_requirements(needs: Mapping[str, str]) -> list[str]:
    """Return the entries of `needs`, version ranges by distribution, that this Python does not meet."""
    if not needs:
        return []
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        try:
            from pip._vendor.packaging.specifiers import SpecifierSet  # type: ignore[assignment]
        except ImportError:
            return [f"packaging: {sys.executable} does not have it"]
    results = []
    for name, wanted in needs.items():
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            results.append(f"{name} {wanted}".rstrip() + ": not there")
            continue
        if not SpecifierSet(wanted).contains(there, prereleases=True):
            results.append(f"{name} {wanted}: {there} is there")
    return results


def install_wheels(wheels: list[Path], site: Path) -> None:
    """Install `wheels` into `site`, completely or not at all; no-op if they are already installed."""
    digest = hashlib.sha256("".join(sorted(wheel.name for wheel in wheels)).encode())
    for wheel in sorted(wheels):
        digest.update(wheel.read_bytes())
    if (site / STAMP).is_file() and (site / STAMP).read_text() == digest.hexdigest():
        return
    result = site.with_name(f"{site.name}.{os.getpid()}")
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--isolated", "install", *options, "--target", str(result)]
    try:
        subprocess.run([*pip, *map(str, wheels)], check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
        (result / STAMP).write_text(digest.hexdigest())
        shutil.rmtree(site, ignore_errors=True)
        result.rename(site)
    finally:
        shutil.rmtree(result, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve()))
