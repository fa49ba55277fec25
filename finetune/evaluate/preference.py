"""Preferences of a model between two answers: its implicit rewards per example, and metrics of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..compute.loss import Head, answer_log_probs, disable_adapters, find_head, head_probe
from ..compute.micro_batch import PreferenceTargets
from ..compute.numerics import evaluation_mode
from ..compute.protocols import LossTask
from ..data.eval_batching import ALONE, EvalBatching
from ..data.example import Example
from ..models.anatomy import vocabulary_size
from .bootstrap import BootstrapInterval
from .evaluator import Evaluator
from .metrics import metric_functions
from .perplexity import LOGITS

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

    def ratios(self) -> dict[str, Ratio]:
        """Return Σ values and Σ counts of every metric that applies to these examples, by name."""
        ratios = {
            name: function(self.rewards, self.signs) for name, function in metric_functions("preferences").items()
        }
        if self.log_ratios is not None:
            ratios |= {name: function(self.log_ratios) for name, function in metric_functions("reference").items()}
        return {name: (values, counts) for name, (values, counts) in ratios.items() if np.any(counts)}


@torch.no_grad()
def score_answers(
    model: Any,
    examples: Sequence[Example],
    inference: EvalBatching,
    *,
    task: LossTask,
    head: Head | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> PreferenceScores:
    """Return rewards and losses of every example, in order; KTO's drift is computed over all of them.

    Reads each answer with the adapter and, if the loss has a reference, without it.
    On a mesh every rank calls this and gets all results.
    """
    count = 1 + (examples[0].rejected_ids is not None)
    scores = np.zeros((5, len(examples), count))  # log p, that of the base model, tokens, signs, mismatched log-ratio
    max_tokens = None if head is not None else LOGITS // (count * vocabulary_size(model))
    with evaluation_mode(model):
        for micro in inference.batches(examples, task, max_tokens=max_tokens):
            batch = micro.to(inference.device)
            targets = batch.preference
            assert targets is not None
            with inference.precision():
                columns = [answer_log_probs(model, batch, task=task, head=head)]
                with disable_adapters(model):
                    columns.append(
                        answer_log_probs(model, batch, task=task, head=head)
                        if task.has_reference
                        else torch.zeros_like(columns[0])
                    )
                columns += [targets.lengths, targets.signs]
                if targets.mismatched is not None:
                    mismatched = answer_log_probs(model, targets.mismatched, task=task, head=head)
                    with disable_adapters(model):
                        columns.append(mismatched - answer_log_probs(model, targets.mismatched, task=task, head=head))
            if micro.samples:
                index = np.array([row[0] for row in micro.rows]).reshape(-1, count)[:, 0]
                for i, column in enumerate(columns):
                    scores[i, index] = column.cpu().double().numpy().reshape(-1, count)
            heartbeat()
    log_probs, reference, lengths, signs, mismatched = torch.from_numpy(inference.share.add(scores)).flatten(1)
    targets = PreferenceTargets(
        signs,
        lengths,
        count == 2,
        reference=reference if task.has_reference else None,
        drift=mismatched.mean().clamp(min=0.0) if task.is_unpaired else None,
    )
    losses = task.answer_losses(log_probs, targets).view(len(examples), -1)
    rewards = task.rewards(log_probs, targets).view(-1, count)
    return PreferenceScores(
        rewards.numpy(),
        losses.sum(1).numpy(),
        signs.view(-1, count).numpy(),
        losses.shape[1],
        (log_probs - reference).view(-1, count).numpy() if task.has_reference else None,
    )


def answer_scores(evaluator: Evaluator, examples: Sequence[Example]) -> PreferenceScores:
    """Return `score_answers` of the model under evaluation."""
    model, task, inference, head = evaluator.model, evaluator.task, evaluator.inference, None
    if inference.share == ALONE:
        probe = next(inference.batches(examples[:1], task))
        with inference.precision():
            head = find_head(model, head_probe(probe.to(inference.device).inputs), task=task)
    return score_answers(model, examples, inference, task=task, head=head)


def preference_metrics(evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
    """Return `loss`, and for pairs `preference_accuracy, reward_margin, chosen_reward, rejected_reward`; for single
    answers the mean rewards of desirable (chosen) and of other (rejected) ones. With a reference also
    `reference_distance`."""
    scores = answer_scores(evaluator, examples)
    loss = evaluator.record_ratio("loss", scores.losses, np.full(len(examples), scores.items))
    return {"loss": loss} | {name: evaluator.record_ratio(name, *ratio) for name, ratio in scores.ratios().items()}


def point_metrics(scores: PreferenceScores) -> dict[str, float]:
    """Return the same metrics without intervals."""
    figures = {name: float(values.sum() / counts.sum()) for name, (values, counts) in scores.ratios().items()}
    return {"loss": float(scores.losses.sum() / (len(scores.losses) * scores.items)), **figures}


def preference_accuracy(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Count the pairs whose chosen answer has the higher reward; a tie counts half."""
    margins, counts = reward_margin(rewards, signs)
    return (margins > 0) + 0.5 * (margins == 0), counts


def reward_margin(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Return the reward of the chosen answer minus that of the rejected one."""
    return rewards[:, 0] - rewards[:, -1], np.full(len(rewards), float(rewards.shape[1] == 2))


def chosen_reward(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Return the rewards of answers that are chosen or desirable."""
    return (rewards * (signs > 0)).sum(1), (signs > 0).sum(1).astype(float)


def rejected_reward(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Return the rewards of answers that are rejected or undesirable."""
    return chosen_reward(rewards, -signs)


def reference_distance(log_ratios: np.ndarray) -> Ratio:
    """Return the absolute difference, in nats, of an answer's log-likelihood from the base model's."""
    return np.abs(log_ratios).sum(1), np.full(len(log_ratios), float(log_ratios.shape[1]))
