"""Several models judged on the same rows: runs and bare backbones, each beside the backbone that it changes.

    flatshift eval runs/first flatshift-5m --data texts.jsonl --group-by lang --out judged

A backbone is loaded once; adapters are put on it in turn and taken off again. What changes frozen weights, or what they
are called, is loaded anew. Differences are paired: both models are asked of the same draws of rows.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.encode import encode_rows
from experiments.data.sources import Part
from experiments.data.splits import learnt, read_splits
from experiments.recipe.auto import settled
from experiments.recipe.build import build
from experiments.recipe.config import Recipe
from experiments.recipe.resolve import Resolved
from experiments.recipe.tree import Branch, from_override, merge
from experiments.run.console import Console
from experiments.workflows.build import (
    TEXTS_KEPT,
    shortened_text,
    shown,
    texts_of,
    write_predictions,
)
from experiments.workflows.few_shot import FewShot, Ranked, mcnemar, rank_rows, read_shots
from experiments.workflows.generate import adapted_recipe, alone
from experiments.workflows.initial_adapter import check_run
from experiments.workflows.samples import Kept, Sampling, figures_of, records, write_samples
from finetune.atomic import replacing_directory, write_json
from finetune.compute.numerics import cpu_threads, evaluating
from finetune.data.inference import Inference
from finetune.data.rows import Row, expand, read_rows
from finetune.errors import UserError
from finetune.evaluate.bootstrap import Figure, group_interval
from finetune.evaluate.metrics import metric_of
from finetune.lock import owned
from finetune.seeds import derive

DOCUMENT = "evaluation.json"
_FEW = 10
"""Rows below which a group's figures are called rough."""
_LONGEST = 1024
"""Tokens of a window, at most, where none is asked for."""


@dataclass(frozen=True)
class Subject:
    """What is judged: a run's adapter on its backbone, or a backbone alone."""

    name: str
    recipe: Recipe
    run: Path | None = None
    """The run directory; None: the bare backbone."""
    like: Path | None = None
    """Of a bare backbone, the run that it is judged like."""


@dataclass
class Findings:
    """Figures of all subjects on all splits, and what can be asked of them further."""

    intervals: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """subject → split → metric → interval"""
    figures: dict[tuple[str, str], dict[str, Figure]] = field(default_factory=dict)
    rows: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Where each example of a subject and split comes from."""
    notes: list[str] = field(default_factory=list)
    ranked: dict[tuple[str, str], Ranked] = field(default_factory=dict)
    """How a subject answered a split, where it was asked by a prompt."""
    written: list[Mapping[str, Any]] = field(default_factory=list)
    """Lines of generations.jsonl."""
    said: list[tuple[str, Mapping[str, Sequence[Any]]]] = field(default_factory=list)
    """A split and the columns of predictions.parquet, of each subject in turn."""


def judge_side_by_side(
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
    """Judge runs and bare backbones on the rows of `data`, or on the dev and test rows of the first run.

    A bare backbone is asked as the first run on it is, else as a language model of whole documents.

    group_by: a column of the rows; every figure is also given for each of its values.
    trained: values of that column that the adapters were trained on; the others are where they may have forgotten.
    window, overlap: tokens read at once, and how many of them are context; of tasks over whole documents.
    few_shot: put the rows by a prompt, and rank its candidates, instead of what the subjects' tasks do.
    sampling: write several texts after each row as a prompt, and ask those.
    overrides: as a recipe's, for bare backbones that no run is beside; of runs only `train.device`.
    out: a new directory for evaluation.json, eval.json, predictions.parquet (of written samples: generations.jsonl)
        and, by `page`, report.html; whole or not at all.
    Returns what evaluation.json holds.
    Raises UserError for what is neither a run nor a backbone, subjects that cannot be judged on these rows, and a
    column that rows lack.
    """
    with nullcontext() if out is None else owned(out):
        if out is not None and out.exists() and any(out.iterdir() if out.is_dir() else [out]):
            raise UserError(f"--out: {out} is not empty; name a new directory")
        console = Console(quiet=quiet)
        subjects = subjects_of(names, overrides, bool(data), console)
        first = subjects[0].recipe
        with cpu_threads(first.train.threads):
            if few_shot is not None and sampling is not None:
                raise UserError("--prompt ranks what is there and --samples writes anew; leave one of them out")
            kept = None if out is None else out.with_name(f".{out.name}.written.jsonl")
            how = _How(group_by, window, overlap, few_shot, sampling, Kept(kept))
            found = _judged(subjects, data, how, console)
            document = _document(subjects, found, data, how, trained)
        document["command"] = command
        if out is not None:
            with replacing_directory(out) as temporary:
                write_json(temporary / DOCUMENT, document)
                write_json(temporary / "eval.json", _flat(document))
                if found[0].written:
                    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in found[0].written]
                    (temporary / "generations.jsonl").write_text("".join(lines), encoding="utf-8")
                if found[0].said:
                    write_predictions(temporary / "predictions.parquet", found[0].said)
                if page is not None:
                    (temporary / "report.html").write_text(page(document), encoding="utf-8")
            if how.kept.path is not None:
                how.kept.path.unlink(missing_ok=True)
            console.say(f"written: {out}")
    return document


@dataclass(frozen=True)
class _How:
    """How rows are judged, as `judge_side_by_side` takes it."""

    group_by: str | None
    window: int | None
    overlap: int | None
    few_shot: FewShot | None
    sampling: Sampling | None
    kept: Kept


# ---------------------------------------------------------------------------------------------------- what is judged


def is_run(name: str) -> bool:
    """Whether `name` is a run directory, not a backbone."""
    return (Path(name) / "recipe.resolved.yaml").is_file()


def subjects_of(names: Sequence[str], overrides: Sequence[Branch], has_data: bool, console: Console) -> list[Subject]:
    """What `names` are: run directories, and backbones asked as the first run on them is, else as language models.

    Raises UserError for what is neither, and a bare backbone that cannot be judged so.
    """
    from finetune.models.backbone import open_backbone

    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"eval: {twice} is named twice; name it once")
    runs = {name: alone(adapted_recipe(Path(name), overrides)) for name in names if is_run(name)}
    found = []
    for name in names:
        if name in runs:
            check_run(Path(name), runs[name])
            found.append(Subject(name, runs[name], Path(name)))
            continue
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise UserError(f"{name} is neither a run directory (recipe.resolved.yaml) nor a backbone (config.json)")
        try:
            backbone = open_backbone(name)
        except UserError as error:
            raise UserError(f"{name} is not a run directory, and {error}") from None
        beside = next((r for r, recipe in runs.items() if _same(open_backbone(recipe.backbone), backbone)), None)
        if runs:
            like = beside or next(iter(runs))
            recipe = dataclasses.replace(runs[like], backbone=runs[like].backbone if beside else name)
            if recipe.task.by_example:
                raise UserError(
                    f"{name}: the head of task.kind: {recipe.task.kind} is trained with the adapter, so a bare "
                    "backbone has none to be judged by; name runs only"
                )
            found.append(Subject(name, recipe, like=Path(like)))
            continue
        if not has_data:
            raise UserError(f"{name} is a bare backbone, which has no rows of its own; give --data FILE")
        tree: Any = Branch({}, "defaults")
        kind = "masked-lm" if backbone.reads_both_ways else "language-model"
        given = [from_override("backbone", name, "eval"), from_override("task.kind", kind, "eval"), *overrides]
        for one in given:
            tree = merge(tree, one)
        recipe = alone(build(Recipe, tree))
        recipe = settled(Resolved(recipe, name, {}), say=console.say).recipe
        if recipe.task.by_example:
            raise UserError(
                f"{name}: a bare backbone has no head for task.kind: {recipe.task.kind}; take language-model"
            )
        found.append(Subject(name, recipe))
    return found


def _same(a: Any, b: Any) -> bool:
    return bool(a.directory.resolve() == b.directory.resolve())


class Adapted:
    """Models of subjects, one at a time, over as few loads of a backbone as can be."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.loads = 0
        self._key: Any = None
        self._base: Any = None
        self._model: Any = None

    def of(self, subject: Subject, label_names: tuple[str, ...] | None) -> Any:
        """The model of `subject` in evaluation precision; the one before it is no more."""
        from finetune.adapters.adapter import attach_adapter, load_adapter
        from finetune.adapters.offsets import offsets_of
        from finetune.compute.precision import adapter_dtype
        from finetune.compute.presence import resolve_device
        from finetune.models.load import load_backbone

        recipe, train = subject.recipe, subject.recipe.train
        device = resolve_device(train.device)
        key = (
            recipe.backbone, recipe.task.auto_class, label_names if recipe.task.new_head else None,
            train.precision, train.backbone_precision, train.quantization, device,
        )  # fmt: skip
        self._take_off()
        if key != self._key or self._base is None:
            self._base = self._model = None
            gc.collect()
            self._base = load_backbone(
                recipe.backbone,
                task=recipe.task,
                label_names=label_names,
                precision=train.precision,
                narrow=train.backbone_precision == "bf16",
                quantization=train.quantization,
                device=device,
            )
            self._key = key
            self.loads += 1
        if subject.run is None:
            if getattr(self._base, "new_parameters", ()):
                raise UserError(
                    f"{subject.name}: its checkpoint has no head for task.kind: {recipe.task.kind}, so it cannot be "
                    "judged bare; name runs only"
                )
            return self._base
        folder = subject.run / "adapter"
        initial = subject.run / "initial"
        folded = recipe.adapter.init != "default" or recipe.adapter.under is not None
        settings = recipe.adapter if folded else dataclasses.replace(recipe.adapter, init_rows=None, start=None)
        self._model = attach_adapter(
            self._base,
            settings,
            task=recipe.task,
            seed=train.seed,
            dtype=adapter_dtype(train),
            initial=(initial if initial.is_dir() else folder) if folded else None,
        )
        load_adapter(self._model, folder)
        if offsets_of(self._model) or recipe.task.new_head or recipe.adapter.soft_tokens is not None:
            self._base = None  # what it changed cannot be taken off again
        return self._model

    def _take_off(self) -> None:
        if self._model is not None and self._base is not None:
            self._base = self._model.unload()
        self._model = None


# ------------------------------------------------------------------------------------------------------- judging


def _judged(
    subjects: Sequence[Subject],
    data: Sequence[str],
    how: _How,
    console: Console,
) -> tuple[Findings, dict[str, list[Row]]]:
    found = Findings()
    adapted = Adapted(console)
    splits: dict[str, list[Row]] = {}
    order = sorted(
        range(len(subjects)), key=lambda i: [s.recipe.backbone for s in subjects].index(subjects[i].recipe.backbone)
    )
    for place in order:
        subject = subjects[place]
        rows = _rows(subject, data, how, found.notes)
        if splits and {split: [row.where for row in part] for split, part in rows.items()} != {
            split: [row.where for row in part] for split, part in splits.items()
        }:
            raise UserError(
                f"{subject.name} has other dev or test rows than {subjects[order[0]].name}; give --data FILE to judge "
                "them on the same rows"
            )
        splits = splits or rows
        console.say(f"judging {subject.name}")
        _judge_one(subject, rows, adapted, found, how, console)
    console.say(f"{len(subjects)} judged over {adapted.loads} load{'s' if adapted.loads > 1 else ''} of a backbone")
    return found, splits


def _rows(subject: Subject, data: Sequence[str], how: _How, notes: list[str]) -> dict[str, list[Row]]:
    recipe, group_by = subject.recipe, how.group_by
    skipped: list[str] = []
    if data:
        # Ids need not be unique here: parallel texts share theirs.
        columns = dataclasses.replace(recipe.data.columns, id="\0")
        part = Part("--data", None, tuple(data), columns, "data.columns")
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


def _judge_one(
    subject: Subject,
    splits: Mapping[str, list[Row]],
    adapted: Adapted,
    found: Findings,
    asked: _How,
    console: Console,
) -> None:
    from finetune.compute.presence import resolve_device
    from finetune.evaluate.judge import evaluate
    from finetune.models.backbone import open_backbone

    recipe, task = subject.recipe, subject.recipe.task
    names, units = (None, None) if not (home := subject.run or subject.like) else learnt(recipe, home)
    model = adapted.of(subject, names)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    device = resolve_device(recipe.train.device)
    inference = Inference.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=device)
    for split, rows in splits.items():
        into: dict[str, Figure] = {}
        said: dict[str, Any] = {}
        seed = derive(recipe.train.seed, "bootstrap", split)
        draw: dict[str, Any] = {"resamples": recipe.eval.bootstrap, "confidence": recipe.eval.confidence, "seed": seed}
        if asked.few_shot is not None:
            ranked = _ranked(subject, model, tokenizer, rows, asked, inference)
            into |= ranked.figures
            every = np.arange(len(rows))
            found.intervals.setdefault(subject.name, {})[split] = {
                name: group_interval(figure, [every], **draw) for name, figure in into.items()
            }
            found.ranked[subject.name, split] = ranked
            said |= {"text": _heads(rows), "predicted": ranked.predictions[0], "accuracy": ranked.right.mean(axis=0)}
            found.notes += [note for note in ranked.notes if note not in found.notes]
            places = [row.where for row in rows]
        elif asked.sampling is not None:
            with console.task("writing", len(rows) * asked.sampling.samples, "texts") as bar:
                name = f"{subject.name} {split}"
                texts = write_samples(
                    name, model, tokenizer, rows, task, asked.sampling, asked.kept, inference, bar=bar
                )
            into |= figures_of(rows, texts, asked.sampling)
            every = np.arange(len(rows))
            found.intervals.setdefault(subject.name, {})[split] = {
                name: group_interval(figure, [every], **draw) for name, figure in into.items()
            }
            found.written += records(subject.name, rows, texts)
            places = [row.where for row in rows]
        elif task.documents and recipe.adapter.projector is None:
            found.intervals.setdefault(subject.name, {})[split] = _documents(
                model, tokenizer, rows, recipe, asked, inference, into, draw, found.notes, said
            )
            places = [row.where for row in rows]
        else:
            made = encode_rows(
                recipe,
                tokenizer,
                (("test", 0, row) for row in rows),
                task=task,
                labels=names,
                units=units,
                paths=sorted({row.where.rpartition(":")[0] for row in rows}),
                what=split,
            )
            found.notes += [note for note in made.notes if note not in found.notes]
            examples = made.splits["test"]
            if not examples:
                raise UserError(f"{subject.name}: no row of {split} is left, the first for {made.skipped[0]}")
            found.intervals.setdefault(subject.name, {})[split] = evaluate(
                model,
                tokenizer,
                examples,
                task=task,
                config=recipe.eval,
                inference=inference,
                label_names=names,
                seed=seed,
                figures=into,
                said=said,
            )
            places = [example.where for example in examples]
            said["text"] = texts_of(examples, tokenizer)
        found.figures[subject.name, split] = into
        found.rows[subject.name, split] = places
        if said:
            named = {"subject": [subject.name] * len(places), "row": [where.rpartition("/")[2] for where in places]}
            found.said.append((split, {**named, "text": said.pop("text"), **said}))


def _heads(rows: Sequence[Row]) -> list[str | None]:
    """The beginning of the first rows' texts; None of the others."""
    texts = [shortened_text(str(row.values.get("text", ""))) for row in rows[:TEXTS_KEPT]]
    return [*texts, *[None] * (len(rows) - len(texts))]


def _documents(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    recipe: Recipe,
    asked: _How,
    inference: Inference,
    into: dict[str, Figure],
    draw: Mapping[str, Any],
    notes: list[str],
    said: dict[str, Any],
) -> dict[str, Any]:
    from finetune.evaluate.text import dictionary_missing, score_texts

    width = _width(model, recipe, asked.window)
    texts = [row.values["text"] for row in rows]
    with evaluating(model):
        counts = score_texts(
            model,
            tokenizer,
            texts,
            inference,
            task=recipe.task,
            window=width,
            overlap=max(1, width // 4) if asked.overlap is None else asked.overlap,
            where=[row.where for row in rows],
        )
    said |= {"text": _heads(rows), "loss": counts.nats, "loss.count": counts.tokens.astype(np.float64)}
    if (note := dictionary_missing(texts)) and note not in notes:
        notes.append(note)
    return counts.figures(into=into, **draw)


def _width(model: Any, recipe: Recipe, window: int | None) -> int:
    """Tokens of a window. Raises UserError for more than the backbone has positions."""
    positions = getattr(model.config, "max_position_embeddings", None) or _LONGEST
    room = positions - getattr(model, "soft_tokens", 0)
    if window is not None and not 2 <= window <= room:
        raise UserError(f"--window: {window} is not from 2 to {room}, the positions of {recipe.backbone}")
    return min(room, _LONGEST) if window is None else window


def _ranked(
    subject: Subject, model: Any, tokenizer: Any, rows: Sequence[Row], asked: _How, inference: Inference
) -> Ranked:
    recipe, few_shot = subject.recipe, asked.few_shot
    assert few_shot is not None
    if not recipe.task.causal or recipe.adapter.projector is not None:
        raise UserError(
            f"{subject.name}: --prompt asks a language model which text is likeliest, and task.kind: "
            f"{recipe.task.kind} trains none; leave it out"
        )
    source = read_shots(few_shot, dataclasses.replace(recipe.data.columns, id="\0"))
    width = _width(model, recipe, asked.window)
    with evaluating(model):
        return rank_rows(model, tokenizer, rows, source, few_shot, inference, window=width)


# ------------------------------------------------------------------------------------------------------ what is found


def _document(
    subjects: Sequence[Subject],
    judged: tuple[Findings, dict[str, list[Row]]],
    data: Sequence[str],
    how: _How,
    trained: Sequence[str],
) -> dict[str, Any]:
    from finetune.evaluate.text import language
    from finetune.models.backbone import open_backbone

    (found, splits), group_by = judged, how.group_by
    config = subjects[0].recipe.eval
    values = {
        split: [str(row.values[group_by]) for row in rows] if group_by else [""] for split, rows in splits.items()
    }
    groups = sorted({value for part in values.values() for value in part} if group_by else [])
    if unknown := sorted(set(trained) - set(groups)):
        raise UserError(f"--trained: no row has {group_by or 'a --group-by column'} {unknown[0]!r}")
    described = [language(group) for group in groups]
    languages = all(described) and bool(groups)

    def places(subject: str, split: str, chosen: Sequence[str] | None) -> np.ndarray:
        """Numbers of the rows of the split that belong to the groups, as the subject's figures count them."""
        where = found.rows[subject, split]
        if chosen is None:
            return np.arange(len(where))
        of = {row.where: value for row, value in zip(splits[split], values[split], strict=True)}
        return np.array([i for i, place in enumerate(where) if of[place] in set(chosen)], dtype=np.int64)

    def draw(split: str) -> dict[str, Any]:
        seed = derive(subjects[0].recipe.train.seed, "bootstrap", split)
        return {"resamples": config.bootstrap, "confidence": config.confidence, "seed": seed}

    def of_groups(name: str, split: str, chosen: Sequence[Sequence[str]], base: str | None = None) -> dict[str, Any]:
        """Every metric over the groups together (one list), or the mean of each over several lists."""
        mine = found.figures[name, split]
        theirs = None if base is None else _aligned(found, name, base, split)
        result = {}
        for metric, figure in mine.items():
            if base is not None and (metric_of(metric).is_floor or metric in (*apart[name, base], "fertility")):
                continue
            if len(chosen) > 1 and "perplexity" in metric:
                continue  # the mean of exponentials is the worst one's
            if theirs is not None and metric not in theirs:
                continue
            parts = [places(name, split, one) for one in chosen]
            interval = group_interval(figure, parts, None if theirs is None else theirs[metric], **draw(split))
            if interval is not None:
                result[metric] = interval
        return result

    tokenizers = {s.name: open_backbone(s.recipe.backbone).text_digests.get("tokenizer.json") for s in subjects}
    per_token = {"loss", "perplexity", "fertility"}
    references = _references(subjects)
    apart = {
        (name, base): per_token if tokenizers[name] != tokenizers[base] else set() for name, base in references.items()
    }
    differences = {
        f"{name} − {base}": {split: of_groups(name, split, [None], base) for split in splits}  # type: ignore[list-item]
        for name, base in references.items()
    }
    document: dict[str, Any] = {
        "subjects": [_about(subject, references.get(subject.name)) for subject in subjects],
        "data": [str(path) for path in expand(data)] if data else None,
        "rows": {split: len(rows) for split, rows in splits.items()},
        "figures": found.intervals,
        "differences": differences,
        "notes": found.notes,
    }
    if how.few_shot is not None:
        document["few_shot"] = _asked(how.few_shot, found, list(splits), references)
    if any(apart.values()) and how.few_shot is None:
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
                        for kind, members in _kinds(groups, families if languages else {}, trained).items()
                    }
                    for split in splits
                }
                for name, base in references.items()
            },
        }
    return json.loads(json.dumps(document))


def _asked(few_shot: FewShot, found: Findings, splits: Sequence[str], references: Mapping[str, str]) -> dict[str, Any]:
    """What was asked, each subject's accuracy by seed and score, and McNemar's test of the first seed's answers."""

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


def _kinds(groups: Sequence[str], families: Mapping[str, list[str]], trained: Sequence[str]) -> dict[str, list[str]]:
    """Sets of groups whose mean is asked for: all, trained on, the others, each family."""
    kinds = {"all": list(groups)}
    if trained:
        kinds["trained on"] = [g for g in groups if g in trained]
        if others := [g for g in groups if g not in trained]:
            kinds["not trained on"] = others
    return kinds | {f"family: {name}": members for name, members in families.items() if name}


def _aligned(found: Findings, name: str, base: str, split: str) -> dict[str, Figure]:
    """The figures of `base`, with its rows counted as those of `name`."""
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


def _references(subjects: Sequence[Subject]) -> dict[str, str]:
    """What each subject is compared with: a run with the bare backbone that it changes, else with the first run; a
    bare backbone with the first one."""
    bare = [subject for subject in subjects if subject.run is None]
    own = {subject.recipe.backbone: subject.name for subject in reversed(bare)}
    runs = [subject for subject in subjects if subject.run is not None]
    found = {}
    for subject in subjects:
        base = bare[0].name if subject.run is None else own.get(subject.recipe.backbone, runs[0].name)
        if base != subject.name:
            found[subject.name] = base
    return found


def _about(subject: Subject, reference: str | None) -> dict[str, Any]:
    return {
        "name": subject.name,
        "kind": "backbone" if subject.run is None else "run",
        "backbone": subject.recipe.backbone,
        "task": subject.recipe.task.kind,
        "precision": subject.recipe.train.precision,
        "compared_with": reference,
    }


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """All figures as eval.json has them: {split: {metric: …}}, each split under its subject, and its group."""
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


def render(document: Mapping[str, Any]) -> str:
    """For a person: every subject's figures, the differences, and each group's headline."""
    lines = []
    for name, splits in {**document["figures"], **document["differences"]}.items():
        for split, metrics in splits.items():
            lines += [name, *(f"  {split:5} {line}" for line in shown(metrics))]
    grouped = document.get("group_by")
    if grouped:
        for name, splits in {**grouped["figures"], **grouped["differences"]}.items():
            for split, groups in splits.items():
                lines.append(f"{name}  {split} by {grouped['column']}")
                for group, metrics in groups.items():
                    label = f"{group} {grouped['names'].get(group, '')}".strip()
                    lines.append(f"  {label:24} {grouped['rows'][group]:6,} rows  {headline(metrics)}")
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


def headline(metrics: Mapping[str, Any]) -> str:
    """The figure of a group that is comparable with others', as `shown` has it."""
    name = headline_metric(metrics)
    return shown({name: metrics[name]})[0] if name else "–"


def headline_metric(metrics: Mapping[str, Any]) -> str | None:
    """bits per byte where text was judged, else the first of a headline."""
    from finetune.evaluate.metrics import in_headline_order

    ordered = ["bits_per_byte", *in_headline_order(metrics)]
    return next((name for name in ordered if name in metrics), None)
