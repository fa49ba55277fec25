"""The finding of a comparison of tokenizers: which one, before which other, and none before its equal."""

from __future__ import annotations

from typing import Any

import pytest

from flatshift.experiments.report.chapters.tokenizer import _FIGURES, _part


@pytest.mark.parametrize(("other", "found"), [(1.3, "1.20, before b."), (1.201, "1.20, like b.")])
def test_the_fewest_bits_are_before_those_that_differ(other: float, found: str) -> None:
    def model(bits: float) -> dict[str, Any]:
        return {"bits_per_byte": {"value": bits, "low": 1.1, "high": 1.4}, "beside": None, "tokens": 10}

    figures = {"vocabulary": 100, "used": 50, "scripts": {}, "groups": {}, "all": {key: 1.0 for key, _ in _FIGURES}}
    document = {
        "tokenizers": {"a": figures, "b": figures}, "models": {"a": model(1.2), "b": model(other)}, "notes": [],
        "trained": {"seeds": 1, "parameters": 1, "bytes": 1, "documents": 1, "held_out": 1}, "group_by": None,
        "rows": {"all": 1},
    }  # fmt: skip
    assert _part(document).findings == [f"a has the fewest bits per byte: {found}"]
