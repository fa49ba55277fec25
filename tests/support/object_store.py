"""An object store on localhost: moto's standalone server in a process of its own, spoken to as S3 is."""

from __future__ import annotations

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
        import fsspec

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


def forget_clients() -> None:
    """The next one reads the environment again."""
    import fsspec

    fsspec.get_filesystem_class("s3").clear_instance_cache()
