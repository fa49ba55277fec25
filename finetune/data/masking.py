"""Token masking for masked language modelling (Devlin et al. 1810.04805, §3.1 and appendix A).

An encoded row carries a fixed mask, keyed by its id alone, for every evaluation. In training, a new mask is drawn each
time the row comes up (RoBERTa's dynamic masking, Liu et al. 1907.11692, §4.1), keyed by example and epoch and
independent of all other draws, so that a resumed run sees the same masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..seeds import numpy_generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE = -100
SPECIAL = -1
"""Word number of a token that is never masked."""
_MASKED, _REPLACED = 0.8, 0.1


class MaskingSettings(Protocol):
    """Settings of a task that masks tokens."""

    @property
    def share(self) -> float: ...
    @property
    def whole_words(self) -> bool: ...


@dataclass(frozen=True)
class Masking:
    """Random masking of tokens."""

    mask_id: int
    replacements: NDArray[np.int64]
    """Ids that random replacements are drawn from: the vocabulary without special tokens."""
    share: float = 0.15
    whole_words: bool = False

    @classmethod
    def of(cls, task: MaskingSettings, tokenizer: PreTrainedTokenizerBase) -> Masking:
        """Return the masking for `task` and tokenizer. Raises UserError if the tokenizer has no mask token, or cannot
        tell which tokens form a word."""
        if tokenizer.mask_token_id is None:
            raise UserError(
                "task.kind: masked-lm needs an encoder whose tokenizer has a mask token (BERT, RoBERTa), and this "
                "backbone's has none; take `task.kind: language-model` for a decoder"
            )
        if task.whole_words and not tokenizer.is_fast:
            raise UserError(
                "task.whole_words: this backbone's tokenizer does not say which tokens are a word; leave it off"
            )
        special = np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)
        replacements = np.setdiff1d(np.arange(tokenizer.vocab_size), special)
        return cls(tokenizer.mask_token_id, replacements, task.share, task.whole_words)

    def draw(
        self, ids: NDArray[np.int64], words: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return masked ids, and labels with the original token at chosen positions and −100 elsewhere; all (T,). ids:
        the row's original tokens. words: word number of each token, `SPECIAL` for those never masked."""
        chosen = self._choose(words, rng)
        fate = rng.random(len(chosen))
        random = self.replacements[rng.integers(0, len(self.replacements), size=len(chosen))]
        masked, labels = ids.copy(), np.full_like(ids, IGNORE)
        labels[chosen] = ids[chosen]
        unmasked = np.where(fate < _MASKED + _REPLACED, random, ids[chosen])
        masked[chosen] = np.where(fate < _MASKED, self.mask_id, unmasked)
        return masked, labels

    def fixed(
        self, ids: NDArray[np.int64], words: NDArray[np.int64], name: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the fixed mask for evaluation of the row with this name, the same in every run."""
        return self.draw(ids, words, numpy_generator(0, "mask", name))

    def _choose(self, words: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Return sorted positions of the tokens to predict: ⌊share·n + ½⌋ of n, at least one; with whole words at
        most that many, but at least the shortest word."""
        positions = np.flatnonzero(words != SPECIAL)
        missing = max(1, int(self.share * len(positions) + 0.5))
        if not self.whole_words:
            return np.sort(rng.permutation(positions)[:missing])
        numbers, first, sizes = np.unique(words[positions], return_index=True, return_counts=True)
        chosen: list[int] = []
        for word in rng.permutation(len(numbers)).tolist():
            if sizes[word] <= missing:
                chosen.append(word)
                missing -= int(sizes[word])
            if missing <= 0:
                break
        if not chosen:  # every word exceeds the share: take the shortest
            chosen = [int(sizes.argmin())]
        return np.sort(np.concatenate([positions[first[w] : first[w] + sizes[w]] for w in chosen]))


def unmask_tokens(masked: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Restore the row's original tokens, using the labels of masked ones."""
    return np.where(labels != IGNORE, labels, masked)
