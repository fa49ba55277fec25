"""Environment of torch's CUDA allocator and of cuBLAS, set before torch is imported. Standard library only.

Rows of all lengths and a sliced loss fragment memory that is allocated in blocks of fixed size; expandable segments
avoid that. The user's environment takes precedence: `PYTORCH_ALLOC_CONF=expandable_segments:False` turns them off.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that torch reads, the newest name first."""
WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"


def cublas_workspace_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that makes cuBLAS reproducible (`train.deterministic`): 32 MiB of workspace per
    stream. cuBLAS reads it at its first product. Empty if the environment sets it already."""
    return {} if WORKSPACES in environment else {WORKSPACES: ":4096:8"}


def expandable_segments_env(environment: Mapping[str, str], *, platform: str = sys.platform) -> dict[str, str]:
    """Return the environment variable that enables expandable segments for a process that may use CUDA.

    Empty if the environment sets the allocator already, or off Linux, where the driver has no such memory. CPU
    allocations ignore it.
    """
    if platform != "linux" or any(name in environment for name in NAMES):
        return {}
    return {NAMES[0]: "expandable_segments:True"}
