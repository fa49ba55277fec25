"""What one update sends over a mesh, counted call by call, beside formulas of the model's sizes alone.

    python -m benchmarks.sharding_traffic

A case holds if every kind of traffic has exactly the bytes of its formula (`benchmarks._sized`, where Ψ is the bytes of
all weights and Ψ_l of the trained ones) and there is no other kind; calls of at most 64 bytes (losses, norms, verdicts)
are counted in a row of their own. Bytes are of whole tensors (`benchmarks._collectives`); of a pipeline they are added
up over its stages.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks._collectives import SCALARS
from benchmarks._harness import Benchmark
from benchmarks._ranks import on_ranks
from benchmarks._sized import (
    GGPO_PROBES,
    Bytes,
    Sizes,
    both,
    ggpo_sharded,
    ggpo_tensor,
    pipeline,
    save_backbone,
    scattered,
    sharded,
    tensor,
    tensor_by_tokens,
    tensor_recomputed,
    vocabulary,
    whole_factors,
)


@dataclass(frozen=True)
class Case:
    """A mesh, what else is set, and the formula of what it sends."""

    name: str
    mesh: dict[str, Any]
    expected: Callable[[Sizes], Bytes]
    sizes: Sizes = field(default_factory=Sizes)
    settings: dict[str, Any] = field(default_factory=dict)
    """Any of accumulate, checkpointing, precision, ggpo (step: 0 recomputes the row norms, 1 does not)."""

    @property
    def ranks(self) -> int:
        width = 1
        for axis in ("replicate", "dp", "tp", "pp"):
            width *= self.mesh.get(axis, 1)
        return width


def cases() -> list[Case]:
    """All that is measured."""
    plain = Sizes()
    return [
        Case("dp 2", {"dp": 2}, sharded),
        Case("dp 2, weights kept gathered", {"dp": 2, "reshard": False}, lambda s: sharded(s, gathers=1)),
        Case("dp 2, three micro-batches", {"dp": 2}, lambda s: sharded(s, gathers=6), settings={"accumulate": 3}),
        Case("dp 2, blocks recomputed", {"dp": 2}, sharded, settings={"checkpointing": "full"}),
        Case("dp 2, bf16", {"dp": 2}, sharded, replace(plain, item=2), {"precision": "bf16"}),
        Case(
            "dp 2, adapters replicated",
            {"dp": 2, "adapters": "replicate"},
            lambda s: {"dp all-gather": 2 * s.frozen_bytes, "dp all-reduce": s.trained_bytes},
        ),
        Case(
            "dp 2, ZeRO-2, two micro-batches",
            {"dp": 2, "zero": 2},
            lambda s: {"dp all-gather": 4 * s.trained_bytes, "dp reduce-scatter": 2 * s.trained_bytes},
            settings={"accumulate": 2},
        ),
        Case(
            "dp 2, ZeRO-1, two micro-batches",
            {"dp": 2, "zero": 1},
            lambda s: {"dp all-gather": 4 * s.trained_bytes, "dp reduce-scatter": s.trained_bytes},
            settings={"accumulate": 2},
        ),
        Case("replicate 2", {"replicate": 2}, lambda s: {"replicate all-reduce": s.trained_bytes}),
        Case("tp 2", {"tp": 2}, tensor),
        Case("tp 2, tokens split", {"tp": 2, "sequence_parallel": True}, tensor_by_tokens),
        Case("tp 2, blocks recomputed", {"tp": 2}, tensor_recomputed, settings={"checkpointing": "full"}),
        Case("tp 2, twice the blocks", {"tp": 2}, tensor, replace(plain, blocks=8)),
        Case("tp 2, twice the vocabulary", {"tp": 2}, tensor, replace(plain, vocabulary=2048)),
        Case("pp 2", {"pp": 2}, lambda s: pipeline(s, stages=2)),
        Case("pp 2, interleaved", {"pp": 2, "schedule": "interleaved"}, lambda s: pipeline(s, stages=4)),
        Case("GGPO, dp 2", {"dp": 2}, lambda s: ggpo_sharded(s, fresh=False), settings={"ggpo": 1}),
        Case("GGPO, dp 2, new row norms", {"dp": 2}, lambda s: ggpo_sharded(s, fresh=True), settings={"ggpo": 0}),
        Case("GGPO, tp 2", {"tp": 2}, lambda s: ggpo_tensor(s, fresh=False), settings={"ggpo": 1}),
        Case("GGPO, tp 2, new row norms", {"tp": 2}, lambda s: ggpo_tensor(s, fresh=True), settings={"ggpo": 0}),
        Case("GGPO, pp 2", {"pp": 2}, lambda s: pipeline(s, stages=2), settings={"ggpo": 1}),
        Case("dp 4", {"dp": 4}, sharded),
        Case(
            "replicate 2 × dp 2",
            {"replicate": 2, "dp": 2},
            lambda s: {**sharded(s), "replicate all-reduce": s.trained_bytes // 2},
        ),
        Case("dp 2 × tp 2", {"dp": 2, "tp": 2}, both),
        Case("tp 4", {"tp": 4}, tensor),
        Case("pp 4", {"pp": 4}, lambda s: pipeline(s, stages=4), replace(plain, rows=4)),
        Case(
            "pp 2 × dp 2",
            {"pp": 2, "dp": 2},
            lambda s: {**sharded(s, gathers=1), **pipeline(s, stages=2)},
        ),
        Case("pp 2 × tp 2", {"pp": 2, "tp": 2}, lambda s: {**tensor(s), **scattered(s)}),
        Case(
            "pp 2 × tp 2, tokens split",
            {"pp": 2, "tp": 2, "sequence_parallel": True},
            lambda s: {**tensor_by_tokens(s), **pipeline(s, stages=2, tp=2)},
        ),
    ]


# --------------------------------------------------------------------------------------------- on the ranks


def count(backbone: str, mesh: dict[str, Any], sizes: dict[str, Any], settings: dict[str, Any]) -> dict[str, list[int]]:
    """What one update of this rank sends: `{"axis kind": [bytes, calls]}`. The process group is as large as `mesh`."""
    import contextlib

    import torch

    from benchmarks._collectives import Collectives
    from flatshift.finetune.compute.micro_batch import MicroBatch
    from flatshift.finetune.compute.precision import autocast
    from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
    from flatshift.finetune.parallel.build import build_engine
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.tasks import LanguageModel
    from flatshift.finetune.train.optimizer import AdapterOptimizer
    from flatshift.regularizers import GGPO, Plain, build

    s, layout, task = Sizes(**sizes), Mesh(**mesh), LanguageModel(pack=False)
    world = ProcessMesh.of(layout, torch.device("cpu"))
    train = Train(
        max_length=s.tokens,
        batch_size=s.rows * world.width("replicate", "dp"),
        checkpointing=settings.get("checkpointing", "none"),
        precision=settings.get("precision", "fp32"),
    )
    engine = build_engine(backbone, task=task, adapter=Adapter(rank=s.rank), train=train, mesh=layout, world=world)
    optimizer = AdapterOptimizer(engine.parameters, Optimizer())
    guided = settings.get("ggpo")
    regularizer = build(Plain() if guided is None else GGPO(probes=GGPO_PROBES))
    regularizer.attach(engine.model, seed=0, total_steps=9, placement=engine.placement)
    engine.model.train()
    ids = torch.randint(1, s.vocabulary, (s.rows, s.tokens), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 0] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    micro = MicroBatch(inputs, labels, s.supervised, s.rows, tuple((i,) for i in range(s.rows)))
    micros = [micro] * settings.get("accumulate", 1)
    supervised = s.supervised * len(micros) * world.width("replicate", "dp")
    with autocast(train, engine.device):
        head = engine.find_head(inputs, task=task)
    engine.reshard()
    # FSDP2 and the pipeline set themselves up in the first update; with GGPO it also is the one with new row norms
    for step in range(1 if guided == 0 else 2):
        with Collectives(world) as seen:
            with regularizer.step(step):
                engine.forward_backward(
                    micros,
                    supervised,
                    task=task,
                    head=head,
                    context=lambda _: contextlib.nullcontext() if guided is None else autocast(train, engine.device),
                )
            engine.clip(1.0)
            optimizer.step(1e-3)
    regularizer.detach()
    return seen.figures()


def count_all(wanted: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """`count` of several cases of one world size, after each other."""
    return [count(**case) for case in wanted]


def added(case: Case, ranks: list[dict[str, list[int]]]) -> dict[str, list[float]]:
    """The mean over the ranks of a stage, added up over the stages of a pipeline: `{"axis kind": [bytes, calls]}`."""
    copies = case.ranks // case.mesh.get("pp", 1)
    kinds = sorted({kind for rank in ranks for kind in rank})
    return {kind: [sum(rank.get(kind, (0, 0))[i] for rank in ranks) / copies for i in (0, 1)] for kind in kinds}


def arguments(case: Case, folder: str | Path) -> dict[str, Any]:
    """Of `count`; the case's backbone is put into `folder` unless it is there."""
    backbone = Path(folder) / f"{case.sizes.blocks}-{case.sizes.vocabulary}"
    if not backbone.is_dir():
        save_backbone(case.sizes, backbone)
    return {"backbone": str(backbone), "mesh": case.mesh, "sizes": asdict(case.sizes), "settings": case.settings}


# --------------------------------------------------------------------------------------------- the table


def main() -> None:
    """Measure all cases and write benchmarks/results/sharding_traffic.json."""
    bench = Benchmark("sharding_traffic", packages=("torch", "transformers", "peft"))
    every = cases()
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.ranks for case in every}):
            mine = [case for case in every if case.ranks == ranks]
            wanted = [arguments(case, folder) for case in mine]
            answers = on_ranks("benchmarks.sharding_traffic:count_all", ranks, wanted=wanted)
            found |= {case.name: added(case, [rank[i] for rank in answers]) for i, case in enumerate(mine)}
    strangers, scalars = 0, 0.0
    for case in every:
        seen, volumes = found[case.name], case.expected(case.sizes)
        for kind, size in volumes.items():
            calls = seen.get(kind, [0, 0])[1]
            bench.row(
                f"{case.name}: {kind}, {calls:.0f} calls", ours=seen.get(kind, [0, 0])[0], peer=size,
                peer_name="formula", unit="bytes", bar_op="==", bar_value=1.0,
            )  # fmt: skip
        strangers += sum(not kind.endswith(SCALARS) for kind in seen.keys() - volumes.keys())
        scalars = max(scalars, sum(value[1] for kind, value in seen.items() if kind.endswith(SCALARS)))
    bench.row("kinds of traffic that no formula has", ours=strangers, unit="kinds", bar_op="==", bar_value=0)
    bench.row("calls of at most 64 bytes in an update, the most of any case", ours=scalars, unit="calls")
    _in_words(bench, found)
    bench.finish()


def _in_words(bench: Benchmark, found: dict[str, dict[str, list[float]]]) -> None:
    """The volumes that the literature states, each from the counts alone."""
    s = Sizes()

    def size(case: str, kind: str) -> float:
        return found[case].get(kind, [0.0, 0.0])[0]

    for case, volume in (("dp 2", 2.0), ("dp 4", 2.0), ("dp 2, weights kept gathered", 1.0)):
        bench.row(
            f"{case}: all-gathered in an update", ours=size(case, "dp all-gather") / s.whole_bytes, unit="Ψ",
            bar_op="==", bar_value=volume,
        )  # fmt: skip
    frozen = size("dp 2", "dp reduce-scatter") - s.trained_bytes
    bench.row("dp 2: reduced for frozen weights", ours=frozen, unit="bytes", bar_op="==", bar_value=0)
    between = size("replicate 2 × dp 2", "replicate all-reduce") / (s.trained_bytes / 2)
    bench.row(
        "replicate 2 × dp 2: along replicate, of a rank's shard of Ψ_l", ours=between, unit="Ψ_l ÷ dp",
        bar_op="==", bar_value=1,
    )  # fmt: skip
    for how in ("", ", tokens split"):
        share = size(f"pp 2 × tp 2{how}", "pp send") / size("pp 2", "pp send")
        bench.row(
            f"pp 2 × tp 2{how}: a rank sends to the next stage, of what it sends without tp", ours=share, unit="share",
            bar_op="==", bar_value=0.5,
        )  # fmt: skip
    for ranks in (2, 4):
        elements = (size(f"tp {ranks}", "tp all-reduce") - vocabulary(s) - whole_factors(s)) / s.states
        sent = (elements + 1) / s.blocks * 2 * (ranks - 1) / ranks
        bench.row(
            f"tp {ranks}: sent for activations of a block, ring", ours=sent, peer=8 * (ranks - 1) / ranks,
            peer_name="8 (t − 1)/t", unit="B·T·D", bar_op="==", bar_value=1.0,
        )  # fmt: skip
    deeper = size("tp 2, twice the blocks", "tp all-reduce") - size("tp 2", "tp all-reduce")
    bench.row(
        "tp 2: all-reduced for four more blocks, less the gradients of whole factors",
        ours=(deeper - whole_factors(s)) / s.blocks / s.states, unit="B·T·D a block", bar_op="==", bar_value=4,
    )  # fmt: skip
    wider = size("tp 2, twice the vocabulary", "tp all-reduce") - size("tp 2", "tp all-reduce")
    bench.row("tp 2: more for twice the vocabulary", ours=wider, unit="bytes", bar_op="==", bar_value=0)
    logits = 4 * s.supervised * s.vocabulary
    scalars = size("tp 2", "tp all-reduce") - 4 * s.blocks * s.states - 4 * s.supervised * s.hidden - whole_factors(s)
    bench.row(
        "tp 2: for the cross entropy, less the gradient of its input",
        ours=scalars,
        peer=logits,
        peer_name="gathered logits",
        unit="bytes",
    )
    for case, base, kinds in (
        ("GGPO, dp 2", "dp 2", ("dp all-gather", "dp reduce-scatter", "dp all-reduce")),
        ("GGPO, tp 2", "tp 2", ("tp all-reduce",)),
    ):
        each = sum(size(case, kind) - size(base, kind) for kind in kinds)
        fresh = sum(size(f"{case}, new row norms", kind) - size(base, kind) for kind in kinds)
        mean = (15 * each + fresh) / 16
        plain = sum(size(base, kind) for kind in kinds)
        bench.row(f"{case}: added to an update, mean of 16", ours=mean, peer=plain, peer_name="plain", unit="bytes")


if __name__ == "__main__":
    main()
