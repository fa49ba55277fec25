"""`flatshift push`: upload a folder of `export` or `merge` to a model hub, or any result to an object store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse_flags, print_result
from flatshift.experiments.run.console import Console
from flatshift.finetune.errors import UserError, is_remote


@dataclass(frozen=True)
class Flags:
    """Upload a finished folder, and compare the uploaded files afterwards.

    To a model hub: a folder made by `flatshift export` or `flatshift merge`, as one commit, to huggingface.co or the
    host in HF_ENDPOINT; log in with `hf auth login`. To an object store (s3://bucket/place): also a run, a selection, a
    sweep or a directory of feature shards; the same command continues an interrupted upload.
    """

    folder: Positional[Path]
    """Folder of a finished command."""
    destination: Positional[str]
    """ORGANISATION/NAME on the hub, created if needed; or an address, s3://bucket/place, that is still empty."""
    public: bool = False
    """Make a newly created hub repository public; by default it is private."""
    message: str | None = None
    """Commit message on the hub."""
    json: bool = False
    """Print the address and what was sent as JSON."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "push", argv)
    if is_remote(flags.destination):
        _push_to_store(flags)
    else:
        from flatshift.experiments.workflows.export import push_to_hub

        address = push_to_hub(flags.folder, flags.destination, public=flags.public, message=flags.message)
        print_result({"address": address}, address, as_json=flags.json)
    card = flags.folder / "README.md"
    if not flags.json and card.is_file() and "to fill in" in card.read_text(encoding="utf-8", errors="replace").lower():
        print("its card has places to fill in: licences of adapter, backbone and data")
    return 0


def _push_to_store(flags: Flags) -> None:
    if flags.public or flags.message is not None:
        flag = "--public" if flags.public else "--message"
        raise UserError(f"{flag} is of a hub, and {flags.destination} is a place in a store; leave it out")
    from flatshift.experiments.workflows.export import push_to_store

    with Console().task("upload, percent", 100) as bar:
        done = push_to_store(flags.folder, flags.destination, lambda sent, total: bar(100 * sent // max(total, 1)))
    already = f", {done.present:,} lay there" if done.present else ""
    text = f"{flags.destination}: {done.sent:,} files sent, {done.bytes:,} bytes{already}; all compared"
    print_result({"address": flags.destination, **done._asdict()}, text, as_json=flags.json)
