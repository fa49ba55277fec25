"""Our own memory beside the plan's: updates of random backbones on this machine's cores, fresh processes for each.

Two measures of each configuration: what tensors take at the worst moment of an update, as the allocator tells the
profiler, on the rank that has most; and how much the process grew in resident memory by the kernel's own high-water
mark, mapped weight files included, since before the backbone was there. The second also holds what the C library kept
of what was given back to it, and what oneDNN compiled: an interval, which other models in other processes tell
(`flatshift.finetune.planner.calibration.measure_overhead`).
"""

from __future__ import annotations

import dataclasses
import gc
import math
import tempfile
from functools import partial
from typing import Any

from benchmarks._harness import on_ranks, peak_bytes
from benchmarks._sized import Updates, save_llama
from flatshift.finetune.compute.memory import measure_peaks, process_bytes
from flatshift.finetune.config import Adapter, Mesh, Train
from flatshift.finetune.planner.footprint import predict_footprint
from flatshift.finetune.planner.sizes import read_sizes


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration as a recipe would have it."""

    kind: str
    """transformers' model type."""
    hidden: int
    inner: int
    blocks: int
    heads: int
    groups: int
    vocabulary: int
    rows: int
    """Of a micro-batch of all data ranks together."""
    tokens: int
    rank: int = 8
    precision: str = "fp32"
    checkpointing: str = "none"
    mesh: dict[str, Any] = dataclasses.field(default_factory=dict)
    tied: bool = False
    accumulate: int = 1

    @property
    def ranks(self) -> int:
        """Processes."""
        return math.prod(self.mesh.get(axis, 1) for axis in ("replicate", "dp", "tp", "pp", "cp"))

    @property
    def train(self) -> dict[str, Any]:
        """Settings of `Train` that differ between cases."""
        return {name: getattr(self, name) for name in ("precision", "checkpointing", "accumulate")}

    def __str__(self) -> str:
        mesh = " × ".join(f"{axis} {width}" for axis, width in self.mesh.items()) or "one process"
        return (
            f"{self.kind} {self.blocks} × {self.hidden}, {self.rows} × {self.tokens} tokens, r {self.rank}, "
            f"{self.precision}, recompute {self.checkpointing}, {mesh}"
        )


LLAMA = Case("llama", 320, 896, 8, heads=10, groups=2, vocabulary=10000, rows=2, tokens=288)
QWEN2 = Case("qwen2", 384, 1920, 5, heads=6, groups=2, vocabulary=20000, rows=2, tokens=320, tied=True)
QWEN3 = Case("qwen3", 512, 1408, 4, heads=8, groups=2, vocabulary=9000, rows=3, tokens=224)
WARM = dataclasses.replace(LLAMA, hidden=64, inner=128, blocks=2, heads=2, groups=2, vocabulary=256, tokens=32)
RECOMPUTED = {"precision": "bf16", "checkpointing": "full", "rows": 4}
CASES = tuple(
    dataclasses.replace(model, **changed)
    for model, changed in (
        (LLAMA, {}),
        (LLAMA, RECOMPUTED),
        (LLAMA, {"precision": "bf16", "rank": 64}),
        (QWEN2, {"precision": "bf16"}),
        (QWEN2, {"checkpointing": "full", "accumulate": 2}),
        (QWEN3, {}),
        (QWEN3, {"precision": "bf16", "checkpointing": "selective"}),
        (LLAMA, {"mesh": {"dp": 2}}),
        (LLAMA, {"mesh": {"dp": 2}, **RECOMPUTED}),
        (LLAMA, {"mesh": {"dp": 2, "zero": 1}}),
        (LLAMA, {"mesh": {"tp": 2}}),
    )
)
"""Never used to find a formula: those were found on a Llama of 4 × 512 with 8,192 words in one process, and that
gradients come while activations go on other sizes than these."""
UPDATES = 4
"""Until what the process holds grows no more: the first also makes optimizer state."""


def measured(ranks: int) -> list[tuple[Case, int, dict[str, float]]]:
    """Every case of so many ranks with the plan's bytes and those of the rank that has most."""
    found = []
    for case in (case for case in CASES if case.ranks == ranks):
        with tempfile.TemporaryDirectory() as folder:
            save(WARM, f"{folder}/tiny")
            save(case, f"{folder}/own")
            told = on_ranks(
                "benchmarks._own_memory:held", ranks, folder=folder, case=dataclasses.asdict(case), wall_cap_s=3600.0
            )
            most = {name: max(rank[name] for rank in told) for name in told[0]}
            found.append((case, predicted(f"{folder}/own", case), most))
    return found


def save(case: Case, folder: str) -> None:
    """Random weights of the case's backbone, and a config that says so."""
    save_llama(
        folder,
        kind=case.kind,
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        num_hidden_layers=case.blocks,
        num_attention_heads=case.heads,
        num_key_value_heads=case.groups,
        vocab_size=case.vocabulary,
        tie_word_embeddings=case.tied,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        **({"head_dim": case.hidden // case.heads} if case.kind == "qwen3" else {}),
    )


def updates(backbone: str, case: Case) -> Updates:
    """The case's engine on its mesh."""
    rows = case.rows // case.mesh.get("dp", 1)
    return Updates(
        backbone, case.mesh, vocabulary=case.vocabulary, rows=rows, tokens=case.tokens, rank=case.rank, **case.train
    )


def held(folder: str, case: dict[str, Any]) -> dict[str, float]:
    """Of a case whose backbone lies in `folder`/own: bytes of this rank at the worst moment of an update, by the
    allocator and by growth of the process. The tiny one of `folder`/tiny goes before it, so that libraries are there.
    """
    own = Case(**case)
    tiny = updates(f"{folder}/tiny", dataclasses.replace(WARM, mesh=own.mesh, precision=own.precision))
    tiny(0)
    del tiny
    gc.collect()
    before = process_bytes("VmRSS")
    update = updates(f"{folder}/own", own)
    resident, _ = measure_peaks(lambda: [update(step) for step in range(UPDATES)])
    assert before is not None and resident is not None
    return {"allocated": peak_bytes(partial(update, UPDATES)), "resident": resident - before}


def predicted(folder: str, case: Case) -> int:
    """The plan's bytes of the fullest rank in an update, without the logits of an evaluation."""
    adapter = Adapter(rank=case.rank)
    needs = predict_footprint(
        read_sizes(folder, adapter),
        mesh=Mesh(**case.mesh),
        adapter=adapter,
        train=Train(max_length=case.tokens, batch_size=case.rows, **case.train),
        device="cpu",
    )
    return dataclasses.replace(needs, logits=0).total
