"""Preference tuning beside TRL's DPOTrainer: the same start, the same pairs, the same optimizer.

    python -m benchmarks.preference

The shipped decoder on pairs of the shipped sample `statements`, LoRA r = 8, 50 updates of 2 micro-batches of 2 pairs,
float32, one thread: how far the losses are apart. Both read every answer twice, with the adapter and without. TRL has
no label smoothing of its `sigmoid` loss, and its KTO, CPO and ORPO trainers pair and tokenise rows themselves; those
losses are compared with the papers' formulas in float64 (tests/parity).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks._harness import Benchmark, limit_threads
from benchmarks.train_step import BACKBONE, batches_of, common_arguments, largest_difference, model_of, ours, recorder
from flatshift.finetune.data.example import IGNORE
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.tasks import Preference

UPDATES = 50
LOSSES: dict[str, tuple[Preference, list[str]]] = {
    "dpo": (Preference(answer=" {answer}"), ["sigmoid"]),
    "dpo, per token": (Preference(answer=" {answer}", per_token=True, beta=2.0), ["sigmoid_norm"]),
    "ipo": (Preference(answer=" {answer}", loss="ipo"), ["ipo"]),
}


def theirs(
    task: Preference, loss: list[str], batches: Any, *, steps: int, losses: list[float] | None = None
) -> Callable[[], Any]:
    """A ready run of TRL's DPOTrainer over the same micro-batches; calling it trains."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    transformers.utils.logging.set_verbosity_error()

    class Prepared(DPOTrainer):  # type: ignore[misc, valid-type, unused-ignore]
        """Rows come as micro-batches that are tokenised already."""

        def _prepare_dataset(self, dataset: Any, *arguments: Any, **how: Any) -> Any:
            return dataset

    def collate(batch: list[dict[str, int]]) -> dict[str, Any]:
        micro = micros[batch[0]["number"]]
        turn = torch.cat([torch.arange(0, len(micro.labels), 2), torch.arange(1, len(micro.labels), 2)])
        rows = {name: tensor[turn] for name, tensor in micro.inputs.items()}
        return {**rows, "completion_mask": (micro.labels[turn] != IGNORE).long()}

    micros = [micro for step in range(steps) for micro in batches.at(step)]
    arguments = DPOConfig(
        **common_arguments(batches, steps=steps, precision="fp32", device="cpu", clip=1.0, log=losses is not None),
        beta=task.scale,
        loss_type=loss,
        max_length=None,
        gradient_checkpointing=False,
    )
    built = Prepared(
        model=model_of(task, "fp32"),
        args=arguments,
        train_dataset=Dataset.from_dict({"number": list(range(len(micros)))}),
        processing_class=open_backbone(BACKBONE).tokenizer,
        data_collator=collate,
        callbacks=[] if losses is None else [recorder(losses)],
    )
    built.remove_callback(transformers.PrinterCallback)
    return built.train  # type: ignore[no-any-return, unused-ignore]


def main() -> None:
    """Measure and write benchmarks/results/preference.json."""
    limit_threads(1)
    bench = Benchmark("preference", packages=("torch", "transformers", "peft", "trl"))
    for name, (task, loss) in LOSSES.items():
        sample = {"source": "sample:statements/train", "limit": 100_000}
        batches = batches_of(task, rows=2, length=96, accumulate=2, **sample)
        mine: list[float] = []
        its: list[float] = []
        ours(task, batches, steps=UPDATES, losses=mine)()
        theirs(task, loss, batches, steps=UPDATES, losses=its)()
        what = f"largest relative difference of the loss from TRL's DPOTrainer over {UPDATES} updates, {name}"
        bench.row(what, "relative", ours=largest_difference(mine, its, UPDATES), maximum=1e-5)
    bench.finish()


if __name__ == "__main__":
    main()
