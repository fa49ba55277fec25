"""The transport solver beside itself: streamed, cached and exact; chunks, order, weights, edges and refusals."""

import warnings

import numpy as np
import pytest
import torch

from flatshift.selection import ConvergenceWarning, SelectionError, sinkhorn_potentials
from flatshift.selection.transport.kernel import StoredKernel, StreamedEvaluator
from flatshift.selection.transport.problem import pose_problem
from flatshift.selection.transport.rows import StreamedRows


def clouds(n, m, d=8, seed=0, offset=0.0):
    r = np.random.default_rng(seed)
    centres = 2 * r.standard_normal((6, d))
    x = centres[r.integers(0, 6, n)] + r.standard_normal((n, d)) + offset
    y = centres[r.integers(0, 3, m)] + 0.8 * r.standard_normal((m, d)) + offset
    return x, y


def naive_error(x, y, a, b, p):
    cost = ((x[:, None, :].astype(np.float64) - y) ** 2).sum(-1)
    plan = a[:, None] * b * np.exp((p.f[:, None] + p.g - cost) / p.epsilon)
    return np.abs(plan.sum(0) - b).sum(), np.abs(plan.sum(1) - a).sum()


@pytest.mark.parametrize("epsilon", [0.3, 0.05, 0.01, 0.002])
@pytest.mark.parametrize("shape", [(900, 40), (40, 900), (200, 200)])
def test_exact_reaches_its_tolerance(shape, epsilon):
    x, y = clouds(*shape)
    p = sinkhorn_potentials(x, y, epsilon=epsilon)
    n, m = shape
    column, row = naive_error(x, y, np.full(n, 1 / n), np.full(m, 1 / m), p)
    assert p.converged and p.method == "exact" and p.tolerance == 1e-9
    assert column <= 2e-9 and row <= 1e-10
    assert p.scores.mean() == pytest.approx(0, abs=1e-9) and p.scores.dtype == np.float64


@pytest.mark.parametrize("method", ["streamed", "cached"])
@pytest.mark.parametrize("weighted", [False, True])
def test_large_solvers_equal_the_exact_one(method, weighted):
    x, y = clouds(12_000, 60)
    r = np.random.default_rng(1)
    a, b = (r.random(12_000) + 0.05, r.random(60) + 0.1) if weighted else (None, None)
    exact = sinkhorn_potentials(x, y, a=a, b=b, epsilon=0.05)
    tight = sinkhorn_potentials(x, y, a=a, b=b, epsilon=0.05, method=method, tolerance=1e-9)
    assert tight.converged and tight.dtype == "float64" and tight.method == method
    np.testing.assert_allclose(tight.scores, exact.scores, atol=1e-7)
    assert tight.dual_value == pytest.approx(exact.dual_value, abs=1e-9)
    rough = sinkhorn_potentials(x, y, a=a, b=b, epsilon=0.05, method=method, tolerance=1e-3)
    assert rough.converged and rough.dtype == "float32" and rough.passes <= 3
    k = 600
    overlap = len(np.intersect1d(np.argsort(rough.scores)[:k], np.argsort(exact.scores)[:k])) / k
    assert overlap >= 0.99


@pytest.mark.parametrize("method", ["streamed", "cached"])
def test_a_pool_smaller_than_the_target(method):
    x, y = clouds(60, 9_000)
    r = np.random.default_rng(1)
    a, b = r.random(60) + 0.1, r.random(9_000) + 0.1
    a[3] = 0
    exact = sinkhorn_potentials(x, y, a=a, b=b)
    tight = sinkhorn_potentials(x, y, a=a, b=b, method=method, tolerance=1e-9)
    np.testing.assert_allclose(tight.scores, exact.scores, atol=1e-6)
    rough = sinkhorn_potentials(x, y, a=a, b=b, method=method, tolerance=1e-3, nearest=True)
    assert rough.converged and rough.nearest.shape == (60,)
    assert naive_error(x, y, a / a.sum(), b / b.sum(), rough)[0] == pytest.approx(rough.marginal_error, rel=0.05)


def test_large_is_chosen_by_size_and_reads_a_memory_map(tmp_path):
    x, y = clouds(101_000, 100, d=4)
    np.save(tmp_path / "x.npy", x.astype(np.float16))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    seen = []
    p = sinkhorn_potentials(mapped, y, memory_bytes=8 << 20, progress=lambda *step: seen.append(step))
    assert p.method == "streamed" and p.tolerance == 1e-3 and p.converged and p.passes <= 3
    wide = np.asarray(mapped, dtype=np.float64)
    assert p.mean_cost == pytest.approx(((wide - y.mean(0)) ** 2).sum(1).mean() + y.var(0).sum(), rel=1e-12)
    sample = np.random.default_rng(0).choice(101_000, 300, replace=False)
    cost = ((wide[sample][:, None] - y) ** 2).sum(-1)
    f = -p.epsilon * np.log(np.exp((p.g - cost) / p.epsilon).mean(1))
    np.testing.assert_allclose(p.f[sample], f, atol=1e-4 * p.epsilon)
    assert {stage for stage, _, _ in seen} >= {"reading the pool", "pass 1"}
    assert all(0 < done <= total for _, done, total in seen)


def test_chunks_and_row_order_leave_the_answer():
    x, y = clouds(3000, 50)
    order = np.random.default_rng(0).permutation(3000)
    for options in ({}, {"method": "streamed", "tolerance": 1e-8}):
        whole = sinkhorn_potentials(x, y, **options)
        for chunk in (1 if not options else 57, 333, 100_000):
            cut = sinkhorn_potentials(x, y, chunk=chunk, **options)
            np.testing.assert_allclose(cut.f, whole.f, atol=1e-7)
            np.testing.assert_allclose(cut.g, whole.g, atol=1e-7)
        moved = sinkhorn_potentials(x[order], y, **options)
        np.testing.assert_allclose(moved.f, whole.f[order], atol=1e-6)


def test_far_from_the_origin_nothing_cancels():
    x, y = clouds(2000, 50)
    near = sinkhorn_potentials(x, y, method="streamed", tolerance=1e-4)
    far = sinkhorn_potentials(x + 1e6, y + 1e6, method="streamed", tolerance=1e-4)
    assert far.dtype == near.dtype == "float32"
    np.testing.assert_allclose(far.scores, near.scores, atol=5e-5)  # float32 logits of 40 at an ε of 2.5


def test_nearest_is_the_largest_part_of_a_rows_mass():
    x, y = clouds(500, 30)
    for method in ("exact", "cached", "streamed"):
        p = sinkhorn_potentials(x, y, nearest=True, method=method)
        cost = ((x[:, None] - y) ** 2).sum(-1)
        assert (p.nearest == (p.g - cost).argmax(1)).mean() > 0.999
        assert p.nearest.dtype == np.int64
    assert sinkhorn_potentials(x, y).nearest is None


def test_rows_of_weight_zero_are_scored_but_do_not_count():
    x, y = clouds(60, 20)
    a = np.ones(60)
    a[:5] = 0
    for shape in ("tall", "wide"):
        target = y if shape == "tall" else np.vstack([y, y + 0.1, y - 0.1, y + 0.2])
        p = sinkhorn_potentials(x, target, a=a)
        q = sinkhorn_potentials(x[5:], target)
        np.testing.assert_allclose(p.scores[5:], q.scores, atol=1e-7)
        assert p.converged and np.isfinite(p.scores).all()


def test_duplicate_points_share_their_potentials():
    x, y = clouds(50, 10)
    doubled = sinkhorn_potentials(np.vstack([x, x]), np.vstack([y, y]))
    single = sinkhorn_potentials(x, y)
    np.testing.assert_allclose(doubled.scores[:50], doubled.scores[50:], atol=1e-9)
    np.testing.assert_allclose(doubled.scores[:50], single.scores, atol=1e-7)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (2, 1)])
def test_one_point_on_a_side(shape):
    x, y = clouds(*shape)
    p = sinkhorn_potentials(x, y)
    n, m = shape
    assert p.converged and np.isfinite(p.f).all() and np.isfinite(p.g).all()
    assert max(naive_error(x, y, np.full(n, 1 / n), np.full(m, 1 / m), p)) <= 2e-9
    cost = ((x[:, None] - y) ** 2).sum(-1)
    if m == 1:
        np.testing.assert_allclose(p.scores, cost[:, 0] - cost.mean(), atol=1e-9)


def test_points_that_all_coincide():
    p = sinkhorn_potentials(np.ones((4, 3)), np.ones((2, 3)), nearest=True)
    assert p.mean_cost == 0 and p.converged and (p.scores == 0).all() and (p.nearest == 0).all()
    assert (sinkhorn_potentials(np.full((300, 8), 1000.1), np.full((20, 8), 1000.1)).scores == 0).all()
    q = sinkhorn_potentials(np.array([[1.0], [1.0], [3.0]]), np.ones((2, 1)), a=[1, 1, 0])
    np.testing.assert_allclose(q.scores, [0, 0, 4])


@pytest.mark.parametrize("method", ["exact", "streamed"])
@pytest.mark.parametrize("size", [1e-16, 1e-25, 1e-140])
def test_the_size_of_features_changes_nothing(method, size):
    x, y = clouds(200, 20)
    near = sinkhorn_potentials(x, y, method=method, tolerance=1e-4)
    small = sinkhorn_potentials(x * size, y * size, method=method, tolerance=1e-4)
    assert small.converged
    np.testing.assert_allclose(small.scores / size / size, near.scores, atol=0.01)


def test_integer_and_half_features():
    r = np.random.default_rng(0)
    x, y = r.integers(0, 50, (80, 3)), r.integers(0, 50, (20, 3))
    whole = sinkhorn_potentials(x, y)
    np.testing.assert_allclose(sinkhorn_potentials(x.astype(float), y.astype(float)).scores, whole.scores, atol=1e-6)
    np.testing.assert_allclose(sinkhorn_potentials(x.astype(np.float16), y).scores, whole.scores, atol=1e-3)


def test_a_limit_that_is_reached_is_told():
    x, y = clouds(300, 100)
    with pytest.warns(ConvergenceWarning, match="above the tolerance"):
        p = sinkhorn_potentials(x, y, epsilon=0.005, max_iterations=3)
    assert not p.converged and p.marginal_error > p.tolerance
    with pytest.warns(ConvergenceWarning):  # also by the stages of falling ε
        assert sinkhorn_potentials(x, y, epsilon=1e-5, max_iterations=3).iterations <= 6
    with pytest.warns(ConvergenceWarning):
        q = sinkhorn_potentials(x, y, epsilon=0.01, method="streamed", tolerance=1e-8, max_passes=1)
    assert q.passes == 1 and not q.converged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinkhorn_potentials(x, y)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": np.zeros((3, 2))}, "2 columns and target features 3"),
        ({"x": np.zeros((0, 3))}, "empty"),
        ({"x": np.zeros(3)}, "two dimensions"),
        ({"x": np.array([["a"]])}, "real numbers"),
        ({"x": np.array([[0, 0, 0], [0, np.nan, 0.0]])}, "pool features: row 1 holds a NaN"),
        ({"y": np.array([[0, np.inf, 0.0]])}, "target features: row 0"),
        ({"x": np.full((2, 3), 1e200)}, "overflow"),
        ({"epsilon": 0}, "epsilon must be a positive"),
        ({"epsilon": float("nan")}, "epsilon must be a positive"),
        ({"tolerance": 0.0}, "tolerance must be"),
        ({"chunk": 0}, "chunk must be"),
        ({"chunk": 1.5}, "chunk must be a whole number of at least 1 row, not 1.5"),
        ({"tolerance": "x"}, "tolerance must be"),
        ({"memory_bytes": "1"}, "memory_bytes must be positive, not '1'"),
        ({"a": ["a"] * 4}, "pool weights must be real numbers"),
        ({"max_passes": 0}, "max_passes must be a whole number of at least 1, not 0"),
        ({"max_iterations": 0}, "max_iterations must be a whole number of at least 1"),
        ({"held_bytes": -1}, "held_bytes must not be negative"),
        ({"method": "fast"}, "method must be"),
        ({"a": [1.0]}, r"pool weights must have shape \(4,\)"),
        ({"a": [1, -1, 1, 1]}, "pool weight 1 is -1"),
        ({"a": [0, 0, 0, 0]}, "at least one must be positive"),
        ({"b": [1, 0]}, "leave target row 1 out"),
    ],
)
def test_refusals(change, told):
    r = np.random.default_rng(0)
    call = {"x": r.standard_normal((4, 3)), "y": r.standard_normal((2, 3)), **change}
    with pytest.raises(SelectionError, match=told):
        sinkhorn_potentials(call.pop("x"), call.pop("y"), **call)


def test_epsilon_of_numpy_is_the_same_number():
    r = np.random.default_rng(0)
    x, y = r.standard_normal((9, 3)), r.standard_normal((4, 3))
    small = sinkhorn_potentials(x, y, epsilon=np.float32(0.05), tolerance=np.float32(1e-6))
    plain = sinkhorn_potentials(x, y, epsilon=float(np.float32(0.05)), tolerance=float(np.float32(1e-6)))
    assert np.array_equal(small.scores, plain.scores) and small.epsilon == plain.epsilon


def test_kernel_and_stream_agree_with_autograd():
    x, y = clouds(70, 12)
    posed = pose_problem(x, y, np.arange(1, 71), None, chunk=16, progress=None)
    rows = StreamedRows(posed, torch.float64)
    epsilon = 0.1 * posed.mean_cost
    g = torch.linspace(-1, 1, 12, dtype=torch.float64).requires_grad_()
    cost = torch.cdist(torch.from_numpy(x), torch.from_numpy(y)) ** 2

    def dual(g):
        f = -epsilon * torch.logsumexp((g - cost) / epsilon + rows.b.log(), 1)
        return rows.a @ f + rows.b @ g

    gradient = torch.autograd.grad(dual(g), g)[0]
    hessian = torch.autograd.functional.hessian(dual, g.detach())
    kernel = StoredKernel(rows, epsilon, chunk=9)
    kernel.absorb(torch.zeros(12, dtype=torch.float64))
    for evaluator in (kernel, StreamedEvaluator(rows, epsilon, chunk=11)):
        at = evaluator.evaluate(g.detach())
        torch.testing.assert_close(rows.b - at.column, gradient)
        assert at.value == pytest.approx(float(dual(g.detach())), rel=1e-12)
    torch.testing.assert_close(-kernel.curvature(g.detach()) / epsilon, hessian)


@pytest.mark.parametrize("method", [None, "streamed", "cached"])
def test_hard_problems_all_converge(method):
    """Far clusters that hardly exchange mass, heavy tails, duplicates, lattices, spiky weights, ε down to 2e-4."""
    r = np.random.default_rng(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trial in range(60):
            n, m = int(r.choice([2, 5, 30, 200])), int(r.choice([2, 3, 20, 100]))
            x, y = r.standard_normal((n, 3)), r.standard_normal((m, 3))
            kind = trial % 5
            if kind == 1:
                x *= 1e4 * np.exp(2 * r.standard_normal((n, 1)))
            elif kind == 2:
                x, y = r.integers(0, 2, (n, 3)), r.integers(0, 2, (m, 3))
                x[0], y[0] = 0, 1
            elif kind == 3:
                x, y = x + 20 * r.integers(0, 2, (n, 1)), y + 20 * r.integers(0, 2, (m, 1))
            elif kind == 4:
                y = x[r.integers(0, n, m)]
            a, b = r.random(n) ** 3 + 1e-6, r.random(m) ** 3 + 1e-6
            epsilon = float(r.choice([1, 0.1, 0.01, 0.001, 0.0002]))
            p = sinkhorn_potentials(x, y, a=a, b=b, epsilon=epsilon, method=method, tolerance=1e-6 if method else None)
            assert p.converged and np.isfinite(p.scores).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
def test_a_near_answer_stands_in_for_the_row_maxima(dtype, cost):
    x, y = clouds(900, 30)
    posed = pose_problem(x.astype(np.float16), y, None, None, chunk=None, progress=None, cost=cost)
    epsilon = 0.02 * posed.mean_cost
    stream = StreamedEvaluator(StreamedRows(posed, dtype), epsilon, chunk=128)
    g = torch.from_numpy(np.random.default_rng(0).standard_normal(30)) * epsilon
    near = stream.evaluate(g)
    for distance in (0.0, 2.0, 500.0):  # the last is far out of float32's range: the maxima are looked for after all
        other = g + distance * epsilon * torch.linspace(-1, 1, 30, dtype=torch.float64)
        alone, helped = stream.evaluate(other, True), stream.evaluate(other, True, near)
        accuracy = 2e-5 if dtype == torch.float32 else 1e-12
        np.testing.assert_allclose(helped.f / epsilon, alone.f / epsilon, atol=accuracy * (1 + distance))
        np.testing.assert_allclose(helped.column, alone.column, atol=accuracy * (1 + distance))
        assert (helped.nearest == alone.nearest).double().mean() > 0.99


@pytest.mark.parametrize("held", [False, True])
def test_thinned_rows_are_every_fourth(held):
    x, y = clouds(403, 12)
    a = np.random.default_rng(0).random(403) + 0.1
    rows = StreamedRows(pose_problem(x, y, a, None, chunk=None, progress=None, cost="cosine"), torch.float64)
    thin = StreamedRows(pose_problem(x[::4], y, a[::4], None, chunk=None, progress=None, cost="cosine"), torch.float64)
    g = torch.linspace(-1, 1, 12, dtype=torch.float64)
    found = StoredKernel((rows.dense() if held else rows).thinned(4), 0.1).evaluate(g)
    wanted = StoredKernel(thin, 0.1).evaluate(g)
    np.testing.assert_allclose(found.f, wanted.f, atol=1e-12)
    np.testing.assert_allclose(found.column, wanted.column, atol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_bad_row_is_found_among_its_squares(bad, dtype):
    x, y = clouds(3000, 5)
    x = x.astype(dtype)
    x[2345, 3] = bad
    with pytest.raises(SelectionError, match="pool features: row 2345 holds a NaN or an infinity"):
        sinkhorn_potentials(x, y)


def test_more_targets_than_rows_tell_nothing_of_the_other_side():
    x, y = clouds(300, 40_000)
    p = sinkhorn_potentials(x, y, method="streamed")
    assert p.converged and p.overlap is None and p.overlap_estimate is None
    with pytest.raises(SelectionError, match="too little for 300 rows and 40,000 targets"):
        sinkhorn_potentials(x, y, memory_bytes=1_000_000)
