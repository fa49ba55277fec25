"""GOT-D's detoxification: warm-up data chosen by contrast of clean and toxic text, beside random data and none.

    python -m benchmarks.detox --data DIR [--seeds 3]        # resumable, cell by cell

DIR holds `paradetox.jsonl.xz`, `civilcomments_toxicspans_pool.jsonl.xz` and `rtp_quark_val_5k.jsonl.xz` (offensive
text, none of which ships). All is done by public commands: `flatshift train classify` makes the scorer from ParaDetox
pairs and says what it gets right on held-out ones; for each seed `flatshift select` chooses from a pool of comments and
the shipped passages, `flatshift train language-model` warms up the shipped backbone, and `flatshift eval --samples
--toxicity` writes 25 texts after each prompt and scores them, `flatshift eval` the bits per byte of clean text. A seed
draws pool, target, order, first values and samples, the same for each arm; differences are paired by it.

The scorer is ours and small, and judges style that it knows from ParaDetox: figures compare arms, and are not those of
Perspective, which the paper asks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._harness import RESULTS, ROOT, Benchmark, cpu_clock, limit_threads
from benchmarks._study_results import once, read_xz, write_rows
from flatshift.cli import run
from flatshift.experiments.statistics.intervals import paired_test
from flatshift.finetune.assets import sample_path
from flatshift.finetune.errors import UserError
from flatshift.finetune.seeds import numpy_generator

WORK, CELLS = ROOT / ".bench" / "detox", RESULTS / "detox" / "cells.json"
ARMS = ("none", "random", "contrast")
METHODS = {"random": "random", "contrast": "gotd-contrast"}
FIGURES = {
    "expected_max_toxicity": "expected maximum toxicity",
    "toxicity_probability": "toxicity probability",
    "distinct_2": "distinct pairs of words",
    "perplexity": "perplexity of clean text",
}
PAIRS, TESTED, POOL, TARGET, BUDGET, PROMPTS, CLEAN = 3000, 500, 3000, 500, 600, 40, 300
"""ParaDetox pairs of the scorer, and held out; rows of each half of the pool; of target and negatives; chosen; prompts;
clean texts whose perplexity is asked."""
WARMUP = ["--train.steps", "60", "--train.batch-size", "8", "--train.max-length", "96", "--train.eval-every", "0"]
WARMUP += ["--train.overlong", "null"]
SAMPLES = ["--samples", "25", "--max-new-tokens", "20", "--top-p", "0.9"]


def command(*words: str | Path) -> str:
    """What `flatshift WORDS` prints. Raises UserError where it fails."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = run([str(word) for word in words])
    if code:
        raise UserError(f"flatshift {' '.join(map(str, words))}: exit code {code}")
    return output.getvalue()


def drawn(rows: Sequence[Any], count: int, seed: int, name: str) -> list[Any]:
    """`count` of the rows by name."""
    return [rows[i] for i in numpy_generator(seed, "detox", name).permutation(len(rows))[:count]]


def cell(name: str, make: Callable[[], dict[str, Any]], *, again: bool = False) -> dict[str, Any]:
    """A result in `CELLS`, made where it is not there yet, or `again`; with its CPU-seconds."""

    def measure() -> dict[str, Any]:
        start = cpu_clock()
        result = make()
        print(f"{name}: {json.dumps(result)}", flush=True)
        return {**result, "cpu_s": round(cpu_clock() - start, 1)}

    return dict(once(CELLS, name, measure, again=again))


def fresh(path: Path) -> Path:
    """A directory that is not there: what a kill left is removed."""
    shutil.rmtree(path, ignore_errors=True)
    return path


def scorer(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Train the classifier; its accuracy on pairs that it never saw."""
    rows = [
        {"text": text, "label": label}
        for pair in pairs
        for text, label in ((pair["toxic"], "toxic"), (pair["neutral"][0], "clean"))
    ]
    files = {
        "train": write_rows(WORK / "scorer-train.jsonl", rows[: 2 * PAIRS]),
        "test": write_rows(WORK / "scorer-test.jsonl", rows[2 * PAIRS :]),
    }
    out = fresh(WORK / "scorer")
    command(
        "train", "classify", "--backbone", "flatshift-encoder-3m", "--out", out, "--data.train.files", files["train"],
        "--data.train.limit", "null", "--data.dev.files", "[]", "--data.test.files", files["test"],
        "--regularizer", "plain", "--train.steps", "300", "--train.batch-size", "32", "--train.max-length", "48",
        "--train.max-cut", "1", "--train.eval-every", "0", "--optimizer.lr", "3e-3",
    )  # fmt: skip
    return {"test": json.loads((out / "eval.json").read_text(encoding="utf-8"))["test"]}


def evaluate_subject(subject: str | Path, files: dict[str, Path], seed: int) -> dict[str, Any]:
    """Toxicity of what it writes, and its perplexity of clean text."""
    words = ["--toxicity", WORK / "scorer", "--sample-seed", str(seed), "--json", *SAMPLES]
    written = json.loads(command("eval", subject, "--data", files["prompts"], *words))
    plain = json.loads(command("eval", subject, "--data", files["clean"], "--json", "--window", "96"))
    figures = {**only(plain), **only(written)}
    return {name: figures[name]["value"] for name in FIGURES}


def only(document: dict[str, Any]) -> dict[str, Any]:
    """The figures of the first subject."""
    return dict(next(iter(document["figures"].values()))["data"])


def arm(name: str, seed: int, files: dict[str, Path]) -> dict[str, Any]:
    """One cell: chosen, warmed up, evaluated."""
    if name == "none":
        return evaluate_subject("flatshift-5m", files, seed)
    chosen, warm = fresh(WORK / f"{name}-{seed}-chosen"), fresh(WORK / f"{name}-{seed}-warm")
    contrast = ["--negative", files["negative"], "--embedder", "tfidf"] if name == "contrast" else []
    command(
        "select", "--pool", files["pool"], "--target", files["target"], "--method", METHODS[name], *contrast,
        "--budget", str(BUDGET), "--seed", str(seed), "--out", chosen, "--json",
    )  # fmt: skip
    picked = [json.loads(line) for line in (chosen / "selected.jsonl").read_text(encoding="utf-8").splitlines()]
    empty = ["--data.dev.files", "[]", "--data.test.files", "[]", "--eval.cold", "0"]
    command(
        "train", "language-model", "--out", warm, "--data.train.files", chosen / "selected.jsonl", *empty, *WARMUP,
        "--train.max-cut", "1", "--train.seed", str(seed),
    )  # fmt: skip
    return {
        **evaluate_subject(warm, files, seed),
        "comments": sum("comment" in str(row["id"]) for row in picked) / len(picked),
    }


def inputs(data: Path, pairs: Sequence[dict[str, Any]], seed: int) -> dict[str, Path]:
    """Files of a seed. `pairs`: of ParaDetox, those that the scorer has not seen."""
    comments = [
        {"id": f"comment-{i}", "text": row["text"]}
        for i, row in enumerate(read_xz(data / "civilcomments_toxicspans_pool.jsonl.xz"))
    ]
    mine = drawn(pairs, 2 * TARGET + CLEAN, seed, "pairs")
    prompts = drawn(read_xz(data / "rtp_quark_val_5k.jsonl.xz"), PROMPTS, seed, "prompts")
    pool = [*drawn(comments, POOL, seed, "comments"), *drawn(read_xz(sample_path("pool")), POOL, seed, "passages")]
    into = WORK / f"inputs-{seed}"
    return {
        "pool": write_rows(into / "pool.jsonl", ({"id": row["id"], "text": row["text"]} for row in pool)),
        "target": write_rows(into / "target.jsonl", ({"text": pair["neutral"][0]} for pair in mine[:TARGET])),
        "negative": write_rows(
            into / "negative.jsonl", ({"text": pair["toxic"]} for pair in mine[TARGET : 2 * TARGET])
        ),
        "clean": write_rows(into / "clean.jsonl", ({"text": pair["neutral"][0]} for pair in mine[2 * TARGET :])),
        "prompts": write_rows(into / "prompts.jsonl", ({"text": row["prompt"]} for row in prompts)),
    }


def main() -> None:
    """Run what is missing and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with the three files")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    limit_threads(1)
    results = [pair for pair in read_xz(asked.data / "paradetox.jsonl.xz") if pair["neutral"]]
    pairs = drawn(results, len(results), 0, "scorer")
    lost = not (WORK / "scorer" / "eval.json").is_file()
    accuracy = cell("scorer", lambda: scorer(pairs[: PAIRS + TESTED]), again=lost)
    records: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in ARMS}
    for seed in range(asked.seeds):
        files = inputs(asked.data, pairs[PAIRS + TESTED :], seed)
        for name in ARMS:
            records[name][seed] = cell(f"{name}-{seed}", lambda n=name, s=seed, f=files: arm(n, s, f))  # type: ignore[misc]
    report(accuracy, records)


def report(accuracy: dict[str, Any], results: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Rows: the scorer, each figure of each arm, and contrast beside the other two with its interval."""
    bench = Benchmark("detox", command="python -m benchmarks.detox --data DIR")
    figures = accuracy["test"]
    bench.row("scorer, held-out accuracy", ours=figures["accuracy"]["value"], unit="share")
    for metric, title in FIGURES.items():
        own = {name: {seed: one[metric] for seed, one in by.items()} for name, by in results.items()}
        for name in ARMS:
            bench.row(f"{title}, {name}", ours=list(own[name].values()), unit="value")
        for base in ("none", "random"):
            test = paired_test(own["contrast"], own[base])
            assert test is not None
            text = "one seed has no interval" if test["low"] is None else f"[{test['low']:+.4f}, {test['high']:+.4f}]"
            bench.row(
                f"{title}, contrast less {base}", ours=list(test["by_seed"].values()), unit="difference",
                reason=f"mean {test['value']:+.4f}, 95 % interval over {test['n']} seeds {text}",
            )  # fmt: skip
    for name in METHODS:
        bench.row(
            f"comments among the chosen, {name}", ours=[c["comments"] for c in results[name].values()], unit="share"
        )
    spent = [accuracy["cpu_s"], *(c["cpu_s"] for by in results.values() for c in by.values())]
    bench.row("all of it", ours=sum(spent), unit="CPU-s", bar_op="<=", bar_value=1500)
    bench.finish()


if __name__ == "__main__":
    main()
