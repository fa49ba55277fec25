"""Objects of a store (`s3://`, `gs://`, `hf://`, `https://`: what fsspec knows), read as files are.

    for file in find("s3://bucket/pool/*.jsonl.gz"):
        with file.open() as handle:
            ...

An object is read by ranges, never fetched whole first. What its first opening in this process saw is what every later
one must see. Credentials and endpoints are those of the store's own client: its variables and files.
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

from ..errors import UserError, first_line

_T = TypeVar("_T")

BLOCK = 1 << 23
"""Bytes of one request: few enough to hold, many enough that a request costs little beside what is read by it."""
_WAITS = (0.5, 2.0, 5.0)
"""Seconds before a request is made again."""
_ASKS_ONCE = ("http", "https")
"""Where fsspec makes a request once; the clients of the other stores wait and ask again themselves."""
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
"""Kinds of stores; fsspec knows others, whose clients want more than an address, or list and read in ways of their own.
`memory` is of this process alone."""
_MARKS = {
    "etag": ("ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "content_md5"),
    "version_id": ("VersionId", "generation", "version_id"),
    "modified": ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created"),
}
"""What stores call what they tell of an object's version."""


@dataclass(frozen=True)
class RemoteFile:
    """An object of a store, with what a reader asks of a `Path`."""

    url: str
    size: int | None = field(default=None, compare=False)
    """Bytes, where the store tells."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return (_page(self.url) if scheme(self.url) in _ASKS_ONCE else self.url).rpartition("/")[2]

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.name).suffixes

    def is_file(self) -> bool:
        return True

    def open(self, mode: str = "rb") -> BinaryIO:
        """Its bytes, requested block by block.

        Raises UserError, also while it is read: it is not there, may not be read, is not the object of the first
        opening, or its store does not answer.
        """
        assert mode == "rb"
        store, path = open_store(self.url)
        with translate_store_errors(self.url):
            handle = with_retries(self.url, lambda: store.open(path, "rb", block_size=BLOCK, cache_type="none"))
            about = getattr(handle, "details", None) or {}
            if not _marks(about):  # a client that asked for no more than the size, or nothing
                about = with_retries(self.url, lambda: store.info(path))
        _same(self.url, about)
        return io.BufferedReader(_Blocks(self.url, handle), BLOCK)

    def digest(self) -> tuple[str, int]:
        """SHA-256 and bytes; read once in a process where the store tells of versions."""
        store, path = open_store(self.url)
        with translate_store_errors(self.url):
            mark = _same(self.url, with_retries(self.url, lambda: store.info(path)))
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
        """`etag`, `version_id` and `modified` of the first opening, those that the store tells."""
        return _SEEN[self.url].told


DataFile = Path | RemoteFile
"""A file of this machine or of a store."""


class _Seen(NamedTuple):
    mark: str | None
    """What another content has another of: the etag, else when it was made."""
    size: int | None
    told: dict[str, str]


_SEEN: dict[str, _Seen] = {}
"""What the store told of each object when it was first opened."""
_DIGESTS: dict[str, tuple[str, int]] = {}


def find(name: str) -> tuple[list[RemoteFile], bool]:
    """The objects that an address names, in the order that local ones have; and whether it names a directory.

    An address is that of an object, a pattern, or a directory, of which all entries but directories are given.
    Raises UserError: there is none (with the nearest), or the store refuses or does not answer.
    """
    store, path = open_store(name)
    pattern = glob.has_magic(_page(name) if scheme(name) in _ASKS_ONCE else name)
    try:
        with translate_store_errors(name):
            about = with_retries(name, lambda: store.info(path))
    except _NotThere as error:
        if not pattern:
            raise UserError(str(error) + _nearest(store, name, path)) from error.__cause__
        about = None
    if about is not None and about["type"] != "directory":
        return [RemoteFile(name, about.get("size"))], False
    with translate_store_errors(name):
        if about is None:
            found = with_retries(name, lambda: store.glob(path, detail=True)).values()
        else:
            found = with_retries(name, lambda: store.ls(path, detail=True))
    files = _in_order(store, found)
    if about is None and not path.rpartition("/")[2].startswith("."):
        files = [file for file in files if not file.name.startswith(".")]  # a star means no hidden ones
    if about is None and not files:
        raise UserError(f"{name}: no object matches this pattern")
    return files, about is not None


def _in_order(store: Any, found: Iterable[Mapping[str, Any]]) -> list[RemoteFile]:
    files = [
        RemoteFile(store.unstrip_protocol(about["name"]), about.get("size"))
        for about in found
        if about["type"] == "file" and not about["name"].endswith("/")
    ]
    return sorted(files, key=lambda file: file.url.split("/"))


class _Blocks(io.RawIOBase):
    """The bytes of an open object; what goes wrong is told in one sentence."""

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
            data = with_retries(self._url, lambda: self._part(len(buffer)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _part(self, size: int) -> bytes:
        self._handle.seek(self._at)  # also after a request that failed, and where a store shares its handles
        data = bytes(self._handle.read(size))
        there = getattr(self._handle, "size", None)
        if there is not None and len(data) < min(size, there - self._at):  # else one would ask for the rest for ever
            raise UserError(
                f"{self._url}: the store gives {self._at + len(data):,} bytes of the {there:,} that it says there are; "
                "fetch it to this machine, or see to the server"
            )
        return data

    def close(self) -> None:
        if not self.closed:
            self._handle.close()
        super().close()


def _same(url: str, about: Mapping[str, Any]) -> str | None:
    """The mark of an object. Raises UserError for one that is not as it was at its first opening."""
    said = _marks(about)
    now = _Seen(said.get("etag") or said.get("modified"), about.get("size"), said)
    first = _SEEN.setdefault(url, now)
    if (first.mark, first.size) != (now.mark, now.size):
        raise _changed(url)
    return now.mark


def _marks(about: Mapping[str, Any]) -> dict[str, str]:
    """What a store tells of an object's version, by our names."""
    return {
        name: str(value).strip('"')
        for name, keys in _MARKS.items()
        if (value := next((about[key] for key in keys if about.get(key)), None)) is not None
    }


def _changed(url: str) -> UserError:
    return UserError(
        f"{url} changed since this command first read it; leave it alone while it is read, and start again"
    )


# -------------------------------------------------------------------------------------------------- stores and refusals


class _NotThere(UserError):
    """No such object or bucket."""


def scheme(url: str) -> str:
    """The kind of store of an address: `s3`."""
    return url.partition("://")[0].lower()


def _known() -> str:
    return ", ".join(f"{kind}://" for kind in ("s3", "gs", "az", "hf", "https"))


def _page(url: str) -> str:
    """An address of the web without what follows its path."""
    return url.partition("?")[0].partition("#")[0]


def open_store(url: str) -> tuple[Any, str]:
    """The fsspec file system of an address and the path in it. Raises UserError for one that this machine lacks."""
    kind = scheme(url)
    if kind not in SCHEMES:
        raise UserError(f"{url}: {kind}:// is no kind of store; known are {_known()}; copy it to this machine")
    try:
        import fsspec

        store = fsspec.filesystem(kind, use_listings_cache=False)
    except ImportError as error:
        package = _INSTALL.get(kind)
        install = f"pip install {package}" if package else first_line(error)
        raise UserError(f"{url}: reading {kind}:// needs another package: {install}") from error
    return store, store._strip_protocol(url)


def with_retries(url: str, ask: Callable[[], _T]) -> _T:
    """What `ask` gives, asked again after waits where the store's client does not do so itself."""
    for wait in _WAITS if scheme(url) in _ASKS_ONCE else ():
        try:
            return ask()
        except Exception as error:
            if not _silent(_chain(error)):
                raise
            time.sleep(wait)
    return ask()


@contextlib.contextmanager
def translate_store_errors(url: str, *, writes: bool = False) -> Iterator[None]:
    """Turn what the clients of stores raise, each in kinds of its own, into one sentence."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise _refusal(url, error, writes) from error


def _refusal(url: str, error: Exception, writes: bool) -> UserError:
    chain = _chain(error)
    kinds = [type(one).__name__ for one in chain]
    said = first_line(chain[-1])
    place = scheme(url) + "://"
    if any("Credential" in kind or kind.startswith(("SSO", "Profile")) for kind in kinds):
        fix = _CREDENTIALS.get(scheme(url), "set those that its client reads")
        return UserError(f"{url}: no credentials for {place} ({said}); {fix}")
    if "FileExpired" in kinds:
        return _changed(url)
    if any(isinstance(one, PermissionError) or getattr(one, "status", None) in (401, 403) for one in chain):
        may = "read and write there" if writes else "read"
        return UserError(f"{url}: the store refuses access ({said}); check the credentials and what they may {may}")
    if _silent(chain):
        return UserError(f"{url}: the store does not answer ({said}); check the address and the network, start again")
    if "range requests" in said:
        return UserError(f"{url}: the server gives no parts of an object; copy it to this machine first")
    if isinstance(error, FileNotFoundError):
        bucket = "bucket" in str(error).lower()
        return _NotThere(f"{url}: {'no such bucket' if bucket else 'no such object'}")
    return UserError(f"{url}: cannot be {'written to' if writes else 'read from'} the store ({said})")


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it came from, the first cause last."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    return chain


def _silent(chain: Iterable[BaseException]) -> bool:
    """Whether no answer came, or one of a server in trouble: what may pass."""
    return any(
        isinstance(one, ConnectionError | TimeoutError)
        or any(word in type(one).__name__ for word in ("Connect", "Timeout", "Payload", "IncompleteRead"))
        or (getattr(one, "status", None) or 0) in (429, 500, 502, 503, 504)
        for one in chain
    )


def _nearest(store: Any, name: str, path: str) -> str:
    """The nearest name beside one that is not there, as the end of a sentence; "" where the store lists none."""
    parent = path.rstrip("/").rpartition("/")[0]
    try:
        names = [str(about["name"]).rstrip("/") for about in store.ls(parent, detail=True)]
    except Exception:  # it may not be listed: then there is no more to say
        return "; check the name"
    close = difflib.get_close_matches(path.rstrip("/"), names, n=1, cutoff=0.5)
    return f"; did you mean {store.unstrip_protocol(close[0])}?" if close else "; check the name"
