"""What evaluation calls instead of the whole model: the same call, over the stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..mesh import TOKENS
from .stage import Parts

if TYPE_CHECKING:
    from ..mesh import World
    from .passing import Passing


class StandIn(nn.Module):
    """`stand_in(**inputs).logits` and `stand_in.generate(...)` on every pp rank, with the same result on each.

    `eval()` and `train()` reach the stages of this rank.
    """

    def __init__(self, parts: Parts, passing: Passing, *, config: Any, world: World) -> None:
        """
        Args:
            config: the backbone's.
        """
        super().__init__()
        self.parts = parts
        self.config = config
        self._passing, self._world = passing, world

    def forward(self, *, use_cache: bool = False, **inputs: Tensor) -> Any:
        """Whole logits, (B, T, V) or (B, C), as `.logits`; no gradients.

        Raises:
            NotImplementedError: a key-value cache is asked for.
        """
        if use_cache or inputs.get("past_key_values") is not None:
            raise NotImplementedError("a pipeline keeps no key-value cache")
        (logits,) = self._passing.forward([inputs], lambda part, piece: part(**piece.inputs).logits)
        return SimpleNamespace(logits=logits)

    @torch.no_grad()
    def generate(
        self, *, input_ids: Tensor, attention_mask: Tensor, generation_config: Any, synced_gpus: bool = False
    ) -> Tensor:
        """Greedy continuation of prompts that are padded on the left; every token is a pass over all stages.

        An encoder-decoder's prompts may be padded on any side, and its answers follow the decoder's start token.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 1 where real.
            generation_config: its `max_new_tokens`, `eos_token_id`, `pad_token_id` and `decoder_start_token_id` count.
            synced_gpus: go on until every data rank is done, as collectives inside the stages need.

        Returns:
            (B, T + new) or (B, 1 + new), rows that ended early filled with the pad token.
        """
        encoded: dict[str, Tensor] = {}
        ends = generation_config.eos_token_id
        ends = input_ids.new_tensor([] if ends is None else [ends] if isinstance(ends, int) else list(ends))
        ids, mask = input_ids, attention_mask
        if getattr(self.config, "is_encoder_decoder", False):
            encoded = {"input_ids": input_ids, "attention_mask": attention_mask}
            ids = input_ids.new_full((len(input_ids), 1), generation_config.decoder_start_token_id)
            mask = torch.ones_like(ids)
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(generation_config.max_new_tokens):
            chosen = self._next(ids, mask, encoded).masked_fill(done, generation_config.pad_token_id)
            if not done.all():
                ids = torch.cat([ids, chosen[:, None]], dim=1)
                mask = torch.cat([mask, torch.ones_like(chosen)[:, None]], dim=1)
            done = done | torch.isin(chosen, ends)
            waiting = (~done).sum()
            if int(self._world.sum(waiting, *TOKENS) if synced_gpus else waiting) == 0:
                break
        return ids

    def _next(self, ids: Tensor, mask: Tensor, encoded: dict[str, Tensor]) -> Tensor:
        """The likeliest next tokens, (B,), after `ids`; a decoder's, if its encoder's inputs are `encoded`."""
        if encoded:
            inputs = {**encoded, "decoder_input_ids": ids}
        else:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        (tokens,) = self._passing.forward([inputs], lambda part, piece: part(**piece.inputs).logits[:, -1].argmax(-1))
        return tokens
