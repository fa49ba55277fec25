"""Families on the axes of a mesh: real training of tiny models, with dropout, compared with one process.

    python -m benchmarks.mesh_families [--only FAMILY ...]

Each cell trains a random model of a family for 16 updates through the product's own loop, in float32 on two processes,
and is compared with the same training in one. A refusal is a result too. Writes
`benchmarks/results/mesh_families.json`, of which the table of model types in docs/support-matrix.md is made
(`python scripts/write_support_matrix.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from typing import Any

import torch

from benchmarks._equalities import Layout, Subject
from benchmarks._harness import RESULTS, Benchmark
from benchmarks.sharding_equalities import measure
from flatshift.finetune.config import Mesh

FAMILIES = (
    *("apertus", "arcee", "bert", "cohere", "cohere2", "cwm", "ernie4_5", "exaone", "exaone4", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "helium", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "llama", "ministral", "ministral3", "mistral", "nanochat", "nemotron", "olmo", "olmo2"),
    *("gpt_oss", "granite_swa", "minimax", "mixtral", "qwen2_moe", "qwen3_5_text", "qwen3_moe"),
    *("olmo3", "phi", "phi3", "qwen2", "qwen3", "roberta", "seed_oss", "smollm3", "starcoder2", "t5", "vaultgemma"),
)
VARIANTS = {
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
}
LAYOUTS = tuple(Layout(axis, mesh, models=(*FAMILIES, *VARIANTS)) for axis, mesh in MESHES.items())
BAR = 1e-5
"""Largest difference of a loss, in nats."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="only these families; the cells of others stay")
    only = parser.parse_args().only
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    torch.set_num_threads(1)
    models = [model for model, family in VARIANTS.items() if only is None or family in only]
    with tempfile.TemporaryDirectory() as folder:
        found, falls = measure(LAYOUTS, tuple(Subject(model, "plain") for model in models), folder)
    rows = []
    if only is not None:
        rows = json.loads((RESULTS / "mesh_families.json").read_text(encoding="utf-8"))["rows"]
    write(found, falls, kept=rows)


def write(
    found: list[dict[str, Any]],
    falls: dict[str, tuple[float, float]],
    *,
    kept: list[dict[str, Any]],
    place: dict[str, Any] | None = None,
) -> None:
    """Write a row for each axis, with all cells inside: of `found`, and of `kept` where a model is not among them."""
    bench = Benchmark("mesh_families", packages=("torch", "transformers", "peft"))
    cells: dict[str, dict[str, Any]] = {row["axis"]: row["cells"] for row in kept if "axis" in row}
    for cell in found:
        model = cell["subject"].removesuffix("/plain")
        cells.setdefault(cell["layout"], {})[model] = cell.get("loss", cell.get("reason"))
    for axis in MESHES:
        told = [cell for cell in cells[axis].values() if isinstance(cell, float)]
        row = bench.row(
            f"{axis}: loss, worst of {len(told)} cells", unit="nats, largest difference", ours=max(told),
            bar_op="<=", bar_value=BAR,
        )  # fmt: skip
        row |= {"axis": axis, "cells": dict(sorted(cells[axis].items()))}
    worst = max(last / first for first, last in falls.values())
    bench.row("loss of the last update ÷ the first, the largest", unit="ratio", ours=worst, bar_op="<", bar_value=1)
    bench.finish(place=place)


if __name__ == "__main__":
    main()
