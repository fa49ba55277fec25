"""Families on the axes of a mesh: real training of tiny models, compared with one process.

    python -m benchmarks.mesh_families [--only FAMILY ...] [--dropout on|off]

Each cell trains a random model of a family for 16 updates through the product's own loop, in float32 on two processes,
with and without dropout, and is compared with the same training in one. A refusal is a result too. Writes
`benchmarks/results/mesh_families.json`, of which the table of model types in docs/support-matrix.md is made
(`python scripts/write_support_matrix.py`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._equalities import MIXTURES, Layout, Subject
from benchmarks._harness import RESULTS, Benchmark, limit_threads, on_ranks
from benchmarks.sharding_equalities import cells, write_references
from flatshift.finetune.config import Mesh

FAMILIES = (
    *(
        "apertus",
        "arcee",
        "bert",
        "cohere",
        "cohere2",
        "cwm",
        "ernie4_5",
        "eurobert",
        "exaone",
        "exaone4",
        "gemma",
        "gemma2",
    ),
    *("gemma3_text", "glm", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "helium", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "llama", "ministral", "ministral3", "mistral", "nanochat", "nemotron", "olmo", "olmo2"),
    *("granite_swa", "qwen3_5_text", *MIXTURES),
    *("olmo3", "phi", "phi3", "qwen2", "qwen3", "roberta", "seed_oss", "smollm3", "starcoder2", "t5", "vaultgemma"),
)
VARIANTS = {
    **{family: family for family in FAMILIES},
    **{f"{family}, dropout": family for family in FAMILIES},
    **{"gemma3_text, one key": "gemma3_text", "qwen3, three keys": "qwen3", "phi3, one key": "phi3"},
    **{"llama, odd width": "llama", "gpt2, odd width": "gpt2"},
}
"""Model with a variant → its family."""
MESHES = {
    "tp": Mesh(tp=2),
    "sequence_parallel": Mesh(tp=2, sequence_parallel=True),
    "pp": Mesh(pp=2),
    "cp": Mesh(cp=2),
    "dp": Mesh(dp=2),
}
LAYOUTS = tuple(Layout(axis, mesh, models=tuple(VARIANTS)) for axis, mesh in MESHES.items())
EXPERTS = tuple(model for model, family in VARIANTS.items() if family in MIXTURES)
EXPERT_LAYOUT = Layout("ep", Mesh(dp=2, ep=2), models=EXPERTS)
BAR = 1e-5
"""Largest difference of a loss, in nats."""


def subjects_of(models: list[str]) -> tuple[Subject, ...]:
    return tuple(Subject(model, "plain") for model in models)


def cells_of(folder: str, models: list[str]) -> list[dict[str, Any]]:
    """All cells of these models, in one of two processes."""
    mixtures = subjects_of([model for model in models if model in EXPERTS])
    return cells(folder, 2, LAYOUTS, subjects_of(models)) + cells(folder, 2, (EXPERT_LAYOUT,), mixtures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="only these families; the cells of others stay")
    parser.add_argument("--dropout", choices=("on", "off"), help="only models with or without it; others stay")
    asked = parser.parse_args()
    limit_threads(1)
    models = [model for model, family in VARIANTS.items() if asked.only is None or family in asked.only]
    if asked.dropout is not None:
        models = [model for model in models if (model in FAMILIES) == (asked.dropout == "off")]
    with tempfile.TemporaryDirectory() as folder:
        falls = write_references(Path(folder), subjects_of(models), LAYOUTS)
        where = "benchmarks.mesh_families:cells_of"
        result = on_ranks(where, 2, wall_cap_s=6 * 3600, folder=folder, models=models)[0]
    rows = []
    if asked.only is not None or asked.dropout is not None:
        rows = json.loads((RESULTS / "mesh_families.json").read_text(encoding="utf-8"))["rows"]
    write(result, falls, rows)


def write(results: list[dict[str, Any]], falls: dict[str, tuple[float, float]], previous: list[dict[str, Any]]) -> None:
    """Write a row for each axis, with all cells inside: of `found`, and of `kept` where a model is not among them."""
    bench = Benchmark("mesh_families", packages=("torch", "transformers", "peft"))
    known: dict[str, dict[str, Any]] = {row["axis"]: row["cells"] for row in previous if "axis" in row}
    for cell in results:
        model = cell["subject"].removesuffix("/plain")
        known.setdefault(cell["layout"], {})[model] = cell.get("loss", cell.get("reason"))
    for axis in (*MESHES, EXPERT_LAYOUT.name):
        records = [cell for cell in known[axis].values() if isinstance(cell, float)]
        what = f"{axis}: loss, worst of {len(records)} cells"
        row = bench.row(what, "nats, largest difference", ours=max(records), maximum=BAR)
        row |= {"axis": axis, "cells": dict(sorted(known[axis].items()))}
    worst = max(
        [last / first for first, last in falls.values()] + [row["ours"] for row in previous if "axis" not in row]
    )
    bench.row("loss of the last update ÷ the first, the largest", "ratio", ours=worst, maximum=1)
    bench.finish()


if __name__ == "__main__":
    main()
