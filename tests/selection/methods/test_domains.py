"""Domains judged by transport: distances against POT, samples that follow ids, masses that follow distances."""

from types import SimpleNamespace

import numpy as np
import pytest

from flatshift.experiments.recipe.schema import Select
from flatshift.experiments.select.relevance import apply_relevance
from flatshift.selection import SelectionError
from flatshift.selection.config import KNN, Domains, GotD, GotDContrast, Relevance
from flatshift.selection.methods.domains import (
    choose_nearest_domains,
    domain_distances,
    sample_domains,
    weights_by_distance,
)

R = np.random.default_rng(0)


def test_distances_are_pots_at_one_epsilon():
    ot = pytest.importorskip("ot")
    y = R.normal(size=(30, 3))
    samples = {
        name: R.normal(size=(40, 3)) * scale + shift
        for name, shift, scale in (("far", 3, 1), ("near", 0.3, 1), ("wide", 0, 3))
    }
    found = domain_distances(samples, y, epsilon=0.1, tolerance=1e-10)
    costs = {name: ((x[:, None] - y[None]) ** 2).sum(-1) for name, x in samples.items()}
    epsilon = 0.1 * np.mean([cost.mean() for cost in costs.values()])
    for name, cost in costs.items():
        a, b = np.full(40, 1 / 40), np.full(30, 1 / 30)
        plan = ot.sinkhorn(a, b, cost, epsilon, method="sinkhorn_log", numItermax=100_000, stopThr=1e-13)
        value = (plan * cost).sum() + epsilon * (plan * np.log(plan / (a[:, None] * b))).sum()
        np.testing.assert_allclose(found[name], value, rtol=1e-7)
    assert list(found) == sorted(found, key=found.get) and choose_nearest_domains(found, 1) == ["near"]
    assert choose_nearest_domains(found, 9) == list(found)
    assert domain_distances({"on": y[:1]}, y[:1]) == {"on": 0.0}
    with pytest.raises(SelectionError, match="at least one domain"):
        domain_distances({}, y)


def test_samples_follow_ids_not_rows():
    ids = [f"r{i}" for i in range(5000)]
    domains = ["a" if i % 3 else ("b" if i % 2 else None) for i in range(5000)]
    found = sample_domains(domains, 50, ids=ids, seed=1)
    assert {name: len(rows) for name, rows in found.items()} == {"a": 50, "b": 50}
    assert all(domains[i] == name for name, rows in found.items() for i in rows)
    order = R.permutation(5000)
    moved = sample_domains([domains[i] for i in order], 50, ids=[ids[i] for i in order], seed=1)
    for name, rows in found.items():
        assert {ids[i] for i in rows} == {ids[order[i]] for i in moved[name]}
        assert (np.diff(rows) > 0).all()
    assert (sample_domains(domains, 50, ids=ids, seed=2)["a"] != found["a"]).any()
    assert len(sample_domains(domains, 10**6, ids=ids, seed=1)["b"]) == domains.count("b")
    with pytest.raises(SelectionError, match="no row of the pool has one"):
        sample_domains([None], 5, ids=["a"], seed=0)


def test_masses_fall_with_distance_and_are_spread_over_rows():
    domains = ["a", "b", "b", None, "c"]
    weights, masses = weights_by_distance({"a": 1.0, "b": 2.0, "c": 3.0}, domains)
    raw = np.exp([0, -1, -2])  # the mean lies 1 above the smallest
    np.testing.assert_allclose(list(masses.values()), raw / raw.sum())
    np.testing.assert_allclose(weights, [masses["a"], masses["b"] / 2, masses["b"] / 2, 0, masses["c"]])
    np.testing.assert_allclose(weights.sum(), 1)
    flat, even = weights_by_distance({"a": 2.0, "b": 2.0, "c": 2.0}, domains)
    assert len(set(even.values())) == 1 and np.isclose(flat.sum(), 1)
    _, sharp = weights_by_distance({"a": 1.0, "b": 2.0, "c": 3.0}, domains, temperature=0.1)
    assert sharp["a"] > 0.99


def test_distances_follow_the_cost():
    y = R.normal(size=(20, 3)) + 1
    samples = {"near": R.normal(size=(30, 3)) + 1, "back": R.normal(size=(30, 3)) - 1}
    found = domain_distances(samples, y, epsilon=0.1, tolerance=1e-10, cost="cosine")
    scaled = {name: x * R.uniform(0.1, 9, (30, 1)) for name, x in samples.items()}
    again = domain_distances(scaled, 5 * y, epsilon=0.1, tolerance=1e-10, cost="cosine")
    unit = {name: x / np.linalg.norm(x, axis=1, keepdims=True) for name, x in (samples | {"y": y}).items()}
    goal = unit.pop("y")
    squared = domain_distances(unit, goal, epsilon=0.1, tolerance=1e-10)
    assert list(found) == ["near", "back"]
    for name, value in squared.items():
        np.testing.assert_allclose([found[name], again[name]], value / 2, rtol=1e-7)
    with pytest.raises(SelectionError, match="row 1 is zero, so it has no cosine"):
        domain_distances(samples | {"none": np.array([[1.0, 2, 3], [0, 0, 0]])}, y, cost="cosine")


@pytest.mark.parametrize(
    ("method", "cost"),
    [
        (GotD(cost="cosine"), "cosine"),
        (GotDContrast(cost="cosine"), "cosine"),
        (Domains(inside=GotD(cost="cosine")), "cosine"),
        (GotD(), "sqeuclidean"),
        (KNN(), "sqeuclidean"),
    ],
)
def test_domains_are_judged_by_the_methods_cost(method, cost):
    x = np.concatenate([R.normal(size=(10, 3)) + 1, 3 * R.normal(size=(10, 3)) - 1])
    names, ids = ["a"] * 10 + ["b"] * 10, [f"r{i}" for i in range(20)]
    rows = SimpleNamespace(domains=lambda: names, ids=ids, take=lambda index: index)
    vectors = SimpleNamespace(pool=lambda index, _: x[index], target=lambda: x[:5])
    spec = Select(relevance=Relevance(use="weight", sample=10), method=method)
    console = SimpleNamespace(say=lambda _: None)
    about = apply_relevance(spec, SimpleNamespace(rows=rows), vectors, 0, console)[2]
    wanted = domain_distances({"a": x[:10], "b": x[10:]}, x[:5], epsilon=Relevance().epsilon, cost=cost)
    assert about["distances"] == pytest.approx(wanted, rel=1e-6)
