"""Upload of a folder's files to an object store.

    upload(Path("run"), [["adapter/adapter_model.safetensors", ...], ["done.json"]], "s3://bucket/runs/first")

Files are sent in groups: each group is verified before the next starts, so that a file that marks completion is never
uploaded before the files it covers. `upload.json` is sent first and kept: bytes and SHA-256 of all files. With it an
interrupted upload resumes, and a different one is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from .remote import BLOCK, get_scheme, open_store, translate_store_errors, with_retries

RECORD = "upload.json"
_FORMAT, _VERSION = "flatshift upload", 1
_PART = 50 << 20
"""Bytes per part of S3's multipart uploads, in which an object's etag is computed from the digests of its parts."""
_DIGESTS = ("ETag", "etag", "md5Hash", "Content-MD5", "content_md5")
"""Keys under which stores report an MD5 of an object's content, or something that may be one."""
_NOT_WRITABLE = dict.fromkeys(("http", "https"), "https:// takes no uploads") | {
    "hf": "a hub is named ORGANISATION/NAME here"
}


class UploadResult(NamedTuple):
    """Number of files sent, their bytes, and number of files that already existed there."""

    sent: int
    bytes: int
    present: int


class _FileDigests(NamedTuple):
    bytes: int
    sha256: str
    marks: frozenset[str]
    """Values that stores may report for the content if they use an MD5."""


def upload_folder(
    folder: Path,
    groups: Sequence[Collection[str]],
    url: str,
    *,
    progress: Callable[[int], None] | None = None,
) -> UploadResult:
    """Upload the files of `folder`, given by relative names, group by group to `url`, and verify each there.

    A file that exists there with the same content is not sent again, unless the store reports no digest. An uploaded
    object for which the store reports no digest is read back. progress: called with the number of bytes done.
    Raises UserError: the location holds anything but a part of this upload, the store refuses access or does not
    answer, or an object differs after the upload.
    """
    url = url.rstrip("/")
    if (reason := _NOT_WRITABLE.get(get_scheme(url))) is not None:
        raise UserError(f"{url}: {reason}; name a place in a store, as s3://bucket/place")
    location = _StoreLocation(url)
    sums = {name: _digest_file(folder / name) for group in groups for name in group}
    before = location.objects()
    _write_upload_record(location, sums, before)
    sent = size = done = 0
    for group in groups:
        uploaded = set()
        for name in group:
            if name not in before or not _has_same_content(before[name], sums[name]):
                location.put(folder / name, name)
                uploaded.add(name)
            done += sums[name].bytes
            if progress is not None:
                progress(done)
        sent, size = sent + len(uploaded), size + sum(sums[name].bytes for name in uploaded)
        if uploaded:
            now = location.objects()
            for name in sorted(uploaded):
                location.compare(name, now.get(name), sums[name])
    return UploadResult(sent, size, len(sums) - sent)


class _StoreLocation:
    """Location in a store that files are uploaded to."""

    def __init__(self, url: str):
        self.url = url
        self.store, self.path = open_store(url)

    def objects(self) -> dict[str, Mapping[str, Any]]:
        """Return the store's metadata of each object there, by relative name."""
        with translate_store_errors(self.url, writes=True):
            entries = with_retries(self.url, lambda: self.store.find(self.path, detail=True))
        if self.path in entries:
            raise UserError(f"{self.url} is an object; name a place that can hold a folder")
        return {
            name.removeprefix(f"{self.path}/"): entry
            for name, entry in entries.items()
            if entry["type"] == "file" and not name.endswith("/")
        }

    def _request(self, name: str, request: Callable[[str], Any]) -> Any:
        """Return the result of `request` for the path of an object."""
        with translate_store_errors(f"{self.url}/{name}", writes=True):
            return with_retries(self.url, lambda: request(f"{self.path}/{name}"))

    def put(self, file: Path, name: str) -> None:
        """Upload a file."""
        options = {"chunksize": _PART} if get_scheme(self.url) in ("s3", "s3a") else {}
        self._request(name, lambda path: self.store.put_file(str(file), path, **options))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        self._request(name, lambda path: self.store.pipe_file(path, content))

    def read(self, name: str) -> bytes:
        """Read a small object."""
        content: bytes = self._request(name, self.store.cat_file)
        return content

    def digest(self, name: str) -> str:
        """Read an object back and return its SHA-256."""
        digest = hashlib.sha256()
        with (
            translate_store_errors(f"{self.url}/{name}", writes=True),
            self.store.open(f"{self.path}/{name}", "rb", block_size=BLOCK) as handle,
        ):
            while chunk := handle.read(BLOCK):
                digest.update(chunk)
        return digest.hexdigest()

    def compare(self, name: str, metadata: Mapping[str, Any] | None, sums: _FileDigests) -> None:
        """Raise UserError unless the uploaded object equals the file, by its digest or else its bytes."""
        if (
            metadata is None
            or metadata.get("size") != sums.bytes
            or not (_has_same_content(metadata, sums) or self.digest(name) == sums.sha256)
        ):
            raise UserError(f"{self.url}/{name} differs there from the file here; push it again")


def _write_upload_record(location: _StoreLocation, sums: Mapping[str, _FileDigests], before: Mapping[str, Any]) -> None:
    """Write the record of this upload to its location. Raises UserError if the location holds anything but a part of
    this upload."""
    files = {name: {"bytes": digests.bytes, "sha256": digests.sha256} for name, digests in sorted(sums.items())}
    record = {"format": _FORMAT, "version": _VERSION, "files": files}
    url = location.url
    if not before:
        location.write(RECORD, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
        return
    if RECORD not in before:
        raise UserError(f"{url} holds {min(before)}, which no upload left; name a place that is empty")
    try:
        stored = json.loads(location.read(RECORD))["files"]
        different = {name for name in files.keys() | stored.keys() if files.get(name) != stored.get(name)}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{url}/{RECORD} is no record of an upload; name another place") from None
    if different:
        raise UserError(
            f"{url} is the place of another upload ({min(different)} differs); name another place, or remove what is "
            "there"
        )
    if foreign := before.keys() - files.keys() - {RECORD}:
        raise UserError(f"{url} also holds {min(foreign)}, which is not of this folder; move it away")


def _digest_file(file: Path) -> _FileDigests:
    """Return size and digests of a file, in one pass."""
    sha256, whole, size, parts = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0, []
    with file.open("rb") as handle:
        while part := handle.read(_PART):
            sha256.update(part)
            whole.update(part)
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
            size += len(part)
    marks = {whole.hexdigest(), base64.b64encode(whole.digest()).decode()}
    of_parts = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return _FileDigests(size, sha256.hexdigest(), frozenset(marks | {f"{of_parts}-{len(parts)}"}))


def _has_same_content(metadata: Mapping[str, Any], sums: _FileDigests) -> bool:
    """Return True if the store's metadata confirms this content. Not every etag is an MD5, so a mismatch proves
    nothing."""
    marks = (metadata[key] for key in _DIGESTS if metadata.get(key))
    texts = (base64.b64encode(mark).decode() if isinstance(mark, bytes | bytearray) else str(mark) for mark in marks)
    return metadata.get("size") == sums.bytes and any(text.strip('"') in sums.marks for text in texts)
