"""`flatshift doctor`: report what is installed and what is missing, and find secrets in a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse_flags, print_json, print_result
from flatshift.finetune.errors import UserError
from flatshift.finetune.redaction import find_secrets


@dataclass(frozen=True)
class Flags:
    """Show the environment, versions and devices, and how to install what is missing. Given a directory, look for
    passwords and signatures of addresses in its records instead; exit code 1 if there are any."""

    directory: Positional[Path | None] = None
    """Run directory, or any folder of results."""
    deep: bool = False
    """Also import torch and list its devices."""
    json: bool = False
    """Print as JSON."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "doctor", argv)
    if flags.directory is not None:
        return _report_secrets(flags, flags.directory)
    from flatshift.experiments.workflows.doctor import diagnose, format_result

    result = diagnose(deep=flags.deep)
    print_result(result, format_result(result), as_json=flags.json)
    return 0 if result["ok"] else 1


def _report_secrets(flags: Flags, directory: Path) -> int:
    if flags.deep:
        raise UserError("--deep is of the installation; leave it out, or leave out the directory")
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; name a run, or leave it out to look at the installation")
    places = [f"{file}:{line}" for file, line in find_secrets(directory)]
    if flags.json:
        print_json({"ok": not places, "secrets": places})
    elif places:
        print(*places, sep="\n")
        print(
            "these lines hold a password or signature of an address: withdraw it where it was issued, then take it out"
        )
    else:
        print("no password or signature of an address is kept here")
    return 1 if places else 0
