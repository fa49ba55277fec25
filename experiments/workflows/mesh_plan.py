"""Planning of a recipe, or a backbone alone, on a cluster that need not be available: `flatshift plan`.

flatshift plan language-model --model llama-3.1-70b --gpus 64xH100-80 --train.max_length 8192 --train.batch_size 64
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.data.lengths import find_longest_length
from flatshift.experiments.data.sources import epochs_to_steps
from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.resolve import is_given
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.workflows.run_parts import FINE_TUNE
from flatshift.finetune.config import Precision, Train
from flatshift.finetune.data.columns import ColumnarExamples
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.formats import HUB, SAMPLE
from flatshift.finetune.errors import UserError, is_remote
from flatshift.finetune.figures import format_bytes, format_duration
from flatshift.finetune.models.backbone import check_architecture, check_task
from flatshift.finetune.planner.calibration import cached_overhead, calibrate
from flatshift.finetune.planner.devices import Cluster, detect_devices
from flatshift.finetune.planner.footprint import plan_evaluation
from flatshift.finetune.planner.layouts import Layout, best_layout, enumerate_layouts, format_table, price_layout
from flatshift.finetune.planner.rules import RuleSettings, broken_rule
from flatshift.finetune.planner.sizes import BackboneSizes, known_shape, read_sizes
from flatshift.finetune.planner.throughput import DEVICES, PUBLISHED
from flatshift.finetune.seeds import derive_seed

_THOUSAND = 1000


def calibrate_machine() -> list[str]:
    """Measure the rates of this machine and store them; returns lines on the result."""
    devices = detect_devices()
    return calibrate(devices.row, devices.kind, devices.count)[1]


def _parse_cluster(gpus: str, node: int | None, link: float | None, network: float | None, ranks: int) -> Cluster:
    if gpus.strip().lower() != "here":
        return Cluster.parse(gpus, node=node, link=link, network=network)
    if flags := [name for name, value in (("node", node), ("nvlink", link), ("ib", network)) if value is not None]:
        raise UserError(f"--{flags[0]}: --gpus here is one machine as it is; write COUNTxNAME to describe another")
    devices = detect_devices()
    count = devices.count if devices.kind == "cuda" else ranks  # one process uses all cores
    return Cluster.at_hand(devices, count, count)


def plan_mesh(
    recipe: str,
    overrides: Sequence[Branch] = (),
    *,
    model: str | None = None,
    gpus: str = "1xH100-80",
    node: int | None = None,
    link: float | None = None,
    network: float | None = None,
    recompute: str | None = None,
    price: float | None = None,
    tokens: float | None = None,
) -> dict[str, Any]:
    """Return every layout of the cluster for a recipe, the best first, as plain values.

    model: another backbone than the recipe's. node, link, network: see `Cluster.parse`. recompute: `any` or a value of
    train.checkpointing; None: the recipe's if it names one, else `any`. price: of a device for an hour. tokens: to be
    trained on; by default those of train.steps.
    Raises UserError for an unknown device or model, and if no mesh fits the rows, heads or blocks.
    """
    resolved, data, longest = load_recipe(recipe, overrides), None, None
    counted = resolved.recipe.train.epochs is None
    rows = () if tokens is not None else _read_rows(resolved.recipe, is_other=model is not None)
    if len(rows):
        ragged = ColumnarExamples.of(rows).ragged("input_ids")
        lengths = np.zeros(0) if ragged is None else np.sort(ragged[2])
        resolved = epochs_to_steps(resolved, rows, seed=derive_seed(resolved.recipe.train.seed, FINE_TUNE))
        own, counted, longest = resolved.recipe, True, find_longest_length(rows)
        data = {"rows": len(rows), "tokens": int(lengths.sum()), "by": own.backbone, "updates": own.train.steps}
    settings = resolved.recipe
    backbone, train = model or settings.backbone, settings.train
    cluster = _parse_cluster(gpus, node, link, network, settings.mesh.size)
    train = whole = _on_device(train, cluster)
    is_padded = not (settings.task.pack or train.compile or settings.warmup)
    if longest is not None and is_padded:  # rows are padded only to the longest of their batch
        train = dataclasses.replace(train, max_length=min(train.max_length, longest))
    sizes = read_sizes(backbone, settings.adapter).under(settings.task)
    mesh = dataclasses.replace(settings.mesh, auto=False)
    rules = dataclasses.replace(RuleSettings.of(dataclasses.replace(settings, train=train)), mesh=mesh)
    origin = resolved.origins.get("train.checkpointing", "")
    if recompute not in (None, train.checkpointing) and origin.startswith("--"):
        raise UserError(f"--checkpointing {recompute} contradicts {origin} {train.checkpointing}; keep one of them")
    if recompute is None:
        recompute = train.checkpointing if is_given(resolved, "train.checkpointing") else "any"
    choices = ("none", "selective", "full") if recompute == "any" else (recompute,)
    further = [] if settings.warmup is None else [settings.warmup.batch_size]
    layouts = enumerate_layouts(sizes, cluster, rules, recompute=choices, batch_sizes=further)
    best = best_layout(layouts)
    narrow = dataclasses.replace(rules, train=dataclasses.replace(train, backbone_precision="bf16"))
    if not best.fits and train.backbone_precision == "auto" and cluster.kind == "cpu" and broken_rule(narrow) is None:
        rules, layouts = narrow, enumerate_layouts(sizes, cluster, narrow, recompute=choices)  # as training does
        best = best_layout(layouts)
    _check_task(backbone, sizes.kind, settings)
    total = tokens if tokens is not None else float(best.tokens * train.steps) if counted else None
    if data is not None and total is not None and len(lengths) and is_padded:
        together = best.train.batch_size // (best.mesh.replicate * best.mesh.dp)
        padded = _mean_longest(lengths, together) / train.max_length
        data, total = data | {"padded": padded}, total * padded
    is_timed = best.fits and (train.precision != "fp32" or cluster.kind == "cpu") and total is not None
    hours = 0.0 if total is None else total / best.tokens * best.time.total / 3600
    overhead = cached_overhead() if cluster.kind == "cpu" else None
    return {
        "model": backbone,
        "cluster": str(cluster),
        "devices": cluster.count,
        "kind": cluster.kind,
        "frozen": sizes.elements,
        "trained": sizes.adapter,
        "usable_gib": None if best.room is None else round(best.room / 2**30, 2),
        "fits": best.fits,
        "recipe": best.recipe if best.fits else None,
        "tokens": total,
        "data": data,
        "hours": float(f"{hours:.3g}") if is_timed else None,
        "cost": round(hours * cluster.count * price, 2) if price is not None and is_timed else None,
        "best": layouts.index(best),
        "evaluation": _evaluation_cost(sizes, settings, whole, best, cluster.kind),
        "layouts": [layout.document() for layout in layouts],
        # The least and most that a process of the best layout takes of a CPU's memory; None without a calibration.
        "process_gib": None
        if overhead is None
        else [round(end / 2**30, 2) for end in overhead.interval(best.needs.total)],
        "notes": _plan_notes(cluster, sizes, best, rules),
        "advice": None if best.fits else _advice(best, rules),
        "table": format_table(layouts, cluster, sizes),
    }


def _read_rows(recipe: Recipe, *, is_other: bool) -> Sequence[Example]:
    """Return the training rows where hours need them, and for given steps where they and the backbone are here.

    is_other: another backbone than the recipe's is planned.
    """
    files = recipe.data.train.all_files
    is_own = any(not name.startswith(SAMPLE) for name in files)
    at_hand = not is_other and known_shape(recipe.backbone) is None
    if recipe.train.epochs is not None:
        return prepare_data(recipe).train if is_own or at_hand else ()
    if is_own and at_hand and not any(is_remote(name) or name.startswith(HUB) for name in files):
        with contextlib.suppress(UserError):  # files or weights may be where it will train: rows of max_length then
            return prepare_data(recipe).train
    return ()


def _mean_longest(lengths: np.ndarray, count: int) -> float:
    """Return the mean of the longest of `count` draws from sorted `lengths`."""
    below = np.arange(len(lengths) + 1) / len(lengths)
    return float(np.diff(below**count) @ lengths)


def _check_task(backbone: str, kind: str, recipe: Recipe) -> None:
    """Raise UserError for a task that training would refuse. Not for a bare config.json."""
    from transformers import CONFIG_MAPPING

    if known_shape(backbone) is not None:
        check_architecture(CONFIG_MAPPING[kind](), recipe.task, backbone)
    elif not (path := Path(backbone).expanduser()).exists() or any(path.glob("*.safetensors")):
        check_task(backbone, recipe.task)


def _on_device(train: Train, cluster: Cluster) -> Train:
    """Return `train` with `auto` resolved for the devices: on a CPU float32, which takes most memory."""
    if cluster.kind == "cpu":
        train = dataclasses.replace(train, device="cpu")
    elif train.precision == "bf16" and not cluster.device.bf16:
        raise UserError(f"train.precision: bf16: {cluster.name} has no bf16 instructions; take auto or fp16")
    own: Precision = "fp32" if cluster.kind == "cpu" else "bf16" if cluster.device.bf16 else "fp16"
    return dataclasses.replace(train, precision=own) if train.precision == "auto" else train


def _evaluation_cost(sizes: BackboneSizes, recipe: Recipe, train: Train, best: Layout, kind: str) -> dict[str, Any]:
    plan = plan_evaluation(
        sizes, recipe.task, train,
        batch_size=max(1, recipe.eval.batch_size // (best.mesh.replicate * best.mesh.dp * best.mesh.cp)),
        rows=_THOUSAND, tokens=_THOUSAND * train.max_length * recipe.task.traits.rows_per_example,
        longest=train.max_length, device=kind, regularizer=recipe.regularizer,
    )  # fmt: skip
    return {
        "rows_at_once": recipe.eval.batch_size,
        "gib": round(plan.memory / 2**30, 2),
        "updates_per_1000_rows": float(f"{plan.updates(best.tokens):.3g}"),
    }


def _advice(best: Layout, rules: RuleSettings) -> str:
    packed = dataclasses.replace(rules, mesh=best.mesh, train=dataclasses.replace(best.train, quantization="nf4"))
    nf4 = "--train.quantization nf4, " if rules.train.quantization is None and broken_rule(packed) is None else ""
    return f"it does not fit: take more or larger devices, {nf4}or fewer rows per step"


def _plan_notes(cluster: Cluster, sizes: BackboneSizes, best: Layout, rules: RuleSettings) -> list[str]:
    source = "a model's, fitted on A100s under full training: see docs/does-it-fit.md for its errors"
    if cluster.constants != PUBLISHED:
        source = f"those of rates that --calibrate measured for {cluster.name}; between nodes they are published shares"
    elif cluster.kind == "cpu":
        source = "those of assumed CPU cores and may be far off: `flatshift plan --calibrate` measures this machine's"
    notes = [
        f"Seconds are {source}.",
        "allocated is what tensors take; reserved and nvidia_smi are ranges of what the pool and the driver add.",
    ]
    if best.time.host:
        known = "assumed" if cluster.constants.launch == PUBLISHED.launch else "measured"
        notes.append(
            f"The device waits for its host, {1e6 * cluster.constants.launch:.3g} µs a kernel ({known}): "
            "larger micro-batches or train.compile help."
        )
    if cluster.kind == "cuda" and cluster.name not in DEVICES:
        notes.append("This device is not in the table: its meshes are ranked by rates of an A100.")
    if cluster.kind == "cpu" and rules.train.backbone_precision == "bf16":
        notes.append("Frozen weights are kept in bf16 (train.backbone_precision), as float32 ones do not fit.")
    if best.mesh.offload:
        held = dataclasses.replace(rules, mesh=dataclasses.replace(best.mesh, offload=False), train=best.train)
        needs = price_layout(held, sizes, cluster).needs
        notes.append(
            f"mesh.offload: each rank has {format_bytes(needs.weights + needs.adapter)} of weights and adapter in host "
            "memory; the time of their copies is not counted."
        )
    if sizes.experts > 1:
        notes.append(
            f"{sizes.experts} experts a block, {sizes.routed} for a token: their activations are a formula that no "
            "trace has checked, and all ranks are taken to get as many tokens."
        )
    return notes


def format_plan(document: dict[str, Any]) -> str:
    """Format the table, the settings to paste, hours and cost."""
    lines = [*document["table"]]
    if document["fits"]:
        best = document["layouts"][document["best"]]
        memory = ", nvidia-smi will show {:g} to {:g}".format(*best["nvidia_smi_gib"])
        memory = memory if document["kind"] == "cuda" else ""
        if document["process_gib"] is not None:
            memory = ", a process {:g} to {:g}".format(*document["process_gib"])
        duration = (
            "an epoch of how many tokens? --tokens N, or --data FILE if the backbone is here, gives hours and cost"
            if document["tokens"] is None
            else "train.precision fp32: seconds are those of bf16 products and too short; no hours"
            if document["hours"] is None
            else f"{document['tokens']:,.0f} tokens take {format_duration(3600 * document['hours'])}"
            + (f" and cost {document['cost']:,.2f}" if document["cost"] is not None else "")
        )
        if document["data"] is not None:
            files = "; its files have {rows:,} rows of {tokens:,} tokens ({by}), {updates:,} steps"
            duration += files.format(**document["data"])
            if (share := document["data"].get("padded", 1.0)) < 0.995:
                duration += f", whose rows are padded to {share:.0%} of the longest, as which the table counts all"
        total = sum(best["seconds"].values()) or 1.0
        parts = sorted(((seconds / total, name) for name, seconds in best["seconds"].items()), reverse=True)
        shares = ", ".join(f"{name} {share:.0%}" for share, name in parts if share >= 0.005)
        lines += [
            f"best: {best['name']}, {best['allocated_gib']:g} GiB in use on the fullest device{memory}; a step of "
            f"{format_duration(best['update_s'])} ({shares})",
            duration,
            "evaluation: {rows_at_once:,} rows at once take {gib:g} GiB next to the weights; 1,000 of the longest take "
            "as long as {updates_per_1000_rows:,g} steps".format(**document["evaluation"]),
            "for the recipe:",
            *(f"  {line}" for line in document["recipe"].splitlines()),
            *document["notes"][2:],
        ]
    else:
        lines.append(document["advice"])
    return "\n".join(lines)
