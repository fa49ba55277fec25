"""Updates that must not be made are left out or gone back from, with the bits of a run that never met them."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Evaluate, Optimizer, SpikeRecovery, Train
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train.checkpointer import batch_index, merge_skipped_ranges, rollback_step
from flatshift.finetune.train.checkpointer import checkpoint_steps as saved_steps
from flatshift.finetune.train.divergence import Diverged, spike_limit
from flatshift.finetune.train.schedule import learning_rate
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import ASAM, BAR, GGPO, LoraSAM, Plain, build
from tests.support.finetune_models import Micro, PadOnly, RandomBatches

LM = LanguageModel()
STEPS = 14
SPIKES = SpikeRecovery(window=4, threshold=8.0, back=3, skip=4, most=2)


@dataclasses.dataclass(frozen=True)
class Numbered(Micro):
    """A micro-batch that knows which batch it is of."""

    batch: int = 0


class NumberedBatches(RandomBatches):
    """Batches of which `order` says which one comes at which step."""

    def __init__(self, order=lambda step: step):
        super().__init__(accumulate=2)
        self.order = order

    def at(self, step):
        number = self.order(step)
        return [Numbered(**vars(micro), batch=number) for micro in super().at(number)]


class SickEngine(Engine):
    """Some batches have gradients that are no numbers, some a loss that is far too high."""

    nan: frozenset[int] = frozenset()
    in_pass: int | None = 0
    """Of two passes over a batch, the one that breaks; None: both."""
    jump: frozenset[int] = frozenset()
    seen: list[int]

    def forward_backward(self, micros, count, **how):
        number = micros[0].batch
        turn = self.seen.count(number) if self.seen and self.seen[-1] == number else 0
        self.seen.append(number)
        loss = super().forward_backward(micros, count, **how)
        if number in self.nan and self.in_pass in (None, turn):
            next(iter(self.parameters.values())).grad.view(-1)[0] = math.nan
        return loss + 50 if number in self.jump else loss


def engine_of(source, *, nan=(), jump=(), in_pass=0):
    model = attach_adapter(load_backbone(source, task=LM), Adapter(rank=4), task=LM, seed=0)
    engine = SickEngine.alone(model)
    engine.nan, engine.jump, engine.in_pass, engine.seen = frozenset(nan), frozenset(jump), in_pass, []
    return engine


def fit(engine, directory, *, stop_at=None, regularizer=None, order=lambda step: step, **train):
    """One attempt; the adapter, or None if it was stopped after `stop_at`."""
    run = RunDirectory.open(directory) if directory.exists() else RunDirectory.create(directory)
    seen = [0]
    try:
        result = Trainer(
            engine,
            PadOnly(),
            TrainingStage(
                name="fine-tune",
                task=LM,
                batches=NumberedBatches(order),
                dev=[],
                optimizer=Optimizer(lr=1e-2, weight_decay=0.01),
                train=Train(**{"steps": STEPS, "save_every": 2, "threads": 1, **train}),
                evaluate=Evaluate(),
                regularizer=regularizer or build(Plain()),
                run=run,
                seed=0,
                on_step=lambda line: seen.append(line["step"]),
                stop=lambda: seen[-1] == stop_at,
            ),
        ).fit()
    except Interrupted:
        return None
    adapter = {name: p.detach().clone() for name, p in trainable(engine.model).items()}
    return adapter, result


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def curve(directory):
    lines = read_metrics(directory / "metrics.jsonl")
    return {
        (r["split"], r["step"]): (r["loss"], r["tokens"], r.get("grad_norm"), r.get("skipped"), r.get("rewound_to"))
        for r in lines
    }


# ---------------------------------------------------------------- left out


def test_a_left_out_update_is_as_if_the_optimizer_had_not_been_called(source, tmp_path):
    adapter, result = fit(engine_of(source, nan={3, 4, 9}), tmp_path / "run", skip_nonfinite=2)
    # naive: plain torch, the schedule goes on
    model = attach_adapter(load_backbone(source, task=LM), Adapter(rank=4), task=LM, seed=0)
    parameters = trainable(model)
    adam = torch.optim.AdamW(parameters.values(), lr=1.0, weight_decay=0.01)
    settings, tokens = Optimizer(lr=1e-2), 0
    for step in range(STEPS):
        if step in {3, 4, 9}:
            continue
        micros = NumberedBatches().at(step)
        count = sum(micro.supervised for micro in micros)
        for micro in micros:
            logits = model(**micro.inputs).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), micro.labels[:, 1:].flatten(), reduction="sum"
            )
            (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        adam.param_groups[0]["lr"] = learning_rate(step, steps=STEPS, optimizer=settings)
        adam.step()
        adam.zero_grad()
        tokens += count
    for name, parameter in parameters.items():
        assert torch.allclose(adapter[name], parameter, rtol=1e-4, atol=1e-6), name
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in lines] == list(range(1, STEPS + 1))
    assert [r["step"] for r in lines if r.get("skipped")] == [4, 5, 10]
    assert [r["skipped_updates"] for r in lines if r.get("skipped")] == [1, 2, 3]
    assert all(r["grad_norm"] is None and math.isfinite(r["loss"]) for r in lines if r.get("skipped"))
    assert result.skipped == 3 and result.steps == STEPS and result.tokens == tokens == lines[-1]["tokens"]
    done = json.loads((tmp_path / "run" / "stages" / "fine-tune" / "done.json").read_text())
    assert done["skipped"] == 3 and "3 steps skipped" in (tmp_path / "run" / "log.txt").read_text()


def test_one_more_in_a_row_stops_the_stage(source, tmp_path):
    with pytest.raises(Diverged, match=r"gradient at step 6 .*2 steps in a row.*checkpoint of step 4 is kept"):
        fit(engine_of(source, nan={3, 4, 5}), tmp_path / "run", skip_nonfinite=2)
    assert max(saved_steps(tmp_path / "run" / "state")) == 4
    with pytest.raises(Diverged, match=r"gradient at step 4 "):
        fit(engine_of(source, nan={3}), tmp_path / "none")


def test_watching_changes_no_bit(source, tmp_path):
    plain, _ = fit(engine_of(source), tmp_path / "plain")
    watched, _ = fit(engine_of(source), tmp_path / "watched", skip_nonfinite=3, spikes=SPIKES)
    assert same(plain, watched) and curve(tmp_path / "plain") == curve(tmp_path / "watched")


@pytest.mark.parametrize("stop_at", [4, *(pytest.param(step, marks=pytest.mark.slow) for step in (5, 7))])
def test_resumed_around_a_left_out_update(stop_at, source, tmp_path):
    how = {"skip_nonfinite": 2}
    whole, _ = fit(engine_of(source, nan={3, 4, 9}), tmp_path / "whole", **how)
    assert fit(engine_of(source, nan={3, 4, 9}), tmp_path / "run", stop_at=stop_at, **how) is None
    again, result = fit(engine_of(source, nan={3, 4, 9}), tmp_path / "run", **how)
    assert same(again, whole) and result.skipped == 3
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_what_was_left_out_in_a_row_is_remembered(source, tmp_path):
    sick = {"nan": {3, 4, 5}}
    assert fit(engine_of(source, **sick), tmp_path / "run", stop_at=5, skip_nonfinite=2) is None
    with pytest.raises(Diverged, match="2 steps in a row"):
        fit(engine_of(source, **sick), tmp_path / "run", skip_nonfinite=2)


@pytest.mark.parametrize(
    ("config", "in_pass"),
    [(GGPO(sigma=0.05, refresh=3), 0), (LoraSAM(rho=0.05), None), (LoraSAM(rho=0.05), 1), (ASAM(), 1), (BAR(), 0)],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_a_regularizer_learns_nothing_from_it(config, in_pass, source, tmp_path):
    """Its state after the left-out step is the one before, but for counters and norms of the weights."""
    regularizer, told = build(config), []
    updated = regularizer.after_optimizer_step
    regularizer.after_optimizer_step = lambda rate: (told.append(rate), updated(rate))[1]
    states = {}

    class Peeking(SickEngine):
        def forward_backward(self, micros, count, **how):
            states[micros[0].batch] = {n: v.clone() for n, v in regularizer.state_dict().items()}
            return super().forward_backward(micros, count, **how)

    engine = engine_of(source, nan={4}, in_pass=in_pass)
    engine.__class__ = Peeking
    adapter, result = fit(engine, tmp_path / "run", steps=6, regularizer=regularizer, skip_nonfinite=1)
    assert result.skipped == 1 and len(told) == 5
    assert all(torch.isfinite(p).all() for p in adapter.values())
    for name, value in states[5].items():
        if value.is_floating_point():
            assert torch.isfinite(value).all(), name
            if "norm" not in name:  # row norms are of the weights, and refreshed by the step
                assert torch.equal(value, states[4][name]), name


# ---------------------------------------------------------------- gone back from


def test_a_spike_is_gone_back_from_and_its_batches_are_never_seen(source, tmp_path):
    engine = engine_of(source, jump={9})
    adapter, result = fit(engine, tmp_path / "run", spikes=SPIKES)
    # update 10 (from step 9) jumps; 3 updates back is 6, a multiple of 2; four batches go: 6, 7, 8, 9
    assert engine.seen == [*range(10), *range(10, 18)]
    straight = engine_of(source)
    wanted, _ = fit(straight, tmp_path / "straight", order=lambda step: step if step < 6 else step + 4)
    assert same(adapter, wanted) and result.rewinds == 1 and result.steps == STEPS
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (spike,) = [r for r in lines if r["split"] == "spike"]
    assert (spike["step"], spike["rewound_to"], spike["left_out"]) == (10, 6, [[6, 10]])
    assert spike["loss"] > 50 and spike["limit"] < 10 and spike["attempt"] == 1
    train = [r for r in lines if r["split"] == "train"]
    assert [r["step"] for r in train] == list(range(1, STEPS + 1))
    assert [r["attempt"] for r in train] == [1] * 6 + [2] * 8
    clean = {key: value for key, value in curve(tmp_path / "run").items() if key[0] == "train"}
    assert clean == curve(tmp_path / "straight")
    meta = json.loads((tmp_path / "run" / "state" / f"step-{STEPS}" / "state.json").read_text())
    assert meta["progress"]["skipped_ranges"] == [[6, 10]] and meta["data"] == {"step": STEPS, "batch": STEPS + 4}
    assert meta["progress"]["rewinds"] == [{"step": 10, "loss": spike["loss"], "limit": spike["limit"], "to": 6}]
    from flatshift.experiments.results.run import read_metrics as report_metrics

    assert [r["step"] for r in report_metrics(tmp_path / "run" / "metrics.jsonl").lines if r["split"] == "train"] == [
        r["step"] for r in train
    ]


@pytest.mark.parametrize(
    ("regularizer", "stop_at"),
    [
        (None, 6),
        *(pytest.param(None, step, marks=pytest.mark.slow) for step in (7, 9, 11)),
        (GGPO(sigma=0.05, refresh=3), 7),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_resumed_around_a_spike(stop_at, regularizer, source, tmp_path):
    def again(directory, **how):
        made = None if regularizer is None else build(regularizer)
        return fit(engine_of(source, jump={9, 12}), directory, regularizer=made, spikes=SPIKES, keep=1, **how)

    whole, result = again(tmp_path / "whole")
    assert result.rewinds == 2
    assert again(tmp_path / "run", stop_at=stop_at) is None
    resumed, result = again(tmp_path / "run")
    assert same(resumed, whole) and result.rewinds == 2
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_the_batches_of_a_second_spike_are_named(source, tmp_path):
    fit(engine_of(source, jump={5, 11}), tmp_path / "run", spikes=SPIKES, steps=8)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "back to step 2, without batches 2 to 5\n" in log and "back to step 4, without batches 8 to 11\n" in log


def test_a_kill_between_going_back_and_the_new_checkpoint_costs_time_only(source, tmp_path, monkeypatch):
    whole, _ = fit(engine_of(source, jump={9}), tmp_path / "whole", spikes=SPIKES)
    from flatshift.finetune.train.checkpointer import Checkpointer

    apply = Checkpointer._apply

    def killed(self, found):
        apply(self, found)
        raise SystemExit(9)

    monkeypatch.setattr(Checkpointer, "_apply", killed)
    with pytest.raises(SystemExit):
        fit(engine_of(source, jump={9}), tmp_path / "run", spikes=SPIKES)
    monkeypatch.undo()
    assert max(saved_steps(tmp_path / "run" / "state")) == 6
    resumed, result = fit(engine_of(source, jump={9}), tmp_path / "run", spikes=SPIKES)
    assert same(resumed, whole) and result.rewinds == 1


def test_newer_checkpoints_are_kept_if_no_older_one_is_valid(source, tmp_path):
    state = tmp_path / "run" / "state"

    class Damaging(SickEngine):
        def forward_backward(self, micros, count, **how):
            if micros[0].batch == 9:
                for step in (step for step in saved_steps(state) if step <= 6):
                    (state / f"step-{step}" / "state.safetensors").write_bytes(b"broken")
            return super().forward_backward(micros, count, **how)

    engine = engine_of(source, jump={9})
    engine.__class__ = Damaging
    with pytest.raises(Diverged, match="checkpoint of step 8 is kept"):
        fit(engine, tmp_path / "run", spikes=SPIKES)
    assert saved_steps(state) == [8]


def test_back_to_the_very_beginning_with_a_fresh_optimizer(source, tmp_path):
    spikes = dataclasses.replace(SPIKES, back=100)
    adapter, _ = fit(engine_of(source, jump={5}), tmp_path / "run", spikes=spikes)
    wanted, _ = fit(engine_of(source), tmp_path / "straight", order=lambda step: step + 6)
    assert same(adapter, wanted)


def test_enough_is_enough_and_no_numbers_are_spikes_too(source, tmp_path):
    once = dataclasses.replace(SPIKES, most=1)
    with pytest.raises(Diverged, match=r"loss at step 5, .* is a spike above .*went back 1 times.*step 4 is kept"):
        fit(engine_of(source, jump=set(range(8, 40))), tmp_path / "jump", spikes=once)
    assert json.loads((tmp_path / "jump" / "state" / "step-4" / "state.json").read_text())["data"]["batch"] == 9
    adapter, result = fit(engine_of(source, nan={9}), tmp_path / "nan", spikes=SPIKES)
    wanted, _ = fit(engine_of(source), tmp_path / "straight", order=lambda step: step if step < 6 else step + 4)
    assert same(adapter, wanted) and result.rewinds == 1 and result.skipped == 0


# ---------------------------------------------------------------- the functions


def test_batch_index_is_the_stepth_that_is_left():
    left_out: list[list[int]] = []
    for first, stop in [(6, 10), (12, 13), (8, 14), (3, 5), (14, 15)]:
        left_out = merge_skipped_ranges(left_out, first, stop)
        gone = {i for low, high in left_out for i in range(low, high)}
        rest = [i for i in range(60) if i not in gone]
        assert [batch_index(step, left_out) for step in range(30)] == rest[:30]
    assert left_out == [[3, 5], [6, 15]]


def test_the_limit_is_robust():
    spikes = SpikeRecovery(window=5, threshold=3.0)
    assert spike_limit([1.0] * 4, spikes) == math.inf
    losses = [1.0, 1.2, 0.9, 1.1, 40.0]
    deviations = [abs(loss - 1.1) for loss in losses]
    assert spike_limit(losses, spikes) == pytest.approx(1.1 + 3 * 1.4826 * statistics.median(deviations))
    assert spike_limit([2.0] * 5, spikes) == pytest.approx(2.06)


def test_the_way_back_depends_on_regular_checkpoints_only():
    spikes = SpikeRecovery(back=5)
    assert [rollback_step(step, spikes, 4) for step in (0, 8, 9, 12, 13, 17)] == [0, 0, 4, 4, 8, 12]


def test_spikes_need_checkpoints():
    with pytest.raises(ValueError, match="spikes need checkpoints"):
        Train(spikes=SpikeRecovery(), save_every=0)
