"""The counter hash: the published words, any split, and bits that look like fair coins."""

import math

import pytest
import torch

from flatshift.regularizers.layers.signs import (
    MAX_COLUMNS,
    SignStreams,
    counter_values,
    draw_signs,
    layer_uid,
    micro_id,
    mix64,
    step_id,
    stream_id,
    unpack_signs,
)

KEY = {"seed": 3, "step": 7, "layer": "model.layers.0.q_proj", "side": "out"}


def unsigned(word: torch.Tensor) -> int:
    return int(word) & ((1 << 64) - 1)


def test_words_are_those_of_splitmix64() -> None:
    """First outputs of the reference implementation (Vigna, splitmix64.c) from state 0."""
    words = mix64(counter_values(torch.arange(3)))
    assert [unsigned(word) for word in words] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_names_do_not_depend_on_the_process() -> None:
    assert layer_uid("a") == 0xCA978112CA1BBDCA  # the first bytes of SHA-256("a")
    assert stream_id("a", "out") != stream_id("a", "in")


@pytest.mark.parametrize("ways", [1, 2, 3, 8])
def test_any_split_sees_the_same_signs(ways: int) -> None:
    whole = draw_signs(**KEY, indices=range(1000), columns=12)
    parts = [draw_signs(**KEY, indices=part, columns=12) for part in torch.arange(1000).tensor_split(ways)]
    assert torch.equal(torch.cat(parts), whole)
    strided = torch.stack([draw_signs(**KEY, indices=range(r, 1000, 8), columns=12)[3] for r in range(8)])
    assert torch.equal(strided, whole[24:32])


def test_more_columns_extend_fewer() -> None:
    assert torch.equal(
        draw_signs(**KEY, indices=range(50), columns=40)[:, :9], draw_signs(**KEY, indices=range(50), columns=9)
    )


@pytest.mark.parametrize("columns", [1, 8, 13, 32, MAX_COLUMNS])
def test_unpack_reads_the_lowest_bits_first(columns: int) -> None:
    words = mix64(counter_values(torch.arange(20)))
    naive = torch.tensor([[1.0 if unsigned(word) >> bit & 1 else -1.0 for bit in range(columns)] for word in words])
    assert torch.equal(unpack_signs(words, columns), naive)


def test_unpack_refuses_more_bits_than_a_word_has() -> None:
    with pytest.raises(ValueError, match="64"):
        unpack_signs(torch.zeros(1, dtype=torch.int64), 65)


def test_signs_are_fair_and_uncorrelated() -> None:
    n, columns = 20_000, 32
    drawn = draw_signs(**KEY, indices=range(n), columns=columns)
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    bound = 5 / math.sqrt(n)  # five standard errors, over some hundreds of comparisons
    assert float(drawn.mean(0).abs().max()) < bound
    assert float((drawn.T @ drawn / n - torch.eye(columns)).abs().max()) < bound
    assert float((drawn[:-1] * drawn[1:]).mean(0).abs().max()) < bound


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 4},
        {"step": 8},
        {"layer": "model.layers.0.k_proj"},
        {"side": "probe"},
        {"side": "sample"},
        {"micro": 0},
        {"micro": 1},
    ],
)
def test_every_part_of_the_key_gives_another_draw(other: dict) -> None:
    n = 20_000
    first, second = (draw_signs(**(KEY | part), indices=range(n), columns=8) for part in ({}, other))
    assert float((first * second).mean(0).abs().max()) < 5 / math.sqrt(n)


def test_neighbouring_steps_are_independent() -> None:
    """Products of one sign over 2,000 neighbouring steps: mean zero within five standard errors."""
    drawn = torch.stack([draw_signs(**(KEY | {"step": t}), indices=range(8), columns=8) for t in range(2000)])
    assert float((drawn[:-1] * drawn[1:]).mean(0).abs().max()) < 5 / math.sqrt(2000)
    assert step_id(0, 1) != step_id(1, 0)


def test_micro_batches_are_independent_of_each_other_and_of_the_next_step() -> None:
    drawn = torch.stack([draw_signs(**KEY, micro=i, indices=range(8), columns=8) for i in range(2000)])
    assert float((drawn[:-1] * drawn[1:]).mean(0).abs().max()) < 5 / math.sqrt(2000)
    keys = {micro_id(0, step, micro) for step in range(40) for micro in range(40)} | {step_id(0, t) for t in range(40)}
    assert len(keys) == 1640


def test_many_streams_in_one_call_are_the_same_words() -> None:
    indices = [torch.arange(5), torch.tensor([9, 2, 4])]
    streams = SignStreams([stream_id("a", "out"), stream_id("b", "in")], indices, torch.device("cpu"))
    for micro, key in ((None, step_id(3, 7)), (2, micro_id(3, 7, 2))):
        parts = unpack_signs(streams.words(key), 12).split([5, 3])
        for part, index, layer, side in zip(parts, indices, "ab", ("out", "in"), strict=True):
            alone = draw_signs(seed=3, step=7, micro=micro, layer=layer, side=side, indices=index, columns=12)
            assert torch.equal(part, alone)
