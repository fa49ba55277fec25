"""The pieces of a stack: products, passes, losses, refusals, and which cells go together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.results.cells import read_result
from flatshift.experiments.studies import stack as stacking
from flatshift.experiments.studies.cell import Result, cell_of, finish_cell
from flatshift.experiments.studies.stack import stackable, stacks
from flatshift.finetune.compute.loss import linear_cross_entropies, linear_cross_entropy
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.data.encoding import IGNORE
from flatshift.finetune.data.micro_batch import MicroBatch
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.stacked import passes
from flatshift.finetune.stacked.host import Host
from flatshift.finetune.stacked.limits import NotStackable, estimate, refusal
from flatshift.finetune.stacked.linear import Group, HeadPart, Noise, Part, Run, StackedLinear, StackedLora
from flatshift.finetune.stacked.together import cell_engine, shared_copy
from flatshift.finetune.tasks import Classify, LanguageModel, Seq2Seq
from flatshift.finetune.train.optimizer import AdapterOptimizer
from flatshift.regularizers import BAR, GGPO, SAM, BiLora, NEFTune, Plain
from tests.finetune_models import save_backbone

CELLS, TOKENS, IN, OUT, RANK = 3, 5, 7, 6, 2


def engines_of(shapes, seed=0):
    """Stand-ins with `parameters`, drawn in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        SimpleNamespace(
            parameters={
                name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
                for name, shape in shapes.items()
            }
        )
        for _ in range(CELLS)
    ]


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("noisy", [False, True])
def test_stacked_lora_is_each_cells_own_dense_weight(noisy):
    engines = engines_of({"l.lora_A.weight": (RANK, IN), "l.lora_B.weight": (OUT, RANK)})
    a0, b0 = ([e.parameters[f"l.lora_{s}.weight"].detach().clone() for e in engines] for s in "AB")
    group = Group(engines)
    x = random(CELLS * 2, TOKENS, IN, seed=1).requires_grad_()
    weight, bias = random(OUT, IN, seed=2), random(OUT, seed=3)
    noise, dense = None, [torch.zeros(OUT, IN, dtype=torch.float64)] * CELLS
    if noisy:
        into, out, probe = (random(CELLS, w, k, seed=4 + k) for w, k in ((IN, 4), (OUT, 4), (IN, 3)))
        leaves = tuple(torch.zeros(OUT, 3, dtype=torch.float64) for _ in range(CELLS))
        noise, dense = Noise(into, out, probe, leaves), list(out @ into.mT)
    run = Run(group, slice(0, CELLS), slice(0, 2 * CELLS), adds=False)
    anchor = torch.zeros((), requires_grad=True)
    part = Part(run, "l.lora_A.weight", "l.lora_B.weight", 1.5, noise)
    y = StackedLora.apply(anchor, x, weight, bias, [part], 2 * CELLS)
    upstream = random(*y.shape, seed=9)
    (y * upstream).sum().backward()
    for c in range(CELLS):
        rows = slice(2 * c, 2 * c + 2)
        mine, a, b = x[rows].detach().requires_grad_(), a0[c].requires_grad_(), b0[c].requires_grad_()
        merged = (weight + 1.5 * b @ a + dense[c]).requires_grad_()
        merged.retain_grad()
        expected = F.linear(mine, merged, bias)
        (expected * upstream[rows]).sum().backward()
        torch.testing.assert_close(y[rows], expected)
        torch.testing.assert_close(x.grad[rows], mine.grad)
        torch.testing.assert_close(group.gradients["l.lora_A.weight"][c], a.grad)
        torch.testing.assert_close(group.gradients["l.lora_B.weight"][c], b.grad)
        if noise is not None:
            torch.testing.assert_close(noise.leaves[c].grad, merged.grad @ noise.probe[c])


def test_a_second_micro_batch_adds_and_an_input_without_gradient_is_fine():
    engines = engines_of({"l.lora_A.weight": (RANK, IN), "l.lora_B.weight": (OUT, RANK)})
    group = Group(engines)
    for gradient in group.gradients.values():
        gradient.fill_(math.nan)  # what the first one finds must not matter
    weight, anchor = random(OUT, IN, seed=2), torch.zeros((), requires_grad=True)
    total = {name: torch.zeros_like(value) for name, value in group.values.items()}
    for turn in range(2):
        run = Run(group, slice(1, 3), slice(0, 2), adds=turn > 0)
        x = random(2, TOKENS, IN, seed=20 + turn)
        part = Part(run, "l.lora_A.weight", "l.lora_B.weight", 0.5)
        StackedLora.apply(anchor, x, weight, None, [part], 2).square().sum().backward()
        assert run.written == {"l.lora_A.weight", "l.lora_B.weight"}
        for c in (1, 2):
            a, b = (engines[c].parameters[f"l.lora_{s}.weight"].detach().clone().requires_grad_() for s in "AB")
            F.linear(x[c - 1], weight + 0.5 * b @ a).square().sum().backward()
            total["l.lora_A.weight"][c] += a.grad
            total["l.lora_B.weight"][c] += b.grad
    for name, expected in total.items():
        torch.testing.assert_close(group.gradients[name][1:], expected[1:])
        assert group.gradients[name][0].isnan().all(), "a cell that takes no part is not written"


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_stacked_head_is_each_cells_own(with_bias):
    engines = engines_of({"score.weight": (OUT, IN)} | ({"score.bias": (OUT,)} if with_bias else {}))
    group = Group(engines)
    run = Run(group, slice(0, CELLS), slice(0, CELLS), adds=False)
    x = random(CELLS, IN, seed=1).requires_grad_()
    part = HeadPart(run, "score.weight", "score.bias" if with_bias else None)
    y = StackedLinear.apply(torch.zeros((), requires_grad=True), x, [part], CELLS)
    y.square().sum().backward()
    for c, engine in enumerate(engines):
        mine = {name: p.detach().clone().requires_grad_() for name, p in engine.parameters.items()}
        own = x[c].detach().requires_grad_()
        expected = F.linear(own, mine["score.weight"], mine.get("score.bias"))
        expected.square().sum().backward()
        torch.testing.assert_close(y[c], expected)
        torch.testing.assert_close(x.grad[c], own.grad)
        for name, p in mine.items():
            torch.testing.assert_close(group.gradients[name][c], p.grad)


def test_an_optimizer_step_on_one_slice_is_adamw_and_leaves_the_others_alone():
    shapes = {"l.lora_A.weight": (RANK, IN), "l.lora_B.weight": (OUT, RANK)}
    generator = torch.Generator().manual_seed(0)
    engines = [
        SimpleNamespace(parameters={n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()})
        for _ in range(CELLS)
    ]
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in engines[1].parameters.items()}
    group = Group(engines)
    before = {n: v.clone() for n, v in group.values.items()}
    settings = Optimizer(lr=1e-2, lora_plus=4.0, weight_decay=0.1)
    mine = AdapterOptimizer(engines[1].parameters, settings)
    reference = torch.optim.AdamW(
        [
            {"params": [copies["l.lora_A.weight"]], "lr": 1e-2},
            {"params": [copies["l.lora_B.weight"]], "lr": 4e-2},
        ],
        weight_decay=0.1,
    )
    for step in range(5):
        for index, (name, copy) in enumerate(copies.items()):
            group.gradients[name][1] = torch.randn(copy.shape, generator=generator) * (step + index + 1)
            copy.grad = group.gradients[name][1].clone()
        group.hand_out(1, engines[1], set(copies))
        mine.step(1e-2)
        reference.step()
    for name, copy in copies.items():
        torch.testing.assert_close(group.values[name][1], copy.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(group.values[name][0], before[name][0]) and torch.equal(
            group.values[name][2], before[name][2]
        )


def test_a_parameter_without_a_gradient_gets_none():
    engines = engines_of({"l.lora_A.weight": (RANK, IN), "unused.weight": (2, 2)})
    group = Group(engines)
    group.hand_out(2, engines[2], {"l.lora_A.weight"})
    assert engines[2].parameters["unused.weight"].grad is None
    assert engines[2].parameters["l.lora_A.weight"].grad.data_ptr() == group.gradients["l.lora_A.weight"][2].data_ptr()


def test_row_losses_are_the_terms_of_the_sum():
    linear = nn.Linear(IN, 11).requires_grad_(False)
    hidden = torch.randn(40, IN, generator=torch.Generator().manual_seed(0)).requires_grad_()
    other = hidden.detach().clone().requires_grad_()
    targets = torch.arange(40) % 11
    weights = torch.linspace(0.1, 2.0, 40)
    nats = linear_cross_entropies(hidden, linear, targets)
    (nats * weights).sum().backward()
    (F.cross_entropy(linear(other), targets, reduction="none") * weights).sum().backward()
    torch.testing.assert_close(nats, F.cross_entropy(linear(other), targets, reduction="none"))
    torch.testing.assert_close(hidden.grad, other.grad)
    torch.testing.assert_close(nats.sum(), linear_cross_entropy(other, linear, targets))


# --------------------------------------------------------------------------------------------- passes


def cost_of(parts, shapes, calls=passes._CALLS["cpu"]):
    return sum(calls + sum(shapes[i][0] for i in p) * max(shapes[i][1] for i in p) for p in parts)


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_in_the_order_of_width_is_cheaper(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        tuple(torch.randint(low, high, (1,), generator=generator).item() for low, high in ((1, 9), (8, 200)))
        for _ in range(8)
    ]
    found = passes.split(shapes, device="cpu")
    assert sorted(i for part in found for i in part) == list(range(8))
    order = sorted(range(8), key=lambda i: -shapes[i][1])
    every = []
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 8), n) for n in range(8)):
        edges = [0, *cuts, 8]
        parts = [order[i:j] for i, j in itertools.pairwise(edges)]
        sizes = [sum(shapes[i][0] for i in p) * shapes[p[0]][1] for p in parts]
        if all(len(p) == 1 or size <= passes.TOKENS["cpu"] for p, size in zip(parts, sizes, strict=True)):
            every.append(cost_of(parts, shapes))
    assert cost_of(found, shapes) == min(every)


def test_equal_cells_stay_in_their_order():
    assert passes.split([(1, 64)] * 16, device="cpu") == [list(range(16))]
    assert passes.split([(8, 512)] * 3, device="cpu") == [[0], [1], [2]]  # each above the limit by itself


def micro(rows, *, packed=False):
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = torch.where(mask == 1, ids, IGNORE)
    inputs = {"input_ids": ids}
    inputs |= {"position_ids": torch.arange(width).expand_as(ids) % 2} if packed else {"attention_mask": mask}
    return MicroBatch(inputs, labels, 1, len(rows), ())


def test_rows_are_padded_to_the_widest():
    inputs, labels = passes.join([micro([[5, 6]]), micro([[7, 8, 9], [4]])], pad_id=3)
    assert inputs["input_ids"].tolist() == [[5, 6, 3], [7, 8, 9], [4, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert labels.tolist() == [[5, 6, IGNORE], [7, 8, 9], [4, IGNORE, IGNORE]]


def test_beside_packed_rows_padding_is_a_sample_of_its_own():
    inputs, _ = passes.join([micro([[5, 6, 7, 8, 9]], packed=True), micro([[7, 8, 9], [4]])], pad_id=0)
    assert inputs.keys() == {"input_ids", "position_ids"}
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1], [0, 0, 1, 0, 1]]


# --------------------------------------------------------------------------------------------- sharing and refusing


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_backbone("llama", tmp_path_factory.mktemp("llama"))


def test_a_copy_shares_every_tensor_but_a_new_head(llama):
    backbone = load_backbone(llama, task=Classify(), num_labels=3)
    copy = shared_copy(backbone)
    own = [n for n, p in copy.named_parameters() if p.data_ptr() != backbone.get_parameter(n).data_ptr()]
    assert own == ["score.weight"]
    assert copy is not backbone and copy.get_submodule("model") is not backbone.get_submodule("model")


def test_cells_begin_with_the_adapter_that_they_would_have_alone(llama):
    from flatshift.finetune.adapters.adapter import attach_adapter, trainable

    task = Classify()
    backbone = load_backbone(llama, task=task, num_labels=3)
    cells = [(Adapter(rank=r), Train(seed=s)) for s, r in enumerate((2, 2, 4))]
    engines = [cell_engine(backbone, adapter, task=task, train=train) for adapter, train in cells]
    Host(backbone, engines, task=task, pad_id=0)
    for engine, (adapter, train) in zip(engines, cells, strict=True):
        fresh = load_backbone(llama, task=task, num_labels=3)
        own = trainable(attach_adapter(fresh, adapter, task=task, seed=train.seed))
        assert own.keys() == engine.parameters.keys()
        assert all(torch.equal(own[name], engine.parameters[name]) for name in own)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task": Seq2Seq()}, "seq2seq"),
        ({"adapter": Adapter(dora=True)}, "dora"),
        ({"adapter": Adapter(init="pissa")}, "pissa"),
        ({"adapter": Adapter(dropout=0.1)}, "dropout"),
        ({"train": Train(quantization="nf4")}, "quantization"),
        ({"train": Train(adapter_precision="bf16")}, "adapter_precision"),
        ({"train": Train(checkpointing="full")}, "checkpointing"),
        ({"regularizer": SAM()}, "kind: sam"),
        ({"regularizer": BiLora()}, "bi-lora"),
        ({"regularizer": NEFTune()}, "neftune"),
        ({"regularizer": GGPO(scope="sample")}, "scope: sample"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_runs_alone_says_why(change, says):
    usual = {"task": LanguageModel(), "adapter": Adapter(), "train": Train(), "regularizer": Plain()}
    assert refusal(**usual) is None
    assert says in refusal(**{**usual, **change})


def test_what_may_be_stacked():
    for regularizer in (Plain(), GGPO(), GGPO(scope="microbatch"), BAR()):
        assert refusal(Classify(), Adapter(), Train(precision="bf16", patience=2, accumulate=2), regularizer) is None


def test_dropout_of_the_backbone_and_other_layers_are_refused(llama, tmp_path):
    task = LanguageModel()
    wet = load_backbone(save_backbone("gpt2-dropout", tmp_path / "wet"), task=task)
    with pytest.raises(NotStackable, match="dropout"):
        Host(wet, [cell_engine(wet, Adapter(rank=2), task=task, train=Train())], task=task, pad_id=0)
    dry = load_backbone(llama, task=task)
    table = cell_engine(dry, Adapter(rank=2, targets=("embed_tokens",)), task=task, train=Train())
    with pytest.raises(NotStackable):
        Host(dry, [table], task=task, pad_id=0)
    apart = [cell_engine(dry, Adapter(rank=2, targets=(t,)), task=task, train=Train()) for t in ("q_proj", "v_proj")]
    with pytest.raises(NotStackable, match="different layers"):
        Host(dry, apart, task=task, pad_id=0)


# --------------------------------------------------------------------------------------------- grouping


def cell(seed=0, **changes):
    fixed = {"train.seed": seed, "train.precision": "bf16"}  # not what this machine would take
    laid = [
        from_override(k, v, "test") for k, v in (fixed | {k.replace("__", "."): v for k, v in changes.items()}).items()
    ]
    return cell_of(load_recipe("double-descent", laid), point={}, seed=seed)


def test_cells_that_differ_in_what_a_cell_may_differ_in_go_together():
    cells = [
        cell(seed=s, adapter__rank=r, optimizer__lr=lr, data__label_noise=noise, data__train__limit=limit)
        for s, (r, lr, noise, limit) in enumerate([(1, 1e-3, 0.0, 50), (8, 1e-2, 0.2, 100), (64, 1e-3, 0.1, 300)])
    ]
    (stack,) = stacks(cells)
    assert set(map(id, stack.cells)) == set(map(id, cells)) and stack.reason is None


def test_cells_that_cannot_share_are_apart():
    cells = [
        cell(),
        cell(train__precision="fp32"),
        cell(data__train__files="sample:scicite/train", data__test__files="sample:scicite/test"),
        cell(adapter__targets="q_proj"),
        cell(adapter__dropout=0.1),
        cell(mesh__dp=2),
    ]
    found = stacks(cells)
    assert sorted(len(stack.cells) for stack in found) == [1] * len(cells)
    assert sorted(stack.reason.split(":")[0] for stack in found if stack.reason) == ["adapter.dropout", "mesh"]


def test_a_width_is_honoured_and_like_cells_are_neighbours():
    cells = [cell(seed=s, adapter__rank=r, train__steps=n) for s in range(3) for r in (2, 8) for n in (10, 40)]
    found = stacks(cells, width=5)
    assert sum((stack.cells for stack in found), ()) and sum(len(stack.cells) for stack in found) == len(cells)
    assert max(len(stack.cells) for stack in found) <= 5
    lengths = [{c.resolved.recipe.train.steps for c in stack.cells} for stack in found]
    assert sorted(map(len, lengths)) == [1, 1, 2], "no more than the cut needs run half empty"


@pytest.mark.parametrize("targets", ["layers.5.mlp.down_proj", "all-linear"])
def test_a_sweep_that_is_stopped_has_whole_seeds(targets):
    """Also along the steps, where cells of unlike length are no stack."""
    cells = [
        cell(seed=s, adapter__rank=r, adapter__targets=targets, train__steps=n)
        for n in (10, 40)
        for r in (2, 8)
        for s in range(3)
    ]
    found = stacks(cells, width=2)
    of_stacks = [
        [(c.seed, c.resolved.recipe.train.steps, c.resolved.recipe.adapter.rank) for c in s.cells] for s in found
    ]
    assert of_stacks == [[(seed, n, 2), (seed, n, 8)] for seed in range(3) for n in (10, 40)]


def test_micro_batches_of_the_same_rows_go_together_and_count_once_in_what_is_shared():
    shapes, narrow, same = [(32, 32)] * 8, [(16, 32)] * 8, [0, 1] * 4
    assert [len(found) for found in passes.split(narrow, device="cpu")] == [2] * 4  # 1024 tokens a pass
    found = passes.split(shapes, device="cpu", same=same, shared=0.75)
    assert found == [[0, 2, 4, 6], [1, 3, 5, 7]]  # 4·1024/4 + 3·1024/4 tokens each; all of them are too many
    assert passes.split(narrow, device="cpu", same=same, shared=0.0) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert len(passes.split(shapes, device="cpu", same=range(8), shared=0.75)) == 8  # nothing is shared after all
    assert len(passes.split([(32, 32)] * 40, device="cpu", same=[0] * 40, shared=1.0)) == 3  # 16 k tokens at most


def test_a_small_memory_makes_narrow_stacks():
    from flatshift.finetune.models.backbone import open_backbone

    cells = [cell(seed=s, adapter__rank=64) for s in range(8)]
    sized = [(c.resolved.recipe.adapter, c.resolved.recipe.train) for c in cells]
    directory = open_backbone("flatshift-5m").directory
    two, four = (estimate(directory, sized[:n]) for n in (2, 4))
    assert four - two >= 2 * 4 * 4 * 1.7e6  # four float32 tensors of about 1.8 million values a cell
    found = stacks(cells, memory=four + 1)
    assert [len(stack.cells) for stack in found] == [4, 4]
    assert [len(stack.cells) for stack in stacks(cells, memory=0)] == [1] * 8


def test_an_error_that_nobody_foresaw_is_the_whole_stacks(tmp_path, monkeypatch):
    def prepare(recipe):
        if recipe.train.seed == 1:
            raise RuntimeError("a device failed")
        raise ValueError("bad rows")

    monkeypatch.setattr(stacking, "prepare", prepare)
    cells = [cell(seed) for seed in range(3)]
    directories = [tmp_path / each.key for each in cells]
    with pytest.raises(RuntimeError, match="RuntimeError: a device failed"):
        stacking.run_stack(directories, cells, 1)
    found = [read_result(directory) for directory in directories]
    assert found[0]["reason"] == "bad rows" and found[1] is found[2] is None


def test_a_stack_that_falls_apart_says_why_in_every_cells_result(tmp_path, monkeypatch):
    def train(*group):
        raise NotStackable("a layer is odd")

    def train_cell(directory, member, recipe, *, prepared, load_model):
        load_model(recipe, recipe.task, None)
        raise AssertionError("its stage is closed")

    def run_cell(directory, member, threads, *, alone):
        finish_cell(directory, member, Result("done", alone=alone))
        return True

    monkeypatch.setattr(stacking, "train_cell", train_cell)
    monkeypatch.setattr(stacking, "load_backbone", lambda *args, **rest: "backbone")
    monkeypatch.setattr(stacking, "cell_engine", lambda *args, **rest: SimpleNamespace())
    monkeypatch.setattr(stacking, "_train", train)
    monkeypatch.setattr(stacking, "run_cell", run_cell)
    cells = [cell(seed) for seed in range(2)]
    directories = [tmp_path / each.key for each in cells]
    stacking.run_stack(directories, cells, 1)
    assert [read_result(directory)["alone"] for directory in directories] == ["a layer is odd"] * 2


def test_warm_up_runs_alone():
    recipe = load_recipe("warmup").recipe
    assert "warmup" in stackable(recipe)
    assert stackable(dataclasses.replace(recipe, warmup=None, regularizer=Plain())) is None


# --------------------------------------------------------------------------------------------- paused stages


def test_a_stage_is_awake_only_while_somebody_waits_for_it():
    from flatshift.finetune.stacked.together import Stage

    seen = []

    def work(stage):
        try:
            seen.append(stage.pause("a"))
            seen.append(stage.pause("b"))
        finally:
            seen.append("left")
        return "end"

    stage = Stage(work)
    assert next(stage) == "a" and seen == [] and stage.send(1) == "b" and seen == [1]
    with pytest.raises(StopIteration) as end:
        stage.send(2)
    assert end.value.value == "end" and seen == [1, 2, "left"] and stage.seconds > 0
    closed = Stage(work)
    next(closed)
    closed.close()
    assert seen == [1, 2, "left", "left"]
    with pytest.raises(StopIteration):
        next(closed)
    broken = Stage(work)
    next(broken)
    with pytest.raises(ValueError, match="of the one who computes"):
        broken.throw(ValueError("of the one who computes"))
    Stage(work).close()  # never begun
