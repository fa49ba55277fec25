"""Power lost at any moment: the recorded order of writes replayed, and what was not synced dropped.

A machine that loses power keeps what was synced; of the rest, a file system may keep anything. Three kinds of them are
played for every prefix of a command's durable calls:

- *strict*: only bytes that a sync of their file covers, only names that a sync of their directory covers (POSIX);
- *journal*: all names, no byte that was not synced (a journalling file system with delayed allocation);
- *zeros*: all names and sizes, zeros where nothing was synced.

Each different disk that can come of it is given to the user of the command, who goes on (the same command once more, or
`train --resume`), and must end with the undisturbed bits.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._harness import Benchmark
from benchmarks.faults import durable_calls as durable
from benchmarks.faults.crash import Campaign, Strike, add_row, remove_disk
from benchmarks.faults.scenarios import SCENARIOS

KINDS = ("strict", "journal", "zeros")
ONE_PROCESS = tuple(name for name in SCENARIOS if "dp" not in name)


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


Folder = dict[str, "_File | Folder"]  # type: ignore[misc]


@dataclass
class Disk:
    """Names and bytes as the system holds them, and as the disk would after a power cut. Paths are relative."""

    now: Folder = field(default_factory=dict)
    synced: dict[int, dict[str, object]] = field(default_factory=dict)
    """Entries of each directory (by identity) when it was last synced."""

    def _at(self, path: Path) -> object:
        place: object = self.now
        for part in path.parts:
            assert isinstance(place, dict)
            place = place[part]
        return place

    def _folder(self, path: Path) -> dict[str, object]:
        result = self._at(path)
        assert isinstance(result, dict)
        return result

    def apply(self, call: durable.Call, root: Path) -> None:
        """Do what a recorded call did."""
        path = call.path.relative_to(root)
        parent = self._folder(path.parent)
        if call.kind == "mkdir":
            parent[path.name] = {}
        elif call.kind == "open":
            file = parent.setdefault(path.name, _File())
            assert isinstance(file, _File)
            if call.at:
                file.data.clear()
        elif call.kind in ("write", "truncate", "sync"):
            file = parent.get(path.name)
            if not isinstance(file, _File):
                return  # of a file that has lost its name
            if call.kind == "sync":
                file.durable = bytes(file.data)
            elif call.kind == "truncate":
                file.data[:] = file.data[: call.at].ljust(call.at, b"\0")
            else:
                file.data[:] = file.data.ljust(call.at, b"\0")
                file.data[call.at : call.at + len(call.data)] = call.data
        elif call.kind == "sync directory":
            folder = self._at(path)
            self.synced[id(folder)] = dict(folder)  # type: ignore[call-overload]
        elif call.kind in ("rename", "link"):
            assert call.other is not None
            to = call.other.relative_to(root)
            moved = parent[path.name] if call.kind == "link" else parent.pop(path.name)
            self._folder(to.parent)[to.name] = moved
        else:
            del parent[path.name]

    def after(self, kind: str) -> dict[str, bytes | None]:
        """What a disk of `kind` holds after a power cut: path → bytes, None for a directory."""
        return dict(self._walk(self.now, Path(), kind))

    def _walk(self, folder: dict[str, object], place: Path, kind: str) -> Iterator[tuple[str, bytes | None]]:
        entries = folder
        if kind == "strict":
            entries = self.synced.get(id(folder), {})
        for name, result in entries.items():
            if isinstance(result, dict):
                yield str(place / name), None
                yield from self._walk(result, place / name, kind)
            else:
                assert isinstance(result, _File)
                content = result.durable
                if kind == "zeros":
                    content = content[: len(result.data)].ljust(len(result.data), b"\0")
                yield str(place / name), content


def write_disk(files: dict[str, bytes | None], folder: Path) -> None:
    """Make the directory that `Disk.after` tells of."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True) if data is None else path.write_bytes(data)


def disks_of(calls: Sequence[durable.Call], root: Path) -> dict[str, tuple[str, int, dict[str, bytes | None]]]:
    """Every different disk that a power cut can leave: its digest → (kind, calls made before it, content)."""
    disk = Disk()
    results: dict[str, tuple[str, int, dict[str, bytes | None]]] = {}
    for count, call in enumerate(calls, start=1):
        disk.apply(call, root)
        for kind in KINDS:
            files = disk.after(kind)
            digest = hashlib.sha256()
            for name in sorted(files):
                data = files[name]
                digest.update(f"{name}\0{'-' if data is None else len(data)}\0".encode() + (data or b""))
            results.setdefault(digest.hexdigest(), (kind, count, files))
    return results


def check_replay(calls: Sequence[durable.Call], root: Path) -> None:
    """Raise RuntimeError unless the recorded calls make the directory that the command left: nothing is unseen."""
    disk = Disk()
    for call in calls:
        disk.apply(call, root)
    for path in root.rglob("*"):
        result = disk._at(path.relative_to(root))
        if path.is_file() and (not isinstance(result, _File) or bytes(result.data) != path.read_bytes()):
            raise RuntimeError(f"the record of durable calls does not make {path}: something writes unseen")


def rows(bench: Benchmark, *, most: int | None = None, seed: int = 0, only: Sequence[str] = ()) -> None:
    """A row a command: power cuts, and how many of them were not survived."""
    names = [name for name in ONE_PROCESS if not only or name in only]
    if reason := durable.missing():
        for name in names:
            add_row(bench, f"{name}: power cuts not survived", None, unit="cuts", reason=reason)
        return
    share = None if most is None else max(1, most // len(names))
    with Campaign() as campaign:
        for name in names:
            campaign.settle(name)
            root = campaign.disks[name]
            check_replay(campaign.calls[name], root)
            every = list(disks_of(campaign.calls[name], root).values())
            tries = every if share is None else random.Random(seed).sample(every, min(share, len(every)))

            def one(cut: tuple[str, int, dict[str, bytes | None]], name: str = name) -> Strike:
                kind, count, files = cut
                disk = campaign.new_disk()
                write_disk(files, disk)
                result = Strike(**campaign.ask("go_on", disk, name, wanted=campaign.wanted[name]))
                result.mode, result.target = f"power cut, {kind}", count
                if not result.wrong:
                    remove_disk(disk)
                return result

            result = campaign.each(tries, one)
            about = (
                f"power cuts not survived, of {len(tries):,} disks of {len(every):,} that a cut at any of "
                f"{len(campaign.calls[name]):,} durable calls can leave"
            )
            add_row(bench, f"{name}: {about}", result, unit="cuts")
