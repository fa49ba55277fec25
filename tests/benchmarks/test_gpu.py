"""`python -m benchmarks.gpu`: every measurement at toy size on the CPU, and that a killed run goes on."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from benchmarks._harness import RESULTS, ROOT, Benchmark
from benchmarks.gpu import runner
from benchmarks.gpu.__main__ import main as runs_the_command
from benchmarks.gpu.measurements import Best, Kept, Measurement, Row, Store, fill
from benchmarks.gpu.plan import MFU, TOY, plan, rehearsed
from benchmarks.gpu.runner import NO_DEVICE, Run, call

MEASUREMENTS = {m.name: m for m in plan() if isinstance(m, Measurement)}
REHEARSED = {m.name: m for m in rehearsed(plan()) if isinstance(m, Measurement)}
COVERING = [
    "peak",
    "smoke/step/classify",
    "smoke/step/chat-packed",
    "smoke/step/preference",
    "smoke/regularizer/lora-sam",
    "smoke/resume",
    "smoke/command/doctor",
    "smoke/command/predict",
    "smoke/command/generate",
    "smoke/waits/ggpo",
    "speed/8b/4096/none-1",
    "speed/8b/4096/full-4",
    "speed/8b/4096/selective-2",
    "regularizer/ggpo/8b",
    "regularizer/mgpo/1b",
    "parity/language-model",
    "parity/classify-multi",
    "parity/seq2seq",
    "parity/masked-lm",
    "parity/gotd-dense",
    "parity/resume-fp32",
    "transport/10m",
    "nf4/learnt",
    "nf4/1b",
]
"""Of the rehearsal those that cover its code; the whole of it is slow."""
QUICK = {
    "peak",
    "smoke/step/classify",
    "smoke/command/doctor",
    "smoke/waits/ggpo",
    "speed/8b/4096/selective-2",
    "regularizer/ggpo/8b",
    "regularizer/mgpo/1b",
    "parity/masked-lm",
    "parity/gotd-dense",
    "transport/10m",
    "nf4/learnt",
    "nf4/1b",
}
"""One of each kind of measurement; a run that went on is in `tests.parity.test_resume`."""


@pytest.fixture
def one_thread():
    """Toy sizes: threads that wait for one another cost more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COVERING]
)
def test_a_measurement_fills_its_rows_at_toy_size(name, one_thread):
    measurement = REHEARSED[name]
    figures = call(measurement.function, device="cpu", **measurement.arguments)
    assert json.loads(json.dumps(figures)) == figures
    kept = {name: Kept(name, json.loads(json.dumps(dict(measurement.arguments))), "cpu", figures, 1.0, {})}
    bench = Benchmark("x")
    fill(bench, [measurement], kept, device="cpu", reasons={}, otherwise="not measured")
    for row in bench.rows:
        assert row["ours"] is not None or row["reason"], row
        if row["ours"] is None:  # only what this machine cannot have
            assert any(w in row["reason"] for w in ("not installed", "data sheet")), row
    if name.startswith("smoke/waits"):
        assert figures["most"]["ours"] == 1  # a line came due
    if name.startswith("parity/") and "gotd" not in name:
        exact = [row["ours"] for row in bench.rows if "bf16" not in row["what"]]
        assert exact and set(exact) == {0.0}  # the CPU beside itself, and a run that went on after its kill
        assert all(row["ours"] > 0 for row in bench.rows if "bf16" in row["what"])


def test_every_measurement_of_the_plan_is_tried_and_named_once():
    names = [entry.name for entry in plan() if isinstance(entry, Measurement)]
    assert len(names) == len(MEASUREMENTS)
    assert {m.function for m in MEASUREMENTS.values()} == {MEASUREMENTS[name].function for name in COVERING}
    assert sum(m.seconds for m in MEASUREMENTS.values()) <= 25 * 60
    smoke = [name for name in MEASUREMENTS if name.startswith("smoke/")]
    assert names[: len(smoke)] == smoke and sum(MEASUREMENTS[name].seconds for name in smoke) <= 60
    ideas = list(dict.fromkeys(name.split("/")[0] for name in names))
    assert ideas == ["smoke", "parity", "peak", "speed", "regularizer", "transport", "nf4"]
    rows = [row.what + str(row.peer_name) for m in MEASUREMENTS.values() for row in m.rows]
    assert len(set(rows)) == len(rows)


def rehearse(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--rehearse", *flags])
    with pytest.raises(SystemExit) as stop:
        runs_the_command()
    return stop.value.code


def test_a_rehearsal_leaves_the_results_alone_and_ends_with_its_minutes(tmp_path, monkeypatch, capfd):
    before = {file: file.read_bytes() for file in RESULTS.rglob("gpu*/*") if file.is_file()}
    where = ("--kept", str(tmp_path / "kept.jsonl"), "--out", str(tmp_path / "gpu.json"))
    assert rehearse(monkeypatch, *where, "--rows", "peak,transport/1m", "--minutes", "3") == 0
    assert Store(tmp_path / "kept.jsonl").read().keys() == {"peak", "transport/1m"}
    kept = (tmp_path / "kept.jsonl").read_text()
    assert rehearse(monkeypatch, *where, "--rows", "smoke", "--minutes", "0.01") == 0
    assert (tmp_path / "kept.jsonl").read_text() == kept
    assert "37 rows without a figure: out of minutes" in capfd.readouterr().out
    assert {file: file.read_bytes() for file in RESULTS.rglob("gpu*/*") if file.is_file()} == before
    for flags in (("--device", "cuda:1"), ("--out", str(RESULTS / "gpu.json"))):
        assert rehearse(monkeypatch, *flags) == 2
        assert "keeps nothing among the results" in capfd.readouterr().err


@pytest.mark.slow
def test_the_whole_of_it_can_be_rehearsed(tmp_path):
    out = ("--kept", tmp_path / "kept.jsonl", "--out", tmp_path / "gpu.json")
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", "--rehearse", *out], cwd=ROOT)
    assert done.returncode == 0
    held = Store(tmp_path / "kept.jsonl").read()
    assert held.keys() == MEASUREMENTS.keys() and not any(kept.failed for kept in held.values())


# --------------------------------------------------------------------------------------------- what figures mean


@pytest.mark.parametrize("tied", [True, False])
def test_operations_in_closed_form_are_those_that_hooks_count(tied):
    from benchmarks.gpu.llama import Shape, adapted, batches, operations
    from flatshift.finetune.parallel.engine import Engine
    from flatshift.finetune.tasks import LanguageModel
    from flatshift.finetune.train.throughput import FlopCounter, attention_width

    shape, rows, sequence, rank = Shape(64, 160, 3, 4, 2, 512, tied), 2, 24, 4
    model = adapted(shape, "cpu", rank=rank).train()
    assert sum(p.numel() for p in model.get_base_model().parameters() if not p.requires_grad) == shape.parameters
    engine, found = Engine.alone(model), batches(shape, rows=rows, sequence=sequence)
    (micro,), task = found.at(0), LanguageModel(pack=False)
    with torch.autocast("cpu", torch.bfloat16):
        head = engine.find_head(micro.inputs, task=task)
        tally = FlopCounter()
        with tally.count(model, width=attention_width(model.config), head=head):
            from flatshift.finetune.compute.loss import batch_loss

            batch_loss(model, micro, task=task, head=head)
    assert head is not None and micro.supervised == rows * (sequence - 1)
    cost = tally.cost(positions=rows * sequence, pairs=rows * sequence**2, head=head)
    wanted = cost.model(rows * sequence, rows * sequence**2, micro.supervised)
    made = operations(shape, rows=rows, sequence=sequence, rank=rank)
    assert made.full == pytest.approx(wanted, rel=1e-12)
    pairs = 12.0 * 64 * 3 * rows
    assert made.full - made.causal == pytest.approx(pairs * (sequence**2 - sequence * (sequence + 1) / 2), rel=1e-9)
    assert made.weights == 4.0 * shape.parameters * rows * sequence


def test_the_shapes_are_those_of_llama():
    from benchmarks.gpu.llama import SHAPES, backbone

    assert [round(shape.parameters / 1e6) for shape in SHAPES.values()] == [1236, 3213, 8030]
    one, other = backbone(SHAPES["1b"].__class__(*TOY), "cpu"), backbone(SHAPES["1b"].__class__(*TOY), "cpu")
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert one.model.embed_tokens.weight.float().std() == pytest.approx(0.02, rel=0.05)
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16} and not any(
        p.requires_grad for p in one.parameters()
    )


def test_the_transport_baseline_evaluates_what_ours_does():
    from benchmarks.gpu.devices import Device
    from benchmarks.gpu.transport import _blocks, data
    from flatshift.selection.transport.kernel import StreamedEvaluator
    from flatshift.selection.transport.problem import pose_problem
    from flatshift.selection.transport.rows import StreamedRows

    x, y = data(700, 40, 12, "cpu")
    assert x.dtype == np.float16 and np.allclose(np.linalg.norm(x.astype(float), axis=1), 1, atol=2e-3)
    with torch.inference_mode():
        problem = pose_problem(x, y, None, None, chunk=None, progress=None)
        absolute = 0.05 * problem.mean_cost
        g = torch.linspace(-1, 1, 40, dtype=torch.float64) * absolute
        at = StreamedEvaluator(StreamedRows(problem, torch.float64, Device("cpu").torch), absolute).evaluate(g)
        f, column = _blocks(torch.from_numpy(x).double(), torch.from_numpy(y).double(), g, absolute)
    ours = at.f / absolute
    assert np.allclose(f - f.mean(), ours - ours.mean(), atol=1e-5)
    mass = (column.double() + g / absolute).exp()
    assert np.allclose(mass / mass.sum(), at.column / at.column.sum(), rtol=1e-5)


def test_peaks_of_known_devices():
    from benchmarks.gpu.devices import dense_peak

    assert dense_peak("NVIDIA H200") == 989.4
    assert dense_peak("NVIDIA H100 PCIe") == 756.0
    assert dense_peak("NVIDIA A100-SXM4-80GB") == 312.0
    assert dense_peak("cpu") is None


def test_a_peer_that_fails_or_does_not_fit_is_noted_and_ours_goes_on(monkeypatch):
    from benchmarks.gpu import speed

    def full(case, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(case, device):
        raise ValueError("no such argument\nand more")

    monkeypatch.setattr(speed, "ours", lambda case, device: [0.5, 0.25, 0.25])
    monkeypatch.setattr(speed, "PEERS", {"full": full, "broken": broken})
    monkeypatch.setattr(speed, "NEEDS", {"full": (), "broken": ()})
    found = speed.speed(device="cpu", shape=TOY, sequence=100, rows=1, peers=("full", "broken"), product=(64,))
    assert found["tokens|full"] == {"ours": [400.0, 400.0], "peer": None, "reason": "peer: out of the device's memory"}
    assert found["memory|broken"]["reason"] == "peer: failed: ValueError: no such argument"
    monkeypatch.setattr(speed, "ours", full)
    monkeypatch.setattr(speed, "PEERS", {"full": lambda case, device: [0.5]})
    found = speed.speed(device="cpu", shape=TOY, sequence=100, rows=1, peers=("full",), product=(64,))
    assert found["tokens|full"] == {"ours": None, "peer": [200.0, 200.0], "reason": "ours: out of the device's memory"}
    assert found["mfu"] == {"reason": "out of the device's memory"}


# --------------------------------------------------------------------------------------------- going on


def entry(name, function, folder, guess=1.0, **more):
    row = Row("figure", f"row {name}", "s", "peer", "<=", 1.0)
    arguments = {"log": str(folder / "log"), "name": name, **more}
    return Measurement(f"toy/{name}", f"tests.support.gpu_rows:{function}", arguments, (row,), guess)


def run_of(folder, *entries, **settings):
    (folder / "log").touch()
    return Run(entries, Store(folder / "kept.jsonl"), device="cpu", out=folder / "gpu.json", **settings)


def calls(folder):
    return (folder / "log").read_text().split()


def rows_of(folder):
    return {row["what"]: row for row in json.loads((folder / "gpu.json").read_text())["rows"]}


@pytest.mark.slow
def test_a_killed_measurement_costs_itself_alone_and_a_rerun_makes_only_what_is_missing(tmp_path):
    entries = [
        entry("a", "counted", tmp_path, value=1.0),
        entry("b", "killed_once", tmp_path),
        entry("c", "too_large", tmp_path),
        entry("d", "broken", tmp_path),
        entry("e", "counted", tmp_path, value=3.0),
    ]
    first = [run_in_a_process(tmp_path, entries) for _ in range(2)]
    assert first == [-signal.SIGKILL, 0]
    assert calls(tmp_path) == ["a", "b", "e", "b"]
    assert rows_of(tmp_path)["row b"]["ours"] == 1.0
    (tmp_path / "log").write_text("a\ne\n")
    run_in_a_process(tmp_path, [entries[1]], fresh=True)
    run_of(tmp_path, *entries).write("cpu", "not measured yet")
    assert calls(tmp_path) == ["a", "e", "b"]
    rows = rows_of(tmp_path)
    assert (rows["row a"]["ratio_median"], rows["row a"]["holds"], rows["row e"]["holds"]) == (0.5, True, False)
    assert [rows[f"row {n}"]["ours"] for n in "bcd"] == [None] * 3
    assert "killed" in rows["row b"]["reason"] and "memory" in rows["row c"]["reason"]
    assert "illegal memory access" in rows["row d"]["reason"]
    held = Store(tmp_path / "kept.jsonl").read()
    assert "in broken" in held["toy/d"].failed["traceback"] and "OutOfMemoryError" in held["toy/c"].failed["traceback"]
    assert held["toy/b"].failed["stopped"] is False and held["toy/a"].failed is None
    assert run_of(tmp_path, *entries).failed("cpu").keys() == {"toy/b", "toy/c", "toy/d"}
    assert [m.name for m in run_of(tmp_path, *entries).missing("cpu")] == ["toy/b", "toy/c", "toy/d"]
    run_of(tmp_path, *entries).write(None, NO_DEVICE)  # the reasons stay where the device is gone
    assert "illegal memory access" in rows_of(tmp_path)["row d"]["reason"]
    assert rows["row b"]["holds"] is None and rows["row b"]["bar"] == "ratio <= 1"
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert list(document) == ["name", "command", "commit", "dirty", "machine", "versions", "rows"]

    # a copy that broke off in the middle of the last line, and other arguments for the first
    lines = (tmp_path / "kept.jsonl").read_bytes().splitlines()
    (tmp_path / "kept.jsonl").write_bytes(lines[0] + b"\n" + lines[1][: len(lines[1]) // 2])
    again = run_of(tmp_path, *entries[:2], *entries[4:])
    again.all()
    assert calls(tmp_path) == ["a", "e", "b", "b", "e"]
    assert rows_of(tmp_path)["row b"]["ours"] == 1.0
    changed = entry("a", "counted", tmp_path, value=5.0)
    assert [m.name for m in run_of(tmp_path, changed, entries[1]).missing("cpu")] == ["toy/a"]
    assert run_of(tmp_path, changed, entries[1], pattern="toy/b").missing("cpu") == []
    assert len(run_of(tmp_path, *entries[:2]).missing("NVIDIA H200")) == 2  # what another device did is made again
    run = run_of(tmp_path, *entries[:2], pattern="toy/b", minutes=0.0)
    run.all(fresh=True)
    assert run.store.read().keys() == {"toy/a", "toy/e"} and "minutes" in rows_of(tmp_path)["row b"]["reason"]


def run_in_a_process(folder, entries, fresh=False, **settings):
    """Exit code of a run of these in a process of its own."""
    code = (
        "from pathlib import Path\nfrom benchmarks.gpu.measurements import Measurement, Row\n"
        "from tests.benchmarks.test_gpu import run_of\n"
        f"run_of(Path({str(folder)!r}), *{entries!r}, **{settings!r}).all(fresh={fresh})"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode


KILLED = """
from pathlib import Path
from tests.benchmarks.test_gpu import entry, run_of

folder = Path({folder!r})
late = [entry("b", "slow", folder, seconds=0.0), entry("c", "slow", folder, seconds=60.0)]
run_of(folder, entry("a", "counted", folder), *late).all()
"""


def test_a_run_that_is_killed_goes_on_where_it_stopped(tmp_path):
    first = subprocess.Popen([sys.executable, "-c", KILLED.format(folder=str(tmp_path))], cwd=ROOT)
    deadline = time.monotonic() + 200
    while calls_or_none(tmp_path) != ["a", "b", "c"]:
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert [row["ours"] for row in rows_of(tmp_path).values()] == [1.0, 1.0, None]
    entries = [
        entry("a", "counted", tmp_path),
        entry("b", "slow", tmp_path, seconds=0.0),
        entry("c", "slow", tmp_path, seconds=0.1),
    ]
    run_of(tmp_path, *entries).all()
    assert calls(tmp_path) == ["a", "b", "c", "c"]


def calls_or_none(folder):
    return calls(folder) if (folder / "log").exists() else None


def test_minutes_leave_what_would_not_be_over(tmp_path):
    entries = [entry("long", "counted", tmp_path, guess=600.0), entry("short", "counted", tmp_path)]
    run = run_of(tmp_path, *entries, minutes=1.0)
    run.all()
    assert calls(tmp_path) == ["short"] and run.store.read().keys() == {"toy/short"}
    assert "out of minutes" in rows_of(tmp_path)["row long"]["reason"]


@pytest.mark.slow
def test_a_measurement_is_stopped_with_its_minutes_and_not_begun_again_in_as_few(tmp_path):
    entries = [entry("s", "slow", tmp_path, seconds=60.0), entry("t", "counted", tmp_path)]
    assert run_in_a_process(tmp_path, entries, minutes=0.1) == 0
    assert calls(tmp_path) == ["s"] and "end of its minutes" in rows_of(tmp_path)["row s"]["reason"]
    kept = Store(tmp_path / "kept.jsonl").read()["toy/s"]
    assert kept.failed["stopped"] is True
    assert runner._guess(entries[0], kept) == 1.5 * kept.seconds > runner._guess(entries[0], None) == 1.0
    assert [m.name for m in run_of(tmp_path, *entries).missing("cpu")] == ["toy/t", "toy/s"], "what failed comes last"


def test_without_a_device_every_row_is_there_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Run(plan(), Store(tmp_path / "kept.jsonl"), out=tmp_path / "gpu.json").all()
    rows = list(rows_of(tmp_path).values())
    documents = json.loads((tmp_path / "gpu.json").read_text())
    assert len(documents["rows"]) == sum(len(m.rows) for m in MEASUREMENTS.values()) + 1
    assert all(row["ours"] is None and row["holds"] is None and row["reason"] == NO_DEVICE for row in rows)
    assert rows[0]["what"].startswith("works: ")
    with pytest.raises(SystemExit, match="ideas are"):
        Run(plan(), Store(tmp_path / "kept.jsonl"), pattern="sped/*").all()


def test_kept_figures_stay_where_the_device_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    m = entry("a", "counted", tmp_path)
    store = Store(tmp_path / "kept.jsonl")
    place = {"commit": "abc", "dirty": False, "machine": {"gpu": "NVIDIA H200"}, "versions": {}}
    store.add(
        Kept(m.name, dict(m.arguments), "NVIDIA H200", {"figure": {"ours": [1.0, 3.0], "peer": [2.0]}}, 1.0, place)
    )
    Run([m], store, out=tmp_path / "gpu.json").all()
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["machine"] == {"gpu": "NVIDIA H200"} and document["rows"][0]["ours"] == 2.0


def test_the_best_row_is_the_best_of_what_there_is(tmp_path):
    best = Best(Row("mfu", "best", "share", None, ">=", MFU), ("x/one", "x/two", "x/three"))
    made = [Measurement(name, "m:f", {}, (Row("mfu", name, "share"),), 1.0) for name in best.of]
    kept = {
        "x/one": Kept("x/one", {}, "cpu", {"mfu": {"ours": [0.5, 0.6, 0.4]}}, 1.0, {}),
        "x/two": Kept("x/two", {}, "cpu", {"mfu": {"ours": [0.57, 0.56]}}, 1.0, {}),
        "x/three": Kept("x/three", {}, "cpu", {"mfu": {"reason": "out of memory"}}, 1.0, {}),
    }
    bench = Benchmark("x")
    fill(bench, [*made, best], kept, device="cpu", reasons={}, otherwise="nothing")
    assert bench.rows[-1]["ours"] == pytest.approx(0.565) and bench.rows[-1]["holds"] is True
    assert "two" in bench.rows[-1]["reason"] and bench.rows[2]["ours"] is None


def test_the_committed_file_has_the_rows_of_the_plan():
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["rows"]
    wanted = [
        (row.what, row.peer_name) for made in plan() for row in ((made.row,) if isinstance(made, Best) else made.rows)
    ]
    assert [(row["what"], row["peer_name"]) for row in rows] == wanted
    assert all(row["reason"] for row in rows if row["ours"] is None)


def test_names_match_by_idea_and_by_pattern():
    assert runner.matches("speed/8b/4096/full", "speed") and runner.matches("speed/8b/4096/full", "x,speed/8b/*")
    assert not runner.matches("speed/8b/4096/full", "spe") and not runner.matches("peak", "speed/*")
