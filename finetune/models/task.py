"""Members of a task that choosing and loading its model uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class BackboneTask(Protocol):
    """transformers class of a task's models, and the kind of backbone that it requires."""

    @property
    def backbone(self) -> str: ...

    @property
    def modelling(self) -> str: ...

    @property
    def auto_class(self) -> str: ...

    @property
    def is_sequence_level(self) -> bool: ...

    @property
    def new_head(self) -> bool: ...

    def head_settings(self, *, num_labels: int | None, label_names: Sequence[str] | None) -> dict[str, Any]: ...
