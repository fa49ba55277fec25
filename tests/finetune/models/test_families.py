"""Families: the table, and what is read of transformers' own plans."""

import json

import pytest

from benchmarks._harness import RESULTS
from flatshift.finetune.models.families import (
    FAMILIES,
    TRIED,
    BlockStack,
    TensorParallelRegion,
    TensorPlan,
    block_stacks,
    find_family,
    tensor_plan,
)
from tests.support.tensor_models import KINDS


def test_every_family_of_the_table_has_a_tiny_model_for_the_mesh_tests() -> None:
    missing = FAMILIES.keys() - {kind.split("-")[0] for kind in KINDS}
    assert not missing, f"add {missing} to KINDS in tests/support/tensor_models.py"


ATTENTION = TensorParallelRegion(
    "self_attn", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj", heads=True
)
GATED = TensorParallelRegion("mlp", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
LLAMA = TensorPlan("layers.*", (ATTENTION, GATED), ("embed_tokens",), "norm")
NEOX = TensorPlan(
    "layers.*",
    (
        TensorParallelRegion("attention", ("attention.query_key_value",), "attention.dense", heads=True),
        TensorParallelRegion("mlp", ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"),
    ),
    ("embed_in",),
    "final_layer_norm",
)


@pytest.mark.parametrize(
    ("kind", "plan", "stack"),
    [
        *((kind, LLAMA, BlockStack("layers", ("embed_tokens",), ("norm",)))
          for kind in ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text")),
        ("gpt_neox", NEOX, BlockStack("layers", ("embed_in", "emb_dropout"), ("final_layer_norm",))),
    ],
)  # fmt: skip
def test_what_is_derived_is_what_was_written_by_hand(kind: str, plan: TensorPlan, stack: BlockStack) -> None:
    assert kind not in FAMILIES
    assert tensor_plan(kind) == plan
    assert block_stacks(kind) == (stack,)
    assert find_family(kind).context


def test_a_region_that_is_gathered_inside() -> None:
    attention, feed_forward = tensor_plan("glm4").regions
    assert not attention.gathered
    assert feed_forward == TensorParallelRegion("mlp", ("mlp.gate_up_proj",), "mlp.down_proj", gathered=True)
    assert [region.gathered for region in tensor_plan("olmo2").regions] == [True, False]


def test_stages_of_a_mixture_of_experts() -> None:
    assert block_stacks("mixtral") == (BlockStack("layers", ("embed_tokens",), ("norm",)),)
    assert find_family("mixtral").context
    assert not find_family("jamba").context and not find_family("jamba").stacks


def test_what_is_divided_has_been_trained() -> None:
    """Each family of the set or the table has a cell on an axis, and no cell with a figure misses its bar."""
    rows = json.loads((RESULTS / "mesh_families.json").read_text(encoding="utf-8"))["rows"]
    assert all(row["holds"] for row in rows)
    cells = [pair for row in rows for pair in row.get("cells", {}).items()]
    trained = {model.partition(",")[0] for model, figure in cells if isinstance(figure, float)}
    assert trained == (TRIED | FAMILIES.keys()) - {"vit"}


def test_a_name_that_transformers_does_not_know() -> None:
    family = find_family("no-such-model")
    assert family.tensor is None and not family.stacks and not family.context
