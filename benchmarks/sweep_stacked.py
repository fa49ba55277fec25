"""Cells of a sweep on one backbone beside the same cells one after another: CPU time, memory, and the same figures.

    python -m benchmarks.sweep_stacked

32 cells of the shipped backbone, ranks 1, 4, 16 and 64 with eight seeds each, packed language modelling in fp32 on one
thread, at 64, 256 and 1,024 tokens per cell and update. Alone, each cell runs a few updates of our loop before the next
one does; all have the frozen tensors in common there too, so that caches favour neither side. Updates are timed in the
order A B B A, from one request for work to the next: batches, forward, backward, clipping, AdamW and the line in
metrics.jsonl. The floor is the time of the matrix products alone, at the sizes in which the stack makes them, without
attention. Memory is by allocator counts: whatever is alive, plus the highest level within an update.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks._harness import Benchmark, cpu_seconds, in_child, interleave, limit_threads, peak_bytes

HERE = "benchmarks.sweep_stacked"
BACKBONE, RANKS, SEEDS, PARITY_STEPS = "flatshift-5m", (1, 4, 16, 64), 8, 50
SHAPES = {64: (1, 64), 256: (1, 256), 1024: (4, 256)}
"""(rows, length) by tokens per cell and update."""
ROUNDS = {64: 6, 256: 4, 1024: 2}
TURN = {64: 3, 256: 2, 1024: 1}
"""Updates of every cell in one timing."""


def _cells(
    shape: tuple[int, int],
    steps: int,
    folder: Path,
    device: str,
    *,
    noisy: bool = False,
    last: bool = False,
    ranks: Sequence[int] = RANKS,
    seeds: int = SEEDS,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> tuple[Any, list[Any]]:
    """The backbone, and for every cell how to make its engine and its stage: `seeds` of each of the `ranks`.

    noisy: every second cell trains with GGPO. last: adapters in the last block, and the same rows for all cells.
    """
    from flatshift.finetune.config import Adapter, Evaluate, Optimizer, Train
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.rows import read_rows
    from flatshift.finetune.models.backbone import open_backbone
    from flatshift.finetune.models.load import load_backbone
    from flatshift.finetune.run_directory import RunDirectory
    from flatshift.finetune.stacked.together import stage_work
    from flatshift.finetune.tasks import LanguageModel
    from flatshift.finetune.train.stage import TrainingStage
    from flatshift.regularizers import GGPO, Plain, build

    task, tokenizer = LanguageModel(), open_backbone(BACKBONE).tokenizer
    backbone = load_backbone(BACKBONE, task=task, precision=precision, device=device)
    rows = [row for row, _ in zip(read_rows(["sample:pool"]), range(1500), strict=False)]
    examples = encode(rows, task=task, tokenizer=tokenizer, max_length=shape[1]).examples

    targets = tuple(name for name in _linear(backbone) if f".{backbone.config.num_hidden_layers - 1}." in name)

    def cell(rank: int, number: int) -> Any:
        adapter = Adapter(rank=rank, targets=targets if last else "all-linear")
        seed = 0 if last else number
        train = Train(
            steps=steps,
            batch_size=shape[0],
            seed=seed,
            max_length=shape[1],
            precision=precision,
            save_every=0,
            device=device,
        )

        def stage(engine: Any, name: str) -> Any:
            return stage_work(
                engine,
                tokenizer,
                TrainingStage(name="fine-tune",
                task=task,
                batches=TrainingDataLoader(
                    examples, task=task, batch_size=shape[0], seed=seed, max_length=shape[1],
                    pad_id=tokenizer.pad_token_id,
                ),
                dev=[],
                optimizer=Optimizer(lr=1e-3 * 2.0 ** (number % 3)),
                train=train,
                evaluate=Evaluate(),
                regularizer=build(GGPO() if noisy and number % 2 else Plain()),
                run=RunDirectory.create(folder / f"{name}-{rank}-{number}"),
                seed=seed),
            )  # fmt: skip

        return adapter, train, stage

    return backbone, [cell(rank, number) for rank in ranks for number in range(seeds)]


def _linear(backbone: Any) -> list[str]:
    """Names of the linear layers of the blocks."""
    import torch

    return [n for n, m in backbone.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"]


class _Stacked:
    """The cells as one stack."""

    def __init__(self, backbone: Any, cells: Sequence[Any]) -> None:
        from flatshift.finetune.stacked.host import Host
        from flatshift.finetune.stacked.together import cell_engine
        from flatshift.finetune.tasks import LanguageModel

        task = LanguageModel()
        self.engines = [cell_engine(backbone, adapter, task=task, train=train) for adapter, train, _ in cells]
        self.host = Host(backbone, self.engines, task=task, pad_id=0)
        self.stages = [stage(engine, "stacked") for engine, (_, _, stage) in zip(self.engines, cells, strict=True)]
        self.host.__enter__()
        self.waiting = {seat: next(stage) for seat, stage in enumerate(self.stages)}
        self.losses: list[list[float]] = []

    def update(self, times: int) -> None:
        """That many updates of every cell."""
        for _ in range(times):
            found = self.host.compute(self.waiting)
            self.losses.append([loss.item() for loss in found.values()])
            self.waiting = {seat: self.stages[seat].send(loss) for seat, loss in found.items()}


class _Alone:
    """The cells one after another."""

    def __init__(self, backbone: Any, cells: Sequence[Any]) -> None:
        from flatshift.finetune.stacked.together import cell_engine
        from flatshift.finetune.tasks import LanguageModel

        task = LanguageModel()
        self.engines = [cell_engine(backbone, adapter, task=task, train=train) for adapter, train, _ in cells]
        self.stages = [stage(engine, "alone") for engine, (_, _, stage) in zip(self.engines, cells, strict=True)]
        self.waiting = [next(stage) for stage in self.stages]
        self.losses: list[list[float]] = [[] for _ in cells]

    def update(self, times: int) -> None:
        """That many updates of every cell."""
        for place, stage in enumerate(self.stages):
            for _ in range(times):
                loss = self.waiting[place].compute()
                self.losses[place].append(loss.item())
                self.waiting[place] = stage.send(loss)


def times(
    tokens: int,
    rounds: int,
    turn: int,
    device: str = "cpu",
    last: bool = False,
    ranks: Sequence[int] = RANKS,
    seeds: int = SEEDS,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> dict[str, list[float]]:
    """Seconds per cell and update: `stacked`, `alone` (paired), and `floor`; of CPU time, or of wall time on a GPU."""
    limit_threads(1)

    def wall_seconds(run: Any) -> float:
        import torch

        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory() as folder:
        backbone, cells = _cells(
            SHAPES[tokens], 10_000, Path(folder), device, last=last, ranks=ranks, seeds=seeds, precision=precision
        )
        alone = _Alone(backbone, cells)  # before the backbone serves the stack
        stacked = _Stacked(backbone, cells)
        stacked.update(1)
        alone.update(1)
        mine, theirs = interleave(
            lambda: stacked.update(turn),
            lambda: alone.update(turn),
            rounds=rounds,
            measure=cpu_seconds if device == "cpu" else wall_seconds,
        )
        each = len(cells) * turn
        whole = device == "cpu" and not last and (tuple(ranks), seeds) == (RANKS, SEEDS)
        floor = floor_seconds(backbone, SHAPES[tokens]) if whole else 0.0
    return {"stacked": [t / each for t in mine], "alone": [t / each for t in theirs], "floor": [floor]}


def floor_seconds(backbone: Any, shape: tuple[int, int]) -> float:
    """CPU-seconds per cell and update of the matrix products alone, at the sizes in which a stack makes them."""
    from flatshift.finetune.stacked.passes import split

    shapes = [shape] * (len(RANKS) * SEEDS)
    passes = [tuple(RANKS[seat // SEEDS] for seat in chosen) for chosen in split(shapes, device="cpu")]
    found = {ranks: _pass_seconds(backbone, ranks, shape[0] * shape[1]) for ranks in dict.fromkeys(passes)}
    return sum(found[ranks] for ranks in passes) / len(shapes)


def _pass_seconds(backbone: Any, ranks: Sequence[int], each: int) -> float:
    """CPU-seconds of the products of one pass of cells of these ranks, `each` tokens a cell."""
    import torch

    head, tokens, total = backbone.lm_head.weight.detach(), each * len(ranks), 0.0
    for name in _linear(backbone):
        weight = backbone.get_submodule(name).weight.detach()
        m, n = weight.shape
        x, y = torch.randn(tokens, n), torch.randn(tokens, m)
        products = [(x, weight.T), (y, weight)]
        for rank in set(ranks):
            count = ranks.count(rank)
            xs, ys = x[: count * each].view(count, each, n), y[: count * each].view(count, each, m)
            a, b, z = torch.randn(count, rank, n), torch.randn(count, m, rank), torch.randn(count, each, rank)
            products += [(xs, a.mT), (z, b.mT), (ys, b), (z, a), (ys.mT, z), (z.mT, xs)]
        total += _seconds(products)
    part = torch.randn(256, head.shape[1])  # the loss is made in slices
    return total + tokens / 256 * _seconds([(part, head.T), (torch.randn(256, head.shape[0]), head)])


def _seconds(products: Sequence[tuple[Any, Any]], repeats: int = 2) -> float:
    """CPU-seconds of the products once, the fastest of a few."""
    import torch

    best = float("inf")
    for _ in range(repeats + 1):
        started = time.process_time()
        for left, right in products:
            torch.matmul(left, right)
        best = min(best, time.process_time() - started)
    return best


def difference(device: str = "cpu", last: bool = False) -> dict[str, float]:
    """Largest relative difference of the losses over all updates, and of the trained tensors after the last one.

    Every second cell of a rank trains with GGPO.
    """
    limit_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        backbone, cells = _cells(SHAPES[64], 10_000, Path(folder), device, noisy=True, last=last)
        alone = _Alone(backbone, cells)  # before the backbone serves the stack
        stacked = _Stacked(backbone, cells)
        stacked.update(PARITY_STEPS)
        alone.update(PARITY_STEPS)
        losses = max(
            abs(together[place] / by_itself[step] - 1)
            for step, together in enumerate(stacked.losses)
            for place, by_itself in enumerate(alone.losses)
        )
        tensors = 0.0
        for mine, theirs in zip(stacked.engines, alone.engines, strict=True):
            pairs = [(mine.parameters[name].detach(), p.detach()) for name, p in theirs.parameters.items()]
            gap = sum(float((p - q).double().square().sum()) for p, q in pairs)
            tensors = max(tensors, (gap / sum(float(q.double().square().sum()) for _, q in pairs)) ** 0.5)
    return {"losses": losses, "tensors": tensors}


def stack_memory(tokens: int, last: bool = False) -> dict[str, float]:
    """Bytes alive at the worst moment of an update of the stack, and what its plan said."""
    from benchmarks._stack_memory import stack_plan

    limit_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        backbone, cells = _cells(SHAPES[tokens], 10_000, Path(folder), "cpu", last=last)
        stacked = _Stacked(backbone, cells)
        plan = stack_plan(stacked.host, [SHAPES[tokens]] * len(cells), train=cells[0][1])
        stacked.update(2)
        measured = peak_bytes(partial(stacked.update, 1))
    return {"measured": measured, "planned": float(plan.total)}


def main() -> None:
    """Measure all rows and write benchmarks/results/sweep_stacked.json."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    bench = Benchmark("sweep_stacked", packages=("torch", "transformers", "peft"))
    count = len(RANKS) * SEEDS
    for tokens in SHAPES:
        found = in_child(f"{HERE}:times", tokens=tokens, rounds=ROUNDS[tokens], turn=TURN[tokens])
        what = f"update of one of {count} cells, {tokens} tokens"
        bench.row(
            what,
            ours=found["stacked"],
            peer=found["alone"],
            peer_name="alone",
            unit="CPU-s",
            bar_op="<=",
            bar_value=0.7 if tokens == 64 else 1.02,
        )
        floor = found["floor"][0]
        bench.row(
            f"{what}: beside the products alone", ours=found["stacked"], peer=floor, peer_name="floor", unit="CPU-s"
        )
    for tokens in SHAPES:
        found = in_child(f"{HERE}:times", tokens=tokens, rounds=ROUNDS[tokens], turn=TURN[tokens], last=True)
        bench.row(
            f"update of one of {count} cells, {tokens} tokens, last block, same rows",
            ours=found["stacked"],
            peer=found["alone"],
            peer_name="alone",
            unit="CPU-s",
            bar_op="<=",
            bar_value=1.02,
        )
    for tokens, last in [*((tokens, False) for tokens in SHAPES), (256, True)]:
        held = in_child(f"{HERE}:stack_memory", tokens=tokens, last=last)
        which = ", last block, same rows" if last else ""
        bench.row(
            f"memory of {count} cells, {tokens} tokens{which}: distance from the plan",
            ours=abs(held["measured"] / held["planned"] - 1),
            unit="of the plan",
            bar_op="<=",
            bar_value=0.1,
        )
        bench.row(
            f"memory of {count} cells, {tokens} tokens{which}",
            ours=held["measured"],
            peer=held["planned"],
            peer_name="plan",
            unit="B",
        )
    for last, which in ((False, ""), (True, ", last block, same rows")):
        gaps = in_child(f"{HERE}:difference", last=last)
        bench.row(
            f"largest loss difference over {PARITY_STEPS} updates of {count} cells, plain and GGPO, fp32{which}",
            ours=gaps["losses"],
            unit="relative",
            bar_op="<=",
            bar_value=1e-5,
        )
        bench.row(
            f"largest difference of the trained tensors after {PARITY_STEPS} updates{which}",
            ours=gaps["tensors"],
            unit="relative",
        )
    what = f"update of one of {count} cells, 64 tokens, one GPU"
    judged: dict[str, Any] = {"peer_name": "alone", "bar_op": "<=", "bar_value": 0.15}
    if torch.cuda.is_available():
        found = in_child(f"{HERE}:times", tokens=64, rounds=ROUNDS[64], turn=TURN[64], device="cuda")
        bench.row(what, ours=found["stacked"], peer=found["alone"], unit="s", **judged)
    else:
        bench.row(what, unit="s", reason="no CUDA device on this machine", **judged)
    bench.finish()


if __name__ == "__main__":
    main()
