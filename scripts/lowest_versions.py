"""Print the lowest allowed version of each dependency in pyproject.toml as pip constraints; a CI job installs them.

python scripts/lowest_versions.py > lowest.txt && pip install -c lowest.txt -e ".[test]"
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def lowest_constraints(extras: tuple[str, ...] = ()) -> list[str]:
    """Return `name==version` for every dependency with a lower bound, of the core and of `extras`."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    hit = (re.match(r"([A-Za-z0-9._-]+)(?:\[.*\])?>=([0-9][^,;\s]*)", line) for line in lines)
    return [f"{match[1]}=={match[2]}" for match in hit if match is not None]


if __name__ == "__main__":
    print("\n".join(lowest_constraints()))
