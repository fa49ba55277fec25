"""What one update sends over a mesh, counted call by call, beside formulas of the model's sizes alone.

    python -m benchmarks.sharding_traffic

A case holds if every kind of traffic has exactly the bytes of its formula (Ψ is the bytes of all weights and Ψ_l of the
trained ones) and there is no other kind; calls of at most 64 bytes (losses, norms, verdicts) have a row of
their own. Bytes are of whole tensors in one update of one micro-batch (`benchmarks._collectives`): what an all-gather
makes, what a reduce-scatter or an all-reduce adds up, what is sent; of a pipeline added up over its stages.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks._collectives import SCALARS, Collectives
from benchmarks._harness import Benchmark, on_ranks
from benchmarks._sized import Sizes, Updates, save_backbone
from flatshift.regularizers import GGPO

PROBES = 4
"""Of GGPO."""
Bytes = dict[str, int]

# --------------------------------------------------------------------------------------------- the formulas


def sharded(s: Sizes, *, gathers: int = 2) -> Bytes:
    """FSDP2: all weights `gathers` times, gradients of the adapters once, of frozen weights never."""
    return {"dp all-gather": gathers * s.whole_bytes, "dp reduce-scatter": s.trained_bytes}


def row_parallel(s: Sizes) -> int:
    """Rows of the layers that tensor parallelism cuts by columns: two a block."""
    return 2 * s.hidden * s.blocks


def column_parallel(s: Sizes) -> int:
    """Rows of the layers that it cuts by rows: five a block."""
    return (3 * s.hidden + 2 * s.inner) * s.blocks


def whole_factors(s: Sizes) -> int:
    """Bytes of A of the five column-parallel and B of the two row-parallel layers of each block: their gradients are
    summands on tensor-parallel ranks."""
    return 4 * s.blocks * 7 * s.rank * s.hidden


def vocabulary(s: Sizes) -> int:
    """The embedding's sum, three scalars a supervised token of the cross entropy, and the gradient of its input; the
    vocabulary's size is not in it."""
    return s.states + 4 * s.trained_tokens * (3 + s.hidden)


def tensor(s: Sizes) -> Bytes:
    """Four all-reduces of the hidden states a block, of which the first block's first needs no gradient."""
    return {"tp all-reduce": (4 * s.blocks - 1) * s.states + vocabulary(s) + whole_factors(s)}


def tensor_by_tokens(s: Sizes) -> Bytes:
    """Sequence parallelism: the same all-reduces as an all-gather and a reduce-scatter each, and one gather at the
    end of the blocks."""
    return {
        "tp all-gather": (4 * s.blocks + 1) * s.states,
        "tp reduce-scatter": (4 * s.blocks - 1) * s.states,
        "tp all-reduce": vocabulary(s) + whole_factors(s),
    }


def tensor_recomputed(s: Sizes) -> Bytes:
    """With whole blocks recomputed, the attention's sum in each of them once more; the block's last result is not
    needed again."""
    return {"tp all-reduce": tensor(s)["tp all-reduce"] + s.blocks * s.states}


def pipeline(s: Sizes, *, stages: int, tp: int = 1) -> Bytes:
    """Hidden states forward and their gradient back at every border; a tensor-parallel rank sends its share."""
    return {"pp send": 2 * (stages - 1) * s.states // tp}


def scattered(s: Sizes, *, stages: int = 2, tp: int = 2) -> Bytes:
    """pp × tp: shares sent at every border, and gathered along tp where they arrive, forward and back."""
    return {**pipeline(s, stages=stages, tp=tp), "tp all-gather": 2 * (stages - 1) * s.states}


def both(s: Sizes, *, dp: int = 2, tp: int = 2) -> Bytes:
    """dp × tp: a rank's share of every matrix is sharded; norms and whole factors are not divided by tp."""
    norms = s.item * (2 * s.blocks + 1) * s.hidden
    mine = norms + (s.frozen_bytes - norms) // tp + whole_factors(s) + (s.trained_bytes - whole_factors(s)) // tp
    trained = whole_factors(s) + (s.trained_bytes - whole_factors(s)) // tp
    summed = tensor(s)["tp all-reduce"] - whole_factors(s) + whole_factors(s) // dp
    return {"dp all-gather": 2 * mine, "dp reduce-scatter": trained, "tp all-reduce": summed}


def ggpo_sharded(s: Sizes, *, fresh: bool) -> Bytes:
    """In every update the probes' gradients, one row of them for each row of each layer; when row norms are recomputed
    also the adapters, gathered, and one number a row."""
    layers, rows = 7 * s.blocks, column_parallel(s) + row_parallel(s)
    base = sharded(s)
    each = 4 * (PROBES * rows + layers)
    if not fresh:
        return {**base, "dp all-reduce": each}
    return {
        "dp all-gather": base["dp all-gather"] + s.trained_bytes,
        "dp reduce-scatter": base["dp reduce-scatter"],
        "dp all-reduce": each + 4 * rows,
    }


def ggpo_tensor(s: Sizes, *, fresh: bool) -> Bytes:
    """The probes' gradients of row-parallel layers, two means a column-parallel layer, and with new row norms one
    number a row of the row-parallel layers."""
    means = 4 * 2 * 5 * s.blocks
    added = 4 * PROBES * row_parallel(s) + means + (4 * row_parallel(s) if fresh else 0)
    return {"tp all-reduce": tensor(s)["tp all-reduce"] + added}


# --------------------------------------------------------------------------------------------- the cases


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
        return math.prod(self.mesh.get(axis, 1) for axis in ("replicate", "dp", "tp", "pp"))


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
        Case("pp 2 × dp 2", {"pp": 2, "dp": 2}, lambda s: {**sharded(s, gathers=1), **pipeline(s, stages=2)}),
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
    s, train = Sizes(**sizes), dict(settings)
    guided = train.pop("ggpo", None)
    shape = {"vocabulary": s.vocabulary, "rows": s.rows, "tokens": s.tokens, "rank": s.rank}
    regularizer = None if guided is None else GGPO(probes=PROBES)
    updates = Updates(backbone, mesh, regularizer=regularizer, **shape, **train)
    updates.find_head()
    # FSDP2 and the pipeline set themselves up in the first update; with GGPO it also is the one with new row norms
    for step in range(1 if guided == 0 else 2):
        with Collectives(updates.world) as seen:
            updates(step)
    updates.regularizer.detach()
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
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({case.ranks for case in every}):
            mine = [case for case in every if case.ranks == ranks]
            wanted = [arguments(case, folder) for case in mine]
            answers = on_ranks("benchmarks.sharding_traffic:count_all", ranks, wanted=wanted)
            results |= {case.name: added(case, [rank[i] for rank in answers]) for i, case in enumerate(mine)}
    strangers, scalars = 0, 0.0
    for case in every:
        seen, volumes = results[case.name], case.expected(case.sizes)
        for kind, size in volumes.items():
            calls = seen.get(kind, [0, 0])[1]
            what = f"{case.name}: {kind}, {calls:.0f} calls"
            bench.row(what, "bytes", ours=seen.get(kind, [0, 0])[0], peer=size, peer_name="formula", exactly=1.0)
        strangers += sum(not kind.endswith(SCALARS) for kind in seen.keys() - volumes.keys())
        scalars = max(scalars, sum(value[1] for kind, value in seen.items() if kind.endswith(SCALARS)))
    bench.row("kinds of traffic that no formula has", "kinds", ours=strangers, exactly=0)
    bench.row("calls of at most 64 bytes in an update, the most of any case", "calls", ours=scalars)
    _in_words(bench, results)
    bench.finish()


def _in_words(bench: Benchmark, results: dict[str, dict[str, list[float]]]) -> None:
    """The volumes that the literature states, each from the counts alone."""
    s = Sizes()

    def size(case: str, kind: str) -> float:
        return results[case].get(kind, [0.0, 0.0])[0]

    reduced, gathered, sums = "dp reduce-scatter", "dp all-gather", "tp all-reduce"
    factors, sent = whole_factors(s), size("pp 2", "pp send")
    between = size("replicate 2 × dp 2", "replicate all-reduce") / (s.trained_bytes / 2)
    deeper = size("tp 2, twice the blocks", sums) - size("tp 2", sums)
    for what, unit, ours, wanted in (
        *(
            (f"{case}: all-gathered in an update", "Ψ", size(case, gathered) / s.whole_bytes, volume)
            for case, volume in (("dp 2", 2.0), ("dp 4", 2.0), ("dp 2, weights kept gathered", 1.0))
        ),
        ("dp 2: reduced for frozen weights", "bytes", size("dp 2", reduced) - s.trained_bytes, 0),
        ("replicate 2 × dp 2: along replicate, of a rank's shard of Ψ_l", "Ψ_l ÷ dp", between, 1),
        *(
            (
                f"pp 2 × tp 2{how}: a rank sends to the next stage, of what it sends without tp",
                "share",
                size(f"pp 2 × tp 2{how}", "pp send") / sent,
                0.5,
            )
            for how in ("", ", tokens split")
        ),
        (
            "tp 2: all-reduced for four more blocks, less the gradients of whole factors",
            "B·T·D a block",
            (deeper - factors) / s.blocks / s.states,
            4,
        ),
        (
            "tp 2: more for twice the vocabulary",
            "bytes",
            size("tp 2, twice the vocabulary", sums) - size("tp 2", sums),
            0,
        ),
    ):
        bench.row(what, unit, ours=ours, exactly=wanted)
    for ranks in (2, 4):
        elements = (size(f"tp {ranks}", sums) - vocabulary(s) - factors) / s.states
        ring, formula = (elements + 1) / s.blocks * 2 * (ranks - 1) / ranks, 8 * (ranks - 1) / ranks
        what = f"tp {ranks}: sent for activations of a block, ring"
        bench.row(what, "B·T·D", ours=ring, peer=formula, peer_name="8 (t − 1)/t", exactly=1.0)
    scalars = size("tp 2", sums) - 4 * s.blocks * s.states - 4 * s.trained_tokens * s.hidden - factors
    what, logits = "tp 2: for the cross entropy, less the gradient of its input", 4 * s.trained_tokens * s.vocabulary
    bench.row(what, "bytes", ours=scalars, peer=logits, peer_name="gathered logits")
    for case, base, kinds in (
        ("GGPO, dp 2", "dp 2", ("dp all-gather", "dp reduce-scatter", "dp all-reduce")),
        ("GGPO, tp 2", "tp 2", ("tp all-reduce",)),
    ):
        each = sum(size(case, kind) - size(base, kind) for kind in kinds)
        fresh = sum(size(f"{case}, new row norms", kind) - size(base, kind) for kind in kinds)
        mean = (15 * each + fresh) / 16
        plain = sum(size(base, kind) for kind in kinds)
        bench.row(f"{case}: added to an update, mean of 16", "bytes", ours=mean, peer=plain, peer_name="plain")


if __name__ == "__main__":
    main()
