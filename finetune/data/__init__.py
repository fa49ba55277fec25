"""From files to micro-batches: rows, encoding, columns, label noise, mixing, packing, the first-batch panel."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Row": "rows",
    "read_rows": "rows",
    "require_rows": "rows",
    "expand": "rows",
    "describe": "rows",
    "canonical_label": "rows",
    "RowView": "view",
    "spill_rows": "view",
    "limit_rows": "subset",
    "classes_of": "labels",
    "Masking": "masking",
    "label_noise": "noise",
    "noisy_rows": "noise",
    "foreign_answers": "noise",
    "shuffled_examples": "noise",
    "Example": "example",
    "Encoded": "example",
    "encode": "encoding",
    "Encoder": "encoding",
    "sort_labels": "labels",
    "label_index": "labels",
    "Template": "template",
    "Examples": "columns",
    "ExampleWriter": "columns",
    "open_examples": "columns",
    "TokenCache": "token_cache",
    "CacheError": "token_cache",
    "content_name": "token_cache",
    "Mixture": "mixture",
    "Proportions": "mixture",
    "Batches": "batches",
    "MicroBatch": "batches",
    "iterate_eval": "batches",
    "pack_order": "pack",
    "refuse_leaks": "pack",
    "first_batch_panel": "panel",
    "panel_spans": "panel",
    "Span": "panel",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
