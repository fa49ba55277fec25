"""Weights that the files store quantised, read as floats: each slice is dequantised while it is read, on the CPU.

| `quant_method` | tensors of a weight of m outputs and n inputs |
|---|---|
| `fp8` | float8 values, and a scale for each block of them (DeepSeek-V3's `weight_scale_inv`) |
| `mxfp4` | two E2M1 floats a byte, and a power of two for each 32 (OCP Microscaling 1.0; the experts of gpt-oss) |
| `gptq` | `qweight` (n · bits / 32, m), `qzeros` and `scales` of groups of inputs, `g_idx`: the group of an input |
| `awq` | `qweight` (n, m / 8) in the order of AutoAWQ's `gemm`, `qzeros` and `scales` |

Activations are not quantised: what is trained is the adapter of the dequantised weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..atomic import read_json_object
from ..errors import UserError


class FileTensor(Protocol):
    """A tensor of a weight file (`flatshift.finetune.models.checkpoint.TensorEntry`)."""

    @property
    def file(self) -> Path:
        """The file that holds it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape there."""


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight stored in several tensors; indexed by slices, as safetensors' own, it returns float32."""

    shape: tuple[int, ...]
    """Shape of the floats."""
    parts: Mapping[str, tuple[str, FileTensor]]
    """Name in the files and entry of each of its tensors, by kind."""
    settings: Mapping[str, Any]
    """`quantization_config` of config.json."""

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Read and dequantise these indices, of which there is at least one along each dim, a few rows at a time."""
        given = index if isinstance(index, tuple) else (index,)
        whole = [*given, *[slice(None)] * (len(self.shape) - len(given))]
        rows, *others = (range(size)[each] for each, size in zip(whole, self.shape, strict=True))
        inner = [slice(each.start, each.stop) for each in others]
        values = torch.empty([len(rows), *map(len, others)])
        step = max(1, _PIECE // math.prod(values.shape[1:]))
        for first in range(rows.start, rows.stop, step):
            own = slice(first, min(first + step, rows.stop))
            dequantized = _READERS[self.settings["quant_method"]](self, own, *inner)
            values[own.start - rows.start : own.stop - rows.start] = dequantized
        return values

    def read(self, part: str, *index: slice) -> Tensor:
        """Read a slice of one of its tensors as it is stored."""
        from safetensors import safe_open

        key, entry = self.parts[part]
        with safe_open(entry.file, "pt") as file:
            stored: Tensor = file.get_slice(key)[index] if entry.shape else file.get_tensor(key)
        return stored


def has_quantized_files(directory: Path) -> bool:
    """True if the weights in `directory` are quantised in a format that is read here."""
    settings = read_json_object(directory / "config.json", fix="fetch the backbone again").get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") in METHODS


def find_quantized(
    entries: Mapping[str, FileTensor], settings: Mapping[str, Any], *, context: str
) -> dict[str, QuantizedTensor]:
    """Return the quantised weights among the tensors `entries` of the files, by the name of their floats.

    Raises UserError for a format or a variant of one that is not read here.
    """
    method = settings.get("quant_method")
    if method not in METHODS:
        raise UserError(
            f"{context} is quantised already ({method}), and a mesh or train.quantization begins only with floats or "
            f"{', '.join(METHODS)}; take the unquantised one, or one device and no train.quantization"
        )
    if problem := _unreadable_setting(settings):
        raise UserError(f"{context} is quantised with {problem}, which is not read here; take the unquantised one")
    marker, others, ending = _TENSORS[method]
    weights = {}
    for key in entries:
        if key.endswith(marker):
            stem = key.removesuffix(marker)
            if method == "fp8" and stem not in entries:  # a scale of activations
                continue
            names = {marker: key} | {other: stem + other for other in others if stem + other in entries}
            parts = {part: (name, entries[name]) for part, name in names.items()}
            missing = [other for other in others if other not in parts and other != ".g_idx"]
            if missing:
                raise UserError(f"{context}: its weights lack {stem}{missing[0]}; the checkpoint is not complete")
            try:
                shape = _float_shape({part: entry.shape for part, (_, entry) in parts.items()}, settings)
            except ValueError as error:
                raise UserError(f"{context}: {key} and its scales do not fit ({error}); fetch it again") from error
            weights[stem + ending] = QuantizedTensor(shape, parts, settings)
    return weights


_TENSORS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "fp8": ("_scale_inv", ("",), ""),
    "mxfp4": ("_blocks", ("_scales",), ""),
    "gptq": (".qweight", (".qzeros", ".scales", ".g_idx"), ".weight"),
    "awq": (".qweight", (".qzeros", ".scales"), ".weight"),
}
"""Endings of the tensors of a weight: of one that each has, of the others, and of the floats' name in the model."""
METHODS = tuple(_TENSORS)
"""Formats that are read, as `quant_method` of `quantization_config` in config.json."""
_PIECE = 1 << 23  # values dequantised at once
_WORD = 32  # bits of the integers that gptq and awq pack values in
_MX_BLOCK = 32  # values of mxfp4 that share a power of two
_EXPONENT_BIAS = 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each of eight outputs in a word


def _unreadable_setting(settings: Mapping[str, Any]) -> str | None:
    method, bits, group = settings["quant_method"], settings.get("bits", 4), settings.get("group_size", 128)
    if method == "gptq" and bits not in (2, 4, 8):
        return f"gptq in {bits} bits"
    if method == "gptq" and settings.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        return f"gptq's checkpoint_format {settings['checkpoint_format']}"
    if method == "awq" and (bits != 4 or str(settings.get("version", "gemm")).lower() != "gemm"):
        return f"awq in {bits} bits, version {settings.get('version')}"
    if not isinstance(group, int) or group == 0:
        return f"group_size {group}"
    return None


def _float_shape(shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the floats of tensors with these shapes. Raises ValueError if the shapes do not fit."""
    method = settings["quant_method"]
    if method == "fp8":
        shape, grid = shapes[""], shapes["_scale_inv"]
        if math.prod(grid) != 1 and (len(grid) < 2 or grid[:-2] != shape[:-2]):
            raise ValueError(f"scales {list(grid)} of {list(shape)}")
        for dim in (-2, -1) if math.prod(grid) != 1 else ():
            _block_size(shape[dim], grid[dim], settings, dim)
        return shape
    if method == "mxfp4":
        blocks, scales = shapes["_blocks"], shapes["_scales"]
        if len(blocks) != 4 or blocks[-1] != _MX_BLOCK // 2 or scales != blocks[:-1]:
            raise ValueError(f"scales {list(scales)} of {list(blocks)}")
        return blocks[0], blocks[2] * _MX_BLOCK, blocks[1]  # transformers' experts multiply from the right
    packed = _WORD // settings.get("bits", 4)
    rows, columns = shapes[".qweight"]
    inputs, outputs = (rows * packed, columns) if method == "gptq" else (rows, columns * packed)
    group = settings.get("group_size", 128)
    groups = 1 if group < 0 else -(-inputs // group)
    if shapes[".scales"] != (groups, outputs) or shapes[".qzeros"] != (groups, -(-outputs // packed)):
        raise ValueError(f"{groups} groups of {inputs} × {outputs}: {[list(shape) for shape in shapes.values()]}")
    if shapes.get(".g_idx", (inputs,)) != (inputs,):
        raise ValueError(f"{inputs} inputs, g_idx {list(shapes['.g_idx'])}")
    return outputs, inputs


def _read_fp8(weight: QuantizedTensor, *index: slice) -> Tensor:
    values = weight.read("", *index).float()
    grid = weight.parts["_scale_inv"][1].shape
    if math.prod(grid) == 1:
        return values * _scale_values(weight.read("_scale_inv", *[slice(None)] * len(grid)))
    *outer, rows, columns = index
    block = [_block_size(weight.shape[dim], grid[dim], weight.settings, dim) for dim in (-2, -1)]
    spans = [
        slice(each.start // size, -(-each.stop // size)) for each, size in zip((rows, columns), block, strict=True)
    ]
    scales = _scale_values(weight.read("_scale_inv", *outer, *spans))
    row = torch.arange(rows.start, rows.stop) // block[0] - spans[0].start
    column = torch.arange(columns.start, columns.stop) // block[1] - spans[1].start
    return values * scales[..., row[:, None], column]


def _block_size(size: int, count: int, settings: Mapping[str, Any], dim: int) -> int:
    """Return the values of `size` that share one of `count` scales: as config.json says, else equally many. Raises
    ValueError if neither fits."""
    stated = settings.get("weight_block_size")
    block = stated[dim] if isinstance(stated, list | tuple) and len(stated) == 2 else None
    if isinstance(block, int) and block > 0 and -(-size // block) == count:
        return block
    if not count or size % count:
        raise ValueError(f"{count} scales for {size} values")
    return size // count


def _scale_values(scales: Tensor) -> Tensor:
    """Return fp8's scales as float32; those stored as bytes are exponents (E8M0)."""
    return torch.exp2(scales.float() - _EXPONENT_BIAS) if scales.dtype == torch.uint8 else scales.float()


def _read_mxfp4(weight: QuantizedTensor, experts: slice, inputs: slice, outputs: slice) -> Tensor:
    groups = slice(inputs.start // _MX_BLOCK, -(-inputs.stop // _MX_BLOCK))
    codes = weight.read("_blocks", experts, outputs, groups, slice(None))
    exponents = weight.read("_scales", experts, outputs, groups).int() - _EXPONENT_BIAS
    values = torch.tensor(_E2M1)[torch.stack([codes & 15, codes >> 4], -1).int()]  # the low half first
    values = torch.ldexp(values.flatten(-2), exponents[..., None]).flatten(-2)
    first = inputs.start - groups.start * _MX_BLOCK
    return values[..., first : first + inputs.stop - inputs.start].transpose(1, 2)


def _read_gptq(weight: QuantizedTensor, outputs: slice, inputs: slice) -> Tensor:
    bits = weight.settings.get("bits", 4)
    codes = _unpack_words(weight, ".qweight", inputs, outputs, bits=bits, dim=0)
    groups = weight.read(".g_idx", inputs).long() if ".g_idx" in weight.parts else _consecutive_groups(weight, inputs)
    own = slice(int(groups.min()), int(groups.max()) + 1)
    key, entry = weight.parts[".scales"]
    if own.start < 0 or own.stop > entry.shape[0]:
        raise UserError(f"{entry.file}: g_idx beside {key} names groups that do not exist; fetch it again")
    zeros = _unpack_words(weight, ".qzeros", own, outputs, bits=bits, dim=1)
    if weight.settings.get("checkpoint_format", "gptq") == "gptq":  # it stores one less, in the same bits
        zeros = (zeros + 1) & (2**bits - 1)
    return _scale_codes(weight, codes, zeros, groups - own.start, own, outputs)


def _read_awq(weight: QuantizedTensor, outputs: slice, inputs: slice) -> Tensor:
    codes = _unpack_words(weight, ".qweight", inputs, outputs, bits=4, dim=1, order=_AWQ_ORDER)
    groups = _consecutive_groups(weight, inputs)
    own = slice(int(groups[0]), int(groups[-1]) + 1)
    zeros = _unpack_words(weight, ".qzeros", own, outputs, bits=4, dim=1, order=_AWQ_ORDER)
    return _scale_codes(weight, codes, zeros, groups - own.start, own, outputs)


def _consecutive_groups(weight: QuantizedTensor, inputs: slice) -> Tensor:
    size = weight.settings.get("group_size", 128)
    return torch.arange(inputs.start, inputs.stop) // (size if size > 0 else weight.shape[1])


def _unpack_words(
    weight: QuantizedTensor,
    part: str,
    rows: slice,
    columns: slice,
    *,
    bits: int,
    dim: int,
    order: tuple[int, ...] | None = None,
) -> Tensor:
    """Return values of a tensor (rows, columns) that has several along `dim` in an integer, the lowest bits first or in
    `order`."""
    count, wanted = _WORD // bits, (rows, columns)[dim]
    words = slice(wanted.start // count, -(-wanted.stop // count))
    stored = weight.read(part, *((words, columns) if dim == 0 else (rows, words)))
    shifts = torch.tensor(order or range(count), dtype=torch.int32) * bits
    shifts = shifts[:, None] if dim == 0 else shifts
    values = (stored.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)
    return values.flatten(dim, dim + 1).narrow(dim, wanted.start - words.start * count, wanted.stop - wanted.start)


def _scale_codes(
    weight: QuantizedTensor, codes: Tensor, zeros: Tensor, groups: Tensor, own: slice, outputs: slice
) -> Tensor:
    """Return the weight (outputs, inputs) of `codes` (inputs, outputs) whose scales and `zeros` are those of groups."""
    return (weight.read(".scales", own, outputs).float()[groups] * (codes - zeros[groups])).T


_READERS: dict[str, Callable[..., Tensor]] = {
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "gptq": _read_gptq,
    "awq": _read_awq,
}
