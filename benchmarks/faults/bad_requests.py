"""Requests that finished runs, plans, studies and stores must refuse."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.bad_inputs import ROWS, TRAIN, BadInput, backbone_with, files, good, jsonl, recipe


def bad_requests(root: Path) -> list[BadInput]:
    """All of them, over the sandbox `root`."""
    return [
        *_stores(root),
        *_plans(root),
        *_predictions(root),
        *_answers(root),
        *_prompts(root),
        *_samples(root),
        *_studies(root),
        *_tokenizers(root),
        *_empty_words(root),
    ]


# ------------------------------------------------------------------------------------------------------------- stores


SCHEMES = (
    *("ftp", "sftp", "zip", "tar", "github", "git", "hdfs", "webhdfs", "dbfs", "dir", "reference", "jlab", "smb"),
    *("libarchive", "oci", "box", "dropbox", "data", "cached", "simplecache", "blockcache", "cloud"),
)
"""Kinds of addresses that are fsspec's own, and one that is nobody's."""


def _stores(root: Path) -> Iterator[BadInput]:
    run, rows = str(root / "run"), str(root / "rows.jsonl")
    for kind in SCHEMES:
        address = f"{kind}://somewhere.example/a/rows.jsonl"
        lines = {
            "train": ("train", "recipe.yaml", "--out", "out", "--data.train.files", address),
            "select": ("select", "--pool", address, "--target", rows, "--budget", "3", "--out", "out"),
            "predict": ("predict", run, "--data", address, "--out", "out.jsonl"),
            "eval": ("eval", run, "--data", address),
            "push": ("push", run, address),
        }
        for name, argv in lines.items():
            yield BadInput(f"store: {name} {kind}", argv, (f"{kind}://",), good(root))


# -------------------------------------------------------------------------------------------------------------- plans


def _plans(root: Path) -> Iterator[BadInput]:
    config = json.loads((root / "backbone" / "config.json").read_text(encoding="utf-8"))
    texts: dict[str, bytes] = {
        "nothing": b"",
        "no JSON": b"model_type: llama",
        "cut short": b'{"model_type"',
        "a list": b"[]",
        "a number": b"3",
        "null": b"null",
        "deep": b"[" * 100_000,
        "deep inside": b'{"model_type": "llama", "a": ' + b"[" * 100_000,
        "digits": b"9" * 5000,
        "not UTF-8": b"\xff\xfe{}",
        "no model type": b"{}",
        "a foreign model type": b'{"model_type": "nonesuch"}',
        "a model type of lists": b'{"model_type": ["llama"]}',
    }
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads"):
        for value in (0, -1, "x", None, 10**9, 10**30, 1.5, [2]):
            if (key, value) != ("num_attention_heads", None) and (value is not None):
                texts[f"{key} {value}"] = json.dumps({**config, key: value}).encode()
    for name, data in texts.items():
        prepare = files(None, {"shape/config.json": data})
        yield BadInput(f"plan: config.json {name}", ("plan", "--model", "shape"), ("shape", "config.json"), prepare)
    lines: dict[tuple[str, ...], str] = {
        ("--node", "0"): "--node",
        ("--node", "3", "--gpus", "8xH100-80"): "--node",
        ("--model", ""): "--model",
        ("--model", "nonesuch"): "nonesuch",
        ("--gpus", ""): "--gpus",
        ("--gpus", "0xH100-80"): "H100",
        ("--gpus", "-1xH100-80"): "H100",
        ("--gpus", "99999999999999999999xH100-80"): "H100",
        ("--gpus", "8xnonesuch"): "nonesuch",
        ("--gpus", "8xH100-80@0"): "H100",
        ("--price", "0"): "--price",
        ("--tokens", "1e400"): "--tokens",
        ("--tokens", "0"): "--tokens",
        ("--out", ""): "--out",
        ("nonesuch",): "nonesuch",
    }
    for more, place in lines.items():
        yield BadInput(f"plan {' '.join(more) or 'nothing'}", ("plan", *more), (place,), good(root))


# -------------------------------------------------------------------------------------------- predictions and answers


def _predictions(root: Path) -> Iterator[BadInput]:
    run = str(root / "run")
    bad: dict[str, tuple[str, bytes]] = {
        "no JSON": ("bad.jsonl", b"nonesuch\n"),
        "no text": ("bad.jsonl", b'{"label": "a"}\n'),
        "a text of numbers": ("bad.jsonl", b'{"text": 3}\n'),
        "empty": ("bad.jsonl", b""),
        "not UTF-8": ("bad.jsonl", b'{"text": "\xff"}\n'),
        "gz cut short": ("bad.jsonl.gz", b"\x1f\x8b\x08\x00"),
        "parquet of nothing": ("bad.parquet", b"PAR1"),
        "csv too many fields": ("bad.csv", b"text\na,b\n"),
        "no column": ("bad.csv", b"txet\na\n"),
        "half a pair": ("bad.jsonl", b'{"text": "\\ud800"}\n'),
    }
    for name, (file, data) in bad.items():
        prepare = files(None, {file: data})
        argv = ("predict", run, "--data", file, "--out", "out.jsonl")
        yield BadInput(f"predict: {name}", argv, (file,), prepare)
        if name not in ("empty", "gz cut short", "parquet of nothing"):
            yield BadInput(f"predict, skipped: {name}", (*argv, "--bad-rows", "skip"), (file,), prepare)
    lines: dict[tuple[str, ...], str] = {
        ("--data", "good.jsonl"): "--out",
        ("--out", "out.jsonl"): "--data",
        ("--data", "good.jsonl", "--out", "out.doc"): "--out",
        ("--data", "good.jsonl", "--out", "good.jsonl"): "--out",
        ("--data", "good.jsonl", "--out", "out.jsonl", "--batch-size", "0"): "--batch-size",
        ("--data", "good.jsonl", "--out", "out.jsonl", "--device", "nonesuch"): "device",
        ("--data", "good.jsonl", "good.jsonl", "--out", "out.jsonl"): "twice",
    }
    for more, place in lines.items():
        prepare = files(None, {"good.jsonl": b'{"text": "a"}\n'})
        yield BadInput(f"predict {' '.join(more)}", ("predict", run, *more), (place,), prepare)


def _answers(root: Path) -> Iterator[BadInput]:
    writer, run = str(root / "writer"), str(root / "run")
    decoding: dict[tuple[str, ...], str] = {
        ("--temperature", "nan"): "--temperature",
        ("--temperature", "-1"): "--temperature",
        ("--temperature", "inf"): "--temperature",
        ("--temperature", "1e-30"): "temperature",
        ("--temperature", "hot"): "--temperature",
        ("--max-new-tokens", "0"): "--max-new-tokens",
        ("--max-new-tokens", "-5"): "--max-new-tokens",
        ("--max-new-tokens", "99999999999999999999"): "--max-new-tokens",
        ("--top-p", "2", "--temperature", "1"): "--top-p",
        ("--top-p", "0", "--temperature", "1"): "--top-p",
        ("--top-p", "nan", "--temperature", "1"): "--top-p",
        ("--top-p", "0.5"): "top_p",
        ("--seed", "18446744073709551616"): "--seed",
        ("--seed", "-1"): "--seed",
        ("--device", "nonesuch"): "device",
        ("--device", ""): "--device",
    }
    for more, place in decoding.items():
        for command in (("chat", writer), ("generate", writer, "--prompt", "a")):
            yield BadInput(f"{command[0]} {' '.join(more)}", (*command, *more), (place,))
    more_of_generate: dict[tuple[str, ...], str] = {
        ("--num-beams", "0"): "--num-beams",
        ("--num-beams", "2", "--temperature", "1"): "num_beams",
        ("--top-k", "0", "--temperature", "1"): "--top-k",
        ("--batch-size", "0"): "--batch-size",
        ("--max-new-tokens", "100000"): "positions",
        ("--data", "nonesuch.jsonl"): "nonesuch.jsonl",
        ("--out", ""): "--out",
        ("--out", "nonesuch/\n"): "nonesuch",
    }
    for more, place in list(more_of_generate.items())[:-1]:
        yield BadInput(f"generate {' '.join(more)}", ("generate", writer, "--prompt", "a", *more), (place, "context"))
    for data in (b"\xff\xfe\n", b"fine\n\xe4\n", b"caf\xe9"):
        place = f"standard input:{2 if data.startswith(b'fine') else 1}"

        @contextlib.contextmanager
        def read(data: bytes = data) -> Iterator[None]:
            reader, end = os.pipe()
            os.write(end, data)
            os.close(end)
            os.dup2(reader, 0)
            yield

        for command in ("chat", "generate"):
            yield BadInput(
                f"{command} reads {data!r}", (command, writer, "--max-new-tokens", "1"), (place,), around=read
            )
    for command in ("chat", "serve"):
        yield BadInput(f"{command} without a run", (command,), ("RUN_DIR",))
        yield BadInput(f"{command} with a run that writes nothing", (command, run), ("task.kind",))
        yield BadInput(f"{command} with a run twice", (command, writer, writer), ("twice",))
    for command in ("export", "merge"):
        yield BadInput(f"{command} to nowhere", (command, run, "--out", ""), ("--out",))


def _prompts(root: Path) -> Iterator[BadInput]:
    writer = str(root / "writer")
    fine = "text: '{text} {label}'\nlabels: {a: good, b: bad}\n"
    prompts = {
        "nothing": "",
        "null": "null\n",
        "a list": "- a\n",
        "a word": "hello\n",
        "no text": "labels: {a: good, b: bad}\n",
        "no label in the text": "text: '{text}'\nlabels: {a: good, b: bad}\n",
        "no labels": "text: '{text} {label}'\n",
        "one label": "text: '{text} {label}'\nlabels: {a: good}\n",
        "a label of no words": "text: '{text} {label}'\nlabels: {a: '', b: bad}\n",
        "a label of blanks": "text: '{text} {label}'\nlabels: {a: ' ', b: bad}\n",
        "labels that are the same": "text: '{text} {label}'\nlabels: {a: good, b: good}\n",
        "labels and choices": f"{fine}choices: ['{{text}}']\n",
        "an unknown key": f"{fine}nonesuch: 1\n",
        "another column": "text: '{txet} {label}'\nlabels: {a: good, b: bad}\n",
        "an open brace": "text: '{text {label}'\nlabels: {a: good, b: bad}\n",
        "wordings without a column": f"{fine}wordings: {{de: {{text: '{{text}} {{label}}'}}}}\n",
    }
    argv = ("eval", writer, "--data", str(root / "rows.jsonl"), "--prompt", "own.yaml")
    for name, text in prompts.items():
        places = ("own.yaml", "rows.jsonl")
        yield BadInput(f"prompt: {name}", argv, places, files(None, {"own.yaml": text}))
    more: dict[tuple[str, ...], str] = {
        ("--window", "5"): "--window",
        ("--overlap", "5"): "--overlap",
        ("--shots", "-1"): "--shots",
        ("--shots", "2"): "--shots",
        ("--shots", "99", "--shots-from", str(root / "rows.jsonl")): "--shots",
        ("--score", "nonesuch"): "--score",
        ("--prompt-language", "xx"): "--prompt-language",
        ("--samples", "2"): "--samples",
        ("--shot-seeds", "-1"): "--shot-seeds",
    }
    for flags, place in more.items():
        yield BadInput(f"prompt {' '.join(flags)[:40]}", (*argv, *flags), (place,), files(None, {"own.yaml": fine}))
    yield BadInput("prompt of nobody", (*argv[:-1], "nonesuch"), ("nonesuch",))


def _samples(root: Path) -> Iterator[BadInput]:
    writer, rows = str(root / "writer"), str(root / "rows.jsonl")
    argv = ("eval", writer, "--data", rows, "--samples", "2", "--out", "out", "--max-new-tokens", "2")
    more: dict[tuple[str, ...], str] = {
        ("--programs",): "'test'",
        ("--programs", "--pass-at", "3"): "--pass-at",
        ("--programs", "--pass-at", "0"): "--pass-at",
        ("--toxicity", "nonesuch"): "nonesuch",
        ("--toxicity", str(root / "run"), "--toxic-label", "nonesuch"): "--toxic-label",
        ("--toxicity", writer): "--toxicity",
        ("--temperature", "-1"): "--temperature",
        ("--temperature", "nan"): "--temperature",
        ("--temperature", "0", "--top-p", "0.5"): "top_p",
        ("--sample-seed", "-1"): "--sample-seed",
        ("--samples", "-1"): "--samples",
        ("--probe", "nonesuch"): "--probe",
        ("--group-by", "nonesuch"): "nonesuch",
    }
    for flags, place in more.items():
        yield BadInput(f"samples {' '.join(flags)[:60]}", (*argv, *flags), (place,))


# ------------------------------------------------------------------------------------------------------------ studies


def _studies(root: Path) -> Iterator[BadInput]:
    markers: dict[str, bytes] = {
        "nothing": b"",
        "a list": b"[]",
        "a number": b"3",
        "deep": b"[" * 100_000,
        "digits": b"9" * 5000,
        "not UTF-8": b"\xff{}",
        "cut short": b'{"format": ',
        "another format": b'{"format": 999}',
        "a format of lists": b'{"format": [1]}',
    }
    for name, data in markers.items():
        prepare = files(root, {"sweep/sweep.json": data})
        again = ("sweep", "recipe.yaml", "--out", "sweep", "--grid", "adapter.rank=1,2")
        yield BadInput(f"sweep.json with {name}: sweep", again, ("sweep",), prepare)
        yield BadInput(
            f"sweep.json with {name}: report", ("report", "sweep", "--out", "page.html"), ("sweep",), prepare
        )
    blocks: dict[str, str] = {
        "a file of nothing": "{tasks: {t: {file: ''}}}",
        "no file": "{tasks: {t: {train: 3}}}",
        "a task of nothing": "{tasks: {t: {}}}",
        "a method of nothing": "{methods: {m: null}}",
        "one learning rate": "{lr: [1e-3]}",
        "a learning rate of nan": "{lr: [.nan, 1e-3]}",
        "seeds 1": "{seeds: 1}",
        "an unknown baseline": "{methods: {m: {}}, baseline: nonesuch}",
        "an unknown control": "{methods: {plain: {}}, controls: {a: b}}",
        "tuning seeds of nothing": "{tuning_seeds: []}",
        "factor inf": "{equal_time_above: .inf}",
        "sigma nan": "{sharpness_sigma: .nan}",
    }
    for name, block in blocks.items():
        prepare = files(None, {"recipe.yaml": f"comparison: {block}\n"})
        yield BadInput(f"comparison: {name}", ("compare", "recipe.yaml", "--out", "out"), ("recipe.yaml",), prepare)
    rows = root / "rows.jsonl"
    for name, weights in {
        "far apart": ("1e-300", "1"),
        "farther": ("5e-324", "1e12"),
        "nan": (".nan", "1"),
        "inf": (".inf", "1"),
        "below 0": ("-1", "1"),
        "none": ("0", "0"),
        "words": ("much", "1"),
    }.items():
        text = "data:\n  train:\n    files: []\n    sources:\n"
        text += "".join(f"      s{i}: {{files: ['{rows}'], weight: {weight}}}\n" for i, weight in enumerate(weights))
        prepare = files(None, {"base.yaml": recipe(root), "recipe.yaml": f"extends: base.yaml\n{text}"})
        yield BadInput(f"mixture: weights {name}", tuple(TRAIN), ("weight", "sources"), prepare)


# --------------------------------------------------------------------------------------------------------- tokenizers


def _tokenizers(root: Path) -> Iterator[BadInput]:
    file = json.loads((root / "backbone" / "tokenizer.json").read_text(encoding="utf-8"))
    regex = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    changes: dict[str, dict[str, Any]] = {
        "a pattern without end": {"pre_tokenizer": regex},
        "an open pattern": {"pre_tokenizer": {**regex, "pattern": {"Regex": "(a"}}},
        "an unknown model": {"model": {"type": "nonesuch"}},
        "no model": {"model": None},
        "a model of lists": {"model": []},
        "an unknown normalizer": {"normalizer": {"type": "nonesuch"}},
        "an open normalizer": {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
        "added tokens of words": {"added_tokens": ["a"]},
        "another version": {"version": "9.9"},
    }
    for name, change in changes.items():
        long = jsonl([{**row, "text": "a" * 60 + "!"} for row in ROWS])
        prepare = backbone_with(root, "tokenizer.json", json.dumps({**file, **change}).encode(), {"long.jsonl": long})
        argv = (*TRAIN, "--backbone", "backbone", "--data.train.files", "long.jsonl")
        yield BadInput(f"tokenizer.json: {name}", argv, ("tokenizer",), prepare)


# -------------------------------------------------------------------------------------------------------- empty words


def _empty_words(root: Path) -> Iterator[BadInput]:
    run, rows = str(root / "run"), str(root / "rows.jsonl")
    lines: dict[tuple[str, ...], str] = {
        ("train", ""): "empty",
        ("train", "recipe.yaml", "--out", ""): "--out",
        ("train", "--resume", ""): "--resume",
        ("select", "--pool", "", "--target", rows, "--budget", "3", "--out", "out"): "--pool",
        ("select", "--pool", rows, "--target", rows, "--budget", "3", "--out", "out", "--method", ""): "--method",
        ("eval", ""): "empty",
        ("eval", run, "--data", ""): "--data",
        ("eval", run, "--group-by", ""): "--group-by",
        ("predict", "", "--data", rows, "--out", "out.csv"): "empty",
        ("predict", run, "--data", "", "--out", "out.csv"): "--data",
        ("report", ""): "empty",
        ("runs", ""): "empty",
        ("merge", ""): "empty",
        ("export", run, "--base-model", ""): "--base-model",
        ("export", run, "--license", ""): "--license",
        ("push", run, ""): "empty",
        ("tokenizer", ""): "empty",
        ("tokenizer", "flatshift-5m", "--data", ""): "--data",
        ("recipes", "show", ""): "empty",
        ("compare", "flat-comparison", "--out", ""): "--out",
        ("sweep", "recipe.yaml", "--out", "", "--grid", "adapter.rank=1,2"): "--out",
        ("forecast", "recipe.yaml", "--out", ""): "--out",
        ("demo", "--out", ""): "--out",
        ("train", "preference", "--task.answer", "x", "--out", "out"): "answer",
        ("train", "preference", "--task.answer", "{chosen}", "--out", "out"): "answer",
        ("train", "recipe.yaml", "--task", "{kind: completion, completion: ''}", "--out", "out"): "completion",
        ("train", "recipe.yaml", "--task", "{kind: seq2seq, target: ''}", "--out", "out"): "target",
    }
    for argv, place in lines.items():
        shown = " ".join(part if len(part) < 30 else f"…{part[-20:]}" for part in argv)
        yield BadInput(f"words: {shown!r}", argv, (place,), good(root))
