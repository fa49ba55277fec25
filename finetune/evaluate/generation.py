"""What a model writes after prompts: greedily, by beams, or by draws of a seed and the prompt's place.

transformers draws from the global generator, for a whole batch at once. Here the processed logits get Gumbel noise and
the largest is taken, which is a draw from their softmax (Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030). The noise
of prompt i comes from (seed, i) alone, so neither the batch size nor the neighbours change what is drawn.

Prompts are padded on the left, so that every answer follows its prompt directly; an encoder's on the right. Behind soft
tokens nothing is padded: it would lie between them and the prompt, and PEFT counts it as positions. The cache is used.
How the next token is chosen is the caller's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compute.numerics import evaluating
from ..config import check_bounds
from ..data.eval_batching import ALONE, EvalBatching
from ..errors import UserError
from ..models.anatomy import before_text
from ..models.families import usable_positions
from ..seeds import torch_generator

if TYPE_CHECKING:
    from transformers import GenerationConfig


_COLDEST = 1e-4
"""Below it logits over the temperature leave float32."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How the next token is chosen. Greedy by default."""

    max_new_tokens: int = 64
    """Longest answer, tokens."""
    temperature: float = 0.0
    """Divides the logits before a draw; 0: no draw, the likeliest token."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have this probability (nucleus sampling, arXiv 1904.09751)."""
    top_k: int | None = None
    """Draw among so many of the likeliest tokens."""
    seed: int = 0
    """Of the draws."""
    num_beams: int = 1
    """Answers that are followed at once; the likeliest whole one is kept."""

    def __post_init__(self) -> None:
        check_bounds(self, max_new_tokens=(1, None), temperature=(0, None), num_beams=(1, None), top_k=(1, None))
        check_bounds(self, top_p=(0, 1), seed=(0, 2**63 - 1))
        if 0 < self.temperature < _COLDEST:
            raise ValueError(f"temperature must be 0, for no draw, or at least {_COLDEST}, got {self.temperature}")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            name = "top_p" if self.top_p is not None else "top_k"
            raise ValueError(f"{name} limits draws, and there are none at temperature 0; set temperature, or leave it")
        if self.temperature > 0 and self.num_beams > 1:
            raise ValueError("num_beams follows the likeliest answers and draws none; leave temperature at 0")


@dataclass(frozen=True)
class Generation:
    """What the model wrote after one prompt."""

    ids: list[int]
    """Its tokens, without the end token."""
    ended: bool
    """Whether it closed its answer; else `max_new_tokens` did."""


def continue_prompts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    inference: EvalBatching,
    *,
    end: int | Sequence[int] | None,
    decoder_start: int | None = None,
    numbers: Sequence[int] | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Generation]]:
    """Pairs of a prompt's place and its answer, longest prompts first.

    What the backbone's own generation_config.json asks for (penalties, forced tokens, temperatures) is left out.

    Args:
        end: the token, or tokens, that close an answer; None: only `max_new_tokens` does.
        numbers: which of the seed's draws each prompt has; None: those of its place.
        decoder_start: for encoder-decoders, the token that the decoder begins with.
        on_token: as of `flatshift.finetune.evaluate.generation.generate_batches`.

    Raises:
        UserError: an empty prompt, or one that does not fit the backbone's positions together with the answer.
    """
    from transformers import GenerationConfig

    _check_room(model, prompts, decoding.max_new_tokens, apart=decoder_start is not None)
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    config = GenerationConfig(
        do_sample=False,
        num_beams=decoding.num_beams,
        use_cache=True,
        max_new_tokens=decoding.max_new_tokens,
        pad_token_id=inference.pad_id,
        eos_token_id=ends or None,
        decoder_start_token_id=decoder_start,
    )
    with evaluating(model), _without_own_settings(model):
        own = list(range(len(prompts)) if numbers is None else numbers)
        drawing = lambda places: _drawing(decoding, [own[place] for place in places])  # noqa: E731
        for places, said in generate_batches(model, prompts, config, inference, processors=drawing, on_token=on_token):
            for place, tokens in zip(places, said.tolist(), strict=True):
                stop = next((k for k, token in enumerate(tokens) if token in ends), None)
                yield place, Generation(tokens[:stop], stop is not None)


def _drawing(decoding: Decoding, places: Sequence[int]) -> list[Any]:
    """The logits processors of one batch; none where nothing is drawn."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    if decoding.temperature == 0:
        return []
    chain: list[Any] = []
    if decoding.temperature != 1:
        chain.append(TemperatureLogitsWarper(decoding.temperature))
    if decoding.top_k is not None:
        chain.append(TopKLogitsWarper(decoding.top_k))
    if decoding.top_p is not None:
        chain.append(TopPLogitsWarper(decoding.top_p))
    return [*chain, GumbelNoise(decoding.seed, places)]


class GumbelNoise:
    """A logits processor whose largest output is a draw from the softmax of its input, one stream of noise a row."""

    def __init__(self, seed: int, places: Sequence[int]) -> None:
        self.streams = [torch_generator(seed, "generate", place) for place in places]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores (B, V) + g, g = −log E with E ~ Exp(1); tokens left out stay at −∞."""
        noise = torch.stack(
            [torch.empty(scores.shape[1], dtype=torch.float64).exponential_(generator=s) for s in self.streams]
        )
        return scores - noise.log().to(scores.device, torch.float32)


@contextlib.contextmanager
def _without_own_settings(model: Any) -> Iterator[None]:
    """`generate` fills what its caller leaves open from the model's own settings; here it finds none."""
    from transformers import GenerationConfig

    base = getattr(model, "get_base_model", lambda: model)()
    before = base.generation_config
    base.generation_config = GenerationConfig()
    try:
        yield
    finally:
        base.generation_config = before


def _check_room(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, apart: bool) -> None:
    for place, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {place + 1} is empty and this tokenizer begins no text by itself; write something")
        room = context_overflow(model, prompt, max_new_tokens, apart=apart)
        if room is not None:
            raise UserError(
                f"prompt {place + 1}: {len(prompt)} tokens and --max-new-tokens {max_new_tokens} do not fit {room}; "
                "shorten the prompt or lower --max-new-tokens"
            )


# ---------------------------------------------------------------------------------------------------- a batch at a time


@torch.no_grad()
def generate_batches(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    inference: EvalBatching,
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
    from transformers import LogitsProcessorList, StoppingCriteriaList

    apart = config.decoder_start_token_id is not None
    more: dict[str, Any] = {"synced_gpus": True} if inference.share.lockstep else {}
    if on_token is not None:
        assert len(prompts) == 1 and config.num_beams in (None, 1)
        more["streamer"] = _Streamer(on_token)
    if inference.share == ALONE and inference.is_heard:
        more["stopping_criteria"] = StoppingCriteriaList([_Heard(inference)])
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
        inference.beat(len(batch))


class _Heard:
    """A stopping criterion that stops nothing: it tells of a token."""

    def __init__(self, inference: EvalBatching) -> None:
        self.inference = inference

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        self.inference.beat(0)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


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


def context_overflow(model: Any, prompt: Sequence[int], max_new_tokens: int, *, apart: bool) -> str | None:
    """The room that a prompt and its answer do not fit, as in `the backbone's 96 positions`; None where they do.

    apart: encoder and decoder count their own positions.
    """
    limit = usable_positions(model.config)
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
