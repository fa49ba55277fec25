"""What an update sends is what the formulas of the model's sizes say, byte for byte, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks._collectives import SCALARS, Collectives
from benchmarks.sharding_traffic import added, arguments, cases, count_all
from flatshift.finetune.config import Mesh
from flatshift.finetune.parallel.mesh import ProcessMesh
from tests.support.distributed_ranks import run_ranks

FAST = {
    "dp 2",
    "dp 2, weights kept gathered",
    "dp 2, three micro-batches",
    "dp 2, adapters replicated",
    "tp 2",
    "tp 2, tokens split",
    "tp 2, twice the vocabulary",
    "pp 2",
    "GGPO, dp 2, new row norms",
    "GGPO, tp 2, new row norms",
    "replicate 2 × dp 2",
    "dp 2 × tp 2",
    "pp 2 × dp 2",
}


def known_calls() -> dict[str, list[int]]:
    """Four ranks make calls whose bytes are known, through every door that torch has; what was counted of them."""
    world = ProcessMesh.of(Mesh(dp=2, tp=2), torch.device("cpu"))
    dp, tp = world.group("dp"), world.group("tp")
    x = torch.ones(100)
    with Collectives(world) as seen:
        dist.all_reduce(x, group=dp)
        dist.all_reduce(torch.ones(3), group=tp)
        dist.all_reduce(x)
        dist.all_gather([torch.empty(100) for _ in range(2)], x, group=tp)
        dist.reduce_scatter(torch.empty(50), [x[:50].clone(), x[50:].clone()], group=tp)
        dist.broadcast(x, group=dp, group_src=0)
        if world.index("tp") == 0:
            dist.send(x, group=tp, group_dst=1)
        else:
            dist.recv(torch.empty(100), group=tp, group_src=0)
        dist.barrier(group=dp)
        cut = distribute_tensor(torch.ones(64, 2), world.submesh("dp"), [Shard(0)], src_data_rank=None)
        cut.redistribute(placements=[Replicate()])
    return seen.figures()


def on_rank(wanted: list[dict[str, Any]]) -> tuple[list[dict[str, list[int]]], dict[str, list[int]]]:
    known = known_calls() if dist.get_world_size() == 4 else {}
    return count_all(wanted), known


def compare(ranks: int, folder: Path) -> list[dict[str, list[int]]]:
    """Demand the formulas of every fast case of so many ranks; what each of them counted of the known calls."""
    chosen = [case for case in cases() if case.name in FAST and case.ranks == ranks]
    assert chosen
    answers = run_ranks(on_rank, ranks, [arguments(case, folder) for case in chosen])
    for i, case in enumerate(chosen):
        found = added(case, [counts[i] for counts, _ in answers])
        sizes = {kind: size for kind, (size, _) in found.items() if not kind.endswith(SCALARS)}
        assert sizes == case.expected(case.sizes), case.name
        scalars = sum(calls for kind, (_, calls) in found.items() if kind.endswith(SCALARS))
        assert scalars <= 12, (case.name, found)
    return [known for _, known in answers]


def test_two_ranks_send_what_the_formulas_say(tmp_path: Path) -> None:
    compare(2, tmp_path)


@pytest.mark.slow
def test_four_ranks_send_what_the_formulas_say(tmp_path: Path) -> None:
    for rank, known in enumerate(compare(4, tmp_path)):
        sent = {"tp send": [400, 1]} if rank % 2 == 0 else {}
        assert known == sent | {
            "dp all-reduce": [400, 1],
            "tp scalars": [12, 1],
            "dp+tp all-reduce": [400, 1],
            "tp all-gather": [800, 1],
            "tp reduce-scatter": [400, 1],
            "dp broadcast": [400, 1],
            "dp all-gather": [512, 1],
        }
