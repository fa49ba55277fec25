"""`flatshift export`: write a run's adapter as a hub-ready folder."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from flatshift import outcome
from flatshift.command_line import parse_flags, print_json
from flatshift.finetune.errors import UserError


@dataclass(frozen=True)
class Flags:
    """Export a run for other programs: by default a hub-ready folder of its adapter's PEFT files, the tokenizer, and a
    model card generated from the run."""

    run: Positional[Path]
    """Run directory."""
    out: Path | None = None
    """Folder to create; by default RUN_DIR/export, or RUN_DIR plus the value of --to."""
    add: tuple[str, ...] = ()
    """Other adapters of the same backbone to add: run or PEFT directories, as DIR or DIR=WEIGHT."""
    base_model: str | None = None
    """Hub name of the backbone, if the run used it from a local directory."""
    to: Literal["hub", "gguf", "ollama", "vllm"] = "hub"
    """Target format. hub: the adapter's PEFT files. gguf: the merged model for llama.cpp (extra gguf, or --llama-cpp).
    ollama: that, and a Modelfile. vllm: the merged model and a script that compares vLLM with the run."""
    outtype: Literal["auto", "f32", "f16", "bf16", "q8_0"] = "auto"
    """Data type of the weights in a GGUF file; auto: 16 bits."""
    llama_cpp: Path | None = None
    """A checkout of llama.cpp whose converters are used; they also convert a plain LoRA adapter."""
    license: str | None = None
    """Licence of the adapter by its name on the hub (apache-2.0, …); without it the card asks for one."""
    json: bool = False
    """Print the folder and its comparison with the run as JSON."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "export", argv)
    out = flags.out or flags.run / ("export" if flags.to == "hub" else flags.to)
    if flags.to in ("hub", "vllm") and (flags.outtype != "auto" or flags.llama_cpp):
        raise UserError("--outtype and --llama-cpp are of --to gguf and --to ollama; leave them out")
    if flags.to != "hub":
        return _export_deployment(flags, out)
    from flatshift.experiments.workflows.export import export_run as export_run

    result = export_run(flags.run, out, base_model=flags.base_model, license=flags.license, add=flags.add)
    if flags.json:
        print_json({"folder": str(out), "compared": result})
        return 0
    print(out)
    print(*comparison_lines(result), sep="\n")
    outcome.print_export_outcome(flags.run, out)
    return 0


def comparison_lines(result: dict[str, Any] | None) -> list[str]:
    """Return lines on the comparison of a folder with the run
    (`flatshift.experiments.workflows.folder_check.compare_folder`)."""
    if result is None:
        return ["not compared: the adapter fits quantised weights only (adapter.init: loftq)"]
    if "unread" in result:
        return [f"answers are not compared, as this file is not read in plain transformers ({result['unread']})"]
    random_rows = " of drawn tokens, as those of the run cannot be read" if result["drawn"] else ""
    lines = [
        "in plain transformers logits differ from backbone + adapter by at most "
        f"{result['max_logit_difference']:.2g} (largest logit {result['largest_logit']:.3g}, {result['rows']} "
        f"rows{random_rows})"
    ]
    answers = result["answers"] + result["answers_by_rounding"]
    if answers:
        rounded = f", {result['answers_by_rounding']} but for rounding" if result["answers_by_rounding"] else ""
        stops = ", ".join(map(repr, result["stop_texts"]))
        lines.append(
            f"it answers {answers} prompts as the run does{rounded}"
            + (f", and stops at {stops}" if stops else "; training supervised no token as the end of an answer")
        )
    if dropped := result["dropped_settings"]:
        lines.append(f"left out of generation_config.json, as the run answers without: {', '.join(dropped)}")
    lines += [f"llama.cpp has {text}, which changes none of these answers" for text in result["other_settings"]]
    return lines


def _export_deployment(flags: Flags, out: Path) -> int:
    if flags.add or flags.base_model or flags.license:
        raise UserError("--add, --base-model and --license are of --to hub; leave them out")
    from flatshift.experiments.workflows.deployment import export_for_program

    assert flags.to != "hub"
    result = export_for_program(flags.run, out, program=flags.to, outtype=flags.outtype, llama_cpp=flags.llama_cpp)
    if flags.json:
        print_json({"folder": str(out), **result})
        return 0
    print(out)
    print(*comparison_lines(result["compared"]), sep="\n")
    if flags.to == "vllm":
        serve = shlex.join(["vllm", "serve", str(out)])
        print(f"in that folder `python check_vllm.py` compares vLLM with the run, and `{serve}` serves it")
        return 0
    if result["tokens"]:
        print(
            f"llama.cpp reads {result['tokens']} prompts of the run as training did; log probabilities of the "
            f"likeliest next tokens differ by at most {result['max_log_probability_difference']:.2g}"
        )
    else:
        print("vocabulary and special tokens are compared; `pip install llama-cpp-python` to ask llama.cpp itself")
    return 0
