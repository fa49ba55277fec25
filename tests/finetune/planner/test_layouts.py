"""`mesh.auto`: what it counts against what a run counts, what it picks for known models, and why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flatshift.finetune import assets
from flatshift.finetune.config import MESH_AXES, Adapter, Mesh, Optimizer, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.parallel.pipeline_plan import split_step
from flatshift.finetune.planner import devices as planner_devices
from flatshift.finetune.planner.devices import Devices, visible_memory
from flatshift.finetune.planner.footprint import predict_footprint
from flatshift.finetune.planner.layouts import is_allowed, resolve_mesh
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.planner.sizes import BackboneSizes, read_sizes
from flatshift.finetune.planner.throughput import RooflineConstants
from flatshift.finetune.tasks import Classify, LanguageModel
from flatshift.regularizers.config import SAM, Plain
from tests.support.finetune_models import save_backbone
from tests.support.seq2seq_models import save_encoder_decoder

GIB = 2**30
NODE = Devices("cuda", 8, 78 * GIB)  # eight devices of 80 GB
LAPTOP = Devices("cpu", 8, 16 * GIB)
LORA = Adapter(rank=16)


@pytest.fixture(autouse=True)
def nothing_measured_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever `--calibrate` has left on this machine."""
    monkeypatch.setenv("FLATSHIFT_CACHE", str(tmp_path / "cache"))


def llama(directory: Path, *sizes: int) -> Path:
    """A directory that has a Llama's config and a weight file that is all header.

    sizes: hidden, feed-forward, blocks, heads, key-value heads, vocabulary.
    """
    hidden, wide, blocks, heads, groups, vocabulary = sizes
    kept = hidden * groups // heads
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "lm_head.weight": [vocabulary, hidden]}
    shapes |= {"model.norm.weight": [hidden]}
    for number in range(blocks):
        block = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
        block |= {f"self_attn.{name}_proj": [hidden, hidden] for name in "qo"}
        block |= {f"self_attn.{name}_proj": [kept, hidden] for name in "kv"}
        block |= {"mlp.gate_proj": [wide, hidden], "mlp.up_proj": [wide, hidden], "mlp.down_proj": [hidden, wide]}
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in block.items()}
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps(header).encode()
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": wide, "vocab_size": vocabulary}
    config |= {"num_attention_heads": heads, "num_key_value_heads": groups}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("models") / "8b", 4096, 14336, 32, 32, 8, 128256)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("models") / "70b", 8192, 28672, 80, 64, 8, 128256)


def pick(backbone: Path, *, mesh: Mesh | None = None, adapter: Adapter = LORA, **more) -> tuple[dict[str, int], str]:
    """The axes that are not 1, and the reasons as one text."""
    train = Train(
        **{"batch_size": 64, "max_length": 2048, "precision": "bf16", "checkpointing": "full"} | more.pop("train", {})
    )
    asked = mesh or Mesh(auto=True)
    regularizer = more.pop("regularizer", Plain())
    settings = {"adapter": adapter, "train": train, "task": LanguageModel(), "regularizer": regularizer}
    settings["optimizer"] = more.pop("optimizer", Optimizer())
    chosen, reasons = resolve_mesh(asked, backbone=backbone, **settings, **more)
    assert not chosen.auto
    check_settings(RuleSettings(chosen, **settings))
    return {axis: getattr(chosen, axis) for axis in MESH_AXES if getattr(chosen, axis) > 1}, "\n".join(reasons)


# ---------------------------------------------------------------------------------------------------- what it counts


@pytest.mark.parametrize(
    ("model", "elements", "adapter"), [("small", 8030261248, 41943040), ("large", 70553706496, 207093760)]
)
def test_elements_of_published_models(model: str, elements: int, adapter: int, request: pytest.FixtureRequest) -> None:
    sizes = BackboneSizes.read(request.getfixturevalue(model), LORA)
    assert (sizes.elements, sizes.adapter) == (elements, adapter)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.bf16)])
def test_the_estimate_is_what_a_run_counts(precision: str) -> None:
    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.models.load import load_backbone
    from flatshift.finetune.planner.memory import memory_plan

    directory, train, adapter = (
        assets.backbone_directory("flatshift-5m"),
        Train(batch_size=4, precision=precision),
        Adapter(),
    )
    assert directory is not None
    model = attach_adapter(
        load_backbone(directory, task=LanguageModel(), precision=precision), adapter, task=LanguageModel(), seed=0
    )
    counted = memory_plan(model, train=train)
    guess = predict_footprint(BackboneSizes.read(directory, adapter), mesh=Mesh(), adapter=adapter, train=train)
    assert guess.weights == pytest.approx(counted.backbone, rel=1e-4)
    assert guess.adapter == counted.adapter + counted.gradients + counted.optimizer
    assert guess.activations == pytest.approx(counted.activations, rel=0.06)
    fixed = memory_plan(model, train=train, optimizer=Optimizer(fixed=("a",))).optimizer
    assert fixed == 8 * sum(p.numel() for name, p in model.named_parameters() if ".lora_B." in name)
    sizes = BackboneSizes.read(directory, adapter)
    for kind in ("lora-muon", "riemannian", "gauss-newton"):
        guess = predict_footprint(sizes, mesh=Mesh(), adapter=adapter, train=train, optimizer=kind)
        counted = memory_plan(model, train=train, optimizer=Optimizer(kind=kind, clip=None))
        assert guess.adapter == counted.adapter + counted.gradients + counted.optimizer


def test_adapters_on_embeddings_are_counted() -> None:
    from flatshift.finetune.adapters.adapter import attach_adapter, trainable
    from flatshift.finetune.models.load import load_backbone

    directory, adapter = assets.backbone_directory("flatshift-5m"), Adapter(targets=("embed_tokens", "q_proj"))
    assert directory is not None
    model = attach_adapter(load_backbone(directory, task=LanguageModel()), adapter, task=LanguageModel(), seed=0)
    counted = sum(values.numel() for values in trainable(model).values())
    assert BackboneSizes.read(directory, adapter).adapter == counted


@pytest.mark.parametrize("kind", ["roberta", "t5"])
def test_heads_of_classes_are_counted(kind: str, tmp_path: Path) -> None:
    from flatshift.finetune.adapters.adapter import attach_adapter, trainable
    from flatshift.finetune.models.load import load_backbone

    task = Classify()
    folder = save_encoder_decoder(kind, tmp_path / kind) if kind == "t5" else save_backbone(kind, tmp_path / kind)
    backbone = load_backbone(folder, task=task, label_names=("a", "b", "c"))
    tensors = trainable(attach_adapter(backbone, LORA, task=task, seed=0))
    counted = sum(values.numel() for name, values in tensors.items() if not name.endswith("bias") or values.numel() > 3)
    assert BackboneSizes.read(folder, LORA).under(task, classes=3).adapter == counted


def test_moments_in_eight_bits_are_what_a_run_counts(small: Path) -> None:
    from flatshift.finetune.planner.memory import optimizer_bytes

    sizes = BackboneSizes.read(small, LORA)
    factors = {f"{i}.lora_{'BA'[side]}.": 16 * layer[side] for i, layer in enumerate(sizes.layers) for side in (0, 1)}
    assert sum(factors.values()) == sizes.adapter
    guess = predict_footprint(sizes, mesh=Mesh(), adapter=LORA, train=Train(batch_size=1), optimizer="adamw-8bit")
    assert guess.adapter == 8 * sizes.adapter + optimizer_bytes(factors, "adamw-8bit")


def test_a_pipeline_is_planned_by_the_cut_that_it_gets(tmp_path: Path) -> None:
    sizes = BackboneSizes.read(llama(tmp_path / "wide", 64, 128, 18, 4, 1, 8192), LORA)
    train = Train(batch_size=4, max_length=128, precision="fp32")
    one, two = (predict_footprint(sizes, mesh=Mesh(pp=pp), adapter=LORA, train=train) for pp in (1, 2))
    # the head costs as much as 11 of these blocks with their attention, so the first of two stages has 15 of 18
    block, end = 4 * max(sizes.blocks), 4 * max(sizes.ends)
    assert (two.weights - end) / block == 15
    assert two.activations / one.activations == pytest.approx(15 / 18 * 2 / 4, rel=1e-6)


def test_a_pipeline_is_planned_by_the_pieces_that_it_gets() -> None:
    """1f1b on two ranks: nine rows are three pieces of three; eight pieces of two would hold seven rows of nothing."""
    assert split_step(Mesh(pp=2), 9, 2) == (3, 6)
    assert split_step(Mesh(pp=2, microbatches=3), 9, 1) == (3, 3)
    assert split_step(Mesh(pp=4, schedule="interleaved"), 5, 1) == (1, 5)
    assert split_step(Mesh(), 9, 2) == (9, 2)


@pytest.mark.parametrize(("cp", "groups", "attended"), [(2, 4, 262144), (4, 4, 262144), (2, 2, 327680)])
def test_keys_values_and_masks_do_not_divide_by_context(tmp_path: Path, cp: int, groups: int, attended: int) -> None:
    """What hooks of autograd counted on cp ranks: repeated keys and values once more for the early run."""
    sizes = BackboneSizes.read(llama(tmp_path / "b", 128, 256, 4, 4, groups, 352), Adapter(rank=8))
    train, own, step = Train(batch_size=1, max_length=256, precision="fp32"), 256 // cp, 128 // cp
    found = predict_footprint(sizes, mesh=Mesh(cp=cp, zero=1), adapter=Adapter(rank=8), train=train)
    states, wide, factors, sums = 7 * own * 128, 4 * own * 256, 7 * own * 8, own * (4 + 2)
    block = 4 * (states + wide + factors + sums + step**2 * (2 * cp + 1)) + attended
    assert found.activations == 4 * block


def test_each_axis_takes_its_share(large: Path) -> None:
    sizes, train = BackboneSizes.read(large, LORA), Train(batch_size=8, max_length=2048, precision="bf16")

    def of(**axes) -> object:
        return predict_footprint(sizes, mesh=Mesh(**axes), adapter=LORA, train=train)

    one, shards, cut, stages = of(), of(dp=8), of(tp=8), of(pp=8)
    assert one.weights == 2 * sizes.elements and one.gathered == 0
    assert shards.weights == one.weights // 8 and shards.gathered == 2 * 2 * max((*sizes.blocks, *sizes.ends))
    assert cut.weights == one.weights // 8 and cut.activations < one.activations / 2
    assert one.weights / 8 < stages.weights < one.weights / 7
    assert of(dp=8, reshard=False).gathered > of(dp=8).gathered
    assert of(dp=8, zero=1).weights == one.weights
    assert of(dp=8, zero=1).adapter == of(dp=8, zero=2).adapter == shards.adapter == one.adapter // 8
    split = of(tp=8, sequence_parallel=True).activations
    assert split == pytest.approx(one.activations / 8 + 7 / 8 * 2 * sizes.adapter, rel=1e-6), "adapters' copies whole"


# ------------------------------------------------------------------------------------------------------ what it picks


def test_copies_where_the_backbone_fits(small: Path) -> None:
    axes, why = pick(small, devices=NODE)
    assert axes == {"replicate": 8}
    assert "replicate 8 needs 23.1 GiB a rank of 68.7 GiB (15.0 GiB weights + " in why


def test_precisions_to_come_are_two_bytes_on_a_gpu(small: Path) -> None:
    said = [pick(small, devices=NODE, train={"precision": precision}) for precision in ("auto", "bf16")]
    assert said[0] == said[1]


def test_shards_inside_a_node_and_copies_across(large: Path) -> None:
    axes, why = pick(large, devices=NODE, processes=64, node=8)
    assert axes == {"replicate": 16, "dp": 4}
    assert "dp 4: with dp 2 a rank needs at least 7" in why and "copies of the shards" in why


def test_stages_across_nodes_where_gathers_could_not_be_hidden(large: Path) -> None:
    devices, train = Devices("cuda", 8, 24 * GIB), {"batch_size": 16, "max_length": 512}
    axes, why = pick(large, devices=devices, processes=16, node=8, train=train)
    assert axes["pp"] == 4 and "pp 4: a step is predicted to take" in why


def test_the_fastest_that_fits_by_the_constants_that_were_measured_here(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices("cuda", 8, 78 * GIB, row="H100-80")
    assert pick(large, devices=devices, train={"batch_size": 2})[0] == {"replicate": 2, "tp": 4}
    slow = {"H100-80": RooflineConstants(fast_link=1e-3)}
    monkeypatch.setattr(planner_devices, "cached_constants", slow.get)
    axes, why = pick(large, devices=devices, train={"batch_size": 2})
    assert axes["pp"] > 1 and "tp" not in axes, why


def test_tensor_parallel_where_rows_are_few(large: Path) -> None:
    axes, why = pick(large, devices=NODE, train={"batch_size": 2})
    assert axes == {"replicate": 2, "tp": 4}
    assert "tp 4: a step is predicted to take" in why and "less than on pp 2" in why


def test_no_tensor_parallel_that_cuts_blocks_of_scales() -> None:
    """4,864 channels of the feed-forward are 76 blocks of 64, which seven ranks would cut."""
    sizes = read_sizes("qwen2.5-0.5b", Adapter())
    for quantization, tp, allowed in ((None, 7, True), ("nf4", 7, False), ("nf4", 2, True), ("nf4-double", 2, False)):
        train = Train(quantization=quantization)  # type: ignore[arg-type]
        settings = RuleSettings(Mesh(), train, Adapter(), LanguageModel())
        assert is_allowed(Mesh(tp=tp), Mesh(), settings, sizes, node=14) == allowed, (quantization, tp)


def test_set_axes_stay(small: Path) -> None:
    axes, why = pick(small, devices=NODE, mesh=Mesh(auto=True, tp=2))
    assert axes == {"replicate": 4, "tp": 2} and "tp 2 as set" in why


def test_data_ranks_divide_the_rows_of_every_stage(small: Path) -> None:
    assert pick(small, devices=NODE, processes=8, train={"batch_size": 8}, batch_sizes=[4])[0] == {
        "replicate": 4,
        "tp": 2,
    }


def test_idle_devices_are_named(small: Path) -> None:
    loop = Mesh(auto=True, pp=2, schedule="interleaved")
    axes, why = pick(small, devices=Devices("cuda", 3, 78 * GIB), mesh=loop)
    assert axes == {"pp": 2} and "1 of 3 devices stay idle" in why


def test_a_laptop_stays_at_one_process(small: Path) -> None:
    tiny = assets.backbone_directory("flatshift-5m")
    assert tiny is not None
    axes, why = pick(tiny, devices=LAPTOP)
    assert axes == {} and "one process: it may use all cores" in why
    assert pick(tiny, devices=LAPTOP, processes=4)[0] == {"replicate": 4}


def test_a_limit_on_each_process_calls_for_shards(small: Path) -> None:
    limited = Devices("cpu", 16, 64 * GIB, limit=8 * GIB)
    axes, why = pick(small, devices=limited, train={"max_length": 256, "batch_size": 16})
    assert axes == {"dp": 4} and "of 8.0 GiB" in why


def test_stages_where_the_number_of_ranks_allows_nothing_else(small: Path) -> None:
    assert pick(small, devices=NODE, processes=7, train={"batch_size": 8})[0] == {"pp": 7}


def test_what_does_not_fit_is_said(large: Path) -> None:
    axes, why = pick(large, devices=LAPTOP)
    assert axes == {} and "by this estimate it does not fit" in why


def test_unknown_memory_is_no_obstacle(small: Path) -> None:
    axes, why = pick(small, devices=Devices("cuda", 2, None))
    assert axes == {"replicate": 2} and "memory unknown" in why


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"processes": 6, "mesh": Mesh(auto=True, dp=4)}, "6 processes are no multiple of the 4 ranks"),
        (
            {"processes": 2, "train": {"adapter_precision": "bf16", "precision": "fp32"}},
            "train.adapter_precision: bf16",
        ),
    ],
)
def test_refusals(small: Path, changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        pick(small, devices=NODE, **changes)


def test_a_damaged_weight_file(tmp_path: Path) -> None:
    broken = llama(tmp_path / "b", 64, 64, 1, 1, 1, 64)
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        pick(broken, devices=LAPTOP)


# ------------------------------------------------------------------------------------------------------- what it knows


def test_tensor_ranks_keep_what_is_gathered_and_a_head_for_each_query() -> None:
    sizes = read_sizes("llama-3.2-3b", Adapter())

    def activations(tp: int, **changes: Any) -> int:
        return predict_footprint(
            dataclasses.replace(sizes, **changes), mesh=Mesh(tp=tp), adapter=Adapter(), train=Train(max_length=1024)
        ).activations

    assert activations(2) < activations(1)
    assert activations(2, kind="phi3") == activations(1)  # both regions are gathered between their layers
    assert activations(1) > activations(2, kind="glm4") > activations(2)
    assert activations(2, groups=3) == activations(2, groups=24) > activations(2, groups=8)


def test_cuda_devices_as_a_process_sees_them() -> None:
    table = "0, GPU-aa, 1000\n1, GPU-bb, 2000\n2, GPU-cc, [N/A]\n"
    assert visible_memory(table, None) == [1000 << 20, 2000 << 20, None]
    assert visible_memory(table, "1,0") == [2000 << 20, 1000 << 20]
    assert visible_memory(table, "GPU-b") == [2000 << 20]
    assert visible_memory(table, "0,-1,1") == [1000 << 20]
    assert visible_memory(table, "") == []
    assert visible_memory(table, "MIG-x") == [None]


def test_no_axis_on_which_the_regularizer_does_not_run(large: Path, small: Path) -> None:
    assert pick(small, devices=NODE, train={"batch_size": 2})[0] == {"replicate": 2, "tp": 4}
    axes, _ = pick(small, devices=NODE, train={"batch_size": 2}, regularizer=SAM())
    assert axes == {"replicate": 2}
    with pytest.raises(UserError, match=r"^regularizer\.kind: sam does not go with mesh\.tp > 1"):
        pick(large, devices=NODE, mesh=Mesh(auto=True, tp=2), regularizer=SAM())
