"""`flatshift recipes`: list, show or copy the shipped recipes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from flatshift.command_line import parse_flags
from flatshift.experiments.recipe import shipped_recipe, shipped_recipes
from flatshift.finetune.atomic import write_text
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import exclusive_lock


@dataclass(frozen=True)
class Flags:
    """List, show or copy the shipped recipes."""

    action: Positional[Literal["list", "show", "copy"]]
    """Action to perform."""
    name: Positional[str | None] = None
    """Recipe to show or copy."""
    to: Positional[Path | None] = None
    """File to write (copy); by default NAME.yaml in the current directory."""
    json: bool = False
    """Print the list as JSON."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "recipes", argv)
    if flags.action == "list":
        summaries = {}
        for name, path in shipped_recipes().items():
            summaries[name] = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()
        if flags.json:
            print(json.dumps(summaries, indent=2, ensure_ascii=False))
        else:
            width = max(map(len, summaries))
            print("\n".join(f"{name.ljust(width)}  {summary}" for name, summary in summaries.items()))
        return 0
    if flags.name is None:
        raise UserError(f"recipes {flags.action} needs a NAME: {', '.join(shipped_recipes())}")
    text = shipped_recipe(flags.name).read_text(encoding="utf-8")
    if flags.action == "show":
        sys.stdout.write(text)
        return 0
    target = flags.to or Path(f"{flags.name}.yaml")
    with exclusive_lock(target, alternative="name another file"):
        if target.exists():
            raise UserError(f"{target} exists; name another file or remove it")
        write_text(target, text)
    print(target)
    return 0
