"""Seeded mutations of valid inputs, by structure and by bytes.

A JSON file is taken apart into values and put together again with some of them other, missing, twice or nested; a
header keeps (or loses) the length that goes before it; a recipe and a grid are changed line by line. Half of all
mutations, and some on top of these, are of bytes: flips, cuts, repeats, and words that such files are made of.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NUMBERS = (
    "0", "-0", "1", "-1", "2", "0.5", "1e400", "-1e400", "5e-324", "1e-400", "9" * 400, "9" * 5000, "NaN", "Infinity",
    "-Infinity", ".nan", ".inf", "0x1F", "0o17", "1_000", "9223372036854775807", "9223372036854775808", "4294967296",
    "1e9", "1e18", "true", "null", "~", "1.0", "01", "--1", "1..2", "1e-4..1e-2:log",
)  # fmt: skip
_WORDS = (
    *_NUMBERS, "", " ", "''", '""', "[]", "{}", "[[]]", "{a: 1}", "no", "é", "\x00", "\x85", "\u2028",
    "\ufeff", "\ud7ff", "😀", "\\ud800", "\\u0000", "\\", "'", '"', "`", "\t", "\r", "\r\n", "\n", "&a", "*a",
    "!!int abc", "<<: *a", "? ", "- ", ": ", "#", "|", ">", "%YAML 1.2", "---", "...", "{" * 40, "[" * 40, "=", ",",
    "..", ":log", "a" * 300, "{{ x }}", "../../x", "~nobody/x", "hub:x@y:z", "sample:pool",
)  # fmt: skip
_BYTES = (b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc0\x80", b"\x80", b"\xf5", b"\x1a")

_RECIPE = """\
# a recipe
backbone: flatshift-5m
task: {kind: classify, labels: [a, b], multi: false}
data:
  train: {files: [rows.jsonl, 'b c.jsonl'], limit: 12}
  test: {files: ["größe.jsonl"]}
  holdout: 0.1
  columns: {text: body, id: number}
adapter: {rank: 8, alpha: rank, targets: [q_proj, v_proj], ranks: {q_proj: 4}, dropout: 0.05}
regularizer: {kind: ggpo, sigma: 0.05, beta: 0}
optimizer: {lr: 2e-3, betas: [0.9, 0.999], clip: null, schedule: linear}
train: {steps: 200, batch_size: 16, accumulate: 2, seed: 7, max_length: 64, patience: 3}
mesh: {dp: 2, schedule: gpipe}
eval: {bootstrap: 100, confidence: 0.9}
"""
_SECOND = """\
backbone: &name flatshift-t5-3m
task:
  kind: seq2seq
  source: "Translate: {text}\\n"
  target: '{label}'
data:
  train:
    weigh: tokens
    sources:
      one: {files: [a.jsonl], weight: 2}
      "two\\u00e9": {files: [b.jsonl], columns: {text: body}}
select:
  pool: {files: [pool.jsonl]}
  budget: 100
  method: {kind: gotd, epsilon: 0.05, rounds: 2}
  embedder: {kind: tfidf, dim: 64}
  hygiene: {}
warmup: {steps: 10, lr: 1e-3}
record: {steps: [1, 2, 4], sharpness: [2]}
tracker: {kinds: [tensorboard], project: *name}
sweep:
  grid:
    adapter.rank: [1, 2, 4]
    optimizer.lr: [1e-4..1e-2:log]
  seeds: 3
"""
_GRID = "adapter.rank=1,2,4\noptimizer.lr=1e-4..1e-2:log\nregularizer={kind: ggpo, beta: 0},plain\ntrain.steps=1..9"
_ROWS = [
    {"text": "one row", "label": "a", "id": 1, "more": {"deep": [1, 2.5, None, True]}},
    {"text": "größe 😀", "label": 2, "id": "two"},
    {"text": "a third", "label": 1.0, "text2": "b", "tags": ["x", "y"]},
]
_CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 1},
    {
        "messages": [
            {"role": "system", "content": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "content": "3", "name": "f"}, {"role": "assistant", "content": "c"},
        ],
        "tools": "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]",
    },
]  # fmt: skip
_METRICS = [
    {"stage": "fine-tune", "attempt": 1, "step": 1, "split": "train", "loss": 2.5, "tokens": 10, "lr": 0.001},
    {"stage": "fine-tune", "attempt": 1, "step": 2, "split": "dev", "loss": None, "tokens": 20},
    {"stage": "fine-tune", "attempt": 2, "step": 3, "split": "spike", "rewound_to": 1, "left_out": [[1, 3]]},
]
_HEADER = {
    "__metadata__": {"format": "pt"},
    "model.embed.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "model.layers.0.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [32, 40]},
}


class Mutator:
    """Mutations of one kind of file."""

    def __init__(self, name: str) -> None:
        """name: of `benchmarks.faults.mutations.NAMES`."""
        self._made = _MAKERS[name]
        self.seeds = self._made()
        self._structure = _STRUCTURE.get(name, _lines)

    @staticmethod
    def digest() -> str:
        """Of this file: counts of other mutations do not add up with these."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]

    def mutated(self, draw: random.Random, data: bytes | None = None) -> bytes:
        """A mutation of `data`, or of one of the seeds."""
        result = draw.choice(self.seeds) if data is None else data
        if draw.random() < 0.6:
            result = self._structure(result, draw)
        if draw.random() < 0.5:
            for _ in range(draw.choice((1, 1, 2, 4, 16))):
                result = _bytes(result, draw)
        return result


# --------------------------------------------------------------------------------------------------------- seeds


def _jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def _parquets() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    results = []
    for compression in ("none", "snappy"):
        sink = io.BytesIO()
        table = pa.table({
            "text": ["one", "two", "größe", None], "label": [1, 2, 3, 4], "id": ["a", "b", "c", "d"],
            "messages": [[{"role": "user", "content": "x"}]] * 4, "score": [1.5, None, 2.0, float("nan")],
        })  # fmt: skip
        pq.write_table(table, sink, compression=compression, use_dictionary=compression == "snappy")
        results.append(sink.getvalue())
    return results


def _npys() -> list[bytes]:
    import numpy as np

    results = []
    whole = np.arange(6, dtype=np.int8).reshape(2, 3)
    for array in (np.ones((3, 2)), np.ones((3, 2), dtype=np.float16, order="F"), whole):
        sink = io.BytesIO()
        np.save(sink, array)
        results.append(sink.getvalue())
    return results


def _with_length(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + b"\0" * 40


_MAKERS: dict[str, Callable[[], list[bytes]]] = {
    "recipe": lambda: [_RECIPE.encode(), _SECOND.encode()],
    "grid": lambda: [_GRID.encode(), b"adapter.rank=1,2", b"optimizer.lr=1e-4..1e-2:log"],
    "jsonl": lambda: [_jsonl(_ROWS)],
    "chat": lambda: [_jsonl(_CHATS)],
    "metrics": lambda: [_jsonl(_METRICS)],
    "csv": lambda: [b'text,label,id\none,a,1\n"two, ""q""",b,2\n"three\nlines",c\n', "text,label\ngröße,1\n".encode()],
    "parquet": _parquets,
    "npy": _npys,
    "safetensors": lambda: [_with_length(json.dumps(_HEADER).encode())],
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- by structure


def _lines(data: bytes, draw: random.Random) -> bytes:
    """Lines dropped, twice, moved or indented; a word of one put in another's place."""
    lines = data.split(b"\n")
    i = draw.randrange(len(lines))
    kind = draw.randrange(7)
    if kind == 0:
        del lines[i]
    elif kind == 1:
        lines.insert(draw.randrange(len(lines)), lines[i])
    elif kind == 2:
        lines[i] = b"  " * draw.randrange(4) + lines[i].lstrip()
    elif kind == 3:
        lines[i : i + 1] = [lines[i]] * draw.choice((2, 3, 100))
    else:
        head, sign, tail = _parted(lines[i], draw)
        word = draw.choice(_WORDS).encode()
        lines[i] = head + sign + (word if kind < 6 else word + tail)
    return b"\n".join(lines)


def _parted(line: bytes, draw: random.Random) -> tuple[bytes, bytes, bytes]:
    """The line before and behind one of the signs that values begin at."""
    places = [i for i, sign in enumerate(line) if sign in b":=,[{(\"' "]
    if not places:
        return line, b"", b""
    i = draw.choice(places)
    return line[: i + 1], draw.choice((b"", b" ")), line[i + 1 :].partition(b",")[2]


def _json_lines(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    i = draw.randrange(len(lines))
    lines[i] = _json(lines[i], draw)
    return b"\n".join(lines)


def _json(text: bytes, draw: random.Random) -> bytes:
    """One value of a JSON text other, missing, twice, or deeper; the text as it is where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _lines(text, draw)
    holders = [holder for holder in _holders(value) if holder]
    if not holders:
        return draw.choice(_WORDS).encode()
    holder = draw.choice(holders)
    key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = draw.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice(_WORDS)] = holder.pop(key)
    elif kind == 2:
        holder[key] = _nested(holder[key], draw.choice((1, 3, 70, 900)), draw)
    elif kind == 3:
        holder[key] = draw.choice(_VALUES)
    else:
        holder[key] = "\0mark\0"
    try:
        out = json.dumps(value, ensure_ascii=draw.random() < 0.5)
    except (ValueError, RecursionError):
        return text
    out = out.replace(json.dumps("\0mark\0"), draw.choice((draw.choice(_NUMBERS), json.dumps(draw.choice(_WORDS)))))
    if kind == 5 and isinstance(holder, dict):
        out = out.replace("{", f'{{"{key}": 1, ', 1)
    return out.encode("utf-8", "surrogatepass")


_VALUES: tuple[Any, ...] = (None, True, -1, 0, 2**63, 1.5, "", "x" * 1000, [], {}, [[]], ["a", 1], {"a": None}, 10**400)


def _nested(value: Any, depth: int, draw: random.Random) -> Any:
    for _ in range(depth):
        value = [value] if draw.random() < 0.5 else {"k": value}
    return value


def _holders(value: Any) -> list[Any]:
    results, level = [], [value]
    while level:
        inner = [one for one in level if isinstance(one, dict | list)]
        results += inner
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return results


def _header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors header, mutated as JSON; its length true or not."""
    length = int.from_bytes(data[:8], "little")
    text = _json(data[8 : 8 + length], draw)
    result = draw.choice((len(text), len(text), len(text), len(text) + 1, 0, 1 << 40, (1 << 64) - 1))
    return struct.pack("<Q", result) + text + data[8 + length :]


_SHAPES = (
    b"(-3, 2)", b"(3,)", b"()", b"(0, 0)", b"(3, 2, 1)", b"(99999999999, 2)", b"(1, " + b"9" * 30 + b")", b"[3, 2]",
    b"(3, 'a')", b"(True, 2)", b"None",
)  # fmt: skip


def _npy_header(data: bytes, draw: random.Random) -> bytes:
    """The dictionary of a .npy file with a value of it other; its length true."""
    size = int.from_bytes(data[8:10], "little")
    text = _lines(data[10 : 10 + size].rstrip(), draw).replace(b"\n", b" ")[:60_000]
    if draw.random() < 0.5:
        shape = draw.choice(_SHAPES)
        text = data[10 : 10 + size].rstrip()
        at = text.find(b"(")
        text = text[:at] + shape + text[text.find(b")") + 1 :] if at >= 0 else text
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return data[:8] + struct.pack("<H", min(len(text), 65535)) + text + data[10 + size :]


_STRUCTURE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "jsonl": _json_lines,
    "chat": _json_lines,
    "metrics": _json_lines,
    "safetensors": _header,
    "npy": _npy_header,
    "parquet": lambda data, draw: _bytes(data, draw),
}


# --------------------------------------------------------------------------------------------------------- by bytes


def _bytes(data: bytes, draw: random.Random) -> bytes:
    if not data:
        return draw.choice(_BYTES)
    i = draw.randrange(len(data))
    j = min(len(data), i + draw.choice((1, 1, 2, 4, 8, 64)))
    kind = draw.randrange(8)
    if kind == 0:
        return data[:i] + bytes([data[i] ^ (1 << draw.randrange(8))]) + data[i + 1 :]
    if kind == 1:
        return data[:i] + bytes([draw.randrange(256)]) + data[i + 1 :]
    if kind == 2:
        return data[:i] + data[j:]
    if kind == 3:
        return data[:j] + data[i:j] * draw.choice((1, 1, 8, 200)) + data[j:]
    if kind == 4:
        return data[:i] + draw.choice(_WORDS).encode() + data[i:]
    if kind == 5:
        return data[:i] + draw.choice(_BYTES) + data[i:]
    if kind == 6:
        return data[:i]
    return data[:i] + draw.choice(_WORDS).encode() + data[j:]
