"""Index of the tensors in a directory of safetensors files, read from their headers and checked against their sizes.

A truncated or missing file is found here, before any rank has read or allocated anything.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import UserError, first_error_line

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# As in the safetensors format, without the dtypes that no weight of a transformers model has.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_LENGTH = 8  # bytes that hold the header's length, little endian
_LONGEST = 100_000_000  # bytes of a header, the limit of the format


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Byte offset of the tensor in its file, for reading in order."""

    @property
    def bytes(self) -> int:
        """Size of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_index(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of `model.safetensors`, or of the files in `model.safetensors.index.json`, by name.

    Raises:
        UserError: neither exists; a file of the index is missing, cut short or not a safetensors file; a file lacks a
            tensor that the index assigns to it.
    """
    if (directory / SINGLE).is_file():
        return _read_header(directory / SINGLE)
    index = directory / INDEX
    if not index.is_file():
        raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}, so its weights cannot be read in slices")
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is damaged ({type(error).__name__}); fetch the backbone again") from error
    if any(Path(file).name != file for file in files):  # only names in the same directory, never a path out of it
        raise UserError(f"{index} names a file that is not next to it; fetch the backbone again")
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{directory / missing[0]}{more} is missing, though {INDEX} names it; fetch the backbone again")
    headers = {file: _read_header(directory / file) for file in files}
    for key, file in places.items():
        if key not in headers[file]:
            raise UserError(f"{directory / file} lacks {key}, which {INDEX} says is in it; fetch the backbone again")
    return {key: headers[file][key] for key, file in places.items()}


def _read_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH), "little")
        if size < _LENGTH or length > _LONGEST:
            raise UserError(f"{file} is no safetensors file or is damaged; fetch the backbone again")
        if size < _LENGTH + length:
            raise UserError(f"{file} is cut short: it ends in its header, after {size} bytes; fetch the backbone again")
        text = stream.read(length)
    entries, end = {}, 0
    try:
        for key, value in json.loads(text).items():
            if key == "__metadata__":
                continue
            start, stop = value["data_offsets"]
            if not all(isinstance(one, int) and 0 <= one < 2**63 for one in (start, stop, *value["shape"])):
                raise ValueError(key)
            entries[key] = TensorEntry(file, _DTYPES[value["dtype"]], tuple(value["shape"]), _LENGTH + length + start)
            if stop - start != entries[key].bytes:
                raise ValueError(key)
            end = max(end, stop)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} has a damaged header ({first_error_line(error)}); fetch the backbone again") from error
    if size < _LENGTH + length + end:
        raise UserError(
            f"{file} is cut short: it has {size} of {_LENGTH + length + end} bytes; fetch the backbone again"
        )
    return entries
