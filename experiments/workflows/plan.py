"""`flatshift plan`: a recipe, or a backbone alone, on a cluster that need not be at hand.

flatshift plan language-model --model llama-3.1-70b --gpus 64xH100-80 --train.max_length 8192 --train.batch_size 64
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.recipe import load_recipe
from experiments.recipe.tree import Branch
from finetune.errors import UserError
from finetune.planner.cluster import Cluster, layouts, read_sizes, table
from finetune.planner.rules import Settings

_AUTO = "bf16"
"""What `train.precision: auto` comes to on every device of the table that multiplies it natively."""


def plan(
    recipe: str,
    overrides: Sequence[Branch] = (),
    *,
    model: str | None = None,
    gpus: str = "1xH100-80",
    node: int | None = None,
    link: float | None = None,
    network: float | None = None,
    recompute: str = "any",
    price: float | None = None,
    tokens: float | None = None,
) -> dict[str, Any]:
    """Every layout of the cluster for a recipe, the best first, as plain values.

    model: another backbone than the recipe's. node, link, network: see `Cluster.parse`. recompute: `any` or a value of
    train.checkpointing. price: of a device for an hour. tokens: to be trained on; by default those of train.steps.
    Raises UserError for an unknown device or model, and where no mesh goes with rows, heads or blocks.
    """
    found = load_recipe(recipe, overrides).recipe
    train = found.train
    if train.epochs is not None and tokens is None:
        raise UserError("train.epochs: plan reads no rows to count; give --tokens or train.steps")
    if train.precision == "auto":
        train = dataclasses.replace(train, precision=_AUTO)  # type: ignore[arg-type]
    cluster = Cluster.parse(gpus, node=node, link=link, network=network)
    sizes = read_sizes(model or found.backbone, found.adapter)
    settings = Settings.of(dataclasses.replace(found, train=train))
    settings = dataclasses.replace(settings, mesh=dataclasses.replace(found.mesh, auto=False))
    ways = ("none", "selective", "full") if recompute == "any" else (recompute,)
    priced = layouts(sizes, cluster, settings, recompute=ways)
    best = priced[0]
    wanted = tokens if tokens is not None else float(best.tokens * train.steps)
    timed = best.fits and train.precision != "fp32"
    hours = wanted / best.tokens * best.time.total / 3600
    return {
        "model": model or found.backbone,
        "cluster": str(cluster),
        "devices": cluster.count,
        "frozen": sizes.elements,
        "trained": sizes.adapter,
        "usable_gib": round(best.room / 2**30, 2),
        "fits": best.fits,
        "recipe": best.recipe if best.fits else None,
        "tokens": wanted,
        "hours": round(hours, 3) if timed else None,
        "cost": round(hours * cluster.count * price, 2) if price is not None and timed else None,
        "layouts": [layout.document() for layout in priced],
        "notes": [
            "Seconds are a model's, fitted on A100s under full training: see docs/does-it-fit.md for its errors.",
            "allocated is what tensors take; reserved and nvidia_smi are ranges of what the pool and the driver add.",
        ],
        "table": table(priced, cluster, sizes),
    }


def render(document: dict[str, Any]) -> str:
    """For a person: the table, the lines to paste, hours and cost."""
    lines = [*document["table"]]
    if document["fits"]:
        best = document["layouts"][0]
        low, high = best["nvidia_smi_gib"]
        took = (
            "train.precision fp32: seconds are those of bf16 products and too short; no hours"
            if document["hours"] is None
            else f"{document['tokens']:,.0f} tokens take {document['hours']:,.3g} hours"
            + (f" and cost {document['cost']:,.2f}" if document["cost"] is not None else "")
        )
        lines += [
            f"best: {best['allocated_gib']:g} GiB in use on the fullest device, nvidia-smi will show {low:g} to "
            f"{high:g}; an update of {best['update_s']:.3g} s ({_causes(best['seconds'])})",
            took,
            "for the recipe:",
            *(f"  {line}" for line in document["recipe"].splitlines()),
        ]
    else:
        lines.append(
            "it does not fit: take more or larger devices, --train.quantization nf4, or fewer rows of an update"
        )
    return "\n".join(lines)


def _causes(seconds: dict[str, float]) -> str:
    total = sum(seconds.values()) or 1.0
    shares = sorted(((value / total, name) for name, value in seconds.items()), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005)
