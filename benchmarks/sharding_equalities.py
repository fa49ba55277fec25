"""One process = every mesh: the losses of real training runs and their first gradients, on every layout and model.

    python -m benchmarks.sharding_equalities [--only TEXT]

Every cell trains a tiny random model for 16 updates through the product's own loop, in float32, plain and with GGPO,
and is compared with the same training in one process; that one is compared with a loop written with nothing but
PyTorch and PEFT. Ranks of one world size are spawned once and go through all their cells. Writes
`benchmarks/results/sharding_equalities.json`, docs/equalities.md and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks._equalities import (
    ALONE,
    MODELS,
    REGULARIZERS,
    STEPS,
    WHOLE,
    Course,
    Layout,
    Subject,
    distances,
    run,
    write_backbone,
    write_start,
)
from benchmarks._equalities_peers import NATIVE, natively, plainly
from benchmarks._harness import Benchmark, limit_threads, on_ranks
from flatshift.finetune.config import Mesh
from flatshift.finetune.errors import UserError
from flatshift.finetune.parallel.mesh import ProcessMesh

BARS = {"loss": 3e-5, "gradients": 1e-5}
FALL = 2 / 3
"""Last loss ÷ first loss, at most."""
SUBJECTS = tuple(Subject(model, regularizer) for model in MODELS for regularizer in REGULARIZERS)
CAUSAL = ("llama", "qwen3", "gpt2")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
PLAINLY = Layout("a loop of plain PyTorch and PEFT")
NATIVELY = {Layout(native.name, Mesh(dp=2)): native for native in NATIVE}


def _layouts() -> tuple[Layout, ...]:
    def pipeline(pp: int) -> list[Layout]:
        return [Layout(f"pp {pp}, {schedule}", Mesh(pp=pp, schedule=schedule)) for schedule in SCHEDULES]  # type: ignore[arg-type]

    def packed(name: str, mesh: Mesh | None = None, **more: Any) -> Layout:
        return Layout(name, mesh or Mesh(), packed=True, whole=True, models=CAUSAL, **more)

    dp2, tp2, pp2, both = Mesh(dp=2), Mesh(tp=2), Mesh(pp=2), Mesh(dp=2, tp=2)
    three = Mesh(pp=2, dp=2, tp=2)
    half = STEPS // 2
    return (
        Layout("accumulate 2", accumulate=2),
        Layout("accumulate 4", accumulate=4),
        packed("packed"),
        Layout("stopped and resumed", others=(Mesh(),), stop=half),
        Layout("replicate 2 (DDP)", Mesh(replicate=2)),
        Layout("dp 2 (FSDP2)", dp2),
        Layout("dp 2, zero 1", Mesh(dp=2, zero=1)),
        Layout("dp 2, zero 2", Mesh(dp=2, zero=2)),
        Layout("dp 2, zero 2, accumulate 2", Mesh(dp=2, zero=2), accumulate=2),
        Layout("dp 2, adapters replicated", Mesh(dp=2, adapters="replicate")),
        Layout("dp 2, accumulate 2", dp2, accumulate=2),
        Layout("dp 2, blocks recomputed", dp2, checkpointing="full"),
        packed("dp 2, packed", dp2),
        Layout("tp 2", tp2),
        Layout("tp 2, sequence parallel", Mesh(tp=2, sequence_parallel=True)),
        packed("tp 2, packed", tp2),
        Layout("cp 2", Mesh(cp=2)),
        packed("cp 2, packed", Mesh(cp=2)),
        *pipeline(2),
        Layout("pp 2, accumulate 4", pp2, accumulate=4),
        packed("pp 2, packed", pp2),
        Layout("dp 2, stopped and resumed", dp2, (dp2,), stop=half),
        Layout("one process, resumed on dp 2", others=(dp2,), stop=half),
        Layout("dp 2, then tp 2, pp 2, one process", dp2, (tp2, pp2, Mesh()), stop=STEPS // 4),
        *NATIVELY,
        Layout("dp 4 (FSDP2)", Mesh(dp=4)),
        Layout("replicate 2 × dp 2 (HSDP)", Mesh(replicate=2, dp=2)),
        Layout("tp 4", Mesh(tp=4)),
        Layout("cp 4", Mesh(cp=4)),
        *pipeline(4),
        Layout("dp 2 × tp 2", both),
        Layout("dp 2 × cp 2", Mesh(dp=2, cp=2)),
        Layout("cp 2 × tp 2", Mesh(cp=2, tp=2)),
        Layout("pp 2 × dp 2", Mesh(pp=2, dp=2)),
        Layout("pp 2 × tp 2", Mesh(pp=2, tp=2)),
        packed("dp 2 × tp 2, accumulate 2, packed", both, accumulate=2),
        Layout("dp 2 × tp 2, resumed on pp 2 × dp 2", both, (Mesh(pp=2, dp=2),), stop=half),
        Layout("pp 2 × dp 2 × tp 2", three),
        Layout("pp 2 × dp 2 × tp 2, interleaved", replace(three, schedule="interleaved")),
    )


LAYOUTS = _layouts()


def write_references(folder: Path, subjects: tuple[Subject, ...], layouts: tuple[Layout, ...]) -> dict[str, Any]:
    """Backbones, first adapters and the courses of one process that cells are compared with; first and last losses."""
    falls = {}
    for model in dict.fromkeys(subject.model for subject in subjects):
        write_backbone(model, folder / "backbones" / model)
        write_start(model, folder / "backbones" / model, folder / "starts" / model)
    for subject in subjects:
        for layout in (ALONE, WHOLE):
            if not any(other.reference == layout and subject.model in other.models for other in layouts):
                continue
            course = _course(folder, subject, layout, number=0)
            assert course.untouched, subject
            path = _reference(folder, subject, layout)
            path.parent.mkdir(exist_ok=True)
            save_file(course.gradients, path.with_suffix(".safetensors"))
            path.with_suffix(".json").write_text(json.dumps([course.losses, course.norms]))
            if layout is ALONE:
                falls[str(subject)] = course.losses[0], course.losses[-1]
                print(f"{subject} in one process: loss {course.losses[0]:.2f} → {course.losses[-1]:.2f}", flush=True)
    return falls


def _reference(folder: Path, subject: Subject, layout: Layout) -> Path:
    return folder / "references" / f"{subject.model}-{subject.regularizer}-{'whole' if layout.whole else 'alone'}"


def read_reference(folder: Path, subject: Subject, layout: Layout) -> Course:
    """What `write_references` wrote for a cell."""
    path = _reference(folder, subject, layout.reference)
    losses, norms = json.loads(path.with_suffix(".json").read_text())
    return Course(losses, norms, load_file(path.with_suffix(".safetensors")))


_WORLDS: dict[tuple[int, ...], ProcessMesh] = {}


def world_of(mesh: Mesh) -> ProcessMesh:
    """This rank's place; a mesh of the same shape is made only once, for each has its process groups."""
    shape = (mesh.pp, mesh.replicate, mesh.dp, mesh.ep, mesh.cp, mesh.tp)
    if shape not in _WORLDS:
        _WORLDS[shape] = ProcessMesh.of(mesh, torch.device("cpu"))
    return _WORLDS[shape]


def _course(folder: Path, subject: Subject, layout: Layout, *, number: int) -> Course:
    backbone, adapter = folder / "backbones" / subject.model, folder / "starts" / subject.model
    if layout == PLAINLY:
        return plainly(subject, backbone=backbone, adapter=adapter)
    if layout in NATIVELY:
        return natively(subject, NATIVELY[layout], backbone=backbone, adapter=adapter)
    out = folder / "runs" / f"{layout.ranks}-{number}-{subject.model}-{subject.regularizer}"
    try:
        return run(subject, layout, backbone=backbone, folder=out, worlds=world_of)
    finally:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(out, ignore_errors=True)


def cell(folder: Path, subject: Subject, layout: Layout, *, number: int) -> dict[str, Any]:
    """The worst of all ranks' distances, or the `reason` why there are none. Collective.

    Raises:
        AssertionError: GGPO or the layout changed a byte of the frozen backbone, or losses or gradients are missing.
    """
    if subject.model not in layout.models:
        return {"reason": "only causal language models are packed"}
    if layout in NATIVELY and (reason := NATIVELY[layout].refuses(subject)):
        return {"reason": reason}
    try:
        course = _course(folder, subject, layout, number=number)
    except UserError as error:
        return {"reason": str(error)}
    assert course.untouched, f"{layout.name}, {subject}: the frozen backbone changed"
    looked_on = len(course.losses) < STEPS  # while one process went on alone
    result = None if looked_on else distances(course, read_reference(folder, subject, layout))
    every = [result]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, result)
    results = [each for each in every if each is not None]
    assert results, f"{layout.name}, {subject}: no rank saw the whole course"
    return {name: max(each[name] for each in results) for name in figures_of(layout)}


def figures_of(layout: Layout) -> tuple[str, ...]:
    """What a cell is judged by: the first gradients of a run that is stopped come before the stop and show nothing."""
    return ("loss",) if layout.others else tuple(BARS)


def cells(folder: str, ranks: int, layouts: tuple[Layout, ...], subjects: tuple[Subject, ...]) -> list[dict[str, Any]]:
    """All cells that take `ranks` processes, one after the other; every rank calls this and gets the same."""
    results = []
    for number, layout in enumerate(layouts):
        for subject in subjects if layout.ranks == ranks else ():
            began = time.monotonic()
            figures = cell(Path(folder), subject, layout, number=number)
            results.append({"layout": layout.name, "subject": str(subject), **figures})
            if not dist.is_initialized() or dist.get_rank() == 0:
                result = figures.get("reason") or "  ".join(f"{name} {value:.1e}" for name, value in figures.items())
                print(f"  {layout.name}, {subject}: {result}  ({time.monotonic() - began:.1f} s)", flush=True)
    return results


def cells_by_name(folder: str, ranks: int, names: list[str]) -> list[dict[str, Any]]:
    """The same for processes that are started by name."""
    layouts = tuple(layout for layout in LAYOUTS if layout.name in names)
    return cells(folder, ranks, layouts, SUBJECTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only layouts whose name contains this; nothing is written")
    only = parser.parse_args().only
    layouts = tuple(layout for layout in (PLAINLY, *LAYOUTS) if only is None or only in layout.name)
    limit_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        falls = write_references(Path(folder), SUBJECTS, layouts)
        result = cells(folder, 1, layouts, SUBJECTS)
        for ranks in sorted({layout.ranks for layout in layouts} - {1}):
            print(f"{ranks} processes", flush=True)
            names = [layout.name for layout in layouts]
            call = {"folder": folder, "ranks": ranks, "names": names}  # the ranks are started once for all their cells
            where = "benchmarks.sharding_equalities:cells_by_name"
            result += on_ranks(where, ranks, wall_cap_s=6 * 3600, **call)[0]
    bench = Benchmark("sharding_equalities", packages=("torch", "transformers", "peft"))
    for layout in layouts:
        _rows(bench, layout, [each for each in result if each["layout"] == layout.name])
    what = "loss of the last update ÷ the first, the largest of all columns"
    row = bench.row(what, "ratio", ours=max(last / first for first, last in falls.values()), maximum=FALL)
    row["steps"] = STEPS
    row["cells"] = {subject: {"first": first, "last": last} for subject, (first, last) in falls.items()}
    if only is None:
        bench.finish()
        from benchmarks import docs

        docs.write()


def _rows(bench: Benchmark, layout: Layout, results: list[dict[str, Any]]) -> None:
    """A row for each figure of a layout: its worst cell, with all cells inside."""
    units = {"loss": "nats, largest difference", "gradients": "relative, worst tensor"}
    for name in figures_of(layout):
        records = {each["subject"]: each[name] for each in results if name in each}
        absent = {each["subject"]: each["reason"] for each in results if "reason" in each}
        reason = None if records else "; ".join(dict.fromkeys(absent.values()))
        worst, what = max(records.values(), default=None), f"{layout.name}: {name}, worst of {len(records)} cells"
        row = bench.row(what, units[name], ours=worst, maximum=BARS[name], reason=reason)
        row |= {"layout": layout.name, "figure": name, "cells": records, "absent": absent}


if __name__ == "__main__":
    main()
