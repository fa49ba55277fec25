"""What an update sends on a mesh of eight ranks, call by call, and that it waits for none of them.

Rank 0 alone is there (`tests.support.rehearsal_mesh`); what real ranks compute together is compared elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import chain, repeat
from typing import Any

import pytest
import torch

from tests.support.rehearsal_mesh import SIZES

pytestmark = pytest.mark.slow

BLOCKS = SIZES.blocks
MESHES: list[dict[str, Any]] = [
    {"dp": 8},
    {"replicate": 2, "tp": 4},
    {"dp": 4, "tp": 2},
    {"replicate": 2, "dp": 4},
    {"dp": 4, "tp": 2, "regularizer": "ggpo"},
    {"dp": 8, "regularizer": "mgpo"},
]


def update(*, dp: bool, tp: bool, replicate: bool) -> list[str]:
    """An update of plain LoRA, in order.

    FSDP2 gathers root, embedding, blocks and head, for the forward pass and again for the backward one, each unit ahead
    of the work of the one before it; a block's gradients are scattered when its backward ends, and summed over copies
    (HSDP). Tensor parallelism sums after attention and MLP, forward and backward
    (the first block's input needs no gradient), after the embedding and before the head; its loss sums two numbers a
    token; the factors that are whole there are summed at once. At the end the loss, then the gradient's squared norm.
    """
    gather = ["dp all-gather"] * dp
    reduce = ["tp all-reduce"] * tp
    scatter = ["dp reduce-scatter"] * dp + ["replicate all-reduce"] * (dp and replicate)
    forward = [*gather * 3, *reduce, *chain.from_iterable(repeat([*gather, *reduce * 2], BLOCKS))]
    backward = [*gather * 3, *reduce]
    for block in reversed(range(BLOCKS)):
        backward += [*gather, *reduce * (2 if block else 1), *scatter]
    flat = ["replicate all-reduce"] * (replicate and not dp)
    data = "+".join(axis for axis, there in (("replicate", replicate), ("dp", dp)) if there)
    norm = ["dp scalars"] * dp + ["tp scalars"] * tp
    return [*forward, *["tp scalars"] * 2 * tp, *backward, *reduce, *flat, f"{data} scalars", *norm]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    if torch.__version__.startswith("2.11"):
        pytest.skip("the fake process group of torch 2.11 leaves scattered gradients without values")
    command = [sys.executable, "-m", "tests.support.rehearsal_mesh", *map(json.dumps, MESHES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_plain_updates_send_what_is_expected_in_order(found: list[dict[str, Any]]) -> None:
    for mesh, answer in zip(MESHES, found, strict=True):
        if "regularizer" not in mesh:
            axes = {axis: mesh.get(axis, 1) > 1 for axis in ("dp", "tp", "replicate")}
            assert answer["updates"] == [update(**axes)] * 2, mesh


ADDED = {
    # its sketches over tensor and data ranks and whether all are finite, the shares of rows and what lines tell of them
    "ggpo": [
        {"tp all-reduce": 3, "tp scalars": 2, "dp all-reduce": 1},
        # and, in the step of new row norms, the factors and what each rank knows of a row
        {"tp all-reduce": 4, "tp scalars": 2, "dp all-reduce": 2, "dp all-gather": 1},
    ],
    "mgpo": [{"dp all-reduce": 3}] * 2,  # norms of the momentum before, of the gradient and the momentum behind
}


def test_regularizers_add_their_sums_and_change_nothing_else(found: list[dict[str, Any]]) -> None:
    for mesh, answer in zip(MESHES, found, strict=True):
        if "regularizer" in mesh:
            plain = update(**{axis: mesh.get(axis, 1) > 1 for axis in ("dp", "tp", "replicate")})
            for sent, added in zip(answer["updates"], ADDED[mesh["regularizer"]], strict=True):
                rest = iter(sent)
                assert all(call in rest for call in plain), mesh  # in the same order, others between
                assert Counter(sent) - Counter(plain) == added, mesh


def test_no_update_waits_and_every_line_is_written(found: list[dict[str, Any]]) -> None:
    for answer in found:
        assert answer["waits"] == [[], []] and answer["lines"] == [1, 2, 3], answer["mesh"]
