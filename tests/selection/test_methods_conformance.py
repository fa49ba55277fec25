"""One suite that every selector passes."""

import inspect
import math
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from sklearn.base import clone

from flatshift import selection
from flatshift.selection import (
    AutoSelector,
    ClassifierSelector,
    CynicalSelector,
    DomainsSelector,
    DSIRSelector,
    GotDContrastSelector,
    GotDSelector,
    KNNSelector,
    LengthSelector,
    LessSelector,
    LossGapSelector,
    MooreLewisSelector,
    PerplexitySelector,
    Pool,
    RandomSelector,
    RoundRobinSelector,
    SelectionError,
    Target,
    TokenRows,
    TSDSSelector,
    build_selector,
)
from flatshift.selection.config import (
    DSIR,
    KNN,
    TSDS,
    Auto,
    Classifier,
    Cynical,
    Domains,
    GotD,
    GotDContrast,
    Length,
    Less,
    LossGap,
    Method,
    MooreLewis,
    Perplexity,
    Random,
    RoundRobin,
    required_inputs,
)

N, M, D, BUDGET = 300, 40, 6, 25


def surprise(texts):
    return [0.5 + math.sin(sum(map(ord, text)) * len(text)) for text in texts]


CASES = {
    "gotd": GotDSelector(seed=3),
    "gotd-rounds": GotDSelector(rounds=3, budget=BUDGET, seed=3),
    "gotd-debiased": GotDSelector(debiased=True, seed=3),
    "gotd-debiased-sampled": GotDSelector(debiased=True, self_sample=120, seed=3),
    "gotd-contrast": GotDContrastSelector(repel=0.7, seed=3),
    "gotd-cosine": GotDSelector(rounds=2, budget=BUDGET, cost="cosine", seed=3),
    "gotd-cosine-debiased": GotDSelector(debiased=True, cost="cosine", seed=3),
    "random": RandomSelector(seed=3),
    "knn": KNNSelector(),
    "dsir": DSIRSelector(buckets=500, seed=3),
    "dsir-sha256": DSIRSelector(buckets=500, hashing="sha256", floor=1e-8, smoothing=0.0),
    "dsir-resample": DSIRSelector(buckets=500, resample=True, seed=3),
    "tsds": TSDSSelector(sigma=2.0, neighbours=20, seed=3),
    "cynical": CynicalSelector(minimum=5, budget=BUDGET),
    "cynical-once": CynicalSelector(minimum=5, repeats=1, budget=BUDGET),
    "moore-lewis": MooreLewisSelector(share=0.4, minimum=5),
    "classifier": ClassifierSelector(buckets=512, fit_rows=100, seed=3),
    "auto": AutoSelector(budget=BUDGET, seed=3),
    "less": LessSelector(),
    "less-inner": LessSelector(similarity="inner", checkpoint_weights=(2.0, 1.0)),
    "round-robin": RoundRobinSelector(neighbours=60),
    "loss-gap": LossGapSelector(measure=surprise),
    "perplexity": PerplexitySelector(keep="middle"),
    "perplexity-measured": PerplexitySelector(keep="low", measure=surprise),
    "length": LengthSelector(prefer="long", unit="characters"),
    "length-target": LengthSelector(seed=3),
    "domains": DomainsSelector(budget=BUDGET, seed=3),
    "domains-inside": DomainsSelector(budget=BUDGET, shares={"a": 1.0, "c": 2.0}, inside=KNNSelector(), seed=3),
}
FEATURED = [name for name, case in CASES.items() if name.split("-")[0] in ("gotd", "knn", "round", "tsds", "less")]
DRAWS = ("random", "dsir-resample", "tsds", "length-target", "domains")
WORDS = [f"w{i}" for i in range(60)]


def samples(count, seed, shift=0.0):
    r = np.random.default_rng(seed)
    words = [" ".join(r.choice(WORDS[: 20 + int(10 * shift) + i % 30], size=3 + i % 9)) for i in range(count)]
    return Pool(
        ids=[f"{seed}-{i}" for i in range(count)],
        texts=words,
        features=r.standard_normal((count, D)) + shift,
        domains=[(*"abbc", None)[i] for i in r.integers(5, size=count)],
    )


NEGATIVE = Pool(features=samples(30, 5, shift=-0.5).features)


def tokens(text):
    return [int(word[1:]) for word in text.split()]


def fitted(selector, pool, target):
    """Fit with what the method asks for beyond pool and target."""
    pool, target = (
        side if side.texts is None else replace(side, tokens=TokenRows.of([tokens(t) for t in side.texts], 80))
        for side in (pool, target)
    )
    if isinstance(selector, PerplexitySelector) and selector.measure is None and pool.texts is not None:
        pool = replace(pool, losses=np.array(surprise(pool.texts)))
    more = {"negative": NEGATIVE} if isinstance(selector, GotDContrastSelector) else {}
    return selector.fit(pool, target, **more)


@pytest.fixture(params=list(CASES))
def selector(request):
    return clone(CASES[request.param])


@pytest.fixture(params=FEATURED)
def featured(request):
    return clone(CASES[request.param])


@pytest.fixture
def pool():
    return samples(N, 1)


@pytest.fixture
def target():
    return samples(M, 2, shift=0.5)


def reordered(pool, order):
    return Pool(
        ids=[pool.ids[i] for i in order],
        texts=[pool.texts[i] for i in order],
        features=np.asarray(pool.features)[order],
        domains=[pool.domains[i] for i in order],
    )


def test_scores_and_shapes(selector, pool, target):
    assert fitted(selector, pool, target) is selector
    assert selector.scores_.shape == (N,) and selector.scores_.dtype == np.float64
    assert np.isfinite(selector.scores_).all()
    if selector.nearest_target_ is not None:
        assert selector.nearest_target_.shape == (N,) and selector.nearest_target_.dtype == np.int64
        assert selector.nearest_target_.min() >= 0 and selector.nearest_target_.max() < M
    assert isinstance(selector.diagnostics_, dict)


def test_budget_is_met_smallest_first_without_more_repeats_than_allowed(selector, pool, target):
    fitted(selector, pool, target)
    repeats = getattr(getattr(selector, "inside_", selector), "repeats", 1)
    for k in (1, 7, N):
        chosen = selector.select(k)
        assert chosen.dtype == np.int64 and len(chosen) == k and np.bincount(chosen).max() <= repeats
        once = np.array(list(dict.fromkeys(chosen.tolist())))
        assert (np.diff(selector.scores_[once]) >= 0).all()
        assert selector.scores_[once].max() <= np.delete(selector.scores_, once).min(initial=np.inf)
        assert (np.sort(selector.ranks()[once]) == np.arange(1, len(once) + 1)).all()


def test_nested_budgets(selector, pool, target):
    fitted(selector, pool, target)
    assert (selector.select(50)[:20] == selector.select(20)).all()


def test_deterministic_by_seed(selector, pool, target, request):
    first, again = fitted(clone(selector), pool, target), fitted(clone(selector), pool, target)
    assert (first.scores_ == again.scores_).all()
    if request.node.callspec.params["selector"] in DRAWS:
        other = fitted(clone(selector).set_params(seed=4), pool, target)
        assert set(other.select(30).tolist()) != set(first.select(30).tolist())


def test_follows_the_rows(selector, pool, target):
    order = np.random.default_rng(0).permutation(N)
    straight = fitted(clone(selector), pool, target)
    moved = fitted(clone(selector), reordered(pool, order), target)
    np.testing.assert_allclose(moved.scores_, straight.scores_[order], rtol=1e-7, atol=1e-8)
    ranked = np.sort(straight.scores_)
    if ranked[24] < ranked[25]:  # else a tie at the cut, which goes by file order
        assert set(order[moved.select(25)].tolist()) == set(straight.select(25).tolist())
    if straight.nearest_target_ is not None:
        assert (moved.nearest_target_ == straight.nearest_target_[order]).all()


def test_target_order_does_not_matter(selector, pool, target):
    order = np.random.default_rng(0).permutation(M)
    straight = fitted(clone(selector), pool, target)
    moved = fitted(clone(selector), pool, reordered(target, order))
    np.testing.assert_allclose(moved.scores_, straight.scores_, rtol=1e-7, atol=1e-8)
    if straight.nearest_target_ is not None:
        assert (order[moved.nearest_target_] == straight.nearest_target_).all()


def test_chunk_size_does_not_matter(selector, pool, target):
    if "chunk" not in selector.get_params():
        pytest.skip("has no chunks")
    whole = fitted(clone(selector), pool, target)
    for chunk in (7, 64, 1000):
        cut = fitted(clone(selector).set_params(chunk=chunk), pool, target)
        np.testing.assert_allclose(cut.scores_, whole.scores_, rtol=1e-9, atol=1e-9)
        assert (cut.select(25) == whole.select(25)).all()


def test_inputs_stay_as_they_were(selector, pool, target):
    before = [np.array(p.features) for p in (pool, target)]
    for p in (pool, target):
        p.features.setflags(write=False)
    texts, domains = list(pool.texts), list(pool.domains)
    fitted(selector, pool, target)
    assert all((p.features == b).all() for p, b in zip((pool, target), before, strict=True))
    assert list(pool.texts) == texts and list(pool.domains) == domains


def test_memory_maps_give_the_same(selector, pool, target, tmp_path):
    np.save(tmp_path / "x.npy", pool.features)
    mapped = replace(pool, features=np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert (fitted(clone(selector), mapped, target).scores_ == fitted(clone(selector), pool, target).scores_).all()


def test_parameters_round_trip(selector):
    params = selector.get_params()
    assert set(params) == set(inspect.signature(type(selector)).parameters)
    assert repr(clone(selector)) == repr(selector)
    if selector.get_params().get("measure") is None:
        names = {name: getattr(selection, name) for name in selection.__all__}
        assert repr(eval(repr(selector), names)) == repr(selector)  # noqa: S307
    with pytest.raises(SelectionError, match="no parameter"):
        selector.set_params(no_such=1)


def test_bad_budgets_and_early_selects(selector, pool, target):
    with pytest.raises(SelectionError, match="fit"):
        selector.select(1)
    fitted(selector, pool, target)
    for bad, told in ((N + 1, f"above the pool size {N}"), (0, "at least 1"), (2.5, "whole number"), (True, "whole")):
        with pytest.raises(SelectionError, match=told):
            selector.select(bad)


def test_a_missing_part_is_named(selector, target):
    bare = Pool(ids=[str(i) for i in range(N)])
    if isinstance(selector, RandomSelector):
        assert len(selector.fit(bare, target).scores_) == N
    else:
        with pytest.raises(SelectionError, match=r"texts|tokens|features|domains|loss"):
            fitted(selector, bare, target)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["pool", "target"])
def test_numbers_that_are_not_finite_are_refused_by_row(featured, pool, target, side, value):
    bad = replace(pool if side == "pool" else target, features=np.array((pool if side == "pool" else target).features))
    bad.features[17, 2] = value
    with pytest.raises(SelectionError, match=f"{side} features: row 17 holds a NaN or an infinity"):
        fitted(featured, *((bad, target) if side == "pool" else (pool, bad)))
    assert not hasattr(featured, "scores_")


def test_features_that_do_not_match_are_refused(featured, pool, target):
    narrow = replace(target, features=target.features[:, :4])
    with pytest.raises(SelectionError, match="pool features have 6 columns and target features 4"):
        fitted(featured, pool, narrow)
    with pytest.raises(SelectionError, match=r"two dimensions|matrix|empty"):
        fitted(featured, replace(pool, features=pool.features[:, 0]), target)


@pytest.mark.parametrize("kind", [complex, str, object, bool])
def test_features_that_are_no_real_numbers_are_refused(featured, pool, target, kind):
    with pytest.raises(SelectionError, match="pool features must be real numbers, not"):
        fitted(featured, replace(pool, features=pool.features.astype(kind)), target)
    with pytest.raises(SelectionError, match="target features must be real numbers, not"):
        fitted(featured, pool, replace(target, features=target.features.astype(kind)))
    with pytest.raises(SelectionError, match="rows of real numbers, all of one length"):
        fitted(featured, replace(pool, features=[[1.0, 2.0]] * (N - 1) + [[3.0]]), target)


def test_lists_and_tensors_give_the_same(featured, pool, target):
    scores = fitted(clone(featured), pool, target).scores_
    for other in (np.ndarray.tolist, torch.tensor):
        again = [replace(side, features=other(side.features)) for side in (pool, target)]
        assert np.array_equal(fitted(clone(featured), *again).scores_, scores)


@pytest.mark.parametrize("factor", [1e200, 1e307])
def test_features_that_overflow_are_refused(featured, pool, target, factor):
    if getattr(featured, "cost", "") == "cosine":
        factor = 1e307
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        huge = [replace(side, features=side.features / 4 * factor) for side in (pool, target)]
        with pytest.raises(SelectionError, match=r"so large that|is too long"):
            fitted(featured, *huge)
    assert not hasattr(featured, "scores_")


@pytest.mark.parametrize("chunk", [-1, 0, 1.5, True, "9"])
def test_a_chunk_is_a_whole_number_of_rows(featured, pool, target, chunk):
    with pytest.raises(SelectionError, match="chunk must be a whole number of at least 1 row"):
        fitted(featured.set_params(chunk=chunk), pool, target)


def test_weights_that_are_no_numbers_are_refused(pool, target):
    words = ["a"] * N
    for chooser in (GotDSelector(), GotDSelector(rounds=2, budget=5)):
        with pytest.raises(SelectionError, match="pool weights must be real numbers"):
            chooser.fit(replace(pool, weights=words), target)
    for chooser in (GotDSelector(rounds=2, budget=5), DomainsSelector(budget=5)):
        with pytest.raises(SelectionError, match="target weights must be real numbers"):
            chooser.fit(pool, replace(target, weights=words[:M]))


def test_one_target_row_and_repeated_target_rows(selector, pool, target):
    one = reordered(target, [0])
    if isinstance(selector, DomainsSelector):
        one = replace(one, domains=["b"])
    if isinstance(selector, AutoSelector):  # there is nothing to hold out
        with pytest.raises(SelectionError, match=r"holds out 0.25 of the target, and of 1 texts that leaves too few"):
            fitted(selector, pool, one)
        return
    alone = fitted(clone(selector), pool, one)
    assert np.isfinite(alone.scores_).all()
    assert len(alone.select(BUDGET)) == BUDGET
    many = fitted(clone(selector), pool, replace(reordered(one, [0] * 8), ids=[f"r{i}" for i in range(8)]))
    assert np.isfinite(many.scores_).all()
    grown = (DSIRSelector, LengthSelector, MooreLewisSelector, ClassifierSelector)
    if isinstance(selector, grown) or getattr(selector, "rounds", 1) > 1:
        return  # more rows of the same are more evidence against the smoothing, or enough to hold some out
    np.testing.assert_allclose(many.scores_, alone.scores_, rtol=1e-6, atol=1e-6)


def test_rows_of_weight_zero_are_scored_and_change_nothing(featured, pool, target):
    if not isinstance(featured, (GotDSelector, GotDContrastSelector)):
        pytest.skip("ignores weights")
    weights = np.ones(N)
    weights[::7] = 0.0
    kept = np.flatnonzero(weights)
    weighted = fitted(clone(featured), replace(pool, weights=weights), target)
    assert np.isfinite(weighted.scores_).all()
    if getattr(featured, "rounds", 1) > 1:
        return  # a row of weight 0 may be chosen, and is then part of the later mixtures
    without = fitted(clone(featured), reordered(pool, kept), target)
    np.testing.assert_allclose(weighted.scores_[kept], without.scores_, rtol=1e-6, atol=1e-6)


def test_a_pool_of_one_row(selector, pool, target):
    if hasattr(selector, "budget") and selector.budget is not None:
        selector.set_params(budget=1)
    single = replace(reordered(pool, [4]), domains=["a"])
    if isinstance(selector, DomainsSelector):
        selector.set_params(shares={"a": 1.0})
    assert fitted(selector, single, target).select(1).tolist() == [0]
    assert np.isfinite(selector.scores_).all()


def test_rows_that_all_coincide_go_by_file_order(featured, pool, target):
    flat = replace(pool, features=np.ones((N, D)))
    fitted(featured, flat, target)
    assert np.isfinite(featured.scores_).all()
    if isinstance(featured, (KNNSelector, LessSelector)):
        assert featured.select(5).tolist() == [0, 1, 2, 3, 4]


def test_pools_are_checked():
    with pytest.raises(SelectionError, match="2 ids, 3 texts"):
        Pool(ids=["a", "b"], texts=["a", "b", "c"])
    with pytest.raises(SelectionError, match="empty"):
        Pool(texts=[])
    with pytest.raises(SelectionError, match="at least one"):
        Target()
    for part in (["a", 5], ("a", None), np.array([1, 2])):
        row = int(part[0] == "a")
        with pytest.raises(SelectionError, match=f"texts: row {row} is .*, which is no string"):
            Pool(texts=part)
        with pytest.raises(SelectionError, match=f"ids: row {row} is .*, which is no string"):
            Pool(ids=part)


EVERY = [
    GotD(memory_gib=2, cost="cosine", epsilon=0.2, tolerance=1e-5, rounds=4, mixture=0.3, holdout=0.1),
    GotD(debiased=True, self_sample=77, memory_gib=2),
    GotDContrast(memory_gib=2, cost="cosine", epsilon=0.2, tolerance=1e-5, attract=0.0, repel=2.0),
    Random(),
    KNN(),
    DSIR(buckets=77, resample=True, hashing="sha256", smoothing=0.0, floor=1e-8),
    MooreLewis(share=0.3, minimum=3, memory_gib=2),
    Cynical(mixture=0.2, prior=3.0, minimum=3, repeats=2),
    Classifier(buckets=99, strength=2.0, fit_rows=50, minimum=3),
    TSDS(alpha=0.4, scale=2.0, sigma=0.3, neighbours=9),
    Less(similarity="inner", checkpoint_weights=(1.0, 2.0)),
    Perplexity(keep="low"),
    LossGap(steps=3, batch_size=2, lr=1e-4, rank=2),
    RoundRobin(neighbours=7),
    Length(prefer="short", unit="characters"),
    Domains(shares={"a": 1.0}),
    Auto(tried=("dsir",), holdout=0.5, pairs=7.0),
]


@pytest.mark.parametrize("method", EVERY, ids=lambda method: method.kind)
def test_build_selector_passes_every_setting_on(method):
    built = build_selector(method, seed=9, budget=12, measure=surprise)
    params = built.get_params()
    for name, value in vars(method).items():
        if isinstance(method, LossGap) and name != "kind":
            continue  # the journey's, for its callable
        # max_length: the journey's, for its callable
        if name not in ("kind", "inside", "tried", "max_length"):
            assert params[name] == value, name
    assert params.get("seed", 9) == 9
    if isinstance(method, Domains) or getattr(method, "rounds", 1) > 1:
        assert params["budget"] == 12
    if isinstance(method, Perplexity | LossGap):
        assert params["measure"] is surprise


def test_build_selector_nests_and_refuses():
    built = build_selector(Domains(inside=TSDS(sigma=0.1)), seed=9, budget=3)
    assert isinstance(built.inside, TSDSSelector) and built.inside.sigma == 0.1 and built.shares is None
    assert required_inputs(Domains(inside=GotDContrast())) == {"domains", "features", "negative"}
    assert required_inputs(Random()) == frozenset()
    assert DSIR().resample is False
    with pytest.raises(SelectionError, match="no selector"):
        build_selector(object(), seed=0)


@pytest.mark.parametrize(
    ("selector", "told"),
    [
        (GotDSelector(rounds=2), "construct it with budget="),
        (GotDSelector(rounds=2, budget=N + 1), f"above the pool size {N}"),
        (GotDSelector(rounds=2, budget=5, debiased=True), "rounds cannot be 2 with debiased"),
        (GotDSelector(cost="l1"), "cost must be"),
        (GotDSelector(rounds=2.5), "rounds must be a whole number"),
        (GotDSelector(rounds=2, budget=5, mixture=0.0), "mixture must be above 0"),
        (GotDSelector(epsilon=-1.0), "epsilon must be above 0"),
        (GotDContrastSelector(), "negative="),
        (DSIRSelector(smoothing=0.0), "smoothing and floor are both 0"),
        (DSIRSelector(hashing="md5"), "hashing must be"),
        (TSDSSelector(alpha=0.0), "alpha must be above 0"),
        (TSDSSelector(neighbours=0), "neighbours must be"),
        (LessSelector(similarity="dot"), "similarity must be"),
        (LessSelector(checkpoint_weights=(1.0, 1.0, 1.0, 1.0)), "6 columns do not divide into 4"),
        (LessSelector(checkpoint_weights=()), "checkpoint_weights is empty"),
        (PerplexitySelector(), "perplexity needs a loss per row"),
        (PerplexitySelector(keep="most"), "keep must be"),
        (PerplexitySelector(measure=lambda texts: [1.0]), "one number per text"),
        (PerplexitySelector(measure=lambda texts: [np.nan] * len(texts)), "losses: row 0 is nan"),
        (MooreLewisSelector(share=0.0), "share must be above 0"),
        (CynicalSelector(mixture=1.0), "mixture must be"),
        (CynicalSelector(repeats=0), "repeats must be"),
        (CynicalSelector(budget=N + 1), f"above the pool size {N}"),
        (MooreLewisSelector(), "moore-lewis works on tokens, and the pool has none"),
        (ClassifierSelector(buckets=1), "buckets must be at least 2"),
        (LengthSelector(unit="tokens"), "unit must be"),
        (DomainsSelector(), "construct it with budget="),
        (DomainsSelector(budget=5, shares={"aa": 1.0}), "no domain 'aa'"),
        (DomainsSelector(budget=5, shares={"a": -1.0}), "share of 'a' must be at least 0"),
        (DomainsSelector(budget=5, shares={"a": 0.0}), "no domain of the pool has a positive share"),
        (DomainsSelector(budget=5, inside=GotDSelector(rounds=2)), "cannot run in rounds"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(selector, told, pool, target):
    with pytest.raises(SelectionError, match=told) as caught:
        selector.fit(pool, target)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "selector", [MooreLewisSelector(), CynicalSelector(), ClassifierSelector(), AutoSelector(budget=5)]
)
def test_tokens_of_two_tokenizers_are_one_sentence(selector, pool, target):
    sides = [replace(side, tokens=TokenRows.of([[1, 2]] * len(side), size)) for side, size in ((pool, 5), (target, 7))]
    with pytest.raises(
        SelectionError, match="a vocabulary of 5 and target tokens of one of 7; make both with the same"
    ):
        selector.fit(*sides)


def test_the_selector_of_the_page_has_its_settings_as_parameters(pool, target):
    page = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {"__name__": "page"}
    exec(compile(re.search(r"(?s)### A selector.*?```python\n(.*?)```", page)[1], "architecture.md", "exec"), names)
    settings, selector = names["Shortest"], names["ShortestSelector"]
    built = settings(ideal=9).build(seed=1)
    assert isinstance(built, selector) and repr(clone(built)) == "ShortestSelector(ideal=9)"
    assert len(pool.texts[built.fit(pool, target).select(1)[0]]) in (8, 9, 10)
    for bad, told in ((-1, "ideal must be at least 0, got -1"), (1.5, "ideal must be a whole number, got 1.5")):
        with pytest.raises(SelectionError, match=told):
            settings(ideal=bad)
        with pytest.raises(SelectionError, match=told):
            selector(ideal=bad).fit(pool, target)
    with pytest.raises(TypeError, match="unexpected keyword argument 'length'"):
        selector(length=3)


def test_every_method_of_the_table_is_in_this_suite():
    kinds = {method.__dataclass_fields__["kind"].default for method in get_args(Method)}
    assert kinds <= {name.split("-")[0] for name in CASES} | set(CASES)


def test_settings_are_read_without_numpy_and_torch():
    code = "import sys, flatshift.selection.config, flatshift.experiments.recipe.schema as _; "
    code += "print({'numpy', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
