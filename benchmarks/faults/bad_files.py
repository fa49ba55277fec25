"""Files that must be refused: rows, features, finished runs, backbones, conversations and their templates."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.bad_inputs import DIGITS, MANY, ROWS, TRAIN, BadInput, backbone_with, files, jsonl


def bad_files(root: Path) -> list[BadInput]:
    """All of them, over the sandbox `root`."""
    return [*_rows_given(root), *_features(root), *_runs(root), *_backbones(root), *_chats(root)]


# -------------------------------------------------------------------------------------------------------- rows


def _rows_given(root: Path) -> Iterator[BadInput]:
    fine = "".join(json.dumps(record) + "\n" for record in ROWS).encode()
    lines: dict[str, bytes] = {
        "no object": b"[1, 2]",
        "null": b"null",
        "a number": b"3",
        "cut short": b'{"text": "a", "lab',
        "nothing known": b"text",
        "no text": b'{"label": "a"}',
        "null text": b'{"text": null, "label": "a"}',
        "a text of numbers": b'{"text": 3, "label": "a"}',
        "no label": b'{"text": "a"}',
        "a label list": b'{"text": "a", "label": [1]}',
        "an empty label": b'{"text": "a", "label": ""}',
        "twice a key": b'{"text": "a", "text": "b", "label": "a"}',
        "twice inside": b'{"text": "a", "label": "a", "m": {"k": 1, "k": 2}}',
        "not UTF-8": b'{"text": "\xff", "label": "a"}',
        "half a pair": b'{"text": "\\ud800", "label": "a"}',
        "deep": b'{"text": "a", "label": "a", "m": ' + b"[" * 900 + b"]" * 900 + b"}",
        "very deep": b"[" * 100_000,
        "digits": b'{"text": "a", "label": ' + MANY.encode() + b"}",
        "infinite": b'{"text": "a", "label": 1e999}',
        "NUL": b'{"text": "a\x00", "label": "a"}',
        "an id twice": b'{"text": "a", "label": "a", "id": 1}\n{"text": "b", "label": "b", "id": 1}',
        "an id of lists": b'{"text": "a", "label": "a", "id": [1]}',
        "UTF-16 half-way": "é".encode("utf-16"),
    }
    for name, line in lines.items():
        yield _train_rows(root, f"jsonl: {name}", "bad.jsonl", fine + line + b"\n", ("bad.jsonl:13", "bad.jsonl:14"))
    long = b'{"text": "' + b"a" * (70 << 20)
    wide = ",".join(f"c{i}" for i in range(20_000)).encode()
    whole: dict[str, tuple[str, bytes, str]] = {
        "empty": ("bad.jsonl", b"", "bad.jsonl"),
        "blank lines": ("bad.jsonl", b"\n\n \n", "bad.jsonl"),
        "an array that does not end": ("bad.json", json.dumps(ROWS, indent=1).encode()[:-1], "bad.json"),
        "an array named as lines": ("bad.jsonl", json.dumps(ROWS).encode(), "bad.jsonl:1"),
        "UTF-16": ("bad.jsonl", fine.decode().encode("utf-16"), "bad.jsonl"),
        "one class": ("bad.jsonl", b'{"text": "a", "label": "a"}\n' * 8, "task.kind"),
        "gz cut short": ("bad.jsonl.gz", gzip.compress(fine)[:-9], "bad.jsonl.gz"),
        "gz of nothing": ("bad.jsonl.gz", b"hello", "bad.jsonl.gz"),
        "xz cut short": ("bad.jsonl.xz", lzma.compress(fine)[:-9], "bad.jsonl.xz"),
        "xz of nothing": ("bad.jsonl.xz", b"hello", "bad.jsonl.xz"),
        "zst of nothing": ("bad.jsonl.zst", b"hello", "bad.jsonl.zst"),
        "a long line": ("bad.jsonl", long, "bad.jsonl:1"),
        "a long line in gz": ("bad.jsonl.gz", gzip.compress(b"{" + b" " * (300 << 20), 1), "bad.jsonl.gz:1"),
        "a long line in xz": ("bad.jsonl.xz", lzma.compress(b" " * (70 << 20), preset=0), "bad.jsonl.xz:1"),
        "unknown suffix": ("bad.doc", fine, "bad.doc"),
        "no suffix": ("bad", fine, "bad"),
        "csv without rows": ("bad.csv", b"text,label\n", "bad.csv"),
        "csv empty": ("bad.csv", b"", "bad.csv"),
        "csv a column twice": ("bad.csv", b"text,text,label\na,b,c\n", "bad.csv:1"),
        "csv too few fields": ("bad.csv", b"text,label\na,b\nc\n", "bad.csv:3"),
        "csv too many fields": ("bad.csv", b"text,label\na,b\nc,d,e\n", "bad.csv:3"),
        "csv open quote": ("bad.csv", b'text,label\na,b\n"c,d\n', "bad.csv:3"),
        "csv quote inside": ("bad.csv", b'text,label\na,b\n"c"x,d\n', "bad.csv:3"),
        "csv not UTF-8": ("bad.csv", b"text,label\na,b\n\xff,d\n", "bad.csv:3"),
        "csv other header": ("bad.csv", b"txt,label\na,b\nc,d\n", "bad.csv"),
        "csv wide header": ("bad.csv", wide + b"\n1\n", "bad.csv:2"),
        "csv wide header twice": ("bad.csv", wide.replace(b"c7,", b"c8,"), "bad.csv:1"),
        "tsv of commas": ("bad.tsv", b"text,label\na,b\n", "bad.tsv"),
        "parquet of nothing": ("bad.parquet", b"hello", "bad.parquet"),
        "parquet empty": ("bad.parquet", b"", "bad.parquet"),
        "parquet cut short": ("bad.parquet", _parquet()[:-20], "bad.parquet"),
        "parquet without its end": ("bad.parquet", _parquet() + b"x", "bad.parquet"),
        "parquet not UTF-8": ("bad.parquet", _parquet(text=b"\xff\xfe"), "bad.parquet:12"),
        "parquet a column twice": ("bad.parquet", _parquet(twice=True), "bad.parquet"),
        "parquet other columns": ("bad.parquet", _parquet(column="txt"), "bad.parquet"),
        "parquet compressed again": ("bad.parquet.gz", gzip.compress(_parquet()), "bad.parquet.gz"),
    }
    for name, (file, data, place) in whole.items():
        yield _train_rows(root, f"rows: {name}", file, data, (place,))


def _parquet(text: bytes = b"fine", column: str = "text", twice: bool = False) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"row {i}".encode() for i in range(11)] + [text]
    array = _unchecked(texts)
    names = [column, column if twice else "label"]
    table = pa.Table.from_arrays([array, pa.array([*"ab"] * 6)], names=names)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _unchecked(values: list[bytes]) -> Any:
    """A column of strings whose bytes nobody has looked at."""
    import pyarrow as pa

    binary = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), binary.buffers())


def _train_rows(root: Path, name: str, file: str, data: bytes, places: tuple[str, ...]) -> BadInput:
    return BadInput(name, (*TRAIN, "--data.train.files", file), places, files(root, {file: data}))


# ---------------------------------------------------------------------------------------------------- features


def _npy(header: bytes, data: bytes = b"\0" * 96, version: bytes = b"\x01\x00") -> bytes:
    padded = header + b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY" + version + len(padded).to_bytes(2, "little") + padded + data


def _features(root: Path) -> Iterator[BadInput]:
    rows = str(root / "rows.jsonl")

    def header(descr: str = "'<f8'", order: str = "False", shape: str = "(12, 1)") -> bytes:
        return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()

    arrays: dict[str, bytes] = {
        "empty": b"",
        "text": b"hello",
        "magic alone": b"\x93NUMPY",
        "negative shape": _npy(header(shape="(-12, 1)")),
        "both negative": _npy(header(shape="(-12, -1)")),
        "huge shape": _npy(header(shape="(12, 99999999999999999999)")),
        "huger shape": _npy(header(shape=f"(12, {DIGITS})")),
        "a shape of digits": _npy(header(shape=f"(12, {'9' * 5000})")),
        "a shape of text": _npy(header(shape="('a', 1)")),
        "a shape of floats": _npy(header(shape="(12.0, 1)")),
        "no tuple": _npy(header(shape="12")),
        "three dimensions": _npy(header(shape="(12, 1, 1)")),
        "no column": _npy(header(shape="(12, 0)")),
        "other rows": _npy(header(shape="(11, 1)")),
        "objects": _npy(header(descr="'|O'")),
        "text values": _npy(header(descr="'<U2'")),
        "unknown type": _npy(header(descr="'<z9'")),
        "no type": _npy(header(descr="None")),
        "a call in the header": _npy(b"__import__('os').getcwd()"),
        "brackets": _npy(b"(" * 8000),
        "garbage header": _npy(bytes(range(128, 250)) * 3),
        "nulls in the header": _npy(b"\0" * 200),
        "version 9": _npy(header(), version=b"\x09\x00"),
        "cut short": _npy(header())[:-90],
        "not finite": _npy(header(), data=b"\xff" * 96),
        "complex": _npy(header(descr="'<c16'"), data=b"\0" * 192),
        "booleans": _npy(header(descr="'|b1'")),
        "an archive": _zip(),
    }
    fine = _npy(header(), data=b"\0\0\0\0\0\0\xf0\x3f" * 12)
    for name, data in arrays.items():
        prepare = files(None, {"x.npy": data, "y.npy": fine})
        argv = ("select", "--pool", rows, "--target", rows, "--budget", "3", "--out", "out", "--method", "knn",
                "--pool-features", "x.npy", "--target-features", "y.npy")  # fmt: skip
        yield BadInput(f"npy: {name}", argv, ("x.npy", "--pool-features", "pool features", "jsonl:"), prepare)


def _zip() -> bytes:
    import numpy as np

    sink = io.BytesIO()
    np.savez(sink, a=np.zeros((12, 1)))
    return sink.getvalue()


# -------------------------------------------------------------------------------------------------- finished runs


def _runs(root: Path) -> Iterator[BadInput]:
    odd = {
        "nothing": b"",
        "a list": b"[]",
        "cut short": b'{"inputs": [',
        "a number": b"3",
        "deep": b"[" * 100_000,
        "digits": MANY.encode(),
    }
    commands = {
        "manifest.json": ("eval", "report", "export", "longer"),
        "stages/fine-tune/done.json": ("resume", "report"),
        "eval.json": ("report", "export", "resume"),
        "adapter/adapter_config.json": ("eval", "merge", "export"),
    }
    for file, names in commands.items():
        for number, (what, data) in enumerate(odd.items()):
            command = names[number % len(names)]
            yield _damaged(root, f"{command} over {file} with {what}", command, file, data)
    for what, data in (
        ("nothing", b""), ("a list", b"- a\n"), ("a tag", b"train: !!int abc\n"), ("nesting", b"[" * 9000),
        ("an unknown key", b"trian: 1\n"), ("not UTF-8", b"\xff\n"), ("a control character", b"backbone: \x92x\n"),
    ):  # fmt: skip
        yield _damaged(root, f"eval over recipe.resolved.yaml with {what}", "eval", "recipe.resolved.yaml", data)
    for command in ("eval", "merge", "export"):
        for what, data in (
            ("nothing", b""),
            ("text", b"hello"),
            ("a long header", b"\xff" * 8 + b"{}"),
            ("a list", _safetensors("[]")),
        ):
            file = "adapter/adapter_model.safetensors"
            yield _damaged(root, f"{command} over {file} with {what}", command, file, data)


def _damaged(root: Path, name: str, command: str, file: str, data: bytes) -> BadInput:
    def prepare(work: Path) -> None:
        shutil.copytree(root / "run", work / "run")
        (work / "run" / file).write_bytes(data)
        if command == "longer":
            (work / "run" / "stages" / "fine-tune" / "done.json").unlink()

    argv = {
        "resume": ("train", "--resume", "run"),
        "longer": ("train", "--resume", "run", "--train.steps", "2"),
        "eval": ("eval", "run"),
        "report": ("report", "run", "--out", "page.html"),
        "merge": ("merge", "run", "--out", "out"),
        "export": ("export", "run", "--out", "out"),
    }[command]
    return BadInput(name, argv, (Path(file).name, "run"), prepare)


def _safetensors(header: str, data: bytes = b"") -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


# ----------------------------------------------------------------------------------------------------- backbones


def _backbones(root: Path) -> Iterator[BadInput]:
    config = json.loads((root / "backbone" / "config.json").read_text(encoding="utf-8"))
    configs: dict[str, Any] = {
        "auto_map a list": {**config, "auto_map": ["a"]},
        "auto_map of its own": {**config, "auto_map": {"AutoModel": "modeling_x.X"}},
        "no model type": {k: v for k, v in config.items() if k != "model_type"},
        "model type a number": {**config, "model_type": 3},
        "model type unknown": {**config, "model_type": "nonesuch"},
        "a list": [config],
        "null": None,
    }
    for key, values in {
        "hidden_size": (0, -1, 1.5, "abc", None, [256], 257, 512, 10**9, 10**30),
        "num_hidden_layers": (0, -1, "abc", 10**9),
        "num_attention_heads": (0, -1, "abc", 3, 10**12),
        "vocab_size": (0, -1, "abc", 10**12),
        "intermediate_size": (0, "abc", 10**12),
    }.items():
        configs |= {f"{key} {value}": {**config, key: value} for value in values}
    for name, value in configs.items():
        text = json.dumps(value)
        yield _backbone(root, f"config.json: {name}", "config.json", text.encode(), ("config.json", "backbone"))
    raw = {"nothing": b"", "cut short": b'{"model_type"', "deep": b"[" * 100_000, "not UTF-8": b"\xff\xfe{}"}
    for name, data in raw.items():
        yield _backbone(root, f"config.json: {name}", "config.json", data, ("config.json",))
    headers = {
        "nothing": b"",
        "text": b"hello there, this is text",
        "a long header": (1 << 62).to_bytes(8, "little") + b"{}",
        "a list": _safetensors("[]"),
        "a number": _safetensors('{"a": 3}'),
        "unknown type": _safetensors('{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}', b"\0" * 4),
        "negative offsets": _safetensors('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', b"\0" * 4),
        "negative shape": _safetensors('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"\0" * 4),
        "deep": _safetensors("[" * 50_000),
        "digits": _safetensors(f'{{"a": {{"dtype": "F32", "shape": [{DIGITS}], "data_offsets": [0, 4]}}}}', b"\0" * 4),
        "other tensors": _safetensors('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"\0" * 4),
    }
    for name, data in headers.items():
        yield _backbone(root, f"safetensors: {name}", "model.safetensors", data, ("model.safetensors", "backbone"))
    for file in ("tokenizer.json",):
        for name, data in {"nothing": b"", "a list": b"[]", "text": b"hello", "deep": b"[" * 5000}.items():
            yield _backbone(root, f"{file}: {name}", file, data, ("tokenizer",))


def _backbone(root: Path, name: str, file: str, data: bytes, places: tuple[str, ...]) -> BadInput:
    return BadInput(name, (*TRAIN, "--backbone", "backbone"), places, backbone_with(root, file, data))


# --------------------------------------------------------------------------------------------------------- chats


def _chats(root: Path) -> Iterator[BadInput]:
    data = ("--data.train.files", "chat.jsonl", "--data.test.files", "[]")
    turn = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "b"}
    messages: dict[str, Any] = {
        "none": [], "null": None, "text": "hello", "a number": 3, "no object": [1], "no role": [{"content": "a"}],
        "unknown role": [{"role": "usr", "content": "a"}, answer], "no content": [{"role": "user"}, answer],
        "content a number": [{"role": "user", "content": 3}, answer], "no answer": [turn],
        "answer first": [answer, turn], "two answers": [turn, answer, answer], "tools a word": [turn, answer],
        "a role of lists": [{"role": ["user"], "content": "a"}, answer],
    }  # fmt: skip
    for name, value in messages.items():
        record: dict[str, Any] = {"messages": value}
        if name == "tools a word":
            record["tools"] = "hammer"
        prepare = files(root, {"chat.jsonl": jsonl([{"messages": [turn, answer]}, record])})
        yield BadInput(f"chat: {name}", (*TRAIN, "--task", "{kind: chat, template: plain}", *data),
                       ("chat.jsonl:2",), prepare)  # fmt: skip
    for name, text in {
        "open block": "{% for m in messages %}",
        "unknown filter": "{{ messages | nonesuch }}",
        "unknown tag": "{% nonesuch %}",
        "raises": "{{ raise_exception('no') }}",
        "attribute of nothing": "{{ nobody.at.all }}",
        "endless": "{% for i in range(100000000000) %}x{% endfor %}",
        "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "empty": "",
    }.items():
        prepare = files(root, {"chat.jsonl": jsonl([{"messages": [turn, answer]}] * 4), "own.jinja": text})
        yield BadInput(f"template: {name}", (*TRAIN, "--task", "{kind: chat, template: own.jinja}", *data),
                       ("own.jinja", "chat.jsonl", "template"), prepare)  # fmt: skip
