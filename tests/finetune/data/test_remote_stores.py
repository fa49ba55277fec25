"""The stand-ins of the clients of gs:// and az:// keep fsspec's own contract for file systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fsspec")
from fsspec.tests.abstract import (
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

from tests.support.object_store import STORES


class Stores(AbstractFixtures):
    """Fixtures of the contract's tests."""

    @pytest.fixture(params=["gs", "az"])
    def fs(self, request: pytest.FixtureRequest) -> Any:
        return STORES[request.param]()

    @pytest.fixture
    def fs_path(self, fs: Any) -> Iterator[str]:
        yield "bucket"
        if fs.exists("bucket"):
            fs.rm("bucket", recursive=True)

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)


class TestGet(AbstractGetTests, Stores):
    pass


class TestOpen(AbstractOpenTests, Stores):
    pass


class TestPipe(AbstractPipeTests, Stores):
    pass


class TestPut(AbstractPutTests, Stores):
    pass
