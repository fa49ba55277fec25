"""Build the samples that ship in `finetune/samples/` from a folder with the raw `pool/`, `tasks/` and `instruct/`.

    python -m scripts.build_samples --data DIR

Deterministic: every draw is keyed by `--seed` and a name, and the same inputs give the same bytes (for one version of
liblzma). Only pool rows of licence class `open` whose source is in `SOURCES` are used, so that every shipped passage
has a named licence. Tags are stored apart from the texts: selectors never see them.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flatshift.finetune import atomic
from flatshift.finetune.seeds import numpy_generator

OUT = Path(__file__).resolve().parent.parent / "finetune" / "samples"
LIMIT_BYTES = 6_000_000

# Source (a regular expression over the whole source name) → licence. Sources not listed do not ship. Excluded although
# the raw folder calls them open, because the licence of the *text* is unclear: contraxsuite (contracts by third
# parties), the biomedical annotation sets and PubMedQA (an open annotation licence over publishers' text), and one
# novelist who died after 1954, so that the books are free wherever protection ends 70 years after the author's death.
SOURCES = {
    r"wikitasks_enwiki": "CC BY-SA 4.0",
    r"novels_(?!Forster).*": "public domain",
    r"arxiv_archive_.*": "CC0 1.0",
    r"medquad": "CC BY 4.0",
    r"sgd": "CC BY-SA 4.0",
    r"taskmaster4": "CC BY 4.0",
    r"commonvoice_en": "CC0 1.0",
    r"python311_stdlib": "PSF-2.0",
    r"nltk_product_reviews|nltk_pros_cons": "CC BY 4.0",
    r"nltk_inaugural|nltk_state_union": "public domain",
}

# Passages per domain of a general pool: half encyclopaedia and novels, text close to any target a minority.
MIXTURE = {
    "wikipedia": 7200,
    "books": 4800,
    "arxiv_cs": 1400,
    "arxiv_physics": 1000,
    "arxiv_math": 800,
    "arxiv_qbio": 1000,
    "arxiv_stat": 600,
    "arxiv_qfin": 500,
    "medical_qa": 1400,
    "dialogue": 1500,
    "cv_sentences": 1400,
    "code": 800,
    "reviews_product": 900,
    "speeches": 700,
}


@dataclass(frozen=True)
class SampleTarget:
    """One labelled target: its source file and the number of rows of each split."""

    name: str
    file: str
    rows: dict[str, int]
    labels: tuple[str, ...] | None = None  # keep only these; None keeps all
    dev_from_train: bool = False  # the source has no dev split: carve one out of its train split


TARGETS = (
    SampleTarget("scicite", "scicite.jsonl.xz", {"train": 2000, "dev": 500, "test": 800}),
    SampleTarget(
        "banking",
        "banking77.jsonl.xz",
        {"train": 1000, "dev": 200, "test": 400},
        # Ten of the 77 intents, chosen by name before any training for being about different things.
        labels=(
            "activate_my_card",
            "age_limit",
            "apple_pay_or_google_pay",
            "cash_withdrawal_charge",
            "change_pin",
            "edit_personal_details",
            "exchange_rate",
            "lost_or_stolen_phone",
            "request_refund",
            "terminate_account",
        ),
        dev_from_train=True,
    ),
    SampleTarget("snli", "snli_official_dev_resplit.jsonl.xz", {"train": 1500, "dev": 300, "test": 500}),
)


# Conversations: rows of each split; dev is drawn from the source's train split.
CHAT_ROWS = {"train": 600, "dev": 80, "test": 120}
PAIR_ROWS = {"train": 1200, "dev": 200, "test": 400}
CHAT_SECOND_QUESTION = "Just the number, please."


SENTENCES = 12
"""Sentences per language in `languages`."""


def normalize_text(text: str) -> str:
    """Return the casefolded words joined by one space: texts that differ only in the rest count as the same."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def shingles(text: str, width: int = 8) -> set[str]:
    """Return all runs of `width` consecutive words of the normalised text."""
    words = normalize_text(text).split()
    return {" ".join(words[i : i + width]) for i in range(len(words) - width + 1)}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_xz(path: Path, lines: Iterable[str]) -> int:
    """Write lines as .xz atomically; return the compressed size in bytes."""
    raw = io.BytesIO()
    for line in lines:
        raw.write(line.encode() + b"\n")
    data = lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    with atomic.atomic_file(path) as temporary:
        temporary.write_bytes(data)
    return len(data)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    return write_xz(path, (json.dumps(row, ensure_ascii=False) for row in rows))


def find_licence(source: str) -> str | None:
    return next((licence for pattern, licence in SOURCES.items() if re.fullmatch(pattern, source)), None)


def build_target(data: Path, target: SampleTarget, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Draw the splits of one target; no normalised text of a later split occurs in an earlier one.

    The source's train, dev and test rows stay in their split (dev may be drawn from train). Texts that occur twice, or
    in two splits, are dropped from the larger one.
    """
    rows = read_jsonl(data / "tasks" / target.file)
    if target.labels is not None:
        rows = [row for row in rows if row["label"] in target.labels]
    taken: set[str] = set()
    splits: dict[str, list[dict[str, Any]]] = {}
    for split in ("test", "dev", "train"):
        source_split = "train" if target.dev_from_train and split == "dev" else split
        candidates = [row for row in rows if row["split"] == source_split]
        order = numpy_generator(seed, "samples", target.name, split).permutation(len(candidates))
        chosen: list[dict[str, Any]] = []
        here: set[str] = set()
        for index in order:
            row = candidates[int(index)]
            # A premise belongs to one split only; inside a split it may occur with several hypotheses.
            key = normalize_text(row["text"])
            pair = key + "\t" + normalize_text(row.get("text2", ""))
            if not key or key in taken or pair in here:
                continue
            here.add(pair)
            chosen.append({name: row[name] for name in ("text", "text2", "label") if name in row})
            if len(chosen) == target.rows[split]:
                break
        if len(chosen) < target.rows[split]:
            raise SystemExit(f"{target.file}: only {len(chosen)} rows for {target.name}/{split}")
        taken |= {normalize_text(row["text"]) for row in chosen}
        splits[split] = [{"id": f"{target.name}-{split}-{i:04d}", **row} for i, row in enumerate(chosen)]
    return splits


def build_pool(
    data: Path, held_out: set[str], held_out_runs: set[str], seed: int
) -> tuple[list[dict[str, str]], list[tuple[str, ...]]]:
    """Draw the pool by `MIXTURE`, without held-out texts and passages that share an 8-word run with one.

    Returns rows `{id, text}` and tags `(id, domain, source, licence)` in the same, shuffled, order. Ids are positions
    in that order: they reveal nothing about the domain.
    """
    texts = read_jsonl(data / "pool" / "pool-0.text.jsonl.xz")
    with lzma.open(data / "pool" / "pool-0.tags.tsv.xz", "rt", encoding="utf-8") as lines:
        tags = [line.rstrip("\n").split("\t") for line in lines]
    by_domain: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    seen: set[str] = set()
    for row, (row_id, domain, source, licence_class) in zip(texts, tags, strict=True):
        if row["id"] != row_id:
            raise SystemExit(f"pool and tags disagree at {row['id']}")
        licence = find_licence(source)
        key = normalize_text(row["text"])
        if licence_class != "open" or licence is None or domain not in MIXTURE:
            continue
        if len(key) < 20 or key in seen or key in held_out:
            continue
        seen.add(key)
        by_domain[domain].append((row["text"], source, licence))
    drawn: list[tuple[str, str, str, str]] = []
    for domain, count in MIXTURE.items():
        candidates = by_domain[domain]
        order = numpy_generator(seed, "samples", "pool", domain).permutation(len(candidates))
        clean = (candidates[int(i)] for i in order if shingles(candidates[int(i)][0]).isdisjoint(held_out_runs))
        chosen = [(text, domain, source, licence) for text, source, licence in islice(clean, count)]
        if len(chosen) < count:
            raise SystemExit(f"only {len(chosen)} passages of {domain}")
        drawn += chosen
    order = numpy_generator(seed, "samples", "pool", "order").permutation(len(drawn))
    rows: list[dict[str, str]] = []
    pool_tags: list[tuple[str, ...]] = []
    for position, index in enumerate(order):
        text, *tag = drawn[int(index)]
        rows.append({"id": f"p{position:05d}", "text": text})
        pool_tags.append((f"p{position:05d}", *tag))
    return rows, pool_tags


def build_chat(data: Path, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Convert GSM8K to conversations of two questions: the problem and its solution, then the number alone.

    The calculator annotations (`<<48/2=24>>`) and the number's thousands separators are removed. Test rows come from
    the source's test split. Problems with a long solution are excluded, as the shipped backbone reads short rows.
    """
    rows = read_jsonl(data / "instruct" / "gsm8k.jsonl.xz")
    taken: set[str] = set()
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, count in reversed(CHAT_ROWS.items()):
        candidates = [row for row in rows if row["split"] == ("train" if split == "dev" else split)]
        order = numpy_generator(seed, "samples", "gsm8k", split).permutation(len(candidates))
        chosen: list[dict[str, Any]] = []
        for index in order:
            row = candidates[int(index)]
            solution, _, number = re.sub(r"<<[^>]*>>", "", row["answer"]).partition("\n#### ")
            if normalize_text(row["question"]) in taken or len(row["question"] + solution) > 600:
                continue
            taken.add(normalize_text(row["question"]))
            turns = (row["question"], solution, CHAT_SECOND_QUESTION, number.replace(",", ""))
            roles = ("user", "assistant", "user", "assistant")
            messages = [{"role": role, "content": turn.strip()} for role, turn in zip(roles, turns, strict=True)]
            chosen.append({"id": f"gsm8k-{split}-{len(chosen):04d}", "messages": messages})
            if len(chosen) == count:
                break
        splits[split] = chosen
    return splits


def build_pairs(data: Path, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Build preference pairs: SNLI premises with an entailed statement (chosen) and a contradicting one (rejected).

    The first statement of each kind in the source's order. No premise occurs in two splits.
    """
    lines: dict[str, dict[str, str]] = defaultdict(dict)
    for row in read_jsonl(data / "tasks" / "snli_official_dev_resplit.jsonl.xz"):
        lines[row["text"].strip()].setdefault(row["label"], row["text2"].strip())
    pairs = [
        {"prompt": premise, "chosen": statements["entailment"], "rejected": statements["contradiction"]}
        for premise, statements in lines.items()
        if {"entailment", "contradiction"} <= statements.keys()
    ]
    order = iter(numpy_generator(seed, "samples", "statements").permutation(len(pairs)).tolist())
    return {
        split: [{"id": f"statements-{split}-{k:04d}", **pairs[next(order)]} for k in range(count)]
        for split, count in PAIR_ROWS.items()
    }


def build_languages(data: Path) -> list[dict[str, Any]]:
    """Return the first sentences of NTREX-128 in 35 languages: the same ones in each."""
    rows = read_jsonl(data / "multilingual" / "ntrex128_35lang.jsonl.xz")
    chosen = [row for row in rows if row["id"] < SENTENCES]
    return [{"lang": row["lang"], "sentence": row["id"], "text": row["text"]} for row in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that holds pool/, tasks/, instruct/, multilingual/"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where to write (default: the package's own folder)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    total = 0
    held_out: set[str] = set()  # normalised texts of every split of every target
    held_out_runs: set[str] = set()
    for target in TARGETS:
        for split, rows in build_target(options.data, target, options.seed).items():
            size = write_rows(options.out / target.name / f"{split}.jsonl.xz", rows)
            total += size
            labels = dict(sorted(Counter(row["label"] for row in rows).items()))
            print(f"{target.name}/{split}: {len(rows)} rows, {size:,} bytes, {labels}")
            for text in (row[name] for row in rows for name in ("text", "text2") if name in row):
                held_out.add(normalize_text(text))
                held_out_runs |= shingles(text)

    for split, rows in build_chat(options.data, options.seed).items():
        size = write_rows(options.out / "gsm8k" / f"{split}.jsonl.xz", rows)
        total += size
        print(f"gsm8k/{split}: {len(rows)} conversations, {size:,} bytes")

    for split, rows in build_pairs(options.data, options.seed).items():
        size = write_rows(options.out / "statements" / f"{split}.jsonl.xz", rows)
        total += size
        print(f"statements/{split}: {len(rows)} pairs, {size:,} bytes")

    size = write_rows(options.out / "languages.jsonl.xz", languages := build_languages(options.data))
    total += size
    print(f"languages: {len(languages)} sentences, {size:,} bytes")

    pool, tags = build_pool(options.data, held_out, held_out_runs, options.seed)
    size_pool = write_rows(options.out / "pool.jsonl.xz", pool)
    size_tags = write_xz(options.out / "pool-tags.tsv.xz", ("\t".join(tag) for tag in tags))
    total += size_pool + size_tags
    print(f"pool: {len(pool)} passages, {size_pool:,} bytes; tags {size_tags:,} bytes")
    print("  domains", dict(Counter(tag[1] for tag in tags).most_common()))
    print("  licences", dict(Counter(tag[3] for tag in tags).most_common()))
    print(f"total {total:,} bytes of {LIMIT_BYTES:,}")
    if total > LIMIT_BYTES:
        raise SystemExit(f"the samples take {total:,} bytes, more than {LIMIT_BYTES:,}")


if __name__ == "__main__":
    main()
