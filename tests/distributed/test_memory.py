"""What a rank holds, what loading and an update take on top, and a backbone that only a mesh can hold."""

from __future__ import annotations

import errno
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks._limited import RANKS, SHARE, SHIPPED, backbone, train
from benchmarks._limited import SIZES as LIMITED
from benchmarks._sized import Sizes, save_backbone
from benchmarks.sharding_memory import LOAD_MORE, LOAD_SHARE, TINY
from flatshift.finetune.errors import is_out_of_memory
from flatshift.finetune.models.backbone import loading_error
from flatshift.finetune.tasks import LanguageModel
from tests.support.distributed_ranks import run_ranks

# Large enough that a second copy of the weights would break the bounds: 100 MiB.
SIZES = Sizes(hidden=512, inner=1536, blocks=6, vocabulary=4096, rows=2, tokens=16)


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
