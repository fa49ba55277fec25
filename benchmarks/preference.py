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

from benchmarks._harness import Benchmark, limit_threads
from benchmarks.train_step import BACKBONE, SEED, common_arguments, model_of, ours, recorder
from flatshift.finetune.tasks import Preference

UPDATES = 50
LOSSES: dict[str, tuple[Preference, list[str]]] = {
    "dpo": (Preference(answer=" {answer}"), ["sigmoid"]),
    "dpo, per token": (Preference(answer=" {answer}", per_token=True, beta=2.0), ["sigmoid_norm"]),
    "ipo": (Preference(answer=" {answer}", loss="ipo"), ["ipo"]),
}


def batches_of(task: Preference) -> Any:
    """Pairs of the shipped sample, 2 micro-batches of 2 an update."""
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.rows import read_rows
    from flatshift.finetune.models.backbone import open_backbone

    tokenizer = open_backbone(BACKBONE).tokenizer
    rows = read_rows(["sample:statements/train"], required=task.columns())
    encoded = encode(rows, task=task, tokenizer=tokenizer, max_length=96)
    return TrainingDataLoader(
        encoded.examples, task=task, batch_size=2, accumulate=2, seed=SEED, max_length=96, pad_id=tokenizer.pad_token_id
    )


def theirs(
    task: Preference, loss: list[str], batches: Any, *, steps: int, losses: list[float] | None = None
) -> Callable[[], Any]:
    """A ready run of TRL's DPOTrainer over the same micro-batches; calling it trains."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from flatshift.finetune.data.example import IGNORE
    from flatshift.finetune.models.backbone import open_backbone

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


def difference(name: str, *, steps: int = UPDATES) -> float:
    """Largest relative difference of the two loss curves."""
    task, loss = LOSSES[name]
    batches = batches_of(task)
    mine: list[float] = []
    its: list[float] = []
    ours(task, batches, steps=steps, losses=mine)()
    theirs(task, loss, batches, steps=steps, losses=its)()
    if not len(mine) == len(its) == steps:
        raise RuntimeError(f"{len(mine)} losses of ours, {len(its)} of TRL, {steps} asked for")
    print(f"  {name}: loss {mine[0]:.5f} → {mine[-1]:.5f}, TRL {its[0]:.5f} → {its[-1]:.5f}")
    return max(abs(m / t - 1) for m, t in zip(mine, its, strict=True))


def main() -> None:
    """Measure and write benchmarks/results/preference.json."""
    limit_threads(1)
    bench = Benchmark("preference", packages=("torch", "transformers", "peft", "trl"))
    for name in LOSSES:
        what = f"largest relative difference of the loss from TRL's DPOTrainer over {UPDATES} updates, {name}"
        bench.row(what, "relative", ours=difference(name), maximum=1e-5)
    bench.finish()


if __name__ == "__main__":
    main()
