"""Filters on single texts: length, language, repetition.

Language is detected by script and by the commonest words: no model, about 10 µs a text. A heuristic for sentences and
longer: short or wordless texts stay undecided, and a language that is not in `hygiene_config.KNOWN` may be taken for a
related one. docs/hygiene.md has the shares of NTREX sentences that are recognised.

Repetition: Rae et al. 2021, arXiv 2112.11446, Table A1; shares of n-grams are of the characters in words. Two readings
are ours: an n-gram that occurs once is no repetition, and a character counts once, in however many n-grams it occurs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from flatshift.selection.hashing import WORDS, WordHashes, mix64, window_hashes
from flatshift.selection.hygiene import hygiene_config
from flatshift.selection.hygiene.store import bounded_batches

# Function words, roughly by frequency; a word may belong to several languages.
_COMMON = {
    "en": "the of and to a in is that was for it with as on be by at this are from or have an not which his he but "
    "they had were been has you i we their will would there what when who can more if about all she her do "
    "said its than so out up into my no after",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus "
    "er hat dass sie nach wird bei einer um am sind noch wie einem über einen so zum war haben nur oder aber "
    "vor zur bis ich",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont ou avec "
    "son mais comme nous cette qu aux été ses leur elle ont on je vous être sa ils deux même",
    "es": "de la que el en y a los del se las por un para con no una su al lo como más o pero sus le ya este fue ha "
    "sí porque esta son entre está cuando muy sin sobre ser también me hasta hay donde han desde todo nos "
    "durante uno",
    "it": "di e il la che in a per un è del non della una con sono i da si dei le al come più ma lo alla gli ha nel "
    "nella o anche delle dal questo suo su se essere stato degli ed loro dalla ai sua quando hanno era",
    "pt": "de a o que e do da em um para com não uma os no se na por mais as dos como mas foi ao ele das tem à seu "
    "sua ou ser quando muito há nos já está eu também só pelo pela até isso ela entre era depois são",
    "nl": "de van een het en in is dat op te zijn met voor niet aan er om ook als dan maar bij nog uit wordt door "
    "naar heeft hij was deze of werd over worden kan hebben tot meer zich haar ze ik zij wat dit kunnen geen",
    "sv": "och i att det som en på är av för med till den har de inte om ett han men var jag från så kan när vi "
    "eller ut också vid sig nu efter man hade alla under skulle ska dem denna varit blev mycket",
    "da": "og i at det er en til af på den med for de ikke der var et har han som men jeg fra vil så om kan skal "
    "eller også være blev havde efter ved nu hun sig over mange deres blive hvor",
    "nb": "og i det er på til som en av for at med den har de ikke var et han om men fra jeg vi så kan skal eller "
    "også etter ved nå hun seg over mange deres bli hvor ble være sin hadde dette",
    "fi": "ja on ei että se oli hän mutta joka ovat myös kun niin tai kuin sen olla sitä ole ollut mukaan vuoden "
    "vain hänen siitä jos jo nyt vielä sekä noin jälkeen kanssa he mitä tämä voi",
    "et": "ja on ei et see oli ta mis kui ka oma aga või seda kes nii siis nende välja ning ma pole olnud tema kuid "
    "juba selle mida veel pärast",
    "pl": "i w na z się nie do to że jest o jak po od za przez co dla są ale jego czy był przy być tym oraz ich "
    "może jej tak został też tylko które który już gdy było jako ma",
    "cs": "a v se na je že z do to s o i ve pro jako by k ale jeho které za který po od jsou byl si podle nebo jak "
    "tak už při jen bylo také když má aby jejich ze další byla co mezi",
    "hu": "a az és hogy nem is egy ez volt meg de csak mint már ki van el lesz ha még vagy aki ezt amely szerint "
    "azt után pedig akkor minden között lehet több olyan fel",
    "ro": "de și în a la care cu nu o pe că din să este un pentru mai au fi ca fost al sau după se ce sunt prin dar "
    "lui ale fie când acest această până fără sa îi le își într",
    "tr": "ve bir bu da de için ile olarak çok daha gibi olan ne ancak kadar en sonra var ama ise ya değil o her "
    "göre bunu olduğunu dedi tarafından hem diye nasıl",
    "id": "yang dan di untuk dari dengan itu ini pada tidak dalam akan adalah ke juga mereka telah oleh karena saya "
    "ada bahwa dia kami lebih sebagai atau seperti bisa sudah tetapi kepada orang menjadi setelah saat",
    "vi": "và của là có được trong cho không một người với những đã các này khi để từ về ra đến cũng như tôi ông "
    "trên tại vào nhiều sẽ sau phải họ rằng đó theo năm lại",
    "ru": "и в не на я быть с что а это он по к но они мы из у так за от вы для то как было же был до его о или бы "
    "если при только еще ещё также она их который были после чтобы все",
    "uk": "і в не на що та з у до як це за від для він є але його про я по бути вони ми також які щоб вона або їх "
    "був було були після під час який так ще має й із",
    "bg": "и на да се в не за от е са с че по ще това като до си но му при или а как след към което беше има които "
    "той бъде още през само тя те със бе",
    "ar": "في من على أن إلى التي عن هذا مع ما الذي كان هذه لا كما بعد ذلك قد بين هو كل وقد لم أو وفي وهو منذ حيث "
    "قال حتى إن أنه غير كانت عند خلال",
    "fa": "و در به از که این را با است برای آن یک شد خود تا کرد بر هم نیز می های شده او ما اما دو باید وی هر بود "
    "آنها گفت کند دارد اند",
    "ur": "کے میں کی ہے اور سے کا کو اس نے پر ہیں کہ یہ وہ بھی نہیں تھا ایک کر گیا ان جو تو ہی لیے کیا تھے ہو اپنے "
    "گئی",
}  # fmt: skip

_SCRIPTS = {
    "el": "\u0370-\u03ff\u1f00-\u1fff",
    "he": "\u0590-\u05ff",
    "hi": "\u0900-\u097f",
    "bn": "\u0980-\u09ff",
    "ta": "\u0b80-\u0bff",
    "te": "\u0c00-\u0c7f",
    "th": "\u0e00-\u0e7f",
    "ka": "\u10a0-\u10ff",
    "hy": "\u0530-\u058f",
    "ko": "\u1100-\u11ff\uac00-\ud7af",
    "ja": "\u3040-\u30ff",
    "zh": "\u4e00-\u9fff",
}
_OF_SCRIPT = {code: re.compile(f"[{span}]") for code, span in _SCRIPTS.items()}
_ANY_SCRIPT = re.compile(f"[{''.join(_SCRIPTS.values())}]")
_LETTER = re.compile(r"[^\W\d_]")

_LANGUAGES_OF: dict[str, list[str]] = {}
for _code, _words in _COMMON.items():
    for _word in _words.split():
        _LANGUAGES_OF.setdefault(_word, []).append(_code)

_ORDER = {code: place for place, code in enumerate(_COMMON)}
_LEAST_SHARE = 0.1
_LEAST_WORDS = 2


def detect_language(text: str, *, prefer: Collection[str] = ()) -> tuple[str | None, float]:
    """Return (code, share): the language whose common words make up the largest share of the text's words.

    (None, share) if that share is below 0.1 or rests on fewer than two words. A language of `prefer` wins unless
    another has at least two such words more; further ties go by the order of `hygiene_config.KNOWN`. A text of
    which at least half is in a script of one language is in that language: share is then the share of letters.
    """
    if not text.isascii() and _ANY_SCRIPT.search(text):
        code, share = _detect_by_script(text)
        if code is not None:
            return code, share
    words = WORDS.findall(text.lower())
    hits = Counter(code for word in words for code in _LANGUAGES_OF.get(word, ()))
    if not hits:
        return None, 0.0
    best = max(hits, key=lambda code: (hits[code] + 1.5 * (code in prefer), -_ORDER[code]))
    share = hits[best] / len(words)
    return (None if hits[best] < _LEAST_WORDS or share < _LEAST_SHARE else best), share


def _detect_by_script(text: str) -> tuple[str | None, float]:
    letters = len(_LETTER.findall(text))
    counts = {code: len(pattern.findall(text)) for code, pattern in _OF_SCRIPT.items()}
    if counts["ja"] and counts["ja"] + counts["zh"] >= letters / 2:  # kana together with Chinese characters
        return "ja", min((counts["ja"] + counts["zh"]) / max(letters, 1), 1.0)
    best = max(counts, key=counts.__getitem__)
    share = min(counts[best] / max(letters, 1), 1.0)  # vowel signs count for their script, but are not letters
    return (best, share) if share >= 0.5 else (None, share)


_PARAGRAPH = re.compile(r"\n{2,}")
_WORDS_AT_ONCE = 1 << 17


def repetition_shares(texts: Sequence[str], *, top: int = 3, repeated: int = 6) -> dict[str, np.ndarray]:
    """Return name → (n,) float64 in [0, 1], 0 if a text is too short.

    top: number of n = 2, 3, … for the commonest n-gram. repeated: number of n = 5, 6, … for repeated n-grams.
    """
    lines = np.array([_repeated_shares(text.split("\n")) for text in texts]).reshape(-1, 2)
    paragraphs = np.array([_repeated_shares(_PARAGRAPH.split(text)) for text in texts]).reshape(-1, 2)
    shares = {
        "repeated lines": lines[:, 0],
        "characters in repeated lines": lines[:, 1],
        "repeated paragraphs": paragraphs[:, 0],
        "characters in repeated paragraphs": paragraphs[:, 1],
    }
    batches = list(bounded_batches([WORDS.findall(text.lower()) for text in texts], _WORDS_AT_ONCE)) or [[]]
    results = [_ngram_shares(batch, top, repeated) for batch in batches]
    for name in results[0]:
        shares[name] = np.concatenate([result[name] for result in results])
    return shares


def _repeated_shares(pieces: list[str]) -> tuple[float, float]:
    """Return the share of the non-blank pieces that repeat an earlier one, and of the characters in them."""
    pieces = [stripped for piece in pieces if (stripped := piece.strip())]
    if len(pieces) < 2:
        return 0.0, 0.0
    previous: set[str] = set()
    count = characters = 0
    for piece in pieces:
        if piece in previous:
            count += 1
            characters += len(piece)
        previous.add(piece)
    return count / len(pieces), characters / sum(map(len, pieces))


def _ngram_shares(words: list[list[str]], top: int, repeated: int) -> dict[str, np.ndarray]:
    codes, counts = WordHashes().codes(words)
    lengths = np.fromiter((len(word) for text in words for word in text), dtype=np.int64, count=len(codes))
    text_of = np.repeat(np.arange(len(words)), counts)
    total = np.maximum(np.bincount(text_of, weights=lengths, minlength=len(words)), 1)
    before = np.append(0, np.cumsum(lengths))  # characters in all words before each one
    starts = np.cumsum(counts) - counts
    shares = {}
    for n in range(2, 2 + top):
        position, owner, kind, times, _ = _ngram_occurrences(codes, counts, starts, n)
        covered = np.where(times[kind] > 1, times[kind] * (before[position + n] - before[position]), 0)
        # The commonest n-gram, the longest if several are; overlapping occurrences may exceed the text.
        rank = np.zeros(len(words), np.int64)
        np.maximum.at(rank, owner, times[kind])
        largest = np.zeros(len(words))
        np.maximum.at(largest, owner, np.where(times[kind] == rank[owner], covered, 0))
        shares[f"characters in the commonest {n}-gram"] = np.minimum(largest / total, 1.0)
    for n in range(5, 5 + repeated):
        position, _, _, _, again = _ngram_occurrences(codes, counts, starts, n)
        change = np.zeros(len(codes) + 1, np.int64)
        np.add.at(change, position[again], 1)
        np.add.at(change, position[again] + n, -1)
        covered = np.bincount(text_of, weights=lengths * (np.cumsum(change[:-1]) > 0), minlength=len(words))
        shares[f"characters in repeated {n}-grams"] = covered / total
    return shares


def _ngram_occurrences(
    codes: np.ndarray, counts: np.ndarray, starts: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return for every n-gram its position among all words, its text, its kind within the text, the count of each kind,
    and whether it occurred in the text before."""
    hashes, window_counts = window_hashes(codes, counts, n)
    owner = np.repeat(np.arange(len(counts)), window_counts)
    position = (
        np.arange(len(hashes))
        - np.repeat(np.cumsum(window_counts) - window_counts, window_counts)
        + np.repeat(starts, window_counts)
    )
    key = mix64(hashes + owner.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    order = np.argsort(key, kind="stable")  # positions ascend within a kind
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = key[order][1:] != key[order][:-1]
    kind = np.empty(len(order), np.int64)
    kind[order] = np.cumsum(opens) - 1
    again = np.empty(len(order), dtype=bool)
    again[order] = ~opens
    return position, owner, kind, np.bincount(kind), again


Verdict = tuple[str, np.ndarray, np.ndarray]
"""(rule in words, (n,) bool: broken, (n,) float64: the value compared with the limit)"""


def apply_filters(texts: Sequence[str], settings: hygiene_config.Hygiene) -> Iterator[tuple[str, Verdict]]:
    """Yield (cause, verdict) of every enabled rule, in the order in which drops are attributed."""
    if settings.length is not None:
        for verdict in check_length(texts, settings.length):
            yield "length", verdict
    if settings.language is not None:
        yield "language", check_language(texts, settings.language)
    if settings.repetition is not None:
        for verdict in check_repetition(texts, settings.repetition):
            yield "repetition", verdict


def check_length(texts: Sequence[str], limits: hygiene_config.LengthFilter) -> Iterator[Verdict]:
    """Check the number of characters, without blanks at both ends, and of words."""
    characters = np.array([len(text.strip()) for text in texts], dtype=np.float64)
    yield f"fewer than {limits.min_chars} characters", characters < limits.min_chars, characters
    if limits.max_chars is not None:
        yield f"more than {limits.max_chars} characters", characters > limits.max_chars, characters
    if limits.min_words > 0 or limits.max_words is not None:
        words = np.array([len(WORDS.findall(text)) for text in texts], dtype=np.float64)
        yield f"fewer than {limits.min_words} words", words < limits.min_words, words
        if limits.max_words is not None:
            yield f"more than {limits.max_words} words", words > limits.max_words, words


def check_language(texts: Sequence[str], settings: hygiene_config.Language) -> Verdict:
    """Check the language; the value is the share of common words of the detected language (1 for its own script)."""
    detected = [detect_language(text, prefer=settings.keep) for text in texts]
    broken = [settings.undecided == "drop" if code is None else code not in settings.keep for code, _ in detected]
    return f"not {' or '.join(settings.keep)}", np.array(broken, dtype=bool), np.array([share for _, share in detected])


def check_repetition(texts: Sequence[str], limits: hygiene_config.Repetition) -> Iterator[Verdict]:
    """Check each share of `repetition_shares` against its limit, in texts of at least `limits.min_words` words."""
    limit_of = {"repeated lines": limits.lines, "repeated paragraphs": limits.lines}
    limit_of |= {
        "characters in repeated lines": limits.line_chars,
        "characters in repeated paragraphs": limits.line_chars,
    }
    limit_of |= {f"characters in the commonest {n}-gram": limit for n, limit in enumerate(limits.top_ngrams, start=2)}
    limit_of |= {f"characters in repeated {n}-grams": limit for n, limit in enumerate(limits.repeated_ngrams, start=5)}
    long = np.array([len(WORDS.findall(text)) >= limits.min_words for text in texts], dtype=bool)
    long_texts = [text for text, enough in zip(texts, long, strict=True) if enough]
    for name, shares in repetition_shares(
        long_texts, top=len(limits.top_ngrams), repeated=len(limits.repeated_ngrams)
    ).items():
        values = np.full(len(texts), np.nan)
        values[long] = shares
        yield f"{name} above {limit_of[name]:g}", values > limit_of[name], values
