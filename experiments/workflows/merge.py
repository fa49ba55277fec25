"""A run's adapter folded into its backbone: a model folder that plain transformers loads.

    flatshift merge runs/first --out merged

The folder appears whole or not at all, holds safetensors only, and is re-opened and compared before it gets its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Literal

from experiments.recipe import resume_recipe
from experiments.recipe.config import Recipe
from experiments.workflows.build import lay_out
from experiments.workflows.export import known_labels, require_trained
from experiments.workflows.model_card import card
from experiments.workflows.saved_tokenizer import run_rows, save_tokenizer
from finetune.adapters.adapter import WEIGHTS
from finetune.adapters.saved import SavedAdapter
from finetune.atomic import write_json, write_text
from finetune.config import Mesh
from finetune.data.inference import Inference
from finetune.errors import UserError
from finetune.lock import owned
from finetune.models.backbone import auto_class, open_backbone, quiet_transformers
from finetune.run_directory import new_output, refuse_old
from finetune.seeds import numpy_generator

Check = Literal["auto", "logits", "rows"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
RECORD = "merge.json"
_SMALL = 2 << 30
"""Bytes in float32 up to which a model is loaded to compare logits without being asked to."""
_MEMORY_SHARE = 0.5
_ROWS, _TOKENS = 8, 32
_FAR = {False: 0.25, True: 0.01}
"""Largest difference of logits, as a share of the largest, that rounding explains: of 16 bits, of 32 and more."""


def merge(path: Path, out: Path, *, check: Check = "auto", dtype: Dtype = "auto") -> dict[str, Any]:
    """Write the backbone with the run's adapter folded in, to the new directory `out`.

    Folding is done in float64 and rounded once, file by file and some rows at a time: neither the model nor a file of
    it is ever whole in memory. Some rows of every changed weight are then read back and compared with the same sum. An
    adapter that was trained on a quantised backbone (`quantization` of the result) is folded into the float weights,
    which are not the ones that it saw. What the files hold in another form than the model is merged in memory by PEFT
    instead, in float32.

    The tokenizer is saved as `experiments.workflows.saved_tokenizer` has it, and compared with training's own tokens.
    dtype: of the written weights; `auto` keeps the backbone's own, tensor by tensor.
    check: `logits` also loads backbone + adapter (float32) and the written model, one after the other, and compares
        their logits on rows of the run; `auto` does so for models up to 2 GiB in float32, on rows of drawn tokens where
        the run's files cannot be read; `rows` never.
    Returns what `merge.json` in `out` holds: `dtype`, `quantization`; `rounding`, by dtype the `largest` distance
    |round(W + sBA) − (W + sBA)| of any merged weight and the largest `relative` to its row's largest value;
    `largest_rounding`, the relative distance found in the rows that were read back (None: merged in memory);
    `max_logit_difference`, `largest_logit`, `rows`, `other_labels` among those (None where there are no classes), and
    whether those were `drawn` (None, None, 0, None, False where logits were not compared); `tokenized_rows`, how many
    rows of the run the saved tokenizer was compared on; `adapter_sha256`.
    Raises UserError if `path` is no finished run, `out` is not empty or in use, the backbone changed or its weights are
    quantised in its own files, memory is too small for what only memory can do, `logits` finds no row, logits differ by
    more than rounding explains, or the saved tokenizer reads other tokens than training did.
    """
    with owned(out):
        refuse_old(out)
        return _merge(path, out, check, dtype)


def _merge(path: Path, out: Path, check: Check, wanted: Dtype) -> dict[str, Any]:
    import torch

    from finetune.adapters.merge import NotByFiles

    recipe = resume_recipe(path).recipe
    require_trained(path, recipe)
    if recipe.adapter.soft_tokens is not None:
        instead = "take `flatshift export`" if recipe.adapter.projector is None else "use the adapter as it is"
        raise UserError(f"{path}: soft tokens change no weights, so they cannot be merged; {instead}")
    if recipe.adapter.init == "loftq":
        raise UserError(
            f"{path}: its adapter makes up for what quantisation lost (adapter.init: loftq), so it fits the quantised "
            "weights only; use it there, or train without loftq to merge"
        )
    _refuse_quantised(recipe)
    SavedAdapter.find(str(path), where=str(path))  # refuses one that fits changed frozen weights
    labels = known_labels(path, recipe)
    cast = None if wanted == "auto" else getattr(torch, wanted)
    dtype = cast or stored_dtype(recipe)
    try:
        rows = run_rows(recipe, labels)
    except (UserError, OSError) as error:  # a run that was copied elsewhere has its backbone, and maybe not its data
        if check == "logits":
            raise UserError(f"--check logits: {error} (`--check rows` reads no data)") from error
        rows = None
    adapter = path / "adapter"
    with new_output(out) as temporary:
        try:
            rounding, worst = _merge_by_files(recipe, labels, adapter, temporary, dtype, cast)
        except NotByFiles as reason:
            _require_memory(recipe, str(reason))
            rounding, worst = _merge_in_memory(recipe, labels, adapter, temporary, dtype), None
        tokenizer, tokenized = save_tokenizer(recipe, temporary, rows=rows)
        compared = _compare_logits(recipe, labels, adapter, temporary, dtype, check, drawn=rows is None)
        result = {
            "dtype": str(dtype).removeprefix("torch."),
            "quantization": recipe.train.quantization,
            "rounding": rounding,
            **compared,
            "largest_rounding": worst,
            "tokenized_rows": tokenized,
            "adapter_sha256": hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest(),
        }
        write_json(temporary / RECORD, result)
        write_text(temporary / "README.md", card(path, recipe, tokenizer=tokenizer, labels=labels, form="merged"))
    return result


def _merge_by_files(
    recipe: Recipe, labels: tuple[str, ...] | None, adapter: Path, out: Path, dtype: Any, cast: Any
) -> tuple[dict[str, Any], float]:
    """Weight files, config.json and generation_config.json; roundings of all weights, and of the rows read back."""
    import torch

    from finetune.adapters.merge import merge_files, read_changes, spot_check
    from finetune.models.meta import build_skeleton
    from finetune.models.safetensors_index import read_index

    model: Any = build_skeleton(recipe.backbone, task=recipe.task, label_names=labels)
    changes, _ = read_changes(model, adapter)
    merged = merge_files(model, adapter, out, dtype=dtype, cast=cast)
    worst = spot_check(model.checkpoint, out, changes)
    kinds = {entry.dtype for entry in read_index(out).values() if entry.dtype.is_floating_point}
    if not worst <= max(torch.finfo(kind).eps for kind in kinds):
        raise RuntimeError(f"the merged weights differ from backbone + adapter by {worst:.2g} of a row's largest value")
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.use_cache = True
    model.config.save_pretrained(out)
    if model.can_generate():
        model.generation_config.save_pretrained(out)
    return merged.rounding.as_json(), worst


def _merge_in_memory(
    recipe: Recipe, labels: tuple[str, ...] | None, adapter: Path, out: Path, dtype: Any
) -> dict[str, Any]:
    from finetune.adapters.merge import Rounding

    exact = alone_in_float32(recipe)
    model = lay_out(exact, exact.task, labels, adapter=adapter)[0].model
    merged = model.merge_and_unload(safe_merge=True)
    merged.config.use_cache = True
    rounding = Rounding()
    for parameter in merged.parameters():
        rounding.add(parameter.detach(), parameter.detach().to(dtype))
    with quiet_transformers():
        merged.to(dtype).save_pretrained(out)
    return rounding.as_json()


def _compare_logits(
    recipe: Recipe,
    labels: tuple[str, ...] | None,
    adapter: Path,
    out: Path,
    dtype: Any,
    check: Check,
    *,
    drawn: bool,
) -> dict[str, Any]:
    """The written model, read back, beside backbone + adapter in float32, one after the other.

    drawn: on rows of drawn tokens, as those of the run are out of reach."""
    import torch

    nothing = {"max_logit_difference": None, "largest_logit": None, "rows": 0, "other_labels": None, "drawn": False}
    whole = 4 * sum(file.stat().st_size for file in out.glob("*.safetensors")) // dtype.itemsize
    fits = whole <= available_memory() * _MEMORY_SHARE
    if check == "logits" and not fits:
        raise UserError(
            f"--check logits: this model takes {whole / 2**30:.1f} GiB in float32, more than half of the free memory; "
            "leave it at auto, which then compares rows of the weights"
        )
    if check == "rows" or (check == "auto" and not (fits and whole <= _SMALL)):
        return nothing
    exact = alone_in_float32(recipe)
    engine, tokenizer = lay_out(exact, exact.task, labels, adapter=adapter)
    if drawn:
        inputs = _drawn_inputs(recipe, tokenizer, engine.model.config)
    else:
        found = [example for _, example in run_rows(recipe, labels, most=_ROWS, whole=False)]
        batch = next(Inference(len(found), tokenizer.pad_token_id).batches(found, exact.task))
        inputs = batch.inputs
    inputs = {name: tensor.to(engine.device) for name, tensor in inputs.items()}
    with torch.no_grad():
        before = engine.model.eval()(**inputs).logits.float()
    del engine
    kind, _ = auto_class(recipe.task, num_labels=None, label_names=labels)
    with quiet_transformers(), torch.no_grad():
        again = kind.from_pretrained(out, dtype=dtype, use_safetensors=True).to(before.device).eval()
        after = again(**inputs).logits.float()
    difference, largest = float((after - before).abs().max()), float(before.abs().max())
    far = _FAR[dtype.itemsize >= 4]
    if not difference <= far * largest:
        raise UserError(
            f"the merged model's logits differ from backbone + adapter by {difference:.3g} (largest {largest:.3g}), "
            f"more than rounding to {str(dtype).removeprefix('torch.')} explains; take --dtype float32, or hand on the "
            "adapter as it is (`flatshift export`)"
        )
    other = None
    if recipe.task.has_classes and recipe.task.by_example:
        marks = [(x > 0) if not recipe.task.one_class else x.argmax(-1, keepdim=True) for x in (before, after)]
        other = int((marks[0] != marks[1]).any(-1).sum())
    return {
        "max_logit_difference": difference,
        "largest_logit": largest,
        "rows": len(inputs["input_ids"]),
        "other_labels": other,
        "drawn": drawn,
    }


def _drawn_inputs(recipe: Recipe, tokenizer: Any, config: Any) -> dict[str, Any]:
    """Rows of plain tokens drawn by `train.seed`, for a run whose own are out of reach; all end with the same token, as
    a head over an encoder-decoder asks for."""
    import numpy as np
    import torch

    vocabulary = min(len(tokenizer), config.get_text_config().vocab_size)
    plain = np.setdiff1d(np.arange(vocabulary), tokenizer.all_special_ids)
    size = (_ROWS, min(_TOKENS, recipe.train.max_length))
    ids = torch.from_numpy(numpy_generator(recipe.train.seed, "merge-rows").choice(plain, size))
    if tokenizer.eos_token_id is not None:
        ids[:, -1] = tokenizer.eos_token_id
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if recipe.task.encoder_decoder:
        start = torch.full((_ROWS, 1), open_backbone(recipe.backbone).decoder_start)
        inputs["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], dim=1)
    return inputs


def _refuse_quantised(recipe: Recipe) -> None:
    config = json.loads((open_backbone(recipe.backbone).directory / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config") is not None:
        raise UserError(
            f"backbone {recipe.backbone!r} is quantised in its own files, and an adapter cannot be folded into packed "
            "values exactly; use the adapter as it is (`flatshift export`)"
        )


def _require_memory(recipe: Recipe, reason: str) -> None:
    """What PEFT merges in memory takes: the model in float32, and a float32 copy of its widest layers."""
    from finetune.models.safetensors_index import read_index

    numbers = sum(math.prod(entry.shape) for entry in read_index(open_backbone(recipe.backbone).directory).values())
    if 4 * numbers > available_memory() * 0.8:
        raise UserError(
            f"this adapter cannot be merged file by file ({reason}), and in memory it takes {4 * numbers / 2**30:.1f} "
            "GiB, more than is free; merge it on a larger machine, or use the adapter as it is (`flatshift export`)"
        )


def alone_in_float32(recipe: Recipe) -> Recipe:
    """The same run in one process, computed in float32 on the backbone's float weights."""
    train = dataclasses.replace(recipe.train, precision="fp32", quantization=None, backbone_dropout=None)
    return dataclasses.replace(recipe, train=train, mesh=Mesh())


def stored_dtype(recipe: Recipe) -> Any:
    """The dtype of the backbone's own weight files: of most of their values."""
    from finetune.models.safetensors_index import read_index

    sizes: dict[Any, int] = {}
    for entry in read_index(open_backbone(recipe.backbone).directory).values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + math.prod(entry.shape)
    return max(sizes, key=sizes.__getitem__)


def available_memory() -> int:
    """Bytes of host memory that are free for this process: of the machine, and of the limit of its control group."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        free = min(free, limit - int((group / "memory.current").read_text(encoding="utf-8")))
    return free
