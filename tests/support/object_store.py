"""Object stores: on localhost moto's standalone server in a process of its own, spoken to as S3 is; in memory stand-ins
of the clients gcsfs and adlfs."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from tests.support.patience import HANG_S

Put = Callable[[dict[str, bytes]], str]
"""Puts objects, by name, into one place, and says its address."""


@dataclass
class ObjectStore:
    """A server that runs."""

    endpoint: str
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """What a client has to know; it finds none of this machine's own accounts."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self) -> Any:
        """fsspec's own, for those who have the environment."""
        return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)

    def stop(self) -> None:
        """As a store that is gone: what was there is lost."""
        self.process.kill()
        self.process.wait()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store = ObjectStore(f"http://127.0.0.1:{port}", process)
    try:
        until = time.monotonic() + HANG_S
        while not _answers(store.endpoint):
            assert process.poll() is None and time.monotonic() < until, "the object store does not start"
            time.sleep(0.1)
        yield store
    finally:
        store.stop()


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=HANG_S).close()
    except OSError:
        return False
    return True


def bucket(store: ObjectStore, monkeypatch: Any) -> Iterator[Put]:
    """What puts objects into a bucket of its own; as a fixture, with the environment that its readers need."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    forget_clients()
    client, name = store.client(), f"lake-{uuid.uuid4().hex}"
    client.mkdir(name)

    def put(objects: dict[str, bytes]) -> str:
        for key, content in objects.items():
            client.pipe_file(f"{name}/{key}", content)
        return f"s3://{name}"

    yield put
    forget_clients()


class _MemoryStore(DirFileSystem):
    """Objects in memory under names without a leading slash, bucket first."""

    def __init__(self, **options: Any):
        super().__init__(path=f"/{type(self).__name__}", fs=MemoryFileSystem(), **options)

    def _join(self, path: Any) -> Any:
        joined = super()._join(path)
        ends = isinstance(path, str) and path.endswith("/")  # which says that a directory is meant
        return f"{joined}/" if ends else joined

    def _fields(self, content: bytes) -> dict[str, Any]:
        """What the store says of an object besides name, size and type."""
        raise NotImplementedError

    def _complete(self, entry: dict[str, Any]) -> dict[str, Any]:
        entry = {name: value for name, value in entry.items() if name != "created"}
        if entry["type"] != "file":
            return entry
        return entry | self._fields(self.fs.cat_file(f"{self.path}/{entry['name']}"))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return self._complete(super().info(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        entries = super().ls(path, detail=detail, **options)
        return [self._complete(entry) for entry in entries] if detail else entries

    def find(self, path: str, *rest: Any, detail: bool = False, **options: Any) -> Any:
        found = super().find(path, *rest, detail=detail, **options)
        return {name: self._complete(entry) for name, entry in found.items()} if detail else found


class GoogleStore(_MemoryStore):
    """Stand-in of gcsfs, which reports an MD5."""

    protocol = ("gs", "gcs")

    def _fields(self, content: bytes) -> dict[str, Any]:
        digest = hashlib.md5(content, usedforsecurity=False)
        return {
            "etag": f"C{digest.hexdigest()[:8]}=",
            "generation": str(int(digest.hexdigest()[:12], 16)),
            "md5Hash": base64.b64encode(digest.digest()).decode(),
        }


class AzureStore(_MemoryStore):
    """Stand-in of adlfs, which knows one of its schemes and reports an etag that is no digest."""

    protocol = "abfs"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        return os.fspath(path).rpartition("://")[2].strip("/")

    def _fields(self, content: bytes) -> dict[str, Any]:
        return {"etag": f'"0x{hashlib.sha256(content).hexdigest()[:15].upper()}"'}


STORES = {"gs": GoogleStore, "az": AzureStore, "abfs": AzureStore}
"""Classes by the scheme of an address."""


def memory_bucket(scheme: str, monkeypatch: Any) -> Iterator[Put]:
    """As `bucket`, in memory, with a stand-in as the client of `scheme`."""
    monkeypatch.setitem(_registry, scheme, STORES[scheme])
    client, name = fsspec.filesystem(scheme), f"lake-{uuid.uuid4().hex}"
    client.pipe_file(f"{name}/.bucket", b"")

    def put(objects: dict[str, bytes]) -> str:
        for key, content in objects.items():
            client.pipe_file(f"{name}/{key}", content)
        return f"{scheme}://{name}"

    yield put
    client.rm(name, recursive=True)


def forget_clients() -> None:
    """The next ones read the environment again."""
    for client in set(_registry.values()):
        client.clear_instance_cache()
