"""Blocks that no cell adapts compute the rows of several cells once, and only where nothing can come of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatshift.finetune.stacked.frozen import Distinct, blocks_below, once_a_row

IDS = torch.tensor([[5, 6], [7, 8], [5, 6]])
HIDDEN = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0))[[0, 1, 0]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, hidden, *, mask=None, table=None, keeps=None):
        self.seen.append(len(hidden))
        return hidden * 2, mask


@pytest.fixture
def same():
    found = Distinct.of({"input_ids": IDS, "attention_mask": torch.ones(3, 2, dtype=torch.long)})
    assert found is not None
    return found


def test_rows_of_one_kind_go_through_once(same):
    block, refused = Block(), []
    forward = once_a_row(block, lambda: same, refused=lambda: refused.append(1))
    mask, table = torch.ones(3, 1, 2, 2), torch.ones(1, 2, 4)
    out, back = forward(HIDDEN, mask=mask, table=table)
    assert torch.equal(out, HIDDEN * 2) and torch.equal(back, mask)
    assert block.seen == [2] and not refused
    once_a_row(block, lambda: None, refused=lambda: refused.append(1))(HIDDEN)
    assert block.seen == [2, 3] and not refused


@pytest.mark.parametrize(
    ("hidden", "more"),
    [
        (torch.arange(24.0).view(3, 2, 4), {}),  # rows of the same tokens that differ
        (HIDDEN, {"table": torch.ones(6, 1, 2)}),  # not by rows, as alibi is
        (HIDDEN, {"table": torch.eye(3)}),  # nobody can tell
        (HIDDEN, {"keeps": nn.Identity()}),  # an object in which blocks may leave something for others
        (HIDDEN.clone().requires_grad_(), {}),  # a gradient that each row wants for itself
    ],
    ids=["differ", "alibi", "square", "object", "gradient"],
)
def test_a_block_that_may_see_more_than_its_row_computes_all(same, hidden, more):
    block, refused = Block(), []
    out, _ = once_a_row(block, lambda: same, refused=lambda: refused.append(1))(hidden, **more)
    assert torch.equal(out, hidden * 2) and block.seen == [3] and refused == [1]


def test_a_batch_without_equal_rows_has_no_kinds():
    assert Distinct.of({"input_ids": IDS[:2]}) is None


def test_blocks_below_are_those_before_the_first_that_is_trained():
    model = nn.ModuleDict(
        {"project": nn.Linear(2, 2), "layers": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(4))}
    )
    model["head"] = nn.Linear(2, 2)
    below, share = blocks_below(model, ["layers.2.0", "head"])
    assert below == list(model["layers"][:2]) and share == 0.5
    assert blocks_below(model, ["layers.0.0", "head"]) == ([], 0.0)
    assert blocks_below(model, ["project", "layers.2.0"]) == ([], 0.0)
