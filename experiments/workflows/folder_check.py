"""An exported folder compared with its run: plain transformers and PEFT load it in a process that never imports this
project, and answer the same inputs as the run's own model.

Compared are logits on rows of the run, greedy answers to two prompts and their ends, and the names of classes. A model
that exceeds memory in float32 stays in its files, on either side, and is read block by block. Its tokenizer is set up
to tokenize as in training, saved, loaded again without this project's settings, and compared on rows of the run.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flatshift.experiments.data.sources import list_source_files
from flatshift.experiments.data.splits import read_label_record
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.plain_check import select_classes, stream_weights
from flatshift.finetune.adapters.adapter import read_adapter
from flatshift.finetune.adapters.merge import read_changes
from flatshift.finetune.atomic import read_json_object, write_json
from flatshift.finetune.compute.memory import available_memory
from flatshift.finetune.config import Mesh
from flatshift.finetune.data.encoding import get_end_token
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import Example, GenerationPrompt
from flatshift.finetune.data.rows import Row
from flatshift.finetune.errors import UserError, first_error_line, shorten
from flatshift.finetune.evaluate.generation import Decoding, context_overflow, continue_prompts
from flatshift.finetune.lock import temporary_directory
from flatshift.finetune.models.backbone import auto_class, open_backbone, quiet_transformers
from flatshift.finetune.models.checkpoint import canonical_name, read_index, weight_reader
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.seeds import numpy_generator

_ROWS, _TOKENS, _LIKELIEST = 8, 32, 5
_PROMPTS, _PROMPT_TOKENS = 4, 256
"""Prompts of a reference, of which the first two are answered, and tokens of each."""
_ANSWER_TOKENS, _STREAMED_ANSWER_TOKENS = 16, 3
"""Maximum tokens of a greedy answer: for a model in memory, and for one that is read from disk again for each token."""
_MEMORY_SHARE = 0.5
MAX_DIFFERENCE = {False: 0.25, True: 1e-3}
"""Largest difference of logits, as a share of the largest logit, that rounding explains: to 16 bits (False), to 32 bits
(True)."""

USUAL_DIFFERENCE = {"bfloat16": 0.03, "float16": 0.005, "float32": 1e-4}
"""The same share as rounding usually gives: three times the largest that was measured on models of 5 and 270 million
parameters, whose likeliest tokens were the same at this share of places or more."""
_USUAL_SAME = 0.995


@dataclass(frozen=True)
class ExportedRun:
    """A finished run that is exported."""

    path: Path
    recipe: Recipe
    labels: tuple[str, ...] | None
    """Classes in head order; None for a task without classes."""
    rows: RunRows | None
    """Rows of the run's files, which copies are compared on; None if they are not available here."""
    trained_ends: list[int]
    """Tokens that ended the trained answers."""

    @classmethod
    def open(cls, path: Path, recipe: Recipe) -> ExportedRun:
        """Read the labels, rows and end tokens of the run in `path`."""
        labels = read_label_record(recipe, path)[0] if recipe.task.has_classes else None
        rows = None
        with contextlib.suppress(UserError, OSError):
            rows = read_run_rows(recipe, labels)
        return cls(path, recipe, labels, rows, list(read_trained_ends(path).values()))

    @property
    def ends(self) -> list[int]:
        """Every token that ends an answer."""
        return collect_end_tokens(self.recipe, self.trained_ends)


@dataclass(frozen=True)
class ExpectedAnswers:
    """Answers of the run's own model, in float32."""

    work: Path
    """Directory of its logits and the inputs, in the format that `plain_check` reads."""
    inputs: tuple[str, ...]
    batches: int
    is_random: bool
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


@dataclass(frozen=True)
class Folder:
    """An exported folder; `exact` if its weights are in 32 bits, `adapter` if it is one for PEFT, `gguf` if its GGUF
    file is to be compared (`flatshift.finetune.models.gguf_tensors`)."""

    path: Path
    exact: bool
    adapter: bool = False
    gguf: GgufFile | None = None


def to_single_float32_process(recipe: Recipe) -> Recipe:
    """Return the recipe for one process in float32, on the backbone's float weights."""
    train = dataclasses.replace(
        recipe.train, precision="fp32", backbone_precision="same", adapter_precision="auto", quantization=None,
        backbone_dropout=None, device="cpu",
    )  # fmt: skip
    return dataclasses.replace(recipe, train=train, mesh=Mesh())


@contextlib.contextmanager
def compute_expected(run: ExportedRun, *, added: Sequence[tuple[Path, float]] = ()) -> Iterator[ExpectedAnswers]:
    """Compute the answers of backbone + adapter in float32; their files are deleted at the end of the block.

    added: other adapters whose changes are added, and their weights.
    """
    recipe = to_single_float32_process(run.recipe)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    available = available_memory()
    entries = read_index(open_backbone(recipe.backbone).directory).values()
    limit = None if available is None else int(available * _MEMORY_SHARE)
    memory = None if limit is None or 4 * sum(math.prod(entry.shape) for entry in entries) <= limit else limit
    adapter = run.path / "adapter"
    if memory is None and not added:
        model = load_model(recipe, recipe.task, run.labels, adapter=adapter)[0].model.eval()
    else:
        model = load_streamed(recipe, run.labels, adapter, added=added).eval()
    device = next(p.device for p in model.parameters() if not p.is_meta)
    if run.rows is None:
        batches = [draw_inputs(recipe, tokenizer, model.config)]
    else:
        batches = _run_inputs(recipe, run.labels, tokenizer)
    with temporary_directory("flatshift-check-") as work:
        tensors, count = dict[str, Any](), 0
        with torch.no_grad():
            for number, batch in enumerate(batches):
                logits = model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits.float().cpu()
                tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in batch.items()}
                tensors[f"{number}.logits"] = logits.contiguous()
                count += len(logits)
        save_file(tensors, work / "asked.safetensors")
        del tensors
        reference = _build_reference(recipe, model, tokenizer, run, memory) if recipe.task.traits.is_generative else []
        del model
        gc.collect()  # reference cycles of hooks keep the model alive, and the folder's model is loaded next
        yield ExpectedAnswers(work, tuple(batches[0]), len(batches), run.rows is None, count, reference, memory)


def compare_folder(run: ExportedRun, expected: ExpectedAnswers, folders: Sequence[Folder]) -> list[dict[str, Any]]:
    """Compare the answers of plain transformers on each of `folders`, in one process, with those of the run.

    Returns of each `max_logit_difference, largest_logit, same_tokens` (places with the same likeliest token, or class),
    `places, rows, drawn, other_labels` (None without classes), `answers` (greedy answers that are the run's),
    `answers_by_rounding` (those that part from it where two tokens are as likely up to rounding), `stops` and
    `stop_texts`; `other_settings` (that llama.cpp has otherwise, in words), `dropped_settings` (of the backbone's
    generation_config.json); of a GGUF file that is not read only `unread`, why.
    Raises UserError where they are further apart than rounding explains, or where plain `generate` does not stop at a
    trained end.
    """
    requests = [_build_request(run, expected, folder) for folder in folders]
    (expected.work / "asked.json").write_text(json.dumps(requests), encoding="utf-8")
    packages = [str(folder.gguf.package) for folder in folders if folder.gguf is not None and folder.gguf.package]
    script = Path(__file__).with_name("plain_check.py")
    code, reason = run_offline([script, expected.work], packages, TRANSFORMERS_VERBOSITY="error")
    if code:
        raise UserError(f"plain transformers cannot use what was written: {shorten(reason, 200)}")
    record = read_json_object(expected.work / "found.json")
    assert not record["ours"], record["ours"]
    return [
        {"unread": answer["unread"]}
        if answer["unread"]
        else _check_answers(run, expected, answer, folder, classes=request["classes"])
        for folder, request, answer in zip(folders, requests, record["folders"], strict=True)
    ]


def judge_difference(dtype: str, comparison: Mapping[str, Any], *, numbers: bool = False) -> str:
    """Return the sentence on a model whose weights were rounded to `dtype`: if it differs from the run as is usual.

    comparison: the result of `compare_folder`. numbers: True for a regression.
    """
    if numbers:
        step = comparison["largest_logit"] * torch.finfo(getattr(torch, dtype)).eps
        far = f"{comparison['max_logit_difference']:.2g}"
        cure = "" if dtype == "float32" else ": merge with --dtype float32"
        return f"its numbers differ by at most {far}, where {dtype} has steps of up to {step:.1g}{cure}"
    cure = "" if dtype == "float32" else ", or merge with --dtype float32"
    usual = USUAL_DIFFERENCE.get(dtype, USUAL_DIFFERENCE["float32"])
    share = comparison["max_logit_difference"] / (comparison["largest_logit"] or 1.0)
    kind = "token" if comparison["other_labels"] is None else "class"
    same = f"the likeliest {kind} is the same at {comparison['same_tokens']} of {comparison['places']} places"
    others = comparison["places"] - comparison["same_tokens"]
    if others > max(1, (1 - _USUAL_SAME) * comparison["places"]):
        same += f", where {_USUAL_SAME:.1%} are usual"
    elif share <= usual:
        return f"usual for {dtype}: {share:.2g} of the largest logit, where rounding gives up to {usual:g}; {same}"
    return (
        f"more than usual for {dtype}: {share:.2g} of the largest logit, where rounding gives up to {usual:g}; {same}; "
        f"evaluate the merged model before you use it{cure}"
    )


def _build_request(run: ExportedRun, expected: ExpectedAnswers, folder: Folder) -> dict[str, Any]:
    recipe, task, labels = run.recipe, run.recipe.task, run.labels
    backbone = open_backbone(recipe.backbone)
    classes = None
    if task.has_classes and task.traits.is_sequence_level and not folder.adapter:
        classes = "one" if task.one_class else "several"
    kind, _ = auto_class(task, num_labels=None, label_names=labels)
    has_head = folder.adapter and task.traits.is_sequence_level
    own = {"num_labels": len(labels) if labels else 1, "ignore_mismatched_sizes": True} if has_head else {}
    return {
        "folder": str(folder.path.resolve()),
        "backbone": str(backbone.directory.resolve()) if folder.adapter else None,
        "gguf": None if folder.gguf is None else dataclasses.asdict(dataclasses.replace(folder.gguf, package=None)),
        "auto_class": kind.__name__,
        "options": own,
        "memory": expected.memory,
        "threads": recipe.train.threads or os.cpu_count() or 1,
        "inputs": list(expected.inputs),
        "batches": expected.batches,
        "classes": classes,
        "ends": run.trained_ends,
        "pad": backbone.tokenizer.pad_token_id,
        "start": backbone.decoder_start if task.traits.encoder_decoder else None,
        "prompts": [{"ids": r["ids"], "most": r["most"]} for r in expected.reference if "answer" in r],
    }


def run_offline(command: Sequence[object], packages: Sequence[str], **environment: str) -> tuple[int, str]:
    """Run this Python with `command`, without access to the hub; `packages` go on its path.

    Returns the exit code, and the last line on stderr, else that code in words.
    """
    environment |= {"HF_HUB_OFFLINE": "1"}
    if packages:
        environment["PYTHONPATH"] = os.pathsep.join([*packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-P", *map(str, command)], env={**os.environ, **environment}, capture_output=True, text=True,
        errors="replace",
    )  # fmt: skip
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    return process.returncode, lines[-1] if lines else f"exit code {process.returncode}"


def _check_answers(
    run: ExportedRun, expected: ExpectedAnswers, answer: dict[str, Any], folder: Folder, *, classes: str | None
) -> dict[str, Any]:
    difference, largest, exact = answer["difference"], answer["largest"], folder.exact
    if not difference <= MAX_DIFFERENCE[exact] * largest:
        if answer["other"]:
            raise UserError(
                f"llama.cpp has {answer['other'][0]}, so that it answers otherwise than the run; take `flatshift "
                "merge`, which plain transformers and vLLM read"
            )
        raise UserError(
            f"plain transformers' logits of what was written differ from backbone + adapter by {difference:.3g} "
            f"(largest {largest:.3g}), more than rounding explains; hand on {run.path / 'adapter'} as it is"
            + ("" if exact else ", or merge with --dtype float32")
        )
    if answer["answers"] and (missed := sorted(set(run.trained_ends) - set(answer["stops"]))):
        raise UserError(f"plain transformers does not stop at token {missed[0]}, which training ended answers with")
    same = rounded = 0
    for reference, reply in zip(expected.reference, answer["answers"], strict=False):
        if (reply["ids"], reply["ended"]) == (reference["answer"], reference["ended"]):
            same += 1
            continue
        pairs = zip([*reference["answer"], None], [*reply["ids"], None], strict=False)
        position = next(k for k, (a, b) in enumerate(pairs) if a != b)
        # Within twice the largest logit difference, rounding can swap the two likeliest tokens.
        if not reference["margins"][min(position, len(reference["margins"]) - 1)] <= 2 * difference:
            raise UserError(
                f"plain transformers answers the prompt {shorten(reference['text'], 60)!r} with the tokens "
                f"{reply['ids']}{'' if reply['ended'] else ', without an end'}, and the run with {reference['answer']}"
            )
        rounded += 1
    other = None
    if classes is not None:
        names = list(run.labels or ())
        with safe_open(expected.work / "asked.safetensors", "pt") as tensors:
            logits = [row for n in range(expected.batches) for row in tensors.get_tensor(f"{n}.logits").tolist()]
        own = [select_classes(row, names, several=classes == "several") for row in logits]
        other = sum(a != b for a, b in zip(answer["names"], own, strict=True))
        if exact and other and difference <= 1e-4 * largest:
            raise UserError("plain transformers gives rows other classes than the run, or other names of them")
    stops = sorted(run.trained_ends) if answer["answers"] else []
    return {
        "max_logit_difference": difference,
        "largest_logit": largest,
        "same_tokens": answer["same"],
        "places": answer["places"],
        "rows": expected.rows,
        "drawn": expected.is_random,
        "other_labels": other,
        "answers": same,
        "answers_by_rounding": rounded,
        "stops": stops,
        "stop_texts": open_backbone(run.recipe.backbone).tokenizer.convert_ids_to_tokens(stops),
        "other_settings": answer["other"],
        "dropped_settings": read_generation_settings(run.recipe)[1] if answer["answers"] and not folder.gguf else [],
    }


def _run_inputs(recipe: Recipe, labels: tuple[str, ...] | None, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the inputs: for a head one padded batch of rows, as its users make them; else the first tokens of each
    row."""
    examples = [example for _, example in read_run_rows(recipe, labels, maximum=_ROWS, whole=False)]
    task = recipe.task
    if task.traits.is_sequence_level:
        return [next(EvalBatching(len(examples), tokenizer.pad_token_id).batches(examples, task)).inputs]
    batches = [next(EvalBatching(1, tokenizer.pad_token_id).batches([example], task)).inputs for example in examples]
    return [{name: tensor[:, :_TOKENS] for name, tensor in batch.items()} for batch in batches]


def draw_inputs(recipe: Recipe, tokenizer: Any, config: Any) -> dict[str, Any]:
    """Return rows of plain tokens drawn by `train.seed`, for a run whose own rows are unavailable.

    All end with the same token, as a head over an encoder-decoder requires.
    """
    vocabulary = min(len(tokenizer), config.get_text_config().vocab_size)
    plain = np.setdiff1d(np.arange(vocabulary), tokenizer.all_special_ids)
    size = (_ROWS, min(_TOKENS, recipe.train.max_length))
    ids = torch.from_numpy(numpy_generator(recipe.train.seed, "merge-rows").choice(plain, size))
    if tokenizer.eos_token_id is not None:
        ids[:, -1] = tokenizer.eos_token_id
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if recipe.task.traits.encoder_decoder:
        start = torch.full((_ROWS, 1), open_backbone(recipe.backbone).decoder_start)
        inputs["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], dim=1)
    return inputs


def _choose_prompts(recipe: Recipe, rows: RunRows | None, tokenizer: Any) -> list[GenerationPrompt]:
    task = recipe.task
    questions: list[GenerationPrompt] = []
    if rows is not None:
        with contextlib.suppress(UserError):
            asked = [row for row, _ in rows[:_PROMPTS]]
            questions = task.input_format.build_prompts(asked, tokenizer, bad_rows="skip")[0]
    if not questions:
        questions = task.input_format.build_text_prompts(
            ["some text", "A second, longer one: 1 + 1 ="], tokenizer, raw=True
        )
    return [question for question in questions if len(question.ids) <= _PROMPT_TOKENS] or questions[:1]


def _build_reference(
    recipe: Recipe, model: Any, tokenizer: Any, run: ExportedRun, memory: int | None
) -> list[dict[str, Any]]:
    questions = _choose_prompts(recipe, run.rows, tokenizer)
    task, device = recipe.task, next(p.device for p in model.parameters() if not p.is_meta)
    start = open_backbone(recipe.backbone).decoder_start if task.traits.encoder_decoder else None
    references: list[dict[str, Any]] = []
    for question in questions:
        logits = _compute_logits(model, list(question.ids), [], start)
        likeliest = torch.log_softmax(logits[-1], -1).topk(_LIKELIEST)
        pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        whole = not task.input_format.uses_chat_template
        references.append({"text": question.text, "whole": whole, "ids": list(question.ids), "next": dict(pairs)})
    maximum = _ANSWER_TOKENS if memory is None else _STREAMED_ANSWER_TOKENS
    fitting = [
        k for k, q in enumerate(questions) if context_overflow(model, q.ids, maximum, apart=bool(start)) is None
    ][:2]
    asked, batching = [questions[k].ids for k in fitting], EvalBatching(1, tokenizer.pad_token_id, device)
    decoding = Decoding(max_new_tokens=maximum)
    answers = continue_prompts(model, asked, decoding, batching, end=run.ends, decoder_start=start)
    for index, answer in answers:
        reference = references[fitting[index]]
        top = _compute_logits(model, reference["ids"], answer.ids, start)[-(len(answer.ids) + 1) :].topk(2).values
        margins = (top[:, 0] - top[:, 1]).tolist()
        reference |= {"answer": answer.ids, "ended": answer.ended, "most": maximum, "margins": margins}
    return sorted(references, key=lambda reference: "answer" not in reference)


def _compute_logits(model: Any, prompt: list[int], answer: list[int], start: int | None) -> Any:
    """Return the logits (T, V) of a prompt and its answer; for an encoder-decoder those of the decoder alone."""
    device = next(p.device for p in model.parameters() if not p.is_meta)
    ids = torch.tensor([prompt if start is not None else [*prompt, *answer]], device=device)
    decoder = {} if start is None else {"decoder_input_ids": torch.tensor([[start, *answer]], device=device)}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **decoder).logits[0].float()


def load_streamed(
    recipe: Recipe, labels: tuple[str, ...] | None, adapter: Path, *, added: Sequence[tuple[Path, float]] = ()
) -> Any:
    """Build backbone + adapter in float32; frozen weights stay in their files until their block runs.

    added: other adapters whose changes are added to the frozen weights, and their weights.
    """
    from peft import LoraConfig, get_peft_model

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
        for change, weight in ((by_name[name], weight) for by_name, weight in changes if name in by_name):
            product = weight * change.scale * (change.b @ change.a)
            value += product.mT if change.transposed else product
        return value

    stream_weights(model, changed)
    return model


_TOKENIZED_ROWS = 64
"""Rows of the run that are compared."""
_ANY_LENGTH = 1 << 30
_PROBES = ("some text", "Über 3 Wörter,\nin two lines", "猫が座った。")
"""Texts to compare if the run's rows are unavailable."""

RunRows = list[tuple[Row, Example]]


def save_tokenizer(recipe: Recipe, folder: Path, *, rows: RunRows | None) -> tuple[Any, int]:
    """Write the run's tokenizer into `folder`; returns it as loaded again, and the number of compared rows.

    rows: rows of the run with their examples, as from `read_run_rows`; None: unavailable, probes are compared.
    Raises UserError if the saved tokenizer gives other tokens than training.
    """
    from transformers import AutoTokenizer

    tokenizer, task = open_backbone(recipe.backbone).own_tokenizer(), recipe.task
    task.input_format.prepare_tokenizer(tokenizer)
    # Heads truncate by `truncation=True` as in training; generative models may use all positions.
    if task.traits.is_sequence_level or task.traits.masks_tokens:
        tokenizer.model_max_length = recipe.train.max_length
        tokenizer.truncation_side = recipe.train.truncation or task.traits.truncation_side
        tokenizer.padding_side = "right"
    for name in ("is_local", "local_files_only"):  # they are about files of this machine
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    config = open_backbone(recipe.backbone).config
    try:
        with quiet_transformers():
            saved = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            f"the tokenizer of {recipe.backbone!r} cannot be read once saved: {first_error_line(error)}"
        ) from error
    if rows is None:
        different = [repr(text) for text in _PROBES if saved(text)["input_ids"] != tokenizer(text)["input_ids"]]
    else:
        length = recipe.train.max_length
        different = [
            row.where for row, example in rows if not task.input_format.matches_saved(saved, row, example, length)
        ]
    if different:
        raise UserError(
            f"the saved tokenizer of backbone {recipe.backbone!r} reads {different[0]} otherwise than training did, so "
            "that the model would be asked what it never saw; convert it to a fast one (tokenizer.json) first"
        )
    return saved, 0 if rows is None else len(rows)


def read_run_rows(
    recipe: Recipe, labels: tuple[str, ...] | None, *, maximum: int = _TOKENIZED_ROWS, whole: bool = True
) -> RunRows:
    """Return the first rows of the run's test files, else of dev, else of train, each with its training example; with
    `whole` only the rows of a head are truncated.

    Raises UserError or OSError if the files cannot be read, and UserError if no row is left.
    """
    data, task = recipe.data, recipe.task.without_limits()  # limits are shares of all rows, and these are few
    backbone = open_backbone(recipe.backbone)
    sources = list_source_files(data)
    chosen = sources["test"] or sources["dev"] or sources["train"]
    skipped: list[str] = []
    rows = list(islice(chain.from_iterable(source.rows(data, task, skipped) for source in chosen), maximum))
    is_cut = task.traits.is_sequence_level or task.traits.masks_tokens or not whole
    encoder = task.encoder(
        backbone.tokenizer,
        recipe.train.max_length if is_cut else _ANY_LENGTH,
        label_names=labels or task.class_names(rows),
        bad_rows=data.bad_rows,
        decoder_start=backbone.decoder_start if task.traits.encoder_decoder else None,
        truncation=recipe.train.truncation,
    )
    pairs: RunRows = []
    for row in rows:
        encoded = encoder.add([row])
        skipped += encoded.skipped
        pairs += [(row, example) for example in encoded.examples[:1]]
    if not pairs:
        raise UserError(f"no row of the run's files is left{f', the first for {skipped[0]}' if skipped else ''}")
    return pairs


SETTINGS = "generation_config.json"


def read_trained_ends(path: Path) -> dict[str, int]:
    """Return the tokens that ended the trained answers of the run in `path`, by their text, from its manifest."""
    ends: dict[str, int] = read_json_object(path / "manifest.json", "ends")["ends"]
    return ends


def collect_end_tokens(recipe: Recipe, trained: Iterable[int]) -> list[int]:
    """Return every token that ends an answer: the backbone's own, the `trained` ones, the tokenizer's."""
    backbone = open_backbone(recipe.backbone)
    file = backbone.directory / SETTINGS
    own = read_json_object(file).get("eos_token_id") if file.is_file() else None
    if own is None:
        own = getattr(backbone.config.get_text_config(), "eos_token_id", None)
    ends = [*(own if isinstance(own, list) else [own]), *trained, get_end_token(backbone.tokenizer)]
    return list(dict.fromkeys(end for end in ends if end is not None))


_KEPT_SETTINGS = ("bos_token_id", "decoder_start_token_id", "max_length", "max_new_tokens", "pad_token_id")


def read_generation_settings(recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    """Return the backbone's own special tokens and limits of length, and the names of its other generation settings,
    which no run uses: penalties, forced tokens, sampling."""
    from transformers import GenerationConfig

    backbone = open_backbone(recipe.backbone)
    file = backbone.directory / SETTINGS
    if file.is_file():
        settings = read_json_object(file)
    else:
        settings = GenerationConfig.from_model_config(backbone.own_config({})).to_diff_dict()
    without = (*_KEPT_SETTINGS, "eos_token_id", "_from_model_config", "transformers_version", "use_cache")
    others = [n for n, value in settings.items() if n not in without and value is not None and value is not False]
    return {name: settings[name] for name in _KEPT_SETTINGS if settings.get(name) is not None}, others


def save_generation_settings(recipe: Recipe, folder: Path, ends: Sequence[int]) -> None:
    """Write the backbone's special tokens and limits of length into `folder`, with these `ends` and a padding token."""
    backbone = open_backbone(recipe.backbone)
    settings = {"pad_token_id": backbone.tokenizer.pad_token_id} | read_generation_settings(recipe)[0]
    if recipe.task.traits.encoder_decoder:
        settings["decoder_start_token_id"] = backbone.decoder_start
    write_json(folder / SETTINGS, settings | {"eos_token_id": _format_end_tokens(ends)})


def set_end_tokens(config: Any, ends: Sequence[int]) -> None:
    """Set these `ends` in a decoder's configuration if it names one; the heads of an encoder-decoder need a single
    one."""
    from huggingface_hub.errors import StrictDataclassError

    for settings in (config, config.get_text_config()):
        if getattr(settings, "eos_token_id", None) is not None and not config.is_encoder_decoder:
            with contextlib.suppress(StrictDataclassError):  # an architecture that allows a single one only
                settings.eos_token_id = _format_end_tokens(ends)


def _format_end_tokens(ends: Sequence[int]) -> int | list[int] | None:
    return None if not ends else ends[0] if len(ends) == 1 else list(ends)
