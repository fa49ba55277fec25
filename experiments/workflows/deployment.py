"""Export of a run's model for other programs: GGUF for llama.cpp, a Modelfile for Ollama, a self-checking folder for
vLLM.

Each is made from the merged model and compared with the run (`flatshift.experiments.workflows.folder_check`):
`reference.json` holds prompts of the run, their tokens in training, and the model's next tokens for them in float32.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.special import log_softmax

from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows import folder_check
from flatshift.experiments.workflows.export import merge_into, require_mergeable, write_merged
from flatshift.experiments.workflows.model_card import build_card, run_title
from flatshift.experiments.workflows.run_parts import check_generative
from flatshift.finetune.atomic import read_json_object, write_json, write_text
from flatshift.finetune.data.encoding import SpecialTokens, get_end_token
from flatshift.finetune.errors import UserError, shorten
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.gguf_tokenizer import sentencepiece_model
from flatshift.finetune.run_directory import check_replaceable, output_directory

Program = Literal["gguf", "ollama", "vllm"]
Outtype = Literal["auto", "f32", "f16", "bf16", "q8_0"]
GGUF, ADAPTER_GGUF, REFERENCE = "model.gguf", "adapter.gguf", "reference.json"
ENDS = ("eos", "eot", "eom")
"""Keys of a GGUF file for the tokens that end an answer."""
_CONVERTER = "convert_hf_to_gguf"
_FOLDER = Path(__file__).resolve().parent
_MAX_DIFFERENCE = {False: 0.5, True: 0.05}
"""Largest difference of a likely token's log probability, nats, explained by rounding to 16 or 8 bits (False), and to
32 (True)."""


def export_for_program(
    path: Path, out: Path, *, program: Program, outtype: Outtype = "auto", llama_cpp: Path | None = None
) -> dict[str, Any]:
    """Write the files for `program` to the new directory `out`.

    gguf: `model.gguf`, and with `llama_cpp` also `adapter.gguf` if the adapter is plain LoRA. ollama: the same with a
    Modelfile. vllm: the merged folder with `check_vllm.py`. outtype: of GGUF's weights; auto: 16 bits.
    llama_cpp: a checkout of llama.cpp, whose converters are used; None: the package of the extra `gguf`.
    Returns `adapter` (True if one was written); `tokens` (number of prompts that llama.cpp tokenizes as training did; 0
    without llama-cpp-python) and `max_log_probability_difference` of its next tokens (None likewise); `compared`, the
    result of `folder_check.compare_folder` for the merged folder, or for the GGUF file as transformers reads it.
    Raises UserError as `merge_run`; for a task that generates no text; without a converter, or if it fails; and for a
    file that is read or answered differently from the run.
    """
    recipe = resume_recipe(path).recipe
    check_generative(recipe.task)
    if recipe.task.traits.encoder_decoder and program != "gguf":
        raise UserError(f"--to {program}: it serves no encoder-decoder; take `flatshift merge` and plain transformers")
    if program != "vllm":
        _require_converter(llama_cpp)
    with exclusive_lock(out):
        check_replaceable(out)
        require_mergeable(path, recipe)
        run = folder_check.ExportedRun.open(path, recipe)
        with folder_check.compute_expected(run) as expected, output_directory(out) as temporary:
            if program == "vllm":
                comparison = merge_into(temporary, run, expected)
                names = ("text", "whole", "ids", "next")
                reference = [{name: prompt[name] for name in names} for prompt in expected.reference]
                write_json(temporary / REFERENCE, reference)
                shutil.copyfile(_FOLDER / "check_vllm.py", temporary / "check_vllm.py")
                result = {"adapter": False, **_NO_COMPARISON, "compared": comparison}
            else:
                result = _export_gguf(run, temporary, expected, outtype, llama_cpp)
            if program == "ollama":
                write_text(temporary / "Modelfile", build_modelfile(recipe, run.trained_ends))
            tokenizer = open_backbone(recipe.backbone).tokenizer
            write_text(
                temporary / "README.md", build_card(path, recipe, tokenizer=tokenizer, labels=None, form=program)
            )
    return result


_NO_COMPARISON = {"tokens": 0, "max_log_probability_difference": None}


def _export_gguf(
    run: folder_check.ExportedRun,
    out: Path,
    expected: folder_check.ExpectedAnswers,
    outtype: Outtype,
    checkout: Path | None,
) -> dict[str, Any]:
    recipe, exact = run.recipe, outtype == "f32"
    folder = out / "merged" / run_title(run.path.resolve())  # the converter takes the model's name from its directory
    folder.mkdir(parents=True)
    merged = write_merged(folder, run, "float32" if outtype in ("f32", "q8_0") else "auto")
    ends = list(dict.fromkeys([*run.trained_ends, *run.ends]))
    _keep_sentencepiece(recipe, folder)
    backbone = open_backbone(recipe.backbone).directory
    facts = _run_converter("model", folder, out / GGUF, backbone, outtype, checkout, ends)
    _require_same_vocabulary(facts, recipe, run.trained_ends)
    settings = read_json_object(run.path / "adapter" / "adapter_config.json")
    odd = ("use_dora", "modules_to_save", "lora_bias", "target_parameters", "rank_pattern", "alpha_pattern")
    is_plain_lora = settings.get("peft_type") == "LORA" and not any(settings.get(name) for name in odd)
    adapter = checkout is not None and is_plain_lora
    if adapter:
        _run_converter("adapter", run.path / "adapter", out / ADAPTER_GGUF, folder, outtype, checkout, ends)
    llama: dict[str, Any] = _NO_COMPARISON
    if importlib.util.find_spec("llama_cpp") is not None:
        llama = _compare_llama_cpp(out / GGUF, expected.reference, exact=exact)
    config = read_json_object(folder / "config.json")
    gguf = folder_check.GgufFile(
        GGUF, facts["architecture"], config.get("text_config", config),
        [facts[name] for name in ENDS if facts[name] is not None],
        None if checkout is None else checkout / "gguf-py",
    )  # fmt: skip
    _, comparison = folder_check.compare_folder(
        run, expected, [folder_check.Folder(folder, merged.exact), folder_check.Folder(out, exact, gguf=gguf)]
    )
    shutil.rmtree(folder.parent)
    return {"adapter": adapter, **llama, "compared": comparison}


def _require_converter(checkout: Path | None) -> None:
    if checkout is None and importlib.util.find_spec(_CONVERTER) is None:
        raise UserError(
            "llama.cpp's converter is not installed: pip install 'flatshift[gguf]', or name a checkout of llama.cpp by "
            "--llama-cpp DIR"
        )
    if checkout is not None and not (checkout / f"{_CONVERTER}.py").is_file():
        raise UserError(f"--llama-cpp: {checkout} has no {_CONVERTER}.py, so it is no checkout of llama.cpp")


def _run_converter(
    kind: Literal["model", "adapter"],
    source: Path,
    file: Path,
    base: Path,
    outtype: str,
    checkout: Path | None,
    ends: Sequence[int],
) -> dict[str, Any]:
    """Run llama.cpp's converter in a separate process; returns the facts about the file's vocabulary."""
    facts = file.with_suffix(".json")
    arguments = [kind, source, file, base, outtype, _find_pre_tokenizer(base) or "", facts, ",".join(map(str, ends))]
    packages = [] if checkout is None else [str(checkout), str(checkout / "gguf-py")]
    code, reason = folder_check.run_offline([_FOLDER / "gguf_conversion.py", *arguments], packages)
    if not code and facts.is_file():
        result = read_json_object(facts)
        facts.unlink()
        return result
    if unknown := re.search(r"Model (\w+) is not supported", reason):
        message = f"llama.cpp's converter knows no {unknown[1]}; take `flatshift merge`, which plain transformers reads"
    elif missing := re.search(r"(\w+\.model)$", reason):
        message = (
            f"llama.cpp's converter takes this family's vocabulary from {missing[1]} alone, which the backbone's "
            "folder lacks; put the checkpoint's own there"
        )
    else:
        message = f"llama.cpp's converter does not take this {kind}: {shorten(reason, 160)}"
    raise UserError(message)


def _keep_sentencepiece(recipe: Recipe, merged: Path) -> None:
    """Put the backbone's SentencePiece file into `merged`, or one of its tokenizer, as transformers saves none and the
    converter writes other tokens without it, with the tokens that were added as older versions of transformers name
    them."""
    backbone = open_backbone(recipe.backbone)
    names = ("tokenizer.model", "spiece.model")
    files = [file for name in names if (file := backbone.directory / name).is_file()]
    for file in files:
        shutil.copyfile(file, merged / file.name)
    tokenizer = backbone.tokenizer
    if not files:
        try:
            model = sentencepiece_model(tokenizer)
        except (ValueError, ImportError) as error:
            raise UserError(f"{error}; put the checkpoint's own tokenizer.model into the backbone's folder") from error
        if model is None:
            return
        (merged / "tokenizer.model").write_bytes(model)
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
    division = read_json_object(file).get("pre_tokenizer") or {}
    own = division.get("type") == "ByteLevel" and division.get("use_regex", True)
    return "gpt-2" if own and not division.get("add_prefix_space") else None


def _require_same_vocabulary(facts: dict[str, Any], recipe: Recipe, trained: Sequence[int]) -> None:
    tokenizer = open_backbone(recipe.backbone).own_tokenizer()
    recipe.task.input_format.prepare_tokenizer(tokenizer)
    begins = list(SpecialTokens.of(tokenizer).prefix)
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens = [token.replace(" ", "\u2581") for token in facts["tokens"]]  # the converter writes some of them as spaces
    other = [
        index
        for index, token in vocabulary.items()
        if index >= len(tokens) or tokens[index] != token.replace(" ", "\u2581")
    ]
    if other:
        raise UserError(f"the GGUF file has {len(other):,} other tokens than the tokenizer, the first at {min(other)}")
    if facts["rows"] not in (None, len(tokens)):
        raise UserError(
            f"the GGUF file has {len(tokens):,} tokens and {facts['rows']:,} rows of their embeddings, which llama.cpp "
            "does not load; put the checkpoint's own tokenizer.model into the backbone's folder"
        )
    begin = [facts["bos"]] if facts["add_bos"] else []
    if not recipe.task.traits.encoder_decoder and not recipe.task.input_format.uses_chat_template and begins != begin:
        raise UserError(f"the GGUF file begins a text with the tokens {begin}, where training began it with {begins}")
    if facts["eos"] != (end := get_end_token(tokenizer)):
        raise UserError(f"the GGUF file ends a text with token {facts['eos']}, training with {end}")
    if missed := sorted(set(trained) - {facts[name] for name in ENDS}):
        raise UserError(f"the GGUF file does not end an answer with token {missed[0]}, and training did")


def _compare_llama_cpp(file: Path, reference: list[dict[str, Any]], *, exact: bool) -> dict[str, Any]:
    import llama_cpp

    longest = max(len(prompt["ids"]) for prompt in reference)
    # Keys and values of the cache in float32 (type 0): the comparison allows for the weights' rounding only.
    model = llama_cpp.Llama(
        str(file), n_ctx=longest + 8, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0
    )
    largest = 0.0
    for prompt in reference:
        ids = model.tokenize(prompt["text"].encode(), add_bos=prompt["whole"], special=True)
        if ids != prompt["ids"]:
            raise UserError(f"llama.cpp reads the prompt {shorten(prompt['text'], 60)!r} otherwise than training did")
        model.reset()
        model.eval(ids)
        logs = log_softmax(np.asarray(model.scores[len(ids) - 1], dtype=np.float64))
        largest = max(largest, *(abs(float(logs[int(token)]) - value) for token, value in prompt["next"].items()))
    if not largest <= _MAX_DIFFERENCE[exact]:
        raise UserError(
            f"the GGUF file's log probabilities differ by {largest:.3g} from the run's: more than by rounding"
        )
    return {"tokens": len(reference), "max_log_probability_difference": largest}


def build_modelfile(recipe: Recipe, trained: Sequence[int]) -> str:
    """Return Ollama's Modelfile: the run's own prompt, its `trained` ends, and greedy decoding as in `flatshift
    generate`."""
    task, tokenizer = recipe.task, open_backbone(recipe.backbone).tokenizer
    mark = "{{ .Prompt }}"
    raw = len(task.input_format.columns()) != 1 and not task.input_format.uses_chat_template
    (question,) = task.input_format.build_text_prompts([mark], tokenizer, raw=raw)
    template = question.text.removeprefix(tokenizer.bos_token or "")  # llama.cpp adds it by the file's settings
    if mark not in template or '"""' in template:
        raise UserError(f"--to ollama: the run's prompt cannot be written as a template of Ollama ({template!r})")
    ends = {get_end_token(tokenizer), question.stop, *trained}
    stops = {tokenizer.decode([end]) for end in ends if end is not None}
    lines = [
        f"FROM ./{GGUF}",
        f'TEMPLATE """{template}"""',
        *(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in sorted(stops)),
        "PARAMETER temperature 0",
        f"PARAMETER num_predict {task.max_new_tokens}",
        "",
    ]
    return "\n".join(lines)
