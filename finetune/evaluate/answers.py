"""Answers, greedy or by beam search, compared with the given ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..data.eval_batching import EvalBatching
from ..data.example import IGNORE, Example
from ..errors import UserError
from .generation import context_overflow, generate_batches

_BETA2 = 4.0
_LONGEST = 6


def generate_answers(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    inference: EvalBatching,
    *,
    max_new_tokens: int,
    num_beams: int = 1,
) -> list[str]:
    """The model's answer to each example's prompt, stripped: greedy, or the likeliest of `num_beams` beams per token of
    its length (transformers' beam search with length penalty 1).

    The prompt is what precedes the first supervised token, unless the example has one of its own.

    An encoder's prompt is its whole input, and its answer follows the decoder's start token. Nothing is drawn. An
    answer ends at the end-of-sequence token, at any example's `stop`, or after `max_new_tokens`.

    Raises:
        UserError: prompt and answer do not fit the backbone's positions.
    """
    from transformers import GenerationConfig

    start = examples[0].decoder_ids[0] if examples[0].decoder_ids is not None else None
    prompts = [prompt_of(example) for example in examples]
    check_room(model, examples, max_new_tokens)
    stops = {example.stop for example in examples if example.stop is not None} - {tokenizer.eos_token_id}
    ends = [token for token in (tokenizer.eos_token_id, *sorted(stops)) if token is not None]
    config = GenerationConfig(
        do_sample=False,
        num_beams=num_beams,
        length_penalty=1.0,
        early_stopping=False,
        use_cache=True,
        max_new_tokens=max_new_tokens,
        pad_token_id=inference.pad_id,
        eos_token_id=ends or None,
        bos_token_id=tokenizer.bos_token_id,
        decoder_start_token_id=start,
        # backbones bring their own (Qwen2.5 1.05, BART 3): our search is without
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_length=0,
    )
    answers: dict[int, str] = {}
    for places, said in generate_batches(model, prompts, config, inference):
        texts = tokenizer.batch_decode(said.cpu(), skip_special_tokens=True)
        answers |= {i: text.strip() for i, text in zip(places, texts, strict=True)}
    answers = inference.share.union(answers)
    return [answers[i] for i in range(len(examples))]


def exact_match(answer: str, reference: str) -> float:
    """1.0 where the stripped answer is the stripped completion of the row, else 0.0."""
    return float(answer == reference.strip())


def chrf(answer: str, reference: str) -> float:
    """How much of a text's character n-grams an answer shares with the given one, in [0, 1].

    Popović, chrF: character n-gram F-score for automatic MT evaluation, WMT 2015, with β = 2, n = 1 … 6, blanks left
    out. The mean is over the F-scores of the orders, as in NLTK's `sentence_chrf(beta=2)`, checked against it in the
    tests (sacreBLEU takes the F-score of mean precision and recall); orders that a text is too short for do not count,
    but for n = 1, so that a right answer of three letters scores 1.
    """
    said, given = "".join(answer.split()), "".join(reference.split())
    scores = []
    for n in range(1, _LONGEST + 1):
        ours, theirs = _grams(said, n), _grams(given, n)
        if n > 1 and not (ours and theirs):
            continue
        shared = sum((ours & theirs).values())
        precision = shared / sum(ours.values()) if ours else 0.0
        recall = shared / sum(theirs.values()) if theirs else 0.0
        total = _BETA2 * precision + recall
        scores.append((1 + _BETA2) * precision * recall / total if total else 0.0)
    return sum(scores) / len(scores)


def _grams(text: str, n: int) -> Counter[str]:
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))


def prompt_of(example: Example) -> list[int]:
    """The example's own prompt, else the tokens before the first supervised one; all that an encoder reads."""
    if example.prompt is not None:
        return example.prompt
    if example.decoder_ids is not None:
        return example.input_ids
    assert isinstance(example.labels, list)
    return example.input_ids[: next(i for i, label in enumerate(example.labels) if label != IGNORE)]


def check_room(model: Any, examples: Iterable[Example], max_new_tokens: int) -> None:
    """Refuse a prompt that leaves no room for its answer; of `model` only what counts positions is read.

    Raises:
        UserError: prompt and answer do not fit the backbone's positions.
    """
    if max_new_tokens < 1:
        raise UserError(f"task.max_new_tokens: {max_new_tokens} leaves no answer; give at least 1")
    longest = max(examples, key=lambda example: len(prompt_of(example)))
    prompt = prompt_of(longest)
    room = context_overflow(model, prompt, max_new_tokens, apart=longest.decoder_ids is not None)
    if room is not None:
        raise UserError(
            f"{longest.where}: a prompt of {len(prompt)} tokens and task.max_new_tokens "
            f"{max_new_tokens} do not fit {room}; lower train.max_length or max_new_tokens"
        )
