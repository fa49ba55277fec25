"""docs/cuda.md names the GPU that results were measured on, with their figures."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")


def rows_of_the_gpu() -> dict[str, dict]:
    return {row["what"]: row for row in json.loads((ROOT / "benchmarks/results/gpu.json").read_text())["rows"]}


def test_every_gpu_of_a_result_is_named() -> None:
    machines = [
        json.loads(file.read_text(encoding="utf-8"))["machine"]
        for file in (ROOT / "benchmarks" / "results").glob("*.json")
    ]
    devices = {machine["gpu"].removeprefix("NVIDIA ") for machine in machines if machine.get("gpu")}
    assert devices and all(device in PAGE for device in devices)


def test_the_figures_are_those_of_the_results() -> None:
    rows = rows_of_the_gpu()
    compiled = rows["8 B, 2 × 4,096 tokens, blocks compiled: rate"]["ours"]
    eager = rows["8 B, 2 × 4,096 tokens, nothing recomputed: rate"]["ours"]
    best = rows["8 B, 4,096 tokens, the best way: MFU"]["ours"]
    assert f"{round(compiled, -1):,.0f} tokens/s, {best:.1%}".replace("%", " %") in PAGE
    assert f"{round(eager, -1):,.0f} tokens/s" in PAGE
    assert all(row["holds"] for what, row in rows.items() if what.startswith(("losses of", "what training changed")))
