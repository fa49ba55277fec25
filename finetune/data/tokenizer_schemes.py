"""Tokenizers trained on texts of one's own by the five schemes of the mGPT study (Shliazhko et al., 2204.07580, §3).

    default      byte-level BPE
    case         the same over text in small letters; a flag before each letter that was a capital
    arithmetic   the same; each digit and each operator is a token of its own
    combined     case and arithmetic together
    character    one token a character, bytes for what the vocabulary lacks

Every scheme is lossless: `decode(encode(text)) == text` for any text. All of it is in tokenizer.json (normalizer,
pre-tokenizer, model, decoder), which transformers and the tokenizers library read without code of ours. The paper names
the schemes and not their every rule; where they lie here: the flag is one for each capital (`NASA` takes four) and
stands before the blank of its word, so that a word has one token at the beginning of a sentence and within it; capitals
are those that the training text has, and A to Z; a letter whose small form does not lead back to it stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Scheme = Literal["default", "case", "arithmetic", "combined", "character"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
FLAG = "\x0e"
"""What stands before a letter that was a capital (ASCII's shift out): one byte, so one token."""
_ESCAPE = "\x0f"
_WRITTEN = ((_ESCAPE, _ESCAPE + "."), (FLAG, _ESCAPE + ","))
"""How a text's own escape and flag are written, in this order; read back in the other."""
OPERATORS = "+-*/=<>^%×÷"
SPECIALS = ("<pad>", "<bos>", "<eos>")
LEAST = len(SPECIALS) + 256
"""Tokens that any scheme needs: the bytes and the special ones."""


def train_tokenizer(scheme: Scheme, texts: Sequence[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `scheme` with at most `vocabulary` tokens, learnt from `texts`.

    It has <pad>, <bos> and <eos> (0, 1, 2) and adds none by itself. Few texts may give fewer tokens than allowed.

    Raises:
        UserError: an unknown scheme, fewer tokens than the bytes need, or no text.
    """
    from transformers import PreTrainedTokenizerFast

    if scheme not in SCHEMES:
        raise UserError(f"no tokenizer scheme is called {scheme!r}; there are {', '.join(SCHEMES)}")
    if vocabulary < LEAST:
        raise UserError(f"a vocabulary of {vocabulary} tokens is too small: bytes and special tokens take {LEAST}")
    if not any(texts):
        raise UserError("there is no text to learn a tokenizer from")
    made = _characters(texts, vocabulary) if scheme == "character" else _byte_level(scheme, texts, vocabulary)
    pad, bos, eos = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )


def capitals(texts: Sequence[str]) -> list[str]:
    """A to Z and the capitals of `texts` whose small letter is one character that leads back to them, sorted."""
    seen = {*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"}.union(*map(set, texts))
    return sorted(c for c in seen if c != c.lower() and len(c.lower()) == 1 and c.lower().upper() == c)


def _byte_level(scheme: Scheme, texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE behind what the scheme does to a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    cuts: list[Any] = []
    reading: list[Any] = [decoders.ByteLevel()]
    if scheme in ("case", "combined"):
        letters = capitals(texts)
        flags = [(" " + c, f"{FLAG} {c.lower()}") for c in letters] + [(c, FLAG + c.lower()) for c in letters]
        bpe.normalizer = normalizers.Sequence([normalizers.Replace(*pair) for pair in (*_WRITTEN, *flags)])
        reading += [decoders.Replace(new, old) for old, new in (*flags, *reversed(_WRITTEN))]
        cuts.append(pre_tokenizers.Split(FLAG, "isolated"))
    if scheme in ("arithmetic", "combined"):
        cuts += [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("[" + "".join(f"\\{c}" for c in OPERATORS) + "]"), "isolated"),
        ]
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.Sequence(reading)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def _characters(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """The most frequent characters (ties by code point), and bytes for all others."""
    from tokenizers import Tokenizer, decoders, models

    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    kept = sorted(counts, key=lambda c: (-counts[c], c))[: vocabulary - LEAST]
    names = [*SPECIALS, *(f"<0x{i:02X}>" for i in range(256)), *kept]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    made.add_special_tokens(list(SPECIALS))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made
