"""Evaluate finished runs: one on its own mesh, by its directory alone, or several runs and base models on the same
rows.

    flatshift eval runs/first --data more.jsonl --json
    flatshift eval runs/first flatshift-5m --data texts.jsonl --group-by lang --out evaluated

In the second form each run is compared with the backbone that it changes. Differences are paired: both models use the
same bootstrap draws of rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.data.encode import encode_rows
from flatshift.experiments.data.sources import SourceFiles
from flatshift.experiments.data.splits import prepare_data, prepare_eval_data, read_label_record, read_splits
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.build import (
    TEXTS_KEPT,
    decode_examples,
    evaluate_split,
    evaluate_splits,
    evaluate_watched,
    format_metrics,
    load_model,
    shorten_text,
    skipped_rows_summary,
    write_predictions,
)
from flatshift.experiments.workflows.evaluation_document import SubjectResults, build_document, flatten_document
from flatshift.experiments.workflows.evaluation_target import AdapterSwitcher, EvaluationTarget, resolve_subjects
from flatshift.experiments.workflows.few_shot import FewShot, RankingResult, rank_rows, read_shots
from flatshift.experiments.workflows.generate import read_adapted_recipe
from flatshift.experiments.workflows.run_parts import check_run
from flatshift.experiments.workflows.samples import (
    Sampling,
    SavedSamples,
    build_generation_records,
    check_sampling_rows,
    compute_sample_metrics,
    write_samples,
)
from flatshift.finetune.atomic import atomic_directory, write_json
from flatshift.finetune.compute.numerics import cpu_threads, evaluation_mode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.rows import Row, read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.bootstrap import ResampledMetric, group_interval
from flatshift.finetune.launch import spawn, watchdog
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.families import usable_positions
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.seeds import derive_seed

DOCUMENT = "evaluation.json"
_LONGEST = 1024
"""Maximum tokens of a window if none is set."""


def evaluate_side_by_side(
    names: Sequence[str],
    *,
    data: Sequence[str] = (),
    group_by: str | None = None,
    trained: Sequence[str] = (),
    window: int | None = None,
    overlap: int | None = None,
    few_shot: FewShot | None = None,
    sampling: Sampling | None = None,
    overrides: Sequence[Branch] = (),
    out: Path | None = None,
    command: str = "",
    quiet: bool = False,
    page: Callable[[Mapping[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """Evaluate runs and base models on the rows of `data`, or on the dev and test rows of the first run.

    A base model is evaluated like the first run on it, else as a language model of whole documents.

    group_by: a column of the rows; every metric is also given for each of its values.
    trained: values of that column that the adapters were trained on; the others are where they may have forgotten.
    window, overlap: tokens read at once, and how many of them are context; of tasks over whole documents.
    few_shot: put the rows by a prompt, and rank its candidates, instead of what the subjects' tasks do.
    sampling: write several texts after each row as a prompt, and ask those.
    overrides: as a recipe's, for base models without a run next to them; for runs only `train.device`,
        and how the rows of `data` are read (`data.columns`, `data.bad_rows`).
    out: a new directory for evaluation.json, eval.json, predictions.parquet (of written samples: generations.jsonl)
        and, by `page`, report.html; whole or not at all.
    Returns what evaluation.json holds.
    Raises UserError for what is neither a run nor a backbone, subjects that cannot be evaluated on these rows, and a
    column that rows lack.
    """
    with nullcontext() if out is None else exclusive_lock(out):
        if out is not None and out.exists() and any(out.iterdir() if out.is_dir() else [out]):
            raise UserError(f"--out: {out} is not empty; name a new directory")
        console = Console(quiet=quiet)
        subjects = resolve_subjects(names, overrides, bool(data), console)
        first = subjects[0].recipe
        with cpu_threads(first.train.threads):
            if few_shot is not None and sampling is not None:
                raise UserError("--prompt ranks given answers and --samples generates new ones; leave one of them out")
            kept = None if out is None else out.with_name(f".{out.name}.written.jsonl")
            how = _EvaluationOptions(group_by, window, overlap, few_shot, sampling, SavedSamples(kept))
            found, splits = _evaluate_subjects(subjects, data, how, console)
            document = build_document(
                subjects, found, splits, data, group_by=group_by, few_shot=few_shot, trained=trained
            )
        document["command"] = command
        if out is not None:
            with atomic_directory(out) as temporary:
                write_json(temporary / DOCUMENT, document)
                write_json(temporary / "eval.json", flatten_document(document))
                if found.written:
                    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in found.written]
                    (temporary / "generations.jsonl").write_text("".join(lines), encoding="utf-8")
                if found.said:
                    write_predictions(temporary / "predictions.parquet", found.said)
                if page is not None:
                    (temporary / "report.html").write_text(page(document), encoding="utf-8")
            if how.kept.path is not None:
                how.kept.path.unlink(missing_ok=True)
            console.say(f"written: {out}")
    return document


@dataclass(frozen=True)
class _EvaluationOptions:
    """Evaluation options, as `evaluate_side_by_side` takes them."""

    group_by: str | None
    window: int | None
    overlap: int | None
    few_shot: FewShot | None
    sampling: Sampling | None
    kept: SavedSamples


def _evaluate_subjects(
    subjects: Sequence[EvaluationTarget],
    data: Sequence[str],
    how: _EvaluationOptions,
    console: Console,
) -> tuple[SubjectResults, dict[str, list[Row]]]:
    found = SubjectResults()
    adapted = AdapterSwitcher(console)
    splits: dict[str, list[Row]] = {}
    order = sorted(
        range(len(subjects)), key=lambda i: [s.recipe.backbone for s in subjects].index(subjects[i].recipe.backbone)
    )
    for place in order:
        subject = subjects[place]
        rows = _read_rows(subject, data, how, found.notes)
        if splits and {split: [row.where for row in part] for split, part in rows.items()} != {
            split: [row.where for row in part] for split, part in splits.items()
        }:
            raise UserError(
                f"{subject.name} has other dev or test rows than {subjects[order[0]].name}; give --data FILE to "
                "evaluate them on the same rows"
            )
        if how.sampling is not None and not splits:
            check_sampling_rows([row for part in rows.values() for row in part], how.sampling)
        splits = splits or rows
        console.say(f"evaluating {subject.name}")
        _evaluate_subject(subject, rows, adapted, found, how, console)
    console.say(f"{len(subjects)} evaluated over {adapted.loads} load{'s' if adapted.loads > 1 else ''} of a backbone")
    return found, splits


def _read_rows(
    subject: EvaluationTarget, data: Sequence[str], how: _EvaluationOptions, notes: list[str]
) -> dict[str, list[Row]]:
    recipe, group_by = subject.recipe, how.group_by
    skipped: list[str] = []
    if data:
        # Ids need not be unique: translations of a text may share theirs.
        columns = dataclasses.replace(recipe.data.columns, id="\0")
        part = SourceFiles("--data", None, tuple(data), columns, "data.columns")
        if how.few_shot is None:
            rows = list(part.rows(recipe.data, recipe.task, skipped))
        else:
            required, bad = how.few_shot.prompt.columns(), recipe.data.bad_rows
            rows = list(read_rows(data, columns=columns, required=required, bad_rows=bad, skipped=skipped))
        splits = {"data": rows}
        if not splits["data"]:
            part.refuse_none(skipped)
    else:
        read = read_splits(recipe)
        splits = {name: rows for name, rows in (("dev", read.dev), ("test", read.test)) if rows}
        if not splits:
            raise UserError(f"{subject.name} has no dev or test rows; give --data FILE")
    if group_by is not None:
        for row in (row for rows in splits.values() for row in rows):
            if row.values.get(group_by) is None:
                known = ", ".join(sorted(map(str, row.values)))
                raise UserError(f"{row.where}: no column {group_by!r} to group by; there are {known}")
    if skipped:
        notes.append(f"{len(skipped):,} bad rows were skipped, the first for {skipped[0]}")
    return splits


def _evaluate_subject(
    subject: EvaluationTarget,
    splits: Mapping[str, list[Row]],
    adapted: AdapterSwitcher,
    found: SubjectResults,
    asked: _EvaluationOptions,
    console: Console,
) -> None:
    from flatshift.finetune.compute.cuda_status import resolve_device
    from flatshift.finetune.models.backbone import open_backbone

    recipe, task = subject.recipe, subject.recipe.task
    names, units = (None, None) if not (home := subject.run or subject.like) else read_label_record(recipe, home)
    model = adapted.of(subject, names)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    device = resolve_device(recipe.train.device)
    inference = EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=device)
    intervals = found.intervals.setdefault(subject.name, {})
    for split, rows in splits.items():
        into: dict[str, ResampledMetric] = {}
        said: dict[str, Any] = {}
        seed = derive_seed(recipe.train.seed, "bootstrap", split)
        draw: dict[str, Any] = {"resamples": recipe.eval.bootstrap, "confidence": recipe.eval.confidence, "seed": seed}
        if asked.few_shot is not None:
            ranked = _rank_subject(subject, model, tokenizer, rows, asked, inference)
            into |= ranked.figures
            intervals[split] = _intervals_over_all(into, len(rows), draw)
            found.ranked[subject.name, split] = ranked
            said |= {
                "text": _shorten_texts(rows),
                "predicted": ranked.predictions[0],
                "accuracy": ranked.right.mean(axis=0),
            }
            found.notes += [note for note in ranked.notes if note not in found.notes]
            places = [row.where for row in rows]
        elif asked.sampling is not None:
            with console.task("writing", len(rows) * asked.sampling.samples, "texts") as bar:
                name = f"{subject.name} {split}"
                texts = write_samples(
                    name, model, tokenizer, rows, task, asked.sampling, asked.kept, inference, bar=bar
                )
            into |= compute_sample_metrics(rows, texts, asked.sampling)
            intervals[split] = _intervals_over_all(into, len(rows), draw)
            found.written += build_generation_records(subject.name, rows, texts)
            places = [row.where for row in rows]
        elif task.traits.reads_documents and recipe.adapter.projector is None:
            intervals[split] = _evaluate_documents(
                model, tokenizer, rows, recipe, asked, inference, into, draw, found.notes, said
            )
            places = [row.where for row in rows]
        else:
            made = encode_rows(
                recipe,
                (("test", 0, row) for row in rows),
                task=task,
                labels=names,
                units=units,
                paths=sorted({row.where.rpartition(":")[0] for row in rows}),
                name=split,
            )
            found.notes += [note for note in made.notes if note not in found.notes]
            examples = made.splits["test"]
            if not examples:
                raise UserError(f"{subject.name}: no row of {split} is left, the first for {made.skipped[0]}")
            intervals[split] = evaluate_watched(
                console.evaluating,
                split,
                model,
                tokenizer,
                examples,
                task=task,
                config=recipe.eval,
                inference=inference,
                label_names=names,
                seed=seed,
                figures=into,
                columns=said,
            )
            places = [example.where for example in examples]
            said["text"] = decode_examples(examples, tokenizer)
        found.figures[subject.name, split] = into
        found.rows[subject.name, split] = places
        if said:
            named = {"subject": [subject.name] * len(places), "row": [where.rpartition("/")[2] for where in places]}
            found.said.append((split, {**named, "text": said.pop("text"), **said}))


def _intervals_over_all(figures: Mapping[str, ResampledMetric], rows: int, draw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the interval of each metric over all rows."""
    every = np.arange(rows)
    return {name: group_interval(figure, [every], **draw) for name, figure in figures.items()}


def _shorten_texts(rows: Sequence[Row]) -> list[str | None]:
    """Return the beginning of the first rows' texts; None for the others."""
    texts = [shorten_text(str(row.values.get("text", ""))) for row in rows[:TEXTS_KEPT]]
    return [*texts, *[None] * (len(rows) - len(texts))]


def _evaluate_documents(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    recipe: Recipe,
    asked: _EvaluationOptions,
    inference: EvalBatching,
    into: dict[str, ResampledMetric],
    draw: Mapping[str, Any],
    notes: list[str],
    said: dict[str, Any],
) -> dict[str, Any]:
    from flatshift.finetune.evaluate.text import missing_dictionary_note, score_texts

    width = _window_size(model, recipe, asked.window)
    texts = [row.values["text"] for row in rows]
    with evaluation_mode(model):
        counts = score_texts(
            model,
            tokenizer,
            texts,
            inference,
            task=recipe.task,
            window=width,
            overlap=max(1, width // 4) if asked.overlap is None else asked.overlap,
            locations=[row.where for row in rows],
        )
    said |= {"text": _shorten_texts(rows), "loss": counts.nats, "loss.count": counts.tokens.astype(np.float64)}
    if (note := missing_dictionary_note(texts)) and note not in notes:
        notes.append(note)
    return counts.metrics(figures=into, **draw)


def _window_size(model: Any, recipe: Recipe, window: int | None) -> int:
    """Return the tokens of a window. Raises UserError for more than the backbone has positions."""
    positions = usable_positions(model.config) or _LONGEST
    room = positions - getattr(model, "soft_tokens", 0)
    if window is not None and not 2 <= window <= room:
        raise UserError(f"--window: {window} is not from 2 to {room}, the positions of {recipe.backbone}")
    return min(room, _LONGEST) if window is None else window


def _rank_subject(
    subject: EvaluationTarget,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    asked: _EvaluationOptions,
    inference: EvalBatching,
) -> RankingResult:
    recipe, few_shot = subject.recipe, asked.few_shot
    assert few_shot is not None
    if not recipe.task.traits.causal or recipe.adapter.projector is not None:
        raise UserError(
            f"{subject.name}: --prompt asks a language model which text is likeliest, and task.kind: "
            f"{recipe.task.kind} trains none; leave it out"
        )
    source = read_shots(few_shot, dataclasses.replace(recipe.data.columns, id="\0"))
    width = _window_size(model, recipe, asked.window)
    with evaluation_mode(model):
        return rank_rows(model, tokenizer, rows, source, few_shot, inference, window=width)


# --------------------------------------------------------------------------------------------- one run, on its own mesh


def evaluate_run(
    path: Path, *, data: Sequence[str] = (), overrides: Sequence[Branch] = (), quiet: bool = False
) -> dict[str, dict[str, Any]]:
    """Evaluate the adapter of a run on its own splits, or on other files as the split `data`.

    overrides: another mesh or device than the run's, and how the rows of `data` are read. On a mesh every rank calls
        this and gets the same figures.
    Returns {split: {metric: {value, low, high, n}}}.
    Raises UserError if `path` is no run directory or has no adapter yet, its backbone changed, or the rows do not fit.
    """
    recipe = read_adapted_recipe(path, overrides, other_rows=bool(data))
    world = spawn.join_mesh(recipe.mesh, recipe.train.device)
    with (
        cpu_threads(recipe.train.threads),
        watchdog.no_progress_timeout("evaluating"),
    ):  # the number of threads affects rounding: with the run's, its eval.json is reproduced bit by bit
        if world.is_main:  # it alone reads all weights; the other ranks rely on it
            check_run(path, recipe)
        world.wait()
        result = _evaluate_run(path, recipe, data, Console(quiet=quiet or not world.is_main), world)
    spawn.destroy_process_group(world)
    return result


def _evaluate_run(
    path: Path, recipe: Recipe, data: Sequence[str], console: Console, world: ProcessMesh
) -> dict[str, dict[str, Any]]:
    if not data:
        prepared = prepare_data(recipe)
        engine, tokenizer = load_model(recipe, recipe.task, prepared.label_names, world=world, adapter=path / "adapter")
        return evaluate_splits(recipe, engine, tokenizer, prepared, Console(quiet=True), watch=console.evaluating)
    prepared = prepare_eval_data(recipe, data, run=path)
    console.say(f"data: {len(prepared.test):,} examples")
    for line in skipped_rows_summary(prepared, recipe.train.max_length):
        console.say(line)
    engine, tokenizer = load_model(recipe, recipe.task, prepared.label_names, world=world, adapter=path / "adapter")
    found = evaluate_split(
        recipe, engine, tokenizer, prepared.test, task=recipe.task, split="data", label_names=prepared.label_names,
        watch=console.evaluating,
    )  # fmt: skip
    return {"data": found}


def format_result(result: dict[str, dict[str, Any]]) -> str:
    """Format the result as lines."""
    return "\n".join(f"{split:5} {line}" for split, metrics in result.items() for line in format_metrics(metrics))
