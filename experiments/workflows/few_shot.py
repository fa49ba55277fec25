"""Few-shot evaluation by ranking: rows formatted by a prompt, preceded by worked examples; the likeliest candidate is
the answer.

    flatshift eval flatshift-5m --data test.jsonl --prompt nli --shots 4 --shots-from train.jsonl

Worked examples are drawn from the training file by named seeds, the same for all rows of a seed (of a language, if the
prompt has several); a row that is among them gets the next one drawn instead of itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flatshift.experiments.recipe.build import build_settings
from flatshift.experiments.recipe.tree import parse_file
from flatshift.finetune.config import Columns
from flatshift.finetune.data.encoding import SpecialTokens
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.bootstrap import ResampledMetric
from flatshift.finetune.evaluate.candidates import Candidate, score_candidates, tokenize_candidates
from flatshift.finetune.evaluate.classes import classification_metrics
from flatshift.finetune.evaluate.prompts import FilledPrompt, Prompt, check_prompt, fill_prompt, shipped_prompts
from flatshift.finetune.seeds import numpy_generator

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
    cut: int = 0
    """Rows truncated on the left because they did not fit even alone."""
    notes: list[str] = field(default_factory=list)


def read_prompt(name: str) -> Prompt:
    """Read a prompt from a file, or a shipped one by name. Raises UserError with file:line."""
    path = shipped_prompts().get(name)
    if path is None:
        path = Path(name)
        if not path.is_file():
            raise UserError(
                f"--prompt: {name} is no file and none of the shipped prompts ({', '.join(shipped_prompts())})"
            )
    found: Prompt = build_settings(Prompt, parse_file(path))
    try:
        found.columns()
    except UserError as error:  # an error in its templates
        raise UserError(f"{path}: {error}") from None
    return found


def read_shots(asked: FewShot, columns: Columns) -> list[Row]:
    """Return the rows that worked examples are drawn from. Raises UserError for fewer than needed."""
    if not asked.shots:
        return []
    rows = read_rows(asked.source, columns=columns, required=asked.prompt.columns(), setting="data.columns")
    found = require_rows(rows, files=asked.source, what="worked example")
    if len(found) <= asked.shots:
        raise UserError(f"--shots-from: {len(found)} rows are too few for --shots {asked.shots}, which takes one more")
    return found


def rank_rows(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    source: Sequence[Row],
    asked: FewShot,
    inference: EvalBatching,
    *,
    window: int,
) -> RankingResult:
    """Rank the candidates of every row under every seed.

    The model must be in evaluation mode already. window: maximum tokens of a text.
    """
    try:
        found = RankingResult(notes=check_prompt(asked.prompt, tokenizer))
    except UserError as error:
        raise UserError(f"--prompt {asked.name}: {str(error).removeprefix('prompt: ')}") from None
    if not tokenizer.is_fast:
        raise UserError("few-shot: this backbone's tokenizer cannot say where each token starts (no tokenizer.json)")
    begin = SpecialTokens.of(tokenizer).prefix
    items = [fill_prompt(asked.prompt, row, spoken=asked.spoken) for row in rows]
    gold = np.array([item.gold for item in items])
    right: list[NDArray] = []
    chosen: list[NDArray] = []
    hits: dict[str, list[float]] = {name: [] for name in SCORES}
    for seed in asked.seeds if asked.shots else asked.seeds[:1]:
        contexts = _draw_shots(items, source, asked, seed)
        scores = _score_candidates(model, tokenizer, items, contexts, begin, asked, window, inference, found)
        for name, values in scores.items():
            picks = np.array([int(np.argmax(row)) for row in values])
            hits[name].append(float((picks == gold).mean()))
            if name == asked.score:
                right.append(picks == gold)
                chosen.append(picks)
    found.right, found.by_seed = np.array(right), hits[asked.score]
    found.others = {name: float(np.mean(values)) for name, values in hits.items() if values}
    found.predictions = [[items[i].names[pick] for i, pick in enumerate(picks)] for picks in chosen]
    found.figures = _ranking_metrics(items, gold, chosen, found.right, labelled=bool(asked.prompt.labels))
    return found


def _ranking_metrics(
    items: Sequence[FilledPrompt], gold: NDArray, chosen: Sequence[NDArray], right: NDArray, *, labelled: bool
) -> dict[str, ResampledMetric]:
    each = [dict[str, ResampledMetric]() for _ in chosen]
    for of, picks in zip(each, chosen, strict=True):
        if labelled:
            classification_metrics(gold.tolist(), picks.tolist(), resamples=0, confidence=0.95, seed=0, figures=of)
    share = right.mean(axis=0)
    chance = np.array([1.0 / len(item.said) for item in items])
    figures = {"accuracy": ResampledMetric.over([share], lambda x: x.mean(-1))}
    for name in each[0] if labelled else ():
        if name != "accuracy":
            figures[name] = _mean_metric([of[name] for of in each])
    return figures | {"chance": ResampledMetric.over([chance], lambda x: x.mean(-1))}


def _mean_metric(figures: Sequence[ResampledMetric]) -> ResampledMetric:
    return ResampledMetric(figures[0].rows, lambda drawn: np.mean([figure.of(drawn) for figure in figures], axis=0))


def _draw_shots(items: Sequence[FilledPrompt], source: Sequence[Row], asked: FewShot, seed: int) -> list[list[str]]:
    if not asked.shots:
        return [[] for _ in items]
    by = asked.prompt.by if asked.spoken is None else None
    pools: dict[str, list[Row]] = {}
    for row in source:
        pools.setdefault(str(row.values.get(by, "")) if by else "", []).append(row)
    whole = [row for pool in pools.values() for row in pool]
    drawn: dict[str, list[FilledPrompt]] = {}
    found = []
    for item in items:
        name = str(item.row.values.get(by, "")) if by else ""
        if name not in drawn:
            pool = pools.get(name, [])
            pool = pool if len(pool) > asked.shots else whole
            places = numpy_generator(seed, "shots", name).permutation(len(pool))[: asked.shots + 1]
            drawn[name] = [fill_prompt(asked.prompt, pool[i], spoken=asked.spoken) for i in places]
        others = [shot for shot in drawn[name] if (shot.before, shot.said) != (item.before, item.said)]
        found.append([shot.solved for shot in others[: asked.shots]])
    return found


def _score_candidates(
    model: Any,
    tokenizer: Any,
    items: Sequence[FilledPrompt],
    contexts: Sequence[list[str]],
    begin: Sequence[int],
    asked: FewShot,
    window: int,
    inference: EvalBatching,
    found: RankingResult,
) -> dict[str, list[NDArray[np.float64]]]:
    """Return every score of every candidate: `SCORES` → item → (K,)."""
    texts = [
        [
            _format_candidate(shots, before, said, item.after, asked)
            for before, said in zip(item.before, item.said, strict=True)
        ]
        for item, shots in zip(items, contexts, strict=True)
    ]
    made = _fit_to_window(tokenizer, items, contexts, texts, begin, asked, window, found)
    logs = score_candidates(model, made, inference)
    result: dict[str, list[NDArray[np.float64]]] = {name: [] for name in ("sum", "label", "mean", "byte")}
    for candidates, scored in zip(made, logs, strict=True):
        pairs = list(zip(candidates, scored, strict=True))
        result["sum"].append(np.array([one.sum() for one in scored]))
        result["label"].append(np.array([one[c.label[0] : c.label[1]].sum() for c, one in pairs]))
        result["mean"].append(np.array([one.mean() for one in scored]))
        result["byte"].append(np.array([one.sum() / c.bytes for c, one in pairs]))
    if asked.score == "pmi":
        neutral = [
            [_format_candidate([], item.neutral, said, item.after, asked) for said in item.said] for item in items
        ]
        free_of = _sum_log_likelihoods(model, tokenizer, neutral, begin, inference)
        result["pmi"] = [own - free for own, free in zip(result["sum"], free_of, strict=True)]
    if asked.score == "calibrated":
        free = [
            [
                _format_candidate(shots, empty, said, item.after, asked)
                for empty in item.content_free
                for said in item.said
            ]
            for item, shots in zip(items, contexts, strict=True)
        ]
        for own, sums in zip(
            result["label"], _sum_log_likelihoods(model, tokenizer, free, begin, inference, label=True), strict=True
        ):
            share = np.exp(_log_normalise(sums.reshape(-1, len(own)))).mean(axis=0)
            result.setdefault("calibrated", []).append(_log_normalise(own[None])[0] - np.log(share))
    return result


def _log_normalise(logs: NDArray) -> NDArray:
    top = logs - logs.max(-1, keepdims=True)
    shares: NDArray = top - np.log(np.exp(top).sum(-1, keepdims=True))
    return shares


def _format_candidate(shots: Sequence[str], before: str, said: str, after: str, asked: FewShot) -> tuple[str, str, str]:
    return "".join(shot + asked.prompt.separator for shot in shots) + before, said, after


def _sum_log_likelihoods(
    model: Any, tokenizer: Any, texts: Sequence[list[tuple[str, str, str]]], begin: Sequence[int],
    inference: EvalBatching,
    *, label: bool = False,
) -> list[NDArray[np.float64]]:  # fmt: skip
    """Return the log-likelihoods of texts; each distinct text is scored once."""
    distinct = list(dict.fromkeys(one for item in texts for one in item))
    made = tokenize_candidates(tokenizer, distinct, begin)
    logs = [scored[0] for scored in score_candidates(model, [[one] for one in made], inference)]
    known = {
        text: float((log[c.label[0] : c.label[1]] if label else log).sum())
        for text, c, log in zip(distinct, made, logs, strict=True)
    }
    return [np.array([known[one] for one in item]) for item in texts]


def _fit_to_window(
    tokenizer: Any,
    items: Sequence[FilledPrompt],
    contexts: Sequence[list[str]],
    texts: list[list[tuple[str, str, str]]],
    begin: Sequence[int],
    asked: FewShot,
    window: int,
    found: RankingResult,
) -> list[list[Candidate]]:
    """Return candidates that fit `window` tokens: whole worked examples are left out first, starting with the
    earliest."""
    flat = tokenize_candidates(tokenizer, [one for item in texts for one in item], begin)
    made, at = [], 0
    for item in texts:
        made.append(flat[at : at + len(item)])
        at += len(item)
    for place, candidates in enumerate(made):
        one_item = items[place]
        shots = list(contexts[place])
        while shots and max(len(one.ids) for one in candidates) > window:
            shots.pop(0)
            found.dropped += 1
            pairs = zip(one_item.before, one_item.said, strict=True)
            candidates = tokenize_candidates(
                tokenizer, [_format_candidate(shots, b, s, one_item.after, asked) for b, s in pairs], begin
            )
        if (over := max(len(one.ids) for one in candidates) - window) > 0:
            found.cut += 1
            if any(one.start - over < len(begin) + 1 for one in candidates):
                raise UserError(
                    f"{one_item.row.where}: a candidate alone is longer than the {window} tokens that the backbone "
                    "reads"
                )
            keep = len(begin)
            candidates = [
                Candidate((*one.ids[:keep], *one.ids[keep + over :]), one.start - over, one.label, one.bytes)
                for one in candidates
            ]
        made[place] = candidates
    return made


def mcnemar(ours: NDArray, theirs: NDArray) -> dict[str, Any]:
    """Return the exact McNemar test of two models' right answers to the same rows: the numbers of rows that only one of
    them gets right, and the two-sided p of their share being one half. Arguments: bool (rows,)."""
    from scipy.stats import binomtest

    gained, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    p = 1.0 if gained + lost == 0 else float(binomtest(gained, gained + lost).pvalue)
    return {"only_ours": gained, "only_theirs": lost, "p": p if math.isfinite(p) else None}
