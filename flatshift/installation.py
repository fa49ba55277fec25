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
from functools import cache
from pathlib import Path

NAMES = ("experiments", "finetune", "selection", "regularizers")
HOME = Path(__file__).resolve().parent.parent
"""The folder that holds our packages."""


@cache
def foreign(home: Path = HOME) -> str | None:
    """One sentence on a package of ours that is another's, with the way out; None where all are ours."""
    for name in NAMES:
        if name in sys.modules:  # an `import` has settled it
            place = getattr(sys.modules[name], "__file__", None)
        else:
            spec = importlib.machinery.PathFinder.find_spec(name)
            place = None if spec is None else spec.origin
        found = None if place is None else Path(place).resolve().parent
        if found != home / name and (found is not None or not (home / name).is_dir()):
            return (
                f"`import {name}` finds {place or 'nothing'} instead of {home / name}; uninstall or rename the other "
                "one, run from another folder, or give Flatshift an environment of its own"
            )
    if overwritten := _overwritten(home):
        name = overwritten.split("/")[0]
        return (
            f"another package was installed over {home / overwritten}; `pip uninstall {name}` and `pip install "
            "--force-reinstall --no-deps flatshift`, or give Flatshift an environment of its own"
        )
    return None


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
