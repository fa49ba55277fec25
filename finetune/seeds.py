"""Named random seeds derived from `train.seed`; no global generator is touched."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the purpose `names`, independent of every other purpose and of the platform."""
    text = "\x1f".join([str(int(seed)), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def numpy_generator(seed: int, *names: str | int) -> np.random.Generator:
    """Return a NumPy generator for the purpose `names`."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *names)))


def torch_generator(seed: int, *names: str | int, device: str = "cpu") -> torch.Generator:
    """Return a torch generator for the purpose `names`."""
    import torch

    return torch.Generator(device=device).manual_seed(derive_seed(seed, *names))
