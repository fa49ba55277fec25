"""An encoder-decoder on a mesh: updates, judging and answers are those of one process, also by the public command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flatshift.cli import run
from tests.support import warm_commands
from tests.support.data_models import text_rows, write_jsonl
from tests.support.distributed_ranks import run_ranks
from tests.support.mesh_updates import few_updates
from tests.support.seq2seq_models import TOKENIZER, save_encoder_decoder

STEPS = 4
MESHES: dict[str, dict[str, Any]] = {
    "dp 2": {"dp": 2},
    "replicate 2": {"replicate": 2},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "pp 2, four stages": {"pp": 2, "schedule": "interleaved"},
}


def curve(source: str, mesh: Any) -> dict[str, Any]:
    """Losses, first gradients, document surprise and greedy answers of a few updates on `mesh`, on every rank."""
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.config import Adapter, Evaluate, Train
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.evaluate.answers import generate_answers
    from flatshift.finetune.evaluate.evaluator import evaluate
    from flatshift.finetune.parallel.build import build_engine
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.tasks import Seq2Seq

    task, cpu = Seq2Seq(score="generate", max_new_tokens=4), torch.device("cpu")
    world = ProcessMesh.alone(cpu) if mesh.size == 1 else ProcessMesh.of(mesh, cpu)
    train = Train(batch_size=4, max_length=24, device="cpu")
    engine = build_engine(source, task=task, adapter=Adapter(rank=4), train=train, mesh=mesh, world=world)
    generator = torch.Generator().manual_seed(1)
    start = engine.full_tensors(engine.parameters)
    alive = {name: torch.randn(t.shape, generator=generator) * 0.1 for name, t in sorted(start.items())}
    engine.load_full_tensors(alive, engine.parameters, context="test")
    examples = encode(text_rows(30), task=task, tokenizer=TOKENIZER, max_length=24, decoder_start=0).examples
    batches = TrainingDataLoader(
        examples, task=task, batch_size=4, accumulate=2, seed=0, max_length=24, pad_id=0, share=engine.share
    )
    losses, first = few_updates(engine, batches, task, STEPS)
    some, judged, share = examples[:7], engine.eval_model, engine.evaluation
    inference = EvalBatching.of(TOKENIZER, batch_size=3, share=share)
    figures = evaluate(judged, TOKENIZER, some, task=task, config=Evaluate(bootstrap=10), inference=inference)
    with evaluation_mode(judged):
        answers = generate_answers(judged, TOKENIZER, some, inference, max_new_tokens=4)
    return {"losses": losses, "first": first, "loss": figures["loss"]["value"], "answers": answers}


def all_meshes(source: str) -> dict[str, dict[str, Any]]:
    """`curve` on each of the meshes, one after the other, in the same processes."""
    from flatshift.finetune.config import Mesh

    return {name: curve(source, Mesh(**axes)) for name, axes in MESHES.items()}


def test_every_mesh_trains_judges_and_answers_as_one_process(tmp_path: Path) -> None:
    from flatshift.finetune.config import Mesh

    torch.set_num_threads(1)
    source = str(save_encoder_decoder("t5-gated", tmp_path))
    alone = curve(source, Mesh())
    assert len(set(alone["answers"])) > 1
    for rank, found in enumerate(run_ranks(all_meshes, 2, source)):
        for name, ours in found.items():
            where = (rank, name)
            assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-6), where
            assert ours["first"].keys() == alone["first"].keys(), where
            for key, gradient in alone["first"].items():
                assert (ours["first"][key] - gradient).norm() <= 1e-5 * gradient.norm(), (where, key)
            assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-6), where
            assert ours["answers"] == alone["answers"], where


@pytest.mark.slow
def test_the_public_command_on_one_process_and_on_two(tmp_path: Path, capsys) -> None:
    source = save_encoder_decoder("t5-gated", tmp_path / "backbone")
    rows = write_jsonl(tmp_path / "rows.jsonl", [row.values | {"label": "good"} for row in text_rows(60)])
    recipe = tmp_path / "t5.yaml"
    recipe.write_text(
        f"backbone: {source}\n"
        "task: {kind: seq2seq, prompt: 'say: {text}', target: '{label}', score: generate, max_new_tokens: 4}\n"
        f"data: {{train: {{files: [{rows}]}}, holdout: 0.1}}\n"
        "optimizer: {lr: 1e-2, eps: 1e-6, schedule: constant}\n"
        "train: {steps: 20, batch_size: 4, max_length: 24, max_cut: 1, eval_every: 10, device: cpu, precision: fp32}\n"
        "eval: {bootstrap: 20, train_limit: 10}\n",
        encoding="utf-8",
    )
    found = {}
    assert run(["train", str(recipe), "--out", str(tmp_path / "one")]) == 0
    done = warm_commands.flatshift("train", str(recipe), "--out", str(tmp_path / "two"), "--mesh.dp", "2")
    for name, said in (("one", "".join(capsys.readouterr())), ("two", done.stdout + done.stderr)):
        out = tmp_path / name
        assert "→ ⟦good<eos>⟧" in said
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        config = json.loads((out / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
        assert config["task_type"] == "SEQ_2_SEQ_LM"
        found[name] = ([line["loss"] for line in lines], json.loads((out / "eval.json").read_text(encoding="utf-8")))
    (ours, judged), (theirs, again) = found["two"], found["one"]
    assert len(ours) == 22 and max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 3e-5
    assert theirs[-1] < theirs[0] / 3
    assert again["test"]["exact_match"]["value"] == judged["test"]["exact_match"]["value"] == 1.0
