"""A transport solve has the same bits on one, two and four processes, and sums in blocks have them on any division."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flatshift.selection import sinkhorn_potentials
from flatshift.selection.transport.blocks import BLOCK, BlockSumTree, block_sums, tile_ranges
from flatshift.selection.transport.large import draw_stratified
from flatshift.selection.transport.ranks import ProcessTeam
from tests.support.distributed_ranks import run_ranks

ROWS = 9 * BLOCK + 77
OPTIONS = {"epsilon": 0.02, "tolerance": 1e-7, "nearest": True, "overlap": 0.999, "budget": 300}


def problem():
    r = np.random.default_rng(0)
    centres = 2 * r.standard_normal((6, 8))
    x = (centres[r.integers(0, 6, ROWS)] + r.standard_normal((ROWS, 8))).astype(np.float16)
    y = centres[r.integers(0, 3, 60)] + 0.8 * r.standard_normal((60, 8))
    return x, y, r.random(ROWS) + 0.05


def on_rank():
    x, y, a = problem()
    rank, size = dist.get_rank(), dist.get_world_size()
    edges = [min(ROWS, BLOCK * round(10 * i / size)) for i in range(size + 1)]
    own = slice(edges[rank], edges[rank + 1])
    found = []
    for cost, weights in (("sqeuclidean", None), ("cosine", a)):
        given = None if weights is None else weights[own]
        p = sinkhorn_potentials(x[own], y, a=given, cost=cost, group=dist.group.WORLD, **OPTIONS)
        found.append((p.f, p.scores, p.nearest, p.g, p.diagnostics()))
    return found


def joined(results, case):
    parts = [result[case] for result in results]
    arrays = [np.concatenate([part[i] for part in parts]) for i in range(3)]
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    return digest, {part[3].tobytes() for part in parts}, {repr(part[4]) for part in parts}, arrays[1]


def test_one_two_and_four_processes_have_the_same_bits():
    found = {size: run_ranks(on_rank, size) for size in (1, 2, 4)}
    x, y, a = problem()
    for case, (cost, weights) in enumerate((("sqeuclidean", None), ("cosine", a))):
        alone = joined(found[1], case)
        assert len(alone[1]) == len(alone[2]) == 1
        for size in (2, 4):
            assert joined(found[size], case)[:3] == alone[:3], (cost, size)
        exact = sinkhorn_potentials(x, y, a=weights, cost=cost, **OPTIONS)
        np.testing.assert_allclose(alone[3], exact.scores, atol=1e-6)


@pytest.mark.parametrize("cuts", [(), (1,), (3, 4, 7), tuple(range(1, 13))])
def test_a_tree_of_parts_is_the_tree_of_all(cuts):
    values = torch.from_numpy(np.random.default_rng(1).standard_normal((13, 5)) * 1e8)
    whole = BlockSumTree()
    for block, value in enumerate(values):
        whole.add(block, value)
    nodes = []
    for low, high in zip((0, *cuts), (*cuts, 13), strict=True):
        part = BlockSumTree()
        for block in range(low, high):
            part.add(block, values[block])
        assert len(part.nodes) <= 2 * max(1, (high - low).bit_length())
        nodes.extend(part.nodes)
    np.random.default_rng(2).shuffle(nodes)
    assert torch.equal(BlockSumTree(nodes).total(), whole.total())
    # The tree itself, written out: ((((01)(23))((45)(67))) + (((89)(AB)) + C)).
    v = list(values)
    low = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
    assert torch.equal(whole.total(), low + (((v[8] + v[9]) + (v[10] + v[11])) + v[12]))


def test_blocks_and_tiles_cover_all_rows_once():
    values = np.random.default_rng(3).standard_normal(2 * BLOCK + 5)
    sums = block_sums(values, np.ones_like(values))
    assert len(sums) == 3 and sums[2] == values[2 * BLOCK :].sum()
    assert (block_sums(values[BLOCK:], np.ones(BLOCK + 5)) == sums[1:]).all()
    cut = list(tile_ranges(0, 2 * BLOCK + 5, 3000))
    assert cut == [(0, 3000), (3000, 4096), (4096, 7096), (7096, 8192), (8192, 8197)]


class Member(ProcessTeam):
    """One of several that share weights, without processes."""

    def __init__(self, parts, rank):
        super().__init__()
        self.parts, self.rank, self.size = parts, rank, len(parts)
        self.first_block = sum(-(-len(part) // BLOCK) for part in parts[:rank])

    def gather(self, value):
        return [block_sums(part, np.ones_like(part)) for part in self.parts]


def test_the_subsample_is_the_same_rows_however_the_pool_is_divided():
    a = np.random.default_rng(4).random(5 * BLOCK + 9) * (np.arange(5 * BLOCK + 9) % 3 > 0)
    whole = draw_stratified(a, 900, 7, ProcessTeam().over(len(a)))
    assert (np.diff(whole) >= 0).all() and len(whole) == 900 and (a[whole] > 0).all()
    for cuts in ((2,), (1, 4)):
        edges = [0, *(BLOCK * cut for cut in cuts), len(a)]
        parts = [a[low:high] for low, high in itertools.pairwise(edges)]
        drawn = [draw_stratified(part, 900, 7, Member(parts, i)) + edges[i] for i, part in enumerate(parts)]
        assert (np.concatenate(drawn) == whole).all()
