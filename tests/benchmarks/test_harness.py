"""The benchmark harness: order, ratios, computed `holds`, caps, and the keys of the contract."""

import json
import time

import pytest

from benchmarks import _harness, _instructions, docs, gotd_million, gotd_solver
from benchmarks._harness import (
    Benchmark,
    CapReached,
    call,
    cap_cpu,
    cpu_seconds,
    in_child,
    in_turn,
    interleave,
    on_ranks,
    rows_by_group,
)

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


def test_more_than_two_ways_go_forwards_and_backwards():
    calls = []
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in "ABC"}
    assert in_turn(ways, 2, measure=call) == {"A": [1, 6], "B": [2, 5], "C": [3, 4]}
    assert "".join(calls) == "ABCCBA"


def test_a_comparison_is_a_row_of_paired_runs():
    figures = iter((1.0, 2.0, 4.0, 1.0))  # A B B A
    row = Benchmark("x").compare("a", "s", lambda: next(figures), lambda: next(figures), "P", rounds=1, measure=call)
    assert (row["ours"], row["peer"], row["ratio_min"], row["ratio_max"]) == (1.0, 3.0, 0.25, 0.5)
    least, same = Benchmark("x").row("b", "s", ours=1.0, minimum=2.0), Benchmark("x").row("c", "s", ours=3, exactly=3)
    assert (least["bar"], least["holds"], same["bar"], same["holds"]) == ("s >= 2", False, "s == 3", True)


def rank_of(offset):
    import torch.distributed as dist

    if offset < 0:
        raise ValueError("no such offset")
    return [dist.get_rank() + offset, dist.get_world_size()]


@pytest.mark.slow
def test_ranks_return_in_order_and_the_first_that_fails_is_named():
    assert on_ranks("tests.benchmarks.test_harness:rank_of", 2, offset=5) == [[5, 2], [6, 2]]
    with pytest.raises(RuntimeError, match="no such offset"):
        on_ranks("tests.benchmarks.test_harness:rank_of", 1, offset=-1)


def test_cpu_seconds_ignores_sleep():
    assert cpu_seconds(lambda: time.sleep(0.2)) < 0.1
    assert cpu_seconds(lambda: burn(0.05)) >= 0.05


def test_rows_and_file_follow_the_contract(tmp_path):
    bench = Benchmark("x", packages=("numpy", "no-such-distribution"))
    good = bench.row(
        "a", ours=[1.0, 2.0, 3.0], peer=[2.0, 2.0, 2.0], peer_name="P", unit="s", bar_op="<=", bar_value=1.0
    )
    bad = bench.row("b", "error", ours=2e-6, maximum=1e-6)
    assert (bad["bar_op"], bad["bar_value"], bad["bar"]) == ("<=", 1e-6, "error <= 1e-06")
    none = bench.row("c", unit="s", peer_name="P", bar_op="<=", bar_value=1.0, reason="no GPU")
    assert list(good) == KEYS
    assert (good["ratio_median"], good["ratio_min"], good["ratio_max"], good["runs"]) == (1.0, 0.5, 1.5, 3)
    assert (good["holds"], bad["holds"], none["holds"], none["ours"]) == (True, False, None, None)
    written = json.loads(bench.finish(tmp_path / "x.json").read_text())
    assert list(written) == ["name", "command", "commit", "dirty", "machine", "versions", "rows"]
    assert list(written["machine"]) == ["cpu", "cores", "memory", "gpu", "instructions", "rehearsal"]
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
        in_child("tests.benchmarks.test_harness:burn_capped", seconds=30, cap=1)
    with pytest.raises(RuntimeError, match="no_such"):
        in_child("math:no_such")


def test_the_millions_cap_holds_what_the_solver_needs():
    assert gotd_million.memory_cap(1000) == gotd_million.memory_cap(1_000_000) == 500_000_000
    assert gotd_million.memory_cap(10_000_000) > 64 * 10_000_000 + 400_000 * 1000 * 4


def test_a_capped_peer_is_shown_with_the_error_it_reached(monkeypatch):
    def child(_, solver, iterations, cap_s, **__):
        if solver == "ours":
            return {"cpu": 1.0, "error": 1e-4}
        if 2.0 + 3.0 * iterations > cap_s:
            raise CapReached("stopped at its cap of CPU-seconds")
        return {"cpu": 2.0 + 3.0 * iterations, "error": 1.0 / iterations}

    monkeypatch.setattr(gotd_solver, "in_child", child)
    bench = Benchmark("x")
    gotd_solver._peer(bench, "POT", "pot-log-float64", {"iterations": 300, "cap_s": 180.0}, "setting")
    told = bench.rows[0]["reason"]
    assert "stopped at its cap of CPU-seconds (180 CPU-s)" in told
    assert "a marginal error of 2.1e-02 after 48 of 300 iterations and 146.0 CPU-s" in told
    gotd_solver._peer(bench, "POT", "pot-log-float64", {"iterations": 5000, "cap_s": 180.0}, "setting")
    assert "of 5000 iterations it had not done 100" in bench.rows[1]["reason"]

    def broken(_, solver, **__):
        if solver == "ours":
            return {"cpu": 1.0, "error": 1e-4}
        raise RuntimeError("measure failed: Traceback\nMemoryError")

    monkeypatch.setattr(gotd_solver, "in_child", broken)
    gotd_solver._peer(bench, "POT", "pot-log-float64", {"iterations": 5, "cap_s": 180.0}, "setting")
    assert bench.rows[2]["reason"] == "POT failed: MemoryError"


def instructions_of_a_child():
    from benchmarks import _instructions

    return {"used": _instructions.used(), "hidden": _instructions.in_force()}


@pytest.mark.skipif("avx2" not in _instructions.flags(), reason="an x86 processor with AVX2 is rehearsed")
def test_a_rehearsal_reaches_the_kernels_of_a_child_and_is_named():
    found = in_child(
        "tests.benchmarks.test_harness:instructions_of_a_child", environment=_instructions.rehearsal(), wall_cap_s=120
    )
    assert found["used"]["torch"] == "AVX2" and found["used"]["oneDNN"].endswith("AVX2")
    before = _instructions.in_force()  # what this process was told itself
    told = {name: value for name, value in _instructions.rehearsal().items() if name in _instructions.REHEARSED}
    assert found["hidden"] == {**before, **told}
    assert set(_instructions.flags()) <= {*_instructions.SHOWN, *_instructions.ARM}


def test_the_page_names_instructions_and_a_rehearsal(tmp_path):
    bench = Benchmark("x", packages=())
    bench.row("a", ours=1.0, unit="s")
    result = json.loads(bench.finish(tmp_path / "x.json").read_text())
    result["machine"] |= {"cpu": "C", "instructions": ["avx2", "amx_bf16"], "rehearsal": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}
    where = docs.section(result, "d")
    assert "C (avx2, amx_bf16)" in where and "with `ONEDNN_MAX_CPU_ISA=AVX2`" in where
    del result["machine"]["instructions"], result["machine"]["rehearsal"]  # of a file from before
    assert "on C, " in docs.section(result, "d")


def test_groups_that_are_not_asked_for_keep_the_rows_of_this_machine_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks._harness.RESULTS", tmp_path)
    groups = {name: lambda bench, name=name: bench.row(f"of {name}", ours=1.0, unit="s") for name in ("a", "b")}

    def measured(*asked):
        bench = Benchmark("x", packages=())
        rows_by_group(bench, groups, asked)
        bench.finish(tmp_path / "x.json")
        return [(row["what"], row["group"]) for row in bench.rows]

    assert measured("b") == [("of b", "b")]
    assert measured("a") == [("of a", "a"), ("of b", "b")] == measured()
    monkeypatch.setattr("benchmarks._harness.machine", lambda: {"cpu": "another"})
    assert measured("a") == [("of a", "a")]
