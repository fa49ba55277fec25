"""Check on the model itself that packed examples do not attend to each other, and choose the attention that isolates
them.

Models whose masks do not follow from restarted positions (recurrent ones, ALiBi) would leak silently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..compute.attention import (
    NAME,
    Kernel,
    flash_attention_problem,
    flash_attention_varlen,
    offsets_as_mask,
    register_packed_attention,
)
from ..compute.numerics import evaluation_mode
from ..compute.precision import autocast
from ..compute.protocols import MeshModel
from ..config import Train
from ..errors import UserError
from ..models.anatomy import vocabulary_size

_NOISE = 10.0
"""Ratio to the model's own noise above which a difference is a leak, for a model that is not bit-reproducible."""


def check_packing_isolation(
    model: torch.nn.Module, *, starts: bool = False, agree: Callable[[bool], bool] = lambda differs: differs
) -> None:
    """Check on the model itself that a packed example is independent of its neighbours.

    Runs eight tokens after eight others, then after eight different ones with the same shape, in evaluation mode and
    without gradients, called as in the training loop: a model whose `config.use_cache` is on does leak, because
    transformers then ignores the restarted positions. Any difference in the example's logits is a leak, in every
    precision.

    Two kinds of model change bits without a leak: nondeterministic kernels differ between two equal calls, and a
    mixture of experts (or an int8 product) computes in shapes that depend on all tokens of a batch. So the difference
    is compared with that of two equal calls, and of two calls whose other tokens are in rows of their own: only if
    these differ too does a leak need a difference more than ten times as large.

    starts: pass the starts of the examples to the model (`as_mask`), as the loop does on CUDA.
    agree: reduces "this rank has found a difference" to True if any rank has; every rank calls this.
    Raises UserError: the logits differ, or the model takes no positions; names the setting that turns packing off.
    """
    device = next(model.parameters()).device
    vocabulary = vocabulary_size(model)
    tokens = torch.arange(16, device=device).mul_(7).add_(3).remainder_(vocabulary)[None]  # B=1 T=16
    others = torch.cat([tokens[:, :8].add(1).remainder(vocabulary), tokens[:, 8:]], dim=1)
    positions = torch.arange(8, device=device)[None]
    advice = "set task.pack: false"
    options = {}
    if starts:
        options = {"attention_mask": offsets_as_mask(torch.tensor([0, 8, 16], dtype=torch.int32, device=device), 8)}

    def packed(ids: Tensor) -> Tensor:
        return model(input_ids=ids, position_ids=positions.repeat(1, 2), **options).logits[:, 8:].float()

    def in_rows(ids: Tensor) -> Tensor:
        return model(input_ids=ids.view(2, 8), position_ids=positions.repeat(2, 1)).logits[1:].float()

    with evaluation_mode(model), torch.no_grad():
        try:
            before = packed(tokens)
        except TypeError as error:
            raise UserError(f"this backbone takes no position_ids, so samples cannot be packed; {advice}") from error
        moved = _largest_difference(before, packed(others))
        if not agree(moved != 0):
            return
        noise = max(_largest_difference(before, packed(tokens)), _largest_difference(in_rows(tokens), in_rows(others)))
    if not moved <= _NOISE * noise:  # NaN is a leak too
        share = moved / max(before.abs().max().item(), 1e-12)
        raise UserError(
            f"this backbone lets packed samples see each other (logits move by {share:.1e} of their size); {advice}"
        )


def _largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; NaN if either side has one."""
    return float((one - other).abs().max())


@contextlib.contextmanager
def isolate_packed_rows(
    engine: MeshModel,
    train: Train,
    device: torch.device,
    log: Callable[[str], None],
    *,
    kernel: Kernel = flash_attention_varlen,
) -> Iterator[bool]:
    """Yield True if packed rows are attended to example by example inside; the backbone's own attention is restored
    afterwards.

    log: called with one line about the choice and its reason. The kernel is used only if it runs and
    `check_packing_isolation` finds that it isolates the examples.
    """
    base: Any = engine.peft.get_base_model()
    before = base.config._attn_implementation
    try:
        splits_rows = engine.world.width("cp", "pp") > 1
        reason = _agree_on_reason(engine, flash_attention_problem(base, train, device, splits_rows=splits_rows))
        if reason is None:
            register_packed_attention(kernel)
            base.set_attn_implementation(NAME)
            reason = _agree_on_reason(engine, _kernel_problem(engine, train, device))
        if reason is not None:
            base.set_attn_implementation(before)
        attention = f"a dense mask of T² ({reason})" if reason else "flash attention over samples of any length"
        log(f"packed rows: {attention}")
        yield reason is None
    finally:
        base.set_attn_implementation(before)


def _kernel_problem(engine: MeshModel, train: Train, device: torch.device) -> str | None:
    """Try the kernel on this backbone and return the problem; None if examples do not attend to each other."""
    try:
        with autocast(train, device):
            check_packing_isolation(engine.eval_model, starts=True, agree=engine.world.any)
    except (UserError, RuntimeError, ValueError, TypeError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    finally:
        engine.reshard()
    return None


def _agree_on_reason(engine: MeshModel, reason: str | None) -> str | None:
    """Return the reason if any rank has one (others get a generic one); collective on a mesh."""
    anywhere = engine.world.any(reason is not None)
    return reason or ("another rank cannot" if anywhere else None)
