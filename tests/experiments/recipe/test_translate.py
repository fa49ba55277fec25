"""Recipes from the YAML of axolotl and LLaMA-Factory: the resolved recipe in full, every key, and two steps of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatshift.cli import run
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.translate import translate_recipe
from flatshift.finetune.data.chat.template import list_shipped_templates
from flatshift.finetune.errors import UserError
from tests.support.data_models import write_jsonl

AXOLOTL = """\
base_model: flatshift-5m
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: rows.jsonl
    ds_type: json
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
lora_model_dir:
sequence_len: 1024
sample_packing: true
eval_sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
wandb_project: zoo
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-4
max_grad_norm: 0
adam_beta2: 0.95
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.01
special_tokens:
  pad_token: "<pad>"
  eos_token: "<eos>"
"""
EXPECTED = """\
extends: instruction
backbone: flatshift-5m
task: {pack: true}
data: {holdout: 0.1, holdout_splits: [dev], train: {files: [rows.jsonl]}}
adapter: {rank: 16, alpha: 32, dropout: 0.05, targets: all-linear}
optimizer: {kind: adamw, lr: 2e-4, schedule: cosine, warmup: 0.1, weight_decay: 0.01, clip: null, betas: [0.9, 0.95]}
train: {epochs: 2, batch_size: 2, accumulate: 4, max_length: 1024, checkpointing: full, eval_every: 0.125, seed: 42,
  overlong: drop, max_dropped: 1}
tracker: {kinds: [wandb], project: zoo}
"""
FACTORY = """\
### model
model_name_or_path: flatshift-5m
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
### dataset
dataset: mine
dataset_dir: DATA
template: llama3
cutoff_len: 256
max_samples: 16
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
max_steps: 8
lr_scheduler_type: cosine
warmup_steps: 2
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
neftune_noise_alpha: 3
### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 5
deepspeed: ds_z3.json
"""
EXPECTED_FACTORY = """\
extends: chat
backbone: flatshift-5m
task: {pack: false}
data: {holdout: 0.1, holdout_splits: [dev], train: {files: [DATA/rows.jsonl], first: 16}}
adapter: {rank: 8, targets: [q_proj, v_proj], dropout: 0.0}
optimizer: {lr: 1e-4, schedule: cosine, warmup: 0.25}
train: {steps: 8, batch_size: 1, accumulate: 8, max_length: 256, checkpointing: full, eval_every: 5, save_every: 500,
  precision: bf16, seed: 42}
eval: {batch_size: 1}
regularizer: {kind: neftune, alpha: 3}
"""
ROWS = [{"instruction": f"Count to {n}.", "input": "", "output": " ".join(map(str, range(n)))} for n in range(2, 22)]
QUICK = [
    *("--train.steps", "2", "--train.batch_size", "2", "--train.accumulate", "1", "--train.max_length", "64"),
    *("--train.precision", "fp32", "--train.threads", "1", "--train.peak_tflops", "1", "--train.eval_every", "0"),
    *("--train.max_cut", "1", "--eval.bootstrap", "10", "--eval.cold", "0", "--tracker.kinds", "[]"),
]


FORM = "its value is not of the form that the tool takes"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": "rows.jsonl"}}', encoding="utf-8")
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL, encoding="utf-8")
    (tmp_path / "factory.yaml").write_text(FACTORY.replace("DATA", str(tmp_path)), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("name", "expected"), [("axolotl", EXPECTED), ("factory", EXPECTED_FACTORY)])
def test_the_resolved_recipe_is_the_expected_one_and_trains(
    home: Path, name: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["recipes", "from", f"{name}.yaml", "--out", "mine.yaml"]) == 1  # some keys have no counterpart
    assert capsys.readouterr().out == "mine.yaml\n"
    (home / "expected.yaml").write_text(expected.replace("DATA", str(home)), encoding="utf-8")
    assert load_recipe("mine.yaml").recipe == load_recipe("expected.yaml").recipe
    assert run(["train", "mine.yaml", *QUICK, "--out", "run"]) == 0
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2]


@pytest.mark.parametrize("name", ["axolotl", "factory"])
def test_no_key_is_dropped_silently(home: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a key the recipe, the notes or the unknown keys are others."""
    file = home / f"{name}.yaml"
    whole = translate_recipe(file)
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    same_as_default = {  # or that nothing else is left without
        *("load_in_8bit", "load_in_4bit", "adapter", "bf16", "tf32", "lora_target_linear", "lora_model_dir"),
        *("optimizer", "lr_scheduler", "eval_strategy", "stage", "finetuning_type", "report_to", "lora_rank"),
        *("resume_from_checkpoint", "base_model", "model_name_or_path", "dataset_dir", "warmup_ratio"),
        "num_train_epochs",
    }  # fmt: skip
    for i, line in enumerate(lines):
        key = line.partition(":")[0]
        if line[0] in "# " or key in same_as_default or key in ("datasets", "special_tokens"):
            continue
        file.write_text("".join(lines[:i] + lines[i + 1 :]), encoding="utf-8")
        part = translate_recipe(file)
        text = "\n".join(part.unknown)
        assert part.recipe != whole.recipe or part.notes != whole.notes or f" {key}:" not in text, key
        assert (part.recipe, part.notes, len(part.unknown)) != (whole.recipe, whole.notes, len(whole.unknown)), key


def test_unknown_keys_are_listed_with_their_lines(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "from", "axolotl.yaml"]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("# Translated from axolotl.yaml of axolotl\n")
    assert "# output_dir: `flatshift train --out` names the run directory\n" in printed.out
    for note in ("eval_sample_packing: evaluation pads rows instead", "saves_per_epoch: a run resumes exactly"):
        assert f"# {note}" in printed.out
    assert printed.err.splitlines() == [
        "axolotl.yaml: these keys have no counterpart in a recipe and are left out:",
        "  axolotl.yaml:38: special_tokens (the backbone's tokenizer is taken as it is)",
    ]
    assert run(["recipes", "from", "factory.yaml", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["tool"] == "LLaMA-Factory" and document["recipe"]["train"]["steps"] == 8
    assert [line.split(": ")[1] for line in document["unknown"]] == ["deepspeed"]


def test_all_keys_known_is_exit_code_0(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "some.yaml").write_text(
        "base_model: flatshift-5m\nadapter: lora\nlearning_rate: 1e-4\nseed: 7\nsequence_len: 1_024\n"
        "loss_watchdog_threshold: 5.0\nspecial_tokens: {pad_token: <pad>}\n"
        "plugins: [axolotl.integrations.liger.LigerPlugin]\n",
        encoding="utf-8",
    )
    assert run(["recipes", "from", "some.yaml"]) == 0
    assert capsys.readouterr().err == ""
    assert run(["recipes", "from", "some.yaml", "--out", "some.yaml"]) == 2  # never over a file
    capsys.readouterr()
    assert run(["recipes", "from", "some.yaml", "--out", "some.yaml", "--json"]) == 2
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lr: 1\n",
            "some.yaml is of no known tool: axolotl's have base_model, LLaMA-Factory's model_name_or_path, torchtune's",
        ),
        ("base_model: flatshift-5m\nrl: grpo\n", "some.yaml:2: rl grpo has no recipe; sft, pt, dpo, ipo, kto"),
        ("base_model: flatshift-5m\nlora_r: many\n", "some.yaml:2: adapter.rank must be a whole number, got 'many'"),
        (
            "base_model: m\nadapter: lora\nnum_epochs: .inf\nwarmup_steps: 4\ndatasets: [{path: rows.jsonl}]\n",
            "some.yaml:3: train.epochs must be a finite number, got inf",
        ),
        (
            "base_model: flatshift-5m\nadapter: lora\nnum_epochs: '3'\nevals_per_epoch: 2\n",
            "some.yaml:3: train.epochs must be a number, got '3'",
        ),
        ("base_model: flatshift-5m\nlearning_rate: -1\n", "some.yaml:2: optimizer.lr must be ≥ 0"),
        ("- 1\n", "some.yaml:1: a recipe is a mapping"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_line(
    home: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "some.yaml").write_text(text, encoding="utf-8")
    assert run(["recipes", "from", "some.yaml"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("load_in_4bit: true", "train.quantization", "nf4-double"),
        ("adapter: qlora", "train.quantization", "nf4-double"),
        ("peft_use_dora: true", "adapter.dora", True),
        ("fp16: true", "train.precision", "fp16"),
        ("group_by_length: true", "train.group", "length"),
        ("optimizer: paged_adamw_8bit", "optimizer.kind", "paged-adamw-8bit"),
        ("max_steps: 30", "train.steps", 30),
        ("lora_modules_to_save: [embed_tokens]", "adapter.train_whole", ["embed_tokens"]),
        ("early_stopping_patience: 3", "train.patience", 3),
        ("warmup_steps: 0", "optimizer.warmup", 0.0),
        ("chat_template: chatml", "task.template", "chatml"),
        ("test_datasets: [{path: dev.jsonl}]", "data.dev.files", ["dev.jsonl"]),
        ("datasets: [{path: org/chats, name: small, split: dev}]", "data.train.files", ["hub:org/chats[small]:dev"]),
        ("rl: ipo", "task.loss", "ipo"),
        ("warmup_steps: 0.05", "optimizer.warmup", 0.05),
        ("warmup_ratio: 0.1\nwarmup_steps: 0", "optimizer.warmup", 0.1),
        ("warmup_steps: 0\nwarmup_ratio: 0.1", "optimizer.warmup", 0.1),
        ("fsdp: []\nfsdp_config: {}\nlora_target_modules: []", "adapter.targets", "all-linear"),
        ("lora_model_dir: runs/first/adapter", "adapter.start", "runs/first/adapter"),
        ("micro_batch_size: 2", "task.pack", False),
        ("warmup_ratio: 0.1\nlr_scheduler: constant", "optimizer.warmup", 0.0),
        ("lr_scheduler: constant\nwarmup_ratio: 0.1", "optimizer.warmup", 0.0),
        ("lr_scheduler: constant_with_warmup\nwarmup_ratio: 0.1", "optimizer.warmup", 0.1),
        ("lora_target_linear: true\nlora_target_modules: [q_proj]", "adapter.targets", "all-linear"),
        ("adam_beta1: 0.0", "optimizer.betas", [0.0, 0.999]),
        ('save_strategy: "no"\nsave_steps: 100', "train.save_every", 0),
        ("sample_packing: yes", "task.pack", True),
        ("sample_packing: no", "task.pack", False),
        ("gradient_checkpointing: yes", "train.checkpointing", "full"),
        ("torch_compile: on", "train.compile", True),
        ("save_strategy: no\nsave_steps: 100", "train.save_every", 0),
        ("max_steps: 1_000", "train.steps", 1000),
        ("excess_length_strategy: truncate", "train.overlong", None),
        ("excess_length_strategy: raise", "train.overlong", "refuse"),
        ("rl: simpo\ncpo_alpha: 0", "task.beta", 0.1),
        ("simpo_gamma: 1.4\nrl_beta: 2.5\nrl: simpo\ncpo_alpha: 0.0", "task.gamma", 1.4),
        ("simpo_gamma: 1.4\nrl_beta: 2.5\nrl: simpo\ncpo_alpha: 0.0", "task.beta", 2.5),
        ("rl_beta: 0.2\nrl: orpo", "task.odds_weight", 0.2),
        ("rl: orpo\norpo_alpha: 0.2", "task.odds_weight", 0.2),
        ("rl: kto\nkto_desirable_weight: 0.5", "task.desirable_weight", 0.5),
        ("rl: kto\nkto_undesirable_weight: 0.5", "task.undesirable_weight", 0.5),
        ("rl: dpo\ndpo_label_smoothing: 0.1", "task.label_smoothing", 0.1),
        ("peft_layers_to_transform: [0, 2]", "adapter.layers", [0, 2]),
        ("lora_target_linear: false\nlora_target_modules: [q_proj]", "adapter.targets", ["q_proj"]),
    ],
)
def test_a_key_becomes_the_setting(tmp_path: Path, line: str, key: str, value: object) -> None:
    file = tmp_path / "some.yaml"
    adapter = "" if line.startswith("adapter") else "adapter: lora\n"
    file.write_text(f"base_model: flatshift-5m\n{adapter}{line}\n", encoding="utf-8")
    translated = translate_recipe(file)
    place = translated.recipe
    for name in key.split("."):
        place = place[name]
    assert place == value and translated.unknown == ()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("base_model: flatshift-5m\n", ":1: adapter is not set (full fine-tuning has no counterpart: a LoRA adapter"),
        ("model_name_or_path: m\nfinetuning_type: full\n", ":2: finetuning_type: full (full fine-tuning has no"),
        ("model_name_or_path: m\nexport_dir: whole\n", ":2: export_dir: whole (`flatshift merge RUN --out DIR` writes"),
        ("model_name_or_path: m\nval_size: 100\n", ":2: val_size: 100 (data.holdout is a share of the rows)"),
        (
            "base_model: m\nadapter: lora\nrl: dpo\ndatasets: [{path: a.jsonl, field_messages: conversation}]\n",
            ":4: datasets.field_messages: conversation (rename the column to prompt)",
        ),
        (
            "base_model: m\nadapter: lora\ndatasets: [{path: a.jsonl, roles_to_train: [user]}]\n",
            ":3: datasets.roles_to_train",
        ),
        (
            "base_model: m\nadapter: lora\ndatasets: [{path: a.jsonl, roles: {user: [gpt], assistant: [human]}}]\n",
            ":3: datasets.roles",
        ),
        (
            "base_model: m\nadapter: lora\n"
            "datasets: [{path: a.jsonl, message_property_mappings: {role: value, content: from}}]\n",
            ":3: datasets.message_property_mappings",
        ),
        ("base_model: m\nadapter: lora\nrl: simpo\n", ":3: cpo_alpha: 1.0, by default (weight of the chosen answer's"),
        ("base_model: m\nadapter: lora\nrl: simpo\ncpo_alpha:\n", ":4: cpo_alpha: 1.0, by default (weight of the"),
        ("base_model: m\nadapter: lora\nrl: simpo\ncpo_alpha: 0.5\n", ":4: cpo_alpha: 0.5 (weight of the chosen"),
        ("model_name_or_path: m\nstage: dpo\nsimpo_gamma: 0.5\n", ":3: simpo_gamma: 0.5 (this objective has none)"),
        ("model_name_or_path: m\nstage: sft\npref_beta: 0.1\n", ":3: pref_beta: 0.1 (this objective has none)"),
        ("base_model: m\nadapter: lora\ndatasets: [some/name]\n", ":3: datasets: some/name (each of them is a mapping"),
        ("base_model: m\nadapter: lora\ndatasets: some/name\n", ":3: datasets: some/name (each of them is a mapping"),
        ("base_model: m\nadapter: lora\ndatasets: [5]\n", ":3: datasets: 5 (each of them is a mapping with a path"),
        ("base_model: m\nadapter: lora\ndatasets: [{type: alpaca}]\n", ":3: datasets (each of them is a mapping with"),
        (
            "base_model: m\nadapter: lora\nlora_target_modules: model.layers.[0-9]+.(q_proj|v_proj)\n",
            ":3: lora_target_modules: model.layers.[0-9]+.(q_proj|v_proj) (a pattern; list the names)",
        ),
        ("model_name_or_path: m\nsave_steps: 0.25\n", ":2: save_steps: 0.25 (train.save_every counts steps)"),
        ("model_name_or_path: m\ntorch_compile: auto\n", ":2: torch_compile: auto"),
        ("model_name_or_path: m\neval_strategy: [steps]\n", f":2: eval_strategy ({FORM})"),
        ("model_name_or_path: m\ndataset: a\ndataset_dir: [a]\n", f":2: dataset: a ({FORM})"),
        ("base_model: m\nadapter: lora\ndatasets: [{path: json, data_files: 7}]\n", f":3: datasets ({FORM})"),
        (
            "base_model: m\nadapter: lora\ndatasets: [{path: json, data_files: {train: rows.jsonl}}]\n",
            f":3: datasets ({FORM})",
        ),
        ("model_name_or_path: m\noptim: adafactor\n", ":2: optim: adafactor"),
        ("model_name_or_path: m\nmax_steps: many\n", ":2: max_steps: many"),
        ("model_name_or_path: m\ninterleave_probs: 0.9,0.1\n", ":2: interleave_probs: 0.9,0.1 (data sets are joined"),
        ("model_name_or_path: m\nwarmup_steps: 20\n", ":2: warmup_steps: 20 (optimizer.warmup is a fraction"),
    ],
)
def test_a_value_without_a_counterpart_is_reported(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(text, encoding="utf-8")
    (unknown,) = translate_recipe(file).unknown
    assert unknown.startswith(f"{file}{line}")


def test_plain_text_of_axolotl_beside_instructions_is_reported(home: Path) -> None:
    sets = "[{path: rows.jsonl, type: alpaca}, {path: rows.jsonl, type: completion}]"
    (home / "theirs.yaml").write_text(f"base_model: m\nadapter: lora\ndatasets: {sets}\n", encoding="utf-8")
    (unknown,) = translate_recipe(home / "theirs.yaml").unknown
    assert unknown.endswith("theirs.yaml:3: datasets (plain text or pairs are not trained on beside others)")


def test_data_sets_without_an_index_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("model_name_or_path: flatshift-5m\ndataset: identity\n", encoding="utf-8")
    assert "dataset_info.json; name the files with --data" in translate_recipe(file).unknown[0]
    with pytest.raises(UserError, match=r"some\.yaml: cannot be read|No such file|cannot be read"):
        translate_recipe(tmp_path / "other" / "some.yaml")


FACTORY_DPO = """\
model_name_or_path: flatshift-5m
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 4
lora_alpha: 4
lora_target: all
pref_beta: 0.1
pref_loss: sigmoid
dataset: pairs
dataset_dir: .
template: qwen3_nothink
cutoff_len: 64
save_only_model: false
per_device_train_batch_size: 2
learning_rate: 5.0e-6
num_train_epochs: 1
val_size: 0.1
"""
AXOLOTL_DPO = """\
base_model: flatshift-5m
rl: dpo
datasets:
  - path: pairs.jsonl
    type: chat_template.default
    field_messages: conversations
    field_chosen: chosen
    field_rejected: rejected
    message_property_mappings: {role: from, content: value}
    roles: {user: [human], assistant: [gpt]}
val_set_size: 0.1
sequence_len: 64
sample_packing: false
eval_sample_packing: false
adapter: lora
lora_r: 4
lora_alpha: 4
lora_target_linear: true
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_8bit
tf32: true
warmup_steps: 0.1
saves_per_epoch: 1
"""


@pytest.mark.parametrize("text", [FACTORY_DPO, AXOLOTL_DPO], ids=["LLaMA-Factory", "axolotl"])
def test_a_recipe_of_pairs_translates_and_trains(text: str, home: Path) -> None:
    """Rows in the form of both tools' demos: conversations, and two answers as turns."""
    turn = {"from": "gpt", "value": "1 2 3"}
    pairs = [
        {
            "conversations": [{"from": "human", "value": f"Count to {n}."}],
            "chosen": turn,
            "rejected": turn | {"value": n},
        }
        for n in map(str, range(20))
    ]
    write_jsonl(home / "pairs.jsonl", pairs)
    info = {"pairs": {"file_name": "pairs.jsonl", "ranking": True, "columns": {"messages": "conversations"}}}
    (home / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (home / "theirs.yaml").write_text(text, encoding="utf-8")
    assert run(["recipes", "from", "theirs.yaml", "--out", "mine.yaml"]) == 0
    recipe = load_recipe("mine.yaml").recipe
    assert (recipe.task.kind, recipe.task.loss, recipe.task.chat) == ("preference", "dpo", True)
    assert recipe.adapter.alpha == 4 and recipe.data.holdout == 0.1
    quick = [*QUICK, "--train.epochs", "null", "--optimizer.kind", "adamw", "--train.checkpointing", "none"]
    assert run(["train", "mine.yaml", *quick, "--out", "run"]) == 0
    evaluated = json.loads((home / "run/eval.json").read_text())
    assert evaluated.keys() == {"dev"} and 0 <= evaluated["dev"]["preference_accuracy"]["value"] <= 1


def test_labelled_conversations_of_kto_translate_and_train(home: Path) -> None:
    """Rows and entry in the form of LLaMA-Factory's kto_en_demo, under another name for the label."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": "1 2 3"}],
            "good": n % 2 == 0,
        }
        for n in range(20)
    ]
    write_jsonl(home / "marks.jsonl", rows)
    roles = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "kto_tag": "good"}
    entry = {"file_name": "marks.jsonl", "formatting": "sharegpt", "columns": columns, "tags": roles}
    (home / "dataset_info.json").write_text(json.dumps({"marks": entry}), encoding="utf-8")
    text = FACTORY_DPO.replace("stage: dpo", "stage: kto").replace("pairs", "marks").replace("pref_loss: sigmoid\n", "")
    (home / "theirs.yaml").write_text(text, encoding="utf-8")
    assert run(["recipes", "from", "theirs.yaml", "--out", "mine.yaml"]) == 0
    assert load_recipe("mine.yaml").recipe.data.columns.label == "good"
    assert (
        run(["train", "mine.yaml", *QUICK, "--train.epochs", "null", "--optimizer.kind", "adamw", "--out", "run"]) == 0
    )
    assert json.loads((home / "run/eval.json").read_text())["dev"]["loss"]["value"] > 0


def test_a_system_turn_of_llama_factory_is_kept_and_its_template_is_advice(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "model_name_or_path: flatshift-5m\nfinetuning_type: lora\ndefault_system: Be brief.\ntemplate: gemma\n"
    )
    translated = translate_recipe(file)
    assert translated.recipe["task"]["system"] == "Be brief." and translated.unknown == ()
    assert any(note.startswith("template: ") and "base models have none" in note for note in translated.notes)


MIXED = """\
model_name_or_path: flatshift-5m
stage: sft
finetuning_type: lora
dataset: mine, chats
dataset_dir: .
cutoff_len: 64
per_device_train_batch_size: 2
num_train_epochs: 2
val_size: 0.1
"""


@pytest.fixture
def mixed(home: Path) -> Path:
    """Twenty rows of Alpaca's form, and thirty conversations in a column of another name."""
    turns = [[{"from": "human", "value": f"Say {n}."}, {"from": "gpt", "value": str(n)}] for n in range(30)]
    write_jsonl(home / "chats.jsonl", [{"talk": each, "intro": "Be brief."} for each in turns])
    columns = {"messages": "talk", "system": "intro"}
    chats = {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": columns}
    info = {"mine": {"file_name": "rows.jsonl"}, "chats": chats}
    (home / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (home / "theirs.yaml").write_text(MIXED, encoding="utf-8")
    return home


def test_data_sets_of_two_forms_become_sources_and_train(mixed: Path) -> None:
    assert run(["recipes", "from", "theirs.yaml", "--out", "mine.yaml"]) == 0
    train = load_recipe("mine.yaml").recipe.data.train
    assert train.files == () and train.sources is not None and list(train.sources) == ["mine", "chats"]
    assert [(source.weight, source.first) for source in train.sources.values()] == [(20, None), (30, None)]
    assert train.sources["chats"].columns is not None and train.sources["mine"].columns is None
    assert (train.sources["chats"].columns.messages, train.sources["chats"].columns.system) == ("talk", "intro")
    assert load_recipe("mine.yaml").recipe.train.steps == 45  # 2 epochs of 50 rows without 5, two at a time
    assert run(["train", "mine.yaml", *QUICK, "--train.steps", "5", "--out", "run"]) == 0
    assert json.loads((mixed / "run/eval.json").read_text()).keys() == {"dev"}
    sources = json.loads((mixed / "run/manifest.json").read_text())["sources"]
    assert {each["name"]: round(each["share"], 2) for each in sources} == {"mine": 0.4, "chats": 0.6}


@pytest.mark.parametrize(
    ("line", "entry", "expected"),
    [
        ("max_samples: 25", {}, {"mine": (20, None, None), "chats": (25, 25, None)}),
        ("max_samples: 25", {"num_samples": 12}, {"mine": (20, None, None), "chats": (12, None, 12)}),
        ("max_samples: 10", {"num_samples": 12}, {"mine": (10, 10, None), "chats": (10, None, 10)}),
    ],
)
def test_caps_and_shares_are_those_of_each_source(
    mixed: Path, line: str, entry: dict[str, int], expected: dict[str, object]
) -> None:
    info = json.loads((mixed / "dataset_info.json").read_text())
    info["chats"] |= entry
    (mixed / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (mixed / "theirs.yaml").write_text(f"{MIXED}{line}\n", encoding="utf-8")
    assert run(["recipes", "from", "theirs.yaml", "--out", "mine.yaml"]) == 0
    sources = load_recipe("mine.yaml").recipe.data.train.sources
    assert sources is not None
    assert {name: (each.weight, each.first, each.limit) for name, each in sources.items()} == expected


@pytest.mark.parametrize(
    ("entry", "stage", "sentence"),
    [
        ({"columns": {"prompt": "ask", "response": "reply"}}, "sft", "rename its columns ask and reply to instruction"),
        ({"columns": {"messages": "talk", "images": "pictures"}}, "sft", "columns.images pictures has no counterpart"),
        ({"tags": {"user_tag": "customer"}}, "sft", "tags.user_tag customer is none of user, human"),
        ({"folder": "part"}, "sft", "folder has no counterpart; name its files in file_name"),
        ({"num_samples": "10"}, "sft", FORM),
        ({"columns": ["a"]}, "sft", FORM),
        ({"num_samples": 31}, "sft", "num_samples 31 is above its 30 rows, and would repeat some"),
        ({"columns": {"prompt": "instruction", "chosen": "good"}}, "dpo", "columns.chosen good has no counterpart"),
    ],
)
def test_what_of_an_entry_has_no_counterpart_is_one_sentence(
    mixed: Path, entry: dict[str, object], stage: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    info = {"chats": {"file_name": "chats.jsonl", "formatting": "sharegpt", **entry}}
    (mixed / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    text = MIXED.replace("mine, chats", "chats").replace("stage: sft", f"stage: {stage}")
    (mixed / "theirs.yaml").write_text(text, encoding="utf-8")
    assert run(["recipes", "from", "theirs.yaml"]) == 1
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert line.startswith("  theirs.yaml:4: dataset: chats (") and sentence in line


def test_columns_of_one_data_set_are_those_of_the_recipe(mixed: Path) -> None:
    text = MIXED.replace("mine, chats", "chats").replace("val_size: 0.1", "eval_dataset: chats")
    (mixed / "theirs.yaml").write_text(text, encoding="utf-8")
    assert run(["recipes", "from", "theirs.yaml", "--out", "mine.yaml"]) == 0
    data = load_recipe("mine.yaml").recipe.data
    assert (data.columns.messages, data.train.files, data.holdout) == ("talk", data.dev.files, 0.0)
    (mixed / "theirs.yaml").write_text(text.replace("eval_dataset: chats", "eval_dataset: mine"), encoding="utf-8")
    (unknown,) = translate_recipe(mixed / "theirs.yaml").unknown
    assert unknown.endswith("eval_dataset: mine (its columns are not those of the training rows; rename them)")


@pytest.mark.parametrize("kind", ["alpaca", "completion"])
def test_rows_above_the_length_of_axolotl_are_dropped_and_texts_are_read_in_pieces(
    home: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": "Say it.", "output": "1 " * (200 if n % 2 else 1), "text": "1 " * 200} for n in range(8)]
    write_jsonl(home / "rows.jsonl", rows)
    text = "base_model: flatshift-5m\nadapter: lora\nsequence_len: 64\ndatasets: [{path: rows.jsonl, type: KIND}]\n"
    (home / "theirs.yaml").write_text(text.replace("KIND", kind), encoding="utf-8")
    assert run(["recipes", "from", "theirs.yaml", "--out", "mine.yaml"]) == 0
    assert run(["train", "mine.yaml", *QUICK, "--train.epochs", "null", "--out", "run"]) == 0
    printed = "".join(capsys.readouterr())
    if kind == "alpaca":
        assert run(["train", "mine.yaml", *QUICK, "--train.epochs", "null", "--train.max_dropped", "0"]) == 2
        assert "4 of 8 samples are longer than train.max_length = 64 tokens" in capsys.readouterr().err
    else:
        assert "8 of 8 documents are longer than train.max_length = 64 tokens and read in" in printed


def test_a_list_of_data_sets_is_their_names(mixed: Path) -> None:
    expected = translate_recipe(mixed / "theirs.yaml")
    text = MIXED.replace("dataset: mine, chats", "dataset: [mine, chats]")
    assert text != MIXED
    (mixed / "theirs.yaml").write_text(text, encoding="utf-8")
    assert translate_recipe(mixed / "theirs.yaml") == expected and expected.unknown == ()


def test_the_prompt_of_alpaca_is_named_where_it_changes(home: Path) -> None:
    (note,) = [note for note in translate_recipe(home / "axolotl.yaml").notes if note.startswith("alpaca: ")]
    assert "task.template: alpaca" in note
    assert "alpaca" in list_shipped_templates()


def test_warm_up_steps_are_a_fraction_where_the_rows_are_counted(mixed: Path) -> None:
    text = MIXED.replace("mine, chats", "mine").replace("num_train_epochs: 2", "num_train_epochs: 2\nwarmup_steps: 3")
    (mixed / "theirs.yaml").write_text(text, encoding="utf-8")
    translated = translate_recipe(mixed / "theirs.yaml")
    assert translated.recipe["optimizer"]["warmup"] == 0.1667 and translated.unknown == ()
    assert "warmup_steps: 3 of 18 steps" in translated.notes
    (mixed / "theirs.yaml").write_text(f"{text}packing: true\n", encoding="utf-8")
    assert "not known here" in translate_recipe(mixed / "theirs.yaml").unknown[0]
    (mixed / "theirs.yaml").write_text(text.replace("epochs: 2", "epochs: many"), encoding="utf-8")
    with pytest.raises(UserError, match=r"theirs\.yaml:8: train\.epochs must be a number"):
        translate_recipe(mixed / "theirs.yaml")


def test_warm_up_steps_of_plain_text_are_not_counted_as_it_is_packed(mixed: Path) -> None:
    text = MIXED.replace("mine, chats", "mine").replace("stage: sft\n", "") + "warmup_steps: 3\n"
    (mixed / "theirs.yaml").write_text(f"{text}stage: pt\n", encoding="utf-8")
    assert "warmup_steps: 3 (optimizer.warmup is a fraction" in "".join(translate_recipe(mixed / "theirs.yaml").unknown)
    (mixed / "theirs.yaml").write_text(f"{text}stage: pt\npacking: false\n", encoding="utf-8")
    assert "warmup_steps: 3 of 18 steps" in translate_recipe(mixed / "theirs.yaml").notes


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["pref_loss: sigmoid"], {"loss": "dpo"}),
        (["pref_loss: ipo", "pref_beta: 0.3"], {"loss": "ipo", "beta": 0.3}),
        (["pref_loss: simpo"], {"loss": "simpo", "beta": 0.1, "gamma": 0.5}),
        (["simpo_gamma: 1.0", "pref_loss: simpo"], {"loss": "simpo", "beta": 0.1, "gamma": 1.0}),
        (["pref_beta: 0.3", "pref_loss: orpo"], {"loss": "orpo", "odds_weight": 0.3}),
    ],
)
def test_the_loss_of_pairs_is_the_same_in_either_order(
    tmp_path: Path, lines: list[str], expected: dict[str, object]
) -> None:
    file = tmp_path / "theirs.yaml"
    for ordered in (["stage: dpo", *lines], [*lines, "stage: dpo"]):
        file.write_text("\n".join(["model_name_or_path: flatshift-5m", *ordered]), encoding="utf-8")
        translated = translate_recipe(file)
        assert translated.recipe["task"] == {"chat": True, "answer": "{answer}", **expected}
        assert translated.unknown == ()


def test_a_cap_above_the_rows_is_left_out_with_a_note(mixed: Path) -> None:
    text = MIXED.replace("mine, chats", "mine")
    (mixed / "theirs.yaml").write_text(f"{text}max_samples: 1000\n", encoding="utf-8")
    translated = translate_recipe(mixed / "theirs.yaml")
    assert "first" not in translated.recipe["data"]["train"] and translated.unknown == ()
    (mixed / "theirs.yaml").write_text(f"{text}max_samples: 1_000\n", encoding="utf-8")
    assert translate_recipe(mixed / "theirs.yaml") == translated
    assert "max_samples: mine has 20 rows, and all are read" in translated.notes


def test_plain_text_of_llama_factory_is_packed(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("model_name_or_path: flatshift-5m\nstage: pt\nfinetuning_type: lora\nmax_samples: 9\n")
    translated = translate_recipe(file)
    assert translated.recipe["task"] == {"pack": True} and translated.recipe["data"]["train"]["first"] == 9
    assert translated.unknown == () and any("max_samples" in note for note in translated.notes)
