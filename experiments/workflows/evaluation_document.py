"""Content of evaluation.json: metrics of every subject, differences on the same bootstrap draws, and both by group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flatshift.experiments.workflows.build import format_metrics
from flatshift.experiments.workflows.evaluation_target import EvaluationTarget
from flatshift.experiments.workflows.few_shot import FewShot, RankingResult, mcnemar
from flatshift.finetune.data.files import expand_files
from flatshift.finetune.data.rows import Row
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.bootstrap import ResampledMetric, group_interval
from flatshift.finetune.evaluate.metrics import find_metric
from flatshift.finetune.seeds import derive_seed

_FEW = 10
"""Rows below which a group's metrics are called rough."""


@dataclass
class SubjectResults:
    """Results of all subjects on all splits, with the per-row metrics for further statistics."""

    intervals: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """subject → split → metric → interval."""
    figures: dict[tuple[str, str], dict[str, ResampledMetric]] = field(default_factory=dict)
    rows: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Place of each example of a subject and split."""
    notes: list[str] = field(default_factory=list)
    ranked: dict[tuple[str, str], RankingResult] = field(default_factory=dict)
    """Ranked candidates of a subject and split, if a prompt was used."""
    written: list[Mapping[str, Any]] = field(default_factory=list)
    """Rows of generations.jsonl."""
    said: list[tuple[str, Mapping[str, Sequence[Any]]]] = field(default_factory=list)
    """A split and the columns of predictions.parquet, for each subject in turn."""


def build_document(
    subjects: Sequence[EvaluationTarget],
    found: SubjectResults,
    splits: Mapping[str, Sequence[Row]],
    data: Sequence[str],
    *,
    group_by: str | None,
    few_shot: FewShot | None,
    trained: Sequence[str],
) -> dict[str, Any]:
    """Return the content of evaluation.json; `splits`: the rows that all subjects were evaluated on.

    Raises UserError for a value in `trained` that no row has.
    """
    from flatshift.finetune.evaluate.text import find_language
    from flatshift.finetune.models.backbone import open_backbone

    config = subjects[0].recipe.eval
    values = {
        split: [str(row.values[group_by]) for row in rows] if group_by else [""] for split, rows in splits.items()
    }
    groups = sorted({value for part in values.values() for value in part} if group_by else [])
    if unknown := sorted(set(trained) - set(groups)):
        raise UserError(f"--trained: no row has {group_by or 'a --group-by column'} {unknown[0]!r}")
    described = [find_language(group) for group in groups]
    languages = all(described) and bool(groups)

    def places(subject: str, split: str, chosen: Sequence[str] | None) -> np.ndarray:
        """Return the indices of the split's rows in the chosen groups, in the order of the subject's metrics."""
        where = found.rows[subject, split]
        if chosen is None:
            return np.arange(len(where))
        of = {row.where: value for row, value in zip(splits[split], values[split], strict=True)}
        return np.array([i for i, place in enumerate(where) if of[place] in set(chosen)], dtype=np.int64)

    def draw(split: str) -> dict[str, Any]:
        seed = derive_seed(subjects[0].recipe.train.seed, "bootstrap", split)
        return {"resamples": config.bootstrap, "confidence": config.confidence, "seed": seed}

    def of_groups(name: str, split: str, chosen: Sequence[Sequence[str]], base: str | None = None) -> dict[str, Any]:
        """Return every metric over the groups together (one list), or its mean over several lists."""
        mine = found.figures[name, split]
        theirs = None if base is None else _align_rows(found, name, base, split)
        result = {}
        for metric, figure in mine.items():
            if base is not None and (find_metric(metric).is_floor or metric in (*apart[name, base], "fertility")):
                continue
            if len(chosen) > 1 and "perplexity" in metric:
                continue  # a mean of exponentials is dominated by the worst group
            if theirs is not None and metric not in theirs:
                continue
            parts = [places(name, split, one) for one in chosen]
            interval = group_interval(figure, parts, None if theirs is None else theirs[metric], **draw(split))
            if interval is not None:
                result[metric] = interval
        return result

    tokenizers = {s.name: open_backbone(s.recipe.backbone).text_digests.get("tokenizer.json") for s in subjects}
    per_token = {"loss", "perplexity", "fertility"}
    references = _find_references(subjects)
    apart = {
        (name, base): per_token if tokenizers[name] != tokenizers[base] else set() for name, base in references.items()
    }
    differences = {
        f"{name} − {base}": {split: of_groups(name, split, [None], base) for split in splits}  # type: ignore[list-item]
        for name, base in references.items()
    }
    document: dict[str, Any] = {
        "subjects": [_build_subject_record(subject, references.get(subject.name)) for subject in subjects],
        "data": [str(path) for path in expand_files(data)] if data else None,
        "rows": {split: len(rows) for split, rows in splits.items()},
        "figures": found.intervals,
        "differences": differences,
        "notes": found.notes,
    }
    if few_shot is not None:
        document["few_shot"] = _build_few_shot_record(few_shot, found, list(splits), references)
    if any(apart.values()) and few_shot is None:
        document["notes"].append(
            "Tokenizers differ, so figures per token are not comparable between subjects: compare by byte, character "
            "or word."
        )
    if group_by:
        families: dict[str, list[str]] = {}
        for group, told in zip(groups, described, strict=True):
            families.setdefault(told[1] if told and languages else "", []).append(group)
        counts = {group: sum(part.count(group) for part in values.values()) for group in groups}
        if few := [group for group in groups if counts[group] < _FEW]:
            document["notes"].append(
                f"{len(few)} of {len(groups)} groups have fewer than {_FEW} rows (first {few[0]!r}): their figures are "
                "rough, and of one row there is no interval."
            )
        document["group_by"] = {
            "column": group_by,
            "rows": counts,
            "names": {g: told[0] for g, told in zip(groups, described, strict=True) if told and languages},
            "families": families if languages else {},
            "trained": list(trained),
            "figures": {
                s.name: {split: {g: of_groups(s.name, split, [[g]]) for g in groups} for split in splits}
                for s in subjects
            },
            "differences": {
                f"{name} − {base}": {
                    split: {g: of_groups(name, split, [[g]], base) for g in groups} for split in splits
                }
                for name, base in references.items()
            },
            "macro": {
                s.name: {split: of_groups(s.name, split, [[g] for g in groups]) for split in splits} for s in subjects
            },
            "macro_differences": {
                f"{name} − {base}": {
                    split: {
                        kind: of_groups(name, split, [[g] for g in members], base)
                        for kind, members in _group_sets(groups, families if languages else {}, trained).items()
                    }
                    for split in splits
                }
                for name, base in references.items()
            },
        }
    return json.loads(json.dumps(document))


def _build_few_shot_record(
    few_shot: FewShot, found: SubjectResults, splits: Sequence[str], references: Mapping[str, str]
) -> dict[str, Any]:
    """Return the few-shot settings, each subject's accuracy by seed and score, and McNemar's test of the first seed's
    answers."""

    def about(name: str, split: str) -> dict[str, Any]:
        ranked = found.ranked[name, split]
        return {
            "by_seed": ranked.by_seed,
            "by_score": ranked.others,
            "shots_dropped": ranked.dropped,
            "rows_cut": ranked.cut,
        }

    names = dict.fromkeys(name for name, _ in found.ranked)
    return {
        "prompt": few_shot.name,
        "text": few_shot.prompt.text,
        "shots": few_shot.shots,
        "from": list(few_shot.source),
        "seeds": list(few_shot.seeds if few_shot.shots else few_shot.seeds[:1]),
        "score": few_shot.score,
        "subjects": {name: {split: about(name, split) for split in splits} for name in names},
        "mcnemar": {
            f"{name} − {base}": {
                split: mcnemar(found.ranked[name, split].right[0], found.ranked[base, split].right[0])
                for split in splits
            }
            for name, base in references.items()
        },
    }


def _group_sets(
    groups: Sequence[str], families: Mapping[str, list[str]], trained: Sequence[str]
) -> dict[str, list[str]]:
    """Return the sets of groups to average over: all, trained on, the others, each family."""
    kinds = {"all": list(groups)}
    if trained:
        kinds["trained on"] = [g for g in groups if g in trained]
        if others := [g for g in groups if g not in trained]:
            kinds["not trained on"] = others
    return kinds | {f"family: {name}": members for name, members in families.items() if name}


def _align_rows(found: SubjectResults, name: str, base: str, split: str) -> dict[str, ResampledMetric]:
    """Return the metrics of `base`, with its rows numbered as those of `name`."""
    mine = {where: i for i, where in enumerate(found.rows[name, split])}
    theirs = found.rows[base, split]
    if theirs == found.rows[name, split]:
        return found.figures[base, split]
    to = np.array([mine.get(where, -1) for where in theirs])
    result = {}
    for metric, figure in found.figures[base, split].items():
        rows = to[figure.rows]
        kept = np.flatnonzero(rows >= 0)
        result[metric] = figure.renumbered(rows, kept[np.argsort(rows[kept])])
    return result


def _find_references(subjects: Sequence[EvaluationTarget]) -> dict[str, str]:
    """Return the reference of each subject: for a run the base model that it changes, else the first run; for a base
    model the first base model."""
    bare = [subject for subject in subjects if subject.run is None]
    own = {subject.recipe.backbone: subject.name for subject in reversed(bare)}
    runs = [subject for subject in subjects if subject.run is not None]
    found = {}
    for subject in subjects:
        base = bare[0].name if subject.run is None else own.get(subject.recipe.backbone, runs[0].name)
        if base != subject.name:
            found[subject.name] = base
    return found


def _build_subject_record(subject: EvaluationTarget, reference: str | None) -> dict[str, Any]:
    return {
        "name": subject.name,
        "kind": "backbone" if subject.run is None else "run",
        "backbone": subject.recipe.backbone,
        "task": subject.recipe.task.kind,
        "precision": subject.recipe.train.precision,
        "compared_with": reference,
    }


def flatten_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return all metrics in the form of eval.json, {split: {metric: …}}, with the subject and the group in the name of
    the split."""
    flat: dict[str, Any] = {}
    trees = {**document["figures"], **document["differences"]}
    for name, splits in trees.items():
        flat |= {f"{name} {split}": metrics for split, metrics in splits.items()}
    grouped = document.get("group_by")
    if grouped:
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
    grouped = document.get("group_by")
    if grouped:
        for name, splits in {**grouped["figures"], **grouped["differences"]}.items():
            for split, groups in splits.items():
                lines.append(f"{name}  {split} by {grouped['column']}")
                for group, metrics in groups.items():
                    label = f"{group} {grouped['names'].get(group, '')}".strip()
                    lines.append(f"  {label:24} {grouped['rows'][group]:6,} rows  {format_headline(metrics)}")
    if asked := document.get("few_shot"):
        shots = f"{asked['shots']} shots" + (f", seeds {', '.join(map(str, asked['seeds']))}" if asked["shots"] else "")
        lines.append(f"prompt {asked['prompt']}, {shots}, ranked by {asked['score']}")
        for name, parts in asked["subjects"].items():
            for split, found in parts.items():
                scores = ", ".join(f"{score} {value:.4g}" for score, value in found["by_score"].items())
                lost = f"; {found['shots_dropped']:,} examples left out for length" * bool(found["shots_dropped"])
                lines.append(f"  {name} {split}: accuracy by score: {scores}{lost}")
        for name, tests in asked["mcnemar"].items():
            for split, test in tests.items():
                only = f"{test['only_ours']} to {test['only_theirs']}"
                lines.append(f"  {name} {split}: McNemar p {test['p']:.3g} (right alone: {only})")
    return "\n".join([*lines, *(f"note: {note}" for note in document["notes"])])


def format_headline(metrics: Mapping[str, Any]) -> str:
    """Format the metric of a group that is comparable with that of others, as `format_metrics`."""
    name = find_headline_metric(metrics)
    return format_metrics({name: metrics[name]})[0] if name else "–"


def find_headline_metric(metrics: Mapping[str, Any]) -> str | None:
    """Return bits per byte for text, else the first of the headline metrics."""
    from flatshift.finetune.evaluate.metrics import sort_for_headline

    ordered = ["bits_per_byte", *sort_for_headline(metrics)]
    return next((name for name in ordered if name in metrics), None)
