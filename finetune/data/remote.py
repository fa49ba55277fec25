"""Objects in a store (`s3://`, `gs://`, `hf://`, `https://`, through fsspec), read like files.

    for file in find("s3://bucket/pool/*.jsonl.gz"):
        with file.open() as handle:
            ...

An object is read by ranges and never downloaded as a whole. Every later opening in this process must see the same
version as the first. Credentials and endpoints are those of the store's own client: its environment variables and
files.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import hashlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar

from ..errors import UserError, first_error_line

_T = TypeVar("_T")

BLOCK = 1 << 23
"""Bytes per request: small enough for memory, large enough to make the overhead of a request negligible."""
_WAITS = (0.5, 2.0, 5.0)
"""Seconds to wait before each retry of a request."""
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
    """Size in bytes, if the store reports it."""

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
        """Open the object for reading, block by block.

        Raises UserError, also during reading: it does not exist, is not readable, has changed since its first opening,
        or its store does not answer.
        """
        assert mode == "rb"
        store, path = open_store(self.url)
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
        store, path = open_store(self.url)
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
"""A local file or an object in a store."""


class _ObjectVersion(NamedTuple):
    mark: str | None
    """Value that changes with the content: the etag, else the modification time."""
    size: int | None
    fields: dict[str, str]


_VERSIONS: dict[str, _ObjectVersion] = {}
"""Version of each object at its first opening."""
_DIGESTS: dict[str, tuple[str, int]] = {}


def find_objects(name: str) -> tuple[list[RemoteFile], bool]:
    """Return the objects for an address, in the order of local files; and whether it is a directory.

    An address names an object, a pattern, or a directory, whose entries except directories are returned.
    Raises UserError: there is none (names the nearest), or the store refuses access or does not answer.
    """
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
    files = [
        RemoteFile(store.unstrip_protocol(entry["name"]), entry.get("size"))
        for entry in entries
        if entry["type"] == "file" and not entry["name"].endswith("/")
    ]
    files.sort(key=lambda file: file.url.split("/"))
    if metadata is None and not path.rpartition("/")[2].startswith("."):
        files = [file for file in files if not file.name.startswith(".")]  # * does not match hidden files
    if metadata is None and not files:
        raise UserError(f"{name}: no object matches this pattern")
    return files, metadata is not None


class _ObjectReader(io.RawIOBase):
    """Raw bytes of an open object, with errors converted to one sentence."""

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
    """Return the version fields that a store reports, under our names."""
    return {
        name: str(value).strip('"')
        for name, keys in _MARKS.items()
        if (value := next((metadata[key] for key in keys if metadata.get(key)), None)) is not None
    }


def _changed_error(url: str) -> UserError:
    return UserError(
        f"{url} changed since this command first read it; leave it alone while it is read, and start again"
    )


# ---------------------------------------------------------------------------------------------------- stores and errors


class _NotFound(UserError):
    """The object or bucket does not exist."""


def get_scheme(url: str) -> str:
    """Return the scheme of an address, such as `s3`."""
    return url.partition("://")[0].lower()


def _strip_query(url: str) -> str:
    """Return a web address without query and fragment."""
    return url.partition("?")[0].partition("#")[0]


def open_store(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address and the path in it. Raises UserError for one not supported on this
    machine."""
    kind = get_scheme(url)
    if kind not in SCHEMES:
        known = ", ".join(f"{known}://" for known in ("s3", "gs", "az", "hf", "https"))
        raise UserError(f"{url}: {kind}:// is no kind of store; known are {known}; copy it to this machine")
    try:
        import fsspec

        store = fsspec.filesystem(kind, use_listings_cache=False)
    except ImportError as error:
        package = _INSTALL.get(kind)
        install = f"pip install {package}" if package else first_error_line(error)
        raise UserError(f"{url}: reading {kind}:// needs another package: {install}") from error
    return store, store._strip_protocol(url)


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
    reason = first_error_line(chain[-1])
    if any("Credential" in kind or kind.startswith(("SSO", "Profile")) for kind in kinds):
        fix = _CREDENTIALS.get(get_scheme(url), "set those that its client reads")
        return UserError(f"{url}: no credentials for {get_scheme(url)}:// ({reason}); {fix}")
    if "FileExpired" in kinds:
        return _changed_error(url)
    if any(isinstance(cause, PermissionError) or getattr(cause, "status", None) in (401, 403) for cause in chain):
        may = "read and write there" if writes else "read"
        return UserError(f"{url}: the store refuses access ({reason}); check the credentials and what they may {may}")
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
    return f"; did you mean {store.unstrip_protocol(close[0])}?" if close else "; check the name"
