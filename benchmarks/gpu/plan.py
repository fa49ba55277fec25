"""The measurements of `python -m benchmarks.gpu`, with their bars and in the order of their worth; and their toy sizes.

First that everything works at all (a minute), then that its results are right, then speed and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks._harness import BarOp
from benchmarks._rehearsal import REGULARIZERS
from benchmarks.gpu.measurements import Best, Measurement, Row
from benchmarks.gpu.parity import KINDS, PACKED
from benchmarks.gpu.smoke import COMMANDS
from benchmarks.gpu.speed import SFT, TRAINER, Way
from benchmarks.gpu.transport import GOAL, KEOPS, TORCH

HERE = "benchmarks.gpu"
NAMES = {"1b": "1 B", "3b": "3 B", "8b": "8 B"}
WAYS: dict[Way, str] = {
    "none": "nothing recomputed",
    "selective": "attention recomputed",
    "full": "blocks recomputed",
    "compiled": "blocks compiled",
}
SECONDS = {"1b": 3.0, "3b": 6.0, "8b": 12.0}
"""Of one run of an update's measurement, model and warm-up included."""
FP32, BF16_LOSS, BF16_ADAPTER = 1e-4, 0.02, 0.25
"""Tolerances of parity, relative. Where the bits of fp32 differ, updates of AdamW follow by some 1e-5; in bf16 they
turn with the sign of small gradients, on a CPU by .05 to .13 after six updates."""
MFU = 0.50
PLAN_MEMORY, PLAN_SECONDS = 0.10, 0.20
"""By how much `flatshift plan` may be off."""
SMOKE_S = 1.4
"""Of one measurement of `smoke`."""
TOY = (64, 160, 2, 4, 2, 512, True)
_SMALL = {"rows": 2, "sequence": 40, "rank": 4, "warm": 1}
TOYS: dict[str, dict[str, Any]] = {
    f"{HERE}.devices:peaks": {"sizes": (64,)},
    f"{HERE}.smoke:step": {"rows": 1, "limit": 8},
    f"{HERE}.smoke:resume": {"limit": 8},
    f"{HERE}.smoke:command": {},
    f"{HERE}.smoke:waits": {"shape": TOY, "sequence": 24},
    f"{HERE}.speed:speed": {**_SMALL, "shape": TOY, "updates": 1, "product": (64,)},
    f"{HERE}.speed:regularized": {**_SMALL, "shape": TOY, "updates": 1},
    f"{HERE}.parity:equal": {"updates": 2, "rows": 1, "length": 128, "limit": 8, "regularizers": ("mgpo",)},
    f"{HERE}.parity:resumed": {"updates": 4, "killed_after": 3, "rows": 1, "length": 16, "limit": 8},
    f"{HERE}.transport:agreement": {"n": 4000, "m": 60, "d": 16},
    f"{HERE}.transport:solve": {"n": 4000, "m": 60, "d": 16, "passes": 1, "memory_bytes": 1 << 28},
    f"{HERE}.low_bits:learnt": {"steps": 2, "tail": 1, "rows": 1, "length": 32, "limit": 8},
    f"{HERE}.low_bits:sized": {**_SMALL, "shape": TOY, "updates": 1},
}
"""By function, arguments in place of those of the plan: `--rehearse`."""


def plan() -> list[Measurement | Best]:
    """All measurements, in the order in which they are made."""
    return [*smoke(), *parity(), peak(), *headline(), *regularizers(), *transport(), *others(), *low_bits()]


def rehearsed(entries: Sequence[Measurement | Best], seconds: float = 10.0) -> list[Measurement | Best]:
    """The same at toy size, for `seconds` each on a CPU: the code that runs is that of the plan."""
    return [
        replace(entry, arguments={**entry.arguments, **TOYS[entry.function]}, seconds=seconds)
        if isinstance(entry, Measurement)
        else entry
        for entry in entries
    ]


def peak() -> Measurement:
    """What shares of a peak are of."""
    row = Row("product", "best bf16 product beside the maker's dense peak", "TFLOP/s", "data sheet")
    return Measurement("peak", f"{HERE}.devices:peaks", {}, (row,), 10)


# --------------------------------------------------------------------------------------------- (1) it works


def smoke() -> list[Measurement]:
    """A step of every objective and regularizer, packed and padded, a resume, commands, and the host's waits."""
    results = []
    for kind in KINDS:
        for pack in (False, True) if kind in PACKED else (None,):
            called = kind.replace(" ", "-") + ("" if pack is None else "-packed" if pack else "-padded")
            results.append(_smoke(f"step/{called}", "step", f"two updates, {called}", kind=kind, pack=pack))
    for number, regularizer in enumerate(REGULARIZERS):
        pack = number % 2 == 0
        what = f"two updates, {regularizer}, {'packed' if pack else 'padded'}"
        more = {"kind": "language-model", "regularizer": regularizer, "pack": pack}
        results.append(_smoke(f"regularizer/{regularizer}", "step", what, **more))
    bits = _same("resumed", "a run left after update 3 of 4 and resumed: numbers that differ")
    results.append(Measurement("smoke/resume", f"{HERE}.smoke:resume", {}, (bits,), 2 * SMOKE_S))
    for name, words in COMMANDS.items():
        results.append(_smoke(f"command/{name}", "command", f"flatshift {words[0]} ({name})", line=name))
    for regularizer in ("plain", "ggpo", "mgpo"):
        most = Row("most", f"waits of the host in an update, {regularizer}", "waits", None, "<=", 1.0)
        arguments = {"regularizer": regularizer}
        results.append(Measurement(f"smoke/waits/{regularizer}", f"{HERE}.smoke:waits", arguments, (most,), SMOKE_S))
    return results


def _smoke(name: str, function: str, what: str, **arguments: Any) -> Measurement:
    row = Row("seconds", f"works: {what}", "s")
    return Measurement(f"smoke/{name}", f"{HERE}.smoke:{function}", arguments, (row,), SMOKE_S)


# --------------------------------------------------------------------------------------------- (3) speed and memory


def speed(shape: str, sequence: int, way: Way, rows: int, peers: tuple[str, ...] = ()) -> Measurement:
    """One shape at one length in one way."""
    what = f"{NAMES[shape]}, {rows} × {sequence:,} tokens, {WAYS[way]}"
    results = [
        Row("tokens", f"{what}: rate", "tokens/s"),
        Row("mfu", f"{what}: MFU, causal attention, data sheet's peak", "of the peak"),
        Row("memory", f"{what}: peak memory", "bytes"),
        Row("memory_plan", f"{what}: peak memory off `plan`'s", "share", None, "<=", PLAN_MEMORY),
        Row("seconds_plan", f"{what}: seconds off `plan`'s", "share", None, "<=", PLAN_SECONDS),
    ]
    if shape == "8b" and sequence == 4096:
        results += [
            Row("mfu_product", f"{what}: MFU, causal attention, best product", "of the peak"),
            Row("mfu_full", f"{what}: MFU, attention of all pairs, data sheet's peak", "of the peak"),
            Row("mfu_weights", f"{what}: MFU, 4 a weight and no attention, data sheet's peak", "of the peak"),
            Row("published", f"{what}: rate beside one published of an H100", "tokens/s", "40.6 % of an H100"),
        ]
    for peer in peers:
        results.append(Row(f"tokens|{peer}", f"{what}: rate", "tokens/s", peer, ">=", 1.0))
        results.append(Row(f"memory|{peer}", f"{what}: peak memory", "bytes", peer, "<=", 1.0))
    return Measurement(
        f"speed/{shape}/{sequence}/{way}-{rows}",
        f"{HERE}.speed:speed",
        {"shape": shape, "sequence": sequence, "rows": rows, "way": way, "peers": list(peers)},
        tuple(results),
        SECONDS[shape] * 2 * (1 + len(peers)) * (1.5 if sequence == 16384 else 1) + (60 if way == "compiled" else 0),
    )


def headline() -> list[Measurement | Best]:
    """8 B at 4,096 tokens, 1 to 4 rows; what does not fit into the device's memory says so."""
    results = [
        speed("8b", 4096, "none", 1, (TRAINER, SFT)),
        speed("8b", 4096, "compiled", 1),
        speed("8b", 4096, "full", 4, (TRAINER, SFT)),
        speed("8b", 4096, "compiled", 2),
        speed("8b", 4096, "selective", 2),
        speed("8b", 4096, "none", 2),
        speed("8b", 4096, "selective", 4),
        speed("8b", 4096, "full", 1),
        speed("8b", 4096, "compiled", 4),
        speed("8b", 4096, "none", 4),
    ]
    best = Row("mfu", "8 B, 4,096 tokens, the best way: MFU", "of the peak", None, ">=", MFU)
    return [*results, Best(best, tuple(m.name for m in results))]


def others() -> list[Measurement]:
    """1 B and 3 B, and other lengths."""
    return [
        speed("1b", 4096, "none", 2, (TRAINER, SFT)),
        speed("3b", 4096, "none", 2, (TRAINER, SFT)),
        speed("1b", 4096, "full", 4),
        speed("3b", 4096, "full", 4),
        speed("8b", 2048, "none", 2),
        speed("8b", 16384, "full", 1, (TRAINER, SFT)),
        speed("1b", 16384, "none", 1),
    ]


# --------------------------------------------------------------------------------------------- (2) parity


def parity() -> list[Measurement]:
    """Every objective, and a run that is killed."""
    results = []
    for kind in KINDS:
        what = f"{kind}, six updates, the worst of plain, GGPO and MGPO"
        rows = (
            _within("loss|fp32", f"losses of {what}: fp32 beside CPU fp32", FP32),
            _within("adapter|fp32", f"what training changed, {what}: fp32 beside CPU fp32", FP32),
            _within("loss|bf16", f"losses of {what}: bf16 beside CPU fp32", BF16_LOSS),
            _within("adapter|bf16", f"what training changed, {what}: bf16 beside CPU fp32", BF16_ADAPTER),
        )
        results.append(
            Measurement(f"parity/{kind.replace(' ', '-')}", f"{HERE}.parity:equal", {"kind": kind}, rows, 12)
        )
    for name, n, m, exact in (("dense", 20_000, 400, True), ("streamed", 200_000, 500, False)):
        what = f"GOT-D, {n:,} × {m:,} × 64, {name}"
        scores = Row("scores", f"scores of {what}: device beside CPU", "of their spread")
        near = (
            replace(scores, bar_op="<=", bar_value=FP32) if exact else scores,
            Row("chosen", f"best 5 % of {what}: chosen on both", "share", None, ">=", 0.999 if exact else 0.99),
        )
        results.append(Measurement(f"parity/gotd-{name}", f"{HERE}.transport:agreement", {"n": n, "m": m}, near, 12))
    for precision in ("fp32", "bf16"):
        bits = (
            _same(
                "resumed",
                f"a GGPO run in {precision}, killed by SIGKILL after update 5 of 8 and resumed: numbers that differ",
            ),
            _same("repeated", f"the same run twice, nobody killed, in {precision}: numbers that differ"),
        )
        results.append(
            Measurement(f"parity/resume-{precision}", f"{HERE}.parity:resumed", {"precision": precision}, bits, 30)
        )
    return results


def _within(figure: str, what: str, most: float) -> Row:
    return Row(figure, what, "relative", None, "<=", most)


def _same(figure: str, what: str) -> Row:
    return Row(figure, what, "numbers", None, "==", 0.0)


# --------------------------------------------------------------------------------------------- (4) to (6)


def regularizers() -> list[Measurement]:
    """GGPO and MGPO beside plain LoRA."""
    results = []
    for kind, most in (("ggpo", 1.03), ("mgpo", 1.02)):
        ways: tuple[tuple[str, Way, int], ...] = (("8b", "full", 4), ("1b", "none", 2))
        for shape, way, rows in ways:
            what = f"update with {kind.upper()}, {NAMES[shape]}, {rows} × 4,096 tokens, {WAYS[way]}"
            row = Row("seconds", what, "s", "plain LoRA", "<=", most)
            arguments: dict[str, Any] = {"kind": kind, "shape": shape, "sequence": 4096, "rows": rows, "way": way}
            results.append(
                Measurement(
                    f"regularizer/{kind}/{shape}", f"{HERE}.speed:regularized", arguments, (row,), 4 * SECONDS[shape]
                )
            )
    return results


def transport() -> list[Measurement]:
    """GOT-D's solver at two sizes."""
    results = []
    for name, n, m, guess, most in (("1m", 1_000_000, 1_000, 40, None), ("10m", 10_000_000, 10_000, 150, 15.0)):
        what = f"GOT-D, {n:,} × {m:,} × 384, float16 rows"
        evaluations: tuple[BarOp | None, float | None] = ("<=" if most else None, most)
        rows = (
            Row("pass", f"{what}: a pass", "s", None, *evaluations),
            Row(f"pass|{TORCH}", f"{what}: a pass", "s", TORCH),
            Row(f"pass|{KEOPS}", f"{what}: a pass", "s", KEOPS),
            Row("solve", f"{what}: a solve to {GOAL:g} and an overlap of .995", "s"),
            Row("error", f"{what}: error reached", "L1 error", None, "<=", GOAL),
        )
        results.append(Measurement(f"transport/{name}", f"{HERE}.transport:solve", {"n": n, "m": m}, rows, guess))
    return results


def low_bits() -> list[Measurement]:
    """NF4 beside bf16."""
    learnt = Row("loss", "mean loss of the last 20 of 100 updates, nf4", "nats/token", "bf16", "<=", 1.05)
    what = "1 B, 2 × 4,096 tokens, nf4"
    sized = (
        Row("seconds", f"{what}: update", "s", "bf16"),
        Row("memory", f"{what}: peak memory", "bytes", "bf16", "<=", 1.0),
        Row("frozen", f"{what}: frozen weights and scales", "bytes", "bf16", "<=", 0.45),
    )
    arguments = {"shape": "1b", "sequence": 4096, "rows": 2}
    return [
        Measurement("nf4/learnt", f"{HERE}.low_bits:learnt", {}, (learnt,), 40),
        Measurement("nf4/1b", f"{HERE}.low_bits:sized", arguments, sized, 40),
    ]
