"""Few-shot evaluation by ranking: rows formatted by a prompt, preceded by worked examples; the likeliest candidate is
the answer.

    flatshift eval flatshift-5m --data test.jsonl --prompt nli --shots 4 --shots-from train.jsonl

Worked examples are drawn by named seeds, the same for all rows of a seed (of a language, if the prompt has several); a
row that is among them gets the next one drawn instead of itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax
from scipy.stats import binomtest

from flatshift.experiments.recipe.build import build_settings
from flatshift.experiments.recipe.tree import parse_file
from flatshift.finetune.compute.loss import Head
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.encoding import SpecialTokens
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.bootstrap import ResampledMetric
from flatshift.finetune.evaluate.candidates import Candidate, find_ranking_head, score_candidates, tokenize_candidates
from flatshift.finetune.evaluate.prediction_metrics import classification_metrics
from flatshift.finetune.evaluate.prompts import FilledPrompt, Prompt, check_prompt, fill_prompt, shipped_prompts
from flatshift.finetune.seeds import numpy_generator
from flatshift.finetune.tasks import Completion

Score = Literal["sum", "label", "mean", "byte", "pmi", "calibrated"]
SCORES: tuple[Score, ...] = ("sum", "label", "mean", "byte", "pmi", "calibrated")


@dataclass(frozen=True, kw_only=True)
class FewShot:
    """Few-shot settings, the same for every subject."""

    prompt: Prompt
    name: str
    shots: int = 0
    """Worked examples before each row."""
    source: tuple[str, ...] = ()
    """Files that the worked examples are drawn from."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the draws."""
    score: Score = "sum"
    """Score that ranks candidates: the log-likelihood of all tokens after the context (`sum`, as mGPT and lm-eval's
    acc), of the label's own tokens (`label`), `sum` per token (`mean`) or per byte (`byte`), `sum` minus that after a
    context without the row's words (`pmi`), or the label's minus that after content-free contexts (`calibrated`, arXiv
    2102.09690)."""
    spoken: str | None = None
    """Wording of the prompt to use for every row."""

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise UserError(f"--shots: {self.shots} is below 0")
        if bool(self.shots) != bool(self.source):
            raise UserError(
                "--shots K and --shots-from FILE go together: worked examples are drawn from a training file"
            )
        if self.seeds != (0,) and not self.shots:
            raise UserError("--shot-seeds are of the draws of --shots, and there are none; leave them out")
        if self.score not in SCORES:
            raise UserError(f"--score: {self.score!r} is none of {', '.join(SCORES)}")
        if self.score == "calibrated" and not self.prompt.labels:
            raise UserError("--score calibrated needs a prompt with the same labels for all rows; take pmi")
        if self.spoken is not None and self.spoken not in self.prompt.wordings:
            known = ", ".join(self.prompt.wordings) or "none"
            raise UserError(f"--prompt-language: {self.spoken!r} is none of the prompt's wordings ({known})")


@dataclass
class RankingResult:
    """Answers of one subject."""

    figures: dict[str, ResampledMetric] = field(default_factory=dict)
    """accuracy and chance; with labels also f1_macro, matthews, majority_floor: means over the seeds."""
    right: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), bool))
    """True for right answers, shape (seeds, rows)."""
    others: dict[str, float] = field(default_factory=dict)
    """Accuracy by every score, for information: choosing among them requires separate rows."""
    by_seed: list[float] = field(default_factory=list)
    predictions: list[list[str]] = field(default_factory=list)
    dropped: int = 0
    """Worked examples left out because they did not fit."""
    missing: int = 0
    """Worked examples that were asked for and not found among those that differ from the row."""
    cut: int = 0
    """Rows truncated on the left because they did not fit even alone."""
    notes: list[str] = field(default_factory=list)


def read_prompt(name: str) -> Prompt:
    """Read a prompt from a file, or a shipped one by name. Raises UserError with file:line."""
    path = shipped_prompts().get(name, Path(name))
    if not path.is_file():
        raise UserError(f"--prompt: {name} is no file and none of the shipped prompts ({', '.join(shipped_prompts())})")
    prompt: Prompt = build_settings(Prompt, parse_file(path))
    try:
        prompt.columns()
    except UserError as error:  # an error in its templates
        raise UserError(f"{path}: {error}") from None
    return prompt


def read_shots(few_shot: FewShot, columns: Columns) -> list[Row]:
    """Return the rows that worked examples are drawn from. Raises UserError for fewer than needed."""
    files, count = few_shot.source, few_shot.shots
    if not count:
        return []
    read = read_rows(files, columns=columns, required=few_shot.prompt.columns(few_shot.spoken), setting="data.columns")
    rows = require_rows(read, files=files, purpose="worked example")
    if len(rows) <= count:
        raise UserError(f"--shots-from: {len(rows)} rows are too few for --shots {count}, which takes one more")
    return rows


def rank_rows(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    source: Sequence[Row],
    few_shot: FewShot,
    inference: EvalBatching,
    *,
    window: int | None,
) -> RankingResult:
    """Rank the candidates of every row under every seed.

    The model must be in evaluation mode already. window: maximum tokens of a text, if there is one.
    """
    try:
        result = RankingResult(notes=check_prompt(few_shot.prompt, tokenizer))
    except UserError as error:
        raise UserError(f"--prompt {few_shot.name}: {str(error).removeprefix('prompt: ')}") from None
    if not tokenizer.is_fast:
        raise UserError("few-shot: this backbone's tokenizer cannot say where each token starts (no tokenizer.json)")
    items = [fill_prompt(few_shot.prompt, row, spoken=few_shot.spoken) for row in rows]
    ranker = _Ranker(model, tokenizer, inference, few_shot, window or sys.maxsize, items, result)
    gold = np.array([item.gold for item in items])
    chosen: list[NDArray] = []
    hits: dict[str, list[float]] = {name: [] for name in SCORES}
    for seed in few_shot.seeds if few_shot.shots else few_shot.seeds[:1]:
        for name, values in ranker.score(ranker.draw_shots(source, seed)).items():
            picks = np.array([int(np.argmax(scores)) for scores in values])
            hits[name].append(float((picks == gold).mean()))
            if name == few_shot.score:
                chosen.append(picks)
    result.right, result.by_seed = np.array([picks == gold for picks in chosen]), hits[few_shot.score]
    result.others = {name: float(np.mean(values)) for name, values in hits.items() if values}
    result.predictions = [[items[i].names[pick] for i, pick in enumerate(picks)] for picks in chosen]
    result.figures = _ranking_metrics(items, gold, chosen, result.right, labelled=bool(few_shot.prompt.labels))
    return result


def _ranking_metrics(
    items: Sequence[FilledPrompt], gold: NDArray, chosen: Sequence[NDArray], right: NDArray, *, labelled: bool
) -> dict[str, ResampledMetric]:
    by_seed = [dict[str, ResampledMetric]() for _ in chosen]
    for figures, picks in zip(by_seed, chosen, strict=True):
        if labelled:
            classification_metrics(gold.tolist(), picks.tolist(), resamples=0, confidence=0.95, seed=0, figures=figures)
    chance = np.array([1.0 / len(item.candidates) for item in items])
    means = {"accuracy": ResampledMetric.over([right.mean(axis=0)], lambda x: x.mean(-1), share=len(right) == 1)}
    for name in by_seed[0]:
        if name != "accuracy":
            metrics = [figures[name] for figures in by_seed]
            mean = lambda rows, metrics=metrics: np.mean([m.statistic(rows) for m in metrics], axis=0)  # noqa: E731
            means[name] = ResampledMetric(metrics[0].rows, mean)
    return means | {"chance": ResampledMetric.over([chance], lambda x: x.mean(-1))}


_Text = tuple[str, str, str]
"""Context, label, and what follows it."""


@dataclass
class _Ranker:
    """Candidates of rows, scored by a model; counts what does not fit in `result`."""

    model: Any
    tokenizer: Any
    inference: EvalBatching
    few_shot: FewShot
    window: int
    items: Sequence[FilledPrompt]
    result: RankingResult

    @cached_property
    def prefix(self) -> Sequence[int]:
        return SpecialTokens.of(self.tokenizer).prefix

    @cached_property
    def head(self) -> Head | None:
        """The model's plain head, by which no logits of padding are computed; None if it has none."""
        item = self.items[0]
        text = self._join([], item.before[0], item.candidates[0], item.after)
        (candidate,) = tokenize_candidates(self.tokenizer, [text], self.prefix)
        return find_ranking_head(self.model, candidate.ids, self.inference, task=Completion())

    def draw_shots(self, source: Sequence[Row], seed: int) -> list[list[str]]:
        """Return the worked examples before each row, in order."""
        few_shot = self.few_shot
        if not few_shot.shots:
            return [[] for _ in self.items]
        column = few_shot.prompt.by if few_shot.spoken is None else None
        pools: dict[str, list[Row]] = {}
        for row in source:
            pools.setdefault(str(row.values.get(column, "")) if column else "", []).append(row)
        orders: dict[str, list[Row]] = {}

        @cache
        def fill(name: str, i: int) -> FilledPrompt:
            return fill_prompt(few_shot.prompt, orders[name][i], spoken=few_shot.spoken)

        contexts = []
        for item in self.items:
            name = str(item.row.values.get(column, "")) if column else ""
            if name not in orders:
                pool = pools.get(name, [])
                pool = pool if len(pool) > few_shot.shots else [row for rows in pools.values() for row in rows]
                orders[name] = [pool[i] for i in numpy_generator(seed, "shots", name).permutation(len(pool))]
            drawn = (fill(name, i) for i in range(len(orders[name])))  # lazily: the row may be there many times
            others = (shot for shot in drawn if (shot.before, shot.candidates) != (item.before, item.candidates))
            contexts.append([shot.solved for shot in islice(others, few_shot.shots)])
            self.result.missing += few_shot.shots - len(contexts[-1])
        return contexts

    def score(self, contexts: Sequence[list[str]]) -> dict[str, list[NDArray[np.float64]]]:
        """Return every score of every candidate: `SCORES` → item → (K,)."""
        candidates = self._fit_to_window(contexts)
        logs = score_candidates(self.model, candidates, self.inference, head=self.head)
        scores: dict[str, list[NDArray[np.float64]]] = {name: [] for name in ("sum", "label", "mean", "byte")}
        for row, row_logs in zip(candidates, logs, strict=True):
            pairs = list(zip(row, row_logs, strict=True))
            scores["sum"].append(np.array([log.sum() for log in row_logs]))
            scores["label"].append(np.array([log[c.label[0] : c.label[1]].sum() for c, log in pairs]))
            scores["mean"].append(np.array([log.mean() for log in row_logs]))
            scores["byte"].append(np.array([log.sum() / c.bytes for c, log in pairs]))
        if self.few_shot.score == "pmi":
            neutral = [
                [self._join([], item.neutral, label, item.after) for label in item.candidates] for item in self.items
            ]
            free = self._sum_log_likelihoods(neutral)
            scores["pmi"] = [own - other for own, other in zip(scores["sum"], free, strict=True)]
        if self.few_shot.score == "calibrated":
            empty = [
                [
                    self._join(shots, before, label, item.after)
                    for before in item.content_free
                    for label in item.candidates
                ]
                for item, shots in zip(self.items, contexts, strict=True)
            ]
            scores["calibrated"] = []
            for own, sums in zip(scores["label"], self._sum_log_likelihoods(empty, label=True), strict=True):
                share = softmax(sums.reshape(-1, len(own)), axis=-1).mean(axis=0)
                scores["calibrated"].append(log_softmax(own) - np.log(share))
        return scores

    def _join(self, shots: Sequence[str], before: str, label: str, after: str) -> _Text:
        return "".join(shot + self.few_shot.prompt.separator for shot in shots) + before, label, after

    def _sum_log_likelihoods(self, texts: Sequence[list[_Text]], *, label: bool = False) -> list[NDArray[np.float64]]:
        """Return the log-likelihoods of texts; each distinct text is scored once."""
        distinct = list(dict.fromkeys(text for row in texts for text in row))
        candidates = tokenize_candidates(self.tokenizer, distinct, self.prefix)
        scored = score_candidates(self.model, [[c] for c in candidates], self.inference, head=self.head)
        logs = [row[0] for row in scored]
        sums = {
            text: float((log[c.label[0] : c.label[1]] if label else log).sum())
            for text, c, log in zip(distinct, candidates, logs, strict=True)
        }
        return [np.array([sums[text] for text in row]) for row in texts]

    def _fit_to_window(self, contexts: Sequence[list[str]]) -> list[list[Candidate]]:
        """Return candidates that fit the window: whole worked examples are left out first, starting with the earliest,
        also of `contexts`."""

        def join(item: FilledPrompt, shots: Sequence[str]) -> list[_Text]:
            return [self._join(shots, b, s, item.after) for b, s in zip(item.before, item.candidates, strict=True)]

        texts = [join(item, shots) for item, shots in zip(self.items, contexts, strict=True)]
        flat = iter(tokenize_candidates(self.tokenizer, [text for row in texts for text in row], self.prefix))
        fitting, start = [], len(self.prefix)
        for item, context, row in zip(self.items, contexts, texts, strict=True):
            candidates = list(islice(flat, len(row)))
            shots = list(context)
            while shots and max(len(c.ids) for c in candidates) > self.window:
                shots.pop(0)
                self.result.dropped += 1
                candidates = tokenize_candidates(self.tokenizer, join(item, shots), self.prefix)
            if (excess := max(len(c.ids) for c in candidates) - self.window) > 0:
                self.result.cut += 1
                if any(c.start - excess < start + 1 for c in candidates):
                    raise UserError(
                        f"{item.row.where}: a candidate alone is longer than the {self.window} tokens that the "
                        "backbone reads"
                    )
                candidates = [
                    Candidate((*c.ids[:start], *c.ids[start + excess :]), c.start - excess, c.label, c.bytes)
                    for c in candidates
                ]
            context[:] = shots
            fitting.append(candidates)
        return fitting


def mcnemar(ours: NDArray, theirs: NDArray) -> dict[str, Any]:
    """Return the exact McNemar test of two models' right answers to the same rows: the numbers of rows that only one of
    them gets right, and the two-sided p of their share being one half. Arguments: bool (rows,)."""
    gained, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    p = 1.0 if gained + lost == 0 else float(binomtest(gained, gained + lost).pvalue)
    return {"only_ours": gained, "only_theirs": lost, "p": p}
