"""`flatshift doctor`: report what is installed and what is missing."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flatshift.command_line import parse


@dataclass(frozen=True)
class Flags:
    """Show the environment, versions and devices, and how to install what is missing."""

    deep: bool = False
    """Also import torch and list its devices."""
    json: bool = False
    """Print as JSON."""


def run(argv: list[str]) -> int:
    """Run `flatshift doctor`."""
    flags: Flags = parse(Flags, "doctor", argv)
    from flatshift.experiments.workflows.doctor import doctor, render

    result = doctor(deep=flags.deep)
    print(json.dumps(result, indent=2, ensure_ascii=False) if flags.json else render(result))
    return 0 if result["ok"] else 1
