"""One step over the stages of a pipeline.

Training runs torch's schedules (`torch.distributed.pipelining`) with given shapes. All ranks know all rows, so only
hidden states are sent; the last stage turns them into the piece's loss.

Stages exchange hidden states of a fixed size, so micro-batches are split into pieces of one shape, the same rows and
tokens for all of a step: missing rows are repeated without targets, tokens are padded on the right and masked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compute.loss import Batch, Head, batch_loss, find_head
from ...compute.numerics import evaluation_mode
from ...config import Mesh
from ...data.encoding import IGNORE
from ...models.anatomy import ModelParts
from ...tasks import Task
from ..context import ContextParallel
from ..mesh import DATA, ProcessMesh
from ..pipeline_plan import pieces_per_micro, round_up_pieces, stages_of, virtual_stages
from .stage import OtherStageBlock, StageModel, StageModules
from .stage_transport import PipelineEvalModel, StageTransport


class PipelineRunner:
    """Runs the stages of this rank. Every rank along `pp` calls every method together."""

    def __init__(
        self, parts: StageModules, *, mesh: Mesh, world: ProcessMesh, tokens: ContextParallel | None = None
    ) -> None:
        """Create the stages. Collective along pp; before the first forward pass.

        parts: the models of this rank's stages, cut (`build_rank_stages`), by ascending stage.
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
        how: dict[str, Any] = {"scatter": group, "reshards": mesh.reshards}
        self.stages = [StageModel(parts[i], index, self.total, **how) for i, index in enumerate(indices)]
        self._divisors = (mesh.tp if mesh.sequence_parallel else 1, mesh.tp if scatters else 1)
        """Divisors of tokens and width of the hidden states that a tensor-parallel rank sends."""
        self.transport = StageTransport(self.stages, mesh=mesh, world=world)
        self._encoder = len(self._anatomy.run(self._anatomy.stacks[0])) if len(self._anatomy.stacks) > 1 else None
        trained = [any(p.requires_grad for p in stage.part.parameters()) for stage in self.stages]
        self._needs_gradient = [count > 0 for count in self._over_stages(trained).cumsum(0).tolist()]
        """True for each stage whose output depends on a trained parameter."""
        self._first_blocks: list[int] = self._over_stages(
            [
                [isinstance(block, OtherStageBlock) for block in ModelParts.of(stage.part).blocks].index(False)
                for stage in self.stages
            ]
        ).tolist()
        """Number of each stage's first block."""
        config = self._anatomy.causal.config
        self._pad_id = int(config.pad_token_id or 0)
        self._dtype: torch.dtype | None = None
        self._schedule: tuple[Any, Any] = (None, None)
        self.real_rows = (1, 1)
        """Rows of the piece in its forward pass that are not copies to fill it up, and all."""
        self.stand_in = PipelineEvalModel(parts, self.transport, config=config, world=world)
        """Stand-in that evaluation calls like the whole model."""

    def _over_stages(self, values: Sequence[int]) -> Tensor:
        """Return the values of all stages, int64 (stages,), from those of this rank's. Collective along pp."""
        own = torch.zeros(self.total, dtype=torch.int64, device=self.world.device)
        for stage, value in zip(self.stages, values, strict=True):
            own[stage.index] = value
        return self.world.sum(own, "pp")

    def _stage_input(self, stage: int, piece: Batch, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return meta tensors of the input of `stage`."""
        rows, tokens = piece.inputs["input_ids"].shape
        width, grad = self._anatomy.width, self._needs_gradient[stage - 1]
        token_divisor, width_divisor = self._divisors

        def meta(length: int) -> Tensor:
            shape = (rows, length // token_divisor, width // width_divisor)
            return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)

        if self._encoder is None or self._first_blocks[stage] <= self._encoder:
            return (meta(tokens),)
        decoder = piece.inputs.get("decoder_input_ids")
        return (meta(tokens if decoder is None else decoder.shape[1]), meta(tokens))

    def forward_backward(
        self,
        micros: Sequence[Batch],
        count: int,
        *,
        task: Task,
        head: Head | None = None,
        context: Callable[[int], contextlib.AbstractContextManager[Any]] | None = None,
        scale: float = 1.0,
        heartbeat: Callable[[], None] = lambda: None,
        dropout_context: Callable[..., contextlib.AbstractContextManager[Any]] | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
    ) -> Tensor:
        """Compute the gradients of Σ loss · `scale` ÷ `count` over the step's micro-batches.

        Return Σ loss ÷ count over these micro-batches, float32 scalar, on every pp rank. Raises UserError if
        mesh.microbatches exceeds the rows of a micro-batch.

        micros: this data rank's rows; data ranks have equally many.
        count: divisor of the loss: target tokens of the step over all ranks.
        head: of the last stage, if it is on this rank (`find_head`).
        context: context of a forward pass, by a number unique to each piece and stage.
        scale: multiplies gradients, not the loss returned.
        heartbeat: called after every forward pass.
        dropout_context: of some rows (`flatshift.finetune.compute.dropout.KeyedDropout.forward_pass`).
        loss: (model, piece) → summed loss; by default `flatshift.finetune.compute.loss.batch_loss`.
        """
        rows = max(len(micro.labels) for micro in micros)
        pieces, per_micro = self._pieces(micros, rows)
        rank, ranks = self.world.index(*DATA), self.world.width(*DATA)

        @contextlib.contextmanager
        def piece_context(number: int, stage: int) -> Any:
            piece = pieces[number]
            (micro, part), size = divmod(number, per_micro), len(piece.labels)
            held = len(micros[micro].labels) if micro < len(micros) else 0
            self.real_rows = min(max(held - part * size, 0), size), size
            with contextlib.ExitStack() as stack:
                if context is not None:
                    stack.enter_context(context(number * self.total + stage))
                if self.tokens is not None:
                    stack.enter_context(self.tokens.forward_pass(piece))  # type: ignore[arg-type]
                if dropout_context is not None:
                    tokens = piece.inputs["input_ids"].shape[1]
                    first = (micro * ranks + rank) * rows + part * size
                    stack.enter_context(dropout_context(first_row=first, rows=size, tokens=tokens))
                yield
            heartbeat()

        if self._dtype is None:
            self._dtype = self.transport.dtype(pieces[0], piece_context)

        def divided(part: nn.Module, piece: Any) -> Tensor:
            total = loss(part, piece) if loss is not None else batch_loss(part, piece, task=task, head=head)
            return total * (scale / count)

        for stage in self.stages:
            stage.begin(pieces, loss=divided, context=piece_context, dtype=self._dtype)
        number = torch.arange(len(pieces))
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": number, "losses": losses} if self.stages[-1].is_last else {}
        inputs = (number,) if self.stages[0].index == 0 else ()
        try:
            self._schedule_for(pieces, self._dtype).step(*inputs, piece=number, return_outputs=False, **options)
        finally:
            for stage in self.stages:
                stage.end()
        total = torch.zeros((), device=self.world.device)
        for value in losses:
            total += value.detach() / scale
        return self.world.sum(total, "pp")

    def _pieces(self, micros: Sequence[Batch], rows: int) -> tuple[list[Batch], int]:
        """Return the pieces of all micro-batches, of at most `rows` rows, and the number of pieces of each."""
        pp, schedule = self.mesh.pp, self.mesh.schedule
        per_micro = pieces_per_micro(
            rows, len(micros), pp=pp, virtual=self.virtual, schedule=schedule, requested=self.mesh.microbatches
        )
        total = round_up_pieces(per_micro * len(micros), pp=pp, schedule=schedule)
        pieces = split_micro_batches(micros, per_micro=per_micro, total=total, pad_id=self._pad_id)
        on_device = [piece.to(self.world.device) for piece in pieces]
        return [piece if self.tokens is None else self.tokens.take(piece) for piece in on_device], per_micro

    def _schedule_for(self, pieces: Sequence[Batch], dtype: torch.dtype) -> Any:
        """Return torch's schedule for these shapes. Only the last one is cached: it holds a buffer for every piece."""
        from torch.distributed import pipelining as pp

        shapes = tuple((name, tuple(t.shape)) for name, t in pieces[0].inputs.items() if name.endswith("input_ids"))
        key = (len(pieces), shapes)
        if self._schedule[0] != key:
            self._schedule = (None, None)
            kinds: dict[str, Any] = {
                "gpipe": pp.ScheduleGPipe,
                "1f1b": pp.Schedule1F1B,
                "interleaved": pp.ScheduleInterleaved1F1B,
                "zero-bubble": pp.ScheduleInterleavedZeroBubble,
                "zbv": pp.ScheduleZBVZeroBubble,
            }
            stages: Any = [self._torch_stage(stage, pieces[0], dtype) for stage in self.stages]
            if self.mesh.schedule in ("gpipe", "1f1b"):
                (stages,) = stages
            make = partial(kinds[self.mesh.schedule], loss_fn=lambda out, target: out, scale_grads=False)
            self._schedule = (key, make(stages, len(pieces)))
        return self._schedule[1]

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
            input_args=self._stage_input(stage.index, piece, dtype) if stage.index else index,
            output_args=loss if stage.is_last else self._stage_input(stage.index + 1, piece, dtype),
            group=self.world.group("pp"),
            # Schedules that split weight from input gradients run the graph twice, every checkpointed block once more
            # for each of its adapters, and miss leaves that are no parameters (a regularizer's probes). A frozen
            # base model has no weight gradients to defer: compute both together.
            dw_builder=lambda: lambda: None,
        )

    def find_head(self, probe: dict[str, Tensor], *, task: Task) -> Head | None:
        """Return the head whose loss needs no logits, agreed by all ranks; None also on ranks without the last stage.

        Collective over the whole mesh.

        probe: of `flatshift.finetune.compute.loss.head_probe`.
        """
        with evaluation_mode(self.parts):
            heads = self.transport.forward(
                [probe], lambda part, piece: find_head(part, piece.inputs, task=task), share=False
            )
        refused = torch.tensor(float(self.stages[-1].is_last and heads[0] is None), device=self.world.device)
        dist.all_reduce(refused)
        return None if refused.item() else heads[0]


@dataclass(frozen=True)
class Piece:
    """Input of one pass through the pipeline (a `flatshift.finetune.compute.loss.Batch`)."""

    inputs: dict[str, Tensor]
    """Model keyword arguments, rows first."""
    labels: Tensor
    """(rows, T), or the classes (rows,); −100 where there is no target."""

    def to(self, device: torch.device) -> Piece:
        """Return the piece on another device."""
        return Piece({name: tensor.to(device) for name, tensor in self.inputs.items()}, self.labels.to(device))


def split_micro_batches(micros: Sequence[Batch], *, per_micro: int, total: int, pad_id: int) -> list[Piece]:
    """Return pieces of one shape, in order; their summed loss is that of the micro-batches.

    per_micro: pieces of the largest micro-batch.
    total: pieces in all; missing ones are copies of the last one, without targets.
    pad_id: token used as padding.
    """
    rows = -(-max(len(micro.labels) for micro in micros) // per_micro)
    widths: dict[str, int] = {}
    for micro in micros:
        for name, tensor in (*micro.inputs.items(), ("labels", micro.labels)):
            if tensor.ndim > 1:
                widths[name] = max(widths.get(name, 0), tensor.shape[1])
    tokens = max(widths.get(name, 0) for name in ("input_ids", "attention_mask", "position_ids", "token_type_ids"))
    widths |= {name: tokens for name in widths if name not in ("decoder_input_ids", "decoder_attention_mask", "labels")}
    pieces = [
        _cut_piece(micro, torch.arange(start, start + rows), widths, pad_id)
        for micro in micros
        for start in range(0, per_micro * rows, rows)
    ]
    assert len(pieces) <= total, (len(pieces), total)
    empty = Piece(pieces[-1].inputs, torch.full_like(pieces[-1].labels, IGNORE))
    return pieces + [empty] * (total - len(pieces))


def _cut_piece(micro: Batch, index: Tensor, widths: Mapping[str, int], pad_id: int) -> Piece:
    """Return rows `index` of `micro`; those beyond its last are copies of it without targets."""
    existing = index.clamp(max=len(micro.labels) - 1)
    labels = micro.labels[existing]
    labels[index != existing] = IGNORE
    inputs = dict(micro.inputs)
    if "attention_mask" not in inputs and "position_ids" not in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    fill = {"input_ids": pad_id, "decoder_input_ids": pad_id}
    cut = {
        name: _pad_right(tensor[existing], widths.get(name, 0), fill.get(name, 0)) for name, tensor in inputs.items()
    }
    extra = widths["input_ids"] - micro.inputs["input_ids"].shape[1]
    if extra and "position_ids" in cut:  # the padding is a separate sample
        cut["position_ids"][:, -extra:] = torch.arange(extra)
    return Piece(cut, _pad_right(labels, widths.get("labels", 0), IGNORE) if labels.ndim > 1 else labels)


def _pad_right(tensor: Tensor, width: int, fill: int) -> Tensor:
    """Pad (rows, T, …) with `fill` on the right to `width` tokens."""
    missing = width - tensor.shape[1]
    if missing <= 0:
        return tensor
    return torch.cat([tensor, tensor.new_full((len(tensor), missing, *tensor.shape[2:]), fill)], dim=1)
