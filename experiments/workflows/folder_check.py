"""Comparison of an exported folder with its run: plain transformers and PEFT load it in a process that never imports
this project, and answer the same inputs as the run's own model.

Compared are logits on rows of the run, greedy answers to two prompts and their ends, and the names of classes. A model
that exceeds memory in float32 stays in its files, on either side, and is read block by block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.saved_tokenizer import RunRows, read_run_rows
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.config import Mesh
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import GenerationPrompt
from flatshift.finetune.errors import UserError, shorten
from flatshift.finetune.lock import temporary_directory
from flatshift.finetune.models.backbone import auto_class, open_backbone
from flatshift.finetune.seeds import numpy_generator

_ROWS, _TOKENS, _LIKELIEST = 8, 32, 5
_PROMPTS, _LONGEST = 4, 256
"""Prompts of a reference, of which the first two are answered, and tokens of each."""
_ANSWER, _STREAMED_ANSWER = 16, 3
"""Maximum tokens of a greedy answer: for a model in memory, and for one that is read from disk again for each token."""
_MEMORY_SHARE = 0.5
FAR = {False: 0.25, True: 1e-3}
"""Largest difference of logits, as a share of the largest logit, that rounding explains: to 16 bits (False), to 32 bits
(True)."""


@dataclass(frozen=True)
class ExpectedAnswers:
    """Answers of the run's own model, in float32."""

    work: Path
    """Directory of its logits and the inputs, in the format that `plain_check` reads."""
    inputs: tuple[str, ...]
    batches: int
    drawn: bool
    """True if compared on tokens drawn by the seed, because the run's rows are unavailable."""
    rows: int
    reference: list[dict[str, Any]]
    """Reference of each prompt: `text`, `whole` (True if tokenizing the text gives these tokens), `ids`, `next` (the
    likeliest next tokens with their log probabilities), and for the first two `answer`, `ended`, `most` (maximum tokens
    of an answer) and `margins` (for each token of the answer, its logit minus the second largest)."""
    memory: int | None
    """Bytes that a model may take; None: it is loaded completely."""


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file in a folder."""

    file: str
    architecture: str
    config: dict[str, Any]
    """Configuration of the converted model: transformers' settings of its text part."""
    ends: list[int]
    """The tokens that it names as the end of an answer."""
    package: Path | None = None
    """Folder of the package `gguf`, where it is not installed."""


def to_single_float32_process(recipe: Recipe) -> Recipe:
    """Return the recipe for one process in float32, on the backbone's float weights."""
    train = dataclasses.replace(recipe.train, precision="fp32", quantization=None, backbone_dropout=None, device="cpu")
    return dataclasses.replace(recipe, train=train, mesh=Mesh())


@contextlib.contextmanager
def compute_expected(
    path: Path,
    recipe: Recipe,
    labels: tuple[str, ...] | None,
    rows: RunRows | None,
    ends: Sequence[int],
    *,
    added: Sequence[tuple[Path, float]] = (),
) -> Iterator[ExpectedAnswers]:
    """Compute the answers of backbone + adapter in float32; their files are deleted at the end of the block.

    rows: all rows of the run that are compared (`run_rows`); None: unavailable. ends: tokens that end an answer. added:
    other adapters whose changes are added, and their weights.
    """
    from safetensors.torch import save_file

    exact = to_single_float32_process(recipe)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    memory = None if _fits_in_memory(recipe) else int(available_memory() * _MEMORY_SHARE)
    if memory is None and not added:
        model = load_model(exact, exact.task, labels, adapter=path / "adapter")[0].model.eval()
    else:
        model = load_streamed(exact, labels, path / "adapter", added=added).eval()
    drawn = rows is None
    batches = [draw_inputs(recipe, tokenizer, model.config)] if drawn else _run_inputs(exact, labels, tokenizer)
    device = next(p.device for p in model.parameters() if not p.is_meta)
    with temporary_directory("flatshift-check-") as work:
        import torch

        tensors, count = dict[str, Any](), 0
        with torch.no_grad():
            for number, batch in enumerate(batches):
                logits = model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits.float().cpu()
                tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in batch.items()}
                tensors[f"{number}.logits"] = logits.contiguous()
                count += len(logits)
        save_file(tensors, work / "asked.safetensors")
        del tensors
        reference = (
            [] if not recipe.task.is_generative else _build_reference(exact, model, tokenizer, rows, ends, memory)
        )
        del model
        gc.collect()  # reference cycles of hooks keep the model alive, and the folder's model is loaded next
        yield ExpectedAnswers(work, tuple(batches[0]), len(batches), drawn, count, reference, memory)


@dataclass(frozen=True)
class Folder:
    """A folder that leaves."""

    path: Path
    exact: bool
    """Its weights are in 32 bits."""
    adapter: bool = False
    """It is one for PEFT."""
    gguf: GgufFile | None = None
    """Its GGUF file, which is compared (`plain_gguf`)."""


def compare_folder(
    wanted: ExpectedAnswers,
    recipe: Recipe,
    labels: tuple[str, ...] | None,
    folders: Sequence[Folder],
    *,
    ends: Sequence[int],
) -> list[dict[str, Any]]:
    """Compare the answers of plain transformers on each of `folders`, in one process, with those of the run.

    ends: the trained ones, at which plain `generate` has to stop.
    Returns of each `max_logit_difference, largest_logit, same_tokens` (places with the same likeliest token, or class),
    `places, rows, drawn, other_labels` (None without classes), `answers` (greedy answers that are the run's),
    `answers_by_rounding` (those that part from it where two tokens are as likely up to rounding), `stops` and
    `stop_texts`; `other_settings` (that llama.cpp has otherwise, in words); of a GGUF file that is not read only
    `unread`, why.
    Raises UserError where they are further apart than rounding explains, or where it does not stop.
    """
    asked = [_asked(wanted, recipe, labels, folder, ends) for folder in folders]
    (wanted.work / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    packages = [str(folder.gguf.package) for folder in folders if folder.gguf is not None and folder.gguf.package]
    return [
        {"unread": found["unread"]}
        if found["unread"]
        else _check_answers(wanted, found, recipe, labels, exact=folder.exact, classes=one["classes"], ends=ends)
        for folder, one, found in zip(folders, asked, _run_plain_check(wanted.work, packages), strict=True)
    ]


def _asked(
    wanted: ExpectedAnswers, recipe: Recipe, labels: tuple[str, ...] | None, folder: Folder, ends: Sequence[int]
) -> dict[str, Any]:
    task = recipe.task
    backbone = open_backbone(recipe.backbone)
    classes = None
    if task.has_classes and task.is_sequence_level and not folder.adapter:
        classes = "one" if task.one_class else "several"
    kind, options = auto_class(task, num_labels=None, label_names=labels)
    own = {name: value for name, value in options.items() if name == "num_labels"} if folder.adapter else {}
    if folder.adapter and task.is_sequence_level:
        own |= {"num_labels": len(labels) if labels else 1, "ignore_mismatched_sizes": True}
        own["pad_token_id"] = backbone.tokenizer.pad_token_id
    return {
        "folder": str(folder.path.resolve()),
        "backbone": str(backbone.directory.resolve()) if folder.adapter else None,
        "gguf": None if folder.gguf is None else dataclasses.asdict(dataclasses.replace(folder.gguf, package=None)),
        "auto_class": kind.__name__,
        "options": own,
        "memory": wanted.memory,
        "threads": recipe.train.threads or os.cpu_count() or 1,
        "inputs": list(wanted.inputs),
        "batches": wanted.batches,
        "classes": classes,
        "ends": list(ends),
        "pad": backbone.tokenizer.pad_token_id,
        "start": backbone.decoder_start if task.encoder_decoder else None,
        "prompts": [
            {"ids": one["ids"], "most": one["most"]} for one in wanted.reference if "answer" in one
        ],
    }  # fmt: skip


def _run_plain_check(work: Path, packages: Sequence[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("plain_check.py")), str(work)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if packages:
        environment["PYTHONPATH"] = os.pathsep.join([*packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = shorten(said[-1] if said else f"exit code {done.returncode}", 200)
        raise UserError(f"plain transformers cannot use what was written: {reason}")
    found = read_json_object(work / "found.json")
    assert not found["ours"], found["ours"]
    answers: list[dict[str, Any]] = found["folders"]
    return answers


def _check_answers(
    wanted: ExpectedAnswers,
    found: dict[str, Any],
    recipe: Recipe,
    labels: tuple[str, ...] | None,
    *,
    exact: bool,
    classes: str | None,
    ends: Sequence[int],
) -> dict[str, Any]:
    difference, largest = found["difference"], found["largest"]
    if found["other"] and not difference <= FAR[exact] * largest:
        raise UserError(
            f"llama.cpp has {found['other'][0]}, so that it answers otherwise than the run; take `flatshift merge`, "
            "which plain transformers and vLLM read"
        )
    if not difference <= FAR[exact] * largest:
        raise UserError(
            f"plain transformers' logits of what was written differ from backbone + adapter by {difference:.3g} "
            f"(largest {largest:.3g}), more than rounding explains; hand on the adapter as it is (`flatshift export`)"
            + ("" if exact else ", or merge with --dtype float32")
        )
    if found["answers"] and (missed := sorted(set(ends) - set(found["stops"]))):
        raise UserError(f"plain transformers does not stop at token {missed[0]}, which training ended answers with")
    same = rounded = 0
    for one, said in zip(wanted.reference, found["answers"], strict=False):
        if (said["ids"], said["ended"]) == (one["answer"], one["ended"]):
            same += 1
            continue
        pairs = zip([*one["answer"], None], [*said["ids"], None], strict=False)
        parts = next(k for k, (a, b) in enumerate(pairs) if a != b)
        # Within twice the largest logit difference, rounding can swap the two likeliest tokens.
        if not one["margins"][min(parts, len(one["margins"]) - 1)] <= 2 * difference:
            raise UserError(
                f"plain transformers answers the prompt {shorten(one['text'], 60)!r} with the tokens {said['ids']}"
                f"{'' if said['ended'] else ', without an end'}, and the run with {one['answer']}"
            )
        rounded += 1
    other = None
    if classes is not None:
        names = list(labels or ())
        other = sum(
            said != want for said, want in zip(found["names"], _expected_classes(wanted, names, classes), strict=True)
        )
        if exact and other and difference <= 1e-4 * largest:
            raise UserError("plain transformers gives rows other classes than the run, or other names of them")
    stops = sorted(ends) if found["answers"] else []
    return {
        "max_logit_difference": difference,
        "largest_logit": largest,
        "same_tokens": found["same"],
        "places": found["places"],
        "rows": wanted.rows,
        "drawn": wanted.drawn,
        "other_labels": other,
        "answers": same,
        "answers_by_rounding": rounded,
        "stops": stops,
        "stop_texts": open_backbone(recipe.backbone).tokenizer.convert_ids_to_tokens(stops),
        "other_settings": found["other"],
    }


def _expected_classes(wanted: ExpectedAnswers, names: list[str], classes: str) -> list[list[str]]:
    from safetensors import safe_open

    from flatshift.experiments.workflows.plain_check import select_classes

    with safe_open(wanted.work / "asked.safetensors", "pt") as rows:
        logits = [row for n in range(wanted.batches) for row in rows.get_tensor(f"{n}.logits").tolist()]
    return [select_classes(row, names, several=classes == "several") for row in logits]


# ----------------------------------------------------------------------------------------------------- what is asked of


def _run_inputs(recipe: Recipe, labels: tuple[str, ...] | None, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the inputs: for a head one padded batch of rows, as its users make them; else the first tokens of each
    row."""
    examples = [example for _, example in read_run_rows(recipe, labels, most=_ROWS, whole=False)]
    task = recipe.task
    if task.is_sequence_level:
        return [next(EvalBatching(len(examples), tokenizer.pad_token_id).batches(examples, task)).inputs]
    batches = [next(EvalBatching(1, tokenizer.pad_token_id).batches([one], task)).inputs for one in examples]
    return [{name: tensor[:, :_TOKENS] for name, tensor in batch.items()} for batch in batches]


def draw_inputs(recipe: Recipe, tokenizer: Any, config: Any) -> dict[str, Any]:
    """Return rows of plain tokens drawn by `train.seed`, for a run whose own rows are unavailable.

    All end with the same token, as a head over an encoder-decoder requires.
    """
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


def _choose_prompts(recipe: Recipe, rows: RunRows | None, tokenizer: Any) -> list[GenerationPrompt]:
    task = recipe.task
    asked: list[GenerationPrompt] = []
    if rows is not None:
        with contextlib.suppress(UserError):
            asked = task.ask([row for row, _ in rows[:_PROMPTS]], tokenizer, bad_rows="skip")[0]
    if not asked:
        asked = task.ask_texts(["some text", "A second, longer one: 1 + 1 ="], tokenizer, raw=True)
    return [one for one in asked if len(one.ids) <= _LONGEST] or asked[:1]


def _build_reference(
    recipe: Recipe, model: Any, tokenizer: Any, rows: RunRows | None, ends: Sequence[int], memory: int | None
) -> list[dict[str, Any]]:
    import torch

    from flatshift.finetune.evaluate.generation import Decoding, context_overflow, continue_prompts

    questions = _choose_prompts(recipe, rows, tokenizer)
    task, device = recipe.task, next(p.device for p in model.parameters() if not p.is_meta)
    start = open_backbone(recipe.backbone).decoder_start if task.encoder_decoder else None
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for one in questions:
            more = {} if start is None else {"decoder_input_ids": torch.tensor([[start]], device=device)}
            ids = torch.tensor([one.ids], device=device)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits[0, -1]
            likeliest = torch.log_softmax(logits.float(), -1).topk(_LIKELIEST)
            pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
            found.append(
                {"text": one.text, "whole": not task.uses_chat_template, "ids": list(one.ids), "next": dict(pairs)}
            )
    most = _ANSWER if memory is None else _STREAMED_ANSWER
    roomy = [k for k, one in enumerate(questions) if context_overflow(model, one.ids, most, apart=bool(start)) is None][
        :2
    ]
    answers = continue_prompts(
        model,
        [questions[k].ids for k in roomy],
        Decoding(max_new_tokens=most),
        EvalBatching(1, tokenizer.pad_token_id, device),
        end=ends,
        decoder_start=start,
    )
    for place, answer in answers:
        asked = found[roomy[place]]
        asked |= {"answer": answer.ids, "ended": answer.ended, "most": most}
        asked["margins"] = _logit_margins(model, asked["ids"], answer.ids, start)
    return sorted(found, key=lambda one: "answer" not in one)


def _logit_margins(model: Any, prompt: list[int], answer: list[int], start: int | None) -> list[float]:
    """Return for each token of an answer, and for the one after it, the likeliest logit minus the second."""
    import torch

    device = next(p.device for p in model.parameters() if not p.is_meta)
    ids = torch.tensor([prompt if start is not None else [*prompt, *answer]], device=device)
    more = {} if start is None else {"decoder_input_ids": torch.tensor([[start, *answer]], device=device)}
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits[0].float()
    two = logits[-(len(answer) + 1) :].topk(2).values
    return (two[:, 0] - two[:, 1]).tolist()


# -------------------------------------------------------------------------------------------------------- large models


def _fits_in_memory(recipe: Recipe) -> bool:
    from flatshift.finetune.models.safetensors_index import read_index

    entries = read_index(open_backbone(recipe.backbone).directory).values()
    return 4 * sum(math.prod(entry.shape) for entry in entries) <= available_memory() * _MEMORY_SHARE


def load_streamed(
    recipe: Recipe, labels: tuple[str, ...] | None, adapter: Path, *, added: Sequence[tuple[Path, float]] = ()
) -> Any:
    """Build backbone + adapter in float32; frozen weights stay in their files until their block runs.

    added: other adapters whose changes are added to the frozen weights, and their weights.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    from flatshift.experiments.workflows.plain_check import stream_weights
    from flatshift.finetune.adapters.adapter import read_adapter
    from flatshift.finetune.adapters.merge import read_changes
    from flatshift.finetune.models.meta import build_skeleton
    from flatshift.finetune.models.weight_names import canonical_name, weight_reader

    skeleton: Any = build_skeleton(recipe.backbone, task=recipe.task, label_names=labels)
    checkpoint = skeleton.checkpoint
    read = weight_reader(skeleton)
    changes = [(read_changes(skeleton, folder)[0], weight) for folder, weight in added]
    config: Any = LoraConfig.from_pretrained(str(adapter))
    model: Any = get_peft_model(skeleton, config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    tensors = read_adapter(adapter)
    with torch.no_grad():
        for full, _ in model.named_parameters():
            name = canonical_name(full)
            if name in tensors and ".original_module." not in full:
                owner, _, leaf = full.rpartition(".")
                value = torch.nn.Parameter(tensors[name].float(), requires_grad=False)
                model.get_submodule(owner)._parameters[leaf] = value
        for full, buffer in model.named_buffers():
            if canonical_name(full) in checkpoint.keys:
                buffer.copy_(read(canonical_name(full)))

    def changed(full: str) -> Any:
        name = canonical_name(full)
        value = read(name).float()
        for change, weight in ((found[name], weight) for found, weight in changes if name in found):
            product = weight * change.scale * (change.b @ change.a)
            value += product.mT if change.transposed else product
        return value

    stream_weights(model, changed)
    return model


def available_memory() -> int:
    """Return the bytes of host memory available to this process: of the machine, or within its control group's
    limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        free = min(free, limit - int((group / "memory.current").read_text(encoding="utf-8")))
    return free
