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

from ..encoding import find_sufficient_size, is_far_longer
from .answers import RenderedConversation, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Start of the last answer; after all tokens if it begins beyond the tokenised text."""
    cut: bool
    """An edge fell inside a token, so the text was tokenised in pieces."""
    beginning: bool = False
    """The text continues after these tokens."""
    more: bool = False
    """Target tokens continue after these tokens."""


class TokenAlignmentError(ValueError):
    """Tokens cannot be separated at the edge of a span; says why."""


class ConversationTokeniser:
    """Tokeniser of examples that adds no special tokens: the template renders all of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)

    def token_spans(self, text: str) -> list[Span]:
        """Return the character span of each token, without gaps: whitespace that a tokenizer skips belongs to the token
        after it."""
        return self._tokenise_batch([text])[0][1]

    def samples(
        self, samples: Sequence[RenderedConversation], *, room: int | None = None
    ) -> list[TokenisedConversation | TokenAlignmentError]:
        """Return each sample in tokens, or why it cannot be. room: tokens that are kept of a sample; of one that is far
        longer only a beginning with more than these is tokenised, where they are as in the whole."""
        shortened = [self._shorten(sample, room) for sample in samples]
        tokenised = self._tokenise(shortened)
        for i, (sample, (short, _)) in enumerate(zip(samples, shortened, strict=True)):
            tokens = tokenised[i]
            if isinstance(tokens, TokenisedConversation) and short is not sample:
                more = any(end > len(short.text) for _, end in sample.spans)
                tokenised[i] = replace(tokens, beginning=True, more=more)
        return tokenised

    def _tokenise(
        self, samples: Sequence[tuple[RenderedConversation, bool]]
    ) -> list[TokenisedConversation | TokenAlignmentError]:
        tokenised: list[TokenisedConversation | TokenAlignmentError] = []
        batch = self._tokenise_batch([sample.text for sample, _ in samples])
        for (sample, in_pieces), (ids, spans) in zip(samples, batch, strict=True):
            try:
                tokenised.append(self._align(sample, ids, spans, in_pieces))
            except TokenAlignmentError as error:
                tokenised.append(error)
        return tokenised

    def _shorten(self, sample: RenderedConversation, room: int | None) -> tuple[RenderedConversation, bool]:
        """Return as much of a sample as `room` needs, and True if a later edge falls inside a token: then this part too
        has to be tokenised in pieces."""
        if room is None or not is_far_longer(sample.text, room):
            return sample, False
        for in_pieces in (False, True):

            def tokens(sizes: Sequence[int], in_pieces: bool = in_pieces) -> list[Sequence[Any]]:
                return [
                    []
                    if isinstance(part, TokenAlignmentError)
                    else list(zip(part.ids, part.supervised, part.sizes, strict=True))
                    for part in self._tokenise([(sample.until(size), in_pieces) for size in sizes])
                ]

            enough = find_sufficient_size(sample.text, room, tokens, self.tokenizer)
            splits = None if enough is None else self._splits_token(sample, enough[0])
            if enough is None or splits is None:
                break
            if splits is in_pieces:
                return sample.until(enough[0]), in_pieces
        return sample, False

    def _splits_token(self, sample: RenderedConversation, beyond: int) -> bool | None:
        """True if a span's edge after `beyond` characters falls inside a token; None: not certain."""
        text = sample.text
        edges = [edge for span in sample.spans for edge in span if beyond <= edge < len(text)]
        for first in range(0, len(edges), _AT_ONCE):
            results = []
            for size in _AROUND:
                starts = {edge: max(0, edge - size) for edge in edges[first : first + _AT_ONCE]}
                batch = self._tokenise_batch([text[start : edge + size] for edge, start in starts.items()])
                results.append(
                    [
                        all(edge - start not in span for span in spans)
                        for (edge, start), (_, spans) in zip(starts.items(), batch, strict=True)
                    ]
                )
            if results[0] != results[1]:
                return None
            if any(results[0]):
                return True
        return False

    def _align(
        self, sample: RenderedConversation, ids: list[int], spans: list[Span], in_pieces: bool
    ) -> TokenisedConversation:
        edges = {edge for span in sample.spans for edge in span if edge <= len(sample.text)}
        cut = in_pieces or not edges <= {0, *(edge for span in spans for edge in span)}
        if cut:
            ids, spans = self._tokenise_pieces(sample.text, sorted(edges | {0, len(sample.text)}), ids)
        supervised = _mark_tokens_in_spans(spans, sample.spans)
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise TokenAlignmentError(f"the template writes {self.tokenizer.bos_token!r} twice at the beginning")
        sizes, previous = [], 0
        for token, (start, end) in zip(ids, spans, strict=True):
            sizes.append(0 if token in self._special else len(sample.text[max(start, previous) : end].encode()))
            previous = end
        last = next((i for i, (start, end) in enumerate(spans) if end > start >= sample.last), len(ids))
        return TokenisedConversation(ids, supervised, sizes, last, cut)

    def _tokenise_pieces(self, text: str, edges: list[int], whole: list[int]) -> tuple[list[int], list[Span]]:
        ids: list[int] = []
        spans: list[Span] = []
        for start, end in pairwise(edges):
            (piece, piece_spans), *_ = self._tokenise_batch([text[start:end]])
            ids += piece
            spans += [(start + low, start + high) for low, high in piece_spans]
        if self._decode(ids) != self._decode(whole):
            raise TokenAlignmentError(
                "a token reaches over the edge of an answer, and the tokenizer writes the parts differently; let the "
                "template end its generation prompt where a token ends"
            )
        return ids, spans

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _tokenise_batch(self, texts: list[str]) -> list[tuple[list[int], list[Span]]]:
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
            offsets = zip(batch["input_ids"], batch["offset_mapping"], strict=True)
            return [(ids, _close_gaps(spans)) for ids, spans in offsets]
        return [(ids, self._find_spans(text, ids)) for text, ids in zip(texts, batch["input_ids"], strict=True)]

    def _find_spans(self, text: str, ids: list[int]) -> list[Span]:
        """Return token spans for a tokenizer without offsets: by the length of the decoded prefixes of `ids`, each
        of which must be a prefix of the text."""
        ends = [0]
        for count in range(1, len(ids) + 1):
            decoded = self._decode(ids[:count])
            if decoded.endswith("\ufffd"):  # incomplete character: it ends with the token that completes it
                ends.append(ends[-1])
            elif text.startswith(decoded):
                ends.append(len(decoded))
            else:
                raise TokenAlignmentError(
                    "the tokenizer does not say where its tokens are, and does not write them as they were"
                )
        return list(pairwise(ends))


def _close_gaps(spans: Sequence[tuple[int, int]]) -> list[Span]:
    closed, previous = [], 0
    for start, end in spans:
        # Several tokens may share one character (its bytes), so a token may start before the previous one's end.
        closed.append((min(start, previous), max(end, previous)))
        previous = max(end, previous)
    return closed


def _mark_tokens_in_spans(tokens: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token's span whether it is in one of `spans`, which are in order and disjoint."""
    covered, k = [], 0
    for start, end in tokens:
        while k < len(spans) and spans[k][1] < end:
            k += 1
        # A token without characters belongs to a span that contains it, not to one that it precedes.
        covered.append(k < len(spans) and (spans[k][0] < start or (spans[k][0] == start < end)))
    return covered
