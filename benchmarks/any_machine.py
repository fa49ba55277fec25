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
- how long the tutorial's first result, the demo and the tests take, the slow ones apart (`benchmarks._first_minutes`),
  with nothing beside them;
- the training step rehearsed for a CUDA device: waits of an update, and how many cases pass (`benchmarks._rehearsal`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks import _instructions
from benchmarks._first_minutes import minute_rows, slow_rows, tutorial_rows
from benchmarks._harness import (
    Benchmark,
    cpu_seconds,
    in_child,
    limit_threads,
    peak_bytes,
    rows_by_group,
)
from benchmarks._machine_constants import CONSTANTS
from benchmarks._machine_precision import narrow_rows, precision_rows, thread_rows

HERE, CONST = "benchmarks.any_machine", "benchmarks._machine_constants"
NEIGHBOUR = 1.05
"""By how much a neighbouring value may be better before a number counts as one that knows its machine."""
LOSSES = ((4096, 256, 1024, 15), (32_000, 512, 512, 7), (128_256, 256, 384, 5))
"""Vocabulary, width, supervised tokens, and rounds."""
STEPS = {"small": (4, 256, 768, 32), "wide": (4, 768, 2304, 128)}
"""Blocks, width, inner width, and tokens of each of four rows."""
SLOW_BF16 = "float32 is what `precision: auto` takes here; products in bf16 are some 40 times slower"

Environment = Mapping[str, str]


# ---------------------------------------------------------------------------------------- measured in children


def in_turn(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of each of `ways`, forwards and backwards through them; element i of all comes from one round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(cpu_seconds(ways[name]))
    return found


def loss_times(vocabulary: int, width: int, tokens: int, precision: str, rounds: int) -> dict[str, Any]:
    """Forward and backward pass of the loss from hidden states on: CPU-seconds by whole logits (`whole`), in our slices
    (`ours`), and in slices of half and of twice as many rows; peak bytes of the first two."""
    from unittest import mock

    import torch
    import torch.nn.functional as F

    from flatshift.finetune.compute import loss

    limit_threads(1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(vocabulary, width, generator=generator) * 0.02)
    linear = linear.to(dtype)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)

    def whole() -> None:
        hidden.grad = None
        F.cross_entropy(linear(hidden).float(), targets, reduction="sum").backward()

    def sliced(rows: int | None = None) -> None:
        hidden.grad = None
        rule = loss.slice_rows if rows is None else lambda vocabulary, device, width: rows
        with mock.patch.object(loss, "slice_rows", rule):
            loss.linear_cross_entropy(hidden, linear, targets).backward()

    rows = loss.slice_rows(vocabulary, "cpu", dtype.itemsize)
    whole()
    sliced()
    ways = {"ours": sliced, "whole": whole, "half": partial(sliced, rows // 2), "double": partial(sliced, rows * 2)}
    found: dict[str, Any] = in_turn(ways, rounds)
    return {**found, "rows": rows, "bytes": [peak_bytes(sliced), peak_bytes(whole)]}


def layer_times(size: str, precision: str, rounds: int) -> dict[str, Any]:
    """Forward and backward pass of a random Llama's blocks with rank-8 LoRA on every linear layer: CPU-seconds in the
    fused form (`ours`) and by PEFT (`peft`), and how far both gradients are from float64's, relative to its norm."""
    import contextlib
    import copy

    import torch

    from benchmarks.regularizer_step import VOCABULARY, _model
    from flatshift.regularizers.layers.fused import FusedLayers

    limit_threads(1)
    blocks, width, inner, tokens = STEPS[size]
    model = _model(blocks, width, inner)
    bf16 = precision == "bf16"
    if bf16:
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.bfloat16()
    with torch.no_grad():  # B away from zero, so that every factor has a gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(name)))
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


# ---------------------------------------------------------------------------------------- rows


def settings() -> dict[str, Environment]:
    """The environments to run in, by the instruction sets that are in use there."""
    found: dict[str, Environment] = {}
    for environment in ({}, _instructions.rehearsal()):
        sets = in_child(f"{HERE}:sets_in_use", environment=environment)
        found.setdefault(sets, environment)
    return found


def sets_in_use() -> str:
    """`torch AVX512, oneDNN AVX10.1 and AMX`."""
    used = _instructions.used()
    return f"torch {used['torch']}, oneDNN {used['oneDNN'].partition(' with')[0].replace('Intel ', '')}"


def has_bf16(environment: Environment) -> bool:
    """Whether bf16 products are made by instructions there."""
    return bool(in_child(f"{HERE}:bf16_here", environment=environment))


def bf16_here() -> bool:
    """The same of this process."""
    from flatshift.finetune.compute.numerics import has_bf16_matmul

    return has_bf16_matmul()


def beside_neighbours(bench: Benchmark, what: str, ours: list[float], others: Mapping[str, list[float]]) -> None:
    """A row of a number beside the better of the others."""
    name = min(others, key=lambda other: statistics.median(others[other]))
    bench.row(
        what, unit="CPU-s", ours=ours, peer=others[name], peer_name=name, bar_op="<=", bar_value=NEIGHBOUR
    )  # fmt: skip


def losses(bench: Benchmark, sets: str, environment: Environment) -> None:
    """The head."""
    bf16 = has_bf16(environment)
    for vocabulary, width, tokens, rounds in LOSSES:
        for precision in ("fp32", "bf16"):
            what = f"V {vocabulary:,}, {tokens} × {width}, {precision} ({sets})"
            judged: dict[str, Any] = {"peer_name": "whole logits", "bar_op": "<=", "bar_value": 1.0}
            if precision == "bf16" and not bf16:
                bench.row(f"loss and its gradient, {what}", unit="CPU-s", reason=SLOW_BF16, **judged)
                continue
            size: dict[str, Any] = {"vocabulary": vocabulary, "width": width, "tokens": tokens, "precision": precision}
            found = in_child(f"{HERE}:loss_times", environment=environment, rounds=rounds, **size)
            bench.row(f"loss and its gradient, {what}", unit="CPU-s", ours=found["ours"], peer=found["whole"], **judged)
            mine, theirs = found["bytes"]
            bench.row(
                f"peak memory of the loss, {what}", unit="bytes", ours=mine, peer=theirs, **{**judged, "bar_value": 0.7}
            )
            rows = found["rows"]
            beside_neighbours(
                bench,
                f"slice of {rows} rows, {what}",
                found["ours"],
                {f"{rows // 2} rows": found["half"], f"{rows * 2} rows": found["double"]},
            )


def layers(bench: Benchmark, sets: str, environment: Environment) -> None:
    """The fused form of plain LoRA layers."""
    bf16 = has_bf16(environment)
    for size, (blocks, width, _, tokens) in STEPS.items():
        for precision in ("fp32", "bf16"):
            what = f"{blocks} blocks of {width}, 4 × {tokens} tokens, {precision} ({sets})"
            judged: dict[str, Any] = {"peer_name": "PEFT's forward", "bar_op": "<=", "bar_value": 1.0}
            if precision == "bf16" and not bf16:
                bench.row(f"plain LoRA pass, {what}", unit="CPU-s", reason=SLOW_BF16, **judged)
                continue
            rounds = 24 if size == "small" else 8
            found = in_child(
                f"{HERE}:layer_times", environment=environment, size=size, precision=precision, rounds=rounds
            )
            bench.row(f"plain LoRA pass, {what}", unit="CPU-s", ours=found["ours"], peer=found["peft"], **judged)
            mine, theirs = found["apart"]
            judged |= {"bar_value": 1.1}
            bench.row(f"its gradient from float64's, {what}", unit="relative", ours=mine, peer=theirs, **judged)


def kernels(bench: Benchmark, sets: str, environment: Environment) -> None:
    """Attention on short rows in bf16."""
    for tokens in (16, 32, 64, 96, 128):
        found = in_child(f"{CONST}:attention_times", environment=environment, tokens=tokens, rounds=7)
        others = {"batched products": found["products"], "torch's choice": found["torch"]}
        beside_neighbours(bench, f"attention, rows of {tokens} tokens, bf16 ({sets})", found["ours"], others)


def constants(bench: Benchmark, sets: str, environment: Environment) -> None:
    """Every number beside its neighbours."""
    for what in CONSTANTS:
        rounds = 3 if "pass" in what else 10
        found = in_child(f"{CONST}:constant_times", environment=environment, what=what, rounds=rounds)
        value = str(int(found.pop("value")[0]))
        ours = found.pop(value)
        others = {f"{int(other):,}": times for other, times in found.items()}
        beside_neighbours(bench, f"{what}: {int(value):,} ({sets})", ours, others)


def rehearsal(bench: Benchmark) -> None:
    """What a CUDA device would do with the training loop, rehearsed without one (docs/cuda.md)."""
    found = in_child("benchmarks._rehearsal:figures")
    bench.row(
        "a training step rehearsed for a CUDA device on tensors without values: most waits of the host in one update",
        ours=found["waits_per_update"],
        unit="waits",
        bar_op="<=",
        bar_value=1,
    )
    bench.row(
        f"rehearsed cases of objective, regularizer, checkpointing, micro-batches and packing that passed, of "
        f"{found['cases']}",
        ours=found["passed"],
        unit="cases",
        bar_op=">=",
        bar_value=found["cases"],
    )


def everywhere(measure: Callable[[Benchmark, str, Environment], None], bench: Benchmark) -> None:
    """Natively and rehearsed."""
    for sets, environment in settings().items():
        measure(bench, sets, environment)


GROUPS: dict[str, Callable[[Benchmark], None]] = {
    "precision": precision_rows,
    "narrow": narrow_rows,
    "rehearsal": rehearsal,
    "tutorial": tutorial_rows,
    "minutes": minute_rows,
    "slow": slow_rows,
    "head": partial(everywhere, losses),
    "layers": partial(everywhere, layers),
    "attention": partial(everywhere, kernels),
    "numbers": partial(everywhere, constants),
    "threads": thread_rows,
}


def main() -> None:
    """Measure the groups that are named (all by default) and write benchmarks/results/any_machine.json; rows of the
    others stay as this machine measured them, with the commit that they are of."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    asked = parser.parse_args()
    if odd := sorted(set(asked.groups) - GROUPS.keys()):
        parser.error(f"there is no group {odd[0]}; take {', '.join(GROUPS)}")
    limit_threads(1)
    bench = Benchmark("any_machine", packages=("torch", "numpy", "transformers", "peft"))
    rows_by_group(bench, GROUPS, asked.groups)
    bench.finish()


if __name__ == "__main__":
    main()
