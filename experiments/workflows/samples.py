"""Evaluation of what models write: texts generated after prompts (diversity, passing programs, toxicity), and probes of
association and co-occurrence with word lists about groups.

    flatshift eval runs/first flatshift-5m --data prompts.jsonl --samples 25 --top-p 0.9 --out written
    flatshift eval runs/first flatshift-5m --probe occupations --samples 25 --out probed

Finished texts are kept in `.NAME.written.jsonl` next to the new directory, so that the same command does not generate
them again; in the end they are its generations.jsonl. Association compares the likelihoods of paired sentences under
each model. With samples, each model continues the probe's prompts, and co-occurrences are counted in its texts; with
`data` also in those texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.data.splits import read_label_record
from flatshift.experiments.recipe.build import build_settings
from flatshift.experiments.recipe.schema import short_hash
from flatshift.experiments.recipe.tree import Branch, parse_file
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows import run_parts
from flatshift.experiments.workflows.evaluation_target import AdapterSwitcher, EvaluationTarget, resolve_subjects
from flatshift.experiments.workflows.predict import Predictor
from flatshift.finetune.atomic import atomic_directory, write_json
from flatshift.finetune.compute.numerics import cpu_threads, evaluation_mode
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.encoding import decode_answer, get_end_token
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate import probes
from flatshift.finetune.evaluate.bootstrap import ResampledMetric, ratio_statistic
from flatshift.finetune.evaluate.generation import Decoding, continue_prompts
from flatshift.finetune.evaluate.metrics import metric_functions
from flatshift.finetune.evaluate.sandbox import check_sandbox_available, run_programs
from flatshift.finetune.evaluate.text import score_texts
from flatshift.finetune.evaluate.text_metrics import pass_at_k
from flatshift.finetune.figures import format_interval
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of the generated texts and of their evaluation."""

    samples: int
    """Texts per prompt."""
    temperature: float = 1.0
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    max_new_tokens: int = 20
    seed: int = 0
    """Seed of the draws, which do not depend on the batch size."""
    programs: bool = False
    """Run each text as a program in a sandbox, after its prompt, with the row's `test`."""
    unsafe_programs: bool = False
    """Run them even where no sandbox can be had."""
    pass_at: tuple[int, ...] = (1,)
    """Values of k for pass@k."""
    toxicity: str | None = None
    """Run directory of a classifier whose class `toxic` scores the texts."""
    toxic: str = "toxic"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"--samples: {self.samples} is too small; give at least 1")
        if self.programs and max(self.pass_at, default=0) > self.samples:
            raise UserError(f"--pass-at {max(self.pass_at)} takes as many --samples at least; there are {self.samples}")
        self.decoding()

    def decoding(self) -> Decoding:
        """Return the decoding settings. Raises UserError for settings that contradict each other."""
        return Decoding(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )


_EVALUATION_SETTINGS = "programs", "unsafe_programs", "pass_at", "toxicity", "toxic"
"""Settings that do not change the texts."""


@dataclass(frozen=True)
class SavedSamples:
    """Texts that an interrupted command has already generated; `path` None: nothing is kept."""

    path: Path | None

    @classmethod
    def beside(cls, out: Path | None) -> SavedSamples:
        """Open the texts saved next to the future directory `out`."""
        return cls(None if out is None else out.with_name(f".{out.name}.written.jsonl"))

    def read(self, key: str) -> dict[int, str]:
        """Return the texts of `key` by index; a truncated last line is skipped."""
        texts: dict[int, str] = {}
        if self.path is not None and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").split("\n"):
                try:
                    record = json.loads(line)
                    if record["key"] == key:
                        texts[record["place"]] = record["text"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    continue
        return texts

    def add(self, key: str, index: int, text: str) -> None:
        """Append one text."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"key": key, "place": index, "text": text}, ensure_ascii=False) + "\n")

    def delete(self) -> None:
        """Delete the file, once the texts are in the directory."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def write_samples(
    name: str,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    task: Task,
    sampling: Sampling,
    saved: SavedSamples,
    inference: EvalBatching,
    *,
    digest: str,
    console: Console | None = None,
) -> list[list[str]]:
    """Generate `sampling.samples` texts after each row's prompt, except those already in `saved`.

    name, digest: of the model and its weights, as the key of saved texts. console: shows the progress.
    """
    run_parts.check_generative(task)
    if task.traits.encoder_decoder:
        raise UserError(f"{name}: --samples continues prompts, and task.kind: {task.kind} has an encoder; use generate")
    questions, _ = task.input_format.build_prompts(rows, tokenizer)
    if len(questions) != len(rows):
        raise UserError(f"{name}: {len(rows) - len(questions)} rows have no prompt by its template; leave them out")
    count = sampling.samples
    settings = {k: v for k, v in asdict(sampling).items() if k not in _EVALUATION_SETTINGS}
    key = short_hash({"of": [name, digest], "settings": settings, "prompts": [question.ids for question in questions]})
    texts = saved.read(key)
    missing = [index for index in range(len(rows) * count) if index not in texts]
    prompts, ends = [questions[index // count].ids for index in missing], {question.stop for question in questions}
    end = [token for token in (*ends, get_end_token(tokenizer)) if token is not None]
    options: dict[str, Any] = {"numbers": missing, "names": [rows[index // count].where for index in missing]}
    with (console or Console(quiet=True)).task("writing", len(rows) * count, "texts") as bar:
        answers = continue_prompts(model, prompts, sampling.decoding(), inference, end=end, **options)
        for position, answer in answers if missing else ():
            index, text = missing[position], decode_answer(tokenizer, answer.ids)
            texts[index] = text
            saved.add(key, index, text)
            bar(len(texts))
    return [[texts[i * count + s] for s in range(count)] for i in range(len(rows))]


def check_sampling_rows(rows: Sequence[Row], sampling: Sampling) -> None:
    """Raise UserError, before anything is generated, for a missing sandbox, rows without tests, or a classifier without
    the class."""
    if sampling.programs:
        check_sandbox_available(unsafe=sampling.unsafe_programs)
        for row in rows:
            _get_test(row)
    if sampling.toxicity is not None:
        _open_classifier(sampling)


def compute_sample_metrics(
    rows: Sequence[Row], texts: Sequence[Sequence[str]], sampling: Sampling
) -> dict[str, ResampledMetric]:
    """Compute the requested metrics of the texts: means over the prompts that have a value."""
    values: dict[str, list[float | None]] = {
        name: [function(samples) for samples in texts] for name, function in metric_functions("samples").items()
    }
    if sampling.programs:
        contained = check_sandbox_available(unsafe=sampling.unsafe_programs)
        programs = []
        for row, written in zip(rows, texts, strict=True):
            test, entry = _get_test(row), row.record.get("entry_point")
            call = f"\ncheck({entry})\n" if isinstance(entry, str) and entry.isidentifier() else "\n"
            programs += [(f"{row.values['text']}{text}\n", f"{test}{call}") for text in written]
        outcomes = iter(run_programs(programs, workers=2, contained=contained))
        passed = [sum(next(outcomes) == "passed" for _ in written) for written in texts]
        for k in sampling.pass_at:
            values[f"pass_at_{k}"] = [pass_at_k(sampling.samples, count, k) for count in passed]
    if sampling.toxicity is not None:
        scores = _score_toxicity(sampling, texts)
        values |= {
            name: [function(samples) for samples in scores] for name, function in metric_functions("toxicity").items()
        }
    metrics = {}
    for name, column in values.items():
        present = {i: value for i, value in enumerate(column) if value is not None}
        if present:
            sums = np.array(list(present.values())), np.ones(len(present))
            metrics[name] = ResampledMetric.over(sums, ratio_statistic(), list(present))
    return metrics


def _get_test(row: Row) -> str:
    test = row.record.get("test")
    if "text" not in row.values:
        raise UserError(f"{row.where}: --programs runs a text and what continues it, and this run reads no `text`")
    if not isinstance(test, str) or not test.strip():
        raise UserError(f"{row.where}: no column 'test' to run with a program; leave --programs out, or add it")
    return test


def _open_classifier(sampling: Sampling) -> Path:
    path = Path(str(sampling.toxicity))
    recipe = run_parts.to_single_process(run_parts.read_finished_recipe(path))
    names, _ = read_label_record(recipe, path)
    if not recipe.task.one_class or names is None or sampling.toxic not in names:
        known = "no classes" if names is None else f"the classes {', '.join(names)}"
        raise UserError(f"--toxicity: {path} has {known}, none of them {sampling.toxic!r}; name it with --toxic-label")
    if recipe.task.squares:
        raise UserError(f"--toxicity: {path} gives no probabilities (task.loss: squared); train one without that loss")
    return path


def _score_toxicity(sampling: Sampling, texts: Sequence[Sequence[str]]) -> list[list[float]]:
    """Return the classifier's probability of its toxic class for every text; 0 for an empty one."""
    predictions = Predictor(_open_classifier(sampling))([text for each in texts for text in each if text.strip()])
    scores = (prediction[f"p_{sampling.toxic}"] for prediction in predictions)
    return [[next(scores) if text.strip() else 0.0 for text in samples] for samples in texts]


def build_generation_records(name: str, rows: Sequence[Row], texts: Sequence[Sequence[str]]) -> list[Mapping[str, Any]]:
    """Return the rows of generations.jsonl."""
    return [
        {"by": name, "where": row.where, "prompt": row.values.get("text", row.record), "texts": list(written)}
        for row, written in zip(rows, texts, strict=True)
    ]


def write_generations(folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write generations.jsonl into `folder`, if there are any records."""
    if records:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        (folder / "generations.jsonl").write_text("".join(lines), encoding="utf-8")


DOCUMENT = "probe.json"
NOTES = (
    "An association is what the model says of these words in these templates, not what it does to people; none found "
    "is no proof that there is none.",
    "A group's words differ in frequency, which moves all sets alike: read the difference between sets.",
    "Intervals are over the given words or texts; they do not cover the choice of the lists.",
)


def read_probe(name: str) -> probes.WordListProbe:
    """Read a probe from a file, or a shipped one by name. Raises UserError with file:line."""
    path = probes.shipped_probes().get(name, Path(name))
    if not path.is_file():
        raise UserError(
            f"--probe: {name} is no file and none of the shipped probes ({', '.join(probes.shipped_probes())})"
        )
    probe: probes.WordListProbe = build_settings(probes.WordListProbe, parse_file(path))
    return probe


def probe_models(
    names: Sequence[str],
    probe: probes.WordListProbe,
    *,
    sampling: Sampling | None = None,
    data: Sequence[str] = (),
    overrides: Sequence[Branch] = (),
    out: Path | None = None,
    command: str = "",
    quiet: bool = False,
) -> dict[str, Any]:
    """Apply a probe to runs and base models.

    sampling: continue the probe's prompts with these settings; texts kept by an interrupted command are not generated
    again. data: texts in which co-occurrence is counted too. out: a new directory for probe.json and generations.jsonl,
    written completely or not at all.
    Returns the content of probe.json: `{models: {name: {association, cooccurrence}}, data, notes, …}`.
    Raises UserError for a model that is no causal language model, and probes without the lists that are needed.
    """
    if not probe.templates and sampling is None and not data:
        raise UserError("this probe has no templates; give --samples N to continue its prompts, or --data FILE")
    if sampling is not None and not probe.prompts:
        raise UserError("this probe has no prompts for --samples to continue; add `prompts` with {group}")
    with run_parts.lock_new_output(out):
        console = Console(quiet=quiet)
        document: dict[str, Any] = {"models": {}, "notes": list(NOTES), "review": probe.review, "command": command}
        if data:
            rows = require_rows(
                read_rows(data, columns=Columns(id="\0"), required=("text",)), files=data, purpose="text"
            )
            document["data"] = probes.measure_cooccurrence(probe, [row.values["text"] for row in rows])
        saved = SavedSamples.beside(out)
        models, generations = AdapterSwitcher(), []
        for subject in resolve_subjects(names, overrides, True, console):
            console.say(f"asking {subject.name}")
            with cpu_threads(subject.recipe.train.threads):
                results, records = _probe_model(subject, probe, sampling, saved, models, console)
            document["models"][subject.name] = results
            generations += records
        if out is not None:
            with atomic_directory(out) as temporary:
                write_json(temporary / DOCUMENT, document)
                write_generations(temporary, generations)
            saved.delete()
    return document


def _probe_model(
    subject: EvaluationTarget,
    probe: probes.WordListProbe,
    sampling: Sampling | None,
    saved: SavedSamples,
    models: AdapterSwitcher,
    console: Console,
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    recipe, task = subject.recipe, subject.recipe.task
    if not task.traits.reads_documents or not task.traits.causal:
        raise UserError(f"{subject.name}: a probe asks a language model of whole texts, and task.kind is {task.kind}")
    run = subject.run or subject.template
    model = models.load(subject, read_label_record(recipe, run)[0] if run else None)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    device = next(model.parameters()).device
    inference = EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=device)
    results: dict[str, Any] = {}
    if probe.templates:
        sentences, keys = probes.fill_templates(probe)
        with evaluation_mode(model):
            counts = score_texts(
                model, tokenizer, sentences, inference, task=task, window=recipe.train.max_length, overlap=1,
                locations=[f"sentence {i}" for i in range(len(sentences))],
            )  # fmt: skip
        results["association"] = probes.measure_association(probe, keys, counts.nats)
    if sampling is None:
        return results, []
    words = [word for group in probe.groups.values() for word in group]
    filled = [prompt.replace("{group}", word) for prompt in probe.prompts for word in words]
    rows = [Row({"text": text[:1].upper() + text[1:]}, str(i), f"prompt {i}") for i, text in enumerate(filled)]
    texts = write_samples(
        f"{subject.name} probe", model, tokenizer, rows, task, sampling, saved, inference, digest=subject.digest,
        console=console,
    )  # fmt: skip
    whole = [row.values["text"] + text for row, samples in zip(rows, texts, strict=True) for text in samples]
    results["cooccurrence"] = probes.measure_cooccurrence(probe, whole)
    return results, build_generation_records(subject.name, rows, texts)


def format_document(document: Mapping[str, Any]) -> str:
    """Format one line per result."""
    lines = []
    for name, results in document["models"].items():
        lines.append(name)
        for group, record in results.get("association", {}).items():
            base = next(iter(record["sets"]))
            labels = dict(record["sets"])
            labels |= {f"{s} less {base}": figure for s, figure in record["between"].items()}
            lines += [f"  {group}, {s}: {format_interval(figure, '+.3f')} nats" for s, figure in labels.items()]
        lines += _format_cooccurrence(results.get("cooccurrence", {}))
    if "data" in document:
        lines += ["data", *_format_cooccurrence(document["data"])]
    return "\n".join([*lines, *(f"note: {note}" for note in document["notes"])])


def _format_cooccurrence(groups: Mapping[str, Any]) -> list[str]:
    return [
        f"  near {group}, {name}: {figure['count']} of {record['near']:,} words, {format_interval(figure, '.4f')}"
        for group, record in groups.items()
        for name, figure in record["sets"].items()
    ]
