"""Objects in a store (`s3://`, `gs://`, `hf://`, `https://`, through fsspec), read like files; upload of a folder.

    for file in find_objects("s3://bucket/pool/*.jsonl.gz")[0]:
        with file.open() as handle:
            ...
    upload_folder(Path("run"), [["adapter/adapter_model.safetensors", ...], ["done.json"]], "s3://bucket/runs/first")

An object is read by ranges and never downloaded as a whole. Every later opening in this process must see the same
version as the first. Credentials and endpoints are those of the store's own client: its environment variables and
files; the password or signature of an address is used to open it, and appears nowhere else.

Files are uploaded in groups: each group is verified before the next starts, so that a file that marks completion is
never uploaded before the files it covers. `upload.json` is sent first and stays there: bytes and SHA-256 of all files.
With it an interrupted upload resumes, and a different one is refused.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import glob
import hashlib
import io
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar

from ..errors import UserError, first_error_line
from ..redaction import hide_secrets, redact_urls, reveal_secrets

_T = TypeVar("_T")

BLOCK = 1 << 23
"""Bytes per request: small enough for memory, large enough to make the overhead of a request negligible."""
_WAITS = (0.5, 2.0, 5.0)
_ASKS_ONCE = ("http", "https")
"""Schemes for which fsspec does not retry; the clients of the other stores retry themselves."""
_INSTALL = {
    **dict.fromkeys(("s3", "s3a", "http", "https"), "'flatshift[remote]'"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
}
_CREDENTIALS = {
    **dict.fromkeys(
        ("s3", "s3a"),
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=true for a public bucket",
    ),
    **dict.fromkeys(("gs", "gcs"), "run `gcloud auth application-default login`, or set FSSPEC_GS_TOKEN"),
    "hf": "set HF_TOKEN, or run `hf auth login`",
    **dict.fromkeys(
        ("http", "https"),
        "no run keeps a password or signature: give the address with it again, or headers by FSSPEC_HTTP",
    ),
}
SCHEMES = frozenset((*_INSTALL, *_CREDENTIALS, "memory"))
"""Supported kinds of stores. Clients of other fsspec stores need more than an address, or list and read differently.
`memory` exists only within this process."""
_MARKS = {
    "etag": ("ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "content_md5"),
    "version_id": ("VersionId", "generation", "version_id"),
    "modified": ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created"),
}
"""Keys under which stores report the version of an object."""


@dataclass(frozen=True)
class RemoteFile:
    """Object in a store, with the parts of the `Path` interface that readers use."""

    url: str
    size: int | None = field(default=None, compare=False)
    secret_url: str = field(default="", compare=False, repr=False)
    """Address to open, where a listing gave it with secrets."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return (_strip_query(self.url) if get_scheme(self.url) in _ASKS_ONCE else self.url).rpartition("/")[2]

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.name).suffixes

    def is_file(self) -> bool:
        return True

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the object for reading, block by block. Raises UserError, also during reading: it does not exist, is not
        readable, has changed since its first opening, or its store does not answer."""
        assert mode == "rb"
        store, path = open_store(self.secret_url or self.url)
        with translate_store_errors(self.url):
            # No fsspec cache: the BufferedReader below already requests whole blocks.
            handle = with_retries(self.url, lambda: store.open(path, "rb", block_size=BLOCK, cache_type="none"))
            metadata = getattr(handle, "details", None) or {}
            if not _read_version_fields(metadata):  # some clients fetch only the size, or nothing
                metadata = with_retries(self.url, lambda: store.info(path))
        _check_unchanged(self.url, metadata)
        return io.BufferedReader(_ObjectReader(self.url, handle), BLOCK)

    def digest(self) -> tuple[str, int]:
        """Return SHA-256 and bytes; read only once per process if the store reports versions."""
        store, path = open_store(self.secret_url or self.url)
        with translate_store_errors(self.url):
            mark = _check_unchanged(self.url, with_retries(self.url, lambda: store.info(path)))
        if mark is not None and self.url in _DIGESTS:
            return _DIGESTS[self.url]
        digest, size = hashlib.sha256(), 0
        with self.open() as handle:
            while chunk := handle.read(BLOCK):
                digest.update(chunk)
                size += len(chunk)
        _DIGESTS[self.url] = digest.hexdigest(), size
        return _DIGESTS[self.url]

    @property
    def version(self) -> dict[str, str]:
        """`etag`, `version_id` and `modified` at the first opening, as far as the store reports them."""
        return _VERSIONS[self.url].fields


DataFile = Path | RemoteFile


class _ObjectVersion(NamedTuple):
    mark: str | None
    """Value that changes with the content: the etag, else the modification time."""
    size: int | None
    fields: dict[str, str]


_VERSIONS: dict[str, _ObjectVersion] = {}
_DIGESTS: dict[str, tuple[str, int]] = {}


def find_objects(name: str) -> tuple[list[RemoteFile], bool]:
    """Return the objects for an address, in the order of local files; and whether it is a directory.

    An address names an object, a pattern, or a directory, whose entries except directories are returned.
    Raises UserError: there is none (names the nearest), or the store refuses access or does not answer.
    """
    name = hide_secrets(name)
    store, path = open_store(name)
    pattern = glob.has_magic(_strip_query(name) if get_scheme(name) in _ASKS_ONCE else name)
    try:
        with translate_store_errors(name):
            metadata = with_retries(name, lambda: store.info(path))
    except _NotFound as error:
        if not pattern:
            raise UserError(str(error) + _suggest_nearest(store, name, path)) from error.__cause__
        metadata = None
    if metadata is not None and metadata["type"] != "directory":
        return [RemoteFile(name, metadata.get("size"))], False
    with translate_store_errors(name):
        if metadata is None:
            entries = with_retries(name, lambda: store.glob(path, detail=True)).values()
        else:
            entries = with_retries(name, lambda: store.ls(path, detail=True))
    urls = [
        (_add_scheme(entry["name"], name), entry.get("size"))
        for entry in entries
        if entry["type"] == "file" and not entry["name"].endswith("/")
    ]
    files = [RemoteFile(redact_urls(url), size, url) for url, size in urls]
    files.sort(key=lambda file: file.url.split("/"))
    if metadata is None and not path.rpartition("/")[2].startswith("."):
        files = [file for file in files if not file.name.startswith(".")]  # * does not match hidden files
    if metadata is None and not files:
        raise UserError(f"{name}: no object matches this pattern")
    return files, metadata is not None


def _add_scheme(path: str, url: str) -> str:
    """Return the address of a path in the store of `url`, by the same of its schemes."""
    return path if "://" in path else f"{get_scheme(url)}://{path}"


class _ObjectReader(io.RawIOBase):
    def __init__(self, url: str, handle: Any) -> None:
        self._url, self._handle, self._at = url, handle, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            offset, whence = offset + self._at, io.SEEK_SET
        self._at = self._handle.seek(offset, whence)
        return self._at

    def readinto(self, buffer: Any) -> int:
        with translate_store_errors(self._url):
            data = with_retries(self._url, lambda: self._read_block(len(buffer)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read_block(self, size: int) -> bytes:
        self._handle.seek(self._at)  # the position is undefined after a failed request or if the store shares handles
        data = bytes(self._handle.read(size))
        total = getattr(self._handle, "size", None)
        # A short read that is not the end would make the reader request the rest forever.
        if total is not None and len(data) < min(size, total - self._at):
            raise UserError(
                f"{self._url}: the store gives {self._at + len(data):,} bytes of the {total:,} that it says there are; "
                "fetch it to this machine, or see to the server"
            )
        return data

    def close(self) -> None:
        if not self.closed:
            self._handle.close()
        super().close()


def _check_unchanged(url: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the version mark of an object. Raises UserError if it has changed since its first opening."""
    fields = _read_version_fields(metadata)
    now = _ObjectVersion(fields.get("etag") or fields.get("modified"), metadata.get("size"), fields)
    first = _VERSIONS.setdefault(url, now)
    if first[:2] != now[:2]:
        raise _changed_error(url)
    return now.mark


def _read_version_fields(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: str(value).strip('"')
        for name, keys in _MARKS.items()
        if (value := next((metadata[key] for key in keys if metadata.get(key)), None)) is not None
    }


def _changed_error(url: str) -> UserError:
    return UserError(
        f"{url} changed since this command first read it; leave it alone while it is read, and start again"
    )


class _NotFound(UserError):
    """The object or bucket does not exist."""


def get_scheme(url: str) -> str:
    """Return the scheme of an address, such as `s3`."""
    return url.partition("://")[0].lower()


def _strip_query(url: str) -> str:
    return url.partition("?")[0].partition("#")[0]


def open_store(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address and the path in it. Raises UserError for one not supported on this
    machine, or with a user and password that its store takes elsewhere."""
    secret, url = reveal_secrets(url), redact_urls(url)
    kind = get_scheme(url)
    if kind not in SCHEMES:
        known = ", ".join(f"{known}://" for known in ("s3", "gs", "az", "hf", "https"))
        raise UserError(f"{url}: {kind}:// is no kind of store; known are {known}; copy it to this machine")
    if "@" in secret.split("/", 3)[2] and "@" not in url.split("/", 3)[2] and kind not in _ASKS_ONCE:
        fix = _CREDENTIALS.get(kind, "set those that its client reads")
        raise UserError(f"{url}: {kind}:// takes no user and password in an address; {fix}")
    try:
        import fsspec

        store = fsspec.filesystem(kind, use_listings_cache=False)
    except ImportError as error:
        package = _INSTALL.get(kind)
        install = f"pip install {package}" if package else first_error_line(error)
        raise UserError(f"{url}: reading {kind}:// needs another package: {install}") from error
    return store, store._strip_protocol(secret)


def with_retries(url: str, request: Callable[[], _T]) -> _T:
    """Return the result of `request`, with retries if the store's client has none of its own."""
    for wait in _WAITS if get_scheme(url) in _ASKS_ONCE else ():
        try:
            return request()
        except Exception as error:
            if not _is_transient(_list_causes(error)):
                raise
            time.sleep(wait)
    return request()


@contextlib.contextmanager
def translate_store_errors(url: str, *, writes: bool = False) -> Iterator[None]:
    """Convert the many exception types of store clients into one sentence."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise _build_store_error(url, error, writes) from error


def _build_store_error(url: str, error: Exception, writes: bool) -> UserError:
    chain = _list_causes(error)
    kinds = [type(cause).__name__ for cause in chain]
    reason = redact_urls(first_error_line(chain[-1]))
    if any("Credential" in kind or kind.startswith(("SSO", "Profile")) for kind in kinds):
        fix = _CREDENTIALS.get(get_scheme(url), "set those that its client reads")
        return UserError(f"{url}: no credentials for {get_scheme(url)}:// ({reason}); {fix}")
    if "FileExpired" in kinds:
        return _changed_error(url)
    if any(isinstance(cause, PermissionError) or getattr(cause, "status", None) in (401, 403) for cause in chain):
        may = "read and write there" if writes else "read"
        fix = (
            _CREDENTIALS.get(get_scheme(url), "check the credentials")
            if get_scheme(url) in _ASKS_ONCE
            else (f"check the credentials and what they may {may}")
        )
        return UserError(f"{url}: the store refuses access ({reason}); {fix}")
    if _is_transient(chain):
        return UserError(f"{url}: the store does not answer ({reason}); check the address and the network, start again")
    if "range requests" in reason:
        return UserError(f"{url}: the server gives no parts of an object; copy it to this machine first")
    if isinstance(error, FileNotFoundError):
        bucket = "bucket" in str(error).lower()
        return _NotFound(f"{url}: {'no such bucket' if bucket else 'no such object'}")
    return UserError(f"{url}: cannot be {'written to' if writes else 'read from'} the store ({reason})")


def _list_causes(error: BaseException) -> list[BaseException]:
    """Return an error and its causes; the root cause is last."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    return chain


def _is_transient(chain: Iterable[BaseException]) -> bool:
    """Return True for errors that may be transient: no answer, or one from an overloaded or failing server."""
    return any(
        isinstance(cause, ConnectionError | TimeoutError)
        or any(word in type(cause).__name__ for word in ("Connect", "Timeout", "Payload", "IncompleteRead"))
        or (getattr(cause, "status", None) or 0) in (429, 500, 502, 503, 504)
        for cause in chain
    )


def _suggest_nearest(store: Any, name: str, path: str) -> str:
    """Return a hint with the nearest existing name, as the end of a sentence; a general one if the store cannot
    list."""
    parent = path.rstrip("/").rpartition("/")[0]
    try:
        names = [str(entry["name"]).rstrip("/") for entry in store.ls(parent, detail=True)]
    except Exception:  # listing may be forbidden
        return "; check the name"
    close = difflib.get_close_matches(path.rstrip("/"), names, n=1, cutoff=0.5)
    return f"; did you mean {redact_urls(_add_scheme(close[0], name))}?" if close else "; check the name"


UPLOAD_RECORD = "upload.json"
_FORMAT, _VERSION = "flatshift upload", 1
_PART = 50 << 20
"""Bytes per part of S3's multipart uploads, in which an object's etag is computed from the digests of its parts."""
_DIGEST_KEYS = ("ETag", "etag", "md5Hash", "Content-MD5", "content_md5")
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
    folder: Path, groups: Sequence[Collection[str]], url: str, *, progress: Callable[[int], None] | None = None
) -> UploadResult:
    """Upload the files of `folder`, given by relative names, group by group to `url`, and verify each there.

    A file that exists there with the same content is not sent again, unless the store reports no digest. An uploaded
    object for which the store reports no digest is read back. progress: called with the number of bytes done.
    Raises UserError: the location holds anything but a part of this upload, the store refuses access or does not
    answer, or an object differs after the upload.
    """
    url = hide_secrets(url.rstrip("/"))
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
        location.write(UPLOAD_RECORD, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
        return
    if UPLOAD_RECORD not in before:
        raise UserError(f"{url} holds {min(before)}, which no upload left; name a place that is empty")
    try:
        stored = json.loads(location.read(UPLOAD_RECORD))["files"]
        different = {name for name in files.keys() | stored.keys() if files.get(name) != stored.get(name)}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{url}/{UPLOAD_RECORD} is no record of an upload; name another place") from None
    if different:
        raise UserError(
            f"{url} is the place of another upload ({min(different)} differs); name another place, or remove what is "
            "there"
        )
    if foreign := before.keys() - files.keys() - {UPLOAD_RECORD}:
        raise UserError(f"{url} also holds {min(foreign)}, which is not of this folder; move it away")


def _digest_file(file: Path) -> _FileDigests:
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
    marks = (metadata[key] for key in _DIGEST_KEYS if metadata.get(key))
    texts = (base64.b64encode(mark).decode() if isinstance(mark, bytes | bytearray) else str(mark) for mark in marks)
    return metadata.get("size") == sums.bytes and any(text.strip('"') in sums.marks for text in texts)
