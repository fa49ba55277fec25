"""`flatshift plan`: predict whether a run fits a cluster, on which mesh, and how fast, before anything is loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from flatshift.command_line import data_override, parse_command
from flatshift.experiments.recipe import gallery_recipes
from flatshift.finetune.errors import UserError
from flatshift.finetune.redaction import join_command

_ASSUMED = "1xH100-80"


@dataclass(frozen=True)
class Flags:
    """Show which meshes of a cluster fit a run, how fast each is, and what the others lack; exit code 1 if none fits.

    No weights are loaded: shapes come from headers of weight files, a config.json, or a table of common models. Every
    key of the recipe is a flag: --train.max_length 4096 --adapter.rank 16.
    """

    recipe: Positional[str] = "language-model"
    """Recipe file or shipped recipe, whose backbone, adapter, rows and precision are planned."""
    data: tuple[str, ...] = ()
    """Files of training rows, counted for hours and cost; short for --data.train.files."""
    model: str | None = None
    """Another backbone: a directory, a config.json, a hub name, or a common shape such as llama-3.1-70b."""
    gpus: str | None = None
    """COUNTxNAME, for example 64xH100-80; NAME@GB for another memory; CPU@GB for a machine without any; `here`: what
    this machine has. Default: what the recipe's name says (`flatshift recipes`), for --model 1xH100-80, else `here`."""
    node: int | None = None
    """Devices per node; by default 8, or all of them."""
    nvlink: float | None = None
    """Bandwidth in GB/s from a device to others of its node, one direction; by default from its data sheet."""
    ib: float | None = None
    """Bandwidth in GB/s from a device to other nodes; 25 by default."""
    checkpointing: Literal["any", "none", "selective", "full"] | None = None
    """Activation checkpointing mode; any: the best of all. Default: the recipe's if it names one, else any."""
    price: float | None = None
    """Price of a device per hour; prints the cost of the recipe's steps."""
    tokens: float | None = None
    """Number of training tokens, for hours and cost; by default that of the recipe's train.steps, or of train.epochs
    over the rows of --data, counted with the recipe's own backbone."""
    out: Path | None = None
    """File for the output of --json, or NAME.html for a page of charts."""
    json: bool = False
    """Print all layouts as JSON."""
    calibrate: bool = False
    """Measure in two minutes the fraction of its devices' peak rates that this machine reaches, and store it for later
    plans."""


def run(argv: list[str]) -> int:
    flags, overrides = parse_command(Flags, "plan", argv)
    overrides = data_override(flags.data, overrides)
    for name in ("price", "tokens", "nvlink", "ib"):
        value = getattr(flags, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} {value}: give a number above 0")
    if flags.calibrate:
        if len(argv) > 1:
            raise UserError("--calibrate measures this machine and plans nothing; leave the other words out")
        from flatshift.experiments.workflows.mesh_plan import calibrate_machine

        print("\n".join(calibrate_machine()))
        return 0
    from flatshift.experiments.workflows.mesh_plan import format_plan, plan_mesh

    shown = gallery_recipes().get(flags.recipe)
    assumed = "here" if {flags.model, flags.node, flags.nvlink, flags.ib} == {None} else _ASSUMED
    gpus = flags.gpus or (assumed if shown is None else shown.gpus)
    document = plan_mesh(
        flags.recipe, overrides, model=flags.model, gpus=gpus, node=flags.node, link=flags.nvlink, network=flags.ib,
        recompute=flags.checkpointing, price=flags.price, tokens=flags.tokens,
    )  # fmt: skip
    text = json.dumps(document, indent=2, ensure_ascii=False)
    if flags.out is not None:
        from flatshift.finetune.atomic import write_text
        from flatshift.finetune.run_directory import check_new_file

        check_new_file(flags.out)
        written = text + "\n"
        if flags.out.suffix == ".html":
            from flatshift.experiments.report.chapters.plan import page

            written = page({**document, "command": f"flatshift plan {join_command(argv)}"})
        write_text(flags.out, written)
    if flags.gpus is None:
        meant, other = ("this machine", _ASSUMED) if gpus == "here" else (gpus, "here")
        print(f"note: planned for {meant}, as no --gpus is given; `--gpus {other}` plans for another", file=sys.stderr)
    print(text if flags.json else format_plan(document))
    if flags.out is not None and not flags.json:
        print(flags.out)
    return 0 if document["fits"] else 1
