"""`generate`, `merge`, `export`, `eval --harness`: what leaves a finished run, or looks at it from outside.

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from experiments.recipe import from_override
from finetune.errors import UserError
from flatshift.flags import EvalFlags, ExportFlags, GenerateFlags, MergeFlags
from flatshift.flags import parse as _parse


def generate(argv: list[str]) -> int:
    """`flatshift generate`."""
    flags: GenerateFlags = _parse(GenerateFlags, "generate", argv)
    prompts = flags.prompt
    if not prompts and not flags.data and not sys.stdin.isatty():
        prompts = _lines_of_input()
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "num_beams")
    given = {name: getattr(flags, name) for name in names}
    from experiments.workflows.generate import generate_from_run, render

    records = generate_from_run(
        flags.run,
        prompts=prompts,
        data=flags.data,
        decoding={name: value for name, value in given.items() if value is not None},
        batch_size=flags.batch_size,
        overrides=[] if flags.device is None else [from_override("train.device", flags.device, "--device")],
        out=flags.out,
        quiet=flags.json,
    )
    if flags.json:
        print(json.dumps(records, indent=2, ensure_ascii=False))
    else:
        print(render(records) if flags.out is None else f"{flags.out}: {len(records):,} answers")
    return 0


def _lines_of_input() -> tuple[str, ...]:
    """The lines of standard input that are not blank."""
    from finetune.data.formats import has_half_pair

    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that the line can be named
    lines = [(number, line.rstrip("\n")) for number, line in enumerate(sys.stdin, start=1) if line.strip()]
    for number, line in lines:
        if has_half_pair(line):
            raise UserError(f"standard input:{number}: not valid UTF-8; write it in that encoding")
    return tuple(line for _, line in lines)


def merge(argv: list[str]) -> int:
    """`flatshift merge`."""
    flags: MergeFlags = _parse(MergeFlags, "merge", argv)
    out = flags.out or flags.run / "merged"
    from experiments.workflows.merge import merge as merge_run

    result = merge_run(flags.run, out, check=flags.check)
    if flags.json:
        print(json.dumps({"out": str(out), **result}, indent=2))
        return 0
    print(f"{out}: {result['dtype']}")
    for dtype, found in result["rounding"].items():
        print(
            f"rounding to {dtype} moved merged weights by at most {found['largest']:.2g} "
            f"({found['relative']:.2g} of the largest in their row)"
        )
    if result["max_logit_difference"] is None:
        print("logits were not compared; `--check logits` loads the model for that")
    else:
        print(
            f"logits differ from backbone + adapter by at most {result['max_logit_difference']:.2g} "
            f"(largest logit {result['largest_logit']:.3g}, {result['rows']} rows"
            f"{' of drawn tokens, as those of the run cannot be read' if result['drawn'] else ''})"
        )
    if result["quantization"] is not None:
        print(f"the adapter was trained on the backbone in {result['quantization']}; here it is on the float weights")
    return 0


def export(argv: list[str]) -> int:
    """`flatshift export`."""
    flags: ExportFlags = _parse(ExportFlags, "export", argv)
    from experiments.workflows.export import export as export_run

    out = flags.out or flags.run / "export"
    print(export_run(flags.run, out, base_model=flags.base_model, license=flags.license, add=flags.add))
    return 0


def harness_flags(flags: EvalFlags) -> list[str]:
    """The fields that only `--harness` reads."""
    return [field.name for field in dataclasses.fields(flags) if field.name.startswith("harness_")]


def harness(flags: EvalFlags, overrides: list[Any]) -> int:
    """`flatshift eval --harness`; what was not given is left to the study's own defaults."""
    odd = [field.name for field in dataclasses.fields(flags) if field.name.startswith(("sharpness", "data"))]
    if given := [name for name in odd if getattr(flags, name)]:
        raise UserError(f"--{given[0].replace('_', '-')} does not go with --harness; leave one of them out")
    for tree in overrides:
        if set(getattr(tree.children.get("train"), "children", tree.children)) != {"device"}:
            raise UserError(f"{tree.where} does not go with --harness, which runs in one process; leave it out")
    own = {name.removeprefix("harness_"): getattr(flags, name) for name in harness_flags(flags)}
    from experiments.workflows.lm_eval import render, run_harness

    given_own = {name: value for name, value in own.items() if value is not None}
    record = run_harness(flags.run, flags.harness, overrides=overrides, quiet=flags.json, **given_own)
    print(json.dumps(record, indent=2, ensure_ascii=False) if flags.json else render(record))
    return 0
