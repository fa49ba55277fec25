"""Final output of a command: a small table of results, and the commands to run next with the real directory.

Printed to stderr, so that stdout stays machine-readable. Imports no torch.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.finetune.errors import printable
from flatshift.finetune.tasks import KINDS

if TYPE_CHECKING:
    from flatshift.experiments.results.run import RunResults

_TOP, _VERDICTS, _TEXT = 3, 6, 64


def say(table: str, commands: Sequence[Sequence[str]]) -> None:
    """Print `table` and `commands`, one a line, quoted for a shell."""
    lines = [*table.split("\n"), "next:", *(f"  {' '.join(map(_quoted, words))}" for words in commands)]
    print(printable("\n".join(lines if table else lines[1:])), file=sys.stderr, flush=True)


def _quoted(word: str) -> str:
    """Quote `word` for a shell; control characters use the escapes of bash and zsh."""
    if printable(word) == word:
        return shlex.quote(word)
    return "$'" + printable(word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")) + "'"


def of_training(path: Path) -> None:
    """Print the headline metric of each split next to its baseline, and the next commands.

    Raises UserError for an unreadable run.
    """
    from flatshift.experiments.report.formats import aligned, number, with_interval
    from flatshift.experiments.results.run import headline, read_run
    from flatshift.finetune.evaluate.metrics import metric_of

    run, rows = read_run(path), []
    alone: dict[str, Any] = {f"{split}, backbone alone": judged.metrics for split, judged in run.cold.items()}
    for split, cells in (run.eval | alone).items():
        if (name := headline(cells)) is None:
            continue
        floor = metric_of(name).floor or ""
        below = f"{metric_of(floor).title} {number(cells[floor]['value'])}" if floor in cells else "–"
        rows.append([split, metric_of(name).title, with_interval(cells[name]), below, f"{cells[name].get('n', 0):,}"])
    say(aligned(["split", "metric", "value (95 %)", "floor", "n"], rows, right={4}) if rows else "", after_run(run))


def after_run(run: RunResults) -> list[list[str]]:
    """Return the commands that make sense after a finished run."""
    path = str(run.path)
    files = [name for split in ("test", "dev", "train") for name in _files(run.recipe, split)]
    found = [["flatshift", "predict", path, "--data", files[0], "--out", f"{run.path.resolve().name}-predictions.csv"]]
    if _converses(run):
        found.insert(0, ["flatshift", "chat", path])
    return [*found, *_to_hand_on(run.path)]


def _to_hand_on(path: Path) -> list[list[str]]:
    """Return the merge and export commands whose default folder does not exist yet."""
    ways = {"merge": "merged", "export": "export"}
    return [["flatshift", way, str(path)] for way, folder in ways.items() if not (path / folder).exists()]


def of_merge(path: Path, merged: Path) -> None:
    """Print the next commands for the merged model of the run in `path`."""
    from flatshift.experiments.results.run import read_run

    found = [["flatshift", "push", str(merged), f"ORGANISATION/{path.resolve().name}"]]
    if _converses(read_run(path)):
        found.insert(0, ["flatshift", "export", str(path), "--to", "gguf"])
    say("", found)


def _converses(run: RunResults) -> bool:
    """True if the run's model answers prompts."""
    task = run.recipe.get("task")
    kind = KINDS.get(str(task.get("kind"))) if isinstance(task, dict) else None
    return kind is not None and (made := kind()).is_generative and not made.documents


def _files(recipe: dict[str, Any], split: str) -> list[str]:
    data = recipe.get("data")
    block = data.get(split) if isinstance(data, dict) else None
    if not isinstance(block, dict):
        return []
    sources = block.get("sources") or {}
    found = [block.get("files"), *(source.get("files") for source in sources.values())]
    return [str(name) for files in found if isinstance(files, list) for name in files]


def of_prediction(path: Path, data: Sequence[str]) -> None:
    """Print the next commands after a prediction of `data`, including its evaluation if the rows have answers."""
    commands = [["flatshift", "report", str(path)], *_to_hand_on(path)]
    if _has_answers(path, data):
        commands.insert(0, ["flatshift", "eval", str(path), "--data", *data])
    say("", commands)


def _has_answers(path: Path, data: Sequence[str]) -> bool:
    from flatshift.experiments.recipe import resume_recipe
    from flatshift.finetune.data.rows import read_rows
    from flatshift.finetune.errors import UserError

    recipe = resume_recipe(path).recipe
    task, columns = recipe.task, recipe.data.columns
    try:
        found = list(read_rows(data, columns=columns, required=task.columns(), first=1, label=task.read_label))
    except UserError:
        return False
    turns = found[0].values.get("messages") if found else None
    return bool(found) and not (isinstance(turns, list) and turns and turns[-1].get("role") in ("user", "system"))


def of_directory(path: Path) -> None:
    """Print only the next commands, after a command that already printed its metrics of the run in `path`."""
    from flatshift.experiments.results.run import read_run

    say("", after_run(read_run(path)))


def of_selection(path: Path, recipe: str | None, words: Sequence[str]) -> None:
    """Print the first chosen records and the next commands.

    recipe: the recipe of the selection; if it has a warm-up, suggest training it on the selection with the same recipe
    keys `words` of the command line. Raises UserError for an unreadable selection.
    """
    from flatshift.experiments.report.formats import aligned, number
    from flatshift.experiments.results.run import read_run
    from flatshift.finetune.errors import shortened

    rows, made = [], read_run(path)
    chosen = made.selection
    for place, record in enumerate(chosen.top[:_TOP] if chosen is not None else [], 1):
        text = next((v for k, v in record.items() if isinstance(v, str) and k not in ("id", "domain", "source")), "")
        score = record.get("score")
        shown = number(float(score)) if isinstance(score, int | float) else "–"
        rows.append([str(record.get("rank", place)), shown, shortened(" ".join(text.split()), _TEXT)])
    commands = [["flatshift", "report", str(path)]]
    if (trained := _on_selection(path, made.recipe)) is not None:
        commands.insert(0, trained)
    if recipe is not None and made.recipe.get("warmup") is not None:
        commands.insert(0, ["flatshift", "train", recipe, "--select.from", str(path), *words])
    say(aligned(["rank", "score", "text"], rows, right={0, 1}), commands)


def _on_selection(path: Path, recipe: dict[str, Any]) -> list[str] | None:
    """Return the command for language modelling on the selection with the recipe's backbone; None if that backbone
    cannot be trained on plain texts."""
    from flatshift.experiments.recipe import load_recipe
    from flatshift.finetune.models.backbone import open_backbone

    name, text = str(recipe["backbone"]), recipe["select"]["columns"]["text"]
    words = ["flatshift", "train", "language-model", "--data", str(path / "selected.jsonl")]
    usual = load_recipe("language-model").recipe
    if name != usual.backbone:
        backbone = open_backbone(name)
        hides = backbone.reads_both_ways
        if backbone.has_both_sides or (hides and backbone.tokenizer.mask_token_id is None):
            return None
        words += ["--backbone", name, *(["--task.kind", "masked-lm"] if hides else [])]
    return words if text == usual.data.columns.text else [*words, "--data.columns.text", text]


def of_sweep(path: Path, argv: Sequence[str]) -> None:
    """Print the setting with the lowest error, the verdicts and the next commands.

    argv: arguments of the command, repeated with more seeds if a curve is undecided. Raises UserError for an unreadable
    sweep.
    """
    from flatshift.experiments.report.formats import aligned, figure_name, setting, with_interval
    from flatshift.experiments.results.analysis import Analysis
    from flatshift.experiments.results.sweep import read_sweep

    data = read_sweep(path)
    if data is None:
        return
    column = data.error_columns()[0]
    rows, commands = [], [["flatshift", "report", str(path)]]
    if (best := data.best(column)) is not None:
        rows.append([f"lowest {figure_name(column)}", setting(best[0]), with_interval(best[1])])
    judged = Analysis(data).judged
    for one in judged[:_VERDICTS]:
        where = f"along {one.axis}" + (f", {setting(one.where)}" if one.where else "")
        rows.append(["verdict", where, one.verdict.kind])
    if any(one.verdict.kind == "undecided" for one in judged) and "--until" not in argv:
        words = list(argv)
        for place in [i for i, word in enumerate(words) if word.partition("=")[0] == "--seeds"]:
            del words[place : place + 1 + ("=" not in words[place])]
        seeds = max((one.verdict.seeds_needed or 0 for one in judged), default=0)
        commands.insert(0, ["flatshift", "sweep", *words, "--seeds", str(max(seeds, 2 * (data.planned_seeds or 0), 5))])
    if len(judged) > _VERDICTS:
        rows.append(["verdict", f"{len(judged) - _VERDICTS} more curves", "see the report"])
    say(aligned(["what", "where", "found"], rows) if rows else "", commands)
