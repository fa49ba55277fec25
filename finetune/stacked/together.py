"""Many stages of the ordinary loop at once, their forward and backward passes done by one host.

The loop knows nothing of this: it asks its engine to compute an update (`Engine.compute`), and here the engine hands
the work over and waits. Each stage therefore runs in a thread of its own, of which only one is ever awake: it goes on
when it is resumed and is paused again before anybody else moves, so that nothing is shared while it changes. That costs
a thread a stage, two switches an update (some 30 µs), and what is set per thread (autocast, the CPU library's pool of
threads) is each stage's own.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..adapters.adapter import attach_adapter
from ..config import Adapter, Train
from ..errors import Interrupted
from ..parallel.engine import Engine
from ..parallel.mesh import ProcessMesh
from ..train.stage import ForwardBackward

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..tasks import Task
    from ..train.stage import StageResult, TrainingStage
    from .host import Host


class _Closed(BaseException):
    """A paused stage is not wanted any more: it leaves its contexts and ends."""


@dataclass(frozen=True)
class _Handed(ForwardBackward):
    """ForwardBackward that somebody else may do."""

    inside: Callable[..., Any] = lambda call: call()
    """Calls a function among the context variables of the stage."""

    def compute(self) -> Tensor:
        """Do it by the stage's own engine."""
        return self.inside(super().compute)  # type: ignore[no-any-return]


class Stage:
    """A function in a thread of its own, which is awake only while somebody waits for it.

    next(stage) and stage.send(value) let it go on until it pauses again and give what it pauses with; StopIteration
    holds what it returned. An error of the function is raised where it was resumed. To be closed at the end.
    """

    def __init__(self, function: Callable[[Stage], Any]) -> None:
        """function: is given this stage, to pause."""
        self.seconds = 0.0
        """Wall time of its own so far: awake, and its share of what a host did for several."""
        self._since = 0.0
        self._function = function
        self._in: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    # ------------------------------------------------------------------------------------------- inside the thread

    def pause(self, value: Any) -> Any:
        """Give `value` to whoever resumed the stage, and wait for what they send back."""
        self._out.put(("paused", value))
        found, error = self._in.get()
        if error is not None:
            raise error
        return found

    def compute(self, work: ForwardBackward) -> Tensor:
        """`Engine.compute` of a stage whose passes somebody else does."""
        fields = {field.name: getattr(work, field.name) for field in dataclasses.fields(work)}
        return self.pause(_Handed(**fields, inside=copy_context().run))  # type: ignore[no-any-return]

    @property
    def elapsed(self) -> float:
        """`seconds` up to this moment."""
        return self.seconds + time.monotonic() - self._since

    def _run(self) -> None:
        try:
            _, error = self._in.get()
            if error is not None:
                raise error
            self._out.put(("returned", self._function(self)))
        except BaseException as error:
            self._out.put(("raised", error))

    # ------------------------------------------------------------------------------------------ outside of it

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Go on with `value`."""
        return self._resume((value, None))

    def throw(self, error: BaseException) -> Any:
        """Go on with `error`, raised where the stage paused."""
        return self._resume((None, error))

    def close(self) -> None:
        """End it where it paused."""
        while self._thread is not None and not self._ended:
            try:
                self.throw(_Closed())
            except BaseException:
                continue

    def _resume(self, message: tuple[Any, BaseException | None]) -> Any:
        if self._ended:
            raise StopIteration
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._since = time.monotonic()
        self._in.put(message)
        kind, value = self._out.get()
        self.seconds = self.elapsed
        if kind == "paused":
            return value
        self._ended = True
        self._thread.join()
        if kind == "raised":
            raise value
        raise StopIteration(value)


def stage_work(model: Any, tokenizer: Any, told: TrainingStage) -> Stage:
    """`flatshift.finetune.train.loop.train_stage` of the stage that is told of, pausing with the `ForwardBackward` of
    each update to be sent its loss once the gradients lie in the engine's parameters."""
    from ..parallel.engine import Engine
    from ..train.loop import train_stage

    engine = model if isinstance(model, Engine) else Engine.alone(model)

    def run(stage: Stage) -> StageResult:
        engine.compute = stage.compute  # type: ignore[method-assign, assignment]
        try:
            return train_stage(engine, tokenizer, told)
        finally:
            del engine.compute

    return Stage(run)


def run_together(
    host: Host, stages: Sequence[Stage], *, stop: Callable[[], bool] = lambda: False
) -> Generator[tuple[int, StageResult | ValueError], None, None]:
    """Each stage's place and how it ended, as soon as it has: its result, or the mistake that ended it alone.

    A stage that has ended takes no part in what follows. Between its end and the next one asked for, the others wait.

    Args:
        stages: of the seats of `host`, in their order (`stage_work` over their engines).
        stop: asked between updates.

    Raises:
        Interrupted: `stop` said so, or Ctrl-C; all stages that have not ended are closed.
    """
    waiting: dict[int, ForwardBackward] = {}
    try:
        for seat, stage in enumerate(stages):
            yield from _resume(seat, stage, None, waiting)
        while waiting:
            if stop():
                raise Interrupted(f"{len(waiting)} cells stopped before their end; they will begin anew")
            began = time.monotonic()
            losses = host.compute(waiting)
            share = (time.monotonic() - began) / len(waiting)
            for seat in list(waiting):
                del waiting[seat]
                stages[seat].seconds += share
                yield from _resume(seat, stages[seat], losses[seat], waiting)
    except KeyboardInterrupt as error:
        raise Interrupted("a stack of cells stopped inside an update; they will begin anew") from error
    finally:
        for stage in stages:
            stage.close()


def _resume(
    seat: int, stage: Stage, loss: Tensor | None, waiting: dict[int, ForwardBackward]
) -> Iterator[tuple[int, StageResult | ValueError]]:
    """Let a stage go on until it asks for more work; its end, if it comes first."""
    try:
        waiting[seat] = stage.send(loss)
    except StopIteration as end:
        yield seat, end.value
    except ValueError as error:  # the user's mistakes are of this family, a loss that is no number among them
        yield seat, error


# ----------------------------------------------------------------------------------------------------- engines of cells


class CellEngine(Engine):
    """An engine that leaves neither checkpoints nor an adapter: a cell that is stopped begins anew."""

    keeps = False

    def save_adapter(self, directory: Path) -> None:
        """The trained tensors stay in memory, where the cell is judged."""


def cell_engine(backbone: PreTrainedModel, adapter: Adapter, *, task: Task, train: Train) -> CellEngine:
    """A cell on `backbone` with the adapter that `flatshift.finetune.parallel.build.build_engine` would draw for it
    alone."""
    model = attach_adapter(shared_copy(backbone), adapter, task=task, seed=train.seed)
    return CellEngine(model, ProcessMesh.alone(backbone.device))


def shared_copy(backbone: PreTrainedModel) -> PreTrainedModel:
    """Another tree of modules over the very same tensors; only what the checkpoint lacked (a new head) is its own."""
    new = set(getattr(backbone, "new_parameters", ()))
    shared: dict[int, Tensor] = {id(p): p for name, p in backbone.named_parameters() if name not in new}
    shared |= {id(buffer): buffer for buffer in backbone.buffers()}
    return copy.deepcopy(backbone, dict(shared))
