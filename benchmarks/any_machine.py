"""What was tuned on one machine, on others: rehearsed by hiding instruction sets from the libraries that multiply.

    python -m benchmarks.any_machine                       # everything, about an hour and a half on two cores
    python -m benchmarks.any_machine precision rehearsal   # only these groups; the other rows stay

Every setting runs in a process of its own, natively and once more as on a machine with AVX2 and no bf16 instructions
(`benchmarks._instructions`); a row is named by what torch and oneDNN then say that they use. On a machine that has no
more than AVX2 the second run is left out. One thread, CPU-seconds, in turn. Rows:

- the head: our loss in slices beside whole logits and `F.cross_entropy`, at three vocabularies; the slice beside one
  of half and one of twice as many rows; and the memory of both;
- the fused form of plain LoRA layers beside PEFT's forward, a whole forward and backward pass;
- attention on short rows in bf16: what we choose beside the faster of both kernels;
- every number that was chosen by measurement, beside the better of its half and its double;
- what `train.precision: auto` takes beside the dtype that a whole step is faster in (`benchmarks._machine_precision`);
- an update on the threads that torch takes by itself beside one thread, in wall time;
- how long the tutorial's first result, the demo and the tests take: wall minutes, nothing beside them;
  the first is from an empty directory with 200 rows and the source to predictions and a page, by the lines of
  docs/first-model.md as they stand, installation included; the others with AVX2 only (the rehearsal leaves clock,
  memory and caches as they are, so a real machine of that kind is slower by what those differ);
- the training step rehearsed for a CUDA device: waits of an update, and how many cases pass (`benchmarks._rehearsal`).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks import _instructions
from benchmarks._harness import ROOT, Benchmark, cpu_clock, in_child, in_turn, limit_threads, measure_groups, peak_bytes
from benchmarks._machine_constants import CONSTANTS
from benchmarks._machine_precision import narrow_rows, precision_rows, thread_rows
from benchmarks.regularizer_step import VOCABULARY, adapted_llama
from flatshift.finetune.compute import loss
from flatshift.finetune.compute.numerics import has_bf16_matmul
from flatshift.finetune.data.rows import read_rows
from flatshift.regularizers.layers.fused import FusedLayers

HERE, CONST = "benchmarks.any_machine", "benchmarks._machine_constants"
LOSSES = ((4096, 256, 1024, 15), (32_000, 512, 512, 7), (128_256, 256, 384, 5))
"""Vocabulary, width, rows, and rounds."""
STEPS = {"small": (4, 256, 768, 32), "wide": (4, 768, 2304, 128)}
"""Blocks, width, inner width, and tokens of each of four rows."""
SLOW_BF16 = "float32 is what `precision: auto` takes here; products in bf16 are some 40 times slower"
Environment = Mapping[str, str]


# ---------------------------------------------------------------------------------------- measured in children


def loss_ways(vocabulary: int, width: int, rows: int, dtype: Any) -> tuple[dict[str, Callable[[], Any]], int]:
    """Forward and backward pass of the loss from hidden states on: by whole logits, in our slices, in slices of half
    and of twice as many rows, and its two matrix products alone; and the rows of a slice."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(width, vocabulary, bias=False, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(torch.randn(vocabulary, width, generator=generator) * 0.02)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)

    def whole() -> None:
        hidden.grad = None
        F.cross_entropy(linear(hidden).float(), targets, reduction="sum").backward()

    def sliced(count: int | None = None) -> None:
        hidden.grad = None
        rule = loss.slice_rows if count is None else lambda vocabulary, device, width: count
        with mock.patch.object(loss, "slice_rows", rule):
            loss.linear_cross_entropy(hidden, linear, targets).backward()

    @torch.no_grad()
    def products() -> None:
        for part in hidden.split(256):
            torch.mm(torch.mm(part, linear.weight.t()), linear.weight)

    count = loss.slice_rows(vocabulary, "cpu", dtype.itemsize)
    halves = {"half": partial(sliced, count // 2), "double": partial(sliced, count * 2)}
    return {"ours": sliced, "whole": whole, **halves, "products": products}, count


def loss_times(vocabulary: int, width: int, rows: int, precision: str, rounds: int) -> dict[str, Any]:
    """CPU-seconds of these ways, the rows of a slice, and peak bytes of the first two."""
    limit_threads(1)
    ways, count = loss_ways(vocabulary, width, rows, torch.bfloat16 if precision == "bf16" else torch.float32)
    del ways["products"]
    ways["whole"](), ways["ours"]()
    return {**in_turn(ways, rounds), "rows": count, "bytes": [peak_bytes(ways["ours"]), peak_bytes(ways["whole"])]}


def layer_times(size: str, precision: str, rounds: int) -> dict[str, Any]:
    """Forward and backward pass of a random Llama's blocks with rank-8 LoRA on every linear layer: CPU-seconds in the
    fused form (`ours`) and by PEFT (`peft`), and how far both gradients are from float64's, relative to its norm."""
    limit_threads(1)
    blocks, width, inner, tokens = STEPS[size]
    model, bf16 = adapted_llama(blocks, width, inner), precision == "bf16"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # away from zero, so that every factor has a gradient
                parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(name)))
            elif bf16 and "lora_" not in name:
                parameter.data = parameter.data.bfloat16()
    ids = torch.randint(1, VOCABULARY, (4, tokens), generator=torch.Generator().manual_seed(0))
    along = torch.randn(4, tokens, width, generator=torch.Generator().manual_seed(1))
    fused = FusedLayers(model)

    def run(around: Any, of: Any = model, autocast: bool = bf16) -> None:
        of.zero_grad()
        with around, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            (of.base_model.model.model(input_ids=ids).last_hidden_state.float() * along).sum().backward()

    def gradient(of: Any) -> Any:
        return torch.cat([p.grad.double().flatten() for p in of.parameters() if p.grad is not None])

    exact = copy.deepcopy(model).double()
    run(contextlib.nullcontext(), exact, False)
    wanted, apart = gradient(exact), []
    for around in (fused.replace_forwards(), contextlib.nullcontext()):
        run(around)
        apart.append(float((gradient(model) - wanted).norm() / wanted.norm()))
    ways = {"ours": lambda: run(fused.replace_forwards()), "peft": lambda: run(contextlib.nullcontext())}
    return {**in_turn(ways, rounds), "apart": apart}


def machine() -> tuple[str, bool]:
    """The instruction sets in use (`torch AVX512, oneDNN AVX10.1 and AMX`), and whether they make bf16 products."""
    used = _instructions.used()
    sets = f"torch {used['torch']}, oneDNN {used['oneDNN'].partition(' with')[0].replace('Intel ', '')}"
    return sets, has_bf16_matmul()


# ---------------------------------------------------------------------------------------- rows


def everywhere(measure: Callable[[Benchmark, str, Environment, bool], None], bench: Benchmark) -> None:
    """Natively and rehearsed: `measure` gets instruction sets, environment, and whether it has bf16 products."""
    seen = set()
    for environment in ({}, _instructions.rehearsal()):
        sets, bf16 = in_child(f"{HERE}:machine", environment=environment)
        if sets not in seen:
            measure(bench, sets, environment, bf16)
        seen.add(sets)


def beside_neighbours(bench: Benchmark, what: str, ours: list[float], others: Mapping[str, list[float]]) -> None:
    """A row of a number beside the better of the others: one that is 5 % better shows that it knows its machine."""
    name = min(others, key=lambda other: statistics.median(others[other]))
    bench.row(what, "CPU-s", ours=ours, peer=others[name], peer_name=name, maximum=1.05)


def losses(bench: Benchmark, sets: str, environment: Environment, bf16: bool) -> None:
    """The head."""
    for vocabulary, width, rows, rounds in LOSSES:
        for precision in ("fp32", "bf16"):
            what, peer = f"V {vocabulary:,}, {rows} × {width}, {precision} ({sets})", {"peer_name": "whole logits"}
            if precision == "bf16" and not bf16:
                bench.row(f"loss and its gradient, {what}", "CPU-s", reason=SLOW_BF16, maximum=1.0, **peer)
                continue
            size: dict[str, Any] = {"vocabulary": vocabulary, "width": width, "rows": rows, "precision": precision}
            result = in_child(f"{HERE}:loss_times", environment=environment, rounds=rounds, **size)
            ours, count = result["ours"], result["rows"]
            bench.row(f"loss and its gradient, {what}", "CPU-s", ours=ours, peer=result["whole"], maximum=1.0, **peer)
            mine, theirs = result["bytes"]
            bench.row(f"peak memory of the loss, {what}", "bytes", ours=mine, peer=theirs, maximum=0.7, **peer)
            others = {f"{count // 2} rows": result["half"], f"{count * 2} rows": result["double"]}
            beside_neighbours(bench, f"slice of {count} rows, {what}", ours, others)


def layers(bench: Benchmark, sets: str, environment: Environment, bf16: bool) -> None:
    """The fused form of plain LoRA layers."""
    for size, (blocks, width, _, tokens) in STEPS.items():
        for precision in ("fp32", "bf16"):
            what = f"{blocks} blocks of {width}, 4 × {tokens} tokens, {precision} ({sets})"
            peer = {"peer_name": "PEFT's forward"}
            if precision == "bf16" and not bf16:
                bench.row(f"plain LoRA pass, {what}", "CPU-s", reason=SLOW_BF16, maximum=1.0, **peer)
                continue
            call = {"size": size, "precision": precision, "rounds": 24 if size == "small" else 8}
            result = in_child(f"{HERE}:layer_times", environment=environment, **call)
            bench.row(
                f"plain LoRA pass, {what}", "CPU-s", ours=result["ours"], peer=result["peft"], maximum=1.0, **peer
            )
            mine, theirs = result["apart"]
            bench.row(f"its gradient from float64's, {what}", "relative", ours=mine, peer=theirs, maximum=1.1, **peer)


def kernels(bench: Benchmark, sets: str, environment: Environment, bf16: bool) -> None:
    """Attention on short rows in bf16."""
    for tokens in (16, 32, 64, 96, 128):
        result = in_child(f"{CONST}:attention_times", environment=environment, tokens=tokens, rounds=7)
        others = {"batched products": result["products"], "torch's choice": result["torch"]}
        beside_neighbours(bench, f"attention, rows of {tokens} tokens, bf16 ({sets})", result["ours"], others)


def constants(bench: Benchmark, sets: str, environment: Environment, bf16: bool) -> None:
    """Every number beside its neighbours."""
    for what in CONSTANTS:
        rounds = 3 if "pass" in what else 10
        result = in_child(f"{CONST}:constant_times", environment=environment, what=what, rounds=rounds)
        value = str(int(result.pop("value")[0]))
        ours = result.pop(value)
        others = {f"{int(other):,}": times for other, times in result.items()}
        beside_neighbours(bench, f"{what}: {int(value):,} ({sets})", ours, others)


def rehearsal(bench: Benchmark) -> None:
    """What a CUDA device would do with the training loop, rehearsed without one (docs/cuda.md)."""
    result = in_child("benchmarks._rehearsal:figures")
    what = "a training step rehearsed for a CUDA device on tensors without values: most waits of the host in one update"
    bench.row(what, "waits", ours=result["waits_per_update"], maximum=1)
    cases = result["cases"]
    what = "rehearsed cases of objective, regularizer, checkpointing, micro-batches and packing that passed"
    bench.row(f"{what}, of {cases}", "cases", ours=result["passed"], minimum=cases)


REHEARSED = "AVX2 rehearsed"
TUTORIAL = ROOT / "docs" / "first-model.md"
ROWS = 200


def timed(command: list[str], environment: dict[str, str], where: Path = ROOT) -> tuple[float, float, str]:
    """Wall minutes, CPU-minutes and the last line of a command, which must succeed."""
    wall, cpu = time.perf_counter(), cpu_clock()
    done = subprocess.run(command, cwd=where, env={**os.environ, **environment}, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [""]
    last = lines[-1]
    if done.returncode:
        named = "; ".join(line for line in lines if line.startswith("FAILED"))
        raise RuntimeError(f"{' '.join(command)} failed: {last} {named} {done.stderr[-500:]}")
    return (time.perf_counter() - wall) / 60, (cpu_clock() - cpu) / 60, last


def tutorial_rows(bench: Benchmark) -> None:
    """The first block of the tutorial, in a directory that has what it asks for."""
    block = re.findall(r"```console\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), flags=re.S)[0]
    lines = [line for line in block.splitlines() if line.strip()]
    bench.row("commands to the first result of the tutorial", "lines", ours=len(lines), maximum=6)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        given(home)
        _lift_limits()
        # An index that cannot be reached from here is given up at once, not after pip's minutes of retries.
        unreached = {"PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "5"}
        wall, cpu, _ = timed(["bash", "-e", "-c", block], {"PYTHONPATH": "", **unreached}, home)
        if not ((home / "labels.csv").is_file() and (home / "first.html").is_file()):
            raise RuntimeError("the tutorial's lines left no labels.csv or no first.html")
    _row(
        bench,
        f"an empty machine to the first result by the tutorial, {ROWS} rows, MiniLM, installation included",
        wall,
        5,
        f"{cpu:.1f} CPU-minutes",
    )


def given(home: Path) -> None:
    """What the tutorial asks for: `rows.jsonl` with labels, `new.jsonl` without, the source in `flatshift/`."""
    for name, split, columns in (("rows", "train", ("text", "label")), ("new", "test", ("text",))):
        rows = islice(read_rows([f"sample:banking/{split}"]), ROWS)
        results = [{column: row.values[column] for column in columns} for row in rows]
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in results), encoding="utf-8")
    source = home / "flatshift"
    source.mkdir()
    tree = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=tree, check=True)


def minute_rows(bench: Benchmark) -> None:
    """The demo and the default tests under the rehearsal; this process's own limit of threads is lifted."""
    _lift_limits()
    environment = {**_instructions.rehearsal(), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        demo = [sys.executable, "-m", "flatshift", "demo", "--out", str(Path(folder) / "demo")]
        wall, cpu, _ = timed(demo, environment)
        _row(bench, f"make demo, after installation, {REHEARSED}", wall, 4, f"{cpu:.1f} CPU-minutes")
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    wall, cpu, last = timed(tests, environment)
    counts = ", ".join(re.findall(r"\d+ (?:passed|skipped|failed)", last))
    _row(bench, f"the default tests of make test, {REHEARSED}", wall, 15, f"{cpu:.1f} CPU-minutes, {counts}")


def _lift_limits() -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.pop(name, None)


def _row(bench: Benchmark, what: str, wall: float, most: float, more: str) -> None:
    bench.row(f"{what} ({more})", "minutes", ours=wall, maximum=most)


GROUPS: dict[str, Callable[[Benchmark], None]] = {
    "precision": precision_rows,
    "narrow": narrow_rows,
    "rehearsal": rehearsal,
    "tutorial": tutorial_rows,
    "minutes": minute_rows,
    "head": partial(everywhere, losses),
    "layers": partial(everywhere, layers),
    "attention": partial(everywhere, kernels),
    "numbers": partial(everywhere, constants),
    "threads": thread_rows,
}

if __name__ == "__main__":
    measure_groups("any_machine", GROUPS, packages=("torch", "numpy", "transformers", "peft"))
