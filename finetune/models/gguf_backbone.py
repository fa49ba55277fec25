"""GGUF files (llama.cpp, Ollama) as backbones: converted once into a model directory in the cache.

    model.gguf                           # a file, or its parts model.gguf.part00, model.gguf.part01, … beside it
    model-00001-of-00004.gguf            # the first of llama.cpp's own splits
    package:NAME/FOLDER/model.gguf       # in an installed package; parts may lie in NAME_part1, NAME_part2, …

Weights are dequantised tensor by tensor, to bf16 if the file holds 16 bits or fewer and bf16 loses nothing against its
quantisation, else to float32. Configuration, tokenizer and chat template come from the file. The directory is named by
the files' paths, sizes and times, so a changed file is converted again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..atomic import write_json
from ..cache_directory import cache_root
from ..compute.memory import available_memory
from ..errors import UserError, first_error_line
from ..lock import exclusive_lock, temporary_directory
from .gguf_tensors import StoredTensor, configuration, convert_tensors, read_file
from .gguf_tokenizer import build_tokenizer

_log = logging.getLogger(__name__)
ARCHITECTURES = ("gemma3", "gpt2", "llama", "phi3", "qwen2", "qwen3", "qwen3moe")
"""Architectures with a test that the converted model equals the one the file was made of."""
_CONVERSION = 2
"""To be raised when the same file gives another directory."""
_SHARD = 1 << 30
_WAIT_S = 3600
_refusals: dict[Path, str] = {}
"""Files that this process could not convert: finding that out again takes minutes."""
_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
"""transformers' names of architectures that it names otherwise."""
_WIDE = {"F32", "F16", "F64"}
"""Types whose matrices bf16 would round."""


def gguf_directory(name: str, file: Path, roots: Sequence[Path] = ()) -> Path:
    """Return the model directory converted from a GGUF file, converting it first if it is not in the cache.

    name: the backbone's name, for messages.
    file: path of the whole file or of the first split; it may exist in parts only.
    roots: directories in which the file or its parts may lie at any depth; none: beside `file`.

    Raises UserError: no such file, a part is missing, another format, damaged, an architecture or quantisation that is
    not converted, no tokenizer, no space or memory, or the package `gguf` is not installed.
    """
    files = find_gguf_files(name, file, roots)
    state = [[str(path), stat.st_size, stat.st_mtime_ns] for path in files for stat in [path.stat()]]
    target = cache_root() / f"gguf-{hashlib.sha256(repr((_CONVERSION, state)).encode()).hexdigest()[:32]}"
    if target in _refusals:
        raise UserError(_refusals[target])
    deadline = time.monotonic() + _WAIT_S
    while not (target / "config.json").is_file():
        try:
            with exclusive_lock(target, alternative="wait for it to end"):
                if not (target / "config.json").is_file():
                    _convert(name, files, target)
        except UserError as error:
            # another process, or another rank of this job, is converting the same file, or has just ended
            if (target / "config.json").is_file():
                break
            if time.monotonic() > deadline or not target.with_name(f".{target.name}.lock").exists():
                _refusals[target] = str(error)
                raise
            time.sleep(0.5)
    return target


# ------------------------------------------------------------------------------------------------------- files


def find_gguf_files(name: str, file: Path, roots: Sequence[Path]) -> list[Path]:
    """Return the file, its parts or its splits in order, as absolute paths."""

    def find(pattern: str) -> list[Path]:
        places = [path for root in roots for path in root.rglob(pattern)] if roots else list(file.parent.glob(pattern))
        return sorted((path.absolute() for path in places if path.is_file()), key=lambda path: path.name)

    split = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", file.name)
    if split is not None:
        names = [f"{split[1]}-{number:05}-of-{split[3]}.gguf" for number in range(1, int(split[3]) + 1)]
        splits = [find(_escape(each)) for each in names]
        missing = [each for each, found in zip(names, splits, strict=True) if not found]
        if missing:
            raise UserError(f"backbone {name!r}: {missing[0]} is not beside it; all {len(names)} files are needed")
        return [found[0] for found in splits]
    if whole := find(_escape(file.name)):
        return whole[:1]
    found = find(f"{_escape(file.name)}.part*")
    parts = {int(match[1]): path for path in found if (match := re.search(r"\.part-?(\d+)$", path.name))}
    if not parts:
        raise UserError(f"backbone {name!r}: no such file, nor parts of it ({file.name}.part00, …)")
    first, last = min(parts), max(parts)
    gap = next((number for number in range(min(first, 1), last) if number not in parts), None)
    if gap is not None:
        raise UserError(f"backbone {name!r}: part {gap} of {file.name} is missing; install or fetch every part")
    return [parts[number] for number in sorted(parts)]


def _escape(text: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", text)


# -------------------------------------------------------------------------------------------------- conversion


def _convert(name: str, files: Sequence[Path], target: Path) -> None:
    try:
        import gguf  # noqa: F401  # distributed by `gguf` and by llama.cpp's converter
    except ImportError as error:
        raise UserError(f"backbone {name!r}: reading GGUF needs a package: pip install 'flatshift[gguf]'") from error
    with contextlib.ExitStack() as stack:
        if ".part" in files[0].name:
            joined = stack.enter_context(temporary_directory("flatshift-gguf-")) / "model.gguf"
            with joined.open("wb") as out:
                for part in files:
                    with part.open("rb") as handle:
                        shutil.copyfileobj(handle, out, 1 << 22)
            files = [joined]
        contents = [_read_contents(name, file) for file in files]
        tensors = [tensor for _, stored in contents for tensor in stored]
        _write_directory(name, files[0], contents[0][0], tensors, target)


def _read_contents(name: str, file: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    with file.open("rb") as handle:
        magic = handle.read(4)
    if magic != b"GGUF":
        raise UserError(f"backbone {name!r}: {file.name} is no GGUF file (it begins with {magic!r}); fetch it again")
    try:
        return read_file(file)
    except Exception as error:  # it reads a damaged file's numbers as sizes, with any consequence
        raise UserError(
            f"backbone {name!r}: {file.name} is damaged or cut short ({first_error_line(error)}); fetch it again"
        ) from error


def _write_directory(
    name: str, file: Path, fields: dict[str, Any], tensors: Sequence[StoredTensor], target: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    where, architecture = f"backbone {name!r}", fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{where}: GGUF files of {architecture!r} are not converted, only {', '.join(ARCHITECTURES)}; take the "
            "model's own directory of safetensors"
        )
    if "tokenizer.ggml.tokens" not in fields:
        raise UserError(f"{where}: {file.name} has no tokenizer; take another conversion of the model")
    types = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}
    dtype = torch.float32 if types & _WIDE else torch.bfloat16
    _check_space(where, tensors, dtype.itemsize, target)
    try:
        tokenizer = build_tokenizer(fields)
    except Exception as error:  # `tokenizers` raises its own for a vocabulary that contradicts itself
        raise UserError(
            f"{where}: its tokenizer cannot be read ({first_error_line(error)}); take another conversion of the model"
        ) from error
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with torch.random.fork_rng(devices=[]):
            config = _read_config(architecture, fields, tensors)
            _scale_positions(where, config, fields, tensors)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            try:
                _write_weights(convert_tensors(model, tensors, architecture, dtype=dtype), temporary, dtype)
            except ValueError as error:
                raise UserError(f"{where}: {error}; take another conversion of the model") from error
            config.architectures, config.dtype = [type(model).__name__], str(dtype).removeprefix("torch.")
            tokenizer.save_pretrained(temporary)
            ends = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
            ends = list(dict.fromkeys(end for end in ends if end is not None))
            GenerationConfig(
                bos_token_id=config.bos_token_id, eos_token_id=ends or None, pad_token_id=tokenizer.pad_token_id
            ).save_pretrained(temporary)
            config.save_pretrained(temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        terms = fields.get("general.license.link") or fields.get("general.license") or "none named in the file"
        _log.warning("%s: converted once, to %s in %s; its licence: %s", where, dtype, target, terms)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_space(where: str, tensors: Sequence[StoredTensor], width: int, target: Path) -> None:
    """Raise UserError if the converted weights do not fit the disk, or a shard of them the memory."""
    sizes = [width * math.prod(tensor.shape) for tensor in tensors]
    target.parent.mkdir(parents=True, exist_ok=True)
    disk, memory = shutil.disk_usage(target.parent).free, available_memory()
    needed = min(sum(sizes), _SHARD) + max(sizes, default=0)
    if sum(sizes) > disk:
        raise UserError(
            f"{where}: its weights take {sum(sizes) / 2**30:.1f} GiB once converted and {target.parent} has "
            f"{disk / 2**30:.1f} GiB left; set FLATSHIFT_CACHE to a larger disk"
        )
    if memory is not None and needed > memory:
        raise UserError(
            f"{where}: converting it needs {needed / 2**30:.1f} GiB of memory and {memory / 2**30:.1f} GiB are free; "
            "end other programs, or convert it on another machine"
        )


def _read_config(architecture: str, fields: dict[str, Any], tensors: Sequence[StoredTensor]) -> Any:
    """Return transformers' configuration of the file."""
    names = {
        "num_hidden_layers": f"{architecture}.block_count",  # the kinds of layers are counted by it
        "head_dim": f"{architecture}.attention.key_length",  # some configurations have it only if it is given
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    own = {name: fields.get(key) for name, key in names.items() if key in fields or key.endswith("_token_id")}
    own["model_type"] = _MODEL_TYPES.get(architecture, architecture)
    own["vocab_size"] = next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")
    short = {key.removeprefix(f"{architecture}."): value for key, value in fields.items()}
    return configuration(own, short, {tensor.name for tensor in tensors})[0]


def _scale_positions(where: str, config: Any, fields: dict[str, Any], tensors: Sequence[StoredTensor]) -> None:
    """Set the scaling of rotary positions.

    Llama 3.1's is stored as a factor for each frequency (`rope_freqs.weight`): 1 for high ones, the largest factor for
    low ones. It is set with its published bounds if these give the stored factors.
    """
    import numpy as np

    prefix = fields["general.architecture"]
    scaling = {key.removeprefix(f"{prefix}.rope.scaling."): value for key, value in fields.items()}
    factors = {tensor.name: tensor.data.view(np.float32) for tensor in tensors if tensor.name.startswith("rope_f")}
    kind, factor = scaling.get("type"), float(scaling.get("factor", 1.0))
    context = scaling.get("original_context_length", config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_freqs.weight" in factors:
        stored = factors["rope_freqs.weight"].astype(np.float64)
        bounds = {"factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": 8192, **bounds}
        frequencies = rope["rope_theta"] ** (-np.arange(len(stored)) / len(stored))
        turns = 8192 * frequencies / (2 * np.pi)
        smooth = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1 / stored, (1 - smooth) / bounds["factor"] + smooth, rtol=1e-3):
            return
    elif factors.keys() == {"rope_factors_long.weight", "rope_factors_short.weight"}:
        rope |= {f"{name}_factor": factors[f"rope_factors_{name}.weight"].tolist() for name in ("long", "short")}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": context}
        rope["attention_factor"] = scaling.get("attn_factor", 1.0)
        config.original_max_position_embeddings = context
        return
    elif kind == "yarn" and scaling.get("yarn_ext_factor", 1.0) == 1.0 and "yarn_log_multiplier" not in scaling:
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
        names = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        rope |= {name: scaling[key] for name, key in names.items() if key in scaling}
        return
    elif kind in (None, "none") and not factors:
        return
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
        return
    raise UserError(
        f"{where}: its scaled positions ({kind or 'by factors'}) are not converted; take the model's own directory of "
        "safetensors"
    )


def _write_weights(weights: Iterator[tuple[str, Any]], folder: Path, dtype: Any) -> None:
    """Write safetensors of at most `_SHARD` bytes each, or of one tensor, and their index."""
    from safetensors.torch import save_file

    homes: dict[str, int] = {}
    shard: dict[str, Any] = {}
    size = total = count = 0

    def flush() -> None:
        nonlocal shard, size, count
        save_file(shard, folder / f"shard-{count}", metadata={"format": "pt"})
        homes.update(dict.fromkeys(shard, count))
        shard, size, count = {}, 0, count + 1

    for name, value in weights:
        tensor = value.to(dtype).contiguous()
        if shard and size + tensor.nbytes > _SHARD:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    names = [f"model-{k + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors" for k in range(count)]
    for number, file in enumerate(names):
        (folder / f"shard-{number}").rename(folder / file)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[home] for name, home in homes.items()}}
        write_json(folder / "model.safetensors.index.json", index)
