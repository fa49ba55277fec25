"""Members of a model on a mesh (`flatshift.finetune.parallel.engine.Engine`) that choices of kernels use."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Ranks(Protocol):
    """Processes that the model is spread over."""

    @property
    def size(self) -> int: ...

    def width(self, *axes: str) -> int: ...

    def any(self, flag: bool) -> bool: ...


class MeshModel(Protocol):
    """A model, its device and its ranks."""

    @property
    def world(self) -> Ranks: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_main(self) -> bool: ...

    @property
    def peft(self) -> Any: ...

    @property
    def eval_model(self) -> Any: ...

    def reshard(self) -> None: ...
