"""The transport solver on large pools: cosine cost, memory, overlap, kills, progress, devices."""

import os
import signal
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch

from flatshift.selection import ConvergenceWarning, SelectionError, sinkhorn_potentials
from flatshift.selection.transport.blocks import ThreadCrew
from flatshift.selection.transport.ranks import ProcessTeam
from flatshift.selection.transport.settings import estimate_overlap, find_threshold, measure_overlap


def clouds(n, m, d=8, seed=0):
    r = np.random.default_rng(seed)
    centres = 2 * r.standard_normal((6, d))
    x = centres[r.integers(0, 6, n)] + r.standard_normal((n, d))
    y = centres[r.integers(0, 3, m)] + 0.8 * r.standard_normal((m, d))
    return x, y


# ------------------------------------------------------------------------------------------ cosine


@pytest.mark.parametrize("method", ["exact", "streamed", "cached"])
@pytest.mark.parametrize("shape", [(600, 40), (40, 300)])
def test_cosine_cost_is_one_minus_the_cosine(method, shape):
    x, y = clouds(*shape, d=5)
    r = np.random.default_rng(3)
    a, b = r.random(shape[0]) + 0.1, r.random(shape[1]) + 0.1
    a, b = a / a.sum(), b / b.sum()
    p = sinkhorn_potentials(
        x * r.random((shape[0], 1)) * 9, 7 * y, a=a, b=b, epsilon=0.1, cost="cosine", method=method, tolerance=1e-9
    )
    cost = 1 - (x / np.linalg.norm(x, axis=1, keepdims=True)) @ (y / np.linalg.norm(y, axis=1, keepdims=True)).T
    assert p.cost == "cosine" and p.mean_cost == pytest.approx(a @ cost @ b, rel=1e-12)
    assert p.epsilon == pytest.approx(0.1 * p.mean_cost, rel=1e-12)
    plan = a[:, None] * b * np.exp((p.f[:, None] + p.g - cost) / p.epsilon)
    assert np.abs(plan.sum(0) - b).sum() < 2e-9 and np.abs(plan.sum(1) - a).sum() < 1e-9
    np.testing.assert_allclose(p.scores, p.f - a @ p.f, atol=1e-14)
    value = (plan * cost).sum() + p.epsilon * (plan * np.log(plan / (a[:, None] * b))).sum()
    assert p.dual_value == pytest.approx(value, rel=1e-7)


def test_cosine_refuses_rows_without_direction():
    x, y = clouds(20, 5)
    x[7] = 0
    with pytest.raises(SelectionError, match="pool features: row 7 is zero, so it has no cosine"):
        sinkhorn_potentials(x, y, cost="cosine")
    with pytest.raises(SelectionError, match="target features: row 0 is zero"):
        sinkhorn_potentials(y, np.zeros((1, 8)), cost="cosine")
    same = sinkhorn_potentials(np.outer(np.arange(1, 6), np.ones(3)), np.ones((2, 3)), cost="cosine")
    assert same.converged and np.abs(same.scores).max() < 1e-12


# ------------------------------------------------------------------------------------------ overlap


def test_overlap_is_measured_and_demanded():
    x, y = clouds(30_000, 100)
    exact = sinkhorn_potentials(x, y, epsilon=0.02, tolerance=1e-9, method="cached")
    best = set(np.argsort(exact.scores)[:1500])
    for method in ("streamed", "cached", "exact"):
        p = sinkhorn_potentials(x, y, epsilon=0.02, tolerance=0.3, overlap=0.99, method=method)
        assert p.converged and p.overlap >= 0.99 and p.budget == 1500 and p.method == method
        truth = len(best & set(np.argsort(p.scores)[:1500])) / 1500
        assert truth >= 0.985
        if method == "streamed":
            assert p.overlap_estimate == pytest.approx(truth, abs=0.01)
    with pytest.warns(ConvergenceWarning, match="an overlap of none measured"):
        p = sinkhorn_potentials(x, y, epsilon=0.02, tolerance=0.5, overlap=0.99, method="streamed", max_passes=1)
    assert not p.converged and p.overlap is None and p.overlap_estimate < 1
    assert sinkhorn_potentials(x, y, method="streamed", budget=10).budget == 10


def test_overlap_and_its_estimate_beside_their_definitions():
    r = np.random.default_rng(0)
    f = torch.from_numpy(r.standard_normal(20_000))
    for size in (0.001, 0.01, 0.05):
        moved = f + size * torch.from_numpy(r.standard_normal(20_000))
        for k in (200, 1000, 5000):
            taken = [set(v.argsort()[:k].tolist()) for v in (f, moved)]
            truth = len(taken[0] & taken[1]) / k
            assert measure_overlap(f, moved, k, ProcessTeam()) == truth
            assert estimate_overlap(find_threshold(f, k, ProcessTeam()), f[::4], moved[::4]) == pytest.approx(
                truth, abs=0.02
            )


# ------------------------------------------------------------------------------------------ memory

_MEASURE = """
import sys, numpy as np
from benchmarks._harness import PeakMemory
from flatshift.selection import sinkhorn_potentials
x, y = np.load(sys.argv[1] + "/x.npy", mmap_mode="r"), np.load(sys.argv[1] + "/y.npy")
sinkhorn_potentials(x[:2000], y[:50], method="streamed", tolerance=1e-2)
with PeakMemory(0.001) as peak:
    p = sinkhorn_potentials(x, y, memory_bytes=int(sys.argv[2]), tolerance=1e-3, nearest=True, overlap=0.99,
                            method=None if sys.argv[3] == "auto" else sys.argv[3])
print(peak.bytes, p.method, p.converged)
"""


@pytest.mark.parametrize(
    ("shape", "cap", "method", "solved"),
    [
        ((80_000, 250), 24, "auto", "streamed"),
        ((80_000, 250), 160, "auto", "cached"),
        ((2000, 4500), 216, "auto", "exact"),
    ],
)
def test_memory_stays_under_the_cap(tmp_path, shape, cap, method, solved):
    x, y = clouds(*shape, d=64)
    np.save(tmp_path / "x.npy", x.astype(np.float16))
    np.save(tmp_path / "y.npy", y)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, tmp_path, str(cap << 20), method], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    used, how, converged = done.stdout.split()
    # Thread stacks, BLAS' packing buffers and the allocator's own are not the solver's to count.
    assert int(used) <= (cap << 20) + (4 << 20) and how == solved and converged == "True"


def test_a_cap_that_cannot_be_honoured_names_one_that_can():
    x, y = clouds(60_000, 300)
    with pytest.raises(SelectionError, match=r"memory_bytes of 2,000,000 is too little .* give at least") as told:
        sinkhorn_potentials(x, y, memory_bytes=2_000_000)
    enough = int(str(told.value).rsplit(" ", 1)[1].replace(",", ""))
    assert sinkhorn_potentials(x, y, memory_bytes=enough).converged


# ------------------------------------------------------------------------------------------ kills


class Killed(Exception):
    pass


def test_a_solve_goes_on_after_a_kill_with_the_same_bits(tmp_path):
    x, y = clouds(40_000, 80)
    options = {"method": "streamed", "epsilon": 0.01, "tolerance": 1e-7, "nearest": True, "overlap": 0.999}
    whole = sinkhorn_potentials(x, y, **options)
    assert whole.passes >= 4

    def stop(at):
        def progress(stage, done, total):
            if stage == at and done > total // 2:
                raise Killed

        return progress

    for number in (1, 2, 4):
        with pytest.raises(Killed):
            sinkhorn_potentials(x, y, state=tmp_path, progress=stop(f"pass {number}"), **options)
        assert len(list(tmp_path.iterdir())) == (number > 1)
    p = sinkhorn_potentials(x, y, state=tmp_path, **options)
    assert p.resumed == 3 and p.passes == whole.passes and p.iterations == whole.iterations
    for name in ("f", "g", "scores", "nearest"):
        assert (getattr(p, name) == getattr(whole, name)).all()
    again = sinkhorn_potentials(x, y, state=tmp_path, **options)
    assert again.resumed == whole.passes and (again.scores == whole.scores).all() and again.converged


def test_a_real_kill_leaves_a_state_that_can_be_read(tmp_path):
    x, y = clouds(60_000, 80)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    code = f"""
        import os, signal, numpy as np
        from flatshift.selection import sinkhorn_potentials
        data = np.load({str(tmp_path / "data.npz")!r})
        def progress(stage, done, total):
            if stage == "pass 3":
                os.kill(os.getpid(), signal.SIGKILL)
        sinkhorn_potentials(data["x"], data["y"], method="streamed", epsilon=0.01, tolerance=1e-7,
                            state={str(tmp_path / "state")!r}, progress=progress)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment)
    assert done.returncode == -signal.SIGKILL
    p = sinkhorn_potentials(x, y, method="streamed", epsilon=0.01, tolerance=1e-7, state=tmp_path / "state")
    assert p.resumed == 2 and p.converged


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"epsilon": 0.06}, "epsilon 0.05, not 0.06"),
        ({"x": 1}, "other features or weights"),
        ({"y": 1}, "other features or weights"),
        ({"a": 1}, "other features or weights"),
        ({"seed": 4}, "seed 0, not 4"),
        ({"cost": "cosine"}, "cost sqeuclidean, not cosine"),
        ({"damage": 1}, "cannot be read"),
    ],
)
def test_a_state_of_another_problem_is_refused(tmp_path, change, told):
    x, y = clouds(2000, 20)
    options = {"method": "streamed", "tolerance": 1e-4, "state": tmp_path}
    sinkhorn_potentials(x, y, **options)
    (file,) = tmp_path.iterdir()
    if change.pop("damage", None):
        file.write_bytes(file.read_bytes()[:500])
    if change.pop("x", None):
        x = x.copy()
        x[5, 0] += 1e-9
    if change.pop("y", None):
        y = y[::-1]
    if change.pop("a", None):
        change["a"] = np.arange(1, 2001)
    before = file.read_bytes()
    with pytest.raises(SelectionError, match=told):
        sinkhorn_potentials(x, y, **options, **change)
    assert [file] == list(tmp_path.iterdir()) and file.read_bytes() == before


# ------------------------------------------------------------------------------------------ the rest


def test_threads_divide_tiles_and_keep_the_bits():
    x, y = clouds(30_000, 120)
    threads = torch.get_num_threads()
    try:
        answers = []
        for count in (2, 2, 1):
            torch.set_num_threads(count)
            answers.append(sinkhorn_potentials(x, y, method="streamed", tolerance=1e-6, nearest=True, chunk=700))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert (answers[0].scores == answers[1].scores).all()
    np.testing.assert_allclose(answers[0].scores, answers[2].scores, atol=1e-6)
    assert (answers[0].nearest == answers[2].nearest).mean() > 0.9999


@pytest.mark.skipif("mkl_get_max_threads" not in torch.__config__.parallel_info(), reason="torch without MKL")
def test_a_worker_multiplies_on_one_core():
    threads, told = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        crew = ThreadCrew(torch.device("cpu"))
        for _ in range(3):  # BLAS' number is the process': after the first time it was the caller's again
            crew.each(8, 1, lambda low, high: told.append(torch.__config__.parallel_info()))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert len(told) == 24 and all("mkl_get_max_threads() : 1\n" in info for info in told)


def test_the_first_share_that_fails_is_told():
    crew = ThreadCrew(torch.device("cpu"))
    crew.size = 3
    seen = []

    def work(low, high):
        if low in (40, 90):
            raise ValueError(low)
        return torch.tensor([float(high - low)])

    assert crew.each(97, 5, lambda low, high: torch.tensor([float(high - low)]), lambda *s: seen.append(s)) == 97
    assert seen[-1] == (97, 97)
    with pytest.raises(ValueError, match="40"):
        crew.each(97, 5, work)


def test_small_epsilon_is_safe_where_the_subsample_is_small():
    """Relative ε of 0.003 and a memory cap that leaves a subsample of a few rows per target: slow, never wrong."""
    x, y = clouds(40_000, 150, d=16)
    exact = sinkhorn_potentials(x, y, epsilon=0.003, tolerance=1e-8, method="cached")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = sinkhorn_potentials(x, y, epsilon=0.003, method="streamed", memory_bytes=8 << 20)
    best = np.argsort(exact.scores)[:2000]
    assert p.marginal_error <= 1e-3 and len(np.intersect1d(best, np.argsort(p.scores)[:2000])) >= 0.995 * 2000


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cost": "manhattan"}, 'cost must be "sqeuclidean" or "cosine"'),
        ({"overlap": 1.5}, "overlap must be"),
        ({"budget": 0}, "budget must be a whole number from 1 to the pool's 4 rows"),
        ({"budget": 5}, "from 1 to the pool's 4 rows"),
        ({"memory_bytes": 0}, "memory_bytes must be positive"),
        ({"device": "tpu9"}, "device must be"),
        ({"device": "meta"}, "device must be"),
        ({"device": "cuda:99"}, '(available|build without CUDA|new enough); use "cpu"'),
        ({"state": "x", "method": "exact"}, 'state needs method "streamed"'),
    ],
)
def test_refusals(change, told):
    r = np.random.default_rng(0)
    with pytest.raises(SelectionError, match=told):
        sinkhorn_potentials(r.standard_normal((4, 3)), r.standard_normal((2, 3)), **change)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["exact", "cached", "streamed"])
def test_cuda_gives_the_same_scores(method):
    x, y = clouds(5000, 60)
    here = sinkhorn_potentials(x, y, method=method, tolerance=1e-9, nearest=True)
    there = sinkhorn_potentials(x, y, method=method, tolerance=1e-9, nearest=True, device="cuda")
    np.testing.assert_allclose(there.scores, here.scores, atol=1e-7)
