"""What of the pipeline needs no processes: plans, splits, pieces, the cut of a model on meta, refusals."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flatshift.finetune.errors import UserError
from flatshift.finetune.models.checkpoint import canonical_name
from flatshift.finetune.parallel.pipeline import (
    bubble_fraction,
    check_pipeline,
    cut_to_stage,
    schedule_descriptions,
    split_blocks,
    stage_costs,
    tied_source_names,
)
from flatshift.finetune.parallel.pipeline.cut import BlockCosts
from flatshift.finetune.parallel.pipeline.runner import split_micro_batches
from flatshift.finetune.parallel.pipeline_plan import (
    pieces_per_micro,
    rank_of,
    round_up_pieces,
    stages_of,
    virtual_stages,
)
from flatshift.finetune.tasks import Classify


@dataclass(frozen=True)
class Micro:
    inputs: dict[str, Tensor]
    labels: Tensor


def llama(blocks: int = 4, *, vocabulary: int = 64, targets: Any = ("q_proj",), **more: Any) -> Any:
    """A PEFT model on meta."""
    import transformers as tf
    from peft import LoraConfig, get_peft_model

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": blocks, "num_attention_heads": 4}
    config = tf.LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **sizes)
    with torch.device("meta"):
        return get_peft_model(tf.LlamaForCausalLM(config), LoraConfig(r=4, target_modules=list(targets), **more))


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.parametrize("schedule", list(schedule_descriptions()))
def test_every_stage_has_one_rank(schedule: str) -> None:
    pp, virtual = 4, virtual_stages(schedule, None)
    owned = [stages_of(rank, pp=pp, virtual=virtual, schedule=schedule) for rank in range(pp)]
    assert sorted(stage for stages in owned for stage in stages) == list(range(pp * virtual))
    assert all(rank_of(stage, pp=pp, schedule=schedule) == rank for rank in range(pp) for stage in owned[rank])


@pytest.mark.parametrize(
    ("schedule", "virtual", "match"),
    [("1f1b", 2, "interleaved"), ("zbv", 3, "set 2"), ("pipedream", None, "none of gpipe")],
)
def test_virtual_stages_that_do_not_go_with_a_schedule(schedule: str, virtual: int | None, match: str) -> None:
    with pytest.raises(UserError, match=match):
        virtual_stages(schedule, virtual)


def test_number_of_pieces() -> None:
    assert round_up_pieces(2, pp=4, schedule="1f1b") == 4
    assert round_up_pieces(7, pp=2, schedule="interleaved") == 8  # three rounds do not divide seven
    assert round_up_pieces(7, pp=2, schedule="zbv") == 7
    how: dict[str, Any] = {"pp": 2, "virtual": 1, "schedule": "1f1b"}
    assert pieces_per_micro(8, 1, **how) == 8
    assert pieces_per_micro(9, 1, **how) == 3  # eight pieces would hold seven rows of padding
    assert pieces_per_micro(8, 1, requested=4, **how) == 4
    with pytest.raises(UserError, match=r"mesh\.microbatches: 8 rows .* 16 pieces"):
        pieces_per_micro(8, 1, requested=16, **how)


@pytest.mark.parametrize(
    ("schedule", "name", "virtual"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 4),
        ("zero-bubble", "ScheduleInterleavedZeroBubble", 2),
        ("zbv", "ScheduleZBVZeroBubble", 2),
    ],
)
def test_bubble_is_that_of_the_order_which_torch_runs(schedule: str, name: str, virtual: int) -> None:
    """Simulated with forward and backward passes of one unit and weight gradients of none."""
    from torch.distributed import pipelining

    pp, pieces = 4, 16
    total = pp * virtual
    held = stages_of(0, pp=pp, virtual=virtual, schedule=schedule)
    stages: Any = [
        types.SimpleNamespace(
            group_size=pp, group_rank=0, num_stages=total, is_first=i == 0, is_last=i == total - 1, submod=None
        )
        for i in held
    ]
    orders = getattr(pipelining, name)(stages, pieces, loss_fn=lambda out, target: out).pipeline_order
    queues = {rank: [action for action in order if action is not None] for rank, order in orders.items()}
    assert simulated_idle(queues, total) == pytest.approx(bubble_fraction(pp, virtual, pieces, schedule))


def simulated_idle(queues: dict[int, list[Any]], total: int) -> float:
    """Idle ÷ busy time of a rank that runs torch's actions in order, waiting for what each needs."""
    done: dict[tuple[str, int, int], float] = {}
    clock, busy = dict.fromkeys(queues, 0.0), dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        left = sum(map(len, queues.values()))
        for rank, queue in queues.items():
            while queue:
                stage, piece, kind = queue[0].stage_index, queue[0].microbatch_index, queue[0].computation_type.value
                if kind == "F":
                    before = [("F", stage - 1, piece)] if stage else []
                else:
                    before = [("B", stage + 1, piece)] if stage < total - 1 else [("F", stage, piece)]
                if kind != "W":
                    if any(event not in done for event in before):
                        break
                    clock[rank] = max([clock[rank], *(done[event] for event in before)]) + 1
                    busy[rank] += 1
                    done["F" if kind == "F" else "B", stage, piece] = clock[rank]
                queue.pop(0)
        assert sum(map(len, queues.values())) < left, "the order waits for itself"
    return max(clock.values()) / busy[0] - 1


# ------------------------------------------------------------------------------------------------ splits and the cut


def test_split_is_even_and_gives_the_stage_of_a_big_head_fewer_blocks() -> None:
    assert split_blocks(BlockCosts((1.0,) * 8, 0.0), 4) == (range(0, 2), range(2, 4), range(4, 6), range(6, 8))
    assert [len(run) for run in split_blocks(BlockCosts((1.0,) * 9, 3.0), 3)] == [4, 4, 1]
    assert [len(run) for run in split_blocks(BlockCosts((1.0,) * 9, 0.0), 4)] == [2, 2, 2, 3]
    with pytest.raises(UserError, match=r"mesh\.pp, mesh\.virtual: 9 stages .* 8 blocks"):
        split_blocks(BlockCosts((1.0,) * 8, 0.0), 9)


def test_planned_cost_counts_frozen_and_trained_matrices() -> None:
    costs = stage_costs(llama(2))
    frozen = 4 * 32 * 32 + 3 * 32 * 48
    assert costs.blocks == (4.0 * frozen + 6.0 * 2 * 4 * 32,) * 2
    assert costs.last == 4.0 * 64 * 32
    assert stage_costs(llama(2), tokens=100).blocks[0] == costs.blocks[0] + 6.0 * 100 * 32


def test_stages_of_a_model_on_meta_partition_its_parameters() -> None:
    whole = {canonical_name(name) for name, _ in llama().named_parameters(remove_duplicate=False)}
    seen: list[str] = []
    for run in (range(0, 1), range(1, 3), range(3, 4)):
        stage = llama()
        cut_to_stage(stage, run)
        seen += [canonical_name(name) for name, _ in stage.named_parameters(remove_duplicate=False)]
        assert all(parameter.is_meta for parameter in stage.parameters())
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if run.stop == 4 else {}
        assert tied_source_names(stage) == tied
    assert sorted(seen) == sorted(whole)


def test_refusals_come_before_any_weight() -> None:
    check_pipeline(llama(), pp=2, virtual=2, schedule="interleaved")
    with pytest.raises(UserError, match=r"mesh\.pp, mesh\.virtual: 8 stages .* 4 blocks"):
        check_pipeline(llama(), pp=4, virtual=2, schedule="interleaved")
    with pytest.raises(UserError, match=r"embed_tokens.* is trained, but its matrix is shared"):
        check_pipeline(llama(targets=("q_proj", "embed_tokens")), pp=2, virtual=None, schedule="1f1b")
    with pytest.raises(UserError, match=r"lm_head.* is trained, but its matrix is shared"):
        check_pipeline(llama(modules_to_save=["lm_head"]), pp=2, virtual=None, schedule="1f1b")


def test_a_family_without_blocks_to_cut_is_refused() -> None:
    import transformers as tf

    config = tf.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    with torch.device("meta"):
        model = tf.ViTForImageClassification(config)
    with pytest.raises(UserError, match=r"mesh\.pp: vit models cannot be cut .* no blocks of it; use mesh\.dp"):
        check_pipeline(model, pp=2, virtual=None, schedule="1f1b")


# ------------------------------------------------------------------------------------------------ pieces


def test_pieces_have_one_shape_and_lose_no_label() -> None:
    ids = [torch.randint(3, 9, (4, 7)), torch.randint(3, 9, (3, 5))]
    micros = [Micro({"input_ids": x, "attention_mask": torch.ones_like(x)}, x.clone()) for x in ids]
    pieces = split_micro_batches(micros, per_micro=2, total=6, pad_id=0)
    assert [tuple(piece.inputs["input_ids"].shape) for piece in pieces] == [(2, 7)] * 6
    supervised = torch.cat([piece.labels[piece.labels != -100] for piece in pieces])
    assert supervised.tolist() == torch.cat([x.flatten() for x in ids]).tolist()
    assert pieces[2].inputs["attention_mask"].tolist() == [[1] * 5 + [0] * 2] * 2
    # a row of padding is a copy that nobody supervises, so that no attention is empty
    assert pieces[3].inputs["input_ids"][1].tolist() == pieces[3].inputs["input_ids"][0].tolist()
    assert (pieces[3].labels[1] == -100).all() and (pieces[5].labels == -100).all()


def test_padding_of_packed_rows_is_a_sample_of_its_own() -> None:
    wide = Micro(
        {"input_ids": torch.ones(1, 6).long(), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
        torch.ones(1, 6).long(),
    )
    narrow = Micro(
        {"input_ids": torch.ones(1, 4).long(), "position_ids": torch.tensor([[0, 1, 0, 1]])}, torch.ones(1, 4).long()
    )
    piece = split_micro_batches([wide, narrow], per_micro=1, total=2, pad_id=0)[1]
    assert piece.inputs["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1]]
    assert "attention_mask" not in piece.inputs
    assert piece.labels.tolist() == [[1, 1, 1, 1, -100, -100]]


def test_classes_are_cut_by_rows() -> None:
    ids = torch.randint(3, 9, (3, 4))
    pieces = split_micro_batches([Micro({"input_ids": ids}, torch.tensor([2, 0, 1]))], per_micro=2, total=2, pad_id=0)
    assert [piece.labels.tolist() for piece in pieces] == [[2, 0], [1, -100]]
    logits = torch.randn(2, 3)
    for task in (Classify(), Classify(loss="squared")):
        losses = task.example_losses(logits, pieces[1].labels)
        assert losses[0] == task.example_losses(logits[:1], torch.tensor([1])) and losses[1] == 0
