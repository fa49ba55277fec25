"""Preferences of a model between two answers: its implicit rewards per example, and metrics of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..compute.loss import Head, answer_log_probs, disable_adapters, find_head, head_probe
from ..compute.micro_batch import PreferenceTargets
from ..compute.numerics import evaluation_mode
from ..data.eval_batching import ALONE, EvalBatching
from ..data.example import Example
from ..models.anatomy import vocabulary_size
from .bootstrap import BootstrapInterval
from .metrics import metric_functions
from .perplexity import LOGITS
from .task import EvaluatedTask

if TYPE_CHECKING:
    from .evaluator import Evaluator


Ratio = tuple[np.ndarray, np.ndarray]
"""Values and counts of a metric for N examples, (N,) each."""


@dataclass(frozen=True)
class PreferenceScores:
    """Rewards and losses of the answers of N examples, S of each: chosen and rejected, or only one."""

    rewards: np.ndarray
    """(N, S) float64: implicit rewards (`Preference.rewards`)."""
    losses: np.ndarray
    """(N,) float64: losses summed over an example's `items`."""
    signs: np.ndarray
    """(N, S): 1 for an answer that is chosen or desirable, else −1."""
    items: int
    """Terms of the loss's mean per example, 1 or 2: pairs, or answers."""
    log_ratios: np.ndarray | None
    """(N, S): log p − log p of the base model, nats per answer; None for a loss without a reference."""

    @property
    def paired(self) -> bool:
        """True if examples have two answers."""
        return self.rewards.shape[1] == 2

    def ratios(self) -> dict[str, Ratio]:
        """Return Σ values and Σ counts of every metric that applies to these examples, by name."""
        found = {name: of(self.rewards, self.signs) for name, of in metric_functions("preferences").items()}
        if self.log_ratios is not None:
            found |= {name: of(self.log_ratios) for name, of in metric_functions("reference").items()}
        return {name: (values, counts) for name, (values, counts) in found.items() if np.any(counts)}


@torch.no_grad()
def score_answers(
    model: Any,
    examples: Sequence[Example],
    inference: EvalBatching,
    *,
    task: EvaluatedTask,
    head: Head | None = None,
    beat: Callable[[], None] = lambda: None,
) -> PreferenceScores:
    """Return rewards and losses of every example, in order; KTO's drift is computed over all of them.

    Reads each answer with the adapter and, if the loss has a reference, without it.
    On a mesh every rank calls this and gets all results.
    """
    count = 1 + (examples[0].rejected_ids is not None)
    found = np.zeros((5, len(examples), count))  # log p, that of the base model, tokens, signs, mismatched log-ratio
    whole = None if head is not None else LOGITS // (count * vocabulary_size(model))
    with evaluation_mode(model):
        for micro in inference.batches(examples, task, max_tokens=whole):
            batch = micro.to(inference.device)
            sides = batch.preference
            assert sides is not None
            with inference.precision():
                columns = [answer_log_probs(model, batch, task=task, head=head)]
                with disable_adapters(model):
                    columns.append(
                        answer_log_probs(model, batch, task=task, head=head)
                        if task.has_reference
                        else torch.zeros_like(columns[0])
                    )
                columns += [sides.lengths, sides.signs]
                if sides.mismatched is not None:
                    apart = answer_log_probs(model, sides.mismatched, task=task, head=head)
                    with disable_adapters(model):
                        columns.append(apart - answer_log_probs(model, sides.mismatched, task=task, head=head))
            if micro.samples:
                index = np.array([row[0] for row in micro.rows]).reshape(-1, count)[:, 0]
                for place, column in enumerate(columns):
                    found[place, index] = column.cpu().double().numpy().reshape(-1, count)
            beat()
    log_probs, reference, lengths, signs, apart = torch.from_numpy(inference.share.add(found)).flatten(1)
    sides = PreferenceTargets(
        signs,
        lengths,
        count == 2,
        reference=reference if task.has_reference else None,
        drift=apart.mean().clamp(min=0.0) if task.is_unpaired else None,
    )
    losses = task.answer_losses(log_probs, sides).view(len(examples), -1)
    rewards = task.rewards(log_probs, sides).view(-1, count)
    return PreferenceScores(
        rewards.numpy(),
        losses.sum(1).numpy(),
        signs.view(-1, count).numpy(),
        losses.shape[1],
        (log_probs - reference).view(-1, count).numpy() if task.has_reference else None,
    )


def answer_scores(judge: Evaluator, examples: Sequence[Example]) -> PreferenceScores:
    """Return `score_answers` of the model under evaluation."""
    inference, head = judge.inference, None
    if inference.share == ALONE:
        first = next(inference.batches(examples[:1], judge.task))
        with inference.precision():
            head = find_head(judge.model, head_probe(first.to(inference.device).inputs), task=judge.task)
    return score_answers(judge.model, examples, inference, task=judge.task, head=head)


def preference_metrics(judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
    """Return `loss`, and for pairs `preference_accuracy, reward_margin, chosen_reward, rejected_reward`; for single
    answers the mean rewards of desirable (chosen) and of other (rejected) ones. With a reference also
    `reference_distance`."""
    scores = answer_scores(judge, examples)
    figures = {"loss": judge.ratio("loss", scores.losses, np.full(len(examples), scores.items))}
    return figures | {name: judge.ratio(name, *ratio) for name, ratio in scores.ratios().items()}


def point_metrics(scores: PreferenceScores) -> dict[str, float]:
    """Return the same metrics without intervals."""
    figures = {name: float(values.sum() / counts.sum()) for name, (values, counts) in scores.ratios().items()}
    return {"loss": float(scores.losses.sum() / (len(scores.losses) * scores.items)), **figures}


# --------------------------------------------------- rewards and signs, or log-ratios (N, S) to Σ values / Σ counts


def accuracy(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Count the pairs whose chosen answer has the higher reward; a tie counts half."""
    ahead = _margins(rewards)
    return (ahead > 0) + 0.5 * (ahead == 0), _pair_counts(rewards)


def margin(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Return the reward of the chosen answer minus that of the rejected one."""
    return _margins(rewards), _pair_counts(rewards)


def chosen(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Return the rewards of answers that are chosen or desirable."""
    return (rewards * (signs > 0)).sum(1), (signs > 0).sum(1).astype(float)


def rejected(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Return the rewards of answers that are rejected or undesirable."""
    return (rewards * (signs < 0)).sum(1), (signs < 0).sum(1).astype(float)


def distance(log_ratios: np.ndarray) -> Ratio:
    """Return the absolute difference, in nats, of an answer's log-likelihood from the base model's."""
    return np.abs(log_ratios).sum(1), np.full(len(log_ratios), float(log_ratios.shape[1]))


def _margins(rewards: np.ndarray) -> np.ndarray:
    return rewards[:, 0] - rewards[:, -1]


def _pair_counts(rewards: np.ndarray) -> np.ndarray:
    return np.full(len(rewards), float(rewards.shape[1] == 2))
