"""A folder of `export` or `merge`, uploaded to a model hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse


@dataclass(frozen=True)
class Flags:
    """Upload a folder that `flatshift export` or `flatshift merge` made to a model hub, as one commit, and compare what
    lies there afterwards. The hub is huggingface.co, or what HF_ENDPOINT names; log in with `hf auth login`."""

    folder: Positional[Path]
    """Folder of `export` or `merge`."""
    repository: Positional[str]
    """ORGANISATION/NAME, made if need be."""
    public: bool = False
    """Let everybody see a repository that is made here; by default it is private."""
    message: str | None = None
    """Of the commit."""


def run(argv: list[str]) -> int:
    """`flatshift push`."""
    flags: Flags = parse(Flags, "push", argv)
    from experiments.workflows.export import push

    card = flags.folder / "README.md"
    print(push(flags.folder, flags.repository, public=flags.public, message=flags.message))
    if "to fill in" in card.read_text(encoding="utf-8").lower():
        print("its card has places to fill in: licences of adapter, backbone and data")
    return 0
