"""Recipes from torchtune's own config files: the recipe in full, what is reported, and one that trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatshift.cli import run
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.translate import translate_recipe
from tests.support.data_models import write_jsonl

CONFIGS = Path(__file__).resolve().parents[2] / "support" / "torchtune"
ATTENTION, MLP = ["q_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
WARMUP = "lr_scheduler.num_warmup_steps: {} (optimizer.warmup is a fraction of the steps, which are not known here)"
COMMON = """\
data: {train: {files: ["hub:yahma/alpaca-cleaned:train"]}, dev: {files: []}, test: {files: []}, holdout: 0.0}
optimizer: {kind: adamw, schedule: cosine, warmup: 0.0, weight_decay: 0.01, clip: null, lr: 3e-4}
train: {epochs: 1, batch_size: 2, accumulate: 8, precision: bf16, checkpointing: full, compile: false, eval_every: 0,
  seed: 42}
task: {pack: false}
"""
EXPECTED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama3_1_8B_lora_single_device": (
        "extends: instruction\n" + COMMON,
        {
            "backbone": "/tmp/Meta-Llama-3.1-8B-Instruct/",
            "adapter": {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": ATTENTION + MLP},
        },
        [WARMUP.format(100)],
    ),
    "llama2_7B_qlora_single_device": (
        "extends: instruction\n" + COMMON,
        {
            "backbone": "/tmp/Llama-2-7b-hf",
            "adapter": {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": ATTENTION + MLP},
            "train.quantization": "nf4-double",
        },
        [WARMUP.format(100)],
    ),
    "phi3_mini_lora_single_device": (
        "extends: instruction\n" + COMMON,
        {
            "backbone": "/tmp/Phi-3-mini-4k-instruct",
            "adapter": {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": "all-linear"},
        },
        [
            "model.lora_attn_modules (phi's files join some of them: adapter.targets is all-linear instead)",
            WARMUP.format(100),
        ],
    ),
    "qwen3_0.6B_lora": (
        "extends: instruction\n" + COMMON,
        {
            "backbone": "/tmp/Qwen3-0.6B",
            "adapter": {"rank": 32, "alpha": 64, "dropout": 0.0, "targets": ATTENTION + MLP},
            "optimizer.lr": 1e-4,
            "train.checkpointing": "none",
        },
        [WARMUP.format(100)],
    ),
    "gemma_2B_lora": (
        "extends: instruction\n" + COMMON,
        {
            "backbone": "/tmp/gemma-2b/",
            "adapter": {"rank": 64, "alpha": 128, "dropout": 0.0, "targets": ATTENTION + MLP},
            "data.holdout": 0.05,
            "data.holdout_splits": ["dev"],
            "optimizer.lr": 2e-5,
            "train.batch_size": 4,
            "train.accumulate": 1,
            "eval.batch_size": 4,
        },
        [WARMUP.format(10)],
    ),
    "llama2_7B_lora_dpo": (
        "extends: preference\n" + COMMON,
        {
            "backbone": "/tmp/Llama-2-7b-hf",
            "adapter": {"rank": 8, "alpha": 16, "dropout": 0.0, "targets": ATTENTION + MLP},
            "task": {"chat": True, "answer": "{answer}", "loss": "dpo", "beta": 0.1, "label_smoothing": 0.0},
            "data.train.files": ["hub:lvwerra/stack-exchange-paired:train"],
            "optimizer.lr": 5e-4,
            "optimizer.weight_decay": 0.05,
            "optimizer.warmup": 0.1,
            "train.batch_size": 4,
            "train.max_length": 1024,
            "train.steps": 1000,
            "train.epochs": None,
        },
        [
            "dataset._component_: torchtune.datasets.stack_exchange_paired_dataset (rename its columns response_j and "
            "response_k to chosen and rejected)"
        ],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_config_of_torchtune_is_the_expected_recipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common, own, unknown = EXPECTED[name]
    assert run(["recipes", "from", str(CONFIGS / f"{name}.yaml"), "--out", "mine.yaml"]) == 1
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.split(": ", 1)[1] for line in lines] == unknown
    for line in lines:  # FILE:LINE of the key
        number = int(line.split(": ", 1)[0].rpartition(":")[2])
        text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[number - 1]
        assert text.strip().startswith(line.split(": ", 1)[1].partition(" ")[0].rpartition(".")[2].rstrip(":"))
    expected = yaml.safe_load(common)
    for key, value in own.items():
        *above, last = key.split(".")
        place = expected
        for block in above:
            place = place.setdefault(block, {})
        place[last] = value
    (tmp_path / "expected.yaml").write_text(yaml.safe_dump(expected), encoding="utf-8")
    assert load_recipe("mine.yaml").recipe == load_recipe("expected.yaml").recipe


@pytest.mark.parametrize("name", EXPECTED)
def test_no_key_of_torchtune_is_dropped_silently(name: str, tmp_path: Path) -> None:
    """Every key is a setting, a note or unknown: another name for it is reported as unknown."""
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").replace("${batch_size}", "4")
    file = tmp_path / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    whole = translate_recipe(file)
    for key in ("batch_size", "dtype", "clip_grad_norm", "log_level", "enable_activation_offloading", "shuffle"):
        changed = text.replace(f"\n{key}: null", f"\n{key}: 1.0")
        if f"\n{key}:" not in text:
            continue
        file.write_text(changed.replace(f"\n{key}:", f"\n{key}_:"), encoding="utf-8")
        assert any(f" {key}_: " in line for line in translate_recipe(file).unknown), key
    notes = "\n".join(whole.notes)
    for key in ("output_dir", "tokenizer.path", "checkpointer.checkpoint_files", "optimizer.fused", "profiler"):
        assert f"{key}: " in notes or key not in text, key


ROWS = [{"question": f"Count to {n}.", "answer": " ".join(map(str, range(n)))} for n in range(2, 22)]
QUICK = [
    *("--train.batch_size", "2", "--train.accumulate", "1", "--train.precision", "fp32", "--train.threads", "1"),
    *("--train.peak_tflops", "1", "--train.max_cut", "1", "--eval.bootstrap", "10", "--eval.cold", "0"),
    *("--train.checkpointing", "none"),
]


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The config of Llama 3.1 8B on rows of the user's and a small backbone."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    config: dict[str, Any] = yaml.safe_load((CONFIGS / "llama3_1_8B_lora_single_device.yaml").read_text())
    config["checkpointer"]["checkpoint_dir"] = "flatshift-5m"
    config["tokenizer"]["max_seq_len"] = 64
    config["dataset"] = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "source": "json",
        "data_files": "rows.jsonl",
        "column_map": {"input": "question", "output": "answer"},
        "new_system_prompt": "Count.",
        "train_on_input": False,
    }
    return config


def test_a_length_that_torchtune_leaves_open_is_a_note(llama: dict[str, Any], tmp_path: Path) -> None:
    for length, count in ((None, 1), (64, 0)):
        changed = llama | {"tokenizer": llama["tokenizer"] | {"max_seq_len": length}}
        (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
        notes = translate_recipe(tmp_path / "theirs.yaml").notes
        assert sum(note.startswith("tokenizer.max_seq_len: train.max_length is that of") for note in notes) == count


def test_a_config_of_torchtune_trains(llama: dict[str, Any], tmp_path: Path) -> None:
    llama |= {"max_steps_per_epoch": 2, "epochs": 2, "lr_scheduler": llama["lr_scheduler"] | {"num_warmup_steps": 1}}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(llama, sort_keys=False), encoding="utf-8")
    assert run(["recipes", "from", "theirs.yaml", "--out", "mine.yaml"]) == 0
    recipe = load_recipe("mine.yaml").recipe
    assert (recipe.train.steps, recipe.optimizer.warmup, recipe.train.max_length) == (4, 0.25, 64)
    assert (recipe.task.kind, recipe.task.system, recipe.task.pack) == ("chat", "Count.", False)
    assert run(["train", "mine.yaml", *QUICK, "--out", "run"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == 4 and losses[-1] < losses[0]
    settings = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert set(settings["target_modules"]) == {*ATTENTION, *MLP} and settings["r"] == 8


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"dataset": {"_component_": "torchtune.datasets.text_completion_dataset", "source": "text",
                      "data_files": "a.txt", "column": "page"}}, "data.columns.text", "page"),
        ({"dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "org/talk", "split": "dev",
                      "conversation_column": "talk", "conversation_style": "sharegpt"}},
         "data.train.files", ["hub:org/talk:dev"]),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": 1e-3}},
         "optimizer.kind", "paged-adamw-8bit"),
        ({"dataset": {"_component_": "torchtune.datasets.instruct_dataset", "source": "json",
                      "data_files": "rows.jsonl", "column_map": {"output": "answer", "input": "question"}}},
         "data.train.files", ["rows.jsonl"]),
        ({"clip_grad_norm": 1.0}, "optimizer.clip", 1.0),
        ({"metric_logger": {"_component_": "torchtune.training.metric_logging.WandBLogger", "project": "zoo"}},
         "tracker", {"kinds": ["wandb"], "project": "zoo"}),
        ({"batch_size_val": "${batch_size}"}, "eval.batch_size", 2),
        ({"output_dir": "/mine", "checkpointer": {"checkpoint_dir": "${output_dir}/llama", "model_type": "LLAMA3"}},
         "backbone", "/mine/llama"),
        ({"output_dir": "/mine", "dataset": {"_component_": "torchtune.datasets.instruct_dataset", "source": "json",
                                             "data_files": "${output_dir}/${batch_size}.jsonl"}},
         "data.train.files", ["/mine/2.jsonl"]),
        ({"device": "cpu"}, "train.device", "cpu"),
    ],
)  # fmt: skip
def test_a_key_of_torchtune_becomes_the_setting(
    llama: dict[str, Any], tmp_path: Path, changes: dict[str, Any], key: str, value: object
) -> None:
    del llama["lr_scheduler"]
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(llama | changes, sort_keys=False), encoding="utf-8")
    translated = translate_recipe(tmp_path / "theirs.yaml")
    place: Any = translated.recipe
    for name in key.split("."):
        place = place[name]
    assert place == value and translated.unknown == ()
    assert translated.recipe["optimizer"]["schedule"] == "constant"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": {"_component_": "torchtune.models.llama3.llama3_8b"}},
         "model._component_: torchtune.models.llama3.llama3_8b (full fine-tuning has no counterpart"),
        ({"optimizer_in_bwd": True}, "optimizer_in_bwd: true"),
        ({"dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "train_on_input": True}},
         "dataset.train_on_input: true (answers alone are trained on)"),
        ({"dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "split": "train[:10%]"}},
         "dataset.split: train[:10%] (a hub data set is read whole; data.train.first caps it)"),
        ({"dataset": {"_component_": "torchtune.datasets.preference_dataset", "source": "org/pairs",
                      "column_map": {"chosen": "good", "rejected": "bad"}}},
         "dataset.column_map (rename the columns to input and output, or to chosen and rejected)"),
        ({"dataset": {"_component_": "torchtune.datasets.instruct_dataset", "source": "org/asked",
                      "column_map": {"output": "question", "input": "answer"}}}, "dataset.column_map (rename"),
        ({"dataset": {"_component_": "my.own_dataset"}}, "dataset._component_: my.own_dataset"),
    ],
)  # fmt: skip
def test_what_of_torchtune_has_no_counterpart_is_reported(
    llama: dict[str, Any], tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    del llama["lr_scheduler"]
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(llama | changes, sort_keys=False), encoding="utf-8")
    (unknown,) = translate_recipe(tmp_path / "theirs.yaml").unknown
    assert unknown.split(": ", 1)[1].startswith(line)
