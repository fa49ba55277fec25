"""Start of our Python processes: without the current directory on their path, where a user's `finetune.py` or
`random.py` may lie."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_VARIABLE = "PYTHONSAFEPATH"
"""As `python -P`, which multiprocessing hands on to no child."""


@contextlib.contextmanager
def without_namesakes() -> Iterator[None]:
    """Python processes that begin inside import nothing from the current directory."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
