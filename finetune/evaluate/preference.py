"""Which of two answers a model prefers: its implicit rewards, example by example, and figures of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..compute.loss import Head, answer_log_probs, backbone_alone, find_head, head_probe
from ..compute.numerics import evaluating
from ..data.eval_batching import ALONE, EvalBatching
from ..data.example import Example
from ..data.micro_batch import PreferenceTargets
from ..models.anatomy import vocabulary_size
from .bootstrap import BootstrapInterval
from .metrics import functions
from .perplexity import LOGITS

if TYPE_CHECKING:
    from ..tasks import Task
    from .evaluator import Evaluator


Ratio = tuple[np.ndarray, np.ndarray]
"""What a metric makes of N examples: values and counts, (N,) each."""


@dataclass(frozen=True)
class Scores:
    """What a model makes of the answers of N examples, S of each: chosen and rejected, or only one."""

    rewards: np.ndarray
    """(N, S) float64: implicit rewards (`Preference.rewards`)."""
    losses: np.ndarray
    """(N,) float64: summed over what the loss is divided by (`items`)."""
    signs: np.ndarray
    """(N, S): 1 of an answer that is chosen or desirable, else −1."""
    items: int
    """Pairs of an example, or answers: 1 or 2."""
    log_ratios: np.ndarray | None
    """(N, S): log p − log p of the backbone, nats an answer; None of a loss that compares with nothing."""

    @property
    def paired(self) -> bool:
        """Whether examples have two answers."""
        return self.rewards.shape[1] == 2

    def ratios(self) -> dict[str, Ratio]:
        """Σ values and Σ counts of every metric that these examples have, by name."""
        found = {name: of(self.rewards, self.signs) for name, of in functions("preferences").items()}
        if self.log_ratios is not None:
            found |= {name: of(self.log_ratios) for name, of in functions("reference").items()}
        return {name: (values, counts) for name, (values, counts) in found.items() if np.any(counts)}


@torch.no_grad()
def score_answers(
    model: Any,
    examples: Sequence[Example],
    inference: EvalBatching,
    *,
    task: Task,
    head: Head | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Scores:
    """Rewards and losses of every example, in order; KTO's drift is of all of them together.

    Reads each answer with the adapter and, where the loss compares with the backbone, without.
    On a mesh every rank calls this and gets all.
    """
    count = 1 + (examples[0].rejected_ids is not None)
    found = np.zeros((5, len(examples), count))  # log p, that of the backbone, tokens, signs, mismatched log-ratio
    whole = None if head is not None else LOGITS // (count * vocabulary_size(model))
    with evaluating(model):
        for micro in inference.batches(examples, task, max_tokens=whole):
            batch = micro.to(inference.device)
            sides = batch.sides
            assert sides is not None
            with inference.precision():
                columns = [answer_log_probs(model, batch, task=task, head=head)]
                with backbone_alone(model):
                    columns.append(
                        answer_log_probs(model, batch, task=task, head=head)
                        if task.has_reference
                        else torch.zeros_like(columns[0])
                    )
                columns += [sides.lengths, sides.signs]
                if sides.mismatched is not None:
                    apart = answer_log_probs(model, sides.mismatched, task=task, head=head)
                    with backbone_alone(model):
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
    return Scores(
        rewards.numpy(),
        losses.sum(1).numpy(),
        signs.view(-1, count).numpy(),
        losses.shape[1],
        (log_probs - reference).view(-1, count).numpy() if task.has_reference else None,
    )


def answer_scores(judge: Evaluator, examples: Sequence[Example]) -> Scores:
    """`score_answers` of the model under judgement."""
    inference, head = judge.inference, None
    if inference.share == ALONE:
        first = next(inference.batches(examples[:1], judge.task))
        with inference.precision():
            head = find_head(judge.model, head_probe(first.to(inference.device).inputs), task=judge.task)
    return score_answers(judge.model, examples, inference, task=judge.task, head=head)


def judge_answers(judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
    """`loss`, and of pairs `preference_accuracy, reward_margin, chosen_reward, rejected_reward`; of single answers the
    mean rewards of those that are desirable (chosen) and of the others (rejected). Of a loss with a reference also
    `reference_distance`."""
    scores = answer_scores(judge, examples)
    figures = {"loss": judge.ratio("loss", scores.losses, np.full(len(examples), scores.items))}
    return figures | {name: judge.ratio(name, *ratio) for name, ratio in scores.ratios().items()}


def quick_figures(scores: Scores) -> dict[str, float]:
    """The same figures without intervals."""
    figures = {name: float(values.sum() / counts.sum()) for name, (values, counts) in scores.ratios().items()}
    return {"loss": float(scores.losses.sum() / (len(scores.losses) * scores.items)), **figures}


# --------------------------------------------------- rewards and signs, or log-ratios (N, S) to Σ values / Σ counts


def accuracy(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Pairs whose chosen answer has the higher reward; a tie is half of one."""
    ahead = _margins(rewards)
    return (ahead > 0) + 0.5 * (ahead == 0), _pairs(rewards)


def margin(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Reward of the chosen answer less that of the rejected one."""
    return _margins(rewards), _pairs(rewards)


def chosen(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Reward of answers that are chosen or desirable."""
    return (rewards * (signs > 0)).sum(1), (signs > 0).sum(1).astype(float)


def rejected(rewards: np.ndarray, signs: np.ndarray) -> Ratio:
    """Reward of answers that are rejected or undesirable."""
    return (rewards * (signs < 0)).sum(1), (signs < 0).sum(1).astype(float)


def distance(log_ratios: np.ndarray) -> Ratio:
    """Nats by which an answer's log-likelihood is away from the backbone's, up or down."""
    return np.abs(log_ratios).sum(1), np.full(len(log_ratios), float(log_ratios.shape[1]))


def _margins(rewards: np.ndarray) -> np.ndarray:
    return rewards[:, 0] - rewards[:, -1]


def _pairs(rewards: np.ndarray) -> np.ndarray:
    return np.full(len(rewards), float(rewards.shape[1] == 2))
