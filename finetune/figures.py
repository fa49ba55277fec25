"""Format numbers for printed lines: bytes, rates, durations and intervals. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_bytes(count: float) -> str:
    """Format a number of bytes as GiB, MiB, KiB or B."""
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB" if count >= 2**10 else f"{count:.0f} B"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def format_duration(seconds: float) -> str:
    """Format seconds as `12 ms`, `3.27 s`, `14.2 minutes` or `31.5 hours`."""
    if seconds < 120:
        return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} minutes" if seconds < 7200 else f"{seconds / 3600:,.3g} hours"


def format_rate(rate: float, unit: str) -> str:
    """Format a rate as `9,840 texts/s` or `3.27 steps/s`: no exponent, three digits below a hundred."""
    return f"{rate:,.0f} {unit}/s" if rate >= 99.5 else f"{rate:.3g} {unit}/s"


def format_interval(figure: Mapping[str, Any], form: str) -> str:
    """Format `{value, low, high}` as `0.52 [0.49, 0.55]`; the value alone without an interval, a dash without one."""
    if figure["value"] is None:
        return "–"
    if figure["low"] is None:
        return f"{figure['value']:{form}}"
    return f"{figure['value']:{form}} [{figure['low']:{form}}, {figure['high']:{form}}]"


def compare_plan(plan: Mapping[str, Any]) -> str:
    """Compare predicted and measured memory and time of a stage (`plan` of its done.json), for example `memory of an
    update 80.0 MiB predicted, 84.0 MiB measured (+5 %)`; empty if nothing was measured."""
    parts = []
    is_allocated = plan.get("what") == "allocated"
    if plan.get("measured"):
        name = "memory allocated" if is_allocated else "memory of a step"
        change = plan["measured"] / plan["predicted"] - 1 if plan["predicted"] else 0.0
        predicted, measured = (format_bytes(plan[key]) for key in ("predicted", "measured"))
        parts.append(f"{name} {predicted} predicted, {measured} measured ({change:+.0%})")
    if plan.get("reserved"):
        reserved = format_bytes(plan["reserved"])
        parts.append(f"{reserved} reserved" if is_allocated else f"the process grew by {reserved} in steps")
    if plan.get("measured_s"):
        seconds = plan.get("predicted_s")
        predicted = f"{seconds:.3g} s predicted" if seconds else "not predicted on this device"
        parts.append(f"a step {predicted}, {plan['measured_s']:.3g} s measured")
    return "; ".join(parts)


def format_throughput(figures: Mapping[str, Any]) -> str:
    """Format throughput as `12,340 tokens/s, 35 GFLOP/s, MFU 41 %`, as far as it is known."""
    parts = []
    if figures.get("tokens_s"):
        parts.append(format_rate(figures["tokens_s"], "tokens"))
    if figures.get("tflops"):
        rate = figures["tflops"]
        parts.append(f"{rate:.3g} TFLOP/s" if rate >= 1 else f"{1000 * rate:.3g} GFLOP/s")
    if figures.get("mfu"):
        parts.append(f"MFU {100 * figures['mfu']:.0f} %")
    return ", ".join(parts)
