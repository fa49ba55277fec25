"""Quantised backbones on a mesh: what every rank trains is what one process trains, each keeps its bytes, every rank
really holds a part of the packed values, with the bits of the whole, and never more while it loads them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks._harness import held_bytes, peak_bytes
from flatshift.cli import run
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Adapter, Mesh, Quantization, Train
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.checkpoint import canonical_name
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.quantize import quantization_scales
from flatshift.finetune.parallel import weights
from flatshift.finetune.parallel.build import build_engine
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.layout import TensorParallelLayout, gather_full_tensors, local_part
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.planner.footprint import predict_footprint
from flatshift.finetune.planner.sizes import read_sizes
from flatshift.finetune.tasks import LanguageModel
from flatshift.regularizers import GGPO, build
from tests.support.commands import flags
from tests.support.distributed_ranks import run_ranks
from tests.support.finetune_models import save_backbone
from tests.support.quantized_files import FORMATS, quantized_copy
from tests.support.regularizer_models import tokens

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs the extra `quant` (bitsandbytes)"
)
STEPS = 4


@dataclass(frozen=True)
class Case:
    """A quantised model, and the mesh it runs on."""

    mesh: Mesh = field(default_factory=Mesh)
    kind: Quantization = "nf4"
    source: str = "llama"
    dora: bool = False
    precision: Any = "fp32"
    checkpointing: Any = "none"


@dataclass(frozen=True)
class Micro:
    """Rows with all tokens supervised."""

    ids: torch.Tensor

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids}

    @property
    def labels(self) -> torch.Tensor:
        return self.ids

    def to(self, device: torch.device) -> Micro:
        return self


def stored(engine: Engine) -> dict[str, bytes]:
    """The bytes of what is frozen on this rank, scales included."""
    held = {name: local_part(p) for name, p in engine.model.named_parameters() if not p.requires_grad}
    return {
        name: tensor.as_subclass(torch.Tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in (held | quantization_scales(engine.model)).items()
    }


def course(case: Case, sources: dict[str, Path], adapter: Path | None) -> dict[str, Any]:
    """Some updates with GGPO, and what is to be the same on any mesh."""
    device = torch.device("cpu")
    train = Train(quantization=case.kind, precision=case.precision, checkpointing=case.checkpointing)
    said: list[str] = []
    engine = build_engine(
        str(sources[case.source]),
        task=LanguageModel(),
        adapter=Adapter(rank=4, dora=case.dora),
        train=train,
        mesh=case.mesh,
        world=ProcessMesh.alone(device) if case.mesh.size == 1 else ProcessMesh.of(case.mesh, device),
        log=said.append,
    )
    settings = GGPO(sigma=0.2, refresh=2, ema=0.5)
    regularizer = build(settings).attach(engine.model, seed=5, total_steps=STEPS, placement=engine.placement)
    optimizer = torch.optim.AdamW(engine.parameters.values(), lr=1e-2)
    found: dict[str, Any] = {"losses": [], "said": said}
    part, parts = engine.share
    before: dict[str, bytes] = {}
    for step in range(STEPS):
        batch = [Micro(tokens(4, 12, seed=10 * step + i).chunk(parts)[part]) for i in range(2)]
        with regularizer.step(step):
            loss = engine.forward_backward(
                batch, 2 * 4 * 11, task=LanguageModel(), head=None, context=lambda index: autocast(train, device)
            )
        if step == 0:
            engine.reshard()
            before = stored(engine)
        if step == 1:  # at first B is zero, and so is A's gradient
            found["gradients"] = engine.full_tensors(
                {n: p.grad for n, p in engine.parameters.items() if p.grad is not None}
            )
            found["first_state"] = regularizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(loss))
        if step == 2:
            with torch.no_grad(), autocast(train, device):
                engine.eval_model.eval()(**batch[0].inputs)
            engine.model.train()
    with contextlib.suppress(KeyboardInterrupt), regularizer.step(STEPS):
        raise KeyboardInterrupt
    engine.reshard()
    found["untouched"] = stored(engine) == before
    packed = [p for p in engine.model.parameters() if p.dtype == torch.uint8 and p.ndim == 2]  # without scales
    found["packed"] = sum(local_part(p).numel() for p in packed), sum(p.numel() for p in packed)
    found["sharded"] = bool(engine.sharding is not None and engine.sharding.units)
    found["state"] = regularizer.state_dict()
    regularizer.detach()
    if adapter is not None:
        engine.save_adapter(adapter)
        engine.load_adapter(adapter)
    return found


def courses(cases: dict[str, Case], sources: dict[str, Path], out: Path) -> dict[str, dict[str, Any]]:
    return {name: course(case, sources, out / name) for name, case in cases.items()}


BOUNDS = {"fp32": (3e-5, 1e-4, 1e-5), "bf16": (1e-2, 1e-1, 5e-2)}
"""Worst distances from the single process: loss (nats), gradients and the regularizer's state (relative)."""


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative distance."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    from flatshift.finetune.adapters.adapter import read_adapter

    sources = {
        "llama": save_backbone("llama", tmp_path / "llama", hidden_size=64, intermediate_size=128),
        "gpt2": save_backbone("gpt2", tmp_path / "gpt2", n_embd=64),
        "wide": save_backbone("llama", tmp_path / "wide", hidden_size=128, intermediate_size=256),
    }
    cases = {
        "replicate nf4-double": Case(Mesh(replicate=2), kind="nf4-double"),
        "replicate int8": Case(Mesh(replicate=2), kind="int8"),
        "dp nf4": Case(Mesh(dp=2)),
        "dp nf4-double full recomputation": Case(Mesh(dp=2), kind="nf4-double", checkpointing="full"),
        "dp nf4 kept gathered, gpt2": Case(Mesh(dp=2, reshard=False), source="gpt2"),
        "dp nf4 DoRA": Case(Mesh(dp=2), dora=True),
        "dp nf4 bf16": Case(Mesh(dp=2), precision="bf16"),
        "dp int8 adapters only": Case(Mesh(dp=2, zero=2), kind="int8"),
        "dp nf4 adapters only": Case(Mesh(dp=2, zero=1)),
        "cp nf4": Case(Mesh(cp=2)),
        "pp nf4": Case(Mesh(pp=2)),
        "pp nf4-double, gpt2": Case(Mesh(pp=2), kind="nf4-double", source="gpt2"),
        "tp nf4": Case(Mesh(tp=2), source="wide"),
    }
    plain = {name: replace(case, mesh=Mesh(), checkpointing="none") for name, case in cases.items()}
    once = {case: course(case, sources, None) for case in dict.fromkeys(plain.values())}
    alone = {name: once[case] for name, case in plain.items()}
    ranks = run_ranks(courses, 2, cases, sources, tmp_path / "adapters")
    for name, case in cases.items():
        loss_bound, gradient_bound, state_bound = BOUNDS[case.precision]
        for rank in ranks:
            mine, wanted = rank[name], alone[name]
            assert mine["untouched"] and wanted["untouched"], name
            assert mine["losses"] == pytest.approx(wanted["losses"], abs=loss_bound), name
            worst = max(far(mine["gradients"][key], value) for key, value in wanted["gradients"].items())
            print(name, f"{worst:.1e}")
            assert worst < gradient_bound and mine["gradients"].keys() == wanted["gradients"].keys(), (name, worst)
            for key, value in mine["first_state"].items():
                if key.endswith((".norms", ".ema")):
                    assert far(value, wanted["first_state"][key]) < state_bound, (name, key)
            keys = set().union(*(each[name]["state"] for each in (ranks if case.mesh.pp > 1 else [rank])))
            assert keys == set(wanted["state"]), name
            sharded = case.mesh.zero == 3 and case.mesh.replicate == 1
            assert mine["sharded"] == (case.mesh.dp * case.mesh.cp > 1), name
            if case.kind != "int8":
                whole = wanted["packed"][1]
                assert mine["packed"][0] == (whole // 2 if sharded else whole) and whole > 0, name
            assert any("adapted layers" in line for line in mine["said"]), name
        saved = read_adapter(tmp_path / "adapters" / name)
        assert saved and all(bool(tensor.isfinite().all()) for tensor in saved.values()), name


def packed_layers(
    source: str, kind: Quantization, mesh: Mesh, piece: int
) -> tuple[dict[str, Any], int, dict[str, int]]:
    """Every 4-bit layer of this rank without FSDP2's shards, and the bytes at the worst moment of loading and those
    that stay of the model. rows, columns: the layer's tensor-parallel part."""
    weights._PIECE = piece
    device = torch.device("cpu")
    world = ProcessMesh.of(mesh, device)
    engines: list[Engine] = []

    def load() -> None:
        engines.append(
            build_engine(
                source,
                task=LanguageModel(),
                adapter=Adapter(rank=4),
                train=Train(quantization=kind, precision="bf16"),
                mesh=mesh,
                world=world,
            )
        )

    before = held_bytes()
    peak = int(peak_bytes(load) - before)
    (engine,) = engines
    held = [(local_part(tensor).nbytes, tensor.requires_grad) for tensor in engine.model.parameters()]
    stays = {"all": sum(size for size, _ in held), "frozen": sum(size for size, trained in held if not trained)}
    layers = {}
    for path, module in engine.model.named_modules():
        if "absmax" not in module._parameters:
            continue
        layer: Any = module
        parts = {"weight": layer.weight, "absmax": layer.absmax}
        whole = gather_full_tensors(parts, parameters=parts, layout=TensorParallelLayout(), world=world)
        state = layer.quant_state
        own = engine.layout.slices.get(canonical_name(f"{path}.weight"))
        kept = [slice(None), slice(None)]
        if own is not None:
            ((start, stop),) = own.runs
            kept[own.dim] = slice(start, stop)
        nested = {"nested": state.state2.absmax, "offset": state.offset} if state.nested else {}
        layers[canonical_name(path)] = {**whole, **nested, "dtype": state.dtype, "rows": kept[0], "columns": kept[1]}
    return layers, peak, stays


@pytest.mark.parametrize(
    ("kind", "family", "mesh"),
    [
        ("nf4-double", "llama", Mesh(dp=3)),  # no weight divides by three: shards begin inside blocks
        ("nf4", "gpt2", Mesh(dp=3)),
        ("nf4", "llama", Mesh(tp=2)),
        ("nf4", "llama", Mesh(dp=2, tp=2)),
    ],
)
def test_shards_are_parts_of_the_quantised_whole(kind: Quantization, family: str, mesh: Mesh, tmp_path: Path) -> None:
    sizes = {"n_embd": 128} if family == "gpt2" else {"hidden_size": 128, "intermediate_size": 384}
    source = save_backbone(family, tmp_path / "own", **sizes)
    whole = load_backbone(source, task=LanguageModel(), quantization=kind, precision="bf16")
    for layers, _, _ in run_ranks(packed_layers, mesh.size, str(source), kind, mesh, 1 << 12):
        assert len(layers) == (8 if family == "gpt2" else 14)
        for name, part in layers.items():
            weight: Any = whole.get_submodule(name).weight
            state = weight.quant_state
            rows, columns = state.shape
            wanted = {"weight": weight.detach().as_subclass(torch.Tensor).view(rows, columns // 2)}
            wanted |= {"absmax": state.absmax.view(rows, columns // 64)}
            halves = slice(
                *(None if edge is None else edge // 2 for edge in (part["columns"].start, part["columns"].stop))
            )
            blocks = slice(
                *(None if edge is None else edge // 64 for edge in (part["columns"].start, part["columns"].stop))
            )
            assert torch.equal(part["weight"].view(-1), wanted["weight"][part["rows"], halves].reshape(-1)), name
            assert torch.equal(part["absmax"].view(-1), wanted["absmax"][part["rows"], blocks].reshape(-1)), name
            assert part["dtype"] == state.dtype
            if state.nested:
                assert torch.equal(part["nested"], state.state2.absmax), name
                assert part["offset"] == state.offset, name


def test_quantised_files_are_packed_anew_by_shards(tmp_path: Path) -> None:
    """Three ranks read slices of gptq's integers, which pack eight inputs each, in an order of groups of their own."""
    source = save_backbone("llama", tmp_path / "floats", hidden_size=64, intermediate_size=128)
    settings, pack = FORMATS["gptq, 8 bits, order of activations"]
    quantized_copy(source, tmp_path / "packed", settings, pack)
    whole = load_backbone(tmp_path / "packed", task=LanguageModel(), quantization="nf4", precision="bf16")
    for layers, _, _ in run_ranks(packed_layers, 3, str(tmp_path / "packed"), "nf4", Mesh(dp=3), 1 << 12):
        for name, part in layers.items():
            weight: Any = whole.get_submodule(name).weight
            assert torch.equal(part["weight"], weight.detach().as_subclass(torch.Tensor)), name
            assert torch.equal(part["absmax"], weight.quant_state.absmax), name


def test_a_rank_never_holds_more_than_its_shard_and_a_tensor(tmp_path: Path) -> None:
    """Files of one matrix each: the allocator counts the one that is mapped, besides the values that are quantised."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16}
    source = save_backbone("llama", tmp_path / "one", **sizes)
    transformers.AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "many", max_shard_size="1MB")
    backbone = read_sizes(source, Adapter(rank=4))
    train = Train(quantization="nf4", precision="bf16")
    tensor = 1024 * 256 * 4  # the largest, in the files' float32
    for mesh in (Mesh(dp=2), Mesh(pp=2)):
        for layers, peak, stays in run_ranks(packed_layers, 2, str(tmp_path / "many"), "nf4", mesh, 1 << 16):
            packed = sum(part["weight"].numel() for part in layers.values())
            whole = packed * (2 if mesh.pp > 1 else 1)
            assert stays["all"] < peak <= stays["all"] + 2 * tensor < whole, (mesh, peak, stays, whole)
            planned = predict_footprint(backbone, mesh=mesh, adapter=Adapter(rank=4), train=train).weights
            assert planned == pytest.approx(stays["frozen"], rel=0.02), (mesh, planned, stays)


def test_a_slice_inside_a_block_of_scales_is_refused(tmp_path: Path) -> None:
    """64 inputs on two ranks are half a block for each."""
    source = save_backbone("llama", tmp_path, hidden_size=64, intermediate_size=128)
    with pytest.raises(RuntimeError, match=r"mesh\.tp: a rank's part of the 64 inputs of .*o_proj\.weight would begin"):
        run_ranks(packed_layers, 2, str(source), "nf4", Mesh(tp=2), 1 << 16)


def test_a_run_on_stages_from_quantised_files_is_that_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp8 files, four bits with quantised scales, two stages: through the command, to the loss of its evaluation."""
    settings, pack = FORMATS["fp8"]
    quantized_copy(open_backbone("flatshift-5m").directory, tmp_path / "packed", settings, pack)
    about = {"train.steps": 3, "train.batch_size": 4, "train.max_length": 32, "train.threads": 1, "train.device": "cpu"}
    about |= {"train.precision": "fp32", "train.quantization": "nf4-double", "data.train.limit": 12}
    about |= {"data.dev.limit": 4, "data.test.limit": 4, "eval.bootstrap": 20, "backbone": tmp_path / "packed"}
    losses, judged = {}, {}
    for name, mesh in (("one", {}), ("two", {"mesh.pp": 2})):
        out = tmp_path / name
        assert run(["train", "language-model", "--out", str(out), *flags(about | mesh)]) == 0, capsys.readouterr().err
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if line["split"] == "train"]
        judged[name] = json.loads((out / "eval.json").read_text())["test"]["loss"]["value"]
    assert losses["two"] == pytest.approx(losses["one"], abs=1e-5) and len(losses["one"]) == 3
    assert judged["two"] == pytest.approx(judged["one"], abs=1e-5)
