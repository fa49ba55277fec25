"""Generate answers, greedily or by beam search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Any

from ..data.encoding import decode_answer, get_end_token
from ..data.eval_batching import EvalBatching
from ..data.example import IGNORE, Example
from ..errors import UserError
from .generation import context_overflow, generate_batches, without_generation_config


def generate_answers(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    inference: EvalBatching,
    *,
    max_new_tokens: int,
    num_beams: int = 1,
) -> list[str]:
    """Generate the answer to each example's prompt, stripped: greedy, or by beam search with `num_beams` beams, scored
    by log-likelihood per token (transformers' beam search with length penalty 1).

    The prompt is the tokens before the first target token, unless the example has its own. An encoder's prompt is its
    whole input, and its answer follows the decoder's start token. An answer ends at the trained end token, at any
    example's `stop`, or after `max_new_tokens`.

    Raises UserError: prompt and answer do not fit the backbone's positions.
    """
    from transformers import GenerationConfig

    start = examples[0].decoder_ids[0] if examples[0].decoder_ids is not None else None
    prompts = [prompt_tokens(example) for example in examples]
    check_prompts_fit(model, examples, max_new_tokens)
    stops = sorted({example.stop for example in examples if example.stop is not None})
    ends = list(dict.fromkeys(end for end in (get_end_token(tokenizer), *stops) if end is not None))
    config = GenerationConfig(
        do_sample=False, num_beams=num_beams, length_penalty=1.0, early_stopping=False, use_cache=True,
        max_new_tokens=max_new_tokens, pad_token_id=inference.pad_id, eos_token_id=ends or None,
        bos_token_id=tokenizer.bos_token_id, decoder_start_token_id=start,
    )  # fmt: skip
    answers: dict[int, str] = {}
    with without_generation_config(model):
        for indices, tokens in generate_batches(model, prompts, config, inference):
            rows = zip(indices, tokens.tolist(), strict=True)
            answers |= {i: decode_answer(tokenizer, ids).strip() for i, ids in rows}
    answers = inference.share.union(answers)
    return [answers[i] for i in range(len(examples))]


_SEARCHED = 1000
"""Examples among which those are looked for that fit the backbone with an answer."""


def sample_answers(
    model: Any, tokenizer: Any, examples: Sequence[Example], inference: EvalBatching, *, count: int, **limits: Any
) -> dict[str, list[str | None]]:
    """Return the columns `answer`, generated, and `reference`, the row's own, with values for the first `count`
    examples that fit the backbone with an answer. limits: as of `generate_answers`."""
    longest = limits["max_new_tokens"]
    fitting = (
        place
        for place, example in enumerate(examples[:_SEARCHED])
        if context_overflow(model, prompt_tokens(example), longest, apart=example.decoder_ids is not None) is None
    )
    places = list(islice(fitting, count))
    answers = generate_answers(model, tokenizer, [examples[i] for i in places], inference, **limits) if places else []
    columns: dict[str, list[str | None]] = {name: [None] * len(examples) for name in ("answer", "reference")}
    for place, answer in zip(places, answers, strict=True):
        columns["answer"][place] = answer
        columns["reference"][place] = decode_answer(tokenizer, _first_target(examples[place])).strip()
    return columns


def _first_target(example: Example) -> list[int]:
    """Return the first run of target tokens."""
    assert isinstance(example.labels, list)
    start = next(i for i, label in enumerate(example.labels) if label != IGNORE)
    return list(takewhile(lambda label: label != IGNORE, example.labels[start:]))


def prompt_tokens(example: Example) -> list[int]:
    """Return the example's own prompt, else the tokens before the first target token; for an encoder its whole
    input."""
    if example.prompt is not None:
        return example.prompt
    if example.decoder_ids is not None:
        return example.input_ids
    assert isinstance(example.labels, list)
    return example.input_ids[: next(i for i, label in enumerate(example.labels) if label != IGNORE)]


def check_prompts_fit(model: Any, examples: Iterable[Example], max_new_tokens: int) -> None:
    """Raise UserError if a prompt and its answer do not fit the positions of `model`, of which nothing else is used."""
    if max_new_tokens < 1:
        raise UserError(f"task.max_new_tokens: {max_new_tokens} leaves no answer; give at least 1")
    longest, prompt = max(((e, prompt_tokens(e)) for e in examples), key=lambda pair: len(pair[1]))
    room = context_overflow(model, prompt, max_new_tokens, apart=longest.decoder_ids is not None)
    if room is not None:
        raise UserError(
            f"{longest.where}: a prompt of {len(prompt)} tokens and task.max_new_tokens "
            f"{max_new_tokens} do not fit {room}; lower train.max_length or max_new_tokens"
        )
