"""Files of a folder, uploaded to a place in an object store.

    upload(Path("run"), [["adapter/adapter_model.safetensors", ...], ["done.json"]], "s3://bucket/runs/first")

Files go in groups, one after another: a group is compared before the next begins, so that what says "finished" never
lies above files that are not. `upload.json` goes first and stays: bytes and SHA-256 of all that belongs there. By it
the same upload goes on where it broke off, and another one is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .remote import BLOCK, open_store, scheme, translate_store_errors, with_retries

RECORD = "upload.json"
_FORMAT, _VERSION = "flatshift upload", 1
_PART = 50 << 20
"""Bytes of a part, where S3 is sent a large object in parts: its etag is of their digests."""
_DIGESTS = ("ETag", "etag", "md5Hash", "Content-MD5", "content_md5")
"""What stores call an MD5 of an object's content, or what may be one."""
_NOT_WRITTEN = {"http": "https:// takes no uploads", "https": "https:// takes no uploads"} | {
    "hf": "a hub is named ORGANISATION/NAME here"
}


@dataclass(frozen=True)
class Uploaded:
    """What an upload did: files and bytes that were sent, files that lay there already."""

    sent: int
    bytes: int
    there: int


@dataclass(frozen=True)
class _Sums:
    bytes: int
    sha256: str
    marks: frozenset[str]
    """What stores that digest an object by MD5 may say of it."""


def upload(
    folder: Path,
    groups: Sequence[Collection[str]],
    place: str,
    *,
    progress: Callable[[int], None] | None = None,
) -> Uploaded:
    """Bring the files of `folder`, by their names from there, group after group to `place`, and compare each there.

    What already lies there with the same content is not sent again; where the store tells no digest of it, it is. An
    object whose digest the store does not tell is read back. progress: called with the bytes that are done.
    Raises UserError: a place that holds anything but a part of this upload, a store that refuses or does not answer, an
    object that came to lie there otherwise.
    """
    place = place.rstrip("/")
    if (why := _NOT_WRITTEN.get(scheme(place))) is not None:
        raise UserError(f"{place}: {why}; name a place in a store, as s3://bucket/place")
    there = _Place(place)
    sums = {name: _sums(folder / name) for group in groups for name in group}
    before = there.objects()
    _claim(there, sums, before)
    sent = size = done = 0
    for group in groups:
        fresh = set()
        for name in group:
            if name not in before or not _is_same(before[name], sums[name]):
                there.put(folder / name, name)
                fresh.add(name)
            done += sums[name].bytes
            if progress is not None:
                progress(done)
        sent, size = sent + len(fresh), size + sum(sums[name].bytes for name in fresh)
        if fresh:
            now = there.objects()
            for name in sorted(fresh):
                there.compare(name, now.get(name), sums[name])
    return Uploaded(sent, size, len(sums) - sent)


class _Place:
    """A place in a store that objects are put to."""

    def __init__(self, url: str):
        self.url = url
        self.store, self.path = open_store(url)

    def objects(self) -> dict[str, Mapping[str, Any]]:
        """What the store says of each object there, by its name from there."""
        with translate_store_errors(self.url, writes=True):
            found = with_retries(self.url, lambda: self.store.find(self.path, detail=True))
        if self.path in found:
            raise UserError(f"{self.url} is an object; name a place that a folder can lie in")
        return {
            name.removeprefix(f"{self.path}/"): about
            for name, about in found.items()
            if about["type"] == "file" and not name.endswith("/")
        }

    def put(self, file: Path, name: str) -> None:
        """Send a file."""
        parts = {"chunksize": _PART} if scheme(self.url) in ("s3", "s3a") else {}
        with translate_store_errors(f"{self.url}/{name}", writes=True):
            with_retries(self.url, lambda: self.store.put_file(str(file), f"{self.path}/{name}", **parts))

    def write(self, name: str, content: bytes) -> None:
        """Make a small object."""
        with translate_store_errors(f"{self.url}/{name}", writes=True):
            with_retries(self.url, lambda: self.store.pipe_file(f"{self.path}/{name}", content))

    def read(self, name: str) -> bytes:
        """A small object's bytes."""
        with translate_store_errors(f"{self.url}/{name}", writes=True):
            content: bytes = with_retries(self.url, lambda: self.store.cat_file(f"{self.path}/{name}"))
        return content

    def digest(self, name: str) -> str:
        """SHA-256 of an object, read back."""
        digest = hashlib.sha256()
        with (
            translate_store_errors(f"{self.url}/{name}", writes=True),
            self.store.open(f"{self.path}/{name}", "rb", block_size=BLOCK) as handle,
        ):
            while chunk := handle.read(BLOCK):
                digest.update(chunk)
        return digest.hexdigest()

    def compare(self, name: str, about: Mapping[str, Any] | None, sums: _Sums) -> None:
        """Raise UserError unless the object that was just sent is the file, by its digest or else its bytes."""
        if (
            about is None
            or about.get("size") != sums.bytes
            or not (_is_same(about, sums) or self.digest(name) == sums.sha256)
        ):
            raise UserError(f"{self.url}/{name} came to lie there otherwise than it is here; push it again")


def _claim(place: _Place, sums: Mapping[str, _Sums], before: Mapping[str, Any]) -> None:
    """Leave the record of this upload at its place. Raises UserError where that holds more than a part of it."""
    files = {name: {"bytes": one.bytes, "sha256": one.sha256} for name, one in sorted(sums.items())}
    record = {"format": _FORMAT, "version": _VERSION, "files": files}
    if not before:
        place.write(RECORD, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
        return
    if RECORD not in before:
        raise UserError(f"{place.url} holds {min(before)}, which no upload left; name a place that is empty")
    try:
        theirs = json.loads(place.read(RECORD))
        other = {name for name in files.keys() | theirs["files"].keys() if files.get(name) != theirs["files"].get(name)}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{place.url}/{RECORD} is no record of an upload; name another place") from None
    if other:
        raise UserError(
            f"{place.url} is the place of another upload ({min(other)} differs); name another place, or remove what "
            "lies there"
        )
    if strange := before.keys() - files.keys() - {RECORD}:
        raise UserError(f"{place.url} also holds {min(strange)}, which is not of this folder; move it away")


def _sums(file: Path) -> _Sums:
    """Of a file, read once."""
    sha256, whole, size, parts = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0, []
    with file.open("rb") as handle:
        while part := handle.read(_PART):
            sha256.update(part)
            whole.update(part)
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
            size += len(part)
    told = {whole.hexdigest(), base64.b64encode(whole.digest()).decode()}
    of_parts = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return _Sums(size, sha256.hexdigest(), frozenset(told | {f"{of_parts}-{len(parts)}"}))


def _is_same(about: Mapping[str, Any], sums: _Sums) -> bool:
    """Whether the store says that an object has this content. Not every mark is an MD5, so another one says nothing."""
    said = (about[key] for key in _DIGESTS if about.get(key))
    texts = (base64.b64encode(one).decode() if isinstance(one, bytes | bytearray) else str(one) for one in said)
    return about.get("size") == sums.bytes and any(text.strip('"') in sums.marks for text in texts)
