"""What is here and what is missing."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flatshift.command_line import parse


@dataclass(frozen=True)
class Flags:
    """Environment, versions, devices, what is missing and how to get it."""

    deep: bool = False
    """Import torch as well and list its devices."""
    json: bool = False
    """Print as JSON."""


def run(argv: list[str]) -> int:
    """`flatshift doctor`."""
    flags: Flags = parse(Flags, "doctor", argv)
    from flatshift.experiments.workflows.doctor import doctor, render

    result = doctor(deep=flags.deep)
    print(json.dumps(result, indent=2, ensure_ascii=False) if flags.json else render(result))
    return 0 if result["ok"] else 1
