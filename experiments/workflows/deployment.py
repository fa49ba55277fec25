"""Export of a run's model for other programs: GGUF for llama.cpp, a Modelfile for Ollama, a self-checking folder for
vLLM.

Each is made from the merged model and compared with the run (`flatshift.experiments.workflows.folder_check`):
`reference.json` holds prompts of the run, their tokens in training, and the model's next tokens for them in float32.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows.export import (
    Dtype,
    merge_into,
    read_available_rows,
    require_foldable,
    write_merged,
)
from flatshift.experiments.workflows.folder_check import (
    ExpectedAnswers,
    Folder,
    GgufFile,
    compare_folder,
    compute_expected,
)
from flatshift.experiments.workflows.model_card import build_card
from flatshift.experiments.workflows.run_parts import check_generative
from flatshift.experiments.workflows.saved_tokenizer import RunRows, collect_end_tokens, read_trained_ends
from flatshift.finetune.atomic import read_json_object, write_json, write_text
from flatshift.finetune.data.encoding import get_end_token, tokenize_plain
from flatshift.finetune.errors import UserError, shorten
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.run_directory import check_replaceable, output_directory

Program = Literal["gguf", "ollama", "vllm"]
Outtype = Literal["auto", "f32", "f16", "bf16", "q8_0"]
GGUF, ADAPTER_GGUF, REFERENCE = "model.gguf", "adapter.gguf", "reference.json"
ENDS = ("eos", "eot", "eom")
"""Keys of a GGUF file for the tokens that end an answer."""
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
_PACKAGE = "convert_hf_to_gguf"
_HERE = Path(__file__).resolve().parent


def export_for_program(
    path: Path, out: Path, *, to: Program, outtype: Outtype = "auto", llama_cpp: Path | None = None
) -> dict[str, Any]:
    """Write the files for the program `to` to the new directory `out`.

    gguf: `model.gguf`, and with `llama_cpp` also `adapter.gguf` if the adapter is plain LoRA. ollama: the same with a
    Modelfile. vllm: the merged folder with `check_vllm.py`. outtype: of GGUF's weights; auto: 16 bits.
    llama_cpp: a checkout of llama.cpp, whose converters are used; None: the package of the extra `gguf`.
    Returns `adapter` (True if one was written); `tokens` (number of prompts that llama.cpp tokenizes as training did; 0
    without llama-cpp-python) and `max_log_probability_difference` of its next tokens (None likewise); `compared`, the
    result of `folder_check.compare` for the merged folder, or for the GGUF file as transformers reads it.
    Raises UserError as `merge`; for a task that generates no text; without a converter, or if it fails; and for a file
    that is read or answered differently from the run.
    """
    recipe = resume_recipe(path).recipe
    check_generative(recipe.task)
    if recipe.task.encoder_decoder and to != "gguf":
        raise UserError(f"--to {to}: it serves no encoder-decoder; take `flatshift merge` and plain transformers")
    if to != "vllm":
        _require_converter(llama_cpp)
    with exclusive_lock(out):
        check_replaceable(out)
        require_foldable(path, recipe)
        trained = list(read_trained_ends(path).values())
        rows = read_available_rows(recipe, None)
        with (
            compute_expected(path, recipe, None, rows, collect_end_tokens(recipe, trained)) as wanted,
            output_directory(out) as temporary,
        ):
            if to == "vllm":
                told = _export_vllm(path, recipe, temporary, wanted, rows)
            else:
                told = _export_gguf(path, recipe, temporary, wanted, rows, outtype, llama_cpp)
                if to == "ollama":
                    write_text(temporary / "Modelfile", build_modelfile(recipe, trained))
            text = build_card(path, recipe, tokenizer=open_backbone(recipe.backbone).tokenizer, labels=None, form=to)
            write_text(temporary / "README.md", text)
    return told


# --------------------------------------------------------------------------------------------- llama.cpp and Ollama


def _export_gguf(
    path: Path,
    recipe: Recipe,
    out: Path,
    wanted: ExpectedAnswers,
    rows: RunRows | None,
    outtype: Outtype,
    checkout: Path | None,
) -> dict[str, Any]:
    merged, exact = out / "merged", outtype == "f32"
    merged.mkdir()
    kept: Dtype = "float32" if outtype in ("f32", "q8_0") else "auto"
    written = write_merged(merged, path, recipe, rows=rows, wanted_dtype=kept)
    backbone, trained = open_backbone(recipe.backbone), list(read_trained_ends(path).values())
    ends = list(dict.fromkeys([*trained, *collect_end_tokens(recipe, trained)]))
    _keep_sentencepiece(recipe, merged)
    told = _run_converter("model", merged, out / GGUF, backbone.directory, outtype, checkout, ends)
    _require_same_vocabulary(told, recipe, trained)
    adapter = checkout is not None and _is_plain_lora(path / "adapter")
    if adapter:
        _run_converter("adapter", path / "adapter", out / ADAPTER_GGUF, merged, outtype, checkout, ends)
    asked: dict[str, Any] = {"tokens": 0, "max_log_probability_difference": None}
    if importlib.util.find_spec("llama_cpp") is not None:
        asked = _compare_llama_cpp(out / GGUF, wanted.reference, exact=exact)
    config = read_json_object(merged / "config.json")
    gguf = GgufFile(
        GGUF, told["architecture"], config.get("text_config", config),
        [told[name] for name in ENDS if told[name] is not None],
        None if checkout is None else checkout / "gguf-py",
    )  # fmt: skip
    folders = [Folder(merged, written.exact), Folder(out, exact, gguf=gguf)]
    _, compared = compare_folder(wanted, recipe, None, folders, ends=trained)
    shutil.rmtree(merged)
    return {"adapter": adapter, **asked, "compared": compared}


def _require_converter(checkout: Path | None) -> None:
    if checkout is None and importlib.util.find_spec(_PACKAGE) is None:
        raise UserError(
            "llama.cpp's converter is not installed: pip install 'flatshift[gguf]', or name a checkout of llama.cpp by "
            "--llama-cpp DIR"
        )
    if checkout is not None and not (checkout / f"{_PACKAGE}.py").is_file():
        raise UserError(f"--llama-cpp: {checkout} has no {_PACKAGE}.py, so it is no checkout of llama.cpp")


def _run_converter(
    what: Literal["model", "adapter"],
    source: Path,
    file: Path,
    base: Path,
    outtype: str,
    checkout: Path | None,
    ends: Sequence[int],
) -> dict[str, Any]:
    about = file.with_suffix(".json")
    words = [what, source, file, base, outtype, _find_pre_tokenizer(base) or "", about, ",".join(map(str, ends))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    places = [] if checkout is None else [str(checkout), str(checkout / "gguf-py")]
    environment["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", str(_HERE / "gguf_conversion.py"), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode or not about.is_file():
        raise UserError(_refusal(what, done))
    told: dict[str, Any] = json.loads(about.read_text(encoding="utf-8"))
    about.unlink()
    return told


def _refusal(what: str, done: subprocess.CompletedProcess[str]) -> str:
    said = [line for line in done.stderr.splitlines() if line.strip()]
    last = said[-1] if said else f"exit code {done.returncode}"
    if unknown := re.search(r"Model (\w+) is not supported", last):
        return f"llama.cpp's converter knows no {unknown[1]}; take `flatshift merge`, which plain transformers reads"
    if missing := re.search(r"(\w+\.model)$", last):
        return (
            f"llama.cpp's converter takes this family's vocabulary from {missing[1]} alone, which the backbone's "
            "folder lacks; put the checkpoint's own there"
        )
    return f"llama.cpp's converter does not take this {what}: {shorten(last, 160)}"


def _keep_sentencepiece(recipe: Recipe, merged: Path) -> None:
    """Put the backbone's SentencePiece file into `merged`, as transformers saves none and the converter reads it, with
    the tokens that were added to it as older versions of transformers name them."""
    backbone = open_backbone(recipe.backbone)
    files = [backbone.directory / name for name in SENTENCEPIECE if (backbone.directory / name).is_file()]
    if not files:
        return
    for file in files:
        shutil.copyfile(file, merged / file.name)
    tokenizer = backbone.tokenizer
    added = tokenizer.added_tokens_decoder
    own = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token}
    write_json(merged / "added_tokens.json", {str(t): index for index, t in added.items() if str(t) not in own})
    settings = read_json_object(merged / "tokenizer_config.json")
    decoder = {str(index): {"content": str(token), "special": token.special} for index, token in added.items()}
    write_json(merged / "tokenizer_config.json", settings | {"added_tokens_decoder": decoder})


def _find_pre_tokenizer(directory: Path) -> str | None:
    """Return llama.cpp's name for GPT-2's pre-tokenizer if the tokenizer uses it, else None.

    Needed for a tokenizer that is not in llama.cpp's table of known vocabularies; no other pre-tokenizer can be
    identified from its file alone.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    division = json.loads(file.read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    own = division.get("type") == "ByteLevel" and division.get("use_regex", True)
    return "gpt-2" if own and not division.get("add_prefix_space") else None


def _require_same_vocabulary(told: dict[str, Any], recipe: Recipe, trained: Sequence[int]) -> None:
    tokenizer = open_backbone(recipe.backbone).own_tokenizer()
    recipe.task.prepare_tokenizer(tokenizer)
    begins = recipe.task.prompt_ids(tokenizer, "a")[: -len(tokenize_plain(tokenizer, "a"))]
    wanted = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens = [token.replace(" ", "\u2581") for token in told["tokens"]]  # the converter writes some of them as spaces
    other = [
        index
        for index, token in wanted.items()
        if index >= len(tokens) or tokens[index] != token.replace(" ", "\u2581")
    ]
    if other:
        raise UserError(f"the GGUF file has {len(other):,} other tokens than the tokenizer, the first at {min(other)}")
    if told["rows"] not in (None, len(tokens)):
        raise UserError(
            f"the GGUF file has {len(tokens):,} tokens and {told['rows']:,} rows of their embeddings, which llama.cpp "
            "does not load; put the checkpoint's own tokenizer.model into the backbone's folder"
        )
    begin = [told["bos"]] if told["add_bos"] else []
    if not recipe.task.encoder_decoder and not _template_has_special_tokens(recipe) and begins != begin:
        raise UserError(f"the GGUF file begins a text with the tokens {begin}, where training began it with {begins}")
    if told["eos"] != get_end_token(tokenizer):
        raise UserError(f"the GGUF file ends a text with token {told['eos']}, training with {get_end_token(tokenizer)}")
    if missed := sorted(set(trained) - {told[name] for name in ENDS}):
        raise UserError(f"the GGUF file does not end an answer with token {missed[0]}, and training did")


def _template_has_special_tokens(recipe: Recipe) -> bool:
    return recipe.task.uses_chat_template


def _is_plain_lora(adapter: Path) -> bool:
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    odd = ("use_dora", "modules_to_save", "lora_bias", "target_parameters", "rank_pattern", "alpha_pattern")
    return settings.get("peft_type") == "LORA" and not any(settings.get(name) for name in odd)


def _compare_llama_cpp(file: Path, reference: list[dict[str, Any]], *, exact: bool) -> dict[str, Any]:
    import llama_cpp
    import numpy as np

    longest = max(len(one["ids"]) for one in reference)
    model = llama_cpp.Llama(
        # Keys and values of the cache in float32 (type 0): the comparison allows for the weights' rounding only.
        str(file),
        n_ctx=longest + 8,
        n_threads=1,
        logits_all=True,
        verbose=False,
        type_k=0,
        type_v=0,
    )
    worst = 0.0
    for one in reference:
        read = model.tokenize(one["text"].encode(), add_bos=one["whole"], special=True)
        if read != one["ids"]:
            raise UserError(f"llama.cpp reads the prompt {shorten(one['text'], 60)!r} otherwise than training did")
        model.reset()
        model.eval(one["ids"])
        logits = np.asarray(model.scores[len(one["ids"]) - 1], dtype=np.float64)
        said = logits - np.logaddexp.reduce(logits)
        worst = max(worst, *(abs(float(said[int(token)]) - value) for token, value in one["next"].items()))
    _require_near(worst, exact=exact)
    return {"tokens": len(reference), "max_log_probability_difference": worst}


def _require_near(worst: float, *, exact: bool) -> None:
    if not worst <= (_FAR_EXACT if exact else _FAR):
        raise UserError(
            f"the GGUF file's log probabilities differ by {worst:.3g} from the run's: more than by rounding"
        )


_FAR, _FAR_EXACT = 0.5, 0.05
"""Largest difference of a likely token's log probability, nats, explained by rounding to 16 or 8 bits, and to 32."""


def build_modelfile(recipe: Recipe, trained: Sequence[int]) -> str:
    """Return Ollama's Modelfile: the run's own prompt, its `trained` ends, and greedy decoding as in `flatshift
    generate`."""
    task, tokenizer = recipe.task, open_backbone(recipe.backbone).tokenizer
    mark = "{{ .Prompt }}"
    (asked,) = task.ask_texts(
        [mark], tokenizer, raw=len(task.prompt_columns()) != 1 and not _template_has_special_tokens(recipe)
    )
    template = asked.text
    for token in filter(None, [tokenizer.bos_token]):  # llama.cpp adds it by the file's settings
        template = template.removeprefix(token)
    if mark not in template or '"""' in template:
        raise UserError(f"--to ollama: the run's prompt cannot be written as a template of Ollama ({template!r})")
    stops = {tokenizer.decode([end]) for end in (get_end_token(tokenizer), asked.stop, *trained) if end is not None}
    return "\n".join(
        [
            f"FROM ./{GGUF}",
            f'TEMPLATE """{template}"""',
            *(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in sorted(stops)),
            "PARAMETER temperature 0",
            f"PARAMETER num_predict {task.max_new_tokens}",
            "",
        ]
    )


# --------------------------------------------------------------------------------------------- vLLM


def _export_vllm(
    path: Path, recipe: Recipe, out: Path, wanted: ExpectedAnswers, rows: RunRows | None
) -> dict[str, Any]:
    compared = merge_into(out, path, recipe, wanted, rows=rows)
    reference = [{name: one[name] for name in ("text", "whole", "ids", "next")} for one in wanted.reference]
    write_json(out / REFERENCE, reference)
    shutil.copyfile(_HERE / "check_vllm.py", out / "check_vllm.py")
    return {"adapter": False, "tokens": 0, "max_log_probability_difference": None, "compared": compared}
