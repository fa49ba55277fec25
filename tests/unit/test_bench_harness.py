"""The benchmark harness: order, ratios, computed `holds`, caps, and the keys of the contract."""

import json
import time

import pytest

from benchmarks import _harness
from benchmarks._harness import Benchmark, CapReached, cap_cpu, cpu_seconds, in_child, interleave

KEYS = [
    *("what", "ours", "peer", "peer_name", "unit", "ratio_median", "ratio_min", "ratio_max"),
    *("runs", "bar_op", "bar_value", "bar", "holds"),
]


def burn(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass


def burn_capped(seconds, cap):
    cap_cpu(cap)
    burn(seconds)
    cap_cpu(None)
    return {"seconds": seconds}


def test_order_is_abba():
    calls = []
    interleave(lambda: calls.append("A"), lambda: calls.append("B"), rounds=2)
    assert "".join(calls) == "ABBAABBA"


def test_cpu_seconds_ignores_sleep():
    assert cpu_seconds(lambda: time.sleep(0.2)) < 0.1
    assert cpu_seconds(lambda: burn(0.05)) >= 0.05


def test_rows_and_file_follow_the_contract(tmp_path):
    bench = Benchmark("x", packages=("numpy", "no-such-distribution"))
    good = bench.row(
        "a", ours=[1.0, 2.0, 3.0], peer=[2.0, 2.0, 2.0], peer_name="P", unit="s", bar_op="<=", bar_value=1.0
    )
    bad = bench.row("b", ours=2e-6, unit="error", bar_op="<=", bar_value=1e-6)
    none = bench.row("c", unit="s", peer_name="P", bar_op="<=", bar_value=1.0, reason="no GPU")
    assert list(good) == KEYS
    assert (good["ratio_median"], good["ratio_min"], good["ratio_max"], good["runs"]) == (1.0, 0.5, 1.5, 3)
    assert (good["holds"], bad["holds"], none["holds"], none["ours"]) == (True, False, None, None)
    written = json.loads(bench.finish(tmp_path / "x.json").read_text())
    assert list(written) == ["name", "command", "commit", "dirty", "machine", "versions", "rows"]
    assert list(written["machine"]) == ["cpu", "cores", "memory", "gpu"]
    assert written["versions"]["no-such-distribution"] is None
    assert written["rows"][2]["reason"] == "no GPU"
    assert "NO" in _harness.table(written["rows"])


def test_a_missing_figure_needs_a_reason():
    with pytest.raises(ValueError, match="reason"):
        Benchmark("x").row("a", unit="s")
    with pytest.raises(ValueError, match="reason"):
        Benchmark("x").row("a", ours=1.0, peer_name="P", unit="s")


def test_children_return_and_are_capped():
    # a function of the standard library is enough for an answer
    assert in_child("math:hypot", **{}) == 0.0
    with pytest.raises(CapReached, match="CPU"):
        in_child("tests.unit.test_bench_harness:burn_capped", seconds=30, cap=1)
    with pytest.raises(RuntimeError, match="no_such"):
        in_child("math:no_such")
