"""What a backbone's config.json says of its architecture: read by transformers alone, checked before it is believed.

No code of a model repository is ever run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError, shortened

_LARGEST = 10_000_000
_SIZES = {
    "hidden_size": _LARGEST,
    "num_hidden_layers": 2000,
    "num_attention_heads": _LARGEST,
    "vocab_size": _LARGEST,
    "intermediate_size": _LARGEST,
}
"""Key of config.json → the largest value; beyond it a model is built for hours before its weights differ."""


def refuse_remote_code(config: dict[str, Any], where: str) -> None:
    """Refuse a config whose classes are the repository's own; one that names transformers' classes is fine."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    own, kind = config.get("auto_map") or {}, config.get("model_type")
    if not isinstance(own, dict) or not isinstance(kind, str):
        odd = "auto_map" if not isinstance(own, dict) else "model_type"
        what = "an object" if odd == "auto_map" else "the name of an architecture"
        raise UserError(f"{where}: config.json has {odd} {shortened(json.dumps(config.get(odd)), 40)}, not {what}")
    foreign = sorted({str(target).rsplit(".", 1)[-1] for key, target in own.items() if "Token" not in key})
    foreign = [cls for cls in foreign if not hasattr(transformers, cls)]
    if foreign or (config.get("auto_map") and kind not in CONFIG_MAPPING_NAMES):
        raise UserError(
            f"{where} needs code from its own repository ({', '.join(foreign) or kind}; trust_remote_code), which is "
            "never run; take a model whose architecture is part of transformers"
        )
    if kind not in CONFIG_MAPPING_NAMES:
        raise UserError(f"{where}: config.json names the model type {kind!r}, which transformers does not know")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back transformers' own log lines and progress bars; both are put back afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def sound_config(directory: Path, settings: dict[str, Any]) -> Any:
    """transformers' configuration in `directory` with `settings`. Raises UserError where it refuses config.json."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False, **settings)
    except Exception as error:  # each architecture checks its own, in exceptions of many kinds
        told = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{directory / 'config.json'} does not fit its architecture: {shortened(told, 140)}") from error
    for key, most in _SIZES.items():
        value = getattr(config.get_text_config(), key, None)
        if value is not None and not (isinstance(value, int) and 1 <= value <= most):
            shown = shortened(json.dumps(value, default=str), 40)
            raise UserError(f"{directory / 'config.json'} has {key} {shown}, not a whole number from 1 to {most:,}")
    return config
