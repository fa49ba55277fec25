"""`flatshift doctor`: report what is installed and what is missing."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flatshift.command_line import parse_flags


@dataclass(frozen=True)
class Flags:
    """Show the environment, versions and devices, and how to install what is missing."""

    deep: bool = False
    """Also import torch and list its devices."""
    json: bool = False
    """Print as JSON."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "doctor", argv)
    from flatshift.experiments.workflows.doctor import diagnose, format_result

    result = diagnose(deep=flags.deep)
    print(json.dumps(result, indent=2, ensure_ascii=False) if flags.json else format_result(result))
    return 0 if result["ok"] else 1
