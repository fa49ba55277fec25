"""A run's adapter folded into its backbone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from flatshift import outcome
from flatshift.command_line import parse


@dataclass(frozen=True)
class Flags:
    """Fold a run's adapter into its backbone: a model folder that plain transformers loads."""

    run: Positional[Path]
    """Run directory."""
    out: Path | None = None
    """Folder to make; by default RUN_DIR/merged."""
    check: Literal["auto", "logits", "rows"] = "auto"
    """What is compared with backbone + adapter afterwards: some rows of every changed weight, or also the logits,
    which takes the whole model into memory. auto: logits up to 2 GiB in float32."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the written weights. auto: the backbone's own."""
    json: bool = False
    """Print dtype, rounding and logit difference as JSON (what merge.json holds)."""


def run(argv: list[str]) -> int:
    """`flatshift merge`."""
    flags: Flags = parse(Flags, "merge", argv)
    out = flags.out or flags.run / "merged"
    from experiments.workflows.merge import merge as merge_run

    result = merge_run(flags.run, out, check=flags.check, dtype=flags.dtype)
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
    if result["other_labels"]:
        print(f"{result['other_labels']} of these rows get another label by rounding; --dtype float32 keeps them all")
    if result["tokenized_rows"]:
        print(f"the saved tokenizer reads {result['tokenized_rows']} rows of the run as training did")
    if result["quantization"] is not None:
        print(f"the adapter was trained on the backbone in {result['quantization']}; here it is on the float weights")
    outcome.of_merge(flags.run, out)
    return 0
