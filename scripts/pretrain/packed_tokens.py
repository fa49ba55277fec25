"""Pretraining text as one stream of tokens, `<bos> … <eos>` per document, in a memory-mapped file.

`pack_tokens` encodes many documents at once, on as many cores as the tokenizer uses, and writes 16 bits per token (32
for a larger vocabulary) with a JSON record of the counts; the record is written last, so that a file without one is
rewritten. `read_documents` and `read_passages` read the texts.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatshift.finetune import assets, atomic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = 0, 1, 2
AT_ONCE = 2048
"""Documents encoded in one batch."""
TARGETS = ("banking", "scicite", "snli")


@dataclass(frozen=True)
class PackedTokens:
    """Tokens of a file, and the size of their texts."""

    tokens: np.ndarray
    """(T,) uint16 or uint32, memory-mapped."""
    bytes: int
    """UTF-8 bytes of the texts."""
    documents: int


def read_documents(folder: Path, pattern: str) -> Iterator[str]:
    """Yield the texts of all .jsonl.xz files of `folder` that match, in name order."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise SystemExit(f"{folder} has no {pattern}")
    for file in files:
        with lzma.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def read_passages(file: Path, tags: Path | None, *, without: Collection[str] = frozenset()) -> Iterator[str]:
    """Yield the texts of a .jsonl.xz file except those in `without`.

    tags: a .tsv.xz of `id, domain, source, licence` in the same order; only rows whose licence class is `open` are
    kept.
    Raises SystemExit if the two files do not have the same rows.
    """
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        if tags is None:
            for line in lines:
                if (text := json.loads(line)["text"]) not in without:
                    yield text
            return
        with lzma.open(tags, "rt", encoding="utf-8") as result:
            for number, (line, tag) in enumerate(zip_longest(lines, result), start=1):
                parts = (tag or "").rstrip("\n").split("\t")
                row: dict[str, Any] = json.loads(line) if line else {}
                if row.get("id") != parts[0] or len(parts) < 4:
                    raise SystemExit(f"{tags}:{number}: not the tags of {file}; its row there is {row.get('id')!r}")
                if parts[3] == "open" and row["text"] not in without:
                    yield row["text"]


def sample_texts() -> frozenset[str]:
    """Return the texts that ship as samples: a backbone trained on them could not be warmed up or evaluated on them."""
    results: set[str] = set()
    names = ["pool", *(f"{target}/{split}" for target in TARGETS for split in ("train", "dev", "test"))]
    for name in names:
        with lzma.open(assets.sample_path(name), "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                results.update(row[key] for key in ("text", "text2") if key in row)
    return frozenset(results)


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: Iterator[str]) -> tuple[np.ndarray, int]:
    """Return all documents as one int32 stream in memory, each as `<bos> … <eos>`, and the UTF-8 bytes of their
    texts."""
    parts: list[np.ndarray] = []
    size = 0
    for text in texts:
        size += len(text.encode())
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        parts.append(np.array([BOS, *ids, EOS], dtype=np.int32))
    return np.concatenate(parts), size


def pack_tokens(
    folder: Path, name: str, tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], *, of: str
) -> PackedTokens:
    """Encode `texts` into `folder`/`name`.bin, unless the file already exists for the same inputs.

    of: short description of the texts, which must differ for different texts.
    """
    file, note = folder / f"{name}.bin", folder / f"{name}.json"
    made_of = hashlib.sha256(f"{of}\n{tokenizer.backend_tokenizer.to_str()}".encode()).hexdigest()
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    about = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
    whole = about.get("tokens", -1) * np.dtype(kind).itemsize == (file.stat().st_size if file.is_file() else 0)
    if about.get("of") != made_of or not whole:
        about = {"of": made_of, **_write_tokens(file, tokenizer, texts, kind)}
        atomic.write_json(note, about)
    return PackedTokens(np.memmap(file, dtype=kind, mode="r"), about["bytes"], about["documents"])


def _write_tokens(file: Path, tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], kind: Any) -> dict[str, int]:
    count = size = total = 0
    with atomic.atomic_file(file) as temporary, temporary.open("wb") as out:
        waiting = iter(texts)
        while some := list(islice(waiting, AT_ONCE)):
            encoded = tokenizer.backend_tokenizer.encode_batch(some, add_special_tokens=False)
            ids = np.array([token for one in encoded for token in (BOS, *one.ids, EOS)], dtype=kind)
            ids.tofile(out)
            count, size, total = count + len(ids), size + sum(len(text.encode()) for text in some), total + len(some)
    if not count:
        raise SystemExit(f"{file}: there is no text to make tokens of")
    return {"tokens": count, "bytes": size, "documents": total}
