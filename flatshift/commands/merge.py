"""`flatshift merge`: merge a run's adapter into its backbone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from flatshift import outcome
from flatshift.command_line import parse_flags, print_json
from flatshift.commands.export import comparison_lines


@dataclass(frozen=True)
class Flags:
    """Merge a run's adapter into its backbone: a model folder that plain transformers loads."""

    run: Positional[Path]
    """Run directory."""
    out: Path | None = None
    """Folder to create; by default RUN_DIR/merged."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the written weights. auto: the backbone's own, and float32 for a regression."""
    json: bool = False
    """Print dtype, rounding, logit difference and its judgement as JSON (the contents of merge.json)."""


def run(argv: list[str]) -> int:
    flags = parse_flags(Flags, "merge", argv)
    out = flags.out or flags.run / "merged"
    from flatshift.experiments.workflows.export import merge_run as merge_run

    result = merge_run(flags.run, out, dtype=flags.dtype)
    if flags.json:
        print_json({"out": str(out), **result})
        return 0
    print(f"{out}: {result['dtype']}")
    for dtype, rounding in result["rounding"].items():
        print(
            f"rounding to {dtype} moved merged weights by at most {rounding['largest']:.2g} "
            f"({rounding['relative']:.2g} of the largest in their row)"
        )
    print(*comparison_lines(result), sep="\n")
    print(result["judgement"])
    if result["other_labels"]:
        print(f"{result['other_labels']} of these rows get another label by rounding; --dtype float32 keeps them all")
    if result["tokenized_rows"]:
        print(f"the saved tokenizer reads {result['tokenized_rows']} rows of the run as training did")
    if result["quantization"] is not None:
        print(f"the adapter was trained on the backbone in {result['quantization']}; here it is on the float weights")
    outcome.print_merge_outcome(flags.run, out)
    return 0
