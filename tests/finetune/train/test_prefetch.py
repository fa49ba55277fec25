"""Batches made ahead: the same tensors in the same order, waited for where they are used, and no thread left behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.masking import Masking
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, MaskedLM
from flatshift.finetune.train import prefetch
from flatshift.finetune.train.prefetch import Prefetcher, with_prefetch
from tests.support.data_models import bert_tokenizer, byte_tokenizer, text_rows
from tests.support.finetune_models import save_backbone
from tests.support.stage_runs import run_or_stop

CPU = torch.device("cpu")
BERT, BYTES = bert_tokenizer(), byte_tokenizer()
BERT.mask_token = "[UNK]"  # the tiny one has no token of that kind


class FakeLane:
    """Copies that arrive only when they are waited for, and a list of what happened."""

    device = CPU

    def __init__(self, device=CPU):
        self.log: list[tuple[str, int]] = []
        self.sent = threading.Semaphore(0)

    def send(self, tensors):
        number = sum(kind == "send" for kind, _ in self.log)
        self.log.append(("send", number))
        there = {
            name: torch.full_like(t, -1) if not t.is_floating_point() else t * torch.nan for name, t in tensors.items()
        }
        self.sent.release()
        return tensors, there, (number, tensors)

    def join(self, tensors, token):
        number, source = token
        self.log.append(("join", number))
        for name, tensor in tensors.items():
            tensor.copy_(source[name])


def batches_of(task, **options):
    tokenizer = BERT if isinstance(task, Classify | MaskedLM) else BYTES
    examples = encode(text_rows(37), task=task, tokenizer=tokenizer, max_length=48).examples
    masking = Masking.of(task, tokenizer) if isinstance(task, MaskedLM) else None
    settings = {"batch_size": 4, "accumulate": 2, "seed": 5, "max_length": 48, "pad_id": 0, "masking": masking}
    return TrainingDataLoader(examples, task=task, **{**settings, **options})


def no_thread_left():
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("batches") for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def same(one, other):
    assert (one.rows, one.samples, one.supervised) == (other.rows, other.samples, other.supervised)
    assert one.inputs.keys() == other.inputs.keys() and torch.equal(one.labels, other.labels)
    assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)
    assert (one.padded, one.real) == (other.padded, other.real) and (one.chosen is None) == (other.chosen is None)
    assert one.chosen is None or torch.equal(one.chosen, other.chosen)


@pytest.mark.parametrize(
    "task",
    [LanguageModel(pack=False), LanguageModel(pack=True), Completion(pack=True), Classify(), MaskedLM()],
    ids=repr,
)
def test_the_same_batches_in_the_same_order_whatever_is_asked(task):
    plain, ahead = batches_of(task), Prefetcher(batches_of(task), FakeLane())
    assert ahead.packed == plain.packed
    # one after the other, twice (two passes over one batch), back, and a leap (left out after a spike)
    for step in (0, 1, 2, 2, 3, 0, 9, 10, 11, 5):
        assert ahead.supervised(step) == plain.supervised(step)
        for mine, theirs in zip(ahead.at(step), plain.at(step), strict=True):
            same(mine, theirs)  # what stays in host memory
            same(mine.to(CPU), theirs)  # and what arrives
            same(mine.to("cpu"), theirs)
        assert len(ahead._steps) <= 2
    ahead.close()
    assert no_thread_left()


def test_the_next_update_is_sent_while_this_one_computes_and_waited_for_where_it_is_used():
    lane = FakeLane()
    ahead = Prefetcher(batches_of(LanguageModel()), lane)
    first = ahead.at(0)
    for _ in range(4):  # two micro-batches of update 0 and, unasked, two of update 1
        assert lane.sent.acquire(timeout=30)
    assert lane.log == [("send", n) for n in range(4)]
    assert all((t == -1).all() for micro in first for t in micro.on_device.values()), "nothing has arrived unasked"
    for micro in first:
        micro.to(CPU)
    assert lane.log[4:] == [("join", 0), ("join", 1)]
    second = ahead.at(1)
    for micro in second:
        micro.to(CPU)
    assert ("join", 2) in lane.log and ("join", 3) in lane.log
    assert not lane.sent.acquire(timeout=0.2) or len([e for e in lane.log if e[0] == "send"]) <= 6
    ahead.close()


def test_another_device_gets_a_copy_of_its_own():
    ahead = Prefetcher(batches_of(LanguageModel()), FakeLane())
    (micro, _) = ahead.at(0)
    assert micro.to("meta").labels.is_meta and ("join", 0) not in ahead._transfer.log
    ahead.close()


class Broken:
    packed, max_length = False, 48

    def __init__(self, source, breaks_at):
        self.source, self.breaks_at = source, breaks_at

    def at(self, step):
        if step == self.breaks_at:
            raise OSError(f"row of step {step}")
        return self.source.at(step)

    def supervised(self, step):
        return self.source.supervised(step)


def test_an_error_is_raised_where_its_step_is_asked_for():
    ahead = Prefetcher(Broken(batches_of(LanguageModel()), 2), FakeLane())
    ahead.at(0)
    ahead.at(1)  # begins step 2, which fails unseen
    with pytest.raises(OSError, match="row of step 2"):
        ahead.at(2)
    ahead.at(3)
    ahead.close()
    assert no_thread_left()


def test_a_cpu_asks_its_batches_itself():
    batches, said = batches_of(LanguageModel()), []
    for device in (CPU, torch.device("meta")):
        engine = Engine(torch.nn.Linear(1, 1), ProcessMesh.alone(device))
        with with_prefetch(batches, engine, train=Train(), log=said.append) as source:
            assert source is batches
    assert not said


def test_a_pipeline_asks_its_batches_itself(rehearsed):
    batches, said = batches_of(LanguageModel()), []
    engine = Engine(torch.nn.Linear(1, 1), ProcessMesh.alone(CPU))
    engine.runner = object()
    with with_prefetch(batches, engine, train=Train(), log=said.append) as source:
        assert source is batches
    assert not rehearsed and not said


@pytest.fixture
def rehearsed(monkeypatch):
    """The CPU taken for a CUDA device by the prefetch alone."""
    lanes = []
    monkeypatch.setattr(prefetch, "is_cuda", lambda device: True)
    monkeypatch.setattr(prefetch, "CudaTransfer", lambda device: lanes.append(FakeLane()) or lanes[-1])
    return lanes


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_backbone("llama", tmp_path_factory.mktemp("llama"), vocab_size=len(BYTES))


def stage(source, directory, **options):
    model = attach_adapter(load_backbone(source, task=LanguageModel()), Adapter(rank=2), task=LanguageModel(), seed=0)
    settings = {"task": LanguageModel(), "optimizer": Optimizer(lr=1e-2), "train": Train(steps=6, threads=1)}
    batches = options.pop("batches", None) or batches_of(LanguageModel())
    adapter = run_or_stop(model, directory, batches=batches, **settings, **options)
    return adapter and {name: p.detach().clone() for name, p in trainable(model).items()}


def test_a_stage_ends_with_the_same_bits_also_after_a_stop(tmp_path, source, rehearsed, monkeypatch):
    ahead = stage(source, tmp_path / "ahead")
    assert stage(source, tmp_path / "stopped", stop_at=3) is None and no_thread_left()
    resumed = stage(source, tmp_path / "stopped")
    assert len(rehearsed) == 3 and all(("join", 0) in lane.log for lane in rehearsed)
    monkeypatch.undo()
    plain = stage(source, tmp_path / "plain")
    for found in (ahead, resumed):
        assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert no_thread_left()


def test_a_stage_that_fails_leaves_no_thread(tmp_path, source, rehearsed):
    with pytest.raises(OSError, match="row of step 2"):
        stage(source, tmp_path / "run", batches=Broken(batches_of(LanguageModel()), 2))
    assert rehearsed and no_thread_left()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_the_copies_arrive():
    device = torch.device("cuda")
    plain, engine = batches_of(LanguageModel(pack=False)), Engine(torch.nn.Linear(1, 1), ProcessMesh.alone(device))
    with with_prefetch(batches_of(LanguageModel(pack=False)), engine, train=Train(), log=lambda line: None) as ahead:
        for step in range(20):
            for mine, theirs in zip(ahead.at(step), plain.at(step), strict=True):
                assert mine.labels.is_pinned()
                there = mine.to(device)
                assert there.labels.is_cuda and torch.equal(there.labels.cpu(), theirs.labels)
                assert torch.equal(there.inputs["input_ids"].cpu(), theirs.inputs["input_ids"])
