"""Evaluation of several texts generated after each prompt: diversity, passing programs, toxicity.

    flatshift eval runs/first flatshift-5m --data prompts.jsonl --samples 25 --top-p 0.9 --out written

Finished texts are kept in `.NAME.written.jsonl` next to the new directory, so that the same command does not generate
them again; in the end they are its generations.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.data.splits import read_label_record
from flatshift.experiments.recipe.schema import Recipe, short_hash
from flatshift.experiments.workflows.generate import check_generative, read_adapted_recipe, to_single_process
from flatshift.experiments.workflows.run_parts import check_run
from flatshift.finetune.compute.numerics import evaluation_mode
from flatshift.finetune.data.encoding import encode, get_end_token
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.rows import Row
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.bootstrap import ResampledMetric, ratio_statistic
from flatshift.finetune.evaluate.evaluator import head_scores
from flatshift.finetune.evaluate.generation import Decoding, continue_prompts
from flatshift.finetune.evaluate.metrics import metric_functions
from flatshift.finetune.evaluate.sandbox import check_sandbox_available, run_programs
from flatshift.finetune.evaluate.text_metrics import pass_at_k
from flatshift.finetune.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of the generated texts and of their evaluation."""

    samples: int
    """Texts per prompt."""
    temperature: float = 1.0
    """Divisor of the logits before sampling."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    max_new_tokens: int = 20
    """Maximum tokens of a text."""
    seed: int = 0
    """Seed of the draws, which do not depend on the batch size."""
    programs: bool = False
    """Run each text as a program in a sandbox, after its prompt and before the row's `test`."""
    pass_at: tuple[int, ...] = (1,)
    """Values of k for pass@k."""
    toxicity: str | None = None
    """Run directory of a classifier whose class `toxic` scores the texts."""
    toxic: str = "toxic"
    """Name of the toxic class."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"--samples: {self.samples} is too small; give at least 1")
        if self.programs and max(self.pass_at, default=0) > self.samples:
            raise UserError(f"--pass-at {max(self.pass_at)} takes as many --samples at least; there are {self.samples}")
        self.decoding()

    def decoding(self) -> Decoding:
        """Return the decoding settings. Raises UserError for settings that contradict each other."""
        try:
            return Decoding(
                max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
            )
        except ValueError as error:
            raise UserError(f"--samples: {error}") from None


@dataclass(frozen=True)
class SavedSamples:
    """Texts that an interrupted command has already generated; `path` None: nothing is kept."""

    path: Path | None

    def read(self, key: str) -> dict[int, str]:
        """Return the texts of `key` by index; a truncated last line is skipped."""
        found: dict[int, str] = {}
        if self.path is not None and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                    if record["key"] == key:
                        found[record["place"]] = record["text"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    continue
        return found

    def add(self, key: str, place: int, text: str) -> None:
        """Append one text."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"key": key, "place": place, "text": text}, ensure_ascii=False) + "\n")


def write_samples(
    name: str,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    task: Task,
    asked: Sampling,
    kept: SavedSamples,
    inference: EvalBatching,
    *,
    bar: Callable[[int], None] = lambda done: None,
) -> list[list[str]]:
    """Generate `asked.samples` texts after each row's prompt, except those already in `kept`.

    name: of the model, as the key of kept texts.
    """
    check_generative(task)
    if task.traits.encoder_decoder:
        raise UserError(f"{name}: --samples continues prompts, and task.kind: {task.kind} has an encoder; use generate")
    questions, _ = task.input_format.build_prompts(rows, tokenizer)
    if len(questions) != len(rows):
        raise UserError(f"{name}: {len(rows) - len(questions)} rows have no prompt by its template; leave them out")
    settings = {k: v for k, v in asdict(asked).items() if k not in ("programs", "pass_at", "toxicity", "toxic")}
    key = short_hash({"of": name, "settings": settings, "prompts": [one.ids for one in questions]})
    texts = kept.read(key)
    places = [place for place in range(len(rows) * asked.samples) if place not in texts]
    ends = {one.stop for one in questions} | {get_end_token(tokenizer)}
    if places:
        answers = continue_prompts(
            model,
            [questions[place // asked.samples].ids for place in places],
            asked.decoding(),
            inference,
            numbers=places,
            end=[token for token in ends if token is not None],
        )
        for at, answer in answers:
            text = str(tokenizer.decode(answer.ids, skip_special_tokens=True))
            texts[places[at]] = text
            kept.add(key, places[at], text)
            bar(len(texts))
    return [[texts[i * asked.samples + s] for s in range(asked.samples)] for i in range(len(rows))]


def check_sampling_rows(rows: Sequence[Row], asked: Sampling) -> None:
    """Raise UserError, before anything is generated, for a missing sandbox, rows without tests, or a classifier without
    the class."""
    if asked.programs:
        check_sandbox_available()
        for row in rows:
            _get_test(row)
    if asked.toxicity is not None:
        _open_classifier(asked)


def compute_sample_metrics(
    rows: Sequence[Row], texts: Sequence[Sequence[str]], asked: Sampling
) -> dict[str, ResampledMetric]:
    """Compute the requested metrics of the texts: means over the prompts that have a value."""
    values: dict[str, list[float | None]] = {
        name: [function(one) for one in texts] for name, function in metric_functions("samples").items()
    }
    if asked.programs:
        passed = _count_passed(rows, texts)
        for k in asked.pass_at:
            values[f"pass_at_{k}"] = [pass_at_k(asked.samples, count, k) for count in passed]
    if asked.toxicity is not None:
        scores = _score_toxicity(asked, texts)
        for name, function in metric_functions("toxicity").items():
            values[name] = [function(one) for one in scores]
    found = {}
    for name, each in values.items():
        there = [i for i, value in enumerate(each) if value is not None]
        kept = [value for value in each if value is not None]
        if there:
            found[name] = ResampledMetric.over([kept, np.ones(len(kept))], ratio_statistic(), there)
    return found


def _count_passed(rows: Sequence[Row], texts: Sequence[Sequence[str]]) -> list[int]:
    """Return the number of texts of each row that pass its test."""
    programs = []
    for row, written in zip(rows, texts, strict=True):
        test = _get_test(row)
        entry = row.record.get("entry_point")
        call = f"\ncheck({entry})\n" if isinstance(entry, str) and entry.isidentifier() else "\n"
        programs += [f"{row.values['text']}{text}\n{test}{call}" for text in written]
    outcomes = iter(run_programs(programs, workers=2))
    return [sum(next(outcomes) == "passed" for _ in written) for written in texts]


def _get_test(row: Row) -> str:
    test = row.record.get("test")
    if not isinstance(test, str):
        raise UserError(f"{row.where}: no column 'test' to run behind a program; leave --programs out, or add it")
    return test


def _open_classifier(asked: Sampling) -> tuple[Path, Recipe, tuple[str, ...]]:
    """Return the classifier's run, its recipe, and its classes."""
    path = Path(str(asked.toxicity))
    recipe = to_single_process(read_adapted_recipe(path))
    check_run(path, recipe)
    names, _ = read_label_record(recipe, path)
    if not recipe.task.one_class or names is None or asked.toxic not in names:
        known = "no classes" if names is None else f"the classes {', '.join(names)}"
        raise UserError(f"--toxicity: {path} has {known}, none of them {asked.toxic!r}; name it with --toxic-label")
    return path, recipe, tuple(names)


def _score_toxicity(asked: Sampling, texts: Sequence[Sequence[str]]) -> list[list[float]]:
    """Return the classifier's probability of its toxic class for every text; 0 for an empty one."""
    from flatshift.experiments.workflows.build import load_model
    from flatshift.finetune.models.backbone import open_backbone

    path, recipe, names = _open_classifier(asked)
    flat = [text for written in texts for text in written]
    there = [i for i, text in enumerate(flat) if text.strip()]
    scores = np.zeros(len(flat))
    tokenizer = open_backbone(recipe.backbone).tokenizer
    rows = [Row({"text": flat[i], "label": names[0]}, str(i), f"text {i}") for i in there]
    if rows:
        coded = encode(
            rows, task=recipe.task, tokenizer=tokenizer, max_length=recipe.train.max_length, label_names=names
        )
        engine, _ = load_model(recipe, recipe.task, names, adapter=path / "adapter")
        with evaluation_mode(engine.eval_model):
            _, logits = head_scores(
                engine.eval_model,
                coded.examples,
                EvalBatching.of(tokenizer, recipe.train, batch_size=recipe.eval.batch_size, device=engine.device),
                task=recipe.task,
            )
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        scores[[int(example.id) for example in coded.examples]] = shares[:, names.index(asked.toxic)]
    parts = iter(scores.tolist())
    return [[next(parts) for _ in written] for written in texts]


def build_generation_records(name: str, rows: Sequence[Row], texts: Sequence[Sequence[str]]) -> list[Mapping[str, Any]]:
    """Return the rows of generations.jsonl."""
    return [
        {"by": name, "where": row.where, "prompt": row.values["text"], "texts": list(written)}
        for row, written in zip(rows, texts, strict=True)
    ]
