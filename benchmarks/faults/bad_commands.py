"""Command lines and recipes that must be refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.bad_inputs import DIGITS, MANY, TRAIN, BadInput, Prepare, files, good, piped, recipe


def bad_commands(root: Path) -> list[BadInput]:
    """All of them, over the sandbox `root`."""
    return [*_settings(root), *_yaml(root), *_flags(root), *_sweeps(root), *_paths(root)]


# ---------------------------------------------------------------------------------------------------------- recipes


_WHOLE = ["0", "-1", "1.5", "abc", "[1]", "{a: 1}", "true", ".nan", ".inf", DIGITS, MANY, "1e400", "1e30"]
_REAL = ["-1", "abc", "[1]", "{a: 1}", "true", ".nan", ".inf", "1e400", f"-{DIGITS}"]
_SETTINGS: dict[str, list[str]] = {
    "train.steps": _WHOLE,
    "train.batch_size": [*_WHOLE, "1000000000"],
    "train.accumulate": [*_WHOLE, "1000000000"],
    "train.max_length": [*_WHOLE, "1"],
    "train.seed": ["-1", "1.5", "abc", DIGITS, "9223372036854775808"],
    "train.threads": ["0", "-1", "1000000", "abc"],
    "train.device": ["mps", "cuda:99", "cuda:x", "[cpu]", "1", "''"],
    "train.precision": ["fp8", "1", "null", "[fp32]"],
    "train.bootstrap": ["1"],
    "adapter.rank": [*_WHOLE, "1000000000"],
    "adapter.alpha": [*_REAL, "0"],
    "adapter.dropout": [*_REAL, "1"],
    "adapter.targets": ["nonesuch", "[nonesuch]", "{a: 1}", "1"],
    "adapter.ranks": ["{q_proj: 0}", "{q_proj: abc}", "[1]", "{nonesuch: 4}"],
    "adapter.alphas": ["{q_proj: 0}", "{q_proj: .inf}", "{q_proj: .nan}"],
    "optimizer.lr": [*_REAL, "0"],
    "optimizer.clip": ["-1", "0", "abc", ".nan"],
    "optimizer.eps": ["0", "-1", ".inf"],
    "optimizer.betas": ["[1, 1]", "[0.9]", "[0.9, 0.99, 0.999]", "[-1, 0.9]", "[a, b]", "0.9"],
    "optimizer.warmup": ["-1", "2", "abc"],
    "regularizer.kind": ["ggop", "1", "[sam]", "{a: 1}"],
    "regularizer": ["{kind: ggpo, sigma: -1}", "{kind: ggpo, sigma: .nan}", "{kind: sam, rho: abc}"],
    "data.holdout": ["-1", "2", "abc", "0.5"],
    "data.label_noise": ["-1", "2", ".nan"],
    "data.bad_rows": ["drop", "null"],
    "data.train.limit": ["0", "-1", "1000000"],
    "data.train.files": ["[]", "[nonesuch.jsonl]", "[1]", "[~nonesuch-user/rows.jsonl]"],
    "task": ["clasify", "{kind: 1}", "[classify]", "{kind: classify, labels: [a, a]}", "{kind: chat, date: tomorrow}"],
    "mesh.tp": ["0", "-1", "abc", "1000000"],
    "mesh.schedule": ["2f2b", "1"],
    "eval.bootstrap": ["0", "1000000000000"],
    "eval.confidence": ["1", "0", "2"],
    "record.steps": ["[-1]", "sometimes"],
    "tracker.kinds": ["[mlflow]", "wandb2"],
    "warmup.lr": ["0", "-1", ".inf"],
}


def _settings(root: Path) -> Iterator[BadInput]:
    """Each bad value, in turn in the recipe's file and behind its flag."""
    for key, values in _SETTINGS.items():
        for number, value in enumerate(values):
            shown = value if len(value) < 40 else f"{len(value)} characters"
            block, _, name = key.rpartition(".")
            text = f"{key}: {value}\n"
            if block:
                text = "".join(f"{'  ' * i}{part}:\n" for i, part in enumerate(block.split(".")))
                text += f"{'  ' * len(block.split('.'))}{name}: {value}\n"
            if number % 2 == 0 or not block:
                prepare = files(None, {"base.yaml": recipe(root), "recipe.yaml": f"extends: base.yaml\n{text}"})
                yield BadInput(f"recipe {key}: {shown}", tuple(TRAIN), ("recipe.yaml:", name, "nonesuch"), prepare)
            else:
                argv = ("train", "recipe.yaml", "--out", "out", f"--{key}", value.strip("'"))
                yield BadInput(f"flag --{key} {shown}", argv, (f"--{key}", name, "mesh:", "nonesuch"), good(root))


def _yaml(root: Path) -> Iterator[BadInput]:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
    )
    bodies: dict[str, str | bytes] = {
        "tag int": "train:\n  steps: !!int abc\n",
        "tag float": "optimizer:\n  lr: !!float abc\n",
        "tag bool": "data:\n  train: {files: !!bool maybe}\n",
        "tag of Python": "backbone: !!python/object/apply:os.system [true]\n",
        "tag on a list": "train: !!set {steps}\n",
        "billion laughs": laughs,
        "alias in itself": "train: &t\n  steps: *t\n",
        "nested flow": "train: " + "[" * 50_000,
        "nested mapping": "train: " + "{a: " * 5_000,
        "nested blocks": "\n".join("  " * i + "a:" for i in range(400)),
        "nested dashes": "train:\n" + "- " * 5_000 + "a",
        "a list": "- train\n- steps\n",
        "a word": "train\n",
        "two documents": "train: {steps: 1}\n---\ntrain: {steps: 2}\n",
        "a tab": "train:\n\tsteps: 1\n",
        "unclosed quote": "backbone: 'x\ntrain: {steps: 1}\n",
        "unknown anchor": "train: *nobody\n",
        "twice a key": "train: {steps: 1}\ntrain: {steps: 2}\n",
        "a key of a list": "? [a, b]\n: 1\n",
        "a control character": "backbone: x\x07y\n",
        "an escape beyond Unicode": 'backbone: "\\U00110000"\n',
        "half of a surrogate pair": 'backbone: "\\ud800"\n',
        "a NUL": 'backbone: "a\\0b"\n',
        "not UTF-8": b"backbone: \xff\xfe\n",
        "UTF-16": "backbone: x\n".encode("utf-16"),
        "unknown key": "trian: {steps: 1}\n",
        "long key": f"{'k' * 900}: 1\n",
        "long value": f"regularizer: {{kind: {'k' * 5000}}}\n",
        "extends itself": "extends: recipe.yaml\n",
        "extends nothing": "extends: nonesuch.yaml\n",
        "extends a list": "extends: [a]\n",
        "megabytes": "# comment\n" * 200_000,
        "merge key": "train: {<<: {steps: 1}}\n",
        "directive": "%YAML 9.9\n---\ntrain: {steps: 1}\n",
    }
    for name, body in bodies.items():
        yield BadInput(f"yaml: {name}", tuple(TRAIN), ("recipe.yaml",), files(None, {"recipe.yaml": body}))


# ------------------------------------------------------------------------------------------------------- flags


def _flags(root: Path) -> Iterator[BadInput]:
    run, rows = str(root / "run"), str(root / "rows.jsonl")
    select = ["select", "--pool", rows, "--target", rows, "--out", "out"]
    lines: dict[tuple[str, ...], str] = {
        ("trian",): "trian",
        ("x" * 3000,): "xxx",
        ("train",): "RECIPE",
        ("train", "a", "b"): "b",
        ("train", "nonesuch"): "nonesuch",
        ("train", "--out"): "--out",
        ("train", "recipe.yaml", "--out", "out", "--nonesuch", "1"): "--nonesuch",
        ("train", "recipe.yaml", "--out", "out", "--train.stps", "1"): "--train.stps",
        ("train", "recipe.yaml", "--out", "out", "--train.steps"): "--train.steps",
        ("train", "recipe.yaml", "--out", "out", "--train.steps", "1", "--train-steps", "2"): "--train-steps",
        ("train", "recipe.yaml", "--resume", run): "--resume",
        ("train", "--resume", run, "--out", "x"): "--out",
        ("train", "--resume", "nonesuch"): "nonesuch",
        ("train", "--resume", rows): rows,
        ("train", "--resume", run, "--adapter.rank", "3"): "--adapter.rank",
        ("train", "--resume", run, "--train.steps", "0"): "--train.steps",
        ("train", "recipe.yaml", "--out", rows): "--out",
        ("train", "recipe.yaml", "--out", run): "--out",
        ("train", "recipe.yaml", "--out", "/dev/null"): "--out",
        ("train", "recipe.yaml", "--out", "/dev/null/x"): "/dev/null",
        ("train", "recipe.yaml", "--out", "/proc/nonesuch/x"): "/proc",
        ("train", "recipe.yaml", "--out", "o" * 300): "ooo",
        (*select, "--budget", "0"): "--budget",
        (*select, "--budget", "-5"): "--budget",
        (*select, "--budget", "1e9"): "budget",
        (*select, "--budget", "1.5"): "--budget",
        (*select, "--budget", "abc"): "--budget",
        (*select, "--budget", DIGITS): "budget",
        (*select, "--budget", "13"): "budget",
        (*select,): "--budget",
        (*select, "--budget", "3", "--epsilon", "0"): "--epsilon",
        (*select, "--budget", "3", "--epsilon", "nan"): "--epsilon",
        (*select, "--budget", "3", "--epsilon", "inf"): "--epsilon",
        (*select, "--budget", "3", "--epsilon", "abc"): "--epsilon",
        (*select, "--budget", "3", "--memory", "0"): "--memory",
        (*select, "--budget", "3", "--memory", "1e-5"): "--memory",
        (*select, "--budget", "3", "--method", "gtod"): "--method",
        (*select, "--budget", "3", "--method", "gotd-contrast"): "negative",
        (*select, "--budget", "3", "--method", "less"): "less",
        (*select, "--budget", "3", "--seed", "-1"): "--seed",
        (*select, "--budget", "3", "--seed", DIGITS): "seed",
        (*select, "--budget", "3", "--embedder", "nonesuch"): "nonesuch",
        (*select, "--budget", "3", "--embedder", "static:nonesuch"): "nonesuch",
        (*select, "--budget", "3", "--embedder", f"static:{rows}"): rows,
        (*select, "--budget", "3", "--text-column", "txet"): "txet",
        (*select, "--budget", "3", "--id-column", "number"): "number",
        (*select, "--budget", "3", "--domain-column", "area"): "area",
        (*select, "--budget", "3", "--bad-rows", "drop"): "--bad-rows",
        (*select, "--budget", "3", "--pool-features", "x.npy"): "--target-features",
        ("select", "--budget", "3", "--out", "out"): "--pool",
        ("select", "--pool", rows, "--target", rows, "--budget", "3"): "--out",
        ("select", "--pool", "nonesuch.jsonl", "--target", rows, "--budget", "3", "--out", "out"): "nonesuch.jsonl",
        ("select", "--pool", "*.nonesuch", "--target", rows, "--budget", "3", "--out", "out"): "*.nonesuch",
        ("select", "--pool", rows, rows, "--target", rows, "--budget", "3", "--out", "out"): "twice",
        ("select", "--pool", ".", "--target", rows, "--budget", "3", "--out", "out"): "directory",
        ("select", "--pool", "sample:nonesuch", "--target", rows, "--budget", "3", "--out", "out"): "nonesuch",
        ("select", "--pool", "hub:", "--target", rows, "--budget", "3", "--out", "out"): "hub:",
        ("eval",): "RUN_DIR",
        ("eval", "nonesuch"): "nonesuch",
        ("eval", str(root)): str(root),
        ("eval", run, "--data", "nonesuch.jsonl"): "nonesuch.jsonl",
        ("eval", run, "--sharpness-draws", "3"): "--sharpness-draws",
        ("eval", run, "--sharpness", "--sharpness-draws", "0"): "draws",
        ("eval", run, "--sharpness", "--sharpness-sigmas", "a"): "--sharpness-sigmas",
        ("eval", run, "--sharpness", "--sharpness-split", "tset"): "--sharpness-split",
        ("eval", run, "--harness-limit", "3"): "--harness-limit",
        ("eval", run, "--adapter.rank", "3"): "--adapter.rank",
        ("generate", run, "--prompt", "x"): "generate",
        ("generate", "nonesuch", "--prompt", "x"): "nonesuch",
        ("generate", run, "--temperature", "abc"): "--temperature",
        ("report",): "DIRECTORY",
        ("report", "nonesuch"): "nonesuch",
        ("report", run, "--out", str(root)): "--out",
        ("report", run, "--out", "pipe"): "pipe",
        ("merge", "nonesuch"): "nonesuch",
        ("merge", run, "--dtype", "all"): "--dtype",
        ("merge", run, "--out", rows): rows,
        ("export", "nonesuch"): "nonesuch",
        ("export", run, "--add", "nonesuch", "--out", "out"): "nonesuch",
        ("export", run, "--add", f"{run}=abc", "--out", "out"): "--add",
        ("recipes",): "missing",
        ("recipes", "frob"): "frob",
        ("recipes", "show"): "NAME",
        ("recipes", "show", "nonesuch"): "nonesuch",
        ("recipes", "show", "x" * 5000): "xxx",
        ("recipes", "copy", "classify", rows): rows,
        ("recipes", "copy", "classify", "nonesuch/a/b\0".rstrip("\0")): "nonesuch",
        ("doctor", "--depe"): "--depe",
        ("demo", "--out", rows): rows,
        ("compare", "nonesuch", "--out", "out"): "nonesuch",
        ("compare", "recipe.yaml", "--out", "out"): "comparison",
        ("compare", "flat-comparison"): "--out",
        ("compare", "flat-comparison", "--out", "out", "--selectors", "x"): "--selectors",
        ("compare", "flat-comparison", "--out", "out", "--methods", "nonesuch"): "nonesuch",
    }
    skipped = {("recipes", "copy", "classify", "nonesuch/a/b")}  # it makes the folder, as asked
    for argv, place in lines.items():
        if argv not in skipped:
            shown = " ".join(part if len(part) < 30 else f"…{part[-20:]}" for part in argv)
            yield BadInput(f"flags: {shown}", argv, (place,), piped(root) if "pipe" in argv else good(root))


# -------------------------------------------------------------------------------------------------------- sweeps


def _sweeps(root: Path) -> Iterator[BadInput]:
    many = ",".join(str(i) for i in range(1, 1001))
    lines: dict[tuple[str, ...], str] = {
        (): "--grid",
        ("--grid", "adapter.rank"): "--grid",
        ("--grid", "adapter.rank="): "--grid",
        ("--grid", "=1,2"): "--grid",
        ("--grid", "adapter.rank=1,1"): "--grid",
        ("--grid", "adapter.rank=1,,2"): "--grid",
        ("--grid", "adapter.rnak=1,2"): "adapter.rnak",
        ("--grid", "adapter.rank=1,a"): "--grid",
        ("--grid", "adapter.rank=0,1"): "--grid",
        ("--grid", "adapter.rank=1..4"): "--design random",
        ("--grid", "adapter.rank=1,2", "adapter.rank=3"): "--grid",
        ("--grid", "train.seed=1,2"): "--seeds",
        ("--grid", f"adapter.rank={many}", f"train.steps={many}", f"train.batch_size={many}"): "--max-cells",
        ("--grid", "adapter.rank=1,2", "--seeds", "1000000000"): "--max-cells",
        ("--grid", "adapter.rank=1,2", "--seeds", "0"): "--seeds",
        ("--grid", "adapter.rank=1,2", "--seeds", "-1"): "--seeds",
        ("--grid", "adapter.rank=1,2", "--seeds", "abc"): "--seeds",
        ("--grid", "adapter.rank=1,2", "--seeds", "3", "--train.seed", "9223372036854775807"): "--seeds",
        ("--grid", "optimizer.lr=1e-4..1e-2:log", "--design", "random", "--points", "1000000000"): "--max-cells",
        ("--grid", "optimizer.lr=1e-4..1e-2:log", "--design", "random"): "--points",
        ("--grid", "optimizer.lr=1e-2..1e-4", "--design", "random", "--points", "3"): "--grid",
        ("--grid", "optimizer.lr=0..1:log", "--design", "random", "--points", "3"): "--grid",
        ("--grid", "optimizer.lr=1..1.0000001", "--design", "random", "--points", "50"): "--points",
        ("--grid", "optimizer.lr=1e-4..1e400", "--design", "random", "--points", "3"): "--grid",
        ("--grid", "adapter.rank=1..99999999999999999999", "--design", "random", "--points", "3"): "--grid",
        ("--grid", "adapter.rank=1..3", "--design", "random", "--points", "9"): "--points",
        ("--grid", "adapter.rank=1,2", "train.steps=1,2,3", "--design", "paired"): "--design",
        ("--grid", "adapter.rank=1,2", "--design", "square"): "--design",
        ("--grid", "adapter.rank=1,2", "--jobs", "0"): "--jobs",
        ("--grid", "adapter.rank=1,2", "--devices", "gpu"): "--devices",
        ("--grid", "adapter.rank=1,2", "--devices", "99"): "--devices",
        ("--grid", "adapter.rank=1,2", "--epsilon", "0.1"): "--epsilon",
        ("--grid", "adapter.rank=1,2", "--bisect", "train.steps"): "--bisect",
        ("--grid", "adapter.rank=1,2", "--bisect", "data.train.limit=9..1"): "--bisect",
        ("--grid", "adapter.rank=1,2", "--max-cells", "1"): "--max-cells",
        ("--grid", "regularizer=plain,ggop"): "--grid",
        ("--grid", f"adapter.rank={DIGITS}"): "--grid",
        ("--grid", "optimizer.lr=.nan"): "--grid",
        ("--grid", "optimizer.lr=0,1e-3"): "--grid",
    }
    for more, place in lines.items():
        shown = " ".join(part if len(part) < 30 else f"{part[:20]}…" for part in more)
        yield BadInput(f"sweep {shown}", ("sweep", "recipe.yaml", "--out", "out", *more), (place,), good(root))
    blocks = {
        "seeds": "sweep: {seeds: 1000000000, grid: {adapter.rank: [1, 2]}}",
        "points": "sweep: {design: random, points: 1000000000, grid: {optimizer.lr: [1e-4..1e-2]}}",
        "empty grid": "sweep: {grid: {}}",
        "grid a list": "sweep: {grid: [1]}",
        "grid of nothing": "sweep: {grid: {adapter.rank: []}}",
    }
    for name, text in blocks.items():
        argv = ("sweep", "recipe.yaml", "--out", "out")
        yield BadInput(f"sweep block: {name}", argv, ("sweep", "--grid", "--max-cells"), good(root, text + "\n"))


# --------------------------------------------------------------------------------------------------------- paths


def _paths(root: Path) -> Iterator[BadInput]:
    rows = str(root / "rows.jsonl")

    def fifo(work: Path) -> None:
        os.mkfifo(work / "pipe.jsonl")
        os.mkfifo(work / "pipe.npy")
        os.mkfifo(work / "pipe.yaml")
        good(root)(work)

    def unix_socket(work: Path) -> None:
        with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(work):
            one.bind("s.jsonl")
        good(root)(work)

    def other_encoding(work: Path) -> None:
        shutil.copy(rows, os.fsencode(work) + b"/caf\xe9.jsonl")
        good(root)(work)

    def folder(work: Path) -> None:
        (work / "folder.jsonl").mkdir()
        (work / "recipe").mkdir()
        good(root)(work)

    def loop(work: Path) -> None:
        (work / "loop.jsonl").symlink_to("loop.jsonl")
        (work / "gone.jsonl").symlink_to("nowhere.jsonl")
        good(root)(work)

    byte_name = os.fsdecode(b"caf\xe9.jsonl")
    cases: list[tuple[str, tuple[str, ...], str, Prepare]] = [
        ("a pipe of rows", (*TRAIN, "--data.train.files", "pipe.jsonl"), "pipe.jsonl", fifo),
        ("a pipe as recipe", ("train", "pipe.yaml", "--out", "out"), "pipe.yaml", fifo),
        ("a pipe of features", ("select", "--pool", rows, "--target", rows, "--budget", "3", "--out", "out",
                                "--pool-features", "pipe.npy", "--target-features", "pipe.npy"), "pipe.npy", fifo),
        ("a pipe in a pattern", (*TRAIN, "--data.train.files", "pipe*.jsonl"), "pipe*.jsonl", fifo),
        ("a pipe as run", ("eval", "pipe.yaml"), "pipe.yaml", fifo),
        ("a socket of rows", (*TRAIN, "--data.train.files", "s.jsonl"), "s.jsonl", unix_socket),
        ("a device of rows", (*TRAIN, "--data.train.files", "/dev/zero"), "/dev/zero", good(root)),
        ("a device as recipe", ("train", "/dev/zero", "--out", "out"), "/dev/zero", good(root)),
        ("standard input of rows", (*TRAIN, "--data.train.files", "/dev/stdin"), "/dev/stdin", good(root)),
        ("a name of another encoding", (*TRAIN, "--data.train.files", byte_name), "--data.train.files", other_encoding),
        ("a pattern over another encoding", (*TRAIN, "--data.train.files", "caf*.jsonl"), "caf", other_encoding),
        ("an out of another encoding", ("train", "recipe.yaml", "--out", byte_name), "--out", good(root)),
        ("a folder of rows", (*TRAIN, "--data.train.files", "folder.jsonl"), "folder.jsonl", folder),
        ("a folder as recipe", ("train", "recipe", "--out", "out"), "recipe", folder),
        ("a link to itself", (*TRAIN, "--data.train.files", "loop.jsonl"), "loop.jsonl", loop),
        ("a link to nothing", (*TRAIN, "--data.train.files", "gone.jsonl"), "gone.jsonl", loop),
        ("a long name", (*TRAIN, "--data.train.files", "x" * 300 + ".jsonl"), "xxx", good(root)),
        ("a long path", (*TRAIN, "--data.train.files", "x/" * 3000 + "a.jsonl"), "x/x", good(root)),
        ("nobody's home", (*TRAIN, "--data.train.files", "~nonesuch-user/a.jsonl"), "~nonesuch-user", good(root)),
        ("nobody's backbone", (*TRAIN, "--backbone", "~nonesuch-user/a"), "~nonesuch-user", good(root)),
        ("nobody's words", ("select", "--pool", rows, "--target", rows, "--budget", "3", "--out", "out", "--embedder",
                            "static:~nonesuch-user/a"), "~nonesuch-user", good(root)),
        ("a backbone that is a file", (*TRAIN, "--backbone", rows), rows, good(root)),
        ("a backbone that is a pipe", (*TRAIN, "--backbone", "pipe.yaml"), "pipe.yaml", fifo),
        ("an adapter that is none", (*TRAIN, "--adapter.start", str(root / "backbone")), "adapter.start", good(root)),
        ("an empty pattern", (*TRAIN, "--data.train.files", "*.nonesuch"), "*.nonesuch", good(root)),
        ("an empty name", (*TRAIN, "--data.train.files", ""), "''", good(root)),
    ]  # fmt: skip
    for name, argv, place, prepare in cases:
        yield BadInput(f"path: {name}", argv, (place,), prepare)

    @contextlib.contextmanager
    def gone() -> Iterator[None]:
        Path("gone").mkdir()
        os.chdir("gone")
        Path("../gone").rmdir()
        yield

    yield BadInput("path: a current directory that is gone", ("train", "classify"), ("current directory",), around=gone)
