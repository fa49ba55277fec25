"""How documents are judged on a CPU: by blocks of queries, beside the definition of attention in float64 and beside
`sdpa` in a whole model, and few enough at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flatshift.finetune.compute import attention
from flatshift.finetune.compute.attention import BLOCK, blocked_causal_attention, use_blocked_attention
from flatshift.finetune.compute.numerics import has_bf16_matmul
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import Example
from flatshift.finetune.evaluate.perplexity import document_nats
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import LanguageModel
from tests.support.finetune_models import save_backbone


def by_definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    query, key, value = (t.double() for t in (query, key, value))
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = scale * query @ key.transpose(-1, -2)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blocks_compute_attention_by_its_definition(tokens: int, kv_heads: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    query = torch.randn(2, 4, tokens, 8, generator=draw)
    key = torch.randn(2, kv_heads, tokens, 8, generator=draw)
    value = torch.randn(2, kv_heads, tokens, 6, generator=draw)  # narrower than keys, as some families have them
    wanted = by_definition(query, key, value, 0.3)
    assert (blocked_causal_attention(query, key, value, scale=0.3) - wanted).abs().max() < 2e-6
    rounded = blocked_causal_attention(*(t.bfloat16() for t in (query, key, value)), scale=0.3)
    assert rounded.dtype is torch.bfloat16 and (rounded - wanted).abs().max() < 3e-2


@pytest.mark.skipif(not has_bf16_matmul(), reason="attention goes by blocks where oneDNN multiplies bf16")
def test_documents_are_judged_by_blocks_and_others_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_backbone("llama", tmp_path / "llama")
    model = load_backbone(str(tmp_path / "llama"), task=LanguageModel(), precision="bf16").eval()
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 60, n).tolist() for n in (70, 41, 33, 5)]
    examples = [Example(ids, [-100, *ids[1:]], str(i), "") for i, ids in enumerate(rows)]
    calls: list[int] = []

    def counted(*of: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(of[0].shape[2])
        return blocked_causal_attention(*of, scale=scale)

    monkeypatch.setattr(attention, "blocked_causal_attention", counted)
    task, narrow = LanguageModel(), EvalBatching(2, 0, autocast_dtype=torch.bfloat16)
    plain, tokens = document_nats(model, examples, EvalBatching(2, 0), task=task, masked=False)
    assert not calls, "float32 keeps torch's own kernel"
    ours, again = document_nats(model, examples, narrow, task=task, masked=False)
    assert {70, 33} <= set(calls) and model.config._attn_implementation == "sdpa"
    assert tokens.tolist() == again.tolist() == [69, 40, 32, 4]
    assert np.abs(ours / plain - 1).max() < 2e-3
    calls.clear()
    document_nats(model, examples, narrow, task=task, masked=True)
    assert not {70, 33} & set(calls), "a mask is for sdpa; the look for the head has none"
    with use_blocked_attention(model, "cpu", torch.float32):
        assert model.config._attn_implementation == "sdpa"


def test_no_more_tokens_are_judged_at_once_than_suit_a_cpu(tmp_path: Path) -> None:
    save_backbone("llama", tmp_path / "llama", max_position_embeddings=1024)
    model = load_backbone(str(tmp_path / "llama"), task=LanguageModel()).eval()
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 60, 100 + 10 * (i % 5)).tolist() for i in range(50)]
    examples = [Example(ids, [-100, *ids[1:]], str(i), "") for i, ids in enumerate(rows)]
    seen: list[torch.Size] = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].shape), with_kwargs=True)
    how = {"task": LanguageModel(), "masked": False}
    nats, _ = document_nats(model, examples, EvalBatching(50, 0), **how)
    assert max(rows * tokens for rows, tokens in seen) <= 2048 and len(seen) <= 7
    alone, _ = document_nats(model, examples, EvalBatching(1, 0), **how)
    np.testing.assert_allclose(nats, alone, rtol=1e-5)
