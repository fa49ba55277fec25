"""What a rank holds, what loading and an update take on top, and a backbone that only a mesh can hold."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks._limited import RANKS, SHARE, SHIPPED, backbone, train
from benchmarks._limited import SIZES as LIMITED
from benchmarks._sized import Sizes, Updates, save_backbone
from benchmarks.sharding_memory import LOAD_MORE, LOAD_SHARE, TINY, checkpointer_of
from flatshift.finetune.config import Mesh, Optimizer
from flatshift.finetune.errors import is_out_of_memory
from flatshift.finetune.models.anatomy import transformer_blocks
from flatshift.finetune.models.backbone import loading_error
from flatshift.finetune.parallel import layout
from flatshift.finetune.planner import memory
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train import checkpointer
from tests.support.distributed_ranks import run_ranks

# Large enough that a second copy of the weights would break the bounds: 100 MiB.
SIZES = Sizes(hidden=512, inner=1536, blocks=6, vocabulary=4096, rows=2, tokens=16)


@pytest.mark.slow
def test_a_rank_holds_and_needs_its_share_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(128 << 10))  # else glibc hides what was freed
    tiny, big = str(tmp_path / "tiny"), str(tmp_path / "big")
    save_backbone(TINY, tiny)
    save_backbone(SIZES, big)
    runs = run_ranks("benchmarks.sharding_memory:ours", 4, tiny, big, {"dp": 4}, "fp32", asdict(SIZES), anew=True)
    for run in runs:
        assert run["held"] == SIZES.whole_bytes / 4
        assert run["load"] <= LOAD_SHARE * run["held"] + LOAD_MORE < SIZES.whole_bytes
        activations = 32 << 20  # of 32 tokens, generously
        assert run["transient"] <= 3 * run["unit"] + activations < SIZES.whole_bytes


def test_a_rank_saves_and_reads_its_parts_of_a_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(128 << 10))
    save_backbone(SIZES, big := str(tmp_path / "big"))
    arguments = (big, {"dp": 2}, 64, str(tmp_path / "state"), asdict(SIZES))
    for run in run_ranks("benchmarks.sharding_memory:saving", 2, *arguments, anew=True):
        # the largest tensor has 384 KiB; 90 MiB when all were gathered
        assert run["own"] == run["states"] / 2 > 20 << 20
        assert run["saving"] < 6 << 20 and run["restoring"] < 6 << 20, run


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"replicate": 2, "pp": 2}], ids=["dp-tp", "replicate-pp"])
def test_parts_of_owners_are_each_tensor_once(mesh: dict[str, int], tmp_path: Path) -> None:
    save_backbone(TINY, big := str(tmp_path / "big"))
    ranks = run_ranks(saved_and_gathered, 4, big, mesh, str(tmp_path / "state"))
    assert all(rank["equal"] for rank in ranks)
    assert ranks[0]["parts"] == ranks[0]["bytes"] > 0
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["step-1"]


def saved_and_gathered(backbone: str, mesh: dict[str, int], folder: str) -> dict[str, Any]:
    """Whether the saved tensors are the gathered ones; bytes of the tensors in the parts' files, and in the joined."""
    updates = Updates(backbone, mesh, vocabulary=TINY.vocabulary, rows=2, tokens=TINY.tokens)
    updates(0)
    saver = checkpointer_of(updates, folder)
    counted: list[int] = []

    def join(files: Iterable[Path], target: Path) -> None:
        files = list(files)
        counted.extend(sum(t.nbytes for t in load_file(file).values()) for file in files)
        layout.join_parts(files, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "join_parts", join)
        saver.save()
    saved = load_file(Path(folder) / "step-1" / "state.safetensors")
    groups = {"adapter": updates.engine.parameters, **updates.optimizer.moments()}
    wanted = checkpointer.flatten_groups(**{kind: updates.engine.full_tensors(each) for kind, each in groups.items()})
    equal = all(torch.equal(saved[name], tensor) for name, tensor in wanted.items())
    others = {name.partition("/")[0] for name in saved.keys() - wanted.keys()}
    return {
        "equal": equal and others == {"step"},
        "parts": sum(counted),
        "bytes": sum(t.nbytes for t in saved.values()),
    }


def test_gathered_bytes_are_those_of_the_mesh(tmp_path: Path) -> None:
    save_backbone(TINY, big := str(tmp_path / "big"))
    (found, _) = run_ranks(planned_gathers, 2, big)
    blocks, adapters, whole = found["blocks"], found["adapters"], found["whole"]
    assert found["planned"] == {"dp": 2 * blocks, "kept": whole + blocks, "zero 1": 2 * adapters}


def planned_gathers(backbone: str) -> dict[str, Any]:
    """The plan's gathered bytes on three meshes; bytes of the largest block, of its adapters and of the model."""
    planned, sizes = {}, {}
    for name, mesh in {"dp": {}, "kept": {"reshard": False}, "zero 1": {"zero": 1}}.items():
        updates = Updates(backbone, {"dp": 2, **mesh}, vocabulary=TINY.vocabulary, rows=1, tokens=TINY.tokens)
        engine, counted = updates.engine, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "_format_plan", lambda *args, to=counted: to.extend(args[2]) or [])
            memory.mesh_plan_lines(engine, mesh=Mesh(dp=2, **mesh), train=updates.train, optimizer=Optimizer())
        planned[name] = next(count for cause, count, _ in counted if cause == "gathered")
        parts = [{n: p.numel() * p.itemsize for n, p in b.named_parameters()} for b in transformer_blocks(engine.model)]
        sizes["blocks"] = max(sum(part.values()) for part in parts)
        sizes["adapters"] = max(sum(size for n, size in part.items() if "lora_" in n) for part in parts)
        sizes["whole"] = engine.sharding.whole_bytes
    return {"planned": planned, **sizes}


def test_a_file_that_memory_cannot_map_is_no_broken_backbone() -> None:
    error = RuntimeError("unable to mmap 62932312 bytes from file <model.safetensors>: Cannot allocate memory (12)")
    with pytest.raises(RuntimeError, match="unable to mmap"):
        loading_error(error, LanguageModel(), "backbone 'x'")
    assert is_out_of_memory(error) and is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOENT, "No such file"))


@pytest.mark.slow
def test_four_ranks_train_what_one_process_cannot_hold(tmp_path: Path) -> None:
    sizes = LIMITED
    model = backbone(tmp_path / "backbone", sizes)
    base = train(tmp_path / "base", model=SHIPPED, mesh={})
    assert base.code == 0, base.errors
    limit = base.data + int(SHARE * sizes.whole_bytes)

    one = train(tmp_path / "one", model=model, mesh={}, limit=limit)
    said = [line for line in one.errors.splitlines() if line.startswith("flatshift: ")]
    assert one.code == 3 and len(said) == 1 and "ran out of memory" in said[0] and "--mesh.dp" in said[0], one.errors

    four = train(tmp_path / "four", model=model, mesh={"dp": RANKS}, limit=limit)
    assert four.code == 0, four.errors
    assert (tmp_path / "four" / "adapter" / "adapter_model.safetensors").is_file()
