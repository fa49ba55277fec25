"""Whether the packages that Python imports under our names are ours: others on PyPI carry some of these names.

`finetune` 0.10.0, for one, installs a `finetune/__init__.py`, `config.py` and `errors.py` of its own over ours. Asked
before anything of ours is imported; needs nothing but the standard library.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

NAMES = ("experiments", "finetune", "selection", "regularizers")
HOME = Path(__file__).resolve().parent.parent
"""The folder that holds our packages."""
Findings = list[dict[str, str]]
_APART = "uninstall or rename the other one, run from another folder, or give Flatshift an environment of its own"


@cache
def foreign(home: Path = HOME) -> str | None:
    """One sentence on a package of ours that is another's, with the way out; None where all are ours."""
    for name in NAMES:
        if name in sys.modules:  # an `import` has settled it
            file = getattr(sys.modules[name], "__file__", None)
            found = None if file is None else _module(Path(file))
        else:
            found = _taken(name)
        if found != home / name and (found is not None or not (home / name).is_dir()):
            return f"{_instead(name, found, home)}; {_APART}"
    problem = _written_over(home)
    return None if problem is None else f"{problem['what']}; {problem['fix']}"


def shadows(
    home: Path = HOME,
    path: Iterable[str] | None = None,
    names: Iterable[str] = ("flatshift", *NAMES),
    owners: Mapping[str, list[str]] | None = None,
) -> tuple[Findings, Findings]:
    """(problems, notes), each `{"what", "fix"}`, on modules of other origin that carry one of our import names.

    One that Python takes instead of ours, or that was installed over ours, is a problem; one that ours hides is a note.

    home: the folder that holds our packages. path: where Python looks (default: `sys.path`). owners: import name → the
    distributions that installed it (default: what `importlib.metadata` knows).
    """
    owners = importlib.metadata.packages_distributions() if owners is None else owners
    entries = list(dict.fromkeys(str(Path(entry or ".").resolve()) for entry in (sys.path if path is None else path)))
    problems, notes = [], []
    for name in names:
        others = " ".join(sorted({owner for owner in owners.get(name, []) if owner.lower() != "flatshift"}))
        taken = _taken(name, entries)
        if taken is not None and taken != home / name:
            by = f" (installed by {others})" if others else ""
            fix = f"pip uninstall {others}, or keep the two in separate environments" if others else _APART
            problems.append({"what": f"{_instead(name, taken, home)}{by}", "fix": fix})
        for entry in entries:
            if (found := _taken(name, [entry])) not in (None, taken, home / name):
                notes.append({"what": f"{found} has the name of our package {name!r} and is hidden by it", "fix": ""})
        if others and "flatshift" in owners.get(name, []):
            what = f"`{name}` was installed by {others} as well as by flatshift, one over the other"
            problems.append({"what": what, "fix": f"pip uninstall {others}; pip install --force-reinstall flatshift"})
    if not problems and (written := _written_over(home)) is not None:
        problems.append(written)
    return problems, notes


def _taken(name: str, path: Sequence[str] | None = None) -> Path | None:
    """The package folder or module file that `import` takes from `path`; None for nothing, and for a folder without any
    module, which only holds data."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None:
        return None
    if spec.origin is not None:
        return _module(Path(spec.origin))
    folders = [Path(folder).resolve() for folder in spec.submodule_search_locations or ()]
    return next((folder for folder in folders if any(folder.glob("*.py"))), None)


def _module(file: Path) -> Path:
    file = file.resolve()
    return file.parent if file.stem == "__init__" else file


def _instead(name: str, found: Path | None, home: Path) -> str:
    return f"`import {name}` finds {found or 'nothing'} instead of {home / name}"


def _written_over(home: Path) -> dict[str, str] | None:
    """The problem of a package of ours that another was installed over."""
    if (overwritten := _overwritten(home)) is None:
        return None
    return {
        "what": f"another package was installed over {home / overwritten}",
        "fix": f"`pip uninstall {overwritten.split('/')[0]}` and `pip install --force-reinstall --no-deps flatshift`, "
        "or give Flatshift an environment of its own",
    }


def _overwritten(home: Path) -> str | None:
    """The first module right in our packages whose bytes are not those that were installed; None in a source tree."""
    about = next(home.glob("flatshift-*.dist-info"), None)
    for file in () if about is None else importlib.metadata.Distribution.at(about).files or ():
        if len(file.parts) != 2 or file.parts[0] not in NAMES or file.suffix != ".py" or file.hash is None:
            continue
        try:
            held = hashlib.new(file.hash.mode, (home / file).read_bytes()).digest()
        except (OSError, ValueError):
            return str(file)
        if base64.urlsafe_b64encode(held).rstrip(b"=").decode() != file.hash.value:
            return str(file)
    return None
