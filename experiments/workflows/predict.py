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
from flatshift.experiments.workflows.generate import read_finished_recipe, to_single_process
from flatshift.finetune.atomic import atomic_file, read_json_object, write_json
from flatshift.finetune.compute.numerics import cpu_threads, evaluation_mode
from flatshift.finetune.data.encoding import get_end_token
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.data.rows import Row, read_canonical_values, read_rows
from flatshift.finetune.digests import file_sha256
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.run_directory import disk_full_interrupts
from flatshift.finetune.tasks import Task

PART = 4096
"""Rows of a part. Longest first within each, so padding is what rows of a part differ by."""
_PART_FILES, _ASKED = "part-*.jsonl", "asked.json"
SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")

Record = dict[str, Any]


def _answers_in_text(task: Task) -> bool:
    """Return True if the prediction for a row is generated text."""
    traits = task.traits
    return traits.is_generative and not (traits.reads_documents or traits.is_answer_level) and task.score != "rank"


class Predictor:
    """A run's adapter on its backbone, ready for prediction; one process, whatever mesh it was trained on."""

    def __init__(
        self,
        path: Path,
        *,
        bad_rows: str = "refuse",
        overrides: Sequence[Branch] = (),
    ) -> None:
        """bad_rows: `refuse` or `skip` a row that the model cannot be shown. overrides: another `train.device`,
        `eval.batch_size`, `task.max_new_tokens` or `data.columns` than the run's.

        Raises UserError if `path` is no finished run or was changed, or its rows bring features along
        (adapter.projector).
        """
        from flatshift.finetune.models.backbone import open_backbone

        recipe = to_single_process(read_finished_recipe(path, overrides, other_rows=True))
        if recipe.adapter.projector is not None and _answers_in_text(recipe.task):
            raise UserError(f"{path}: its adapter reads features with every row; evaluate it with `flatshift eval`")
        self.recipe: Recipe = recipe
        self.task = recipe.task
        self.label_names, self.units = read_label_record(recipe, path)
        self.backbone = open_backbone(recipe.backbone)
        self.tokenizer = self.backbone.tokenizer
        self.engine, _ = load_model(recipe, self.task, self.label_names, adapter=path / "adapter")
        if not self.task.has_reference:  # merging would destroy its reference, the model without the adapter
            _merge_adapter(self.engine.eval_model, recipe)
        self.bad_rows = bad_rows
        self.skipped: list[str] = []
        """`file:line: reason` of skipped rows."""
        self.cut = 0
        """Number of rows longer than `train.max_length`."""
        self.open_answers = 0
        """Number of answers cut by the limit of new tokens."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a row must have."""
        task = self.task  # the evaluated answers of a pair are columns too
        return task.columns() if task.traits.is_answer_level else task.input_format.columns()

    def __call__(self, rows: Sequence[Row | str | Mapping[str, Any]]) -> list[Record]:
        """Return a record for each row that is not skipped, in order: its id, its input, and the predictions.

        Raises UserError for a row that cannot be shown to the model.
        """
        given = [row if isinstance(row, Row) else self._row(row, i) for i, row in enumerate(rows, start=1)]
        if not given:
            return []
        with cpu_threads(self.recipe.train.threads):
            return self._written(given) if _answers_in_text(self.task) else self._judged(given)

    def _row(self, given: str | Mapping[str, Any], number: int) -> Row:
        record = {"text": given} if isinstance(given, str) else dict(given)
        try:
            values = read_canonical_values(record, self.recipe.data.columns, self.columns)
        except ValueError as error:
            raise UserError(f"row {number}: {error}") from None
        values.pop("label", None)
        return Row(values, str(values.get("id", number)), f"row {number}", record, number - 1)

    def _judged(self, rows: Sequence[Row]) -> list[Record]:
        """Predict by one forward pass over encoded rows."""
        from flatshift.finetune.evaluate.evaluator import Evaluator

        task, train = self.task, self.recipe.train
        blank = task.placeholders(self.label_names)
        encoder = task.encoder(
            self.tokenizer,
            train.max_length,
            label_names=self.label_names,
            bad_rows=self.bad_rows,
            truncation=train.truncation,
            overlong="split" if train.overlong == "split" else None,
            units=self.units,
            features=self.recipe.adapter.projector,
        )
        encoded = encoder.add([dataclasses.replace(row, values={**row.values, **blank}) for row in rows])
        self.cut += encoded.truncated
        self.skipped += encoded.skipped
        evaluator = Evaluator(
            self.engine.eval_model,
            self.tokenizer,
            task,
            self._inference(),
            label_names=self.label_names,
        )
        with evaluation_mode(self.engine.eval_model):
            columns = task.predict(evaluator, encoded.examples)
        texts = [name for name in (*self.columns, *task.optional_columns()) if name != "label"]
        places = {example.where: i for i, example in enumerate(encoded.examples)}  # the first piece of a document
        records = []
        for row in rows:
            if (i := places.get(row.where)) is None:
                continue
            read = {name: row.values[name] for name in texts if row.values.get(name) is not None}
            records.append({"id": row.id, **read, **{name: values[i] for name, values in columns.items()}})
        return records

    def _written(self, rows: Sequence[Row]) -> list[Record]:
        """Predict by generating answers."""
        from flatshift.finetune.evaluate.generation import Decoding, continue_prompts

        task = self.task
        questions, left_out = task.input_format.build_prompts(rows, self.tokenizer, bad_rows=self.bad_rows)
        self.skipped += left_out
        ends = sorted({one.stop for one in questions if one.stop is not None})
        answers = continue_prompts(
            self.engine.model,
            [one.ids for one in questions],
            Decoding(max_new_tokens=task.max_new_tokens, num_beams=task.num_beams or 1),
            self._inference(),
            end=[token for token in (get_end_token(self.tokenizer), *ends) if token is not None],
            decoder_start=self.backbone.decoder_start if task.traits.encoder_decoder else None,
        )
        records: list[Record] = [{"id": one.id, "prompt": one.text} for one in questions]
        for place, answer in answers:
            text = str(self.tokenizer.decode(answer.ids, skip_special_tokens=True)).strip()
            records[place] |= {"answer": text, "tokens": len(answer.ids), "ended": answer.ended}
            self.open_answers += not answer.ended
        return records

    def _inference(self) -> EvalBatching:
        size = self.recipe.eval.batch_size
        return EvalBatching.of(self.tokenizer, self.recipe.train, batch_size=size, device=self.engine.device)


def _merge_adapter(model: Any, recipe: Recipe) -> None:
    """Merge LoRA factors into this process's float32 weights: half the products of a pass, equal to 1e-6. Weights of
    lower precision would be rounded by it and are not merged."""
    from peft.tuners.lora import LoraModel

    if isinstance(getattr(model, "base_model", None), LoraModel):
        kept = {p.dtype for name, p in model.named_parameters() if "lora_" not in name}
        if recipe.train.precision == "fp32" and {str(dtype) for dtype in kept} == {"torch.float32"}:
            model.merge_adapter()


# ------------------------------------------------------------------------------------------------- files of any length


def predict_from_run(
    path: Path,
    data: Sequence[str],
    out: Path,
    *,
    overrides: Sequence[Branch] = (),
    quiet: bool = False,
) -> int:
    """Write the predictions of the run at `path` for every row of `data` to `out` (.jsonl, .csv, .tsv or .parquet).

    Finished parts are kept next to `out` until it is complete; the same call continues with them. After a refusal, a
    call
    with corrected files continues too: parts of unchanged rows are kept.
    overrides: as of `Predictor`, and `data.bad_rows`.
    Returns the number of rows.
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
        if out.exists():
            raise UserError(f"--out: {out} exists; name another file or remove it")
        wanted = resume_recipe(path, overrides, other_rows=True).recipe.data.bad_rows
        predictor = Predictor(path, bad_rows=wanted, overrides=overrides)
        inputs = describe_files(data)
        counts = [entry["rows"] for entry in inputs]
        asked = {
            "new_tokens": predictor.task.max_new_tokens if _answers_in_text(predictor.task) else None,
            "adapter": file_sha256(path / "adapter" / "adapter_model.safetensors"),
            "inputs": [entry["sha256"] or entry["path"] for entry in inputs],
            "bad_rows": wanted,
            "columns": dataclasses.asdict(predictor.recipe.data.columns),
        }
        with disk_full_interrupts(f"writing {out}"):
            _open_parts(parts, asked, out)
            skipped: list[str] = []
            rows = read_rows(
                data,
                columns=predictor.recipe.data.columns,
                required=predictor.columns,
                bad_rows=wanted,
                skipped=skipped,
                label=lambda value: None,
            )
            with (
                _refusable(parts, asked, console),
                console.task("predicting", None if None in counts else sum(counts), "rows") as bar,
            ):
                done = _write_parts(predictor, rows, parts, bar, console)
            if not done:
                raise UserError(f"{', '.join(map(str, data))}: no row is left to predict")
            with atomic_file(out) as temporary:
                _join_parts(sorted(parts.glob(_PART_FILES)), temporary, out.suffix)
            shutil.rmtree(parts)
        if skipped := [*skipped, *predictor.skipped]:
            console.say(f"skipped {len(skipped):,} bad rows, first {skipped[0]}")
        if predictor.cut:
            limit = predictor.recipe.train.max_length
            console.say(f"{predictor.cut:,} of {done:,} rows were longer than train.max_length = {limit} and were cut")
        if predictor.open_answers:
            limit = predictor.task.max_new_tokens
            console.say(
                f"{predictor.open_answers:,} of {done:,} answers did not end within {limit} tokens; --max-new-tokens N "
                "allows more"
            )
    return done


def _open_parts(parts: Path, asked: Mapping[str, Any], out: Path) -> None:
    """Take the directory of parts, which is this call's or new. Raises UserError if it is another one's that was not
    refused."""
    note = parts / _ASKED
    before = read_json_object(note) if any(parts.glob(_PART_FILES)) else None
    if before is not None and before.pop("refused", False):
        if all(before.get(name) == asked[name] for name in ("adapter", "new_tokens")):
            write_json(note, dict(asked))
            return
        before = None
    if before is None:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        write_json(note, dict(asked))
    elif before != asked:
        raise UserError(
            f"{parts} holds begun predictions of another run or other data; remove it, or name another --out"
        )


@contextmanager
def _refusable(parts: Path, asked: Mapping[str, Any], console: Console) -> Iterator[None]:
    """Note a refusal inside, after which files may be mended: parts remain for the rows that stay the same."""
    try:
        yield
    except UserError:
        if any(parts.glob(_PART_FILES)):
            write_json(parts / _ASKED, {**asked, "refused": True})
            console.say("what was predicted before this row is kept: mend the file, and run the same command again")
        raise
    finally:
        if not any(parts.glob(_PART_FILES)):
            shutil.rmtree(parts, ignore_errors=True)


def _write_parts(
    predictor: Predictor, rows: Iterable[Row], parts: Path, bar: Callable[[int], None], console: Console
) -> int:
    done, kept = 0, 0
    current: set[Path] = set()
    for number, chunk in enumerate(_iter_batches(rows)):
        file = parts / f"part-{number:06}-{_digest(chunk)}.jsonl"
        current.add(file)
        if file.is_file() and (predictor.bad_rows == "skip" or sum(1 for _ in _iter_records(file)) == len(chunk)):
            kept += len(chunk)
        else:
            if kept and done == kept:
                console.say(f"{kept:,} rows were done before")
            records = predictor(chunk)
            with atomic_file(file) as temporary, temporary.open("w", encoding="utf-8") as stream:
                stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        done += len(chunk)
        bar(done)
    for file in set(parts.glob(_PART_FILES)) - current:  # of rows that are no more so
        file.unlink()
    return done


def _digest(rows: Sequence[Row]) -> str:
    """A short name of what these rows are called and say."""
    said = json.dumps([[row.id, row.values] for row in rows], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _iter_batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    stream = iter(rows)
    while chunk := list(itertools.islice(stream, PART)):
        yield chunk


def _join_parts(parts: Sequence[Path], to: Path, suffix: str) -> None:
    """Join the parts into one file of the kind that `suffix` names."""
    if suffix == ".jsonl":
        with to.open("wb") as stream:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, stream)
    elif suffix == ".parquet":
        _join_parquet(parts, to)
    else:
        columns = list(dict.fromkeys(name for part in parts for name in _iter_columns(part)))
        with to.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, columns, delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            for part in parts:
                for record in _iter_records(part):
                    writer.writerow({name: _format_cell(value) for name, value in record.items()})


def _join_parquet(parts: Sequence[Path], to: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = (pa.Table.from_pylist(list(_iter_records(part))) for part in parts)
    schema = pa.unify_schemas([table.schema for table in tables], promote_options="permissive")
    with pq.ParquetWriter(to, schema) as writer:
        for part in parts:
            writer.write_table(pa.Table.from_pylist(list(_iter_records(part)), schema=schema))


def _iter_columns(part: Path) -> Iterator[str]:
    for record in _iter_records(part):
        yield from record


def _iter_records(part: Path) -> Iterator[Record]:
    with part.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def _format_cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
