"""Which special tokens a tokenizer puts around one text and around a pair, found by asking it once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Specials:
    """Token ids around the content: `prefix A suffix`, or `prefix A middle B pair_suffix`."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    middle: tuple[int, ...]
    pair_suffix: tuple[int, ...]
    segments: tuple[int, int] | None
    """token_type_ids of A with what precedes B, and of B with what follows; None where the model takes none."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, begin: bool = True) -> Specials:
        """The tokenizer's own template where it has one.

        Where it has none (GPT-2, most small decoders): the beginning-of-sequence token, if there is one, goes in
        front (unless `begin` is false: what a decoder writes begins with another token), and the separator or
        end-of-sequence token between the texts of a pair.
        """
        prefix, _, suffix = _runs(tokenizer, "a")
        pair_prefix, middle, pair_suffix = _runs(tokenizer, "a", "b")
        if begin and not prefix and not suffix and tokenizer.bos_token_id is not None:
            prefix = (tokenizer.bos_token_id,)
        if not middle and not pair_prefix and not pair_suffix:
            joint = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
            middle = (joint,) if joint is not None else tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
            pair_suffix = suffix
        segments = (0, 1) if "token_type_ids" in tokenizer.model_input_names else None
        if segments and tokenizer("a", "b", return_token_type_ids=True)["token_type_ids"][-1] == 0:
            segments = (0, 0)
        return cls(prefix, suffix, middle, pair_suffix, segments)


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text alone, without special ones around it."""
    return list(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that closes every trained answer: the end of sequence, else what the tokenizer's template ends with."""
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    suffix = Specials.of(tokenizer).suffix
    return suffix[0] if suffix else None


def _runs(tokenizer: PreTrainedTokenizerBase, *texts: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Special tokens before, between and after the content of an encoded text or pair."""
    encoded = tokenizer(*texts, return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    content = [i for i, is_special in enumerate(special) if not is_special]
    if not content:
        return tuple(ids), (), ()
    first, last = content[0], content[-1]
    between = tuple(ids[i] for i in range(first, last) if special[i])
    return tuple(ids[:first]), between, tuple(ids[last + 1 :])
