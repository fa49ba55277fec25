"""Several samples in one row, with no attention and no position leaking between them.

`pack_order` decides which samples share a row. In the row each sample has positions 0, 1, 2, …; transformers derives
the block-diagonal causal mask from the restarts, in every attention implementation and with sliding windows, provided
that no attention mask and no cache is passed. Models that build their masks otherwise (recurrent ones, ALiBi) would
leak in silence: `refuse_leaks` measures it on the model at hand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    import torch

_OPEN_ROWS = 64


def pack_order(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Rows of sample positions, best fit over a window of 64 open rows.

    Samples are taken in order; each goes to the open row that it fills best, else opens a new row; with 64 open the
    fullest is closed. Rows come out as they are closed, so the order stays close to the samples' own.

    Arguments:
        lengths: tokens of each sample, each ≤ `max_length`.
    Returns:
        Every index of `lengths` exactly once, each row with at most `max_length` tokens.
    """
    done: list[list[int]] = []
    rows: dict[int, list[int]] = {}  # serial → samples; a dict keeps the order of opening
    free: list[tuple[int, int]] = []  # (free tokens, serial) of the open rows, sorted
    serial = 0
    for sample, length in enumerate(lengths):
        place = bisect_left(free, (length, -1))
        if place < len(free):
            left, row = free.pop(place)
            rows[row].append(sample)
            left -= length
        else:
            if len(free) == _OPEN_ROWS:
                done.append(rows.pop(free.pop(0)[1]))
            row, left, serial = serial, max_length - length, serial + 1
            rows[row] = [sample]
        if left:
            insort(free, (left, row))
        else:
            done.append(rows.pop(row))
    done.extend(rows.values())
    return done


def refuse_leaks(model: torch.nn.Module, *, tolerance: float | None = None, starts: bool = False) -> None:
    """Check on the model itself that a packed sample sees nothing of its neighbours.

    Runs eight tokens alone and behind eight others, in evaluation mode and without gradients, called as the loop calls
    it: a model whose `config.use_cache` is on does leak, because transformers then overlooks the restarts.

    Arguments:
        tolerance: share of the largest logit that rounding may move; by default 1e-3, and 5e-2 for half precision.
            A leak moves logits by their own size.
        starts: tell the model where samples begin (`finetune.compute.attention`), as the loop does on CUDA.
    Raises:
        UserError: the logits differ by more than `tolerance`, or the model takes no positions; names the setting that
            turns packing off.
    """
    import torch

    from ..compute.numerics import evaluating
    from ..models.anatomy import vocabulary_size

    device = next(model.parameters()).device
    if tolerance is None:
        halved = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
        tolerance = 5e-2 if halved else 1e-3
    vocabulary = vocabulary_size(model)
    tokens = torch.arange(16, device=device).mul_(7).add_(3).remainder_(vocabulary)[None]  # B=1 T=16
    positions = torch.arange(8, device=device)[None]
    advice = "set task.pack: false"
    told = {}
    if starts:
        from ..compute.attention import as_mask

        told = {"attention_mask": as_mask(torch.tensor([0, 8, 16], dtype=torch.int32, device=device), 8)}
    with evaluating(model), torch.no_grad():
        try:
            packed = model(input_ids=tokens, position_ids=positions.repeat(1, 2), **told).logits[:, 8:]
        except TypeError as error:
            raise UserError(f"this backbone takes no position_ids, so samples cannot be packed; {advice}") from error
        alone = model(input_ids=tokens[:, 8:], position_ids=positions).logits
    worst = (packed.float() - alone.float()).abs().max() / alone.float().abs().max().clamp_min(1e-12)
    if not worst <= tolerance:
        raise UserError(
            f"this backbone lets packed samples see each other (logits move by {worst:.1e} of their size); {advice}"
        )
