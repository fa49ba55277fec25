"""Predictions of a run for single rows: labels with probabilities, numbers, answers, or the perplexity of a text.

flatshift predict runs/first --data new.jsonl --out labels.csv

Rows are read and written in parts, so their number does not matter; a killed command resumes after its last complete
part. Labels are not needed: a column that holds them is ignored.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatshift.experiments.data.splits import read_label_record
from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.generate import answer_questions
from flatshift.experiments.workflows.run_parts import answers_in_text, read_finished_recipe, to_single_process
from flatshift.finetune.atomic import atomic_file, read_json_object, write_json
from flatshift.finetune.compute.numerics import cpu_threads, evaluation_mode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.data.rows import Row, missing_column_message, read_canonical_values, read_rows
from flatshift.finetune.digests import adapter_digest
from flatshift.finetune.errors import UserError, shorten
from flatshift.finetune.evaluate.evaluator import Evaluator
from flatshift.finetune.evaluate.generation import Decoding, context_overflow
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.run_directory import check_new_file, disk_full_interrupts

PART = 4096
"""Rows of a part. Longest first within each, so padding is what rows of a part differ by."""
_PART_FILES, _SETTINGS = "part-*.jsonl", "asked.json"
SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")

Record = dict[str, Any]


class Predictor:
    """A run's adapter on its backbone, ready for prediction; one process, whatever mesh it was trained on."""

    def __init__(
        self, path: Path, *, bad_rows: str = "refuse", overrides: Sequence[Branch] = (), keep: Sequence[str] = ()
    ) -> None:
        """bad_rows: `refuse` or `skip` a row that the model cannot be shown. overrides: another `train.device`,
        `eval.batch_size`, `task.max_new_tokens`, `task.num_beams` or `data.columns` than the run's. keep: columns of
        the rows to copy into the records; as `given_NAME` where a record has one of that name.

        Raises UserError if `path` is no finished run or was changed, or its rows bring features along
        (adapter.projector).
        """
        from peft.tuners.lora import LoraModel

        recipe = to_single_process(read_finished_recipe(path, overrides, other_rows=True))
        if recipe.adapter.projector is not None and answers_in_text(recipe.task):
            raise UserError(f"{path}: its adapter reads features with every row; evaluate it with `flatshift eval`")
        self.recipe: Recipe = recipe
        self.task = recipe.task
        self.label_names, self.units = read_label_record(recipe, path)
        self.backbone = open_backbone(recipe.backbone)
        self.tokenizer = self.backbone.tokenizer
        self.engine, _ = load_model(recipe, self.task, self.label_names, adapter=path / "adapter")
        model: Any = self.engine.eval_model
        # Merging LoRA factors into float32 weights: half the products of a pass, equal to 1e-6. Weights of lower
        # precision would be rounded by it; a task's reference, the model without the adapter, would be destroyed.
        if not self.task.has_reference and isinstance(getattr(model, "base_model", None), LoraModel):
            dtypes = {str(p.dtype) for name, p in model.named_parameters() if "lora_" not in name}
            if recipe.train.precision == "fp32" and dtypes == {"torch.float32"}:
                model.merge_adapter()
        self.bad_rows, self.keep = bad_rows, keep
        self.counts: Record = {}  # of the last call: `skipped` rows (file:line: reason), `truncated` ones

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a row must have."""
        task = self.task  # the evaluated answers of a pair are columns too
        return task.columns() if task.traits.is_answer_level else task.input_format.columns()

    def __call__(self, rows: Sequence[Row | str | Mapping[str, Any]]) -> list[Record]:
        """Return a record for each row that is not skipped, in order: its id, its input, and the predictions.

        Raises UserError for a row that cannot be shown to the model.
        """
        read = [row if isinstance(row, Row) else self._read_row(row, i) for i, row in enumerate(rows, start=1)]
        if not read:
            return []
        with cpu_threads(self.recipe.train.threads):
            found = self._generate_answers(read) if answers_in_text(self.task) else self._predict_encoded(read)
        return [
            record | {f"given_{name}" if name in record else name: row.record.get(name) for name in self.keep}
            for row in read
            if (record := found.get(row.where)) is not None
        ]

    def left_out(self, row: Row) -> list[str]:
        """Return the columns of the row that its record lacks; none for a row that was given another form."""
        read, columns = ("id", *self.columns, *self.task.optional_columns()), self.recipe.data.columns
        copied = {*self.keep, *(getattr(columns, name, name) for name in read)}
        return [] if row.form else [name for name in row.record if name not in copied]

    def _read_row(self, row: str | Mapping[str, Any], number: int) -> Row:
        record = {"text": row} if isinstance(row, str) else dict(row)
        try:
            values = read_canonical_values(record, self.recipe.data.columns, self.columns)
        except ValueError as error:
            raise UserError(f"row {number}: {error}") from None
        if "label" not in self.columns:
            values.pop("label", None)
        return Row(values, str(values.get("id", number)), f"row {number}", record, number - 1)

    def _predict_encoded(self, rows: Sequence[Row]) -> dict[str, Record]:
        task, train = self.task, self.recipe.train
        size, device = self.recipe.eval.batch_size, self.engine.device
        blank = task.placeholders(self.label_names)
        encoder = task.encoder(
            self.tokenizer, train.max_length, label_names=self.label_names, bad_rows=self.bad_rows,
            truncation=train.truncation, overlong="split" if train.overlong == "split" else None, units=self.units,
            features=self.recipe.adapter.projector,
        )  # fmt: skip
        encoded = encoder.add([dataclasses.replace(row, values={**row.values, **blank}) for row in rows])
        self.counts = {"skipped": encoded.skipped, "truncated": encoded.truncated}
        if not encoded.examples:
            return {}
        inference = EvalBatching.of(self.tokenizer, train, batch_size=size, device=device)
        evaluator = Evaluator(self.engine.eval_model, self.tokenizer, task, inference, label_names=self.label_names)
        with evaluation_mode(self.engine.eval_model):
            columns = task.predict(evaluator, encoded.examples)
        texts = [name for name in (*self.columns, *task.optional_columns()) if name != "label"]
        places = {example.where: i for i, example in enumerate(encoded.examples)}  # the first piece of a document
        records = {}
        for row in rows:
            if (i := places.get(row.where)) is None:
                continue
            inputs = {name: row.values[name] for name in texts if row.values.get(name) is not None}
            records[row.where] = {"id": row.id, **inputs, **{name: values[i] for name, values in columns.items()}}
        return records

    def _generate_answers(self, rows: Sequence[Row]) -> dict[str, Record]:
        task = self.task
        questions, skipped = task.input_format.build_prompts(rows, self.tokenizer, bad_rows=self.bad_rows)
        decoding = Decoding(max_new_tokens=task.max_new_tokens, num_beams=task.num_beams or 1)
        for question in list(questions) if self.bad_rows == "skip" else ():
            limits: dict[str, Any] = {"max_new_tokens": decoding.max_new_tokens, "apart": task.traits.encoder_decoder}
            if (room := context_overflow(self.engine.model, question.ids, **limits)) is not None:
                questions.remove(question)
                skipped.append(f"{question.where}: its {len(question.ids)} tokens and the answer do not fit {room}")
        self.counts = {"skipped": skipped, "truncated": 0}
        records: list[Record] = [{"id": question.id, "prompt": question.text} for question in questions]
        batch_size = self.recipe.eval.batch_size
        answers = answer_questions(self.recipe, self.engine.model, questions, decoding, batch_size=batch_size)
        for index, text, answer in answers:
            records[index] |= {"answer": text.strip(), "tokens": len(answer.ids), "ended": answer.ended}
        return {question.where: record for question, record in zip(questions, records, strict=True)}


def predict_from_run(
    path: Path,
    data: Sequence[str],
    out: Path,
    *,
    overrides: Sequence[Branch] = (),
    raw: bool = False,
    keep: Sequence[str] = (),
    quiet: bool = False,
) -> tuple[int, list[str]]:
    """Write the predictions of the run at `path` for every row of `data` to `out` (.jsonl, .csv, .tsv or .parquet).

    Finished parts are kept next to `out` until it is complete; the same call continues with them. After a refusal, a
    call with corrected files continues too: parts of unchanged rows are kept.
    overrides: as of `Predictor`, and `data.bad_rows`. keep: as of `Predictor`. raw: leave texts of .csv and .tsv as
    they are that a spreadsheet would take for formulas.
    Returns the number of rows, and the places and reasons of those left out as bad.
    Raises UserError as `Predictor`; for an `out` of another kind, that exists or is in use; for bad rows; and for parts
    that a killed call has of another run or other data.
    """
    if out.suffix not in SUFFIXES:
        raise UserError(f"--out: {out} has none of the endings {', '.join(SUFFIXES)}")
    if not data:
        raise UserError("there is nothing to predict: give --data FILE")
    parts = out.with_name(f".{out.name}.parts")
    console = Console(quiet=quiet)
    with exclusive_lock(out):
        check_new_file(out)
        bad_rows = resume_recipe(path, overrides, other_rows=True).recipe.data.bad_rows
        predictor = Predictor(path, bad_rows=bad_rows, overrides=overrides, keep=keep)
        inputs = describe_files(data)
        counts = [entry["rows"] for entry in inputs]
        columns = predictor.recipe.data.columns
        settings = {
            "new_tokens": predictor.task.max_new_tokens if answers_in_text(predictor.task) else None,
            "num_beams": predictor.task.num_beams or 1,
            "adapter": adapter_digest(path),
            "inputs": [entry["sha256"] or entry["path"] for entry in inputs],
            "bad_rows": bad_rows,
            "columns": dataclasses.asdict(columns),
        }
        skipped: list[str] = []
        rows = read_rows(
            data, columns=columns, required=predictor.columns, bad_rows=bad_rows, skipped=skipped,
            label=predictor.task.read_label if "label" in predictor.columns else lambda value: None,
        )  # fmt: skip
        with disk_full_interrupts(f"writing {out}"):
            _open_parts(parts, settings)
            with (
                _keep_parts_on_refusal(parts, settings, console),
                console.task("predicting", None if None in counts else sum(counts), "rows") as bar,
            ):
                done, found = _write_parts(predictor, rows, parts, bar, console)
            skipped += found["skipped"]
            if not done:
                bad = f"; {len(skipped):,} are bad, first {skipped[0]}" if skipped else ""
                raise UserError(f"{', '.join(map(str, data))}: no row is left to predict{bad}")
            with atomic_file(out) as temporary:
                _join_parts(sorted(parts.glob(_PART_FILES)), temporary, out.suffix, raw=raw)
            shutil.rmtree(parts)
        if skipped:
            console.say(f"skipped {len(skipped):,} bad rows, first {skipped[0]}")
        if count := found["truncated"]:
            limit = predictor.recipe.train.max_length
            console.say(f"{count:,} of {done:,} rows were longer than train.max_length = {limit} and were cut")
        if count := found["open"]:
            limit = predictor.task.max_new_tokens
            console.say(
                f"{count:,} of {done:,} answers did not end within {limit} tokens; --max-new-tokens N allows more"
            )
    return done, skipped


def _open_parts(parts: Path, settings: Mapping[str, Any]) -> None:
    """Take the directory of parts, which is this call's or new. Raises UserError if it is another one's that was not
    refused."""
    before = read_json_object(parts / _SETTINGS) if any(parts.glob(_PART_FILES)) else None
    if before is None or before.pop("refused", False):
        if before is None or any(before.get(name) != settings[name] for name in ("adapter", "new_tokens", "num_beams")):
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir(parents=True)
        write_json(parts / _SETTINGS, dict(settings))
    elif before != settings:
        raise UserError(
            f"{parts} holds begun predictions of another run or other data; remove it, or name another --out"
        )


@contextmanager
def _keep_parts_on_refusal(parts: Path, settings: Mapping[str, Any], console: Console) -> Iterator[None]:
    """Record a refusal of the block, after which files may be mended: parts remain for the rows that stay the same."""
    try:
        yield
    except UserError:
        if any(parts.glob(_PART_FILES)):
            write_json(parts / _SETTINGS, {**settings, "refused": True})
            console.say("what was predicted before this row is kept: mend the file, and run the same command again")
        raise
    finally:
        if not any(parts.glob(_PART_FILES)):
            shutil.rmtree(parts, ignore_errors=True)


def _write_parts(
    predictor: Predictor, rows: Iterable[Row], parts: Path, bar: Callable[[int], None], console: Console
) -> tuple[int, Record]:
    """Write the missing parts; returns the number of predicted rows, and the counts of all parts."""
    done, reused = 0, 0
    found: Record = {"skipped": [], "truncated": 0, "open": 0}
    current: set[Path] = set()
    stream = iter(rows)
    while chunk := list(itertools.islice(stream, PART)):
        if not current:  # a misspelt name is found before thousands of rows are predicted
            columns = dict.fromkeys(name for row in chunk for name in row.record)
            for name in predictor.keep:
                if name not in columns:
                    raise UserError(f"the first {len(chunk):,} rows: {missing_column_message(name, columns, '--keep')}")
            if names := predictor.left_out(chunk[0]):
                console.say(f"columns left out: {shorten(', '.join(names))} (--keep NAME copies one)")
        text = json.dumps([list(predictor.keep), *([row.id, row.values] for row in chunk)], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        file = parts / f"part-{len(current):06}-{digest}.jsonl"
        counted = file.with_suffix(".json")  # written first
        current.add(file)
        records = list(_iter_records([file])) if file.is_file() and counted.is_file() else None
        if records is not None and (predictor.bad_rows == "skip" or len(records) == len(chunk)):
            reused += len(records)
        else:
            if reused and done == reused:
                console.say(f"{reused:,} rows were done before")
            records = predictor(chunk)
            write_json(counted, predictor.counts)
            with atomic_file(file) as temporary, temporary.open("w", encoding="utf-8") as handle:
                handle.writelines(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
        for name, count in read_json_object(counted).items():
            found[name] += count
        found["open"] += sum(record.get("ended") is False for record in records)
        done += len(records)  # without skipped rows
        bar(done)
    for file in set(parts.glob(_PART_FILES)) - current:  # of rows that are no more so
        file.unlink()
    return done, found


def _join_parts(parts: Sequence[Path], path: Path, suffix: str, *, raw: bool) -> None:
    if suffix == ".jsonl":
        with path.open("wb") as stream:
            for file in parts:
                with file.open("rb") as source:
                    shutil.copyfileobj(source, stream)
    elif suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        kinds: dict[str, set[type]] = {}
        for record in _iter_records(parts):
            for name, value in record.items():
                kinds.setdefault(name, set()).add(float if type(value) is int else type(value))
        mixed = {name for name, found in kinds.items() if len(found - {type(None)}) > 1}  # numbers and texts: texts

        def read_table(file: Path, schema: pa.Schema | None = None) -> pa.Table:
            records = [dict.fromkeys(kinds) | record for record in _iter_records([file])]
            rows = [{n: str(v) if n in mixed and v is not None else v for n, v in r.items()} for r in records]
            return pa.Table.from_pylist(rows, schema=schema)

        schema = pa.unify_schemas([read_table(file).schema for file in parts], promote_options="permissive")
        with pq.ParquetWriter(path, schema) as writer:
            for file in parts:
                writer.write_table(read_table(file, schema))
    else:
        columns = list(dict.fromkeys(name for record in _iter_records(parts) for name in record))
        with path.open("w", encoding="utf-8", newline="") as table:
            writer = csv.DictWriter(table, columns, delimiter="\t" if suffix == ".tsv" else ",")
            writer.writerow({name: _format_cell(name, raw) for name in columns})
            for record in _iter_records(parts):
                writer.writerow({name: _format_cell(value, raw) for name, value in record.items()})


def _iter_records(files: Iterable[Path]) -> Iterator[Record]:
    for file in files:
        with file.open(encoding="utf-8") as stream:
            yield from map(json.loads, stream)


def _format_cell(value: Any, raw: bool) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    is_formula = isinstance(value, str) and re.match(r"[=@\t\r]|[+-](?!\d+(\.\d+)?\Z)", value)
    return f"'{value}" if is_formula and not raw else value
