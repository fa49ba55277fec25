"""Check before the first step that a small copy of the backbone computes on a mesh what it computes in one process.

The copy has the backbone's own configuration with few blocks, small widths and random weights. One step of it, with
dropout if the run has any, must have the same loss, gradients and gradient norm as in one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from flatshift.regularizers.layers.fused import FusedLayers

from ..atomic import read_json_object
from ..cache_directory import cache_root, write_cached_json
from ..compute.capabilities import seeded_rng
from ..compute.numerics import dropout_rates
from ..config import Adapter, Mesh, Train
from ..data.batches import TrainingDataLoader
from ..data.example import IGNORE, Example
from ..data.masking import Masking
from ..digests import record_digest
from ..errors import UserError, first_error_line, is_out_of_memory
from ..models.backbone import auto_class, check_task, open_backbone, quiet_transformers
from ..models.families import is_tried
from ..seeds import torch_generator
from ..tasks import LanguageModel, Task
from .build import build_engine
from .mesh import DATA, ProcessMesh
from .pipeline_plan import virtual_stages

BOUNDS = {"loss": 1e-5, "gradients": 1e-3, "norm": 1e-4}
"""Largest relative difference from one process; of the gradients, that of the worst tensor (its size is counted as at
least 1/1000 of the norm)."""
_NO_COPY = "cannot be compared with one process, where a small copy of it fails"
_FAILS = "fails in a step of a small copy"
_LENGTH, _DROPOUT, _SEED = 16, 0.1, 11
_FORM = 1
"""Version of this check, a part of the key of its results in the cache."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of one training step: of the whole model, on every rank."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]


def check_mesh_equality(
    backbone: str,
    *,
    task: Task,
    adapter: Adapter,
    train: Train,
    mesh: Mesh,
    world: ProcessMesh,
    label_names: Sequence[str] | None = None,
) -> None:
    """Raise UserError with the difference if a small copy of `backbone` is not trained on `mesh` as in one process.

    Collective. Model types that benchmarks have compared on these axes are not compared again; results are cached by
    configuration, settings, library versions and mesh.
    """
    config = open_backbone(backbone).config
    if world.size == 1 or is_tried(config.model_type, mesh):
        return
    check_task(backbone, task)
    mesh = dataclasses.replace(mesh, auto=False, microbatches=None)
    settings, step = _small_adapter(adapter), _small_train(train, world)
    try:
        small = shrink_config(config, mesh)
    except Exception as error:  # each architecture validates its own configuration
        raise UserError(f"mesh: {config.model_type} on {world} {_NO_COPY} ({first_error_line(error)})") from error
    for owner, name, rate in dropout_rates(small) if train.backbone_dropout is not None else ():
        if rate != train.backbone_dropout:
            setattr(owner, name, train.backbone_dropout)
    drops = adapter.dropout > 0 or any(rate > 0 for _, _, rate in dropout_rates(small))
    key = record_digest(
        {
            "form": [_FORM, torch.__version__, transformers.__version__, peft.__version__],
            "config": [small.to_json_string(use_diff=False), task.name, list(label_names or ()), drops],
            "settings": [dataclasses.asdict(each) for each in (settings, step, mesh)],
        }
    )
    file = cache_root() / "meshes" / f"{key}.json"
    answer = [_read_answer(file) if world.is_main else None]
    dist.broadcast_object_list(answer, src=0)
    problem = answer[0]
    if problem is None:
        case = SmallCase(small, task, settings, step, mesh, world, tuple(label_names or ()) or None)
        problem = case.find_problem(drops=drops)
        if world.is_main and not problem.startswith((_NO_COPY, _FAILS)):
            write_cached_json(file, {"problem": problem})
    if problem:
        raise UserError(f"mesh: {config.model_type} on {world} {problem}")


def _read_answer(file: Path) -> str | None:
    """Return a cached result: the problem, empty if there is none; None if the file has none."""
    with contextlib.suppress(UserError, OSError):
        problem = read_json_object(file).get("problem")
        return problem if isinstance(problem, str) else None
    return None


@dataclasses.dataclass(frozen=True)
class SmallCase:
    """A small copy of a backbone, and the settings it is trained with."""

    config: Any
    task: Task
    adapter: Adapter
    train: Train
    mesh: Mesh
    world: ProcessMesh
    label_names: tuple[str, ...] | None = None

    def find_problem(self, *, drops: bool) -> str:
        """Return the difference from one process as the end of a sentence, empty if there is none; collective."""
        problem = self._compare(_DROPOUT if drops else 0.0)
        if problem and drops and not self._compare(0.0):
            return f"{problem}; without dropout they are equal: set adapter.dropout: 0 and train.backbone_dropout: 0"
        return problem and f"{problem}; train in one process or on another axis"

    def _compare(self, dropout: float) -> str:
        with tempfile.TemporaryDirectory() as folder:
            problem = _NO_COPY
            try:
                step = partial(self.step, folder, self.save(Path(folder), dropout), dropout)
                single = step(ProcessMesh.alone(self.world.device), Mesh())
                problem = _FAILS
                mine = step(self.world, self.mesh)
            except Exception as error:
                if is_out_of_memory(error) or (isinstance(error, UserError) and folder not in str(error)):
                    raise
                reason = first_error_line(error).replace(folder, "it")
                return f"{problem} ({'on another rank' if 'Connection' in reason else reason})"
        verdict = [describe_difference(mine, single)]
        dist.broadcast_object_list(verdict, src=0)
        return verdict[0]

    def save(self, folder: Path, dropout: float) -> Task:
        """Write the copy to `folder`, with `dropout` for each of its own rates above 0 and no layer left out.

        Returns the task that it is trained for.
        """
        for owner, key, rate in dropout_rates(self.config):
            if rate > 0:
                setattr(owner, key, 0.0 if "layerdrop" in key else dropout)
        task = LanguageModel() if self.task.traits.is_answer_level else self.task
        with_head, _ = auto_class(task, num_labels=2, label_names=None)
        auto = transformers.AutoModel if task.traits.has_new_head else with_head
        with quiet_transformers(), seeded_rng(_SEED, torch.device("cpu")):
            model: Any = auto.from_config(self.config, dtype=torch.float32, trust_remote_code=False)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    value = torch.randn(parameter.shape, generator=torch_generator(_SEED, name))
                    if not parameter.requires_grad:  # computed, not read from the files
                        continue
                    if parameter.ndim < 2:  # biases and norms start at 0 and 1, where errors could hide
                        parameter.add_(value * 0.05)
                    else:
                        parameter.copy_(value * parameter.shape[-1] ** -0.5)
            model.should_save_on_this_rank = lambda is_main_process: is_main_process  # each reads its own copy
            model.save_pretrained(folder)
        return task.replace(pack=False) if task.pack else task

    def step(self, folder: str, task: Task, dropout: float, world: ProcessMesh, mesh: Mesh) -> StepResult:
        """Return one step on `mesh`, of the same rows on any."""
        engine = build_engine(
            folder,
            task=task,
            adapter=dataclasses.replace(self.adapter, dropout=dropout if self.adapter.dropout else 0.0),
            train=self.train,
            mesh=mesh,
            world=world,
            label_names=self.label_names,
        )
        first = {name: _first_value(name, value) for name, value in engine.full_tensors(engine.parameters).items()}
        engine.load_full_tensors(first, engine.parameters, context="first values")
        engine.model.train()
        batches = self._batches(task, engine.share, engine.multiple)
        engine.dropout_context = partial(engine.dropout(_SEED).forward_pass, 0)

        def context(index: int) -> contextlib.AbstractContextManager[None]:
            return seeded_rng(_SEED + index, world.device)

        with FusedLayers(engine.model).replace_forwards():
            loss = engine.forward_backward(batches.at(0), batches.supervised(0), task=task, head=None, context=context)
        norm = engine.clip(None)
        grads = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
        return StepResult(float(loss), float(norm), {n: g.cpu().clone() for n, g in engine.full_tensors(grads).items()})

    def _batches(self, task: Task, share: tuple[int, int], multiple: int) -> TrainingDataLoader:
        config = self.config.get_text_config()
        sizes = [getattr(config, key, None) for key in ("vocab_size", "src_vocab_size", "tgt_vocab_size")]
        vocabulary, masking = min(size for size in sizes if size), None
        if task.traits.masks_tokens:
            masking = Masking(vocabulary - 1, np.arange(vocabulary // 2))
        return TrainingDataLoader(
            list(_examples(task, self.train.batch_size, vocabulary, len(self.label_names or ()))), task=task,
            batch_size=self.train.batch_size, seed=_SEED, max_length=_LENGTH,
            pad_id=getattr(config, "pad_token_id", None) or 0, share=share, multiple=multiple, masking=masking,
        )  # fmt: skip


def _first_value(name: str, value: Tensor) -> Tensor:
    """Return the first value of a trained tensor; B is drawn where it would be zero, so that A has a gradient."""
    if ".lora_B." not in name:
        return value
    return torch.randn(value.shape, generator=torch_generator(_SEED, name)) * 0.05


def _examples(task: Task, count: int, vocabulary: int, classes: int) -> Iterator[Example]:
    for i in range(count):
        ids = [8 + (11 * i + 5 * k + k * k) % (vocabulary - 16) for k in range(_LENGTH - 1 - i % 4)]
        if task.traits.is_sequence_level:
            labels: Any = i % max(classes, 1) if task.one_class else float(i % 3) - 0.7
            if task.has_classes and not task.one_class:
                labels = tuple((i + c) % 2 for c in range(classes))
            yield Example(ids, labels, str(i), str(i))
        elif task.traits.encoder_decoder:
            yield Example(ids, ids[3:], str(i), str(i), decoder_ids=[ids[0], *ids[3:-1]])
        elif task.traits.masks_tokens:
            yield Example(ids, ids, str(i), str(i), words=list(range(len(ids))))
        else:
            yield Example(ids, [IGNORE, *ids[1:]], str(i), str(i))


def describe_difference(mine: StepResult, single: StepResult) -> str:
    """Return how far a step is from that of one process, as the end of a sentence; empty within `BOUNDS`."""
    if not (math.isfinite(single.loss) and math.isfinite(single.norm)):
        return f"cannot be compared with one process, where a small copy has the loss {single.loss}"
    odd = sorted(mine.gradients.keys() ^ single.gradients.keys())
    if odd:
        return f"gives other tensors a gradient than one process ({odd[0]})"
    far = {"loss": abs(mine.loss - single.loss) / max(1.0, abs(single.loss)), "gradients": 0.0}
    for name, wanted in single.gradients.items():
        size = max(float(wanted.double().norm()), 1e-3 * single.norm, 1e-30)
        distance = float((mine.gradients[name].double() - wanted.double()).norm()) / size
        far["gradients"] = max(far["gradients"], math.inf if math.isnan(distance) else distance)
    far["norm"] = abs(mine.norm - single.norm) / max(single.norm, 1e-30)
    if all(far[name] <= bound for name, bound in BOUNDS.items()):
        return ""
    figures = ", ".join(f"{name} {far[name]:.1e} (at most {bound:.0e})" for name, bound in BOUNDS.items())
    return f"does not compute what one process does, by relative differences of a small copy: {figures}"


# ------------------------------------------------------------------------------------------------ the small copy


def _small_adapter(adapter: Adapter) -> Adapter:
    """Return `adapter` for few blocks of small widths, with first values by name."""
    targets = adapter.targets
    if not isinstance(targets, str) and any(re.search(r"\.\d+\.", name) for name in targets):
        targets = "all-linear"
    changes: dict[str, Any] = {"rank": min(adapter.rank, 4), "layers": None, "targets": targets, "init": "default"}
    return dataclasses.replace(adapter, **changes, init_rows=None, start=None, under=None)


def _small_train(train: Train, world: ProcessMesh) -> Train:
    """Return `train` for one step in float32, of at most two rows a rank."""
    ranks = world.width(*DATA)
    return Train(
        batch_size=ranks * min(2, max(1, train.batch_size // ranks)),
        max_length=_LENGTH,
        precision="fp32",
        checkpointing=train.checkpointing,
        device=train.device,
    )


def shrink_config(config: Any, mesh: Mesh) -> Any:
    """Return transformers' `config` with few blocks, of every kind, and small widths: all widths are divided by one
    number, and if the model is wide still, its heads and all widths but theirs by four."""
    values = config.to_dict()
    values.pop("quantization_config", None)
    virtual = virtual_stages(mesh.schedule, mesh.virtual) if mesh.pp > 1 else 1
    blocks = max(2, mesh.pp * virtual)
    try:
        return type(config).from_dict(_shrink(values, config, blocks, mesh.tp))
    except Exception:  # Gemma wants a width that its heads divide, although theirs is another
        return type(config).from_dict(_shrink(values, config, blocks, mesh.tp, by_heads=True))


_WIDTH = re.compile(
    r"(size|dim|rank|width|channels|headdim|size_mlp|dim_head|dim_ff|dff|n_embd|n_inner|d_(state|ssm|head|rel|model|ff|kv"
    r"|inner))$"
)
_NO_WIDTH = re.compile(
    r"vocab|window|kernel|conv1d|chunk|block|patch|image|batch|group|type|sample|multiple|position|max|step_limit|_per_"
)
_BLOCKS = re.compile(
    r"^((num_)?(sparse_)?(hidden_|encoder_|decoder_)?layers|n_layers?|num_sparse_\w+_layers|num_blocks)$"
)
_PERIOD = re.compile(r"(period|_step|every\w*|interval|freq\w*|pattern|layer_group_size)$")


def _shrink(values: Mapping[str, Any], config: Any, blocks: int, tp: int, *, by_heads: bool = False) -> dict[str, Any]:
    """Return the keys `values` of `config` for a small copy, of it and of the configurations in it."""
    hidden, heads, count = (
        values.get(config.attribute_map.get(name, name))
        for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    layers = values.get("per_layer_config") or {}
    widths = {key: value for key, value in values.items() if type(value) is int and _is_width(key)}
    unit = heads if by_heads and type(heads) is int and type(hidden) is int and hidden % heads == 0 else 1
    divisor = _find_divisor([values, *layers.values()], values.get("rope_parameters") or {}, hidden, heads, unit)
    counts = {key: value for key, value in values.items() if type(value) is int and re.search("heads?$", key)}
    wide = type(hidden) is int and hidden // divisor > 512
    fewer = 4 if wide and not any(value % (4 * tp) for value in counts.values()) else 1
    kept = _choose_blocks(values, count, blocks) if type(count) is int else list(range(blocks))
    small: dict[str, Any] = {}
    for key, value in values.items():
        inner = getattr(config, key, None) if isinstance(value, dict) else None
        if isinstance(value, dict) and hasattr(inner, "to_dict"):
            small[key] = _shrink(value, inner, blocks, tp, by_heads=by_heads)
        elif key in widths:
            small[key] = max(1, value // divisor // (1 if _is_of_head(key) else fewer))
        elif key in counts:
            small[key] = value // fewer
        elif key == "per_layer_config" and layers:
            own = {new: layers.get(f"{old:02d}", {}) for new, old in enumerate(kept)}
            small[key] = {
                f"{new:02d}": {k: v // divisor if _is_width(k) else v for k, v in changes.items()}
                for new, changes in own.items()
            }
        elif key == "num_kv_shared_layers":
            small[key] = sum(old >= count - value for old in kept)
        elif key == "rope_parameters" and isinstance(value, dict):
            small[key] = {name: _shrink_rope(part, divisor) for name, part in value.items()}
        else:
            small[key] = _shrink_count(key, value, count, kept)
    return _fit_tokens(small)


def _is_width(key: str) -> bool:
    return _WIDTH.search(key) is not None and _NO_WIDTH.search(key) is None


def _is_of_head(key: str) -> bool:
    return "head" in key or key == "d_kv"


def _find_divisor(parts: list[Mapping[str, Any]], rope: Mapping[str, Any], hidden: Any, heads: Any, unit: int) -> int:
    """Return the largest power of two up to 64 that divides the width of the model to a multiple of `unit` of at least
    32, and those of its heads to even numbers of at least 4 (of states and rotated parts 2)."""
    sizes = {key: value for part in parts for key, value in part.items() if type(value) is int and _is_width(key)}
    smallest = {size: 2 if "mamba" in key else 4 for key, size in sizes.items() if _is_of_head(key)}
    if not smallest and type(hidden) is int and type(heads) is int and heads:
        smallest[hidden // heads] = 4
    rotated = [value for part in (*parts, rope) for key, value in part.items() if key in _ROTATED and value]
    for share in rotated:
        sizes_of_heads = [share] if type(share) is int else [int(size * share) for size in smallest]
        smallest |= {size: 2 for size in sizes_of_heads if size not in smallest}
    divisor = 64
    while divisor > 1 and not all(
        size % (2 * divisor) == 0 and size // divisor >= least for size, least in smallest.items()
    ):
        divisor //= 2
    while divisor > 1 and type(hidden) is int and (hidden % (divisor * unit) or hidden // divisor < 32):
        divisor //= 2
    return divisor


_ROTATED = ("rotary_dim", "partial_rotary_factor", "rotary_pct")


def _shrink_rope(value: Any, divisor: int) -> Any:
    if isinstance(value, dict):
        return {name: _shrink_rope(part, divisor) for name, part in value.items()}
    if isinstance(value, list) and value and all(type(each) is int for each in value):  # sections of a head
        return [each // divisor for each in value]
    return value[: len(value) // divisor] if isinstance(value, list) else value


def _is_index_list(value: Any) -> bool:
    """True for indices of blocks, ascending; not for one value a block."""
    ints = isinstance(value, list) and all(type(each) is int for each in value)
    return ints and len(value) > 0 and value == sorted({*value}) and (len(value) > 2 or max(value) > 1)


def _choose_blocks(values: Mapping[str, Any], count: int, blocks: int) -> list[int]:
    """Return the indices of `blocks` blocks, more if there are more kinds of them, at most four."""
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == count]
    lists = [value for value in lists if not _is_index_list(value) and not any(type(each) is float for each in value)]
    indices = [value for key, value in values.items() if _is_index_list(value) and re.search("layer|idx|ids$", key)]
    kinds: dict[str, int] = {}
    shared = values.get("num_kv_shared_layers") or 0
    for i in range(count):
        kind = [value[i] for value in lists] + [i in value for value in indices] + [i >= count - shared]
        kinds.setdefault(repr(kind), i)
    chosen = [*kinds.values()][: max(blocks, 4)]
    return sorted([*chosen, *(i for i in range(count) if i not in chosen)][: max(blocks, len(chosen))])


def _shrink_count(key: str, value: Any, count: Any, kept: list[int]) -> Any:
    """Return the value of a key that is no width."""
    if isinstance(value, list):
        if _is_index_list(value) and re.search("layer|idx|ids$", key):
            return [new for new, old in enumerate(kept) if old in value]
        if len(value) == count:
            return [value[i] for i in kept]
        if key == "attention_types":  # GPT-Neo: kinds of blocks in turn, times a number
            return [[kinds, len(kept) // len(kinds)] for kinds, _ in value]
        return value
    if type(value) is not int or value < 2:
        return value
    if _BLOCKS.search(key):
        return len(kept)
    if "vocab" in key and "size" in key:
        return 256 + value % 16 if value > 512 else value
    if "window" in key or key == "attention_chunk_size":
        return min(value, 8)
    if re.search("experts$|experts_per_tok", key) and "shared" not in key:
        return min(value, 4 if "per_tok" in key else 16)
    if key in ("n_group", "topk_group", "num_expert_group"):
        return min(value, 1 if key == "topk_group" else 2)
    if _PERIOD.search(key):
        return 2
    return min(value, 1) if "offset" in key or key.startswith("first_k_dense") else value


def _fit_tokens(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with special tokens inside the vocabulary."""
    size = values.get("vocab_size")
    if type(size) is not int:
        return values
    ids = {k: v for k, v in values.items() if re.search(r"_(token_)?(id|index)$", k) and type(v) is int and v >= size}
    return values | {key: value % 7 + 1 for key, value in ids.items()}
