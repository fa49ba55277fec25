"""Load the model of a recipe and evaluate it: shared by training, `eval`, and the comparison before and after a
warm-up."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flatshift.experiments.data.sources import iter_source_rows, list_source_files, sample_train_for_eval
from flatshift.experiments.data.splits import PreparedData, read_splits
from flatshift.experiments.recipe.schema import Recipe, warm_up_task
from flatshift.experiments.run.console import Console
from flatshift.finetune.adapters.initial_values import InitialAdapter
from flatshift.finetune.atomic import atomic_file, read_json_object, write_json
from flatshift.finetune.compute.cuda_status import resolve_device
from flatshift.finetune.compute.numerics import evaluation_mode
from flatshift.finetune.data.encoding import decode_answer, encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import IGNORE, Example
from flatshift.finetune.data.rows import Row, limit_rows
from flatshift.finetune.digests import adapter_digest, record_digest
from flatshift.finetune.errors import Interrupted, first_error_line, shorten
from flatshift.finetune.evaluate.answers import prompt_tokens, sample_answers
from flatshift.finetune.evaluate.evaluator import evaluate
from flatshift.finetune.evaluate.metrics import find_metric
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.parallel.build import build_engine
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.parallel.mesh_check import check_mesh_equality
from flatshift.finetune.seeds import derive_seed
from flatshift.finetune.tasks import LanguageModel, MaskedLM, Task

LoadedModel = tuple[Engine, Any]
"""A backbone with an adapter, and its tokenizer."""
Watch = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Progress of the evaluation of a number of rows under a label, as `Console.evaluating`."""


def load_model(
    recipe: Recipe,
    task: Task,
    label_names: tuple[str, ...] | None,
    *,
    world: ProcessMesh | None = None,
    adapter: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
    initial: InitialAdapter | None = None,
) -> LoadedModel:
    """Load the frozen backbone with an adapter for `task` on this process or, with `world`, on the recipe's mesh.

    adapter: a saved adapter to load; None: a fresh one, which changes nothing. initial: initial values of a fresh
    adapter to be trained; without it, B = 0 over the backbone's own weights.
    Returns the engine and the tokenizer.
    """
    settings = recipe.adapter
    # Special initial values are for training only: a fresh adapter must not change the base model that is evaluated.
    if adapter is None and initial is None:
        settings = dataclasses.replace(settings, init="default", init_rows=None, start=None, under=None)
    world = world or ProcessMesh.alone(resolve_device(recipe.train.device))
    place: dict[str, Any] = {"train": recipe.train, "mesh": recipe.mesh, "world": world}
    model: dict[str, Any] = {"task": task, "adapter": settings, "label_names": label_names, **place}
    check_mesh_equality(recipe.backbone, **model)
    gc.collect()  # an earlier stage's model: hooks put it into reference cycles, and memory may not hold two
    beginning = initial if adapter is None else InitialAdapter(folder=adapter)
    engine = build_engine(recipe.backbone, **model, log=log, beginning=beginning)
    if adapter is not None:
        engine.load_adapter(adapter)
    return engine, open_backbone(recipe.backbone).tokenizer


def skipped_rows_summary(prepared: PreparedData, max_length: int) -> list[str]:
    """Return sentences on the rows lost in preparation: notes of the encoding, dropped rows, skipped rows."""
    lines = list(prepared.notes)
    if prepared.dropped:
        lines.append(f"left out {prepared.dropped:,} samples longer than train.max_length = {max_length} tokens")
    if prepared.skipped:
        lines.append(f"skipped {len(prepared.skipped):,} bad rows, first {prepared.skipped[0]}")
    return lines


def evaluate_split(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    task: Task,
    split: str,
    watch: Watch,
    label_names: tuple[str, ...] | None = None,
    **outputs: Any,
) -> dict[str, Any]:
    """Run `flatshift.finetune.evaluate.evaluator.evaluate` in the recipe's precision, on every rank, with the seed of
    the split; outputs: its dictionaries `figures` and `columns`."""
    inference = EvalBatching.of(
        tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=engine.device, share=engine.evaluation
    )
    with watch(f"evaluating {split}", len(examples)) as heartbeat:
        return evaluate(
            engine.eval_model, tokenizer, examples, task=task, config=recipe.eval,
            inference=dataclasses.replace(inference, heartbeat=heartbeat), label_names=label_names,
            seed=derive_seed(recipe.train.seed, "bootstrap", split), **outputs,
        )  # fmt: skip


def _sample_answers(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Any,
    examples: Sequence[Example],
    count: int,
    *,
    watch: Watch,
    log: Callable[[str], None],
) -> dict[str, list[str | None]]:
    """Return the columns of `sample_answers`; none, with a note, where the model fails to generate: a run's metrics do
    not depend on it."""
    inference = EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=engine.device)
    limits = {"max_new_tokens": min(recipe.task.max_new_tokens, _MAX_TOKENS), "num_beams": recipe.task.num_beams or 1}
    try:
        with watch("answering", min(count, len(examples))) as heartbeat, evaluation_mode(engine.eval_model):
            batching = dataclasses.replace(inference, heartbeat=heartbeat)
            return sample_answers(engine.eval_model, tokenizer, examples, batching, count=count, **limits)
    except Interrupted:
        raise
    except Exception as error:
        log(f"no answers are shown, as generating them failed: {first_error_line(error)}")
        return {}


def _format_answers(
    columns: Mapping[str, Any], examples: Sequence[Example], tokenizer: Any, count: int, split: str
) -> Iterator[str]:
    """Yield the first answers of `columns`, each below its prompt and above the row's own."""
    for place in [place for place, answer in enumerate(columns["answer"]) if answer is not None][:count]:
        prompt = decode_answer(tokenizer, prompt_tokens(examples[place]))
        answer, own = (columns[name][place] for name in ("answer", "reference"))
        texts = {f"{split}, asked": prompt, "  answered": answer, "  in its row": own}
        yield from (f"{name}: {shorten(' '.join(text.split()), _MAX_ANSWER)}" for name, text in texts.items())


def evaluate_splits(
    recipe: Recipe,
    engine: Engine,
    tokenizer: Any,
    prepared: PreparedData,
    console: Console,
    *,
    watch: Watch,
    predictions: Path | None = None,
    finished: FinishedSplits | None = None,
    answers: int = 0,
) -> dict[str, dict[str, Any]]:
    """Evaluate every split of a run that has examples; returns the content of eval.json, `{split: {metric: {value, low,
    high, n}}}`.

    predictions: predictions.parquet to write, of dev and test. finished: splits of an earlier try, which are reused;
    splits that finish now are added to it. answers: number of rows of test (else dev) whose generated answers are
    printed, and kept with the predictions.
    """
    splits = {"train": sample_train_for_eval(recipe, prepared.train), "dev": prepared.dev, "test": prepared.test}
    sources = list_source_files(recipe.data)
    files = {"dev": sources["dev"] or sources["train"], "test": sources["test"] or sources["train"]}
    result, tables = {}, []
    for split, examples in splits.items():
        if not examples:
            continue
        shown = answers if split == ("test" if prepared.test else "dev") else 0
        columns: dict[str, Any] = {}
        if finished is not None and (known := finished.read(split)) is not None:
            result[split], table = known
            console.say(f"{split}: evaluated before")
        else:
            columns |= {"row": format_places([one.where for one in examples]), "text": None}
            result[split] = evaluate_split(
                recipe, engine, tokenizer, examples, task=recipe.task, split=split, label_names=prepared.label_names,
                watch=watch, columns=columns,
            )  # fmt: skip
            table = None
            if predictions is not None and split != "train" and engine.is_main:
                rows = iter_source_rows(recipe.data, recipe.task, files[split], [], skipped=[])
                columns["text"] = describe_examples(recipe, examples, tokenizer, rows)
                table = build_predictions_table(split, columns)
            if finished is not None:
                finished.add(split, result[split], table)
            if shown and recipe.task.score != "generate":
                columns |= _sample_answers(recipe, engine, tokenizer, examples, shown, watch=watch, log=console.say)
                table = None if table is None else build_predictions_table(split, columns)
        console.say(f"{split}: {', '.join(format_metrics(result[split]))}")
        if "answer" in columns:
            for line in _format_answers(columns, examples, tokenizer, shown, split):
                console.say(line)
        tables += [] if table is None else [table]
    if predictions is not None and tables:
        write_tables(predictions, tables)
    return result


def evaluate_base_model(
    recipe: Recipe, engine: Engine, tokenizer: Any, prepared: PreparedData, folder: Path, *, watch: Watch
) -> dict[str, Any]:
    """Write cold.json and cold.parquet of a run: the first `eval.cold` rows of test (else dev), evaluated with the base
    model.

    engine: of the recipe, without a trained adapter. Collective: every rank of a mesh calls this.
    Returns the content of cold.json; empty without such rows.
    """
    split, examples = ("test", prepared.test) if prepared.test else ("dev", prepared.dev)
    columns: dict[str, Any] = {"row": format_places([one.where for one in examples])[: recipe.eval.cold]}
    if not (examples := examples[: recipe.eval.cold]):
        return {}
    metrics = evaluate_split(
        recipe, engine, tokenizer, examples, task=recipe.task, split=split, label_names=prepared.label_names,
        watch=watch, columns=columns,
    )  # fmt: skip
    if engine.is_main:
        write_tables(folder / COLD_ROWS, [build_predictions_table(split, columns)])
        write_json(folder / COLD, {split: metrics})
    return {split: metrics}


COLD, COLD_ROWS = "cold.json", "cold.parquet"


@dataclasses.dataclass(frozen=True)
class FinishedSplits:
    """Finished splits of an interrupted evaluation on one process."""

    folder: Path
    digest: str
    """Of the adapter and settings that the metrics belong to; splits with another digest are ignored."""

    @classmethod
    def open(cls, run: Path, recipe: Recipe) -> FinishedSplits:
        """Open the finished splits in the state of the run directory `run`, for its adapter and `recipe`."""
        task, settings = dataclasses.asdict(recipe.task), dataclasses.asdict(recipe.eval)
        digest = record_digest({"adapter": adapter_digest(run), "task": task, "eval": settings})
        return cls(run / "state" / "evaluated", digest)

    def read(self, split: str) -> tuple[dict[str, Any], Any] | None:
        """Return the metrics of a split and the table of its rows, None if that was not kept; None for an unfinished
        split."""
        import pyarrow.parquet as pq

        file, rows = self.folder / f"{split}.json", self.folder / f"{split}.parquet"
        record = read_json_object(file) if file.is_file() else {}
        if record.get("of") != self.digest:
            return None
        return record["figures"], pq.read_table(rows) if rows.is_file() else None

    def add(self, split: str, figures: dict[str, Any], table: Any = None) -> None:
        """Store the metrics of a split."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if table is not None:
            write_tables(self.folder / f"{split}.parquet", [table])
        write_json(self.folder / f"{split}.json", {"of": self.digest, "figures": figures})

    def delete(self) -> None:
        """Delete the finished splits, once the run's own files contain them."""
        shutil.rmtree(self.folder, ignore_errors=True)


MAX_TEXTS, _MAX_CHARACTERS, _MAX_ANSWER, _MAX_TOKENS = 2000, 600, 150, 64
"""Rows of a split whose text is stored with their predictions, and characters of each text."""


def format_places(places: Sequence[str]) -> list[str]:
    """Return each place, `path:line`, as file name and line, the same for a copy of the file; files of one name keep as
    many of their directories as tell them apart."""
    files = [place.rpartition(":")[0] for place in places]
    names, depth = {file: file.rpartition("/")[2] for file in files}, 1
    while len(names) > len(set(names.values())):
        counts, depth = Counter(names.values()), depth + 1
        names = {file: "/".join(file.split("/")[-depth:]) if counts[name] > 1 else name for file, name in names.items()}
    return [names[file] + place[len(file) :] for file, place in zip(files, places, strict=True)]


def describe_examples(
    recipe: Recipe, examples: Sequence[Example], tokenizer: Any, rows: Iterable[Row]
) -> list[str | None]:
    """Return the text of each of the first examples: what the model reads up to the answer, if there is one, and of
    whole rows the text in `rows`, which a tokenizer may lower."""
    texts: list[str | None] = [None] * len(examples)
    if recipe.task.traits.is_sequence_level:
        indices = {example.where: index for index, example in enumerate(examples[:MAX_TEXTS])}
        for row in rows:
            if (index := indices.pop(row.where, None)) is not None:
                texts[index] = shorten_text(" ".join(row.values[n] for n in ("text", "text2") if row.values.get(n)))
            if not indices:
                break
        return texts
    for index, example in enumerate(examples[:MAX_TEXTS]):
        ids, labels = example.input_ids, example.labels
        if example.prompt is not None:
            ids = example.prompt
        elif isinstance(labels, list) and example.decoder_ids is None and IGNORE in labels and example.words is None:
            answer = next((i for i, label in enumerate(labels) if label != IGNORE), len(ids))
            # a single token before the labels is the start token, not a prompt
            ids = ids[:answer] if answer > 1 else ids
        texts[index] = shorten_text(str(tokenizer.decode(ids[:_MAX_CHARACTERS], skip_special_tokens=True)))
    return texts


def shorten_text(text: str) -> str:
    """Return the text as one line of at most 600 characters."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"


def build_predictions_table(split: str, columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return the part of predictions.parquet for a split: `split, row, text`, and the columns of
    `flatshift.finetune.evaluate.evaluator.Evaluator.columns`, with one entry for each row of the split."""
    import pyarrow as pa

    return pa.table({"split": [split] * len(columns["row"]), **{k: pa.array(v) for k, v in columns.items()}})


def write_tables(path: Path, tables: Sequence[Any]) -> None:
    """Write Arrow tables one after another into one Parquet file, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with atomic_file(path) as temporary:
        # pyarrow takes a leading `~` of a relative path for the home directory
        pq.write_table(pa.concat_tables(tables, promote_options="default"), temporary.absolute())


def format_number(value: float | None) -> str:
    """Format a number with four digits; a dash for None."""
    return "–" if value is None else f"{value:.4g}"


def format_metrics(metrics: dict[str, Any]) -> list[str]:
    """Format each metric as a text: `accuracy 0.61 [0.57, 0.65]`."""
    lines = []
    for name, m in metrics.items():
        has_interval = m["low"] is not None and not find_metric(name).is_floor
        interval = f" [{format_number(m['low'])}, {format_number(m['high'])}]" if has_interval else ""
        lines.append(f"{name} {format_number(m['value'])}{interval}")
    return lines


_MAX_PERPLEXITY_ROWS = 500  # of each split; enough for an interval of a few per cent


def evaluate_perplexity(
    recipe: Recipe,
    adapter: Path | None,
    *,
    task: LanguageModel | MaskedLM | None = None,
    splits: tuple[str, ...] = ("dev", "test"),
    world: ProcessMesh | None = None,
    model: LoadedModel | None = None,
    watch: Watch | None = None,
) -> dict[str, dict[str, Any]]:
    """Compute perplexity and bits per byte of the dev and test texts as plain text, without labels; for an encoder the
    pseudo-perplexity of masked tokens.

    task: objective of the warm-up, by default that of `warm_up_task`. adapter: directory of a warm-up adapter, or None
    for the base model. world: the recipe's mesh, on which every rank calls this. model: a model that already holds the
    adapter; else it is loaded. watch: None shows no progress.
    Returns {split: {metric: {value, low, high, n}}}, at most 500 rows a split, the same ones for every seed.
    """
    task, watch = task or warm_up_task(recipe)[0], watch or Console(quiet=True).evaluating
    if task.pack:
        task = task.replace(pack=False)
    read = read_splits(recipe)
    rows = {name: split for name, split in (("dev", read.dev), ("test", read.test)) if split and name in splits}
    if not rows:
        return {}
    engine, tokenizer = model or load_model(recipe, task, None, world=world, adapter=adapter)
    result = {}
    for name, split in rows.items():
        subset = limit_rows(split, min(_MAX_PERPLEXITY_ROWS, len(split)), seed=derive_seed(0, "shift", name))
        encoded = encode(
            subset, task=task, tokenizer=tokenizer, max_length=recipe.train.max_length,
            truncation=recipe.train.truncation, bad_rows="skip",
        )  # fmt: skip
        if not encoded.examples:
            continue
        result[name] = evaluate_split(recipe, engine, tokenizer, encoded.examples, task=task, split=name, watch=watch)
    return result
