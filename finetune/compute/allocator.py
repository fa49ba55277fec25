"""How torch's CUDA allocator and cuBLAS are set, before torch is imported. Standard library only.

Rows of all lengths and a loss in slices leave gaps in memory that is handed out in blocks of fixed size; segments that
grow have none. What the user's environment says goes first: `PYTORCH_ALLOC_CONF=expandable_segments:False` turns it
off.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""What torch reads, the newest name first."""
WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"


def fixed_workspaces(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment so that cuBLAS, which reads it at its first product, gives the same bits again
    (`train.deterministic`): 32 MiB of workspace for each stream. Nothing where the environment says something."""
    return {} if WORKSPACES in environment else {WORKSPACES: ":4096:8"}


def growing_segments(environment: Mapping[str, str], *, platform: str = sys.platform) -> dict[str, str]:
    """What to add to the environment of a process that may compute on CUDA; nothing where it says something itself,
    or where the driver has no such memory (elsewhere than on Linux). Read by no CPU allocation."""
    if platform != "linux" or any(name in environment for name in NAMES):
        return {}
    return {NAMES[0]: "expandable_segments:True"}
