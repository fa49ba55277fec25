"""Forward passes without gradients over the stages, and the stand-in that evaluation and generation call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compute.loss import Batch
from ...config import Mesh
from ...errors import UserError
from ...models.anatomy import NAMES
from ..mesh import TOKENS, ProcessMesh
from ..pipeline_plan import rank_of
from .stage import StageContext, StageModel, StageModules

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_DIMS = 6


class StageTransport:
    """Sends hidden states from stage to stage. Every rank along `pp` calls every method together."""

    def __init__(self, stages: Sequence[StageModel], *, mesh: Mesh, world: ProcessMesh) -> None:
        """Create the transport. stages: this rank's, ascending."""
        self.stages, self.world = stages, world
        self._group = world.group("pp")
        self._ranks = [rank_of(k, pp=mesh.pp, schedule=mesh.schedule) for k in range(stages[0].total)]
        self._own_rank = world.index("pp")

    @torch.no_grad()
    def forward(
        self, batches: Sequence[dict[str, Tensor]], function: Callable[[nn.Module, Any], Any], *, share: bool = True
    ) -> list[Any]:
        """Return `function(model, piece)` of each batch on the last stage, where `model` acts as the whole model and
        `piece.inputs` is the batch.

        With one stage per rank the batches follow each other through the pipeline without waiting.

        batches: model keyword arguments on the device, equally many on every data rank.
        share: the function returns a tensor, and every rank gets it; else ranks without the last stage get None.
        """
        results: list[Any] = []
        sends: list[tuple[Any, Tensor]] = []
        for batch in batches:
            piece = SimpleNamespace(inputs=batch)
            output: tuple[Any, ...] = ()
            for stage in self.stages:
                output = stage.run(self._receive(stage, output), piece, function)
                if not stage.is_last:
                    sends += self._send(stage, output)
            results.append(output[0] if self.stages[-1].is_last else None)
        for work, _ in sends:
            work.wait()
        for stage in self.stages:
            stage.release()
        return [self._share(result) for result in results] if share else results

    def _receive(self, stage: StageModel, previous: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return the previous stage's output; `previous` if that stage is on this rank."""
        if stage.index == 0:
            return ()
        peer = self._ranks[stage.index - 1]
        if peer == self._own_rank:
            return previous

        def receive(tensor: Tensor) -> Tensor:
            dist.recv(tensor, group=self._group, group_src=peer)
            return tensor

        count = int(receive(self._empty_header())[0])
        return tuple(receive(_empty_from_header(receive(self._empty_header()))) for _ in range(count))

    def _send(self, stage: StageModel, output: tuple[Tensor, ...]) -> list[tuple[Any, Tensor]]:
        peer = self._ranks[stage.index + 1]
        if peer == self._own_rank:
            return []
        count = self._empty_header().zero_()
        count[0] = len(output)
        tensors = [count, *(t for tensor in output for t in (_encode_header(tensor), tensor))]
        return [(dist.isend(t, group=self._group, group_dst=peer), t) for t in tensors]

    def _empty_header(self) -> Tensor:
        return torch.empty(2 + _DIMS, dtype=torch.int64, device=self.world.device)

    def _share(self, result: Tensor | None) -> Tensor:
        """Return the last stage's tensor on every rank."""
        source = dist.get_global_rank(self._group, self._ranks[-1])
        header = self._empty_header() if result is None else _encode_header(result)
        dist.broadcast(header, source, group=self._group)
        tensor = _empty_from_header(header) if result is None else result.contiguous()
        dist.broadcast(tensor, source, group=self._group)
        return tensor

    @torch.no_grad()
    def dtype(self, piece: Batch, context: StageContext) -> torch.dtype:
        """Return the dtype of the hidden states between stages, measured on the first stage: it depends on autocast and
        the family's norms. Raises UserError on every rank if they are not (rows, tokens, width)."""
        number = torch.zeros(1, dtype=torch.int64, device=self.world.device)
        stage = self.stages[0]
        if stage.index == 0:
            with context(0, 0):
                states = stage.run((), piece, lambda part, piece: None)[0]
            number[0] = _DTYPES.index(states.dtype) if states.ndim == 3 else -1
        if self.world.sum(number, "pp").item() < 0:
            raise UserError("mesh.pp: more than one hidden state a token passes between these blocks; use mesh.dp")
        return _DTYPES[int(number)]


def _encode_header(tensor: Tensor) -> Tensor:
    numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *[0] * (_DIMS - tensor.ndim)]
    return torch.tensor(numbers, device=tensor.device)


def _empty_from_header(header: Tensor) -> Tensor:
    kind, dims, *shape = header.tolist()
    return torch.empty(shape[:dims], dtype=_DTYPES[kind], device=header.device)


class PipelineEvalModel(nn.Module):
    """Stand-in with `stand_in(**inputs).logits` and `stand_in.generate(...)` on every pp rank, with the same result on
    each.

    `eval()` and `train()` reach the stages of this rank.
    """

    def __init__(self, parts: StageModules, transport: StageTransport, *, config: Any, world: ProcessMesh) -> None:
        """Create the stand-in. config: the base model's."""
        super().__init__()
        self.parts, self.config = parts, config
        self._transport, self._world = transport, world

    def forward(self, *, use_cache: bool = False, **inputs: Tensor) -> Any:
        """Return whole logits, (B, T, V) or (B, C), as `.logits`; no gradients, and no key-value cache
        (NotImplementedError)."""
        if use_cache or any(inputs.get(name) is not None for name in NAMES):
            raise NotImplementedError("a pipeline keeps no key-value cache")
        (logits,) = self._transport.forward([inputs], lambda part, piece: part(**piece.inputs).logits)
        return SimpleNamespace(logits=logits)

    @torch.no_grad()
    def generate(
        self, *, input_ids: Tensor, attention_mask: Tensor, generation_config: Any, synced_gpus: bool = False
    ) -> Tensor:
        """Continue prompts that are padded on the left greedily; every token is a pass over all stages.

        An encoder-decoder's prompts may be padded on any side, and its answers follow the decoder's start token.
        Returns (B, T + new) or (B, 1 + new), rows that ended early filled with the pad token.

        Args: input_ids: (B, T). attention_mask: (B, T), 1 for real tokens. generation_config: its `max_new_tokens`,
        `eos_token_id`, `pad_token_id` and `decoder_start_token_id` are used. synced_gpus: continue until every data
        rank is done, as collectives inside the stages require.
        """
        encoded: dict[str, Tensor] = {}
        ends = generation_config.eos_token_id
        ends = input_ids.new_tensor([] if ends is None else [ends] if isinstance(ends, int) else list(ends))
        ids, mask = input_ids, attention_mask
        if getattr(self.config, "is_encoder_decoder", False):
            encoded = {"input_ids": input_ids, "attention_mask": attention_mask}
            ids = input_ids.new_full((len(input_ids), 1), generation_config.decoder_start_token_id)
            mask = torch.ones_like(ids)
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(generation_config.max_new_tokens):
            chosen = self._next(ids, mask, encoded).masked_fill(ended, generation_config.pad_token_id)
            if not ended.all():
                ids = torch.cat([ids, chosen[:, None]], dim=1)
                mask = torch.cat([mask, torch.ones_like(chosen)[:, None]], dim=1)
            ended = ended | torch.isin(chosen, ends)
            running = (~ended).sum()
            if int(self._world.sum(running, *TOKENS) if synced_gpus else running) == 0:
                break
        return ids

    def _next(self, ids: Tensor, mask: Tensor, encoded: dict[str, Tensor]) -> Tensor:
        """Return the likeliest next tokens, (B,), after `ids`; a decoder's, if its encoder's inputs are `encoded`."""
        if encoded:
            inputs = {**encoded, "decoder_input_ids": ids}
        else:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        (tokens,) = self._transport.forward([inputs], lambda part, piece: part(**piece.inputs).logits[:, -1].argmax(-1))
        return tokens
