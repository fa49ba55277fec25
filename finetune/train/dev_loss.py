"""Dev loss during a stage, which selects its best step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..compute import attention
from ..compute.loss import Head, batch_loss, loss_sum
from ..compute.numerics import evaluation_mode
from ..evaluate.preference import point_metrics, score_answers
from .deferred_metrics import read_numbers

if TYPE_CHECKING:
    from ..data.eval_batching import EvalBatching
    from ..data.example import Example
    from ..parallel.engine import Engine
    from ..tasks import Task


@torch.no_grad()
def dev_metrics(
    engine: Engine,
    examples: Sequence[Example],
    inference: EvalBatching,
    *,
    task: Task,
    head: Head | None,
) -> dict[str, float]:
    """Return the dev metrics: `loss` in nats per target token or example (regress: squared error), not smoothed,
    `accuracy` for classification (multi: of whole sets of classes), and for answers those of
    `flatshift.finetune.evaluate.preference`.

    If reading makes the host wait for the device, everything is read once, at the end. Collective on a mesh.

    Args:
        head: as found by the stage (`flatshift.finetune.compute.loss.find_head`).
    """
    model, judged = engine.eval_model, task.for_evaluation()
    if task.traits.is_answer_level:
        scores = score_answers(
            model, examples, inference, task=judged, head=engine.usable(head), heartbeat=engine.heartbeat
        )
        engine.reshard()
        return point_metrics(scores)
    found: list[torch.Tensor] = []  # loss and number of correct answers per batch
    counts: list[int] = []
    with evaluation_mode(model):
        for micro in inference.batches(examples, task):
            batch = micro.to(engine.device)
            with inference.precision():
                if judged.traits.is_sequence_level:
                    with attention.packed_batch(batch) as inputs:
                        logits = model(**inputs).logits
                    loss = loss_sum(logits, batch.labels, task=judged)
                    right = judged.answered_right(logits, batch.labels).sum() if judged.traits.has_accuracy else None
                else:
                    loss = batch_loss(model, batch, task=judged, head=engine.usable(head))
                    right = None
            if micro.samples:
                found.append(torch.stack([loss.double(), torch.zeros_like(loss) if right is None else right.double()]))
                counts.append(batch.supervised)
            engine.heartbeat()
    engine.reshard()
    sums = torch.zeros(3, dtype=torch.float64)  # loss, correct answers, targets
    for pair, count in zip(read_numbers(found), counts, strict=True):
        sums += torch.tensor([*pair, count], dtype=torch.float64)
    loss_of, right_of, count_of = inference.share.add(sums.numpy()).tolist()
    figures = {"loss": loss_of / max(count_of, 1)}
    return {**figures, "accuracy": right_of / max(count_of, 1)} if task.traits.has_accuracy else figures
