"""Killed and resumed ends with the same bits as never stopped: at any step, with every kind of state there is."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch

from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.example import Example
from flatshift.finetune.data.mixture import Mixture
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import read_metrics
from flatshift.finetune.tasks import Completion
from flatshift.finetune.train import checkpointer
from flatshift.finetune.train.checkpointer import checkpoint_steps as saved_steps
from flatshift.regularizers import GGPO, Plain, build
from tests.support.finetune_models import IGNORED, save_backbone
from tests.support.stage_runs import run_or_stop

TASK = Completion(pack=True)
STEPS = 14
MIXTURE = Mixture(("a", "b", "c"), (0.5, 0.3, 0.2), (17, 4, 9))


def examples(count, seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = int(torch.randint(4, 14, (1,), generator=generator))
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        made.append(Example(input_ids=ids, labels=[IGNORED] * 2 + ids[2:], id=str(index), where=f"f:{index}"))
    return made


def train(source, directory, *, regularizer=None, dropout=0.0, precision="fp32", stop_at=None, task=TASK, **data):
    """One attempt; returns the adapter's bytes, or None if it was stopped after `stop_at`."""
    model = attach_adapter(
        load_backbone(source, task=task, precision=precision), Adapter(rank=4, dropout=dropout), task=task, seed=0
    )
    adapter = run_or_stop(
        model,
        directory,
        stop_at=stop_at,
        task=task,
        batches=TrainingDataLoader(
            examples(30, 1), task=task, batch_size=2, accumulate=2, seed=0, max_length=24, pad_id=0, **data
        ),
        dev=examples(6, 2),
        optimizer=Optimizer(lr=1e-2, weight_decay=0.01),
        train=Train(steps=STEPS, eval_every=3, save_every=4, precision=precision, max_length=24),
        regularizer=build(regularizer or Plain()),
    )
    return None if adapter is None else adapter_bytes(directory)


def adapter_bytes(directory):
    return (directory / "stages" / "fine-tune" / "adapter" / "adapter_model.safetensors").read_bytes()


def curve(directory):
    lines = read_metrics(directory / "metrics.jsonl")
    return {(r["split"], r["step"]): (r["loss"], r["tokens"], r.get("lr"), r.get("grad_norm")) for r in lines}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {kind: save_backbone(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "gpt2-dropout")}


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory):
    """The adapter of a run that was never stopped."""
    return train(sources["llama"], tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("stops", [(3, 13), pytest.param((1, 7), marks=pytest.mark.slow)], ids=["late", "early"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("llama", {"regularizer": GGPO(refresh=5, schedule="cosine")}),
        pytest.param(
            "llama", {"regularizer": GGPO(refresh=5), "precision": "bf16", "dropout": 0.1}, marks=pytest.mark.bf16
        ),
        ("gpt2-dropout", {"dropout": 0.1}),
        pytest.param("llama", {"mixture": MIXTURE}, marks=pytest.mark.slow),
        ("llama", {"mixture": MIXTURE, "task": Completion(pack=False), "group": "length"}),
    ],
)
def test_stopped_anywhere_and_resumed_gives_the_same_bits_and_the_same_curve(kind, settings, stops, sources, tmp_path):
    whole = train(sources[kind], tmp_path / "whole", **settings)
    for stop_at in stops:
        directory = tmp_path / f"stopped-{stop_at}"
        assert train(sources[kind], directory, stop_at=stop_at, **settings) is None
        assert train(sources[kind], directory, **settings) == whole, stop_at
        assert curve(directory) == curve(tmp_path / "whole"), stop_at


def test_a_damaged_newest_checkpoint_costs_steps_but_no_bits(sources, whole, tmp_path):
    directory = tmp_path / "damaged"
    assert train(sources["llama"], directory, stop_at=9) is None
    assert saved_steps(directory / "state") == [9, 8]
    weights = directory / "state" / "step-9" / "state.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert train(sources["llama"], directory) == whole
    assert "step-9 is damaged" in (directory / "log.txt").read_text()
    assert "continues after step 8" in (directory / "log.txt").read_text()
    last = read_metrics(directory / "metrics.jsonl")
    assert {r["step"]: r["attempt"] for r in last if r["split"] == "train"}[9] == 2


def test_all_checkpoints_lost_starts_again_and_ends_the_same(sources, whole, tmp_path):
    assert train(sources["llama"], tmp_path / "lost", stop_at=9) is None
    shutil.rmtree(tmp_path / "lost" / "state")
    assert train(sources["llama"], tmp_path / "lost") == whole


def killed_at(place, source, directory):
    """Train in this process, which ends itself at the second save: after the weights, before their record is written,
    before the rename, or before the check of what was written."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def second(before, call):
        count = [0]

        def wrapped(*arguments, **keywords):
            count[0] += 1
            if count[0] == 2 and before:
                die()
            result = call(*arguments, **keywords)
            if count[0] == 2:
                die()
            return result

        return wrapped

    def replace(self, target, original=Path.replace):
        if Path(target).name == "step-8":
            die()
        return original(self, target)

    if place == "tensors":
        safetensors.torch.save_file = second(False, safetensors.torch.save_file)
    elif place == "json":
        checkpointer.write_json = second(True, checkpointer.write_json)
    elif place == "rename":
        Path.replace = replace
    elif place == "verify":
        checkpointer.read_checkpoint = second(True, checkpointer.read_checkpoint)
    train(source, directory)


@pytest.mark.parametrize("place", ["tensors", "json", "rename", "verify"])
def test_kill_minus_nine_inside_save_and_rename(place, sources, whole, tmp_path):
    """In a forked child, at the four places where a save can be cut."""
    directory = tmp_path / place
    child = multiprocessing.get_context("fork").Process(target=killed_at, args=(place, sources["llama"], directory))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert saved_steps(directory / "state") == ([8, 4] if place == "verify" else [4])
    assert train(sources["llama"], directory) == whole, place
    assert not [p for p in directory.rglob(".*.tmp")]
