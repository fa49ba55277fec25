"""What a model writes after prompts, a batch at a time: for answers that are judged, and for those that are asked for.

Prompts are padded on the left, so that every answer follows its prompt directly; an encoder's on the right. Behind soft
tokens nothing is padded: it would lie between them and the prompt, and PEFT counts it as positions. The cache is used.
How the next token is chosen is the caller's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.inference import Inference
from ..models.anatomy import before_text

if TYPE_CHECKING:
    from transformers import GenerationConfig


@torch.no_grad()
def written(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    inference: Inference,
    *,
    processors: Callable[[Sequence[int]], list[Any]] | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Runs of prompts, the longest first: their places, and the tokens (B, T) written after each, padded at the end.

    Every process of `inference.share` goes through the same batches; only its own prompts come.

    Arguments:
        config: transformers' own, with the pad token; a `decoder_start_token_id` says that an encoder reads prompts.
        processors: of the prompts at these places, what changes their logits; a pipeline's stand-in takes none.
        on_token: told each token of a single prompt as soon as it is chosen (one beam).
    """
    from transformers import LogitsProcessorList

    apart = config.decoder_start_token_id is not None
    more: dict[str, Any] = {"synced_gpus": True} if inference.share.lockstep else {}
    if on_token is not None:
        assert len(prompts) == 1 and config.num_beams in (None, 1)
        more["streamer"] = _Streamer(on_token)
    for batch in _batches(prompts, inference.batch_size, alike=bool(getattr(model, "soft_tokens", 0))):
        places, counts = inference.share.mine(batch)
        ids, mask = padded([prompts[i] for i in places], config.pad_token_id, left=not apart)
        if processors is not None:
            more["logits_processor"] = LogitsProcessorList(processors(places))
        with inference.precision():
            out = model.generate(
                input_ids=ids.to(inference.device),
                attention_mask=mask.to(inference.device),
                generation_config=config,
                **more,
            )
        if counts:
            yield places, out[:, 1 if apart else ids.shape[1] :]


class _Streamer:
    """transformers' interface: the prompt first, then token by token."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self.told, self.begun = told, False

    def put(self, value: Tensor) -> None:
        if self.begun:
            self.told(int(value.flatten()[-1]))
        self.begun = True

    def end(self) -> None:
        pass


def lacking_room(model: Any, prompt: Sequence[int], max_new_tokens: int, *, apart: bool) -> str | None:
    """The room that a prompt and its answer do not fit, as in `the backbone's 96 positions`; None where they do.

    apart: encoder and decoder count their own positions.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    soft = getattr(model, "soft_tokens", 0)  # they stand before every prompt, and features before them
    needed = max(len(prompt), 1 + max_new_tokens) if apart else len(prompt) + max_new_tokens
    if limit is None or needed + soft <= limit:
        return None
    return f"the backbone's {limit} positions{f' beside {before_text(model)}' if soft else ''}"


def _batches(prompts: Sequence[Sequence[int]], size: int, *, alike: bool) -> Iterator[list[int]]:
    """Places of at most `size` prompts, the longest first; alike: only of prompts of one length."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    runs = itertools.groupby(order, key=lambda i: len(prompts[i]) if alike else 0)
    for _, run in runs:
        yield from batched(list(run), size)


def batched(items: list[int], size: int) -> Iterator[list[int]]:
    """Lists of at most `size` items, in order."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def padded(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Token ids (B, T) of rows of any length, padded on one side, and their mask (1: real), both int64."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for r, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[r, place] = torch.tensor(row)
        mask[r, place] = 1
    return ids, mask
