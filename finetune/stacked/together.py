"""Many stages of the ordinary loop at once, their forward and backward passes done by one host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import Interrupted

if TYPE_CHECKING:
    from torch import Tensor

    from ..train.loop import Stage, StageResult, Work
    from .host import Host


def run_together(
    host: Host, stages: Sequence[Stage], *, stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, StageResult | ValueError]]:
    """Each stage's place and how it ended, as soon as it has: its result, or the mistake that ended it alone.

    A stage that has ended takes no part in what follows. Between its end and the next one asked for, the others wait.

    Args:
        stages: of the seats of `host`, in their order (`finetune.train.loop.stage_work` over their engines).
        stop: asked between updates.

    Raises:
        Interrupted: `stop` said so, or Ctrl-C; all stages that have not ended are closed.
    """
    waiting: dict[int, Work] = {}
    try:
        for seat, stage in enumerate(stages):
            yield from _resume(seat, stage, None, waiting)
        while waiting:
            if stop():
                raise Interrupted(f"{len(waiting)} cells stopped before their end; they will begin anew")
            losses = host.compute(waiting)
            for seat in list(waiting):
                del waiting[seat]
                yield from _resume(seat, stages[seat], losses[seat], waiting)
    except KeyboardInterrupt as error:
        raise Interrupted("a stack of cells stopped inside an update; they will begin anew") from error
    finally:
        for stage in stages:
            stage.close()


def _resume(
    seat: int, stage: Stage, loss: Tensor | None, waiting: dict[int, Work]
) -> Iterator[tuple[int, StageResult | ValueError]]:
    """Let a stage go on until it asks for more work; its end, if it comes first."""
    try:
        waiting[seat] = next(stage) if loss is None else stage.send(loss)
    except StopIteration as end:
        yield seat, end.value
    except ValueError as error:  # the user's mistakes are of this family, a loss that is no number among them
        yield seat, error
