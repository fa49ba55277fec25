"""Merge an adapter into its backbone's weight files, a few rows at a time: the whole model is never in memory. Or
combine several adapters into one (`combine_adapters`).

Each safetensors file becomes one of the same name with the same keys and dtypes. A tensor without an adapter is copied
byte by byte; an adapted one becomes round(W + s·B·A), computed in float64 and rounded to the nearest value of its own
dtype (transposed for GPT-2's Conv1D, scaled to the trained magnitude for DoRA, expert by expert for a mixture of
experts). Tensors that the checkpoint lacked or had for other classes (a new head) are added, and so is the second of
two tied weights if the adapter unties them. The rounding error is measured along the way, not estimated.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..atomic import write_json
from ..errors import UserError
from ..models.anatomy import is_conv1d
from ..models.checkpoint import DTYPES, INDEX, SINGLE, TensorEntry, canonical_name, read_index
from .adapter import WEIGHTS, check_saved, peft_tensor_name, read_adapter
from .offsets import ADAPTER
from .saved import SETTINGS, SavedAdapter, saved_scale

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 2 << 20  # bytes of float64 rows processed at once
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Rows = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class WeightDelta:
    """Change of one weight by an adapter, in the layout of the file."""

    a: Tensor  # (r, n): n indexes the file's columns, or its rows if `transposed`; for experts in one tensor (E, r, n)
    b: Tensor  # (m, r); for experts in one tensor (E, m, r)
    scale: float
    transposed: bool  # True if the file stores the transpose of B·A (Conv1D, embeddings)
    magnitude: Tensor | None  # trained norms of DoRA (m,)

    def added_to(self, entry: TensorEntry, start: int, stop: int) -> Tensor:
        """Return the file's rows `start:stop` of W + s·B·A, float64, before DoRA's scaling."""
        rows = _read_rows(entry, start, stop).double()
        if rows.ndim == 3:
            product = self.b[start:stop].double() @ self.a[start:stop].double()
            return rows.add_(product.mT if self.transposed else product, alpha=self.scale)
        if self.transposed:
            return rows.addmm_(self.a[:, start:stop].T.double(), self.b.T.double(), alpha=self.scale)
        return rows.addmm_(self.b[start:stop].double(), self.a.double(), alpha=self.scale)


class RoundingStatistics:
    """Rounding error of the merged values by the dtype's plain name: `largest` absolute, and `relative` to the row's
    largest value."""

    def __init__(self) -> None:
        self.by_dtype: dict[str, dict[str, float]] = {}

    def add(self, exact: Tensor, stored: Tensor) -> None:
        """Add some rows of a tensor before and after rounding. Raises UserError if a value is not finite."""
        kind = str(stored.dtype).removeprefix("torch.")
        statistics = self.by_dtype.setdefault(kind, {"largest": 0.0, "relative": 0.0})
        exact_rows = exact.double().reshape(exact.shape[0] if exact.ndim else 1, -1)
        stored_rows = stored.to(torch.float64, copy=True).reshape(exact_rows.shape)
        error = torch.linalg.vector_norm(stored_rows.sub_(exact_rows), torch.inf, dim=1)
        row = torch.linalg.vector_norm(exact_rows, torch.inf, dim=1).clamp_min_(1e-300)
        statistics["largest"] = max(statistics["largest"], float(error.max()))
        statistics["relative"] = max(statistics["relative"], float((error / row).max()))
        if not error.isfinite().all():
            raise UserError(f"the adapter makes weights that are not finite numbers in {kind}; it cannot be merged")


class MergeResult(NamedTuple):
    """Key of each changed or added tensor → its file's name and its number of rows; and the rounding."""

    changed: dict[str, tuple[str, int]]
    rounding: RoundingStatistics


@dataclass(frozen=True)
class _TensorSource:
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Rows | None = None
    entry: TensorEntry | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self, rounding: RoundingStatistics) -> Iterator[bytes | memoryview]:
        """Yield the tensor's bytes in order, in chunks; rounding errors are added to `rounding`."""
        if self.entry is not None:
            yield from self.entry.chunks(_CHUNK)
            return
        assert self.rows is not None
        for start, stop in _row_spans(self.shape):
            exact = self.rows(start, stop)
            stored = exact.to(self.dtype).contiguous()
            rounding.add(exact, stored)
            yield stored.flatten().view(torch.uint8).numpy().data


def merge_files(
    model: PreTrainedModel, adapter: Path, out: Path, *, dtype: torch.dtype, cast: torch.dtype | None = None
) -> MergeResult:
    """Write the merged weight files into the directory `out`.

    model: from `flatshift.finetune.models.meta.build_skeleton`, on meta, with its `checkpoint`; it is untied here if
    the adapter changes one of two tied weights, or both.
    adapter: PEFT directory.
    dtype: of the tensors that the checkpoint lacked.
    cast: dtype for all floating-point tensors, instead of their own.

    Raises UserError: the adapter has tensors that the model has not, changes one that the files store in another form
    or that the architecture ties, or produces weights that are not finite.
    """
    checkpoint: Any = model.checkpoint
    changes, replaced = read_changes(model, adapter)
    keys = dict(checkpoint.keys)
    # others (a language head under a classifier) are dropped, unless conversions hide which those are
    unchanged = set(checkpoint.entries) if checkpoint.converted else set(keys.values())
    pieces: dict[str, dict[str, _TensorSource]] = {}
    for key, entry in checkpoint.entries.items():
        if key in unchanged:
            pieces.setdefault(entry.file.name, {})[key] = _unadapted_tensor(entry, cast)
    added: dict[str, _TensorSource] = {}
    for names in sorted({tuple(_tied_weights(model, name)) for name in changes} - {()}):
        _untie(model, names)
        shared = checkpoint.entries[keys[names[0]]]
        added |= {other: _unadapted_tensor(shared, cast) for other in _names_sharing_tensor(checkpoint, names[0])[1:]}
    for source, target, change in _file_changes(model, changes):
        entry = checkpoint.entries[source]
        piece = _TensorSource(cast or entry.dtype, entry.shape, rows=_merged_rows(entry, change))
        if target == source:
            pieces[entry.file.name][source] = piece
        else:
            added[target] = piece
    for name, tensor in replaced.items():
        if name in checkpoint.converted:
            raise _merge_error(f"{name} is trained whole, and the files of this backbone hold it in another form")
        own_dtype = checkpoint.entries[keys[name]].dtype if name in keys else dtype
        rows = partial(lambda tensor, start, stop: tensor[start:stop], tensor)
        piece = _TensorSource(cast or own_dtype, tuple(tensor.shape), rows=rows)
        if name not in keys:
            added[name] = piece
        for tied in _tied_weights(model, name) or [name]:  # tied weights trained in full remain one tensor
            if tied in keys:
                pieces[checkpoint.entries[keys[tied]].file.name][keys[tied]] = piece
    pieces[max(pieces)].update(added)  # to the last file
    rounding = RoundingStatistics()
    for file, content in pieces.items():
        _write_file(out / file, content, rounding)
    if len(pieces) > 1 or SINGLE not in pieces:
        files = {key: file for file, content in pieces.items() for key in content}
        total = sum(piece.size for content in pieces.values() for piece in content.values())
        write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))})
    changed = {
        key: (file, piece.shape[0])
        for file, content in pieces.items()
        for key, piece in content.items()
        if piece.rows is not None
    }
    return MergeResult(changed, rounding)


def read_changes(model: PreTrainedModel, adapter: Path) -> tuple[dict[str, WeightDelta], dict[str, Tensor]]:
    """Return, by parameter name, the weight changes of the adapter in the directory `adapter`, and the tensors that it
    replaces.

    Raises as `merge_files`.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = {name: tensor.float() for name, tensor in read_adapter(adapter).items()}
    if settings.get("lora_bias"):
        raise _merge_error("its factors have biases of their own (lora_bias)")
    changes: dict[str, WeightDelta] = {}
    owners = {name.split(".lora_")[0] for name in tensors if ".lora_" in name}
    modules = dict(model.named_modules())
    experts = _expert_layers(model, adapter) if settings.get("target_parameters") else {}
    for owner in sorted(owners):
        if owner in experts:
            name, scale, count, transposed = experts[owner]
            a, b = tensors[f"{owner}.lora_A.weight"], tensors[f"{owner}.lora_B.weight"]
            a = a.reshape(count, -1, a.shape[1])  # rows e·r … of A; every E-th column of B from e on
            b = b.reshape(b.shape[0], -1, count).permute(2, 0, 1)
            changes[name] = WeightDelta(a, b, scale, transposed, None)
            continue
        if owner not in modules:
            raise UserError(f"{adapter}: this adapter belongs to another backbone, which has {owner}")
        kind = modules[owner]
        magnitude = tensors.get(f"{owner}.lora_magnitude_vector.weight")
        if isinstance(kind, nn.Embedding):
            a, b, transposed = tensors[f"{owner}.lora_embedding_A"], tensors[f"{owner}.lora_embedding_B"], True
        else:
            a, b = tensors[f"{owner}.lora_A.weight"], tensors[f"{owner}.lora_B.weight"]
            transposed = is_conv1d(kind)
        if not (isinstance(kind, nn.Linear | nn.Embedding) or transposed):
            raise _merge_error(f"{owner} is a {type(kind).__name__}, neither a linear layer nor an embedding")
        scale = saved_scale(settings, owner, a.shape[0])
        changes[f"{owner}.weight"] = WeightDelta(a, b, scale, transposed, magnitude)
    return changes, {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}


def _expert_layers(model: PreTrainedModel, adapter: Path) -> dict[str, tuple[str, float, int, bool]]:
    """Return for each layer of stacked experts, by its name in the adapter: the parameter, the scale, E, and True if it
    is (E, in, out). PEFT nests these layers in an order of its own, so they are identified by wrapping a copy of the
    model."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.layer import ParamWrapper

    config: Any = LoraConfig.from_pretrained(str(adapter))
    wrapped = get_peft_model(copy.deepcopy(model), config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    experts = {}
    for full, layer in wrapped.named_modules():
        if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
            owner = full.removeprefix("base_model.model.")
            stack = owner.split(".base_layer")[0]
            transposed = not layer._did_swap_in_out_features
            experts[canonical_name(owner + ".lora_A").removesuffix(".lora_A")] = (
                f"{stack}.{layer.parameter_name}", layer.scaling[ADAPTER], layer.num_experts, transposed,
            )  # fmt: skip
    return experts


def _file_changes(model: PreTrainedModel, changes: dict[str, WeightDelta]) -> Iterator[tuple[str, str, WeightDelta]]:
    """Yield for each tensor of the files that changes: its key there, its key in the merged files, and the change.

    Raises UserError for experts that the files store neither one by one nor all in one tensor.
    """
    checkpoint: Any = model.checkpoint
    for name, change in changes.items():
        if name in checkpoint.converted:
            for key, part in _expert_parts(checkpoint, name, change):
                yield key, key, part
        else:
            key = checkpoint.keys[name]
            yield key, key if name == _names_sharing_tensor(checkpoint, name)[0] else name, change


def _expert_parts(checkpoint: Any, name: str, change: WeightDelta) -> Iterator[tuple[str, WeightDelta]]:
    """Yield the files' own tensors of the parameter `name`, in which transformers stacks the experts and concatenates
    the projections (gate, up), each with its part of the change."""
    projections = checkpoint.stacked.get(name, [])
    if not projections or change.a.ndim != 3 or change.transposed:
        raise _merge_error(f"the files of this backbone hold {name} in a form that only transformers can make")
    start = 0
    for keys in projections:
        rows = checkpoint.entries[keys[0]].shape[0]
        for expert, key in enumerate(keys):
            yield key, WeightDelta(change.a[expert], change.b[expert, start : start + rows], change.scale, False, None)
        start += rows


def spot_check(model: PreTrainedModel, out: Path, changes: dict[str, WeightDelta], *, rows: int = 4) -> float:
    """Return the largest difference between `rows` rows of each changed weight as written and as recomputed in float64.

    model: as for `merge_files`. Relative to the largest value of the row; includes rounding to the stored dtype.
    """
    checkpoint: Any = model.checkpoint
    written = read_index(out)
    maximum = 0.0
    for key, target, change in _file_changes(model, changes):
        source, written_entry = checkpoint.entries[key], written[target]
        scale = _row_scale(source, change) if change.magnitude is not None else None
        for start in {i * (source.shape[0] - 1) // max(rows - 1, 1) for i in range(rows)}:
            exact = change.added_to(source, start, start + 1)
            if scale is not None:
                exact = exact * (scale if change.transposed else scale[start : start + 1, None]).double()
            written_rows = _read_rows(written_entry, start, start + 1).double()
            maximum = max(maximum, float((written_rows - exact).abs().max() / exact.abs().max().clamp_min(1e-30)))
    return maximum


def _names_sharing_tensor(checkpoint: Any, name: str) -> list[str]:
    """Return the names tied to the same tensor of the files as `name`, the one the tensor is named after first."""
    return [sharing for sharing, key in checkpoint.keys.items() if key == checkpoint.keys[name]]


def _unadapted_tensor(entry: TensorEntry, cast: torch.dtype | None) -> _TensorSource:
    """Return the piece for a tensor without an adapter: copied byte by byte, or rounded to `cast`."""
    if cast is None or entry.dtype == cast or not (entry.dtype.is_floating_point and entry.shape):
        return _TensorSource(entry.dtype, entry.shape, entry=entry)
    return _TensorSource(cast, entry.shape, rows=lambda start, stop: _read_rows(entry, start, stop).double())


def _tied_weights(model: PreTrainedModel, name: str) -> list[str]:
    """Return the weights tied to the weight `name`, itself included; empty if it is not tied."""
    pairs = model.all_tied_weights_keys
    source = pairs.get(name, name)
    others = [target for target, tied_source in pairs.items() if tied_source == source]
    return sorted({source, *others}) if others else []


def _untie(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Untie the model's head from its embedding, in its config.

    Raises UserError if no setting unties them, or if that has other effects (an encoder-decoder scales the input of a
    tied head).
    """
    config = model.config.get_text_config()
    ties = any(getattr(owner, "tie_word_embeddings", False) for owner in (model.config, config))
    if len(names) > 2 or not ties or model.config.is_encoder_decoder:
        raise _merge_error(f"{', '.join(names)} are one tensor in this architecture, and the adapter would part them")
    config.tie_word_embeddings = model.config.tie_word_embeddings = False


def _merge_error(reason: str) -> UserError:
    return UserError(
        f"this adapter cannot be folded into the weights: {reason}; hand on the adapter as it is (`flatshift export`)"
    )


def _merged_rows(entry: TensorEntry, change: WeightDelta) -> Rows:
    scale = None if change.magnitude is None else _row_scale(entry, change)

    def rows(start: int, stop: int) -> Tensor:
        weight = change.added_to(entry, start, stop)
        if scale is not None:
            weight.mul_(scale if change.transposed else scale[start:stop, None])
        return weight

    return rows


def _row_scale(entry: TensorEntry, change: WeightDelta) -> Tensor:
    """Return DoRA's scale: magnitude over the norm of each output's weights (m,), float64."""
    assert change.magnitude is not None
    squares = torch.zeros_like(change.magnitude, dtype=torch.float64)
    for start, stop in _row_spans(entry.shape):
        weight = change.added_to(entry, start, stop)
        if change.transposed:
            squares += weight.square().sum(dim=0)
        else:
            squares[start:stop] = weight.square().sum(dim=1)
    return change.magnitude / squares.sqrt()


def _read_rows(entry: TensorEntry, start: int, stop: int) -> Tensor:
    width = entry.bytes // entry.shape[0]
    data = bytearray((stop - start) * width)
    with entry.file.open("rb") as stream:
        stream.seek(entry.offset + start * width)
        if stream.readinto(data) != len(data):
            raise UserError(f"{entry.file} became shorter while it was read")
    return torch.frombuffer(data, dtype=entry.dtype).reshape(stop - start, *entry.shape[1:])


def _row_spans(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK // (8 * math.prod(shape[1:]) or 1))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _write_file(file: Path, pieces: dict[str, _TensorSource], rounding: RoundingStatistics) -> None:
    """Write a safetensors file: length of the header, header, tensors, wider types first so that each is aligned."""
    order = sorted(pieces, key=lambda key: (-pieces[key].dtype.itemsize, key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        piece = pieces[key]
        span = [end, end + piece.size]
        header[key] = {"dtype": _DTYPE_NAMES[piece.dtype], "shape": list(piece.shape), "data_offsets": span}
        end += piece.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the header's end is aligned to 8 bytes
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for key in order:
            for part in pieces[key].chunks(rounding):
                stream.write(part)
        assert stream.tell() == 8 + len(text) + end, file


_ENDS = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))


def combine_adapters(adapters: Sequence[tuple[SavedAdapter, float]], out: Path) -> None:
    """Write Σ weight · adapter as a PEFT adapter into the existing directory `out`, read it back and compare.

    The sum of the weight changes is exact: Σ w_i s_i B_i A_i = [w_1 s_1 B_1, w_2 s_2 B_2, …] [A_1; A_2; …]. PEFT calls
    this combination `cat`; its `linear` sums factors instead, whose product is not the sum of the products.

    A head, a bias or another module trained in full is taken from the first adapter; only that one may have any.

    Raises UserError: DoRA, adapters on experts, soft tokens, or a fully trained module outside the first adapter.
    Raises RuntimeError: the file differs from the tensors.
    """
    from safetensors.torch import save_file

    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    combined: dict[str, Tensor] = {}
    ends: dict[str, tuple[str, str]] = {}
    for index, (saved, weight) in enumerate(adapters):
        tensors = read_adapter(saved.path)
        if saved.settings.get("use_dora") or saved.settings.get("target_parameters"):
            raise UserError(f"{saved.path}: only plain LoRA on linear layers and embeddings can be summed")
        for layer, (_, scale) in saved.scales(tensors).items():
            a, b = ends[layer] = next(pair for pair in _ENDS if f"{layer}.{pair[0]}" in tensors)
            down, up = tensors.pop(f"{layer}.{a}").float(), tensors.pop(f"{layer}.{b}").float()
            parts.setdefault(layer, []).append((down, weight * scale * up))
        if tensors and index:
            raise UserError(f"{saved.path} also holds {min(tensors)}, which is no sum; put this adapter first")
        combined |= tensors
    for layer, factors in parts.items():
        if len({(a.shape[1], b.shape[0]) for a, b in factors}) > 1:
            raise UserError(f"{layer} has different shapes in these adapters: they are of different backbones")
        combined[f"{layer}.{ends[layer][0]}"] = torch.cat([a for a, _ in factors])
        combined[f"{layer}.{ends[layer][1]}"] = torch.cat([b for _, b in factors], dim=1)
    host = {peft_tensor_name(name, parts): tensor.contiguous() for name, tensor in combined.items()}
    save_file(host, out / WEIGHTS, metadata={"format": "pt"})
    check_saved(read_adapter(out), combined)
    ranks = {layer: sum(len(a) for a, _ in factors) for layer, factors in parts.items()}
    common = Counter(ranks.values()).most_common(1)[0][0]
    others = {layer: rank for layer, rank in ranks.items() if rank != common}
    changes = {  # every layer by name, with its rank, at the scale 1
        **{"r": common, "lora_alpha": common, "rank_pattern": others, "alpha_pattern": others, "use_rslora": False},
        **{"init_lora_weights": True, "target_modules": sorted(ranks), "exclude_modules": None},
        "layers_to_transform": None,
    }
    write_json(out / SETTINGS, {**adapters[0][0].settings, **changes})
