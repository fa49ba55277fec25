"""Round-robin: equal to the naive reading of its rule; a target whose next row is gone takes the one after it.
Nearest neighbours by shards: rows on disk are not copied."""

import numpy as np
import pytest

from flatshift.selection import KNNSelector, Pool, RoundRobinSelector, Target
from flatshift.selection.shards import Shard


def naive(pool: np.ndarray, target: np.ndarray) -> list[int]:
    """Rows in the order taken: round by round, targets with the nearer free row first."""
    squared = ((target[:, None] - pool) ** 2).sum(-1)
    taken: list[int] = []
    while len(taken) < len(pool):
        free = [row for row in range(len(pool)) if row not in taken]
        for j in sorted(range(len(target)), key=lambda j: min((squared[j, row], row) for row in free)):
            left = [row for row in free if row not in taken]
            if left:
                taken.append(min(left, key=lambda row: (squared[j, row], row)))
    return taken


@pytest.mark.parametrize("seed", range(3))
def test_every_target_takes_a_row_in_every_round(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool, target = rng.normal(size=(40, 5)), rng.normal(size=(7, 5))
    target[3:6] = target[2] + 0.01 * rng.normal(size=(3, 5))  # which want the same rows
    pool, target = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (pool, target))
    selector = RoundRobinSelector(neighbours=40).fit(Pool(features=pool), Target(features=target))
    assert np.argsort(selector.scores_).tolist() == naive(pool, target)


@pytest.mark.parametrize("on_disk", [True, False])
def test_rows_on_disk_are_not_handed_to_the_shards(tmp_path, on_disk: bool) -> None:
    rng = np.random.default_rng(0)
    pool, target = rng.normal(size=(40, 5)), Target(features=rng.normal(size=(7, 5)))
    np.save(tmp_path / "x.npy", pool)
    names: list[str] = []

    def shards(stage, function, *, inputs, align):
        names.extend(inputs)
        return [function(Shard([], low, low + 20, inputs, {})) for low in (0, 20)]

    features = np.load(tmp_path / "x.npy", mmap_mode="r") if on_disk else pool
    found = KNNSelector(chunk=20).fit(Pool(features=features, shards=shards), target)
    assert names == ["target"] + ["pool"] * (not on_disk)
    np.testing.assert_array_equal(found.scores_, KNNSelector(chunk=20).fit(Pool(features=pool), target).scores_)
