"""Content of evaluation.json: metrics of every subject, differences on the same bootstrap draws, and both by group."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flatshift.experiments.workflows.build import format_metrics
from flatshift.experiments.workflows.evaluation_target import EvaluationTarget
from flatshift.experiments.workflows.few_shot import FewShot, RankingResult, mcnemar
from flatshift.finetune.data.files import expand_files
from flatshift.finetune.data.rows import Row
from flatshift.finetune.evaluate.bootstrap import ResampledMetric, group_interval
from flatshift.finetune.evaluate.metrics import find_metric, metric_names, sort_for_headline
from flatshift.finetune.evaluate.text import find_language
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.seeds import derive_seed

_BY_LOSS = ("loss", "perplexity", "pseudo_perplexity", *metric_names("preferences"))
_FEW_ROWS = 10
"""Rows below which a group's metrics are called rough."""
_LOST = {"shots_dropped": "examples left out for length", "shots_missing": "examples missing", "rows_cut": "rows cut"}


@dataclass
class SubjectResults:
    """Results of all subjects on all splits, with the per-row metrics for further statistics."""

    intervals: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """subject → split → metric → interval."""
    figures: dict[tuple[str, str], dict[str, ResampledMetric]] = field(default_factory=dict)
    """Metrics of a subject and split."""
    rows: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Place of each example of a subject and split."""
    notes: list[str] = field(default_factory=list)
    ranked: dict[tuple[str, str], RankingResult] = field(default_factory=dict)
    """Ranked candidates of a subject and split, if a prompt was used."""
    generations: list[Mapping[str, Any]] = field(default_factory=list)
    """Rows of generations.jsonl."""
    predictions: list[tuple[str, Mapping[str, Sequence[Any]]]] = field(default_factory=list)
    """A split and the columns of predictions.parquet, for each subject in turn."""

    def align(self, name: str, base: str, split: str) -> dict[str, ResampledMetric]:
        """Return the metrics of `base`, with its rows numbered as those of `name`."""
        rows, base_rows = self.rows[name, split], self.rows[base, split]
        if base_rows == rows:
            return self.figures[base, split]
        indices = {place: i for i, place in enumerate(rows)}
        numbers = np.array([indices.get(place, -1) for place in base_rows])
        result = {}
        for metric, figure in self.figures[base, split].items():
            renumbered = numbers[figure.rows]
            shared = np.flatnonzero(renumbered >= 0)
            result[metric] = figure.renumbered(renumbered, shared[np.argsort(renumbered[shared])])
        return result


def build_document(
    subjects: Sequence[EvaluationTarget],
    results: SubjectResults,
    splits: Mapping[str, Sequence[Row]],
    data: Sequence[str],
    *,
    group_by: str | None,
    few_shot: FewShot | None,
    trained: Sequence[str],
) -> dict[str, Any]:
    """Return the content of evaluation.json; `splits`: the rows that all subjects were evaluated on."""
    values = {
        split: [str(row.values[group_by]) for row in rows] if group_by else [""] for split, rows in splits.items()
    }
    groups = sorted({value for column in values.values() for value in column} if group_by else [])
    references = _find_references(subjects)
    tokenizers = {s.name: open_backbone(s.recipe.backbone).text_digests.get("tokenizer.json") for s in subjects}
    tasks = {s.name: s.recipe.task for s in subjects}
    own = {n: t.for_evaluation() for n, t in tasks.items() if t.traits.is_answer_level or t.traits.masks_tokens}
    losses = {n: (tokenizers[n], t.name, t.squares, own.get(n)) for n, t in tasks.items()}
    pairs = {f"{name} − {base}": (name, base) for name, base in references.items()}

    def average(
        name: str, split: str, chosen: Sequence[Sequence[str] | None], base: str | None = None
    ) -> dict[str, Any]:
        """Return every metric over the groups together (one list; None: all rows), or its mean over several lists."""
        places = results.rows[name, split]
        columns = (
            {row.where: value for row, value in zip(splits[split], values[split], strict=True)} if group_by else {}
        )
        indices = [
            np.array([i for i, place in enumerate(places) if members is None or columns[place] in members], np.int64)
            for members in chosen
        ]
        base_figures = None if base is None else results.align(name, base, split)
        incomparable = {"fertility", *(_BY_LOSS if base is not None and losses[name] != losses[base] else ())}
        if base is not None and tasks[name].name == tasks[base].name:  # the order of two rewards depends on no beta
            incomparable.discard("preference_accuracy")
        config = subjects[0].recipe.eval
        seed = derive_seed(subjects[0].recipe.train.seed, "bootstrap", split)
        averages = {}
        for metric, figure in results.figures[name, split].items():
            if len(chosen) > 1 and "perplexity" in metric:
                continue  # a mean of exponentials is dominated by the worst group
            reference = None
            if base_figures is not None:
                if find_metric(metric).is_floor or metric in incomparable or metric not in base_figures:
                    continue
                reference = base_figures[metric]
            interval = group_interval(
                figure, indices, reference, resamples=config.bootstrap, confidence=config.confidence, seed=seed
            )
            if interval is not None:
                averages[metric] = interval
        return averages

    document: dict[str, Any] = {
        "subjects": [_build_subject_record(subject, references.get(subject.name)) for subject in subjects],
        "data": [str(path) for path in expand_files(data)] if data else None,
        "rows": {split: len(rows) for split, rows in splits.items()},
        "figures": results.intervals,
        "differences": {
            label: {split: average(name, split, [None], base) for split in splits}
            for label, (name, base) in pairs.items()
        },
        "notes": results.notes,
    }
    if few_shot is not None:
        document["few_shot"] = _build_few_shot_record(few_shot, results, list(splits), references)
    elif any(tokenizers[name] != tokenizers[base] for name, base in references.items()):
        document["notes"].append(
            "Tokenizers differ, so figures per token are not comparable between subjects: compare by byte, character "
            "or word."
        )
    if group_by:
        counts = {split: {group: column.count(group) for group in groups} for split, column in values.items()}
        document["notes"] += [note for split, own in counts.items() for note in _note_small_groups(own, split)]
        names, families = _describe_languages(groups)
        document["group_by"] = {
            "column": group_by,
            "rows": {group: sum(own[group] for own in counts.values()) for group in groups},
            "rows_by_split": counts,
            "names": names,
            "families": families,
            "trained": list(trained),
            **_average_groups(
                average, [s.name for s in subjects], pairs, list(splits), _group_sets(groups, families, trained)
            ),
        }
    return json.loads(json.dumps(document))


def _average_groups(
    average: Callable[..., dict[str, Any]],
    names: Sequence[str],
    pairs: Mapping[str, tuple[str, str]],
    splits: Sequence[str],
    sets: Mapping[str, list[str]],
) -> dict[str, Any]:
    groups = sets["all"]
    return {
        "figures": {
            name: {split: {g: average(name, split, [[g]]) for g in groups} for split in splits} for name in names
        },
        "differences": {
            label: {split: {g: average(name, split, [[g]], base) for g in groups} for split in splits}
            for label, (name, base) in pairs.items()
        },
        "macro": {name: {split: average(name, split, [[g] for g in groups]) for split in splits} for name in names},
        "macro_differences": {
            label: {
                split: {kind: average(name, split, [[g] for g in members], base) for kind, members in sets.items()}
                for split in splits
            }
            for label, (name, base) in pairs.items()
        },
    }


def _describe_languages(groups: Sequence[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the name of each group, and the groups of each family; both empty unless all groups are languages."""
    described = {group: language for group in groups if (language := find_language(group))}
    if len(described) < len(groups):
        return {}, {}
    families: dict[str, list[str]] = {}
    for group, (_, family) in described.items():
        families.setdefault(family, []).append(group)
    return {group: name for group, (name, _) in described.items()}, families


def _build_few_shot_record(
    few_shot: FewShot, results: SubjectResults, splits: Sequence[str], references: Mapping[str, str]
) -> dict[str, Any]:
    subjects: dict[str, dict[str, Any]] = {}
    for (name, split), ranked in results.ranked.items():
        subjects.setdefault(name, {})[split] = {
            "by_seed": ranked.by_seed, "by_score": ranked.others, "shots_dropped": ranked.dropped,
            "shots_missing": ranked.missing, "rows_cut": ranked.cut,
        }  # fmt: skip
    return {
        "prompt": few_shot.name,
        "text": few_shot.prompt.text,
        "shots": few_shot.shots,
        "from": list(few_shot.source),
        "seeds": list(few_shot.seeds if few_shot.shots else few_shot.seeds[:1]),
        "score": few_shot.score,
        "subjects": subjects,
        "mcnemar": {
            f"{name} − {base}": {
                split: mcnemar(results.ranked[name, split].right[0], results.ranked[base, split].right[0])
                | {"seed": few_shot.seeds[0]}
                for split in splits
            }
            for name, base in references.items()
        },
    }


def _group_sets(
    groups: Sequence[str], families: Mapping[str, list[str]], trained: Sequence[str]
) -> dict[str, list[str]]:
    sets = {"all": list(groups)}
    if trained:
        sets["trained on"] = [g for g in groups if g in trained]
        if others := [g for g in groups if g not in trained]:
            sets["not trained on"] = others
    return sets | {f"family: {name}": members for name, members in families.items() if name}


def _note_small_groups(counts: Mapping[str, int], split: str) -> list[str]:
    if not (small := [group for group, count in counts.items() if count < _FEW_ROWS]):
        return []
    return [
        f"{len(small)} of {len(counts)} groups have fewer than {_FEW_ROWS} rows of {split} (first {small[0]!r}): their "
        "figures are rough, and of one row there is no interval."
    ]


def _build_subject_record(subject: EvaluationTarget, reference: str | None) -> dict[str, Any]:
    recipe, kind = subject.recipe, "backbone" if subject.run is None else "run"
    return {
        "name": subject.name, "kind": kind, "backbone": recipe.backbone, "task": recipe.task.kind,
        "precision": recipe.train.precision, "compared_with": reference,
    }  # fmt: skip


def _find_references(subjects: Sequence[EvaluationTarget]) -> dict[str, str]:
    """Return the reference of each subject: for a run the base model that it changes, else the first run; for a base
    model the first base model."""
    bases = [subject for subject in subjects if subject.run is None]
    own = {subject.recipe.backbone: subject.name for subject in reversed(bases)}
    runs = [subject for subject in subjects if subject.run is not None]
    references = {}
    for subject in subjects:
        base = bases[0].name if subject.run is None else own.get(subject.recipe.backbone, runs[0].name)
        if base != subject.name:
            references[subject.name] = base
    return references


def flatten_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return all metrics in the form of eval.json, {split: {metric: …}}, with the subject and the group in the name of
    the split."""
    flat: dict[str, Any] = {}
    for name, splits in {**document["figures"], **document["differences"]}.items():
        flat |= {f"{name} {split}": metrics for split, metrics in splits.items()}
    if grouped := document.get("group_by"):
        for name, splits in {**grouped["figures"], **grouped["differences"]}.items():
            for split, groups in splits.items():
                flat |= {f"{name} {split} {grouped['column']}={group}": m for group, m in groups.items()}
    return flat


def format_document(document: Mapping[str, Any]) -> str:
    """Format every subject's metrics, the differences, and each group's headline as text."""
    lines = []
    for name, splits in {**document["figures"], **document["differences"]}.items():
        for split, metrics in splits.items():
            lines += [name, *(f"  {split:5} {line}" for line in format_metrics(metrics))]
    if grouped := document.get("group_by"):
        for name, splits in {**grouped["figures"], **grouped["differences"]}.items():
            for split, groups in splits.items():
                lines.append(f"{name}  {split} by {grouped['column']}")
                for group, metrics in groups.items():
                    label = f"{group} {grouped['names'].get(group, '')}".strip()
                    count = grouped["rows_by_split"][split][group]
                    lines.append(f"  {label:24} {count:6,} rows  {format_headline(metrics)}")
    if few_shot := document.get("few_shot"):
        shots = f"{few_shot['shots']} shots"
        if few_shot["shots"]:
            shots += f", seeds {', '.join(map(str, few_shot['seeds']))}"
        lines.append(f"prompt {few_shot['prompt']}, {shots}, ranked by {few_shot['score']}")
        for name, parts in few_shot["subjects"].items():
            for split, record in parts.items():
                scores = ", ".join(f"{score} {value:.4g}" for score, value in record["by_score"].items())
                lost = [f"; {record[key]:,} {what}" for key, what in _LOST.items() if record[key]]
                lines.append(f"  {name} {split}: accuracy by score: {scores}{''.join(lost)}")
        for name, tests in few_shot["mcnemar"].items():
            for split, test in tests.items():
                only = f"{test['only_ours']} to {test['only_theirs']}"
                lines.append(f"  {name} {split}: McNemar p {test['p']:.3g} (seed {test['seed']}; right alone: {only})")
    return "\n".join([*lines, *(f"note: {note}" for note in document["notes"])])


def format_headline(metrics: Mapping[str, Any]) -> str:
    """Format the metric of a group that is comparable with that of others, as `format_metrics`."""
    ordered = ["bits_per_byte", *sort_for_headline(metrics)]  # of text bits per byte
    name = next((name for name in ordered if name in metrics), None)
    return format_metrics({name: metrics[name]})[0] if name else "–"
