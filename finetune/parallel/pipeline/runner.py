"""One step, evaluation and generation over the stages of a pipeline.

Training runs torch's schedules (`torch.distributed.pipelining`) with given shapes, so that no pass is spent on
inferring them. All ranks know all rows, so only hidden states are sent: masks, positions and labels are computed on
every stage, and the last one turns hidden states into the piece's loss without sending logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compute.loss import Batch, Head, batch_loss, find_head
from ...compute.numerics import evaluation_mode
from ...config import Mesh
from ...models.anatomy import ModelParts
from ..mesh import DATA, ProcessMesh
from .other_stage_block import OtherStageBlock
from .pieces import split_micro_batches
from .pipeline_plan import pieces_per_micro, round_up_pieces, stages_of, virtual_stages
from .stage import Around, StageModel, StageModules
from .stage_transport import PipelineEvalModel, StageTransport

if TYPE_CHECKING:
    from ...tasks import Task
    from ..context import ContextParallel


class PipelineRunner:
    """Runs the stages of this rank. Every rank along `pp` calls every method together."""

    def __init__(
        self, parts: StageModules, *, mesh: Mesh, world: ProcessMesh, tokens: ContextParallel | None = None
    ) -> None:
        """Create the stages. Collective along pp; before the first forward pass.

        Args:
            parts: the models of this rank's stages, cut (`cut_parts`), by ascending stage.
            tokens: splits rows among the cp ranks of a stage.
        """
        self.parts, self.mesh, self.world, self.tokens = parts, mesh, world, tokens
        self.virtual = virtual_stages(mesh.schedule, mesh.virtual)
        self.total = mesh.pp * self.virtual
        indices = stages_of(world.index("pp"), pp=mesh.pp, virtual=self.virtual, schedule=mesh.schedule)
        assert len(indices) == len(parts), (indices, len(parts))
        self._anatomy = ModelParts.of(parts[0])
        scatters = mesh.tp > 1 and not mesh.sequence_parallel and self._anatomy.width % mesh.tp == 0
        group = world.group("tp") if scatters else None
        self.stages = [StageModel(parts[i], index, self.total, scattered=group) for i, index in enumerate(indices)]
        self._share = (mesh.tp if mesh.sequence_parallel else 1, mesh.tp if scatters else 1)
        """Divisors of tokens and width of the hidden states that a tensor-parallel rank sends."""
        self.passing = StageTransport(self.stages, mesh=mesh, world=world)
        self._encoder = len(self._anatomy.run(self._anatomy.stacks[0])) if len(self._anatomy.stacks) > 1 else None
        self._alive = self._which_need_gradients()
        self._starts = self._first_blocks()
        self._pad_id = int(self._anatomy.causal.config.pad_token_id or 0)
        self._dtype: torch.dtype | None = None
        self._schedule: tuple[Any, Any] = (None, None)
        self.stand_in = PipelineEvalModel(parts, self.passing, config=self._anatomy.causal.config, world=world)
        """Stand-in that evaluation calls like the whole model."""

    # ------------------------------------------------------------------ facts about all stages

    def _which_need_gradients(self) -> list[bool]:
        """Return for each stage True if its output depends on a trained parameter."""
        own = torch.zeros(self.total, device=self.world.device)
        for stage in self.stages:
            own[stage.index] = float(any(p.requires_grad for p in stage.part.parameters()))
        return (self.world.sum(own, "pp").cumsum(0) > 0).tolist()

    def _first_blocks(self) -> list[int]:
        """Return the number of each stage's first block."""
        own = torch.zeros(self.total, dtype=torch.int64, device=self.world.device)
        for stage in self.stages:
            absent = [isinstance(block, OtherStageBlock) for block in ModelParts.of(stage.part).blocks]
            own[stage.index] = absent.index(False)
        return self.world.sum(own, "pp").tolist()

    def _border(self, stage: int, piece: Batch, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return meta tensors of the input of `stage`."""
        rows, tokens = piece.inputs["input_ids"].shape
        width, grad = self._anatomy.width, self._alive[stage - 1]
        tokens_by, width_by = self._share

        def meta(length: int) -> Tensor:
            shape = (rows, length // tokens_by, width // width_by)
            return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)

        if self._encoder is None or self._starts[stage] <= self._encoder:
            return (meta(tokens),)
        decoder = piece.inputs.get("decoder_input_ids")
        return (meta(tokens if decoder is None else decoder.shape[1]), meta(tokens))

    # ------------------------------------------------------------------ training

    def forward_backward(
        self,
        micros: Sequence[Batch],
        count: int,
        *,
        task: Task,
        head: Head | None = None,
        context: Callable[[int], contextlib.AbstractContextManager[Any]] | None = None,
        scale: float = 1.0,
        beat: Callable[[], None] = lambda: None,
        draws: Callable[..., contextlib.AbstractContextManager[Any]] | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
    ) -> Tensor:
        """Compute the gradients of Σ loss · `scale` ÷ `count` over the step's micro-batches.

        Args:
            micros: this data rank's rows; data ranks have equally many.
            count: divisor of the loss: target tokens of the step over all ranks.
            head: of the last stage, if it is on this rank (`find_head`).
            context: context of a forward pass, by a number unique to each piece and stage.
            scale: multiplies gradients, not the loss returned.
            beat: called after every forward pass.
            draws: returns the dropout context of some rows (`flatshift.finetune.compute.dropout.KeyedDropout.during`).
            loss: (model, piece) → summed loss; by default `flatshift.finetune.compute.loss.batch_loss`.

        Returns:
            Σ loss ÷ count over these micro-batches, float32 scalar, on every pp rank.

        Raises:
            UserError: mesh.microbatches exceeds the rows of a micro-batch.
        """
        pieces, each = self._pieces(micros)
        most = max(len(micro.labels) for micro in micros)
        around = self._around(pieces, context, beat, self._drawing(pieces, each, most, draws))
        if self._dtype is None:
            self._dtype = self.passing.dtype(pieces[0], around)

        def divided(part: nn.Module, piece: Any) -> Tensor:
            total = loss(part, piece) if loss is not None else batch_loss(part, piece, task=task, head=head)
            return total * (scale / count)

        for stage in self.stages:
            stage.begin(pieces, loss=divided, around=around, dtype=self._dtype)
        number = torch.arange(len(pieces))
        has_last = self.stages[-1].is_last
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": number, "losses": losses} if has_last else {}
        first = (number,) if self.stages[0].index == 0 else ()
        try:
            self._schedule_for(pieces, self._dtype).step(*first, piece=number, return_outputs=False, **options)
        finally:
            for stage in self.stages:
                stage.end()
        total = torch.zeros((), device=self.world.device)
        for value in losses:
            total += value.detach() / scale
        return self.world.sum(total, "pp")

    def _pieces(self, micros: Sequence[Batch]) -> tuple[list[Batch], int]:
        """Return the pieces of all micro-batches, and the number of pieces of each."""
        pp, schedule = self.mesh.pp, self.mesh.schedule
        each = pieces_per_micro(
            max(len(micro.labels) for micro in micros),
            len(micros),
            pp=pp,
            virtual=self.virtual,
            schedule=schedule,
            wanted=self.mesh.microbatches,
        )
        total = round_up_pieces(each * len(micros), pp=pp, schedule=schedule)
        pieces = split_micro_batches(micros, each=each, total=total, pad_id=self._pad_id)
        here = [piece.to(self.world.device) for piece in pieces]
        return [piece if self.tokens is None else self.tokens.take(piece) for piece in here], each

    def _drawing(
        self, pieces: Sequence[Batch], each: int, most: int, draws: Callable[..., Any] | None
    ) -> Callable[[int], contextlib.AbstractContextManager[Any]]:
        """Return the dropout context of a piece by its number.

        Each group of `each` consecutive pieces belongs to one micro-batch, which has at most `most` rows.
        """
        if draws is None:
            return lambda piece: contextlib.nullcontext()
        rows, tokens = len(pieces[0].labels), pieces[0].inputs["input_ids"].shape[1]
        place, ranks = self.world.index(*DATA), self.world.width(*DATA)

        def drawing(piece: int) -> Any:
            micro, run = divmod(piece, each)
            return draws(first=(micro * ranks + place) * most + run * rows, rows=rows, tokens=tokens)

        return drawing

    def _around(
        self,
        pieces: Sequence[Any],
        context: Callable[[int], Any] | None,
        beat: Callable[[], None],
        drawing: Callable[[int], contextlib.AbstractContextManager[Any]],
    ) -> Around:
        @contextlib.contextmanager
        def around(piece: int, stage: int) -> Any:
            reading = contextlib.nullcontext() if self.tokens is None else self.tokens.reading(pieces[piece])
            with (
                contextlib.nullcontext() if context is None else context(piece * self.total + stage),
                reading,
                drawing(piece),
            ):
                yield
            beat()

        return around

    def _schedule_for(self, pieces: Sequence[Batch], dtype: torch.dtype) -> Any:
        """Return torch's schedule for these shapes. Only the last one is cached: it holds a buffer for every piece."""
        shapes = tuple((name, tuple(t.shape)) for name, t in pieces[0].inputs.items() if name.endswith("input_ids"))
        key = (len(pieces), shapes)
        if self._schedule[0] != key:
            self._schedule = (None, None)
            self._schedule = (key, self._new_schedule(pieces, dtype))
        return self._schedule[1]

    def _new_schedule(self, pieces: Sequence[Batch], dtype: torch.dtype) -> Any:
        from torch.distributed import pipelining as pp

        kinds = {
            "gpipe": pp.ScheduleGPipe,
            "1f1b": pp.Schedule1F1B,
            "interleaved": pp.ScheduleInterleaved1F1B,
            "zero-bubble": pp.ScheduleInterleavedZeroBubble,
            "zbv": pp.ScheduleZBVZeroBubble,
        }
        kind: Any = kinds[self.mesh.schedule]
        stages = [self._torch_stage(stage, pieces[0], dtype) for stage in self.stages]
        one_each = self.mesh.schedule in ("gpipe", "1f1b")
        return kind(stages[0] if one_each else stages, len(pieces), loss_fn=lambda out, target: out, scale_grads=False)

    def _torch_stage(self, stage: StageModel, piece: Batch, dtype: torch.dtype) -> Any:
        from torch.distributed.pipelining import PipelineStage

        class Connected(PipelineStage):
            """Stage without connections to itself: torch 2.11 connects to both neighbours, but a V has neighbours on
            one rank."""

            def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
                return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

        index = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        return Connected(
            stage,
            stage.index,
            self.total,
            self.world.device,
            input_args=self._border(stage.index, piece, dtype) if stage.index else index,
            output_args=loss if stage.is_last else self._border(stage.index + 1, piece, dtype),
            group=self.world.group("pp"),
            # Schedules that split weight from input gradients run the graph twice, every checkpointed block once more
            # for each of its adapters, and miss leaves that are no parameters (a regularizer's probes). A frozen
            # base model has no weight gradients to defer: compute both together.
            dw_builder=lambda: lambda: None,
        )

    # ------------------------------------------------------------------ the head

    def find_head(self, probe: dict[str, Tensor], *, task: Task) -> Head | None:
        """Return the head whose loss needs no logits, agreed by all ranks; None also on ranks without the last stage.

        Collective over the whole mesh.

        Args:
            probe: of `flatshift.finetune.compute.loss.head_probe`.
        """
        with evaluation_mode(self.parts):
            found = self.passing.forward(
                [probe], lambda part, piece: find_head(part, piece.inputs, task=task), share=False
            )
        has_last = self.stages[-1].is_last
        refused = torch.tensor(float(has_last and found[0] is None), device=self.world.device)
        dist.all_reduce(refused)
        return None if refused.item() else found[0]
