"""Texts far longer than a row: only some of them is tokenised, and what is kept is what all of it would have given."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flatshift.finetune.data import encoding
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.rows import Row
from flatshift.finetune.tasks import Chat, Classify, Completion, LanguageModel, MaskedLM, Preference, Seq2Seq
from flatshift.finetune.tasks.base import BaseTask

LENGTH = 16
_DIGITS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Threes counted from the right: the first of them depends on the end of the number."""


def texts() -> dict[str, str]:
    draw = random.Random(3)
    words = ["alpha", "Beta", "gamma's", "delta,", "naïve", "Straße", "e\u0301clair", "12345", "\n", "東京", "𝔘nicode"]
    signs = "abcde fghij\u0301\u0308klm.,;é漢字\u0e33\u200d👩\u200d👧\t"
    return {
        "words": " ".join(draw.choice(words) for _ in range(2000)),
        "signs": "".join(draw.choice(signs) for _ in range(8_000)),
        "spaces": "begin" + " " * 6_001 + "end",
        "digits": "1234567890" * 401,
        "one sign": "a" * 7_001,
        "marks": "e" + "\u0301" * 6_000,
        "blanks in words": "word  \n  word\u00a0" * 500,
    }


def _trained(model: Any, trainer: Any, *, normalizer: Any = None, splitter: Any = None) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    made.normalizer = normalizer or normalizers.NFC()
    if splitter is not None:
        made.pre_tokenizer = splitter
    made.decoder = decoders.ByteLevel()
    corpus = [part[:3000] for part in texts().values()]
    if splitter is None:  # as one word: pieces of it, so that there are merges over blanks
        corpus = [one[i : i + 12] for one in corpus for i in range(0, len(one), 12)]
    made.train_from_iterator(corpus, trainer)
    special = dict(zip(("unk_token", "pad_token", "eos_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


SPECIAL = ["<unk>", "<pad>", "</s>", "<mask>"]
_SIGNS = pre_tokenizers.ByteLevel.alphabet()


def bpe(**how: Any) -> PreTrainedTokenizerFast:
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=_SIGNS, show_progress=False, max_token_length=16
    )
    return _trained(models.BPE(unk_token="<unk>"), trainer, **how)


def unigram(**how: Any) -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False, max_piece_length=8
    )
    return _trained(models.Unigram(), trainer, **how)


def wordpiece(**how: Any) -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    return _trained(models.WordPiece(unk_token="<unk>"), trainer, **how)


TOKENIZERS = {
    "GPT-2's": lambda: bpe(splitter=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "a blank in front": lambda: bpe(splitter=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits from the right": lambda: bpe(
        splitter=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_DIGITS), "isolated"), pre_tokenizers.ByteLevel(use_regex=True)]
        )
    ),
    "Llama's, one word": lambda: bpe(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "Unigram": lambda: unigram(splitter=pre_tokenizers.Metaspace()),
    "Unigram, blanks folded": lambda: unigram(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        splitter=pre_tokenizers.Metaspace(prepend_scheme="first"),
    ),
    "BERT's": lambda: wordpiece(normalizer=normalizers.BertNormalizer(), splitter=pre_tokenizers.BertPreTokenizer()),
    "one sign for many": lambda: bpe(
        normalizer=normalizers.Sequence(
            [normalizers.NFKD(), normalizers.Replace("e", "everywhere e "), normalizers.Replace(Regex(r"\d+"), "")]
        ),
        splitter=pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "one sign of all": lambda: bpe(normalizer=normalizers.Replace(Regex(r"[^<>|\s/]"), "a")),
    "looks far ahead": lambda: bpe(
        normalizer=normalizers.Replace(Regex(r"a(?=[^z]{0,200}é)"), "b"), splitter=pre_tokenizers.Whitespace()
    ),
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


def rows_of(other: str = "short") -> list[Row]:
    rows = []
    for number, (name, text) in enumerate(texts().items()):
        values = {"text": text, "label": "ab"[number % 2], "prompt": text, "completion": text, "target": text}
        values |= {"chosen": text, "rejected": other}
        rows.append(Row(values, name, f"rows:{number + 1}", dict(values)))
    return rows


TASKS: dict[str, tuple[BaseTask, dict[str, Any]]] = {
    "language model": (LanguageModel(), {}),
    "language model, left": (LanguageModel(), {"truncation": "left"}),
    "masked": (MaskedLM(), {}),
    "classes": (Classify(), {"label_names": ("a", "b")}),
    "completion": (Completion(prompt="{prompt}", completion="{completion}"), {}),
    "completion, right": (Completion(prompt="{prompt}", completion="{label}"), {"truncation": "right"}),
    "completion, left": (Completion(prompt="{prompt}", completion="{label}"), {}),
    "seq2seq": (Seq2Seq(prompt="{prompt}", target="{target}"), {"decoder_start": 1}),
    "pairs": (Preference(), {}),
}


@pytest.mark.parametrize("name", TASKS)
def test_what_is_kept_is_that_of_the_whole(tokenizer: PreTrainedTokenizerFast, name: str, monkeypatch) -> None:
    task, how = TASKS[name]
    found = {}
    for called, least in {"cut": 64, "whole": 1 << 40}.items():
        monkeypatch.setattr(encoding, "_CHARACTERS", least)
        found[called] = encode(rows_of(), task=task, tokenizer=tokenizer, max_length=LENGTH, bad_rows="skip", **how)
    cut, whole = found["cut"], found["whole"]
    assert cut.examples == whole.examples and len(whole.examples) >= 3 and cut.skipped == whole.skipped
    assert (cut.truncated, cut.cut_answers, cut.lost_prompts) == (
        whole.truncated, whole.cut_answers, whole.lost_prompts,
    )  # fmt: skip
    assert whole.at_least is None and cut.at_least is not None
    assert LENGTH < cut.at_least <= max(cut.lengths) <= max(whole.lengths)


def talks() -> list[Row]:
    """Conversations that are long in a question, an answer, many turns, or the last of them."""
    rows = []
    for name, text in texts().items():
        asked, said = ({"role": role, "content": "short words"} for role in ("user", "assistant"))
        long = [{"role": role, "content": text} for role in ("user", "assistant")]
        forms = {
            "question": [long[0], said],
            "answer": [asked, long[1]],
            "turns": [{**turn, "content": text[:500]} for turn in [asked, said] * 6],
            "last": [asked, said, asked, long[1]],
            "middle": [asked, said, long[0], said, asked, said],
        }
        for form, turns in forms.items():
            values = {"messages": turns, "prompt": turns[:-1], "chosen": turns[-1:], "rejected": [said]}
            rows.append(Row(values, f"{name} {form}", f"rows:{len(rows) + 1}", values))
    return rows


TALKS: dict[str, BaseTask] = {
    "chat": Chat(max_truncated=1.0, max_unsupervised=1.0),
    "last turn": Chat(turns="last", score="generate", max_truncated=1.0, max_unsupervised=1.0),
    "edge in a token": Chat(template="EDGE", max_truncated=1.0, max_unsupervised=1.0),
    "pairs": Preference(chat=True),
}
EDGE = (
    "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}{% else %} A:{{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %} A:{% endif %}"
)


@pytest.mark.parametrize("name", TALKS)
def test_conversations_are_kept_as_those_of_the_whole(
    tokenizer: PreTrainedTokenizerFast, name: str, monkeypatch, tmp_path
) -> None:
    task = TALKS[name]
    if name == "edge in a token":
        (tmp_path / "edge.jinja").write_text(EDGE)
        task = task.replace(template=str(tmp_path / "edge.jinja"))
    found, said = {}, {}
    for called, least in {"cut": 64, "whole": 1 << 40}.items():
        monkeypatch.setattr(encoding, "_CHARACTERS", least)
        encoder = task.encoder(tokenizer, 32, bad_rows="skip")
        found[called] = encoder.add(talks())
        counts = encoder.counts if isinstance(task, Chat) else encoder._chat.counts
        said[called] = {name: getattr(counts, name) for name in ("rows", "bad", "samples", "supervised", "in_pieces")}
        if isinstance(task, Chat):
            said[called] |= {"cut_answers": counts.cut_answers, "unsupervised": counts.unsupervised}
    cut, whole = found["cut"], found["whole"]
    assert cut.examples == whole.examples
    if any("reaches over the edge" in one for one in whole.skipped):  # perhaps at an edge that nobody looks at any more
        return
    assert cut.skipped == whole.skipped and cut.truncated == whole.truncated
    assert cut.cut_answers == whole.cut_answers
    if isinstance(task, Chat):
        assert said["cut"] == said["whole"]
    assert whole.at_least is None and (cut.at_least is None or max(cut.lengths) <= max(whole.lengths))


def test_little_of_a_long_conversation_is_tokenised(monkeypatch) -> None:
    from flatshift.finetune.data.chat.tokens import ConversationTokeniser

    sizes: list[int] = []
    batch = ConversationTokeniser._tokenise_batch

    def counted(self: Any, given: list[str]) -> Any:
        sizes.extend(map(len, given))
        return batch(self, given)

    monkeypatch.setattr(ConversationTokeniser, "_tokenise_batch", counted)
    long, short = "some words of it " * 400_000, "yes"
    for turns in ([long, short], [short, long], [short, short, long, short]):
        roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        row = Row({"messages": roles}, "a", "rows:1")
        encoder = Chat().encoder(TOKENIZERS["GPT-2's"](), LENGTH)
        found = encoder.add([row])
        assert found.truncated == 1 and found.at_least is not None and sum(sizes) < 8 * (1 << 14)
        sizes.clear()


def test_little_of_a_long_text_is_tokenised(monkeypatch) -> None:
    tokenizer = TOKENIZERS["GPT-2's"]()
    sizes = []
    tokens = encoding.RowEncoder.tokens

    def counted(self: Any, given: list[str]) -> Any:
        sizes.extend(map(len, given))
        return tokens(self, given)

    monkeypatch.setattr(encoding.RowEncoder, "tokens", counted)
    row = Row({"text": "some words of it " * 400_000}, "a", "rows:1")
    found = encode([row], task=LanguageModel(), tokenizer=tokenizer, max_length=LENGTH)
    assert found.truncated == 1 and sum(sizes) < 7 * (1 << 14)


def test_the_least_number_is_said_as_one(monkeypatch) -> None:
    from flatshift.finetune.config import Train
    from flatshift.finetune.data.encoding import TruncationCounts
    from flatshift.finetune.errors import UserError

    monkeypatch.setattr(encoding, "_CHARACTERS", 64)
    tokenizer = TOKENIZERS["GPT-2's"]()
    lost = TruncationCounts("train")
    lost.add(encode(rows_of()[:2], task=LanguageModel(), tokenizer=tokenizer, max_length=LENGTH))
    with pytest.raises(UserError, match=r"at least [0-9,]+ tokens would hold"):
        lost.refuse(LanguageModel().max_truncated, Train(max_length=LENGTH, max_cut=0.1))
