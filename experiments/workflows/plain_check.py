"""Query an exported folder for comparison with its run: `python -P plain_check.py DIRECTORY`, using plain transformers
and PEFT and nothing of this project.

DIRECTORY holds `asked.json` and `asked.safetensors`, written by the caller; the answers go to `found.json` there.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

OURS = ("flatshift",)


def main(directory: str) -> None:
    """Compare logits row by row, and write of each folder: how far they are apart, the classes' names, greedy tokens
    and their end."""
    import torch
    import transformers

    work = Path(directory)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    answers = []
    for request in json.loads((work / "asked.json").read_text(encoding="utf-8")):
        torch.set_num_threads(request["threads"])
        answers.append(query_folder(request, work))
    ours = sorted(set(OURS) & {name.split(".")[0] for name in sys.modules})
    (work / "found.json").write_text(json.dumps({"folders": answers, "ours": ours}), encoding="utf-8")


def query_folder(request: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Return logits, answers and names of one folder's model, compared with the expected ones."""
    import torch
    from safetensors import safe_open

    answer: dict[str, Any] = {"difference": 0.0, "largest": 0.0, "same": 0, "places": 0, "names": [], "answers": []}
    answer |= {"unread": "", "other": []}
    if request["gguf"] is None:
        model = load_folder(request, work)
    else:
        try:
            model, answer["other"] = load_gguf(request)
        except Exception as error:
            answer["unread"] = str(error).splitlines()[0]
            return answer
    with safe_open(work / "asked.safetensors", "pt") as rows, torch.no_grad():
        for number in range(request["batches"]):
            inputs = {name: rows.get_tensor(f"{number}.{name}") for name in request["inputs"]}
            expected, logits = rows.get_tensor(f"{number}.logits").float(), model(**inputs).logits.float()
            if logits.ndim == 3:
                logits = logits[:, -expected.shape[1] :]  # PEFT returns those of soft tokens too, before the text's
            answer["difference"] = max(answer["difference"], float((logits - expected).abs().max()))
            answer["largest"] = max(answer["largest"], float(expected.abs().max()))
            answer["same"] += int((logits.argmax(-1) == expected.argmax(-1)).sum())
            answer["places"] += logits.argmax(-1).numel()
            if request["classes"] is not None:
                names = [model.config.id2label[i] for i in range(logits.shape[-1])]
                several = request["classes"] == "several"
                answer["names"] += [select_classes(row, names, several=several) for row in logits.tolist()]
    if request["prompts"]:
        settings = read_settings(model, request)
        ends = settings.eos_token_id
        answer["ends"] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        answer["answers"] = [
            answer_greedily(model, prompt, request, answer["ends"], settings) for prompt in request["prompts"]
        ]
        answer["stops"] = [end for end in request["ends"] if stops_at(model, end, request, answer["ends"])]
    return answer


def select_classes(logits: list[float], names: list[str], *, several: bool) -> list[str]:
    """Return the class of the largest logit, or all classes with a logit above 0."""
    if several:
        return [name for name, logit in zip(names, logits, strict=True) if logit > 0]
    return [names[max(range(len(logits)), key=logits.__getitem__)]]


def load_folder(request: Mapping[str, Any], work: Path) -> Any:
    """Load the folder's model in float32, in evaluation mode; weights beyond the memory limit stay in their files."""
    import torch
    import transformers

    kind = getattr(transformers, request["auto_class"])
    folder, options = request["backbone"] or request["folder"], request["options"]
    if request["memory"] is None:
        model = kind.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **options)
    else:
        model = kind.from_pretrained(
            folder, dtype="auto", use_safetensors=True, device_map="auto", max_memory={"cpu": request["memory"]},
            offload_folder=work / "offload", **options,
        )  # fmt: skip
        weights = detach_offload_hooks(model)
    if request["backbone"] is not None:
        from peft import PeftModel

        model.config.get_text_config().pad_token_id = request["pad"]  # a head finds the end of a text by it
        model = PeftModel.from_pretrained(model, request["folder"])
    if request["memory"] is not None:  # by the names in the model that PEFT wraps
        stream_weights(model, lambda name: weights(name.removeprefix("base_model.model.").replace(".base_layer", "")))
    return model.eval()


def load_gguf(request: Mapping[str, Any]) -> Any:
    """Load the GGUF file's model in evaluation mode, and the settings that llama.cpp has otherwise."""
    import transformers

    module = runpy.run_path(str(Path(__file__).parents[2] / "finetune" / "models" / "gguf_tensors.py"))
    model, other = module["load"](request, getattr(transformers, request["auto_class"]))
    return model.eval(), other


def detach_offload_hooks(model: Any) -> Callable[[str], Any]:
    """Return a function that reads a weight left on disk by its name; removes accelerate's hooks, which would do it."""
    import torch
    from accelerate.hooks import remove_hook_from_module

    places: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = getattr(module, "_hf_hook", None)
        for hook in getattr(hooks, "hooks", (hooks,)):
            weights = getattr(hook, "weights_map", None)
            if weights is not None:
                prefix = f"{name}." if name else ""
                places |= {prefix + leaf: (weights, leaf) for leaf in module._parameters}
    remove_hook_from_module(model, recurse=True)
    del model.hf_device_map
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:  # expanded zeros instead of meta: PEFT creates its weights on the device of these
                hollow = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
                value = hollow if parameter.is_meta else parameter.detach().float()
                module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    return lambda name: places[name][0][places[name][1]]


def stream_weights(model: Any, read: Callable[[str], Any]) -> None:
    """Load the hollow parameters of a block by name before it runs, and drop them afterwards. A hollow parameter has no
    values: it is on the meta device, or expanded from one number."""
    from torch import nn

    def add_hooks(module: Any, hollow: list[tuple[Any, str, str, Any]]) -> None:
        def fill(*_: Any) -> None:
            for owner, leaf, name, empty in hollow:
                owner._parameters[leaf] = nn.Parameter(read(name).to(empty.dtype), requires_grad=False)

        def drop(*_: Any) -> None:
            for owner, leaf, _name, empty in hollow:
                owner._parameters[leaf] = empty

        module.register_forward_pre_hook(fill)
        module.register_forward_hook(drop)

    for name, module, inner in iter_blocks(model):
        owners = module.named_modules(prefix=name) if inner else [(name, module)]
        hollow = [
            (owner, leaf, f"{owner_name}.{leaf}" if owner_name else leaf, parameter)
            for owner_name, owner in owners
            for leaf, parameter in owner._parameters.items()
            if parameter is not None and "original_module" not in owner_name
            and (parameter.is_meta or (parameter.numel() > 1 and not any(parameter.stride())))
        ]  # fmt: skip
        if hollow:
            add_hooks(module, hollow)


def iter_blocks(model: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield (name, module, recursive) of the modules that are loaded at once: members of module lists, modules without
    such a list inside, and the direct parameters of all others."""
    from torch import nn

    visited: set[int] = set()

    def walk(name: str, module: Any) -> Iterator[tuple[str, Any, bool]]:
        if id(module) in visited:
            return
        visited.add(id(module))
        if not any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
            yield name, module, True
            return
        yield name, module, False
        for child, inner in module.named_children():
            full_name = f"{name}.{child}" if name else child
            if isinstance(inner, nn.ModuleList):
                for number, member in enumerate(inner):
                    yield f"{full_name}.{number}", member, True
            else:
                yield from walk(full_name, inner)

    yield from walk("", model)


def read_settings(model: Any, request: Mapping[str, Any]) -> Any:
    """Return the folder's own generation settings; of a GGUF file, the tokens at which it ends."""
    import transformers

    if request["gguf"] is not None:
        ends, pad, start = request["gguf"]["ends"], request["pad"], request["start"]
        return transformers.GenerationConfig(eos_token_id=ends or None, pad_token_id=pad, decoder_start_token_id=start)
    if request["backbone"] is not None:
        return transformers.GenerationConfig.from_pretrained(request["folder"])
    return model.generation_config


def generate_tokens(model: Any, prompt: Mapping[str, Any], request: Mapping[str, Any], **settings: Any) -> list[int]:
    """Return the tokens that `generate_tokens` produces after a prompt."""
    import torch

    ids = torch.tensor([prompt["ids"]])
    adapter = getattr(model, "active_peft_config", None)
    cached = adapter is None or not adapter.is_prompt_learning  # PEFT 0.21 counts soft tokens twice in a cache
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=cached, **settings)[0]
    tokens: list[int] = out[1 if request["start"] is not None else len(prompt["ids"]) :].tolist()
    return tokens


def answer_greedily(
    model: Any, prompt: Mapping[str, Any], request: Mapping[str, Any], ends: list[int], settings: Any
) -> dict[str, Any]:
    """Return the greedy answer with the folder's `settings`, without its end token, and True if it ended by one."""
    base = model.get_base_model() if request["backbone"] is not None else model
    before = base.generation_config
    base.generation_config = config = copy.deepcopy(settings)
    config.update(max_new_tokens=prompt["most"], do_sample=False)
    tokens = generate_tokens(model, prompt, request, generation_config=config)
    base.generation_config = before
    stop = next((k for k, token in enumerate(tokens) if token in ends), None)
    return {"ids": tokens[:stop], "ended": stop is not None}


def stops_at(model: Any, end: int, request: Mapping[str, Any], ends: list[int]) -> bool:
    """Return True if `generate_tokens`, with the folder's settings, stops at `end`, which it is forced to produce
    first."""

    def force(ids: Any, scores: Any) -> Any:
        scores[:] = -1e9
        scores[:, end] = 0.0
        return scores

    own: dict[str, Any] = {} if request["backbone"] is None and request["gguf"] is None else {"eos_token_id": ends}
    own |= {"do_sample": False, "max_new_tokens": 2, "pad_token_id": request["pad"], "logits_processor": [force]}
    return generate_tokens(model, request["prompts"][0], request, **own) == [end]


if __name__ == "__main__":
    main(*sys.argv[1:])
