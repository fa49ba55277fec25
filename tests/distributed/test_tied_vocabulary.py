"""A matrix that embedding and head share is split by tokens over data ranks, never gathered, and trains as in one
process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._sized import Sizes, Updates, micro_batch, random_llama, save_backbone
from benchmarks.sharding_memory import TINY
from flatshift.finetune.compute.loss import batch_loss
from flatshift.finetune.compute.numerics import evaluation_mode
from flatshift.finetune.parallel.tensor import vocabulary
from tests.support.distributed_ranks import run_ranks

VOCABULARY, TOKENS = 1021, 16  # a prime: the last rank has fewer tokens
SHARE = 0.5 + 0.15  # of one process
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 16, "final_logit_softcapping": 5.0},  # a scaled embedding, logits with a soft cap
}


def save(folder: Path, kind: str) -> str:
    shape = {"vocabulary": VOCABULARY, "hidden": 32, "inner": 48, "blocks": 2, "heads": 2}
    random_llama(**shape, kind=kind, tie_word_embeddings=True, **KINDS[kind]).save_pretrained(folder)
    return str(folder)


def course(folder: str, mesh: dict[str, int], rows: int) -> dict[str, Any]:
    """Losses of updates, the gradients of the first, and logits of rows of another length on each rank."""
    vocabulary._GATHERED = 5 * 511  # five rows at once
    updates = Updates(folder, mesh, vocabulary=VOCABULARY, rows=rows, tokens=TOKENS)
    engine = updates.engine
    updates.find_head()
    assert updates.head is not None
    losses, gradients = [], {}
    for step in range(3):
        ids = torch.randint(3, VOCABULARY, (4, TOKENS), generator=torch.Generator().manual_seed(step))
        own, data_ranks = engine.share
        micros = [micro_batch(ids.chunk(data_ranks)[own])]
        for head in (None, updates.head):  # the whole logits, then the loss by slices
            loss = engine.forward_backward(
                micros, 4 * (TOKENS - 1), task=updates.task, head=head, context=lambda _: torch.enable_grad()
            )
            losses.append(float(loss))
            if step == 0:
                found = engine.full_tensors({name: p.grad for name, p in engine.parameters.items()})
                gradients |= {(head is None, name): grad.clone() for name, grad in found.items()}
            if head is None:
                updates.optimizer.zero_grad()
        updates.optimizer.step(1e-3)
    index = engine.stream[0]
    row = micro_batch(torch.arange(3, 9 + 4 * index)[None])
    with evaluation_mode(engine.model), torch.no_grad():
        logits = engine.eval_model(**row.inputs).logits
        assert logits.shape[-1] == VOCABULARY
        judged = float(batch_loss(engine.model, row, task=updates.task, head=updates.head))
    engine.reshard()
    matrix = engine.model.get_base_model().get_input_embeddings().weight
    return {"losses": losses, "gradients": gradients, "logits": logits, "judged": judged, "held": len(matrix)}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_a_shared_matrix_by_tokens_equals_one_process(tmp_path: Path, kind: str, axis: str) -> None:
    folder = save(tmp_path, kind)
    alone = course(folder, {}, 4)
    ranks = run_ranks(course, 2, folder, {axis: 2}, 2)
    assert [found["held"] for found in ranks] == [511, 510] and alone["held"] == VOCABULARY
    for rank, found in enumerate(ranks):
        assert found["losses"] == pytest.approx(alone["losses"], abs=2e-6), rank
        assert found["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in alone["gradients"].items():
            assert (found["gradients"][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
    assert torch.allclose(ranks[0]["logits"], alone["logits"], atol=1e-3)
    assert ranks[1]["logits"].shape[1] == alone["logits"].shape[1] + 4


@pytest.mark.slow
def test_a_rank_never_needs_more_than_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is mostly its shared matrix (96 of 101 MiB), two ranks hold and need half each."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(128 << 10))  # else glibc hides what was freed
    tiny, big = str(tmp_path / "tiny"), str(tmp_path / "big")
    sizes = Sizes(hidden=256, inner=512, blocks=2, vocabulary=98_304, rows=2, tokens=32)
    save_backbone(TINY, tiny)
    shape = {"hidden": sizes.hidden, "inner": sizes.inner, "blocks": sizes.blocks, "vocabulary": sizes.vocabulary}
    random_llama(**shape, heads=4, tie_word_embeddings=True).save_pretrained(big)
    (one,) = run_ranks("benchmarks.sharding_memory:ours", 1, tiny, big, {}, "fp32", asdict(sizes), anew=True)
    own = asdict(sizes) | {"rows": 1}
    most = SHARE * (one["resident"] + one["transient"])
    for rank in run_ranks("benchmarks.sharding_memory:ours", 2, tiny, big, {"dp": 2}, "fp32", own, anew=True):
        assert rank["load"] <= SHARE * one["resident"]
        assert rank["resident"] + rank["transient"] <= most, (rank, one)
