"""What a CUDA device would do with the loop, rehearsed on tensors without values: one wait an update, no host tensors.

And the parts that only such a device takes, compared on a CPU with those that a CPU takes.
"""

from __future__ import annotations

import ast
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import TrainerCallback

from benchmarks import _rehearsal as cases
from benchmarks.cuda_rehearsal import Rehearsal
from flatshift import finetune
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.compute import attention
from flatshift.finetune.compute.capabilities import CPU, CUDA, T4, capabilities, override_capabilities
from flatshift.finetune.compute.loss import batch_loss
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, SpikeRecovery, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.evaluate.generation import Decoding, continue_prompts
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import Classify, LanguageModel, MaskedLM, Seq2Seq
from flatshift.finetune.train.checkpointer import checkpoint_steps as saved_steps
from flatshift.finetune.train.deferred_metrics import MetricsBuffer, MetricsRow
from flatshift.finetune.train.divergence import Diverged
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import GGPO, BiLora, Plain, build
from tests.support.finetune_models import PadOnly, RandomBatches, save_backbone
from tests.support.seq2seq_models import save_encoder_decoder

LM = LanguageModel()
COVERING = cases.covering_cases()


# --------------------------------------------------------------------------------------------- the whole step


# Fake CUDA tensors need a build of torch that knows CUDA, and for backward passes, whose engine asks the driver, a GPU.
FAKE = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch was built without CUDA")
FAKE_BACKWARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("on", ["meta", pytest.param("cuda", marks=[FAKE_BACKWARD, pytest.mark.gpu])])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (n % 3 > 0)) for n, case in enumerate(COVERING)],
)
def test_no_update_waits_unless_it_is_read(case, on):
    found = cases.rehearse(case, on=on)
    assert [list(map(str, update)) for update in found.updates] == [[]] * 2  # of three, the first is apart
    assert found.lines == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", cases.CHECKPOINTING)
@pytest.mark.parametrize("objective", cases.OBJECTIVES)
def test_no_update_of_any_case_waits(objective, checkpointing):
    for case in cases.all_cases():
        if (case.objective, case.checkpointing) == (objective, checkpointing):
            assert [str(wait) for update in cases.rehearse(case).updates for wait in update] == [], str(case)


def test_an_update_that_is_read_waits_once_and_no_line_is_lost():
    case = cases.Case("language-model", "ggpo", packed=True, accumulate=2)
    found = cases.rehearse(case, steps=14)
    assert found.most == 1 and found.lines == list(range(1, 15))
    assert {str(w).partition(":")[0] for u in found.updates for w in u} == {
        "read by copy to the host at finetune/train/deferred_metrics.py"
    }


class _Silent(TrainerCallback):
    """Listens to nothing in particular."""


@pytest.mark.parametrize(
    ("settings", "callbacks"),
    [
        ({"skip_nonfinite": 2}, ()),
        ({"spikes": SpikeRecovery(window=4), "save_every": 10}, ()),
        ({}, (_Silent(),)),
    ],
    ids=["skip_nonfinite", "spikes", "callbacks"],
)
def test_who_watches_every_update_pays_one_wait(settings, callbacks):
    case = cases.Case("completion", "lora-sam")
    found = cases.rehearse(case, steps=4, settings=settings, callbacks=callbacks)
    assert [len(update) for update in found.updates] == [1, 1, 1] and found.lines == [1, 2, 3, 4]


def test_a_scaled_loss_is_looked_at_once_an_update():
    case = cases.Case("completion", "mgpo", "full", precision="fp16")
    found = cases.rehearse(case, record=T4)
    assert [len(update) for update in found.updates] == [1, 1] and found.lines == [1, 2, 3]


@pytest.mark.parametrize("on", ["meta", pytest.param("cuda", marks=FAKE)])
def test_generation_and_judging_stay_on_the_device(on):
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.evaluate.evaluator import head_scores
    from flatshift.finetune.evaluate.perplexity import document_nats
    from flatshift.finetune.train.trace.examples import score_examples

    how = EvalBatching(2, 0, on, torch.bfloat16)
    rows = cases.rows("completion", 3)
    with Rehearsal(on=on) as seen:  # raises where a tensor of the host strays in
        model, head = (cases._adapted(cases.Case(name)).to(on) for name in ("completion", "classify"))
        document_nats(model, rows, how, task=LM)
        score_examples(model, rows, how, task=LM)
        head_scores(head, cases.rows("classify", 3), how, task=Classify())
        for decoding in (Decoding(max_new_tokens=2), Decoding(max_new_tokens=2, temperature=0.7, top_p=0.9)):
            list(continue_prompts(model, [row.input_ids for row in rows], decoding, how, end=1))
    assert any(wait.kind == "read" for wait in seen.waits)  # they are for somebody to read


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch holds fake CUDA tensors")
def test_fake_cuda_tensors_are_refused_where_they_would_abort():
    with pytest.raises(RuntimeError, match="rehearse on meta"):
        Rehearsal(on="cuda")


# --------------------------------------------------------------------------------------------- what is seen


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda x: x.sum().item(), "read"),
        (lambda x: float(x.mean()), "read"),
        (lambda x: bool((x > 0).all()), "read"),
        (lambda x: x.tolist(), "read"),
        (lambda x: x.cpu(), "read"),
        (lambda x: torch.zeros(3).copy_(x), "read"),
        (lambda x: torch.equal(x, x), "read"),
        (lambda x: x[x > 0], "shape"),
        (lambda x: x.nonzero(), "shape"),
        (lambda x: x.masked_select(x > 0), "shape"),
        (lambda x: torch.repeat_interleave(x, x.long()), "shape"),
        (lambda x: x[torch.tensor([0, 1])], "copy"),
        (lambda x: torch.tensor([1.0, 2.0], device="meta"), "copy"),
        (lambda x: torch.ones(3).to("meta"), "copy"),
        (lambda x: x.copy_(torch.ones(3)), "copy"),
    ],
)
def test_every_kind_of_wait_is_written_down(act, kind):
    with Rehearsal() as seen:
        act(torch.empty(3, device="meta"))
    assert [wait.kind for wait in seen.waits] == [kind]


def test_what_does_not_wait_is_not():
    with Rehearsal() as seen:
        x = torch.empty(3, device="meta")
        torch.where(x > 0, x, 0.0).add_(torch.full((), 2.0, device="meta"))
        torch.ones(3).to("meta", non_blocking=True)
        torch.ones(3).sum().item()  # of the host alone
        x.index_select(0, torch.ones(2, dtype=torch.int64).to("meta", non_blocking=True)).clamp_(max=torch.tensor(1.0))
    assert seen.waits == []


def test_a_wait_has_its_place_in_our_code():
    labels = torch.full((1, 4), 1, device="meta")
    with Rehearsal() as seen:
        finetune.compute.loss.select_targets(torch.empty(1, 4, 8, device="meta"), labels, LM)
    assert {str(wait).rpartition(":")[0] for wait in seen.waits} == {
        "shape by index by a mask at finetune/compute/loss.py",
    }


def test_strays_of_the_host_are_refused():
    x = torch.empty(3, 3, device="meta")
    with Rehearsal():
        for act in (lambda: x @ torch.ones(3, 3), lambda: F.linear(x, torch.ones(2, 3)), lambda: x + torch.ones(3)):
            with pytest.raises(RuntimeError, match=r"host tensor|expected device"):
                act()
        with pytest.raises(RuntimeError, match="generator of the host"):
            torch.rand(3, device="meta", generator=torch.Generator())


def test_autocast_is_imitated_in_backward_too():
    weight = torch.empty(4, 4, device="meta", requires_grad=True)
    seen = []

    def forward(x):
        seen.append(F.linear(x, weight).dtype)
        return F.linear(x, weight)

    with Rehearsal():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = torch.empty(2, 4, device="meta", requires_grad=True)
            y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
            assert y.softmax(-1).dtype == torch.float32
        y.float().sum().backward()
    assert seen == [torch.bfloat16] * 2 and weight.grad.dtype == torch.float32


# --------------------------------------------------------------------------------------------- the record


def test_a_record_is_lent_for_a_while():
    assert capabilities("meta") is CPU and capabilities(torch.device("cpu")) is CPU
    with override_capabilities(CUDA):
        with override_capabilities(T4):
            assert not capabilities("meta").bf16
        assert capabilities("meta") is CUDA and capabilities("cpu") is CPU
    assert capabilities("meta") is CPU


_MAY_ASK = {
    "models/backbone.py": "which device `train.device` names",
    "launch/spawn.py": "sets a process up",
    "planner/devices.py": "counts devices",
    "train/out_of_memory.py": "says whose memory was short",
    "train/peak_memory.py": "asks the one who counts: the allocator, or the kernel",
    "planner/memory.py": "prints the type",
    "parallel/mesh.py": "names the mesh's type",
    "parallel/fsdp.py": "names a mesh's type",
    "train/checkpointer.py": "writes the type down",
    "run_directory.py": "writes the device's name down",
}
"""Files outside of `flatshift.finetune.compute` that read a device's type, and why."""


def test_the_type_of_a_device_is_asked_in_one_place():
    """`.type` of something called a device, or of a tensor's device; everything else asks the record."""
    root = Path(finetune.__file__).parent
    found = set()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if name.startswith("compute/"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "type":
                of = ast.unparse(node.value)
                if of.endswith("device") or of in ("place",):
                    found.add(name)
    assert found <= _MAY_ASK.keys(), found - _MAY_ASK.keys()


# --------------------------------------------------------------------------------------------- lines that wait


def fit(source, directory, *, regularizer=None, steps=12, on=None, dev=(), **train):
    model = attach_adapter(load_backbone(source, task=LM), Adapter(rank=4), task=LM, seed=0)
    stop = None if on is None else lambda: on(model)
    run = RunDirectory.create(directory)
    Trainer(
        model,
        PadOnly(),
        TrainingStage(
            name="fine-tune",
            task=LM,
            batches=RandomBatches(accumulate=2),
            dev=list(dev),
            optimizer=Optimizer(lr=1e-2, schedule="constant"),
            train=Train(steps=steps, **train),
            evaluate=Evaluate(batch_size=2),
            regularizer=build(regularizer or Plain()),
            run=run,
            seed=0,
            stop=stop,
        ),
    ).fit()
    return run, {name: p.detach().clone() for name, p in trainable(model).items()}


def told(run):
    """The lines without what the clock says."""
    timed = ("time_s", "tokens_s", "tflops", "mfu", "hfu")
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(run.path / "metrics.jsonl")]


@pytest.mark.parametrize("regularizer", [Plain(), GGPO(refresh=2)], ids=lambda config: config.kind)
def test_lines_that_waited_are_the_same_in_the_same_order(llama, tmp_path, regularizer):
    dev = cases.rows("language-model", 4)
    how = {"regularizer": regularizer, "dev": dev, "eval_every": 5, "save_every": 4}
    plain, adapter = fit(llama, tmp_path / "plain", **how)
    with override_capabilities(replace(CPU, unread=10), on="cpu"):
        waited, other = fit(llama, tmp_path / "waited", **how)
    assert told(waited) == told(plain) and len(told(plain)) == 12 + 3
    assert [list(line) for line in told(waited)] == [list(line) for line in told(plain)]
    assert all(tensor.equal(other[name]) for name, tensor in adapter.items())


@pytest.mark.parametrize("lines", [2, 10])
def test_a_nan_stops_before_anything_of_its_update_is_kept_though_it_is_read_later(llama, tmp_path, lines):
    calls = []

    def spoil(model):
        calls.append(None)
        if len(calls) == 6:
            with torch.no_grad():
                next(p for n, p in trainable(model).items() if "down_proj.lora_B" in n).view(-1)[0] = math.nan
        return False

    run = tmp_path / "run"
    with (
        override_capabilities(replace(CPU, unread=lines), on="cpu"),
        pytest.raises(Diverged, match=r"loss at step 7 .*checkpoint of step 5 is kept"),
    ):
        fit(llama, run, steps=30, save_every=5, on=spoil)
    opened = RunDirectory.open(run)
    assert [line["step"] for line in told(opened)] == list(range(1, 7)) and saved_steps(opened.state) == [5]
    assert not (run / "stages" / "fine-tune" / "adapter").exists()


def test_lines_come_when_they_are_many_or_old(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("flatshift.finetune.train.deferred_metrics.time.monotonic", lambda: clock[0])
    with override_capabilities(replace(CPU, unread=10), on="cpu"):
        waiting = MetricsBuffer(ProcessMesh.alone())

        def after(updates, seconds):
            for step in range(updates):
                assert not waiting.due, step
                waiting.add(MetricsRow(step, {}, {"loss": torch.tensor(1.0)}))
                clock[0] += seconds
            assert waiting.due
            return [step for step, _ in waiting.take()[0]]

        assert after(10, 0.01) == list(range(10))  # no more than ten
        assert after(10, 0.4) == list(range(10))  # so slow was not known yet
        assert after(2, 0.4) == [0, 1]  # about a second
        assert after(2, 3.0) == [0, 1]
        assert after(1, 0.01) == [0]  # slower than that: each
        assert after(10, 0.01) == list(range(10))
    assert MetricsBuffer(ProcessMesh.alone()).reads_are_free  # a CPU's


# --------------------------------------------------------------------------------------------- other ways, same sums


def _backbones(folder):
    """(name, model, task) of each family of masks: causal, with windows, with learned positions, two ways, both."""
    for kind, more in (("llama", {}), ("gpt2", {}), ("gemma2", {"sliding_window": 6})):
        yield kind, load_backbone(save_backbone(kind, folder / kind, **more), task=LM), LM
    dry = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    yield "bert", load_backbone(save_backbone("bert", folder / "bert", **dry), task=MaskedLM()), MaskedLM()
    for kind in ("t5", "bart"):
        yield kind, load_backbone(save_encoder_decoder(kind, folder / kind), task=Seq2Seq()), Seq2Seq()


def test_masks_of_what_the_host_knows_are_those_of_a_look(tmp_path):
    for kind, backbone, task in _backbones(tmp_path):
        model = attach_adapter(backbone, Adapter(rank=4), task=task, seed=0).train()
        examples = cases.rows(task.kind if task is not LM else "completion", 14)
        for packed in (False, True) if task is LM else (False,):
            made = replace(task, pack=packed) if task is LM else task
            batches = TrainingDataLoader(
                examples,
                task=made,
                batch_size=3,
                accumulate=1,
                seed=0,
                max_length=24,
                pad_id=0,
                **({"masking": cases.Masking(3, cases.np.arange(4, 60))} if isinstance(task, MaskedLM) else {}),
            )
            (micro,) = batches.at(0)
            assert micro.padded is not None and ("position_ids" in micro.inputs) == packed
            found = []
            for record in (CPU, replace(CPU, reads_masks=False)):
                model.zero_grad()
                with override_capabilities(record, on="cpu"), attention.packed_attention(model, torch.device("cpu")):
                    loss = batch_loss(model, micro, task=made)
                loss.backward()
                found.append(
                    (loss.detach(), {n: p.grad.clone() for n, p in trainable(model).items() if p.grad is not None})
                )
            (one, gradients), (other, others) = found
            torch.testing.assert_close(other, one, rtol=1e-5, atol=0, msg=kind)
            for name, gradient in gradients.items():
                torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")


def test_the_mask_function_is_put_back_and_a_padded_causal_row_has_no_mask(llama):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask

    model = load_backbone(llama, task=LM)
    with (
        override_capabilities(replace(CPU, reads_masks=False), on="cpu"),
        attention.packed_attention(model, torch.device("cpu")),
    ):
        changed = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        assert changed is not sdpa_mask
        causal = {"batch_size": 1, "q_length": 4, "kv_length": 4, "mask_function": causal_mask_function}
        causal["attention_mask"] = torch.tensor([[1, 1, 1, 0]]).bool()
        assert changed(**causal) is not None  # nothing is known of it: as transformers has it
        token = attention._ROWS.set(attention.PackedRows(padded=True, positions=None))
        assert changed(**causal) is None
        attention._ROWS.reset(token)
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask


def test_chosen_labels_are_those_of_the_mask_to_the_bit(llama):
    model = attach_adapter(load_backbone(llama, task=LM), Adapter(rank=4), task=LM, seed=0)
    for packed in (False, True):
        batches = TrainingDataLoader(
            cases.rows("completion", 12),
            task=replace(LM, pack=packed),
            batch_size=3,
            accumulate=1,
            seed=0,
            max_length=24,
            pad_id=0,
        )
        (micro,) = batches.at(0)
        found = []
        for batch in (micro, replace(micro, chosen=None)):
            model.zero_grad()
            loss = batch_loss(model, batch, task=LM)
            loss.backward()
            found.append((loss, {n: p.grad.clone() for n, p in trainable(model).items() if p.grad is not None}))
        assert found[0][0].equal(found[1][0])
        assert all(gradient.equal(found[1][1][name]) for name, gradient in found[0][1].items())


def test_an_ascent_that_is_left_out_on_the_device_changes_nothing(llama):
    """Bi-LoRA's fused way: a gradient that is no number reaches neither factors nor moments, and the next one does."""
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))

    def run(on_host, broken):
        model = attach_adapter(load_backbone(llama, task=LM), Adapter(rank=4), task=LM, seed=0)
        regularizer = build(BiLora(rank=2)).attach(model, seed=0, total_steps=4)
        if not on_host:
            regularizer._on_host = False
            regularizer._optimizer = torch.optim.AdamW(
                regularizer._factors.values(), lr=0.0, weight_decay=0.0, maximize=True, fused=True
            )
        for step in range(4):
            with regularizer.step(step):
                model(input_ids=ids, labels=ids).loss.backward()
                if step in broken:
                    next(iter(regularizer._factors.values())).grad[0, 0] = math.nan
            regularizer.after_optimizer_step(1e-2)
        return regularizer

    host, device = run(True, {2}), run(False, {2})
    assert device.metrics() == pytest.approx(host.metrics(), rel=1e-5) and device.metrics()["auxiliary_skips"] == 1
    for name, factor in host._factors.items():
        # AdamW divides rounding by rounding where a gradient is next to nothing, so the bound is that of a step
        torch.testing.assert_close(device._factors[name], factor, rtol=1e-3, atol=1e-6)
    first = run(False, {0, 1, 2, 3})
    assert all(not factor.any() for name, factor in first._factors.items() if name.endswith(".B"))


@pytest.mark.gpu
@FAKE_BACKWARD
def test_torch_counts_the_same_on_a_device(tmp_path):
    """Where there is a GPU, its own count of what synchronises is that of the rehearsal: nothing in most updates."""
    import warnings

    source, counts = save_backbone("llama", tmp_path / "backbone"), []

    def passed():
        counts.append(len([each for each in seen if "synchronizing" in str(each.message)]))
        return False

    model = attach_adapter(load_backbone(source, task=LM, device="cuda"), Adapter(rank=4), task=LM, seed=0)
    batches = TrainingDataLoader(
        cases.rows("completion", 12), task=LM, batch_size=2, accumulate=2, seed=0, max_length=24, pad_id=0
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            Trainer(
                model,
                PadOnly(),
                TrainingStage(
                    name="fine-tune",
                    task=LM,
                    batches=batches,
                    dev=[],
                    optimizer=Optimizer(),
                    train=Train(steps=20, save_every=0),
                    evaluate=Evaluate(batch_size=2),
                    regularizer=build(GGPO(refresh=2)),
                    run=RunDirectory.create(tmp_path / "run"),
                    seed=0,
                    stop=passed,
                ),
            ).fit()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    each = [after - before for before, after in itertools.pairwise(counts[1:])]
    assert max(each) <= 1 and sum(each) < len(each)


def test_a_rehearsal_leaves_everything_as_it_was():
    before = (torch.autocast, torch.is_autocast_enabled, torch.amp.autocast, torch.autograd._engine_run_backward)
    with Rehearsal(CUDA):
        pass
    after = (torch.autocast, torch.is_autocast_enabled, torch.amp.autocast, torch.autograd._engine_run_backward)
    assert after == before and capabilities("meta") is CPU
