"""Generate text after prompts: greedily, by beam search, or by sampling with a seed and the prompt's index.

transformers samples from the global generator, for a whole batch at once. Here Gumbel noise is added to the processed
logits and the largest is taken, which is a sample from their softmax (Gumbel 1954; Maddison et al. 2014, arXiv
1411.0030). The noise of prompt i depends on (seed, i) only, so neither the batch size nor the other prompts change a
sample.

Prompts are padded on the left, so that every answer directly follows its prompt; an encoder's on the right. With soft
tokens there is no padding: it would come between them and the prompt, and PEFT counts it as positions. The cache is
used. The caller chooses the decoding method.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compute.numerics import evaluation_mode
from ..config import check_bounds
from ..data.encoding import iter_chunks
from ..data.eval_batching import ALONE, EvalBatching
from ..errors import UserError
from ..models.anatomy import describe_prefix
from ..models.families import usable_positions
from ..seeds import torch_generator

if TYPE_CHECKING:
    from transformers import GenerationConfig


_COLDEST = 1e-4
"""Lowest temperature above 0: below it, logits over the temperature overflow float32."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Decoding settings. Greedy by default."""

    max_new_tokens: int = 64
    """Maximum tokens of an answer."""
    temperature: float = 0.0
    """Divisor of the logits before sampling; 0: greedy, the likeliest token."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability (nucleus sampling, arXiv 1904.09751)."""
    top_k: int | None = None
    """Sample from this many of the likeliest tokens."""
    seed: int = 0
    """Seed of the samples."""
    num_beams: int = 1
    """Beams of the beam search; the likeliest complete answer is kept."""

    def __post_init__(self) -> None:
        """Raise UserError for settings out of range, and for those that contradict each other."""
        try:
            check_bounds(self, max_new_tokens=(1, None), temperature=(0, None), num_beams=(1, None), top_k=(1, None))
            check_bounds(self, top_p=(0, 1), seed=(0, 2**63 - 1))
        except ValueError as error:
            raise UserError(f"decoding: {error}") from None
        if 0 < self.temperature < _COLDEST:
            raise UserError(f"temperature must be 0, for no draw, or at least {_COLDEST}, got {self.temperature}")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            name = "top_p" if self.top_p is not None else "top_k"
            raise UserError(f"{name} limits draws, and there are none at temperature 0; set temperature, or leave it")
        if self.temperature > 0 and self.num_beams > 1:
            raise UserError("num_beams follows the likeliest answers and draws none; leave temperature at 0")


@dataclass(frozen=True)
class GeneratedAnswer:
    """Generated answer to one prompt."""

    ids: list[int]
    """Its tokens, without the end token."""
    ended: bool
    """True if it ended with an end token; False if it reached `max_new_tokens`."""


def continue_prompts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    inference: EvalBatching,
    *,
    end: int | Sequence[int] | None,
    decoder_start: int | None = None,
    numbers: Sequence[int] | None = None,
    on_token: Callable[[int, int], bool] | None = None,
    names: Sequence[str] = (),
) -> Iterator[tuple[int, GeneratedAnswer]]:
    """Yield pairs of a prompt's index and its answer, longest prompts first.

    Settings of the backbone's own generation_config.json (penalties, forced tokens, temperatures) are ignored.

    end: the token, or tokens, that end an answer; None: only `max_new_tokens` does.
    numbers: noise stream of each prompt; None: its index.
    decoder_start: for encoder-decoders, the first token of the decoder.
    on_token: as in `flatshift.finetune.evaluate.generation.generate_batches`.
    names: of the prompts in messages; none: their numbers.

    Raises UserError: an empty prompt, or one that does not fit the backbone's positions together with the answer.
    """
    from transformers import GenerationConfig

    for name, prompt in zip(names or [f"prompt {i + 1}" for i in range(len(prompts))], prompts, strict=True):
        if not prompt:
            raise UserError(f"{name} is empty and this tokenizer begins no text by itself; write something")
        room = context_overflow(model, prompt, decoding.max_new_tokens, apart=decoder_start is not None)
        if room is not None:
            raise UserError(
                f"{name}: {len(prompt)} tokens and --max-new-tokens {decoding.max_new_tokens} do not fit {room}; "
                "shorten the prompt or lower --max-new-tokens"
            )
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    config = GenerationConfig(
        do_sample=False, num_beams=decoding.num_beams, use_cache=True, max_new_tokens=decoding.max_new_tokens,
        pad_token_id=inference.pad_id, eos_token_id=ends or None, decoder_start_token_id=decoder_start,
    )  # fmt: skip
    with evaluation_mode(model), without_generation_config(model):
        own = list(range(len(prompts)) if numbers is None else numbers)
        drawing = lambda places: _logits_processors(decoding, [own[place] for place in places])  # noqa: E731
        for places, answers in generate_batches(
            model, prompts, config, inference, processors=drawing, on_token=on_token
        ):
            for place, tokens in zip(places, answers.tolist(), strict=True):
                stop = next((k for k, token in enumerate(tokens) if token in ends), None)
                yield place, GeneratedAnswer(tokens[:stop], stop is not None)


def _logits_processors(decoding: Decoding, places: Sequence[int]) -> list[Any]:
    """Return the logits processors of one batch; empty for greedy decoding."""
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
    """Logits processor whose largest output is a sample from the softmax of its input, with one noise stream per
    prompt."""

    def __init__(self, seed: int, places: Sequence[int]) -> None:
        self.streams = [torch_generator(seed, "generate", place) for place in places]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) + g, g = −log E with E ~ Exp(1); excluded tokens stay at −∞."""
        noise = torch.stack(
            [torch.empty(scores.shape[1], dtype=torch.float64).exponential_(generator=s) for s in self.streams]
        )
        return scores - noise.log().to(scores.device, torch.float32)


@contextlib.contextmanager
def without_generation_config(model: Any) -> Iterator[None]:
    """Clear the model's own generation settings, with which `generate` would fill every unset option."""
    from transformers import GenerationConfig

    base = getattr(model, "get_base_model", lambda: model)()
    before = getattr(base, "generation_config", None)  # a pipeline has none
    base.generation_config = GenerationConfig()
    try:
        yield
    finally:
        base.generation_config = before


# ---------------------------------------------------------------------------------------------------- batches


@torch.no_grad()
def generate_batches(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    inference: EvalBatching,
    *,
    processors: Callable[[Sequence[int]], list[Any]] | None = None,
    on_token: Callable[[int, int], bool] | None = None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield batches of prompts, the longest first: their indices, and the tokens (B, T) generated after each, padded on
    the right.

    Every process of `inference.share` runs the same batches, but yields only its own prompts.

    config: transformers' own, with the pad token; a `decoder_start_token_id` marks an encoder-decoder.
    processors: returns the logits processors for the prompts at these indices; a pipeline's stand-in supports none.
    on_token: called with a prompt's index and each token after it as soon as it is chosen (one beam, one process); it
    returns True to end that answer, and is then called on, with tokens that mean nothing.
    """
    from transformers import LogitsProcessorList, StoppingCriteriaList

    apart = config.decoder_start_token_id is not None
    more: dict[str, Any] = {"synced_gpus": True} if inference.share.lockstep else {}
    criteria: list[Any] = (
        [_HeartbeatCriterion(inference)] if inference.share == ALONE and inference.has_heartbeat else []
    )
    assert on_token is None or (inference.share == ALONE and config.num_beams in (None, 1))
    for batch in _prompt_batches(prompts, inference.batch_size, alike=bool(getattr(model, "soft_tokens", 0))):
        places, counts = inference.share.mine(batch)
        ids, mask = pad_rows([prompts[i] for i in places], config.pad_token_id, left=not apart)
        if processors is not None:
            more["logits_processor"] = LogitsProcessorList(processors(places))
        tokens = [] if on_token is None else [_TokenCriterion(places, on_token)]
        if criteria or tokens:
            more["stopping_criteria"] = StoppingCriteriaList([*criteria, *tokens])
        with inference.precision():
            inputs = {"input_ids": ids.to(inference.device), "attention_mask": mask.to(inference.device)}
            out = model.generate(**inputs, generation_config=config, **more)
        if counts:  # else this process only took part in the collective passes
            yield places, out[:, 1 if apart else ids.shape[1] :]
        inference.heartbeat(len(batch))


class _HeartbeatCriterion:
    """Stopping criterion that never stops: it reports a heartbeat for each token."""

    def __init__(self, inference: EvalBatching) -> None:
        self.inference = inference

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        self.inference.heartbeat(0)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _TokenCriterion:
    """Stopping criterion that reports each row's newest token and stops the rows that have had enough."""

    def __init__(self, places: Sequence[int], on_token: Callable[[int, int], bool]) -> None:
        self.places, self.on_token = places, on_token

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        newest = zip(self.places, input_ids[:, -1].tolist(), strict=True)
        return torch.tensor([self.on_token(place, token) for place, token in newest], device=input_ids.device)


def context_overflow(model: Any, prompt: Sequence[int], max_new_tokens: int, *, apart: bool) -> str | None:
    """Describe the limit that a prompt and its answer exceed, as in `the backbone's 96 positions`; None if they fit.

    apart: encoder and decoder have separate positions.
    """
    limit = usable_positions(model.config)
    soft = getattr(model, "soft_tokens", 0)  # they take positions before every prompt, and features before them
    needed = max(len(prompt), 1 + max_new_tokens) if apart else len(prompt) + max_new_tokens
    if limit is None or needed + soft <= limit:
        return None
    return f"the backbone's {limit} positions{f' next to {describe_prefix(model)}' if soft else ''}"


def _prompt_batches(prompts: Sequence[Sequence[int]], size: int, *, alike: bool) -> Iterator[list[int]]:
    """Yield indices of at most `size` prompts, the longest first; alike: only prompts of equal length together."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for _, run in itertools.groupby(order, key=lambda i: len(prompts[i]) if alike else 0):
        yield from iter_chunks(run, size)


def pad_rows(rows: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Return token ids (B, T) of rows of any length, padded on one side, and their mask (1: real), both int64."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for r, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[r, place] = torch.tensor(row)
        mask[r, place] = 1
    return ids, mask
