"""Mapping from target characters to target tokens.

The whole text is tokenised at once, as at inference, and spans are mapped by the tokens' offsets. If the edge of a span
is inside a token (for example, a generation prompt that ends with a space), the text is tokenised in pieces split at
the edges, so that generation later continues from exactly the prompt used in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .answers import RenderedConversation, Span


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A tokenised example; all lists are as long as `ids`."""

    ids: list[int]
    supervised: list[bool]
    sizes: list[int]
    """UTF-8 bytes of each token's own characters; 0 for special tokens."""
    last: int
    """Index of the first token of the last answer."""
    cut: bool
    """True if an edge is inside a token, so that the text was tokenised in pieces."""


class CannotMap(ValueError):
    """Tokens cannot be separated at the edge of a span; says why."""


class TokenMap:
    """Tokeniser of examples that adds no special tokens: the template renders all of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)

    def places(self, text: str) -> list[Span]:
        """Return the character span of each token of `text`, without gaps: whitespace that a tokenizer skips belongs
        to the token after it."""
        return self._batch([text])[0][1]

    def samples(self, samples: Sequence[RenderedConversation]) -> list[Tokenised | CannotMap]:
        """Tokenise each example; one that cannot be tokenised yields its error."""
        found: list[Tokenised | CannotMap] = []
        for sample, (ids, places) in zip(samples, self._batch([sample.text for sample in samples]), strict=True):
            try:
                found.append(self._sample(sample, ids, places))
            except CannotMap as error:
                found.append(error)
        return found

    def _sample(self, sample: RenderedConversation, ids: list[int], places: list[Span]) -> Tokenised:
        edges = {edge for span in sample.spans for edge in span}
        cut = not edges <= {0, *(place for token in places for place in token)}
        if cut:
            ids, places = self._pieces(sample.text, sorted(edges | {0, len(sample.text)}), ids)
        supervised = _covered(places, sample.spans)
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise CannotMap(f"the template writes {self.tokenizer.bos_token!r} twice at the beginning")
        sizes, before = [], 0
        for token, (start, end) in zip(ids, places, strict=True):
            sizes.append(0 if token in self._special else len(sample.text[max(start, before) : end].encode()))
            before = end
        last = next(i for i, (start, end) in enumerate(places) if end > start >= sample.last)
        return Tokenised(ids, supervised, sizes, last, cut)

    def _pieces(self, text: str, edges: list[int], whole: list[int]) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        places: list[Span] = []
        for start, end in pairwise(edges):
            (piece, inside), *_ = self._batch([text[start:end]])
            ids += piece
            places += [(start + low, start + high) for low, high in inside]
        if self._decode(ids) != self._decode(whole):
            raise CannotMap(
                "a token reaches over the edge of an answer, and the tokenizer writes the parts differently; let the "
                "template end its generation prompt where a token ends"
            )
        return ids, places

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _batch(self, texts: list[str]) -> list[tuple[list[int], list[Span]]]:
        if not texts:
            return []
        fast = self.tokenizer.is_fast
        batch: Any = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=fast,
            verbose=False,
        )
        if fast:
            return [(ids, _gapless(at)) for ids, at in zip(batch["input_ids"], batch["offset_mapping"], strict=True)]
        return [(ids, self._by_beginnings(text, ids)) for text, ids in zip(texts, batch["input_ids"], strict=True)]

    def _by_beginnings(self, text: str, ids: list[int]) -> list[Span]:
        """Return token spans for a tokenizer without offsets: by the length of the decoded prefixes of `ids`, each
        of which must be a prefix of the text."""
        ends, known = [], 0
        for count in range(1, len(ids) + 1):
            shown = self._decode(ids[:count])
            if shown.endswith("\ufffd"):  # incomplete character: it ends with the token that completes it
                ends.append(known)
                continue
            if not text.startswith(shown):
                raise CannotMap("the tokenizer does not say where its tokens are, and does not write them as they were")
            known = len(shown)
            ends.append(known)
        return list(zip([0, *ends[:-1]], ends, strict=True))


def _gapless(places: Sequence[tuple[int, int]]) -> list[Span]:
    filled, before = [], 0
    for start, end in places:
        # Several tokens may share one character (its bytes), so a token may start before the previous one's end.
        filled.append((min(start, before), max(end, before)))
        before = max(end, before)
    return filled


def _covered(places: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token whether it is in a span; spans are in order and disjoint."""
    covered, k = [], 0
    for start, end in places:
        while k < len(spans) and spans[k][1] < end:
            k += 1
        # A token without characters belongs to a span that contains it, not to one that it precedes.
        covered.append(k < len(spans) and (spans[k][0] < start or (spans[k][0] == start < end)))
    return covered
