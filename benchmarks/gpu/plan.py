"""What `python -m benchmarks.gpu` measures, with the bars: the dearest questions first."""

from __future__ import annotations

from typing import Any

from benchmarks._harness import BarOp
from benchmarks.gpu.measurements import Best, Measurement, Row
from benchmarks.gpu.parity import KINDS
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
SEQUENCES = (2048, 4096, 16384)
TOKENS = {"none": 8192, "compiled": 8192, "selective": 16384, "full": 16384}
"""Of an update, at least one row: what a GPU of 141 GB can be expected to hold of the 8 B shape."""
SECONDS = {"1b": 3.0, "3b": 6.0, "8b": 12.0}
"""Of one run of an update's measurement, model and warm-up included."""
FP32, BF16_LOSS, BF16_ADAPTER = 1e-4, 0.02, 0.25
"""Tolerances of parity, relative. Where the bits of fp32 differ, updates of AdamW follow by some 1e-5; in bf16 they
turn with the sign of small gradients, on a CPU by .05 to .13 after six updates."""
MFU = 0.55


def plan() -> list[Measurement | Best]:
    """All measurements, in the order in which they are made."""
    return [peak(), *headline(), *parity(), *regularizers(), *transport(), *cells(), *low_bits(), *others()]


def peak() -> Measurement:
    """What shares of a peak are of."""
    row = Row("product", "best bf16 product beside the maker's dense peak", "TFLOP/s", "data sheet")
    return Measurement("peak", f"{HERE}.devices:peaks", {}, (row,), 10)


# --------------------------------------------------------------------------------------------- (b) speed and memory


def speed(shape: str, sequence: int, way: Way, peers: tuple[str, ...]) -> Measurement:
    """One shape at one length in one way."""
    rows = max(1, TOKENS[way] // sequence)
    what = f"{NAMES[shape]}, {rows} × {sequence:,} tokens, {WAYS[way]}"
    made = [
        Row("tokens", f"{what}: rate", "tokens/s"),
        Row("mfu", f"{what}: MFU, causal attention, data sheet's peak", "of the peak"),
        Row("memory", f"{what}: peak memory", "bytes"),
    ]
    if shape == "8b" and sequence == 4096:
        made += [
            Row("mfu_product", f"{what}: MFU, causal attention, best product", "of the peak"),
            Row("mfu_full", f"{what}: MFU, attention of all pairs, data sheet's peak", "of the peak"),
            Row("mfu_weights", f"{what}: MFU, 4 a weight and no attention, data sheet's peak", "of the peak"),
            Row("published", f"{what}: rate beside one published of an H100", "tokens/s", "40.6 % of an H100"),
        ]
    for peer in peers:
        made.append(Row(f"tokens|{peer}", f"{what}: rate", "tokens/s", peer, ">=", 1.0))
        made.append(Row(f"memory|{peer}", f"{what}: peak memory", "bytes", peer, "<=", 1.0))
    return Measurement(
        f"speed/{shape}/{sequence}/{way}",
        f"{HERE}.speed:speed",
        {"shape": shape, "sequence": sequence, "rows": rows, "way": way, "peers": list(peers)},
        tuple(made),
        SECONDS[shape] * 2 * (1 + len(peers)) * (1.5 if sequence == 16384 else 1) + (60 if way == "compiled" else 0),
    )


def headline() -> list[Measurement | Best]:
    """8 B at 4,096 tokens."""
    made = [
        speed("8b", 4096, "none", (TRAINER, SFT)),
        speed("8b", 4096, "compiled", ()),
        speed("8b", 4096, "full", (TRAINER, SFT)),
        speed("8b", 4096, "selective", ()),
    ]
    best = Row("mfu", "8 B, 4,096 tokens, the best way: MFU", "of the peak", None, ">=", MFU)
    return [*made, Best(best, tuple(m.name for m in made))]


def others() -> list[Measurement]:
    """The grid of shapes, lengths and ways; peers at 4,096 tokens, and where blocks are recomputed at every length of
    the 8 B shape."""
    made = []
    for shape in ("8b", "1b", "3b"):
        for sequence in SEQUENCES:
            for way in ("none", "full", "selective"):
                if (shape, sequence) == ("8b", 4096):
                    continue
                beside = (way == "full" and shape == "8b") or (way != "selective" and sequence == 4096)
                made.append(speed(shape, sequence, way, (TRAINER, SFT) if beside else ()))  # type: ignore[arg-type]
    return made


# --------------------------------------------------------------------------------------------- (a) parity


def parity() -> list[Measurement]:
    """Every objective, and a run that is killed."""
    made = []
    for kind in KINDS:
        what = f"{kind}, six updates, the worst of plain, GGPO and MGPO"
        rows = (
            _within("loss|fp32", f"losses of {what}: fp32 beside CPU fp32", FP32),
            _within("adapter|fp32", f"what training changed, {what}: fp32 beside CPU fp32", FP32),
            _within("loss|bf16", f"losses of {what}: bf16 beside CPU fp32", BF16_LOSS),
            _within("adapter|bf16", f"what training changed, {what}: bf16 beside CPU fp32", BF16_ADAPTER),
        )
        made.append(Measurement(f"parity/{kind.replace(' ', '-')}", f"{HERE}.parity:equal", {"kind": kind}, rows, 20))
    for precision in ("fp32", "bf16"):
        bits = (
            _same(
                "resumed",
                f"a GGPO run in {precision}, killed by SIGKILL after update 5 of 8 and resumed: numbers that differ",
            ),
            _same("repeated", f"the same run twice, nobody killed, in {precision}: numbers that differ"),
        )
        made.append(
            Measurement(f"parity/resume-{precision}", f"{HERE}.parity:resumed", {"precision": precision}, bits, 40)
        )
    return made


def _within(figure: str, what: str, most: float) -> Row:
    return Row(figure, what, "relative", None, "<=", most)


def _same(figure: str, what: str) -> Row:
    return Row(figure, what, "numbers", None, "==", 0.0)


# --------------------------------------------------------------------------------------------- (c) to (f)


def regularizers() -> list[Measurement]:
    """GGPO and MGPO beside plain LoRA."""
    made = []
    for kind, most in (("ggpo", 1.03), ("mgpo", 1.01)):
        for shape, way in (("8b", "full"), ("1b", "none")):
            rows = TOKENS[way] // 4096
            what = f"update with {kind.upper()}, {NAMES[shape]}, {rows} × 4,096 tokens, {WAYS[way]}"  # type: ignore[index]
            row = Row("seconds", what, "s", "plain LoRA", "<=", most)
            arguments: dict[str, Any] = {"kind": kind, "shape": shape, "sequence": 4096, "rows": rows, "way": way}
            made.append(
                Measurement(
                    f"regularizer/{kind}/{shape}", f"{HERE}.speed:regularized", arguments, (row,), 4 * SECONDS[shape]
                )
            )
    return made


def transport() -> list[Measurement]:
    """GOT-D's solver at two sizes."""
    made = []
    for name, n, m, guess, most in (("1m", 1_000_000, 1_000, 40, None), ("10m", 10_000_000, 10_000, 150, 10.0)):
        what = f"GOT-D, {n:,} × {m:,} × 384, float16 rows"
        judged: tuple[BarOp | None, float | None] = ("<=" if most else None, most)
        rows = (
            Row("pass", f"{what}: a pass", "s", None, *judged),
            Row(f"pass|{TORCH}", f"{what}: a pass", "s", TORCH),
            Row(f"pass|{KEOPS}", f"{what}: a pass", "s", KEOPS),
            Row("solve", f"{what}: a solve to {GOAL:g} and an overlap of .995", "s"),
            Row("error", f"{what}: error reached", "L1 error", None, "<=", GOAL),
        )
        made.append(Measurement(f"transport/{name}", f"{HERE}.transport:solve", {"n": n, "m": m}, rows, guess))
    return made


def cells() -> list[Measurement]:
    """Stacked cells of a sweep."""
    row = Row("seconds", "update of one of 32 stacked cells, 64 tokens, bf16", "s", "alone", "<=", 0.15)
    return [Measurement("stacked/64", f"{HERE}.stacks:stacked", {}, (row,), 40)]


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
