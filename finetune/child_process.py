"""Start child Python processes without the current directory on their path, where a user's `finetune.py` or `random.py`
may shadow a module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_VARIABLE = "PYTHONSAFEPATH"
"""Equivalent of `python -P`, which multiprocessing does not pass to its children."""


@contextlib.contextmanager
def without_cwd_imports() -> Iterator[None]:
    """Keep Python processes started inside from importing anything from the current directory."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
