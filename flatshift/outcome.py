"""Final output of a command: a small table of results, and the commands to run next with the real directory.

Printed to stderr, so that stdout stays machine-readable. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.experiments.recipe import from_mapping, load_recipe, resume_recipe
from flatshift.finetune.errors import UserError, escape_control_characters, shorten
from flatshift.finetune.evaluate.metrics import find_metric
from flatshift.finetune.redaction import redact_urls
from flatshift.finetune.tasks import KINDS, Task

if TYPE_CHECKING:
    from flatshift.experiments.results.run import RunResults
    from flatshift.finetune.data.config import Columns

NEW_ROWS = "NEW_ROWS.jsonl"
"""Stands for rows of the user's, where a run has none but those that it was trained on."""
_MAX_RECORDS, _MAX_VERDICTS, _MAX_TEXT, _MAX_MEANS = 3, 6, 64, 8


def print_outcome(table: str, commands: Sequence[Sequence[str]]) -> None:
    """Print `table` and `commands`, one a line, quoted for a shell."""
    lines = [*table.split("\n"), "next:", *(f"  {' '.join(map(_quote, words))}" for words in commands)]
    print(escape_control_characters(redact_urls("\n".join(lines if table else lines[1:]))), file=sys.stderr, flush=True)


def _quote(word: str) -> str:
    if escape_control_characters(word) == word:
        return shlex.quote(word)
    return "$'" + escape_control_characters(word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")) + "'"


def print_training_outcome(path: Path) -> None:
    """Print the headline metric of each split next to its baseline, and the next commands.

    Raises UserError for an unreadable run.
    """
    from flatshift.experiments.report.formats import align_columns, number, with_interval
    from flatshift.experiments.results.predictions import metric_differences
    from flatshift.experiments.results.run import headline_metric, read_run

    run, rows = read_run(path), []
    alone: dict[str, Any] = {f"{split}, backbone alone": evaluation.metrics for split, evaluation in run.cold.items()}
    for split, cells in (run.eval | alone).items():
        if (name := headline_metric(cells)) is None:
            continue
        floor = find_metric(name).floor or ""
        below = f"{find_metric(floor).title} {number(cells[floor]['value'])}" if floor in cells else "–"
        rows.append([split, find_metric(name).title, with_interval(cells[name]), below, f"{cells[name].get('n', 0):,}"])
    for split, evaluation in run.cold.items():  # on the rows that both were asked about
        name = headline_metric(dict(evaluation.metrics)) or ""
        change = metric_differences(run.split_evaluation(split), evaluation).get(name)
        if change is not None and change.paired:
            interval = with_interval(change, plus=True)
            rows.append([f"{split}, change", find_metric(name).title, interval, "–", f"{change.n:,}"])
    value = f"value ({100 * (run.recipe.get('eval') or {}).get('confidence', 0.95):g} %)"
    print_outcome(
        align_columns(["split", "metric", value, "baseline", "n"], rows, right={4}) if rows else "",
        commands_after_run(run),
    )


def commands_after_run(run: RunResults) -> list[list[str]]:
    """Return the commands that make sense after a finished run."""
    path = str(run.path)
    held_out = [name for split in ("test", "dev") for name in run.split_files(split)]
    rows = held_out[0] if held_out else NEW_ROWS
    if resume_recipe(run.path).recipe.adapter.projector is not None:  # the other commands hand no features in
        return [["flatshift", "eval", path, "--data", rows]]
    chat = [["flatshift", "chat", path]] if _answers_prompts(run) else []
    predict = ["flatshift", "predict", path, "--data", rows, "--out", f"{run.path.resolve().name}-predictions.csv"]
    return [*chat, predict, *_export_commands(run.path)]


def _export_commands(path: Path, *, done: str = "") -> list[list[str]]:
    """Return `merge` and `export` of a run where they take its adapter, unless their default directories exist or they
    are `done` elsewhere."""
    from flatshift.finetune.models.backbone import open_backbone

    recipe = resume_recipe(path).recipe
    adapter, folders = recipe.adapter, {"merge": "merged", "export": "export"}
    if adapter.soft_tokens is not None or adapter.init == "loftq" or open_backbone(recipe.backbone).is_quantised:
        del folders["merge"]
    if adapter.projector is not None:
        del folders["export"]
    remaining = [name for name, folder in folders.items() if name != done and not (path / folder).exists()]
    return [["flatshift", name, str(path)] for name in remaining]


def print_export_outcome(path: Path, exported: Path) -> None:
    """Print the next commands for the hub-ready folder of the run in `path`."""
    print_outcome("", [_push_command(exported, path), *_export_commands(path, done="export")])


def _push_command(folder: Path, path: Path) -> list[str]:
    name = re.sub(r"[^A-Za-z0-9_.]+|\.{2,}", "-", path.resolve().name).strip("-._")[:96]  # what a hub allows
    return ["flatshift", "push", str(folder), f"ORGANISATION/{name or 'NAME'}"]


def print_merge_outcome(path: Path, merged: Path) -> None:
    """Print the next commands for the merged model of the run in `path`."""
    from flatshift.experiments.results.run import read_run

    run = read_run(path)
    converts = _answers_prompts(run) and run.recipe["task"]["kind"] != "seq2seq"  # T5's needs a spiece.model
    export = [["flatshift", "export", str(path), "--to", "gguf"]] if converts else []
    print_outcome("", [*export, _push_command(merged, path)])


def _answers_prompts(run: RunResults) -> bool:
    task = run.recipe.get("task")
    kind = KINDS.get(str(task.get("kind"))) if isinstance(task, dict) else None
    return kind is not None and (instance := kind()).traits.is_generative and not instance.traits.reads_documents


def print_prediction_outcome(path: Path, data: Sequence[str], overrides: Sequence[Any], words: Sequence[str]) -> None:
    """Print the next commands after a prediction of `data`, with its evaluation where rows have answers.

    overrides: how the rows were read; words: the same as on a command line.
    """
    recipe = resume_recipe(path, overrides, other_rows=True).recipe
    commands = [["flatshift", "report", str(path)], *_export_commands(path)]
    if _has_columns(data, recipe.data.columns, recipe.task):
        commands.insert(0, ["flatshift", "eval", str(path), "--data", *data, *words])
    print_outcome("", commands)


def _has_columns(data: Sequence[str], columns: Columns, task: Task) -> bool:
    """True if the first row has what a training by `task` reads, and no conversation without an answer."""
    from flatshift.finetune.data.rows import read_rows

    try:
        rows = list(read_rows(data, columns=columns, required=task.columns(), first=1, label=task.read_label))
    except UserError:
        return False
    turns = rows[0].values.get("messages") if rows else None
    last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
    return bool(rows) and last.get("role", last.get("from")) not in ("user", "human", "system")


def print_selection_outcome(path: Path, recipe: str | None, words: Sequence[str]) -> None:
    """Print the first chosen records and the next commands.

    recipe: the recipe of the selection; if it has a warm-up, suggest training it on the selection with the same recipe
    keys `words` of the command line. Raises UserError for an unreadable selection.
    """
    from flatshift.experiments.report.formats import align_columns, number
    from flatshift.experiments.results.run import read_run

    rows, run = [], read_run(path)
    records = run.selection.top[:_MAX_RECORDS] if run.selection is not None else []
    for i, record in enumerate(records, 1):
        text = str(record.get(run.recipe["select"]["columns"]["text"], ""))
        score = number(float(record["score"])) if isinstance(record.get("score"), int | float) else "–"
        rows.append([str(record.get("rank", i)), score, shorten(" ".join(text.split()), _MAX_TEXT)])
    commands = _training_commands(path, run)
    if recipe is not None and run.recipe.get("warmup") is not None:
        commands.insert(0, ["flatshift", "train", recipe, "--select.from", str(path), *words])
    report = ["flatshift", "report", str(path)]
    print_outcome(align_columns(["rank", "score", "text"], rows, right={0, 1}), [*commands, report])


def _training_commands(path: Path, run: RunResults) -> list[list[str]]:
    """Return trainings on the selection, on its backbone: a warm-up before a classifier of the target, where that has
    labels, and language modelling; none of a backbone that learns no texts by themselves."""
    from flatshift.finetune.data.formats import SAMPLE
    from flatshift.finetune.models.backbone import open_backbone

    recipe, text = run.recipe, run.recipe["select"]["columns"]["text"]
    name = str(recipe["backbone"])
    usual = load_recipe("language-model").recipe
    more, kind = [], []
    if name != usual.backbone:
        backbone = open_backbone(name)
        if backbone.has_both_sides or (backbone.reads_both_ways and backbone.tokenizer.mask_token_id is None):
            return []
        more += ["--backbone", name]
        kind = ["--task.kind", "masked-lm"] if backbone.reads_both_ways else []
    if text != usual.data.columns.text:
        more += ["--data.columns.text", text]
    commands = [["flatshift", "train", "language-model", "--data", str(path / "selected.jsonl"), *more, *kind]]
    target, data = run.split_files("target", block="select"), recipe["data"]
    warm_up = load_recipe("warmup", [from_mapping({"data.train.files": target})]).recipe
    own = {key: name for key, name in recipe["data"]["columns"].items() if name != key}
    columns = dataclasses.replace(warm_up.data.columns, **(own or {"text": text}))
    needs_rows = data["holdout"] == 0 < warm_up.data.holdout  # none were set apart to evaluate it on
    if target and recipe.get("warmup") is None and not needs_rows and _has_columns(target, columns, warm_up.task):
        seed = recipe["train"]["seed"]
        more += [] if seed == warm_up.train.seed else ["--train.seed", str(seed)]
        share, splits = data["holdout"], tuple(data["holdout_splits"])
        # A sample has dev and test rows of its own.
        if warm_up.data.holdout and (share, splits) != (warm_up.data.holdout, warm_up.data.holdout_splits):
            more += ["--data.holdout", str(share), "--data.holdout_splits", f"[{', '.join(splits)}]"]
        if recipe["select"]["bad_rows"] != warm_up.data.bad_rows:
            more += ["--data.bad_rows", recipe["select"]["bad_rows"]]
        if not all(name.startswith(SAMPLE) for name in target):
            more += ["--data.train.limit", "null"]  # the recipe's is of the sample
        more += [word for key, name in own.items() for word in (f"--data.columns.{key}", name)]
        commands.insert(0, ["flatshift", "train", "warmup", "--select.from", str(path), "--data", *target, *more])
    return commands


def summarize_sweep(path: Path) -> dict[str, Any]:
    """Return the setting with the lowest error, those that tie with it, the verdict on each curve and what is missing
    for one, as plain values. Raises UserError for a sweep that cannot be read."""
    from flatshift.experiments.report.chapters.sweep_verdicts import missing_verdict_reasons
    from flatshift.experiments.results.analysis import SweepAnalysis
    from flatshift.experiments.results.run import read_run

    data = read_run(path).sweep
    if data is None:
        empty: dict[str, Any] = {"figure": None, "best": None, "ties": [], "majority": None, "verdicts": []}
        return {"directory": str(path), **empty, "missing": []}
    column = data.error_columns()[0]
    best, analysis = data.best(column), SweepAnalysis(data)
    verdicts = [
        {
            "axis": curve.axis,
            "setting": curve.setting,
            "kind": curve.verdict.kind,
            "evidence": list(curve.verdict.evidence),
            "seeds_needed": curve.verdict.seeds_needed,
        }
        for curve in analysis.curves
    ]
    return {
        "directory": str(path),
        "figure": column,
        "best": None if best is None else {"setting": data.whole(best[0]), **dataclasses.asdict(best[1])},
        "ties": [data.whole(setting) for setting in data.ties(column)],
        "majority": data.majority_error(column),
        "verdicts": verdicts,
        "missing": missing_verdict_reasons(analysis),
    }


def print_sweep_outcome(path: Path, argv: Sequence[str]) -> None:
    """Print the setting with the lowest error, the verdicts or what is missing for one, and the next commands.

    argv: arguments of the command without `--seeds`, to be run with more where a curve is undecided. Raises UserError
    for a sweep that cannot be read.
    """
    import numpy as np

    from flatshift.experiments.report import formats
    from flatshift.experiments.report.chapters.sweep_verdicts import format_lowest, missing_verdict_reasons
    from flatshift.experiments.results.analysis import SweepAnalysis
    from flatshift.experiments.results.run import read_run

    data = read_run(path).sweep
    if data is None:
        return
    column = data.error_columns()[0]
    rows, commands = [], [["flatshift", "report", str(path)]]
    if (best := data.best(column)) is not None:
        rows.append(
            [f"lowest {formats.figure_name(column)}", format_lowest(data, column), formats.with_interval(best[1])]
        )
    if (floor := data.majority_error(column)) is not None:
        rows.append(["majority baseline", "always the commonest class", formats.number(floor)])
    analysis = SweepAnalysis(data)
    curves = analysis.curves
    for curve in curves[:_MAX_VERDICTS]:
        position = f"along {curve.axis}" + (f", {formats.setting(curve.setting)}" if curve.setting else "")
        columns = [column[np.isfinite(column)] for column in curve.curve.test.T[:_MAX_MEANS]]
        means = " → ".join(formats.number(column.mean()) if len(column) else "–" for column in columns)
        more = " → …" * (len(curve.curve.values) > _MAX_MEANS)
        rows.append(["verdict", position, f"{curve.verdict.kind} ({means}{more})"])
    if any(curve.verdict.kind == "undecided" for curve in curves) and "--until" not in argv:
        seeds = max(curve.verdict.seeds_needed or 0 for curve in curves)
        commands.insert(0, ["flatshift", "sweep", *argv, "--seeds", str(max(seeds, 2 * (data.planned_seeds or 0), 5))])
    if len(curves) > _MAX_VERDICTS:
        rows.append(["verdict", f"{len(curves) - _MAX_VERDICTS} more curves", "see the report"])
    table = formats.align_columns(["what", "where", "found"], rows) if rows else ""
    reasons = [f"{formats.capitalise(reason)}." for reason in missing_verdict_reasons(analysis)]
    print_outcome("\n".join(filter(None, [table, *reasons])), commands)
