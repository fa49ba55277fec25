"""`train.precision`: what auto takes by which figures, what is refused, and that a settled value stays."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flatshift.experiments.recipe import from_override, load_recipe, recipe_key
from flatshift.experiments.recipe.auto import resolve_auto
from flatshift.finetune.compute import matmul_rate, precision
from flatshift.finetune.compute.matmul_rate import MatmulRates, MatmulShape, cpu_rates, measure_rates, peak_rate
from flatshift.finetune.compute.precision import (
    PrecisionChoice,
    faster_precision,
    resolve_cuda_precision,
    resolve_precision,
)
from flatshift.finetune.config import Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.planner.rules import RuleSettings, check_settings

SHAPE = MatmulShape.of(tokens=128, width=256, inner=688)
ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
NARROW = MatmulRates(fp32=6e10, bf16=2e11, rows=256, block=1.6)
WIDE = MatmulRates(fp32=6e10, bf16=7e8, rows=32, block=None)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATSHIFT_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def slow_bf16(monkeypatch):
    """A CPU like most that are a few years old."""
    monkeypatch.setattr(precision, "cpu_rates", lambda shape: (WIDE, None))


@pytest.mark.parametrize(
    ("rates", "taken"),
    [
        (NARROW, "bf16"),
        (WIDE, "fp32"),
        (MatmulRates(1e11, 1.15e11, 256, 1.3), "fp32"),  # the product gains less than 1.2
        (MatmulRates(1e11, 4e11, 256, 0.9), "fp32"),  # so small a step that casts cost more than products save
        (MatmulRates(1e11, 4e11, 256, None), "fp32"),
    ],
)
def test_bf16_is_taken_where_a_product_and_a_block_are_faster(rates, taken):
    assert faster_precision(rates) == taken


def test_auto_takes_the_faster_dtype_of_this_machine(cache):
    """Whatever machine that is: the choice agrees with a product of its own, timed here by the CPU time of a thread."""
    before = torch.get_num_threads()
    rates, wrong = cpu_rates(SHAPE)
    assert wrong is None and torch.get_num_threads() == before
    choice = resolve_precision(Train(), CPU, SHAPE)
    assert choice.precision == faster_precision(rates) and str(rates) in choice.why
    x, w = torch.ones(64, 512), torch.ones(512, 512)
    torch.set_num_threads(1)
    try:
        wide, narrow = matmul_rate.time_interleaved(
            [lambda: x @ w, lambda: x.bfloat16() @ w.bfloat16()], turns=3, clock=time.thread_time
        )
    finally:
        torch.set_num_threads(before)
    if narrow > 2 * wide:  # beyond doubt
        assert choice.precision == "fp32"


def test_of_a_dtype_that_is_far_behind_only_a_small_product_is_timed(monkeypatch):
    timed = []

    def rate(dtype: torch.dtype, product: tuple[int, int, int]) -> float:
        timed.append(product[0])
        return 1.0 if dtype is torch.bfloat16 else 100.0

    monkeypatch.setattr(matmul_rate, "_measure_rate", rate)
    found = measure_rates(SHAPE)
    assert timed == [matmul_rate._FEW] * 2 and matmul_rate.PRODUCT[0] > matmul_rate._FEW and found.block is None


def test_a_measurement_is_kept(cache, monkeypatch):
    rates, _ = cpu_rates(SHAPE)
    monkeypatch.setattr(matmul_rate, "measure_rates", lambda shape: pytest.fail("measured again"))
    assert cpu_rates(SHAPE) == (rates, None)


@pytest.mark.parametrize("text", ["{", "[]", '{"machine": {}}', "{}", "null"])
def test_a_torn_or_foreign_measurement_is_made_anew_and_told(cache, monkeypatch, text):
    monkeypatch.setattr(matmul_rate, "measure_rates", lambda shape: NARROW)
    cpu_rates(SHAPE)
    (file,) = cache.glob("rates-*.json")
    whole = file.read_text()
    file.write_text(text)
    rates, wrong = cpu_rates(SHAPE)
    assert rates == NARROW and wrong is not None and str(file) in wrong
    assert file.read_text() == whole
    other = json.loads(whole)
    other["machine"]["cpu"] = "another"
    file.write_text(json.dumps(other))
    assert "another machine" in (cpu_rates(SHAPE)[1] or "")
    for rate in (0, -1.0, "x", None):
        other = json.loads(whole)
        other["rates"]["fp32"] = rate
        file.write_text(json.dumps(other))
        assert "torn" in (cpu_rates(SHAPE)[1] or "")


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("FLATSHIFT_CACHE", str(file))
    monkeypatch.setattr(matmul_rate, "measure_rates", lambda shape: NARROW)
    assert cpu_rates(SHAPE)[0] == NARROW


def test_bf16_by_name_is_obeyed_with_a_line_that_says_by_how_much_it_is_slower(slow_bf16):
    choice = resolve_precision(Train(precision="bf16"), CPU, SHAPE)
    assert choice.precision == "bf16"
    assert "factor of 85.7" in (choice.note or "") and "auto takes fp32" in (choice.note or "")
    assert resolve_precision(Train(precision="fp32"), CPU, SHAPE) == PrecisionChoice("fp32", "asked for")


@pytest.mark.parametrize(
    ("asked", "capability", "taken"),
    [
        ("auto", (9, 0), "bf16"),
        ("auto", (8, 0), "bf16"),
        ("auto", (7, 5), "fp16"),
        ("auto", (7, 0), "fp16"),
        ("auto", (6, 1), "fp32"),
        ("fp32", (9, 0), "fp32"),
        ("fp16", (9, 0), "fp16"),
        ("bf16", (8, 6), "bf16"),
    ],
)
def test_cuda_devices_take_what_they_multiply(asked, capability, taken):
    assert resolve_cuda_precision(asked, "a device", capability).precision == taken


@pytest.mark.parametrize(
    ("asked", "capability", "other"), [("bf16", (7, 5), "fp16"), ("bf16", (6, 1), "fp32"), ("fp16", (6, 1), "fp32")]
)
def test_a_cuda_device_without_the_instructions_is_named(asked, capability, other):
    with pytest.raises(UserError, match=f"Tesla T4.*take auto or {other}"):
        resolve_cuda_precision(asked, "Tesla T4", capability)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "fp16", "device": "cpu"}, "train.precision: fp16 does not go with train.device: cpu"),
        ({"tf32": True}, "train.tf32 needs train.precision: fp32"),
        ({"tf32": True, "precision": "fp32", "device": "cpu"}, "train.tf32 needs a CUDA device"),
        ({"adapter_precision": "bf16"}, "auto may come to fp32"),
        ({"backbone_precision": "bf16"}, "set train.precision: fp32"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_loaded(settings, words):
    recipe = load_recipe("classify").recipe
    train = dataclasses.replace(recipe.train, **settings)
    with pytest.raises(ValueError, match=words):
        check_settings(RuleSettings(recipe.mesh, train, recipe.adapter, recipe.task))


def test_fp16_and_tf32_are_refused_on_a_cpu_that_auto_found():
    for asked, word in ((Train(precision="fp16"), "fp16 is for CUDA"), (Train(precision="fp32", tf32=True), "tf32")):
        with pytest.raises(UserError, match=word):
            resolve_precision(asked, CPU, SHAPE)


# ------------------------------------------------------------------------------------------- of a recipe


def _settled(monkeypatch, rates, overrides=(), **more):
    monkeypatch.setattr(precision, "cpu_rates", lambda shape: (rates, None))
    from flatshift.experiments.recipe import auto

    auto._choose_precision.cache_clear()
    said: list[str] = []
    resolved = load_recipe("classify", [from_override(k, v) for k, v in overrides])
    found = resolve_auto(resolved, log=said.append, **more)
    auto._choose_precision.cache_clear()
    return found, said


def test_every_shipped_recipe_leaves_the_precision_to_the_machine():
    from flatshift.experiments.recipe import shipped_recipes

    own = {"positive-control"}  # its solver takes float32 alone, which is its point
    assert {load_recipe(name).recipe.train.precision for name in set(shipped_recipes()) - own} == {"auto"}


@pytest.mark.parametrize(("rates", "taken"), [(NARROW, "bf16"), (WIDE, "fp32")])
def test_what_auto_came_to_is_told_and_written_down_with_its_figures(monkeypatch, rates, taken):
    found, said = _settled(monkeypatch, rates)
    assert found.recipe.train.precision == taken
    assert said == [f"precision: {taken} (auto: {rates})"]
    (line,) = [line for line in found.to_yaml().splitlines() if line.strip().startswith("precision:")]
    assert line == f"  precision: {taken}  # auto: {rates}"


def test_a_directory_keeps_what_it_began_with_on_any_machine(monkeypatch, tmp_path):
    first, _ = _settled(monkeypatch, NARROW)
    kept = tmp_path / "recipe.resolved.yaml"
    kept.write_text(first.to_yaml())
    again, said = _settled(monkeypatch, WIDE, previous=kept)
    assert again.recipe == first.recipe and said == []
    kept.write_text("train: {nonsense: 1}")
    assert _settled(monkeypatch, WIDE, previous=kept)[0].recipe.train.precision == "fp32"


def test_a_name_holds_what_auto_came_to_and_a_precision_by_name_is_the_same_run(monkeypatch):
    wide, narrow = (_settled(monkeypatch, rates)[0].recipe for rates in (WIDE, NARROW))
    named, _ = _settled(monkeypatch, NARROW, [("train.precision", "fp32")])
    assert recipe_key(wide, []) == recipe_key(named.recipe, []) != recipe_key(narrow, [])


def test_cells_are_settled_when_they_are_planned(monkeypatch, tmp_path):
    from flatshift.experiments.studies.sweep.sweep_plan import SweepBase

    monkeypatch.setattr(precision, "cpu_rates", lambda shape: (WIDE, None))
    from flatshift.experiments.recipe import auto

    auto._choose_precision.cache_clear()
    said: list[str] = []
    base = SweepBase.of("double-descent", []).settled(earlier=tmp_path / "nothing.yaml", log=said.append)
    cells = list(base.cells([{"adapter.rank": 1}], 2))
    auto._choose_precision.cache_clear()
    assert said == [f"precision: fp32 (auto: {WIDE})"]
    assert {cell.resolved.recipe.train.precision for cell in cells} == {"fp32"}
    assert base.resolved.origins["train.precision"].startswith("auto: a product")


def test_rank_0_decides_for_all(monkeypatch):
    """The others are told, whatever they would have taken themselves."""
    from flatshift.finetune.launch import consistency

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    word = {"precision": "bf16", "why": "rank 0 says so", "note": None}
    monkeypatch.setattr(consistency, "broadcast_from_main", lambda name, text: json.dumps(word))
    found, _ = _settled(monkeypatch, WIDE)
    assert found.recipe.train.precision == "bf16" and found.origins["train.precision"] == "auto: rank 0 says so"


def test_narrow_weights_are_taken_where_wide_ones_do_not_fit(monkeypatch):
    from flatshift.finetune.planner import devices, footprint

    resolved = load_recipe("classify", [from_override("train.precision", "fp32")])
    recipe = resolved.recipe
    from flatshift.experiments.recipe.auto import find_backbone_directory

    backbone = footprint.BackboneSizes.read(find_backbone_directory(recipe.backbone), recipe.adapter).under(recipe.task)
    narrow = dataclasses.replace(recipe.train, backbone_precision="bf16")
    needs = [footprint.recipe_footprint(backbone, recipe, train, device="cpu") for train in (recipe.train, narrow)]
    assert needs[0].regularizer > 0 and needs[0].weights - needs[1].weights == 2 * backbone.elements
    wide, less = (each.total for each in needs)
    said: list[str] = []
    for room, taken in ((wide, "same"), (wide - 1, "bf16"), (less, "bf16"), (less - 1, "same")):
        monkeypatch.setattr(devices, "detect_devices", lambda device, room=room: devices.Devices("cpu", 2, room, None))
        assert resolve_auto(resolved, log=said.append).recipe.train.backbone_precision == taken
    assert len(said) == 2 and all(line.startswith("backbone: kept in bf16 (auto: ") for line in said)


def test_a_run_is_judged_where_its_precision_is_not_to_be_had(monkeypatch, capsys):
    from flatshift.experiments.recipe import auto

    recipe = load_recipe("classify", [from_override("train.device", "cpu")]).recipe
    half = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, precision="fp16"))
    assert auto.resolve_device_precision(half).train.precision == "fp32"
    assert "trained in fp16, which a CPU has not" in capsys.readouterr().err
    monkeypatch.setattr(precision, "cpu_rates", lambda shape: (WIDE, None))
    auto._choose_precision.cache_clear()
    narrow = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, precision="bf16"))
    assert auto.resolve_device_precision(narrow) == narrow
    assert "slower than fp32" in capsys.readouterr().err
    auto._choose_precision.cache_clear()
    wide = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, precision="fp32"))
    assert auto.resolve_device_precision(wide) == wide and capsys.readouterr().err == ""


_LOADS = """
import sys, torch, transformers
from benchmarks._harness import PeakMemory
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import LanguageModel
load_backbone("flatshift-5m", task=LanguageModel())  # what is imported on the way
with PeakMemory(0.001) as memory:
    model = load_backbone(sys.argv[1], task=LanguageModel(), precision="fp32")
print(memory.bytes / sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.slow  # a process of its own, whose memory is sampled: not beside a busy suite
def test_a_bf16_file_is_widened_for_a_float32_run_without_lying_in_memory_twice(tmp_path):
    from safetensors.torch import load_file, save_file

    from tests.support.finetune_models import save_backbone

    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 4096}
    file = save_backbone("llama", tmp_path, **wide) / "model.safetensors"
    save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    done = subprocess.run(
        [sys.executable, "-c", _LOADS, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert 0.9 < float(done.stdout) < 1.4  # half of it more would be the bf16 tensors, all of it more a second copy


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_peak_is_a_rate_of_this_machine(name):
    before = torch.get_num_threads()
    rate = peak_rate("cpu", name, 256)
    assert 1e7 < rate < 1e15 and torch.get_num_threads() == before
