"""The keys and values that a decoder keeps of the tokens it has read, under the name that transformers gives them.

transformers 5.24 renamed `past_key_values` to `cache`, in the arguments and in the results of every model alike.
"""

from __future__ import annotations

import functools
from typing import Any

NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""What a block or a model calls the argument, in one version of transformers or another."""


@functools.cache
def cache_name() -> str:
    """The model's argument in the installed transformers, which is the field of its output as well."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    fields = CausalLMOutputWithPast.__dataclass_fields__
    return next(name for name in NAMES if name in fields)


def kept_cache(output: Any) -> Any:
    """What a model that was called with `use_cache=True` has kept."""
    return getattr(output, cache_name())


def given_cache(cache: Any) -> dict[str, Any]:
    """The argument that gives it to the model again."""
    return {cache_name(): cache}
