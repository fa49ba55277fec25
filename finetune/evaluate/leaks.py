"""Whether packed samples see each other, measured on the model at hand, and by which attention they are kept apart.

Models that build their masks otherwise than from restarted positions (recurrent ones, ALiBi) would leak in silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..compute.attention import NAME, Kernel, as_mask, flash, register, unusable
from ..compute.numerics import evaluating
from ..compute.precision import autocast
from ..config import Train
from ..errors import UserError
from ..models.anatomy import vocabulary_size

if TYPE_CHECKING:
    from ..parallel.engine import Engine

_ROUNDING = 0.1
"""Share of the largest logit that half precision moves where shapes differ; a leak moves logits by their own size."""


def refuse_leaks(model: torch.nn.Module, *, tolerance: float | None = None, starts: bool = False) -> None:
    """Check on the model itself that a packed sample sees nothing of its neighbours.

    Runs eight tokens alone and behind eight others, in evaluation mode and without gradients, called as the loop calls
    it: a model whose `config.use_cache` is on does leak, because transformers then overlooks the restarts.

    Arguments:
        tolerance: share of the largest logit that rounding may move; by default 1e-3, and 5e-2 for half precision.
            A leak moves logits by their own size.
        starts: tell the model where samples begin (`as_mask`), as the loop does on CUDA.
    Raises:
        UserError: the logits differ by more than `tolerance`, or the model takes no positions; names the setting that
            turns packing off.
    """
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


@contextlib.contextmanager
def rows_apart(
    engine: Engine, train: Train, device: torch.device, say: Callable[[str], None], *, kernel: Kernel = flash
) -> Iterator[bool]:
    """Whether packed rows are attended to sample by sample inside; the backbone has its own attention afterwards.

    say: told in a line what was chosen and why. The kernel is taken only where `refuse_leaks` finds that no sample sees
    another by it, and where it runs at all.
    """
    base: Any = engine.peft.get_base_model()
    before = base.config._attn_implementation
    try:
        reason = _agreed(engine, unusable(engine, train, device))
        if reason is None:
            register(kernel)
            base.set_attn_implementation(NAME)
            reason = _agreed(engine, _broken(engine, train, device))
        if reason is not None:
            base.set_attn_implementation(before)
        attention = f"a dense mask of T² ({reason})" if reason else "flash attention over samples of any length"
        say(f"packed rows: {attention}")
        yield reason is None
    finally:
        base.set_attn_implementation(before)


def _broken(engine: Engine, train: Train, device: torch.device) -> str | None:
    """What is wrong with the kernel on this backbone, tried out; None where samples do not see each other."""
    try:
        with autocast(train, device):
            refuse_leaks(engine.judged, tolerance=_ROUNDING, starts=True)
    except (UserError, RuntimeError, ValueError, TypeError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    finally:
        engine.settle()
    return None


def _agreed(engine: Engine, reason: str | None) -> str | None:
    """A reason that any rank has holds for all; collective on a mesh."""
    anywhere = engine.world.any(reason is not None)
    return reason or ("another rank cannot" if anywhere else None)
