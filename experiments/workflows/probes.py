"""Probes of association and co-occurrence: the statements of models about groups, measured with word lists.

    flatshift eval runs/first flatshift-5m --probe occupations --samples 25 --out probed

Association compares the likelihoods of paired sentences under each model. With samples, each model continues the
probe's prompts, and co-occurrences are counted in its texts; with `data` also in those texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatshift.experiments.data.splits import read_label_record
from flatshift.experiments.recipe.build import build_settings
from flatshift.experiments.recipe.tree import Branch, parse_file
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.evaluation_target import AdapterSwitcher, EvaluationTarget, resolve_subjects
from flatshift.experiments.workflows.run_parts import lock_new_output
from flatshift.experiments.workflows.samples import (
    Sampling,
    SavedSamples,
    build_generation_records,
    write_generations,
    write_samples,
)
from flatshift.finetune.atomic import atomic_directory, write_json
from flatshift.finetune.compute.numerics import cpu_threads, evaluation_mode
from flatshift.finetune.config import Columns
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.probes import (
    WordListProbe,
    fill_templates,
    measure_association,
    measure_cooccurrence,
    shipped_probes,
)
from flatshift.finetune.evaluate.text import score_texts
from flatshift.finetune.figures import format_interval
from flatshift.finetune.models.backbone import open_backbone

DOCUMENT = "probe.json"
NOTES = (
    "An association is what the model says of these words in these templates, not what it does to people; none found "
    "is no proof that there is none.",
    "A group's words differ in frequency, which moves all sets alike: read the difference between sets.",
    "Intervals are over the given words or texts; they do not cover the choice of the lists.",
)


def read_probe(name: str) -> WordListProbe:
    """Read a probe from a file, or a shipped one by name. Raises UserError with file:line."""
    path = shipped_probes().get(name, Path(name))
    if not path.is_file():
        raise UserError(f"--probe: {name} is no file and none of the shipped probes ({', '.join(shipped_probes())})")
    probe: WordListProbe = build_settings(WordListProbe, parse_file(path))
    return probe


def probe_models(
    names: Sequence[str],
    probe: WordListProbe,
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
    with lock_new_output(out):
        console = Console(quiet=quiet)
        document: dict[str, Any] = {"models": {}, "notes": list(NOTES), "review": probe.review, "command": command}
        if data:
            rows = require_rows(read_rows(data, columns=Columns(id="\0"), required=("text",)), files=data, what="text")
            document["data"] = measure_cooccurrence(probe, [row.values["text"] for row in rows])
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
    probe: WordListProbe,
    sampling: Sampling | None,
    saved: SavedSamples,
    models: AdapterSwitcher,
    console: Console,
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    recipe, task = subject.recipe, subject.recipe.task
    if not task.documents or not task.causal:
        raise UserError(f"{subject.name}: a probe asks a language model of whole texts, and task.kind is {task.kind}")
    run = subject.run or subject.template
    model = models.load(subject, read_label_record(recipe, run)[0] if run else None)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    device = next(model.parameters()).device
    inference = EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=device)
    results: dict[str, Any] = {}
    if probe.templates:
        sentences = fill_templates(probe)
        with evaluation_mode(model):
            counts = score_texts(
                model, tokenizer, sentences.texts, inference, task=task, window=recipe.train.max_length, overlap=1,
                where=[f"sentence {i}" for i in range(len(sentences.texts))],
            )  # fmt: skip
        results["association"] = measure_association(probe, sentences, counts.nats)
    if sampling is None:
        return results, []
    filled = [
        text[:1].upper() + text[1:]
        for prompt in probe.prompts
        for words in probe.groups.values()
        for text in (prompt.replace("{group}", word) for word in words)
    ]
    rows = [Row({"text": text}, str(i), f"prompt {i}") for i, text in enumerate(filled)]
    texts = write_samples(
        f"{subject.name} probe", model, tokenizer, rows, task, sampling, saved, inference, console=console
    )
    whole = [row.values["text"] + text for row, samples in zip(rows, texts, strict=True) for text in samples]
    results["cooccurrence"] = measure_cooccurrence(probe, whole)
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
