"""Judge a model on encoded examples: every figure with a bootstrap interval over items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..config import Chat, Classify, Completion, Evaluate, MaskedLM, Regress, Seq2Seq, Task
from ..data.encoding import IGNORE, Example
from ..errors import UserError
from .bootstrap import Interval, ratio_interval
from .chrf import chrf
from .classify import class_scores, head_scores
from .generate import exact_matches, generate_answers
from .metrics import judge_classes
from .mode import evaluating
from .multilabel import judge_sets
from .perplexity import document_nats
from .ranking import rank_choices
from .regression import judge_numbers
from .share import ALONE, Share


def evaluate(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    task: Task,
    config: Evaluate,
    label_names: Sequence[str] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    autocast_dtype: torch.dtype | None = None,
    share: Share = ALONE,
) -> dict[str, Interval]:
    """Figures of `model` on `examples`, in evaluation mode, without gradients and without a random draw of its own.

    Returns, each as `{value, low, high, n}` with n the number of examples:
        language-model, completion, chat, seq2seq: `loss` (nats per supervised token), `perplexity` (its exponential),
            `bits_per_byte` (nats / ln 2 / UTF-8 bytes of the supervised text);
        completion with `score: rank`: also `accuracy, f1_macro, matthews, majority_floor`;
        completion, chat or seq2seq with `score: generate`: also `exact_match` (chat: of each row's last answer),
            seq2seq `chrf` too;
        masked-lm: `loss` (nats per hidden token), `pseudo_perplexity` (its exponential);
        classify: `loss` (nats per example), `accuracy, f1_macro, matthews, majority_floor`;
        classify with `multi`: `loss`, and as `finetune.evaluate.multilabel.judge_sets`;
        regress: `loss` (squared error per example as training sees it), and as `judge_numbers`. The model must answer
            in the targets' own units (`finetune.data.units.fold_units`).
    A figure that is not finite is null. On a mesh every rank calls this and gets the same figures; `share` says which
    rows are its own.

    Raises:
        UserError: no examples, or answers that do not fit the backbone.
    """
    if not examples:
        raise UserError("there is nothing to evaluate: the split has no examples")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    how: dict[str, Any] = {
        "batch_size": config.batch_size,
        "pad_id": pad_id,
        "device": device,
        "autocast_dtype": autocast_dtype,
        "share": share,
    }
    draw: dict[str, Any] = {"resamples": config.bootstrap, "confidence": config.confidence, "seed": seed}
    with evaluating(model):
        if isinstance(task, Regress):
            return _numbers(head_scores(model, examples, task=task, **how)[1][:, 0], examples, draw)
        if isinstance(task, Classify) and task.multi:
            nats, logits = head_scores(model, examples, task=task, **how)
            loss = {"loss": ratio_interval(nats, np.ones(len(nats)), **draw)}
            return loss | judge_sets(np.array([example.labels for example in examples]) > 0, logits, **draw)
        if isinstance(task, Classify):
            nats, predicted = class_scores(model, examples, **how)
            loss = {"loss": ratio_interval(nats, np.ones(len(nats)), **draw)}
            return loss | judge_classes([_class(example) for example in examples], predicted.tolist(), **draw)
        if isinstance(task, Completion) and task.score == "rank":
            gold = [_gold(example, label_names) for example in examples]
            scores = rank_choices(model, examples, **how)
            # The row's own completion is one of the choices: its surprise is known.
            nats = -scores[np.arange(len(gold)), gold]
            figures = _surprise(nats, np.array([_supervised(example) for example in examples]), examples, draw)
            return figures | judge_classes(gold, scores.argmax(-1).tolist(), **draw)
        surprise = document_nats(model, examples, task=task, **how)
        if isinstance(task, MaskedLM):
            return {
                "loss": ratio_interval(*surprise, **draw),
                "pseudo_perplexity": ratio_interval(*surprise, transform=np.exp, **draw),
            }
        figures = _surprise(*surprise, examples, draw)
        if isinstance(task, Completion | Chat | Seq2Seq) and task.score == "generate":
            del how["pad_id"]
            beams = (task.num_beams or 1) if isinstance(task, Seq2Seq) else 1
            asked = [example for example in examples if example.answer is not None]
            if not asked:  # conversations whose last answer `train.max_length` cut off
                return figures
            answers = generate_answers(
                model, tokenizer, asked, max_new_tokens=task.max_new_tokens, num_beams=beams, **how
            )
            figures["exact_match"] = ratio_interval(exact_matches(answers, asked), np.ones(len(answers)), **draw)
            if isinstance(task, Seq2Seq):
                shared = [chrf(said, example.answer or "") for said, example in zip(answers, asked, strict=True)]
                figures["chrf"] = ratio_interval(shared, np.ones(len(shared)), **draw)
    return figures


def _numbers(predicted: np.ndarray, examples: Sequence[Example], draw: dict[str, Any]) -> dict[str, Interval]:
    units = examples[0].units
    assert units is not None
    true = np.array([example.labels for example in examples], dtype=np.float64)
    loss = ((predicted - true) / units.scale) ** 2
    figures = {"loss": ratio_interval(loss, np.ones(len(loss)), **draw)}
    return figures | judge_numbers(true, predicted, mean=units.mean, **draw)


def _surprise(
    nats: np.ndarray, tokens: np.ndarray, examples: Sequence[Example], draw: dict[str, Any]
) -> dict[str, Interval]:
    size = np.array([example.bytes for example in examples], dtype=np.float64)
    return {
        "loss": ratio_interval(nats, tokens, **draw),
        "perplexity": ratio_interval(nats, tokens, transform=np.exp, **draw),
        "bits_per_byte": ratio_interval(nats, size * math.log(2.0), **draw),
    }


def _supervised(example: Example) -> int:
    assert isinstance(example.labels, list)
    return sum(label != IGNORE for label in example.labels[1:])


def _class(example: Example) -> int:
    assert isinstance(example.labels, int)
    return example.labels


def _gold(example: Example, label_names: Sequence[str] | None) -> int:
    if example.gold is None or (label_names is not None and len(example.choices or ()) != len(label_names)):
        raise ValueError("examples that are ranked must be encoded with task.score 'rank' and the same label names")
    return example.gold
