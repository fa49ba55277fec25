"""Tokenizers of GGUF files: the ids of the tokenizer that the file was made of."""

import io
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GemmaTokenizer, LlamaTokenizer

from flatshift.finetune.models.gguf_tokenizer import build_tokenizer, sentencepiece_model

spm = pytest.importorskip("sentencepiece")
SCRIPTS = [
    "Hello, world! It's 12,345.67 dollars (50%).",
    "Über die Straße geht's nach Köln — naïve façade",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "敏捷的棕色狐狸跳过懒狗。",
    "いろはにほへと ちりぬるを",
    "نص حكيم له سر قاطع",
    "ऋषियों को सताने वाले दुष्ट",
    "เป็นมนุษย์สุดประเสริฐ",
    "e\u0301 and \u00e9, \U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea",
]
TEXTS = [
    *SCRIPTS,
    "def f(x):\n\treturn x**2\n\n\n\tpass\r\n",
    "a  b   c     d         e",
    "\n\n\n\n",
    "\t\t\t x",
    " leading and trailing  ",
    "<eos>x<|turn|>y <|turn|> z",
    "",
]
MORE = ["\n\n", "\n", "\t\t", *("▁" * count for count in range(2, 10)), "<|turn|>"]


@pytest.fixture(scope="module")
def pieces() -> Any:
    """A SentencePiece BPE of many scripts, with tokens that its users defined."""
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(SCRIPTS * 3), model_writer=written, model_type="bpe", vocab_size=480, byte_fallback=True,
        hard_vocab_limit=False, character_coverage=0.98, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
        eos_piece="<eos>", bos_piece="<bos>", pad_piece="<pad>", user_defined_symbols=MORE, minloglevel=2,
        num_threads=1,
    )  # fmt: skip
    return spm.SentencePieceProcessor(model_proto=written.getvalue())


def fields_of(pieces: Any, architecture: str) -> dict[str, Any]:
    """The fields that llama.cpp's converter writes of a SentencePiece file."""
    count = range(pieces.vocab_size())
    defined = {pieces.piece_to_id(piece) for piece in MORE}
    kinds = [2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1 for i in count]
    tokens = [pieces.id_to_piece(i) for i in count]
    ggml = {
        "model": "llama",
        "tokens": [token.replace("▁", " ") if i in defined else token for i, token in enumerate(tokens)],
        "scores": [-1000.0 if i in defined else pieces.get_score(i) for i in count],
        "token_type": [4 if i in defined else kind for i, kind in enumerate(kinds)],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
    }
    return {"general.architecture": architecture} | {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def test_the_tokens_are_sentencepieces_own(pieces: Any, tmp_path: Path) -> None:
    built = build_tokenizer(fields_of(pieces, "gemma3"))
    built.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        own = text.replace("<eos>", "")  # a control token is no text to SentencePiece
        assert ids(built, own) == ids(again, own) == pieces.encode(own), own
        assert built.decode(ids(built, own)) == own
    assert ids(again, "<eos>") == [1] and again("a").input_ids[0] == 2, "specials, and the beginning of a text"
    assert (again.bos_token, again.eos_token, again.pad_token, again.unk_token) == ("<bos>", "<eos>", "<pad>", "<unk>")


def test_a_space_before_the_text_as_llama_has_it(pieces: Any) -> None:
    built = build_tokenizer(fields_of(pieces, "llama"))
    tokens = [pieces.id_to_piece(i) for i in range(pieces.vocab_size())]
    other = LlamaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=_merges(built))
    other.add_tokens([token for token in MORE if token.strip("▁")])
    for text in SCRIPTS:
        assert ids(built, text) == ids(other, text) and built.decode(ids(built, text)) == text


def _merges(tokenizer: Any) -> list[tuple[str, str]]:
    import json

    return [tuple(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]


def test_scores_and_merges_have_the_same_effect(pieces: Any, tmp_path: Path) -> None:
    """Of a tokenizer without its SentencePiece file, as exports make one."""
    built = build_tokenizer(fields_of(pieces, "gemma3"))
    proto = sentencepiece_model(built)
    assert proto is not None
    made = spm.SentencePieceProcessor(model_proto=proto)
    for text in TEXTS:
        assert made.encode(text.replace("<eos>", "")) == pieces.encode(text.replace("<eos>", ""))


def test_merges_that_scores_cannot_replace_are_refused(pieces: Any) -> None:
    """Learned merges are some of the ways to a token; by scores every way is taken."""
    built = build_tokenizer(fields_of(pieces, "gemma3"))
    tokens = [pieces.id_to_piece(i) for i in range(pieces.vocab_size())]
    some = GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=_merges(built)[::2])
    with pytest.raises(ValueError, match="cannot have the effect of this tokenizer's merges"):
        sentencepiece_model(some)


def test_merges_of_pieces_that_were_written_as_byte_level(pieces: Any) -> None:
    """llama.cpp's converter does so for Gemma 3 without its SentencePiece file."""
    fields = fields_of(pieces, "gemma3")
    built = build_tokenizer(fields)
    del fields["tokenizer.ggml.scores"]
    fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.add_bos_token": True}
    fields["tokenizer.ggml.merges"] = [" ".join(pair) for pair in _merges(built)]
    other = build_tokenizer(fields)
    assert [other(text).input_ids for text in TEXTS] == [built(text).input_ids for text in TEXTS]


def test_equal_scores_and_other_kinds_are_refused(pieces: Any) -> None:
    fields = fields_of(pieces, "llama")
    with pytest.raises(ValueError, match="the order of merges is lost"):
        build_tokenizer(fields | {"tokenizer.ggml.scores": [-1000.0] * pieces.vocab_size()})
    with pytest.raises(ValueError, match="vocabularies of the kind 't5' are not converted"):
        build_tokenizer(fields | {"tokenizer.ggml.model": "t5"})


# ------------------------------------------------------------------------------------------------- byte level


def byte_fields(pattern: str | None, pre: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    """A byte-level BPE whose words a pattern divides, and the fields of its file."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(ignore_merges=more.get("ignore_merges", False)))
    made.normalizer = normalizers.NFC() if pre == "qwen2" else None
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    if pre == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True)]
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([*split, byte]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(SCRIPTS, trainer)
    made.add_special_tokens([AddedToken("<eos>", normalized=False, special=True)])
    made.add_tokens([AddedToken("<|turn|>", normalized=False)])
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)  # type: ignore[arg-type]
    import json

    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    ggml = {
        "model": "gpt2", "pre": pre, "tokens": [*tokens, "[PAD900]"], "merges": merges, "eos_token_id": len(tokens) - 2,
        "token_type": [1] * (len(tokens) - 2) + [3, 4, 5],
    }  # fmt: skip
    return made, {"general.architecture": "llama"} | {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("pattern", "pre"),
    [(None, "gpt-2"), (None, "smollm"), (QWEN, "qwen2"), (QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1), "llama-bpe")],
    ids=["gpt-2", "smollm", "qwen2", "llama-bpe"],
)
def test_byte_level(pattern: str | None, pre: str, tmp_path: Path) -> None:
    source, fields = byte_fields(pattern, pre, ignore_merges=pre == "llama-bpe")
    built = build_tokenizer(fields)
    built.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ids(built, text) == ids(again, text) == source.encode(text, add_special_tokens=False).ids, text
    assert built.get_vocab() == source.get_vocab(), "padding of the embeddings is no token"


def test_a_merge_outside_the_vocabulary_is_refused() -> None:
    _, fields = byte_fields(None, "gpt-2")
    fields["tokenizer.ggml.merges"].append("\n a")
    with pytest.raises(ValueError, match="is none of its tokens"):
        build_tokenizer(fields)
