"""The check before the first step on a mesh: a small copy of the backbone's own configuration equals one process, each
fault that it is there for is refused with its figure, and configurations drawn at random train or are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from flatshift.cli import run
from flatshift.finetune.compute import dropout
from flatshift.finetune.config import Adapter, Mesh, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.models import checkpoint
from flatshift.finetune.models.backbone import quiet_transformers
from flatshift.finetune.models.families import is_tried
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.parallel.mesh_check import BOUNDS, SmallCase, StepResult, describe_difference, shrink_config
from flatshift.finetune.tasks import LanguageModel, Seq2Seq
from tests.support import warm_commands
from tests.support.commands import flags
from tests.support.data_models import byte_tokenizer, write_jsonl
from tests.support.distributed_ranks import run_ranks

AXES = {
    "dp": Mesh(dp=2),
    "replicate": Mesh(replicate=2),
    "tp": Mesh(tp=2),
    "sequence_parallel": Mesh(tp=2, sequence_parallel=True),
    "pp": Mesh(pp=2),
    "cp": Mesh(cp=2),
}
SMALL = {
    "train.steps": 4,
    "train.batch_size": 4,
    "train.max_length": 24,
    "train.max_cut": 1,
    "train.eval_every": 0,
    "train.save_every": 2,
    "train.precision": "fp32",
    "train.threads": 1,
    "train.device": "cpu",
    "data.dev.files": "[]",
    "data.test.files": "[]",
    "data.checks.copies": "off",
    "optimizer.eps": 1e-6,
    "optimizer.schedule": "constant",
    "eval.train_limit": 0,
    "eval.cold": 0,
    "regularizer": "plain",
    "adapter.rank": 4,
}
"""Of a run of a few updates."""


@contextmanager
def fault(name: str) -> Iterator[None]:
    """Bring back a fault that training on a mesh once had."""
    intercepted, coordinates = dict(dropout._INTERCEPTED), dropout.DropoutPass._coordinates
    with pytest.MonkeyPatch.context() as patch:
        if name == "masks of flattened rows are shared":

            def shared(own: Any, module: str, shape: torch.Size, device: torch.device) -> list[Any]:
                flat = len(shape) == 2 and shape[0] != own._rows and not module.endswith("lora_dropout")
                return coordinates(own, "pos_dropout" if flat else module, shape, device)

            patch.setattr(dropout.DropoutPass, "_coordinates", shared)
        elif name == "noise is drawn by a generator":
            noise = (Tensor.uniform_, Tensor.exponential_, torch.rand_like)
            patch.setattr(dropout, "_INTERCEPTED", {k: v for k, v in intercepted.items() if k not in noise})
        elif name == "computed parameters have no value":
            patch.setattr(checkpoint, "_compute_parameters", lambda model, names: {})
        else:
            assert name == ""
        yield


def problems(cases: list[tuple[str, str, float, str]]) -> list[str]:
    """What the check says of each model type on an axis, with a dropout rate and a fault; on every rank."""
    worlds = {axis: ProcessMesh.of(AXES[axis], torch.device("cpu")) for axis in dict.fromkeys(c[1] for c in cases)}
    found = []
    for kind, axis, rate, broken in cases:
        config, mesh = CONFIG_MAPPING[kind](), AXES[axis]
        task = Seq2Seq() if config.is_encoder_decoder else LanguageModel()
        train = Train(batch_size=4, max_length=16, precision="fp32")
        targets = ("o_proj",) if axis == "pp" else "all-linear"  # dropout does not go with adapted experts
        adapter = Adapter(rank=4, dropout=rate, targets=targets)
        case = SmallCase(shrink_config(config, mesh), task, adapter, train, mesh, worlds[axis])
        with fault(broken):
            try:
                found.append(case.find_problem(drops=rate > 0))
            except UserError as error:
                found.append(str(error))
    dist.barrier()
    return found


def test_what_is_mended_is_equal_and_each_fault_has_its_figure() -> None:
    cases = [
        ("opt", "dp", 0.1, ""),
        ("phimoe", "dp", 0.0, ""),
        ("switch_transformers", "dp", 0.0, ""),
        ("switch_transformers", "replicate", 0.0, ""),
        ("marian", "dp", 0.1, ""),
        ("opt", "dp", 0.1, "masks of flattened rows are shared"),
        ("phimoe", "dp", 0.0, "noise is drawn by a generator"),
        ("switch_transformers", "replicate", 0.1, ""),
        ("marian", "dp", 0.1, "computed parameters have no value"),
    ]
    one, other = run_ranks(problems, 2, cases)
    assert one == other
    equal, (opt, phimoe, switch, marian) = one[:5], one[5:]
    assert equal == [""] * 5
    for problem in (opt, phimoe, switch):
        assert "does not compute what one process does" in problem and "gradients" in problem
    for problem in (opt, switch):  # tokens of routed experts have masks that no rank can number
        assert problem.endswith("without dropout they are equal: set adapter.dropout: 0 and train.backbone_dropout: 0")
    assert "one process or on another axis" in phimoe
    assert marian.startswith("fails in a step of a small copy") and "embed_positions" in marian


def test_families_beyond_the_benchmarks_are_cut_into_stages() -> None:
    kinds = ("minimax_m2", "hy_v3", "laguna", "youtu", "olmo_hybrid", "minicpm3")
    assert not any(is_tried(kind, AXES["pp"]) for kind in kinds)
    one, _ = run_ranks(problems, 2, [(kind, "pp", 0.1, "") for kind in kinds])
    assert one == [""] * len(kinds), one


def test_differences_are_judged_by_each_figure() -> None:
    wanted = StepResult(2.0, 5.0, {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)})
    assert describe_difference(wanted, wanted) == ""
    worse = {
        "loss": StepResult(2.0 + 3 * BOUNDS["loss"], 5.0, wanted.gradients),
        "gradients": StepResult(2.0, 5.0, wanted.gradients | {"b": torch.full((2,), 1e-5)}),
        "norm": StepResult(2.0, 5.0 * (1 + 2 * BOUNDS["norm"]), wanted.gradients),
    }
    for name, mine in worse.items():
        figures = describe_difference(mine, wanted).split("small copy: ")[1].split(", ")
        above = [figure.split()[0] for figure in figures if float(figure.split()[1]) > BOUNDS[figure.split()[0]]]
        assert above == [name], figures
    assert "other tensors" in describe_difference(StepResult(2.0, 5.0, {"a": wanted.gradients["a"]}), wanted)
    assert "nan" in describe_difference(wanted, StepResult(float("nan"), 5.0, wanted.gradients))
    lost = StepResult(2.0, 5.0, wanted.gradients | {"a": torch.full((2,), float("nan"))})
    assert "inf" in describe_difference(lost, wanted)


def write_backbone(kind: str, folder: Path, **settings: Any) -> Path:
    """A random model of a type of transformers in the size of a small copy, with a tokenizer; and rows beside it."""
    tokenizer = byte_tokenizer()
    config = shrink_config(CONFIG_MAPPING[kind](**{"vocab_size": len(tokenizer)}, **settings), Mesh())
    config.get_text_config().vocab_size = len(tokenizer)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not config.is_encoder_decoder
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSeq2SeqLM
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.default_generator.manual_seed(0)
        auto.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    write_jsonl(
        folder / "rows.jsonl", [{"text": f"the cat {i} sat on mat {7 * i}", "label": str(i % 3)} for i in range(24)]
    )
    return folder


def words(backbone: Path, out: Path, **settings: Any) -> list[str]:
    config = json.loads((backbone / "config.json").read_text(encoding="utf-8"))
    recipe = "seq2seq" if config.get("is_encoder_decoder") else "language-model"
    settings = ({"task.label_smoothing": 0} if recipe == "seq2seq" else {"task.pack": "false"}) | settings
    own = {"backbone": backbone, "data.train.files": f"[{backbone}/rows.jsonl]", **SMALL, **settings}
    return ["train", recipe, "--out", str(out), *flags(own)]


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test."""
    monkeypatch.setenv("FLATSHIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "meshes"


def test_a_router_draws_from_the_seed_of_the_run(tmp_path: Path) -> None:
    """Stopped and resumed it ends with the same bits; on a mesh it has the losses of one process."""
    backbone = write_backbone("phimoe", tmp_path / "phimoe")
    whole, parts, mesh = (tmp_path / name for name in ("whole", "parts", "mesh"))
    assert run(words(backbone, whole)) == 0
    assert run(words(backbone, parts, **{"train.steps": 2})) == 0
    assert run(["train", "--resume", str(parts), "--train.steps", "4"]) == 0
    files = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (whole, parts)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    warm_commands.flatshift(*words(backbone, mesh, **{"mesh.dp": 2}))
    assert losses(mesh) == pytest.approx(losses(whole), abs=1e-5)


@pytest.mark.parametrize("kind", ["opt", pytest.param("marian", marks=pytest.mark.slow)])
def test_data_ranks_train_as_one_process(kind: str, tmp_path: Path) -> None:
    """Rows end to end have their own masks; positions that no file has are computed."""
    backbone, wet = write_backbone(kind, tmp_path / kind), {"adapter.dropout": 0.1}
    assert run(words(backbone, tmp_path / "one", **wet)) == 0
    warm_commands.flatshift(*words(backbone, tmp_path / "mesh", **{"mesh.dp": 2}, **wet))
    assert losses(tmp_path / "mesh") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_a_difference_is_one_sentence_before_anything_is_written(tmp_path: Path, cache: Path) -> None:
    backbone, out = write_backbone("switch_transformers", tmp_path / "switch"), tmp_path / "out"
    refused = words(backbone, out, **{"mesh.dp": 2})
    error = warm_commands.flatshift(*refused, code=2).stderr.strip().splitlines()[-1]
    assert "switch_transformers on dp 2 does not compute what one process does" in error
    assert "loss" in error and "set adapter.dropout: 0 and train.backbone_dropout: 0" in error
    assert not out.exists()
    (file,) = cache.iterdir()
    advised = {"adapter.dropout": 0, "train.backbone_dropout": 0}
    warm_commands.flatshift(*words(backbone, out, **{"mesh.dp": 2}, **advised))
    assert run(words(backbone, tmp_path / "one", **advised)) == 0
    assert losses(out) == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    file.write_text(json.dumps({"problem": "is no good"}), encoding="utf-8")
    refused = words(backbone, tmp_path / "again", **{"mesh.dp": 2})
    assert warm_commands.flatshift(*refused, code=2).stderr.strip().endswith("switch_transformers on dp 2 is no good")


def draw_configurations(count: int) -> list[tuple[str, str]]:
    """Model types of transformers' registry that it can build by their default configuration, each with an axis."""
    from accelerate import init_empty_weights

    draw = random.Random(20261126)
    causal, seq2seq = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    kinds, drawn = sorted({*causal, *seq2seq}), list[tuple[str, str]]()
    while len(drawn) < count:
        kind, axis = draw.choice(kinds), draw.choice(sorted(AXES))
        auto = transformers.AutoModelForCausalLM if kind in causal else transformers.AutoModelForSeq2SeqLM
        try:
            with init_empty_weights(include_buffers=False), quiet_transformers():
                auto.from_config(CONFIG_MAPPING[kind]())
        except Exception:  # a default that is none, a package that is missing
            continue
        if kind not in dict(drawn):
            drawn.append((kind, axis))
    return drawn


REFUSALS = (
    "adapter.targets",
    "cannot be split",
    "cannot be cut",
    "small copy",
    "mesh.tp",
    "mesh.cp",
    "mesh.pp",
    "mesh: ",
)


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))])
def test_a_configuration_drawn_at_random_trains_as_in_one_process_or_is_refused(tmp_path: Path, number: int) -> None:
    kind, axis = draw_configurations(number + 1)[number]
    backbone = write_backbone(kind, tmp_path / kind)
    mesh = {f"mesh.{name}": value for name, value in vars(AXES[axis]).items() if value != getattr(Mesh(), name)}
    done = warm_commands.flatshift(*words(backbone, tmp_path / "mesh", **mesh), code=None)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    print(kind, axis, done.returncode, *errors)
    if done.returncode == 0:
        assert run(words(backbone, tmp_path / "one")) == 0
        assert losses(tmp_path / "mesh") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
        return
    assert done.returncode == 2 and len(errors) == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "mesh").exists()
    if (
        run(words(backbone, tmp_path / "one")) == 0
    ):  # what one process trains is refused by a figure, or for want of a plan
        assert any(reason in errors[0] for reason in REFUSALS), errors
        assert axis not in ("dp", "replicate") or "small copy" in errors[0], errors
