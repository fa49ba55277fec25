"""Mapping from target characters to target tokens.

The whole text is tokenised at once, as it is at inference, and spans are mapped by the tokens' places in it. Where the
edge of a span falls inside a token (a generation prompt that ends with a space, say), the text is tokenised in pieces
at the edges, so that generation later continues from exactly the prompt that was trained. Of a text that is far longer
than a row, only the beginning is tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..encoding import enough_of, is_far_longer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .answers import RenderedConversation, Span

_AROUND = (64, 128)
"""Characters on each side of an edge by which it is known to lie between tokens."""
_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class TokenisedConversation:
    """A tokenised example; all lists are as long as `ids`."""

    ids: list[int]
    supervised: list[bool]
    sizes: list[int]
    """UTF-8 bytes of each token's own characters; 0 for special tokens."""
    last: int
    """Where the last answer begins; behind all tokens if beyond what was tokenised."""
    cut: bool
    """An edge fell inside a token, so the text was tokenised in pieces."""
    beginning: bool = False
    """The text continues after these tokens."""
    more: bool = False
    """So does what is supervised."""


class TokenAlignmentError(ValueError):
    """Tokens cannot be separated at the edge of a span; says why."""


class ConversationTokeniser:
    """Tokeniser of examples that adds no special tokens: the template renders all of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)

    def places(self, text: str) -> list[Span]:
        """Return the character span of each token of `text`, without gaps: whitespace that a tokenizer skips belongs
        to the token after it."""
        return self._batch([text])[0][1]

    def samples(
        self, samples: Sequence[RenderedConversation], *, room: int | None = None
    ) -> list[TokenisedConversation | TokenAlignmentError]:
        """Each sample in tokens, or why it cannot be.

        room: tokens that are kept of a sample; of one that is far longer only a beginning with more than these is
            tokenised, where they are as in the whole.
        """
        taken = [self._beginning(sample, room) for sample in samples]
        found = self._mapped(taken)
        for i, (sample, (short, _)) in enumerate(zip(samples, taken, strict=True)):
            if isinstance(one := found[i], TokenisedConversation) and short is not sample:
                more = any(end > len(short.text) for _, end in sample.spans)
                found[i] = replace(one, beginning=True, more=more)
        return found

    def _mapped(
        self, samples: Sequence[tuple[RenderedConversation, bool]]
    ) -> list[TokenisedConversation | TokenAlignmentError]:
        found: list[TokenisedConversation | TokenAlignmentError] = []
        batch = self._batch([sample.text for sample, _ in samples])
        for (sample, apart), (ids, places) in zip(samples, batch, strict=True):
            try:
                found.append(self._sample(sample, ids, places, apart=apart))
            except TokenAlignmentError as error:
                found.append(error)
        return found

    def _beginning(self, sample: RenderedConversation, room: int | None) -> tuple[RenderedConversation, bool]:
        """As much of a sample as `room` needs, and whether a later edge falls inside a token: then even this is to be
        tokenised in pieces."""
        if room is None or not is_far_longer(sample.text, room):
            return sample, False
        for apart in (False, True):

            def tokens(sizes: Sequence[int], apart: bool = apart) -> list[Sequence[Any]]:
                made = self._mapped([(sample.until(size), apart) for size in sizes])
                return [
                    []
                    if isinstance(one, TokenAlignmentError)
                    else list(zip(one.ids, one.supervised, one.sizes, strict=True))
                    for one in made
                ]

            enough = enough_of(sample.text, room, tokens, self.tokenizer)
            inside = None if enough is None else self._inside(sample, enough[0])
            if enough is None or inside is None:
                break
            if inside is apart:
                return sample.until(enough[0]), apart
        return sample, False

    def _inside(self, sample: RenderedConversation, beyond: int) -> bool | None:
        """Whether a span's edge behind `beyond` characters falls inside a token; None: not certain."""
        text = sample.text
        edges = [edge for span in sample.spans for edge in span if beyond <= edge < len(text)]
        for first in range(0, len(edges), _AT_ONCE):
            told = []
            for size in _AROUND:
                at = {edge: max(0, edge - size) for edge in edges[first : first + _AT_ONCE]}
                batch = self._batch([text[start : edge + size] for edge, start in at.items()])
                told.append(
                    [
                        all(edge - start not in token for token in places)
                        for (edge, start), (_, places) in zip(at.items(), batch, strict=True)
                    ]
                )
            if told[0] != told[1]:
                return None
            if any(told[0]):
                return True
        return False

    def _sample(
        self, sample: RenderedConversation, ids: list[int], places: list[Span], *, apart: bool = False
    ) -> TokenisedConversation:
        edges = {edge for span in sample.spans for edge in span if edge <= len(sample.text)}
        cut = apart or not edges <= {0, *(place for token in places for place in token)}
        if cut:
            ids, places = self._pieces(sample.text, sorted(edges | {0, len(sample.text)}), ids)
        supervised = _mark_tokens_in_spans(places, sample.spans)
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise TokenAlignmentError(f"the template writes {self.tokenizer.bos_token!r} twice at the beginning")
        sizes, before = [], 0
        for token, (start, end) in zip(ids, places, strict=True):
            sizes.append(0 if token in self._special else len(sample.text[max(start, before) : end].encode()))
            before = end
        last = next((i for i, (start, end) in enumerate(places) if end > start >= sample.last), len(ids))
        return TokenisedConversation(ids, supervised, sizes, last, cut)

    def _pieces(self, text: str, edges: list[int], whole: list[int]) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        places: list[Span] = []
        for start, end in pairwise(edges):
            (piece, inside), *_ = self._batch([text[start:end]])
            ids += piece
            places += [(start + low, start + high) for low, high in inside]
        if self._decode(ids) != self._decode(whole):
            raise TokenAlignmentError(
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
            return [(ids, _close_gaps(at)) for ids, at in zip(batch["input_ids"], batch["offset_mapping"], strict=True)]
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
                raise TokenAlignmentError(
                    "the tokenizer does not say where its tokens are, and does not write them as they were"
                )
            known = len(shown)
            ends.append(known)
        return list(zip([0, *ends[:-1]], ends, strict=True))


def _close_gaps(places: Sequence[tuple[int, int]]) -> list[Span]:
    filled, before = [], 0
    for start, end in places:
        # Several tokens may share one character (its bytes), so a token may start before the previous one's end.
        filled.append((min(start, before), max(end, before)))
        before = max(end, before)
    return filled


def _mark_tokens_in_spans(places: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token whether it is in a span; spans are in order and disjoint."""
    covered, k = [], 0
    for start, end in places:
        while k < len(spans) and spans[k][1] < end:
            k += 1
        # A token without characters belongs to a span that contains it, not to one that it precedes.
        covered.append(k < len(spans) and (spans[k][0] < start or (spans[k][0] == start < end)))
    return covered
