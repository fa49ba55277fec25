"""Evaluate finished runs: one on its own mesh, by its directory alone, or several runs and base models on the same
rows.

    flatshift eval runs/first --data more.jsonl --json
    flatshift eval runs/first flatshift-5m --data texts.jsonl --group-by lang --out evaluated

In the second form each run is compared with the backbone that it changes. Differences are paired: both models use the
same bootstrap draws of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.data.encode import encode_rows
from flatshift.experiments.data.sources import SourceFiles
from flatshift.experiments.data.splits import KnownRows, prepare_data, prepare_eval_data, read_label_record, read_splits
from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows import build, samples
from flatshift.experiments.workflows.evaluation_document import SubjectResults, build_document, flatten_document
from flatshift.experiments.workflows.evaluation_target import AdapterSwitcher, EvaluationTarget, resolve_subjects
from flatshift.experiments.workflows.few_shot import FewShot, RankingResult, rank_rows, read_shots
from flatshift.experiments.workflows.run_parts import check_run, lock_new_output, read_adapted_recipe
from flatshift.finetune.atomic import atomic_directory, write_json
from flatshift.finetune.compute.numerics import cpu_threads, evaluation_mode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import document_place
from flatshift.finetune.data.rows import Row, read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.bootstrap import ResampledMetric, group_interval
from flatshift.finetune.evaluate.text import missing_dictionary_note, score_texts
from flatshift.finetune.launch import spawn, watchdog
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.families import usable_positions
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.seeds import derive_seed

DOCUMENT = "evaluation.json"
_MAX_WINDOW = 1024
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
    sampling: samples.Sampling | None = None,
    overrides: Sequence[Branch] = (),
    out: Path | None = None,
    command: str = "",
    quiet: bool = False,
    page: Callable[[Mapping[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """Evaluate runs and base models on the rows of `data`, or on the dev and test rows of the first run.

    A base model is evaluated like the first run on it, else as a language model of whole documents.

    group_by: a column of the rows; every metric is also given for each of its values. trained: values of that column
    that the adapters were trained on; the others are where they may have forgotten. window, overlap: tokens read at
    once, and how many of them are context; of tasks over whole documents. few_shot: put the rows by a prompt, and rank
    its candidates. sampling: write several texts after each row as a prompt, and evaluate those. overrides: as a
    recipe's, for base models without a run next to them; for runs only `train.device`, `data.columns` and
    `data.bad_rows` of the rows of `data`. out: a new directory for evaluation.json, eval.json, predictions.parquet (of
    written samples: generations.jsonl) and, by `page`, report.html; whole or not at all.
    Returns the content of evaluation.json.
    Raises UserError for what is neither a run nor a backbone, subjects that cannot be evaluated on these rows, and a
    column that rows lack.
    """
    with lock_new_output(out):
        console = Console(quiet=quiet)
        subjects = resolve_subjects(names, overrides, bool(data), console)
        with cpu_threads(subjects[0].recipe.train.threads):
            if few_shot is not None and sampling is not None:
                raise UserError("--prompt ranks given answers and --samples generates new ones; leave one of them out")
            saved = samples.SavedSamples.beside(out)
            evaluation = _SideBySide(data, group_by, trained, window, overlap, few_shot, sampling, saved, console)
            results, splits = evaluation.run(subjects)
            document = build_document(
                subjects, results, splits, data, group_by=group_by, few_shot=few_shot, trained=trained
            )
        document["command"] = command
        if out is not None:
            with atomic_directory(out) as temporary:
                write_json(temporary / DOCUMENT, document)
                write_json(temporary / "eval.json", flatten_document(document))
                samples.write_generations(temporary, results.generations)
                if results.predictions:
                    tables = [build.build_predictions_table(split, columns) for split, columns in results.predictions]
                    build.write_tables(temporary / "predictions.parquet", tables)
                if page is not None:
                    (temporary / "report.html").write_text(page(document), encoding="utf-8")
            saved.delete()
            console.say(f"written: {out}")
    return document


@dataclass
class _SideBySide:
    """Evaluation of several subjects, with the options of `evaluate_side_by_side`."""

    data: Sequence[str]
    group_by: str | None
    trained: Sequence[str]
    window: int | None
    overlap: int | None
    few_shot: FewShot | None
    sampling: samples.Sampling | None
    saved: samples.SavedSamples
    console: Console
    results: SubjectResults = field(default_factory=SubjectResults)

    def run(self, subjects: Sequence[EvaluationTarget]) -> tuple[SubjectResults, dict[str, list[Row]]]:
        """Return the results, and the rows of each split; subjects on the same backbone follow one another."""
        models = AdapterSwitcher()
        splits: dict[str, list[Row]] = {}
        backbones = [subject.recipe.backbone for subject in subjects]
        ordered = sorted(subjects, key=lambda subject: backbones.index(subject.recipe.backbone))
        for subject in ordered:
            rows = self._read_rows(subject)
            if splits and _list_contents(rows) != _list_contents(splits):
                raise UserError(
                    f"{subject.name} has other dev or test rows than {ordered[0].name}; give --data FILE to "
                    "evaluate them on the same rows"
                )
            if self.sampling is not None and not splits:
                samples.check_sampling_rows([row for split in rows.values() for row in split], self.sampling)
            splits = splits or rows
            self.console.say(f"evaluating {subject.name}")
            self._evaluate_subject(subject, rows, models)
        loads = f"{models.loads} load{'s' if models.loads > 1 else ''} of a backbone"
        self.console.say(f"{len(subjects)} evaluated over {loads}")
        return self.results, splits

    def _read_rows(self, subject: EvaluationTarget) -> dict[str, list[Row]]:
        recipe, data = subject.recipe, self.data
        skipped: list[str] = []
        if data:
            # Ids need not be unique: translations of a text may share theirs.
            columns = dataclasses.replace(recipe.data.columns, id="\0")
            source = SourceFiles("--data", None, tuple(data), columns, "data.columns")
            if self.few_shot is None:
                rows = list(source.rows(recipe.data, recipe.task, skipped))
            else:
                required, bad_rows = self.few_shot.prompt.columns(self.few_shot.spoken), recipe.data.bad_rows
                rows = list(read_rows(data, columns=columns, required=required, bad_rows=bad_rows, skipped=skipped))
            splits = {"data": rows}
            if not rows:
                source.refuse_none(skipped)
            if subject.run is not None:
                known_rows = KnownRows(resume_recipe(subject.run).recipe)
                rows = list(known_rows.compare(rows, recipe.data.columns))
                self.results.notes += [f"{subject.name}: {warning}" for warning in known_rows.warnings()]
        else:
            read = read_splits(recipe)
            splits = {name: rows for name, rows in (("dev", read.dev), ("test", read.test)) if rows}
            if not splits:
                raise UserError(f"{subject.name} has no dev or test rows; give --data FILE")
        if self.group_by is not None:
            row = next((row for rows in splits.values() for row in rows if row.values.get(self.group_by) is None), None)
            if row is not None:
                known = ", ".join(sorted(map(str, row.values)))
                lacks = "no value in" if self.group_by in row.values else "no"
                raise UserError(f"{row.where}: {lacks} column {self.group_by!r} to group by; there are {known}")
        groups = {str(row.values[self.group_by]) for rows in splits.values() for row in rows if self.group_by}
        if unknown := sorted(set(self.trained) - groups):
            raise UserError(f"--trained: no row has {self.group_by or 'a --group-by column'} {unknown[0]!r}")
        if skipped:
            self.results.notes.append(f"{len(skipped):,} bad rows were skipped, the first for {skipped[0]}")
        return splits

    def _evaluate_subject(
        self, subject: EvaluationTarget, splits: Mapping[str, list[Row]], models: AdapterSwitcher
    ) -> None:
        recipe, task, results = subject.recipe, subject.recipe.task, self.results
        run = subject.run or subject.template
        names, units = read_label_record(recipe, run) if run else (None, None)
        engine = Engine.alone(models.load(subject, names))
        tokenizer = open_backbone(recipe.backbone).tokenizer
        inference = EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=engine.device)
        for split, rows in splits.items():
            figures: dict[str, ResampledMetric] = {}
            columns: dict[str, Any] = {"text": None}
            places = [row.where for row in rows]
            draw: dict[str, Any] = {"resamples": recipe.eval.bootstrap, "confidence": recipe.eval.confidence}
            draw["seed"] = derive_seed(recipe.train.seed, "bootstrap", split)
            intervals: dict[str, Any] | None = None
            if self.few_shot is not None:
                ranked = self._rank(subject, engine.model, tokenizer, rows, inference)
                figures |= ranked.figures
                results.ranked[subject.name, split] = ranked
                columns |= {"predicted": ranked.predictions[0], "accuracy": ranked.right.mean(axis=0)}
                notes = ranked.notes
            elif self.sampling is not None:
                written = samples.write_samples(
                    f"{subject.name} {split}", engine.model, tokenizer, rows, task, self.sampling, self.saved,
                    inference, digest=subject.digest, console=self.console,
                )  # fmt: skip
                figures |= samples.compute_sample_metrics(rows, written, self.sampling)
                results.generations += samples.build_generation_records(subject.name, rows, written)
                columns, notes = {}, []
            elif task.traits.reads_documents and recipe.adapter.projector is None:
                intervals, notes = self._score_documents(
                    engine.model, tokenizer, rows, recipe, inference, figures, draw, columns
                )
            elif (self.window, self.overlap) != (None, None):
                raise UserError(
                    f"--window and --overlap cut whole documents, and {subject.name} reads none; leave them out"
                )
            else:
                encoded = encode_rows(
                    recipe, (("test", 0, row) for row in rows), task=task, labels=names, units=units,
                    paths=sorted({place.rpartition(":")[0] for place in places}), name=split,
                )  # fmt: skip
                examples, notes = encoded.splits["test"], encoded.notes
                if not examples:
                    raise UserError(f"{subject.name}: no row of {split} is left, the first for {encoded.skipped[0]}")
                room, longest = _room(engine.model), max(examples, key=lambda example: len(example.input_ids))
                if room is not None and (size := len(longest.input_ids)) > room:
                    cut = f"cut rows by --train.max_length {room}" if run is None else "evaluate it without the runs"
                    problem = f"{size} tokens do not fit the {room} positions of {subject.name}"
                    raise UserError(f"{longest.where}: {problem}; {cut}")
                intervals = build.evaluate_split(
                    recipe, engine, tokenizer, examples, task=task, split=split, label_names=names,
                    watch=self.console.evaluating, figures=figures, columns=columns,
                )  # fmt: skip
                places = [example.where for example in examples]
                columns["text"] = build.describe_examples(recipe, examples, tokenizer, rows)
            if intervals is None:
                everything = np.arange(len(rows))
                intervals = {name: group_interval(figure, [everything], **draw) for name, figure in figures.items()}
            results.intervals.setdefault(subject.name, {})[split] = intervals
            results.notes += [note for note in notes if note not in results.notes]
            results.figures[subject.name, split] = figures
            is_split = task.traits.splits_documents  # then figures are of documents, and places of their pieces
            results.rows[subject.name, split] = list(dict.fromkeys(map(document_place, places))) if is_split else places
            if columns:
                named = {"subject": [subject.name] * len(places), "row": build.format_places(places)}
                texts = [build.shorten_text(str(row.values.get("text", ""))) for row in rows[: build.MAX_TEXTS]]
                columns["text"] = columns["text"] or [*texts, *[None] * (len(rows) - len(texts))]
                results.predictions.append((split, {**named, **columns}))

    def _score_documents(
        self,
        model: Any,
        tokenizer: Any,
        rows: Sequence[Row],
        recipe: Recipe,
        inference: EvalBatching,
        figures: dict[str, ResampledMetric],
        draw: Mapping[str, Any],
        columns: dict[str, Any],
    ) -> tuple[dict[str, Any], list[str]]:
        """Return intervals and notes of whole documents; adds to `figures` and `columns`."""
        width = _window_size(model, recipe, self.window)
        texts = [row.values["text"] for row in rows]
        with evaluation_mode(model):
            counts = score_texts(
                model, tokenizer, texts, inference, task=recipe.task, window=width,
                overlap=max(1, width // 4) if self.overlap is None else self.overlap,
                locations=[row.where for row in rows],
            )  # fmt: skip
        columns |= {"loss": counts.nats, "loss.count": counts.tokens.astype(np.float64)}
        return counts.metrics(figures=figures, **draw), list(filter(None, [missing_dictionary_note(texts)]))

    def _rank(
        self, subject: EvaluationTarget, model: Any, tokenizer: Any, rows: Sequence[Row], inference: EvalBatching
    ) -> RankingResult:
        recipe = subject.recipe
        assert self.few_shot is not None
        if not recipe.task.traits.causal or recipe.adapter.projector is not None:
            raise UserError(
                f"{subject.name}: --prompt asks a language model which text is likeliest, and task.kind: "
                f"{recipe.task.kind} trains none; leave it out"
            )
        source = read_shots(self.few_shot, dataclasses.replace(recipe.data.columns, id="\0"))
        width = _room(model) if self.window is None else _window_size(model, recipe, self.window)
        with evaluation_mode(model):
            return rank_rows(model, tokenizer, rows, source, self.few_shot, inference, window=width)


def _list_contents(splits: Mapping[str, Sequence[Row]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each split as they were read, from whatever file."""
    return {split: [row.record or row.values for row in rows] for split, rows in splits.items()}


def _room(model: Any) -> int | None:
    """Return the positions that a text can have; None if they are not limited."""
    positions = usable_positions(model.config)
    return None if positions is None else positions - getattr(model, "soft_tokens", 0)


def _window_size(model: Any, recipe: Recipe, window: int | None) -> int:
    """Return the tokens of a window. Raises UserError for more than the backbone has positions."""
    room = _room(model)
    if window is not None and room is not None and not 2 <= window <= room:
        raise UserError(f"--window: {window} is not from 2 to {room}, the positions of {recipe.backbone}")
    return min(room or _MAX_WINDOW, _MAX_WINDOW) if window is None else window


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
            check_run(path, recipe, rows=not data)
        world.wait()
        known = KnownRows(resume_recipe(path).recipe) if data else None
        result = _evaluate_run(path, recipe, data, Console(quiet=quiet or not world.is_main), world, known)
    spawn.destroy_process_group(world)
    return result


def _evaluate_run(
    path: Path,
    recipe: Recipe,
    data: Sequence[str],
    console: Console,
    world: ProcessMesh,
    known: KnownRows | None = None,
) -> dict[str, dict[str, Any]]:
    prepared = prepare_eval_data(recipe, data, run=path, known=known) if data else prepare_data(recipe)
    if data:
        console.say(f"data: {len(prepared.test):,} examples")
        for line in build.skipped_rows_summary(prepared, recipe.train.max_length):
            console.say(line)
    engine, tokenizer = build.load_model(
        recipe, recipe.task, prepared.label_names, world=world, adapter=path / "adapter"
    )
    if not data:
        return build.evaluate_splits(recipe, engine, tokenizer, prepared, Console(quiet=True), watch=console.evaluating)
    metrics = build.evaluate_split(
        recipe, engine, tokenizer, prepared.test, task=recipe.task, split="data", label_names=prepared.label_names,
        watch=console.evaluating,
    )  # fmt: skip
    return {"data": metrics}


def format_result(result: dict[str, dict[str, Any]]) -> str:
    """Format the result as lines."""
    return "\n".join(f"{split:5} {line}" for split, metrics in result.items() for line in build.format_metrics(metrics))
