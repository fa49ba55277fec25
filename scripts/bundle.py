"""Build a folder that installs Flatshift on a machine without a package index that already has torch with CUDA.

    make bundle PYTHON=3.12                          # here, with an index: flatshift-bundle/
    flatshift-bundle/run.sh flatshift doctor         # on that machine: installs into the folder, then runs the command
    flatshift-bundle/run.sh python -m benchmarks.gpu --minutes 8

The folder contains our wheel, the wheels that such a machine lacks, the benchmarks, and `run.sh`. Requirements are read
from the metadata of our wheel and of those that are downloaded. Distributions in `ASSUMED`, with their own
requirements, are not downloaded but checked on the machine before anything is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

from flatshift.finetune.assets import SOURCE_ONLY

ASSUMED = (
    *("torch", "triton", "transformers", "peft", "accelerate", "safetensors", "numpy", "scipy", "scikit-learn"),
    *("pandas", "pyarrow", "matplotlib", "jinja2", "pyyaml", "regex", "rich", "pytest"),
)
"""Distributions that the machine has; edit the list for yours, or pass --there."""
OPTIONAL = ("liger-kernel", "datasets", "trl")
"""Included as far as they fit, in this order; their version ranges are those of our extras."""
LIMIT_MIB = 20.0
"""Size limit of all wheels but ours."""
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in (34, 31, 28, 27, 24, 17)), "manylinux2014", "manylinux1")
ROOT = Path(__file__).resolve().parent.parent
RUN = """#!/bin/sh
# Install what is in this folder, once, and run a command with it:
#   run.sh flatshift doctor
#   run.sh python -m benchmarks.gpu --minutes 8
# PYTHON: the interpreter that has torch (python3). FLATSHIFT_SITE: where to install (the folder site beside this file).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
site=${FLATSHIFT_SITE:-$here/site}
"$python" "$here/install.py" "$site" || exit $?
PYTHONPATH=$site:$here${PYTHONPATH:+:$PYTHONPATH}
PATH=$site/bin:$PATH
export PYTHONPATH PATH
[ $# -gt 0 ] || set -- flatshift doctor
if [ "$1" = python ]; then shift; set -- "$python" "$@"; fi
exec "$@"
"""


@dataclass
class WheelGroup:
    """Wheels that belong together, and their requirements on the machine."""

    wheels: dict[str, Path] = field(default_factory=dict)
    needs: dict[str, SpecifierSet] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(wheel.stat().st_size for wheel in self.wheels.values())

    def document(self) -> dict[str, object]:
        """Return the entry for bundle.json."""
        needs = {
            name: ",".join(sorted({*map(str, wanted)}, reverse=True)) for name, wanted in sorted(self.needs.items())
        }
        return {"wheels": sorted(wheel.name for wheel in self.wheels.values()), "needs": needs}


@dataclass(frozen=True)
class TargetMachine:
    """Machine that the bundle is for."""

    python: str
    machine: str
    there: frozenset[str]
    """Distributions that the machine has."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which requirement markers are evaluated."""
        mine = {name: str(value) for name, value in default_environment().items()}
        return mine | {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": self.machine,
        }

    def wanted(self, lines: Iterable[str], extras: Iterable[str] = ()) -> list[Requirement]:
        """Return the requirements whose markers hold on the machine."""
        results = [Requirement(line) for line in lines]
        asked = [{**self.environment, "extra": extra} for extra in ("", *extras)]
        return [r for r in results if r.marker is None or any(r.marker.evaluate(e) for e in asked)]

    def options(self) -> list[str]:
        """Return pip's options for the machine."""
        named = [f"--platform={platform}_{self.machine}" for platform in PLATFORMS]
        return ["--only-binary=:all:", f"--python-version={self.python}", "--implementation=cp", *named]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the bundle folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="", metavar="3.12", help="version of the machine's Python; by default ours")
    parser.add_argument("--machine", default="x86_64", help="its processor: x86_64 or aarch64")
    parser.add_argument("--there", nargs="*", default=[], help="distributions that it has besides ASSUMED")
    parser.add_argument("--optional", nargs="*", default=list(OPTIONAL), help="what to take along besides")
    parser.add_argument("--limit", type=float, default=LIMIT_MIB, metavar="MIB", help="of all wheels but ours")
    parser.add_argument("--out", type=Path, default=Path("flatshift-bundle"), help="folder; replaced if it is a bundle")
    chosen = parser.parse_args(arguments)
    version = re.fullmatch(r"(?:python)?(3\.\d+)(?:\.\d+)?", chosen.python or "{}.{}".format(*sys.version_info))
    if version is None:
        parser.error(f"--python {chosen.python}: write a version, as in make bundle PYTHON=3.12")
    if chosen.out.exists() and not (chosen.out / "bundle.json").is_file():
        parser.error(f"--out {chosen.out}: is there and no bundle; name another folder")
    target = TargetMachine(version[1], chosen.machine, dependency_closure([*ASSUMED, *chosen.there]))
    with tempfile.TemporaryDirectory() as scratch:
        about = write_bundle(target, Path(scratch) / "made", chosen.optional, chosen.limit * 2**20)
        shutil.rmtree(chosen.out, ignore_errors=True)
        shutil.move(Path(scratch) / "made", chosen.out)
    whole = sum(file.stat().st_size for file in chosen.out.rglob("*") if file.is_file())
    print(f"{chosen.out}: {whole / 2**20:.1f} MiB for Python {target.python}, of it {about} MiB of others' wheels")
    return 0


def write_bundle(target: TargetMachine, out: Path, optional: Sequence[str], limit: float) -> str:
    """Write the folder `out`; return the MiB of the wheels that are not ours.

    Raises SystemExit if they exceed `limit` bytes, or if one is not available.
    """
    (out / "wheels").mkdir(parents=True)
    ours = build_own_wheel(out / "wheels")
    core = resolve_wheels(target, target.wanted(read_requirements(ours)), out / "wheels")
    if core.size > limit:
        raise SystemExit(f"the wheels that are needed take {core.size / 2**20:.1f} MiB; raise --limit, or edit ASSUMED")
    size, groups = core.size, {}
    for name in optional:
        with tempfile.TemporaryDirectory() as scratch:
            group = resolve_wheels(target, [extra_requirement(name)], Path(scratch))
            more = {wheel.name: wheel for wheel in group.wheels.values() if not (out / "wheels" / wheel.name).exists()}
            added = sum(wheel.stat().st_size for wheel in more.values())
            if size + added > limit:
                print(f"{name} is left out: it takes {added / 2**20:.1f} MiB more (see --limit)")
                continue
            size += added
            groups[name] = group.document()
            for wheel in more.values():
                shutil.move(wheel, out / "wheels" / wheel.name)
    core.wheels["flatshift"] = ours
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = {
        "flatshift": str(parse_wheel_filename(ours.name)[1]),
        "python": target.python,
        "machine": "" if all("-none-any" in wheel.name for wheel in out.glob("wheels/*")) else target.machine,
        "core": core.document(),
        "optional": groups,
    }
    (out / "bundle.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    (out / "commit").write_text(f"{commit}\n", encoding="utf-8")
    write_scripts(out)
    small = [file for name in SOURCE_ONLY for file in (ROOT / "finetune/backbones" / name).iterdir()]
    for file in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "benchmarks/results/gpu").glob("*.jsonl"), *small]:
        copy = out / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return f"{size / 2**20:.1f}"


def write_scripts(out: Path) -> None:
    """Write `run.sh` and `install.py`."""
    shutil.copyfile(ROOT / "scripts" / "bundle_install.py", out / "install.py")
    (out / "run.sh").write_text(RUN, encoding="utf-8")
    (out / "run.sh").chmod(0o755)


# --------------------------------------------------------------------------------------------- requirements


def dependency_closure(names: Iterable[str]) -> frozenset[str]:
    """Return these distributions and their transitive requirements, as far as they are installed on this machine."""
    results: set[str] = set()
    todo = [canonicalize_name(name) for name in names]
    while todo:
        name = todo.pop()
        if name in results:
            continue
        results.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        asked = [Requirement(line) for line in lines]
        environment = {**default_environment(), "extra": ""}
        todo += [canonicalize_name(r.name) for r in asked if r.marker is None or r.marker.evaluate(environment)]
    return frozenset(results)


def extra_requirement(name: str) -> Requirement:
    """Return the requirement of that name from our extras; without a version range if none has it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    results = [Requirement(line) for lines in extras.values() for line in lines]
    same = [r for r in results if canonicalize_name(r.name) == canonicalize_name(name)]
    if not same:
        return Requirement(name)
    return Requirement(f"{name}{same[0].specifier}")


def read_requirements(wheel: Path) -> list[str]:
    """Return the requirements of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def resolve_wheels(target: TargetMachine, wanted: list[Requirement], into: Path) -> WheelGroup:
    """Download the wheels of `wanted` and their requirements into a folder; return them with the requirements on the
    machine."""
    bounds: dict[str, SpecifierSet] = {}
    while True:
        group, ranges, todo = WheelGroup(), dict(bounds), list(wanted)
        while todo:
            requirement = todo.pop(0)
            name = canonicalize_name(requirement.name)
            ranges[name] = ranges.get(name, SpecifierSet()) & requirement.specifier
            if name in target.there:
                group.needs[name] = ranges[name]
            elif name not in group.wheels:
                wheel = group.wheels[name] = download_wheel(target, f"{name}{ranges[name]}", into)
                todo += target.wanted(read_requirements(wheel), requirement.extras)
            elif parse_wheel_filename(group.wheels[name].name)[1] not in ranges[name]:
                bounds[name] = ranges[name]
                break  # the newest version's requirements may not apply: start over
        else:
            return group
        for fetched_in_vain in group.wheels.values():
            fetched_in_vain.unlink()


def download_wheel(target: TargetMachine, requirement: str, into: Path) -> Path:
    """Download the newest wheel that fits. Raises SystemExit if there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*pip, *target.options(), "--dest", scratch, requirement], stderr=subprocess.PIPE, text=True
        )
        results = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(results) != 1:
            why = (done.stderr.strip().splitlines() or ["pip fetched none"])[-1]
            raise SystemExit(
                f"no wheel of {requirement} for Python {target.python} on {target.machine}; if it has it, name "
                f"it behind --there ({why})"
            )
        return Path(shutil.move(results[0], into / results[0].name))


def build_own_wheel(folder: Path) -> Path:
    """Build our wheel into `folder`."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("flatshift-*.whl")
    return wheel


if __name__ == "__main__":
    raise SystemExit(main())
