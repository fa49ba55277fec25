"""Tokenizers trained on the user's texts by the five schemes of the mGPT study (Shliazhko et al., 2204.07580, §3).

    default      byte-level BPE
    case         default on lower-cased text; a flag before each letter that was a capital
    arithmetic   default, with each digit and each operator as a separate token
    combined     case and arithmetic together
    character    one token per character, bytes for characters outside the vocabulary

Every scheme is lossless: `decode(encode(text)) == text` for any text. Everything is in tokenizer.json (normalizer,
pre-tokenizer, model, decoder), which transformers and tokenizers load without our code. The paper does not specify
every detail. Our choices: each capital has its own flag (`NASA` takes four), placed before the space in front of the
word, so that a word has the same token at the start of a sentence and within it; capitals are A to Z and those in the
training text; a letter whose lower-case form does not map back to it is unchanged.
"""

from __future__ import annotations

import string
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
"""Marker before a letter that was a capital (ASCII's shift out): one byte, so one token."""
_ESCAPE = "\x0f"
_WRITTEN = ((_ESCAPE, _ESCAPE + "."), (FLAG, _ESCAPE + ","))
"""Escapes for the text's own escape and flag characters, applied in this order and undone in reverse."""
OPERATORS = "+-*/=<>^%×÷"
SPECIALS = ("<pad>", "<bos>", "<eos>")
LEAST = len(SPECIALS) + 256


def train_tokenizer(scheme: Scheme, texts: Sequence[str], *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `scheme` with at most `vocabulary` tokens on `texts`.

    It has <pad>, <bos> and <eos> (0, 1, 2) and adds none by itself. With few texts it may have fewer tokens than
    allowed. Raises UserError for an unknown scheme, fewer tokens than the bytes need, or no text.
    """
    from transformers import PreTrainedTokenizerFast

    if scheme not in SCHEMES:
        raise UserError(f"no tokenizer scheme is called {scheme!r}; there are {', '.join(SCHEMES)}")
    if vocabulary < LEAST:
        raise UserError(f"a vocabulary of {vocabulary} tokens is too small: bytes and special tokens take {LEAST}")
    if not any(texts):
        raise UserError("there is no text to learn a tokenizer from")
    if scheme == "character":
        tokenizer = _build_character_level(texts, vocabulary)
    else:
        tokenizer = _train_byte_level(scheme, texts, vocabulary)
    pad, bos, eos = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )


def find_capitals(texts: Sequence[str]) -> list[str]:
    """Return A to Z and the capitals of `texts` whose lower-case form is one character that maps back to them,
    sorted."""
    letters = {*string.ascii_uppercase}.union(*map(set, texts))
    return sorted(c for c in letters if c != c.lower() and len(c.lower()) == 1 and c.lower().upper() == c)


def _train_byte_level(scheme: Scheme, texts: Sequence[str], vocabulary: int) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    splits: list[Any] = []
    decoding: list[Any] = [decoders.ByteLevel()]
    if scheme in ("case", "combined"):
        letters = find_capitals(texts)
        # Replace capitals after a space first: their flag goes before the space.
        flags = [(" " + c, f"{FLAG} {c.lower()}") for c in letters] + [(c, FLAG + c.lower()) for c in letters]
        bpe.normalizer = normalizers.Sequence([normalizers.Replace(*pair) for pair in (*_WRITTEN, *flags)])
        decoding += [decoders.Replace(new, old) for old, new in (*flags, *reversed(_WRITTEN))]
        splits.append(pre_tokenizers.Split(FLAG, "isolated"))
    if scheme in ("arithmetic", "combined"):
        operators = Regex("[" + "".join(f"\\{c}" for c in OPERATORS) + "]")
        splits += [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Split(operators, "isolated")]
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.Sequence(decoding)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def _build_character_level(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Build a vocabulary of the most frequent characters (ties by code point), with bytes for all others."""
    from tokenizers import Tokenizer, decoders, models

    counts = Counter("".join(texts))
    characters = sorted(counts, key=lambda c: (-counts[c], c))[: vocabulary - LEAST]
    names = [*SPECIALS, *(f"<0x{i:02X}>" for i in range(256)), *characters]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
