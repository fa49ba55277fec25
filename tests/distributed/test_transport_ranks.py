"""Transport over a pool that two processes share gives what one process gives, weights, kills and mistakes included."""

import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from flatshift.selection import SelectionError, sinkhorn_potentials
from flatshift.selection.transport.ranks import ProcessTeam
from tests.support.distributed_ranks import run_ranks

SPLIT = 2_500
OPTIONS = {"epsilon": 0.02, "tolerance": 1e-8, "nearest": True, "overlap": 0.999, "budget": 300, "method": "streamed"}


def problem():
    r = np.random.default_rng(0)
    centres = 2 * r.standard_normal((6, 8))
    x = (centres[r.integers(0, 6, 6_000)] + r.standard_normal((6_000, 8))).astype(np.float16)
    y = centres[r.integers(0, 3, 60)] + 0.8 * r.standard_normal((60, 8))
    return x, y, r.random(6_000) + 0.05


def refused(**change):
    x, y, a = problem()
    shard = slice(0, SPLIT) if dist.get_rank() == 0 else slice(SPLIT, None)
    call = {"x": x[shard], "y": y, "a": a[shard], **OPTIONS, "group": dist.group.WORLD, **change}
    try:
        sinkhorn_potentials(call.pop("x"), call.pop("y"), **call)
    except SelectionError as error:
        return str(error)
    return "solved"


class Killed(Exception):
    pass


def led(team, values):
    """What the first member alone makes, what waiting for it costs, and how its failure is told."""

    def work():
        time.sleep(0.5)
        return values, 3, None

    def fails():
        raise ArithmeticError("no luck")

    began = time.process_time()
    (tensor, *plain), spent = team.run_on_first(work, values.device), time.process_time() - began
    try:
        team.run_on_first(fails, values.device)
    except (ArithmeticError, SelectionError) as error:
        return tensor.numpy(), plain, spent, f"{type(error).__name__}: {error}"


def on_rank(folder):
    """Everything at once: processes are dear."""
    x, y, a = problem()
    rank = dist.get_rank()
    shard = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
    common = {**OPTIONS, "group": dist.group.WORLD}
    found = {}
    for cost in ("sqeuclidean", "cosine"):
        p = sinkhorn_potentials(x[shard], y, a=a[shard], cost=cost, **common)
        found[cost] = (p.f, p.g, p.scores, p.nearest, p.diagnostics())
    plain = sinkhorn_potentials(x[shard], y, group=dist.group.WORLD, method=None)
    found["plain"] = (plain.scores, plain.diagnostics())

    def stop(stage, done, total):
        if stage == "pass 2" and done == total:
            raise Killed

    try:
        sinkhorn_potentials(x[shard], y, a=a[shard], state=folder, progress=stop, **common)
    except Killed:
        again = sinkhorn_potentials(x[shard], y, a=a[shard], state=folder, **common)
        found["resumed"] = (again.resumed, (again.f == found["sqeuclidean"][0]).all())

    broken = x[shard].copy()
    broken[3 if rank else 0, 2] = np.nan if rank else broken[0, 2]
    found["refusals"] = [
        refused(x=broken),
        refused(y=y + rank),
        refused(seed=rank),
        refused(a=None if rank else a[:SPLIT]),
        refused(memory_bytes=1000),
        refused(method="cached"),
    ]
    team = ProcessTeam(dist.group.WORLD)
    values = torch.from_numpy(np.random.default_rng(rank).standard_normal(500).round(2))
    found["led"] = led(team, values)
    found["smallest"] = (team.smallest(*((values, k) for k in (1, 7, 500, 1000))), values.numpy())
    return found


def test_two_processes_equal_one(tmp_path: Path):
    results = run_ranks(on_rank, 2, str(tmp_path / "state"))
    x, y, a = problem()
    for cost in ("sqeuclidean", "cosine"):
        whole = sinkhorn_potentials(x, y, a=a, cost=cost, **OPTIONS)
        parts = [result[cost] for result in results]
        for part in parts:
            np.testing.assert_allclose(part[1], whole.g, atol=1e-6)
            assert part[4]["converged"] and part[4]["passes"] == whole.passes and part[4]["overlap"] >= 0.999
            for name in ("mean_cost", "epsilon", "dual_value"):
                assert abs(part[4][name] / getattr(whole, name) - 1) < 1e-9
        assert (parts[0][1] == parts[1][1]).all()
        for i, name in enumerate(("f", "g", "scores", "nearest")):
            if name != "g":
                joined = np.concatenate([part[i] for part in parts])
                np.testing.assert_allclose(joined, getattr(whole, name), atol=1e-6)
    single = sinkhorn_potentials(x, y)
    np.testing.assert_allclose(np.concatenate([r["plain"][0] for r in results]), single.scores, atol=1e-6)
    assert results[0]["plain"][1]["method"] == "streamed" and results[0]["plain"][1]["tolerance"] == 1e-9
    assert [result["resumed"] for result in results] == [(1, True)] * 2

    told = results[0]["refusals"]
    assert told == results[1]["refusals"]
    assert told[0] == f"pool features: row {SPLIT + 3} holds a NaN or an infinity; drop or mend it"
    assert "differ in target features" in told[1] and "differ in settings" in told[2]
    assert "weights" in told[3] and "too little" in told[4] and 'group needs method "streamed"' in told[5]
    for rank, result in enumerate(results):
        tensor, plain, spent, failure = result["led"]
        assert (tensor == results[0]["smallest"][1]).all() and plain == [3, None]
        assert spent < 0.25, "half a second of waiting is slept"
        assert failure == ("SelectionError: process 0 of 2: no luck" if rank else "ArithmeticError: no luck")
    every = np.sort(np.concatenate([result["smallest"][1] for result in results]))
    for result in results:
        assert result["smallest"][0] == [every[k - 1] for k in (1, 7, 500, 1000)]
