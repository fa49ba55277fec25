"""Tokenizers of GGUF files: those of transformers that give the ids of the checkpoint that the file was made of.

A file has a vocabulary, and merges or scores, but no description of how a text becomes words. llama.cpp has it in its
code: by the kind of vocabulary for SentencePiece, by `tokenizer.ggml.pre` for byte-level BPE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_LLAMA3, _QWEN2 = _LETTERS + r"\p{N}{1,3}|" + _REST, _LETTERS + r"\p{N}|" + _REST
_OTHER_REST = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_TEKKEN = _CASES.replace("%s", "") + r"\p{N}|" + _OTHER_REST
_GPT4O = _CASES.replace("%s", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"\p{N}{1,3}|" + _OTHER_REST
_WORDS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **{"tekken": _TEKKEN, "gpt-4o": _GPT4O, "gpt-2": None, "smollm": None},
}
"""Pre-tokenizers of byte-level BPE: regular expression of a word; None: GPT-2's."""
_WHOLE = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
"""Pre-tokenizers that take a word of the vocabulary without its merges; the text begins with a token by default."""
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def build_tokenizer(fields: Mapping[str, Any]) -> Any:
    """Return transformers' tokenizer of the vocabulary in a file's `fields`.

    Raises ValueError if the file does not determine the ids of a text.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    own = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    tokens, vocabulary, architecture = own["tokens"], own.get("model"), fields["general.architecture"]
    types = own.get("token_type") or [_NORMAL] * len(tokens)
    used = 1 + max(index for index, kind in enumerate(types) if kind != _UNUSED)
    tokens, types = tokens[:used], types[:used]  # the rest only pads the embeddings
    pieces = vocabulary == "llama" or (vocabulary == "gpt2" and architecture == "gemma3" and "<0x0A>" in tokens)
    if pieces:
        tokens = [
            token.replace(" ", "\u2581") if kind != _CONTROL else token
            for token, kind in zip(tokens, types, strict=True)
        ]
        tokenizer, begins = _sentencepiece(own, tokens, types, architecture), vocabulary == "llama"
    elif vocabulary == "gpt2":
        tokenizer, begins = _byte_level(own, tokens), own.get("pre") in _WHOLE
    else:
        raise ValueError(f"vocabularies of the kind {vocabulary!r} are not converted")
    strips = pieces and "phi-3" in str(fields.get("general.name")).lower()  # as llama.cpp
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL, rstrip=strips and token not in _NOT_STRIPPED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token.strip("\u2581")  # merges make those of spaces
    ]
    tokenizer.add_tokens(added)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: own.get(f"{key}_token_id") for name, key in named.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=own.get("add_bos_token", begins) and ids["bos_token"] is not None,
        add_eos_token=own.get("add_eos_token", False) and ids["eos_token"] is not None,
        chat_template=fields.get("tokenizer.chat_template"),
        **{name: None if index is None else tokens[index] for name, index in ids.items()},
    )


def _sentencepiece(own: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], architecture: str) -> Any:
    """BPE over characters, with a mark for spaces and single bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = own.get("unknown_token_id")
    merges = _pairs(own["merges"]) if "merges" in own else _merges_by_score(vocabulary, tokens, types, own["scores"])
    unk_token = None if unknown is None else tokens[unknown]
    in_bytes = "<0x0A>" in vocabulary
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=in_bytes, unk_token=unk_token))
    decoder = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if architecture == "gemma3" or not own.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    else:
        decoder.append(decoders.Strip(content=" ", left=1))
        if architecture == "phi3":  # a space before every part of a text between added tokens
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


def _pairs(merges: Sequence[Any]) -> list[Any]:
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]


def _merges_by_score(
    vocabulary: Mapping[str, int], tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, in SentencePiece's order: what users defined first, then by score."""
    plain = [index for index, kind in enumerate(types) if kind == _NORMAL and len(tokens[index]) > 1]
    if len(plain) > 1 and len({scores[index] for index in plain}) == 1:
        raise ValueError("every token has the same score, so that the order of merges is lost")
    defined = [index for index, kind in enumerate(types) if kind == _USER_DEFINED]
    merges = []
    for index in [*defined, *sorted(plain, key=lambda index: -scores[index])]:
        token = tokens[index]
        pairs = ((token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1))
        merges += [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
    return merges


def sentencepiece_model(tokenizer: Any) -> bytes | None:
    """Return a SentencePiece file of transformers' `tokenizer`, with scores in the order of its merges; None if it is
    no BPE over characters.

    Raises ValueError if scores cannot have the effect of the merges.
    """
    model: dict[str, Any] = {"type": None}
    if tokenizer.is_fast:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] != "BPE" or not model["byte_fallback"] or tokenizer.unk_token is None:
        return None
    from sentencepiece import sentencepiece_model_pb2

    protocol: Any = sentencepiece_model_pb2
    vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    merges = _pairs(model["merges"])
    ranks = {merged: -rank for rank, merged in enumerate(dict.fromkeys("".join(pair) for pair in merges))}
    tokens = [f"[PAD{index}]" for index in range(max(vocabulary.values()) + 1)]
    types = [_UNUSED] * len(tokens)
    for token, index in vocabulary.items():
        byte = re.fullmatch("<0x[0-9A-F]{2}>", token) is not None
        tokens[index], types[index] = token, _BYTE if byte else _USER_DEFINED if index in added else _NORMAL
    types[tokenizer.unk_token_id] = _UNKNOWN
    scores = [float(ranks.get(token, -len(ranks))) for token in tokens]
    plain = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    made_by_scores = _merges_by_score(vocabulary, tokens, types, scores)
    ours, theirs = ([pair for pair in pairs if "".join(pair) in plain] for pairs in (made_by_scores, merges))
    if set(ours) != set(theirs) or ["".join(pair) for pair in ours] != ["".join(pair) for pair in theirs]:
        raise ValueError("scores, which llama.cpp needs, cannot have the effect of this tokenizer's merges")
    proto = protocol.ModelProto()
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = 2, _BYTE in types
    proto.trainer_spec.unk_id, proto.trainer_spec.unk_piece = tokenizer.unk_token_id, tokenizer.unk_token
    proto.normalizer_spec.name, proto.normalizer_spec.remove_extra_whitespaces = "identity", False
    proto.normalizer_spec.add_dummy_prefix = False
    for token, score, kind in zip(tokens, scores, types, strict=True):
        proto.pieces.add(piece=token, score=score, type=kind)
    return bytes(proto.SerializeToString())


def _byte_level(own: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """BPE over bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = own.get("pre", "default")
    if "merges" not in own:
        raise ValueError("it has no merges")
    if name not in _WORDS:
        raise ValueError(f"the pre-tokenizer {name!r} is not known here")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _pairs(own["merges"])
    if lost := next((merge for merge in merges if not {*merge, "".join(merge)} <= vocabulary.keys()), None):
        raise ValueError(f"its merge of {lost} is none of its tokens")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    pattern = _WORDS[name]
    words: list[Any] = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    if name == "smollm":
        words = [pre_tokenizers.Digits(individual_digits=True)]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
