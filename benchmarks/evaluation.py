"""Evaluation beside lm-eval: the same numbers, and what they cost; identities; shared contexts; the sandbox.

    python -m benchmarks.evaluation DATA.jsonl      # rows with `text` and `lang`; needs lm-eval (extra `bench`)
    python -m benchmarks.evaluation                 # all but the languages, whose rows stay as they were

Languages: 200 documents of each on the shipped backbone, every figure with its interval by language, each tool in the
precision that it takes by itself. Ranking: SNLI and SciCite as shipped, the words of both tools the same. Shared
contexts: the same rows with four worked examples, keys and values of what they share kept or not. The sandbox: every
hostile program of benchmarks.hostile_programs, none of which may pass or leave anything.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import lzma
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks._harness import RESULTS, Benchmark, cpu_seconds, limit_threads
from benchmarks.hostile_programs import FORGERIES, HOSTILE, is_contained
from flatshift.experiments.recipe import from_override
from flatshift.experiments.workflows.evaluate import evaluate_side_by_side
from flatshift.experiments.workflows.few_shot import FewShot, rank_rows, read_prompt, read_shots
from flatshift.finetune.assets import backbone_directory
from flatshift.finetune.assets import sample_path as path
from flatshift.finetune.compute.numerics import evaluation_mode
from flatshift.finetune.data.config import Columns
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.evaluate import candidates
from flatshift.finetune.evaluate.perplexity import DocumentCounts
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import LanguageModel

BACKBONE = "flatshift-5m"
ROWS = 100


def evaluate_run(data: str, *words: str) -> dict[str, Any]:
    """What `flatshift eval --json` prints of the shipped backbone on `data`."""
    given = dict(zip(words[::2], words[1::2], strict=True))
    group = given.pop("group_by", None)
    overrides = [from_override(key, value, f"--{key}") for key, value in given.items()]
    return evaluate_side_by_side([BACKBONE], data=[data], group_by=group, overrides=overrides, quiet=True)


def few_shot(name: str, data: str) -> Any:
    """Rank the rows of `data` by a prompt in float32; the subject's findings."""
    asked = FewShot(prompt=read_prompt(name), name=name)
    return evaluate_side_by_side(
        [BACKBONE], data=[data], few_shot=asked, overrides=[from_override("train.precision", "fp32", "x")], quiet=True
    )


def harness(tasks: list[dict[str, Any]], *, precision: str, bos: bool = True) -> dict[str, Any]:
    """lm-eval's results of local tasks on the shipped backbone; bos: begin every text with that token. Text that is
    scored whole gets it from lm-eval by itself, and would be scored for it once more."""
    logging.disable(logging.WARNING)
    import yaml
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        for task in tasks:
            (Path(folder) / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
        own = {"dtype": precision, "device": "cpu", "batch_size": 32, "add_bos_token": bos}
        model, names = HFLM(pretrained=str(backbone_directory(BACKBONE)), **own), [task["task"] for task in tasks]
        # the index of its own tasks takes some six CPU-seconds, which no evaluation of a file needs
        manager = TaskManager(include_path=folder, include_defaults=False)
        result = simple_evaluate(model, tasks=names, num_fewshot=0, bootstrap_iters=0, task_manager=manager)
    return dict(result["results"])


def local(name: str, file: str, **more: Any) -> dict[str, Any]:
    """A task of lm-eval over a file of rows."""
    shared = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": file}}}
    return shared | {"test_split": "test", "metadata": {"version": 1.0}} | more


def sample(name: str, folder: Path, count: int = ROWS) -> str:
    """The first rows of a shipped sample as plain JSONL."""
    with lzma.open(path(name), "rt", encoding="utf-8") as stream:
        lines = [next(stream) for _ in range(count)]
    file = folder / f"{name.replace('/', '-')}.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


def identities(bench: Benchmark) -> None:
    """The unit row of the field, and word = token to the power of fertility."""

    def of(*values: Any) -> dict[str, float]:
        names = ("nats", "tokens", "words", "characters", "bytes")
        arrays = [np.atleast_1d(np.array(v)) for v in values]
        counts = DocumentCounts(**dict(zip(names, arrays, strict=True)))
        result = counts.metrics(figures={}, resamples=0, confidence=0.95, seed=0)
        return {name: float(cell["value"] or math.nan) for name, cell in result.items()}

    unit = of(100.0, 50, 25, 150, 200)
    known = {"perplexity": 7.389056, "word_perplexity": 54.598150, "character_perplexity": 1.947734}
    worst = max(abs(unit[name] - value) for name, value in (known | {"bits_per_byte": 0.721348}).items())
    bench.row("unit row: largest error", "of the printed figure", ours=worst, maximum=5e-7)
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 90, 300)
    outcome = of(tokens * rng.uniform(1, 3, 300), tokens, tokens // 2, tokens * 3, tokens * 4)
    error = abs(outcome["word_perplexity"] / outcome["perplexity"] ** outcome["fertility"] - 1)
    bench.row("perplexity of a word = of a token ^ fertility", "relative", ours=error, maximum=1e-9)


def parity(bench: Benchmark, folder: Path) -> None:
    """Two tasks of candidates, by both tools."""
    snli, cites = sample("snli/test", folder), sample("scicite/test", folder)
    prompt, classes = folder / "cites.yaml", ("background", "method", "result")
    words = ", ".join(f"{name}: {name}" for name in classes)
    prompt.write_text(f'text: "{{text}}\\nThis citation is about: {{label}}"\nlabels: {{{words}}}\n')
    names, listed = ["entailment", "neutral", "contradiction"], "'Yes, ' + text2, 'Also, ' + text2, 'No, ' + text2"
    accuracy = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    theirs = harness(
        [
            local(name, file, output_type="multiple_choice", metric_list=accuracy, doc_to_text=text,
                  doc_to_choice=choices, doc_to_target=f"{{{{{list(gold)}.index(label)}}}}")
            for name, file, text, choices, gold in (
                ("snli_local", snli, "{{text}}, right?", f"{{{{[{listed}]}}}}", names),
                ("cites_local", cites, "{{text}}\nThis citation is about:", json.dumps(classes), classes),
            )
        ],
        precision="float32",
    )  # fmt: skip
    for name, task, data in (("nli", "snli_local", snli), (str(prompt), "cites_local", cites)):
        ours = few_shot(name, data)["figures"][BACKBONE]["data"]["accuracy"]["value"]
        peer = theirs[task]["acc,none"]
        what = f"accuracy of {task.removesuffix('_local')}, {ROWS} rows: ours {ours:.4f}, lm-eval {peer:.4f}"
        bench.row(what, "difference", ours=abs(ours - peer), maximum=1e-6)


def languages(bench: Benchmark, data: str, folder: Path) -> None:
    """200 documents a language by us, every 35th of these by both tools."""
    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    count: Counter[str] = Counter()
    documents = []
    for row in rows:
        count[row["lang"]] += 1
        if count[row["lang"]] <= 200:
            documents.append({"lang": row["lang"], "text": row["text"]})
    many, few = folder / "languages.jsonl", folder / "few.jsonl"
    for file, some in ((many, documents), (few, documents[::35])):
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in some), encoding="utf-8")
    results: dict[str, Any] = {}
    ours = cpu_seconds(lambda: results.update(ours=evaluate_run(str(many), "group_by", "lang")))
    precision = results["ours"]["subjects"][0]["precision"]
    bench.row(f"{len(count)} languages of 200 documents, {precision} by itself", "CPU-s", ours=ours, maximum=60.0)
    metrics, whole = [{"metric": "bits_per_byte"}], {"doc_to_text": "", "doc_to_target": "{{text}}"}
    task = local("rolling", str(few), output_type="loglikelihood_rolling", metric_list=metrics, **whole)
    subset = f"{len(documents[::35])} of these documents"
    mine = cpu_seconds(lambda: evaluate_run(str(few)))
    fp32 = cpu_seconds(lambda: results.update(fp32=harness([task], precision="float32", bos=False)))
    peer = {"peer": fp32, "peer_name": "lm-eval"}
    bench.row(f"{subset}, {precision} beside lm-eval in its float32", "CPU-s", ours=mine, **peer)
    same = cpu_seconds(lambda: results.update(same=evaluate_run(str(few), "train.precision", "fp32")))
    bench.row(f"{subset}, float32 both", "CPU-s", ours=same, **peer, maximum=0.5)
    value = results["same"]["figures"][BACKBONE]["data"]["bits_per_byte"]["value"]
    other = results["fp32"]["rolling"]["bits_per_byte,none"]
    what = f"bits per byte, float32: ours {value:.6f}, lm-eval {other:.6f}"
    bench.row(what, "relative", ours=abs(value / other - 1), maximum=1e-5)


def shared(bench: Benchmark, folder: Path) -> None:
    """Four worked examples, with and without what contexts share; the model is loaded before."""
    asked = FewShot(prompt=read_prompt("nli"), name="nli", shots=4, source=("sample:snli/train",))
    rows = list(read_rows([sample("snli/test", folder)], required=asked.prompt.columns()))
    source, tokenizer = read_shots(asked, Columns()), open_backbone(BACKBONE).tokenizer
    model = load_backbone(BACKBONE, task=LanguageModel())
    inference = EvalBatching.of(tokenizer, batch_size=32)
    results: dict[str, Any] = {}

    def rank(name: str) -> None:
        with evaluation_mode(model):
            results[name] = rank_rows(model, tokenizer, rows, source, asked, inference, window=1024)

    def rank_anew() -> None:
        with mock.patch.object(candidates, "_can_repeat_cache", lambda *a: False):
            rank("anew")

    rank("ours")
    what, ways = f"4 shots, 3 candidates, {ROWS} rows: shared contexts", (lambda: rank("ours"), rank_anew)
    bench.compare(what, "CPU-s", *ways, "every candidate anew", rounds=1, maximum=1 / 3)
    same = float(np.mean(np.array(results["ours"].predictions) == np.array(results["anew"].predictions)))
    bench.row("the same answers both ways", "share", ours=same, minimum=1.0)


def contained(bench: Benchmark) -> None:
    """Hostile programs."""
    names = [*HOSTILE, *FORGERIES]
    held = sum(is_contained(name) for name in names)
    what = f"hostile programs contained, of {len(names)}"
    bench.row(what, "programs", ours=held, minimum=len(names))


def _kept() -> list[dict[str, Any]]:
    """The rows of languages that an earlier call measured, which takes minutes of a busy machine."""
    file = RESULTS / "evaluation.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    names = ("35 languages of", "200 of these", "bits per byte, float32")
    return [row for row in rows if row["what"].startswith(names) and row["ours"] is not None]


def main() -> None:
    limit_threads(1)
    bench = Benchmark("evaluation", packages=("torch", "transformers", "lm-eval"))
    identities(bench)
    contained(bench)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared(bench, folder)
        peer = importlib.util.find_spec("lm_eval") is not None
        if peer:
            parity(bench, folder)
        else:
            bench.row("accuracy of two tasks", "difference", peer_name="lm-eval", reason="needs the package lm-eval")
        if peer and len(sys.argv) > 1:
            languages(bench, sys.argv[1], folder)
        elif previous := _kept():
            bench.rows += previous
        else:
            bench.row("35 languages", "CPU-s", peer_name="lm-eval", reason="needs lm-eval and a file of languages")
    bench.finish()


if __name__ == "__main__":
    main()
