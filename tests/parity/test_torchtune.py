"""torchtune beside us: its own recipe of one of its files, and that file translated, from one initial adapter.

torchtune 0.6.1, its last, imports with torchao 0.9: pip install torchtune==0.6.1 torchao==0.9.0
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flatshift.cli import run
from flatshift.finetune.assets import backbone_directory

CONFIG = Path(__file__).resolve().parents[1] / "support" / "torchtune" / "llama2_7B_qlora_single_device.yaml"
STEPS = 6
ROWS = [{"text": f"Count to {n}: " + " ".join(map(str, range(1, n)))} for n in range(3, 11)]
SIZES = {
    "vocab_size": 4096, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 256, "max_seq_len": 1024,
    "intermediate_dim": 672, "norm_eps": 1e-6,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a shipped Llama with an output layer of its own, as Llama 2 has."""
    own = backbone_directory("flatshift-5m")
    llama = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32, tie_word_embeddings=False)
    llama.lm_head.weight = torch.nn.Parameter(llama.get_input_embeddings().weight.detach().clone())
    llama.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(own).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Tokenizer:
    """The model's tokenizer as torchtune calls it."""

    def __init__(self, path: str, max_seq_len: int) -> None:
        self.tokenizer, self.max_seq_len, self.pad_id = AutoTokenizer.from_pretrained(path), max_seq_len, 0

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return [begin] * add_bos + ids + [end] * add_eos


def test_losses_are_the_same_from_the_same_adapter(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are in every batch, as the two draw their order in different ways."""
    torchtune = pytest.importorskip("torchtune", exc_type=ImportError)
    from omegaconf import OmegaConf
    from torchtune.models.convert_weights import tune_to_peft_adapter_config, tune_to_peft_adapter_weights
    from torchtune.modules.peft import get_adapter_state_dict

    recipe = Path(torchtune.__file__).parents[1] / "recipes" / "lora_finetune_single_device.py"
    names = runpy.run_path(str(recipe))  # the folder refuses to be imported

    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["model"] |= {"_component_": "torchtune.models.llama2.lora_llama2_7b"}
    config["checkpointer"] |= {"checkpoint_dir": str(model), "checkpoint_files": ["model.safetensors"]}
    config["dataset"] = {
        "_component_": "torchtune.datasets.text_completion_dataset",
        **{"source": "json", "column": "text", "data_files": "rows.jsonl", "split": "train"},
    }
    config |= {"dtype": "fp32", "device": "cpu", "batch_size": 8, "gradient_accumulation_steps": 1, "epochs": STEPS}
    config |= {"enable_activation_checkpointing": False, "seed": 1, "output_dir": "theirs", "profiler": None}
    config["loss"] = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    config["tokenizer"]["max_seq_len"] = 128
    config["optimizer"] |= {"lr": 2e-3, "fused": False}
    config["lr_scheduler"]["num_warmup_steps"] = 0
    Path("theirs.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    stand_in = ModuleType("stand_in")
    stand_in.Tokenizer = Tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stand_in", stand_in)
    sized = config | {"model": config["model"] | SIZES | {"_component_": "torchtune.models.llama2.lora_llama2"}}
    sized["tokenizer"] = {"_component_": "stand_in.Tokenizer", "path": str(model), "max_seq_len": 128}
    theirs = names["LoRAFinetuneRecipeSingleDevice"](OmegaConf.create(sized))
    theirs.setup(OmegaConf.create(sized))
    torch.manual_seed(0)
    weights = get_adapter_state_dict(theirs._model.state_dict())
    sizes = {"num_heads": 8, "num_kv_heads": 4, "dim": 256, "head_dim": 32}
    Path("start").mkdir()
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tune_to_peft_adapter_weights(weights, **sizes).items()},
        "start/adapter_model.safetensors",
    )
    targets = ["q_proj", "v_proj", "output_proj", "w1", "w2", "w3"]
    adapter = {"r": 8, "lora_alpha": 16, "target_modules": targets, "peft_type": "LORA", "lora_dropout": 0.0}
    adapter = tune_to_peft_adapter_config(adapter) | {"task_type": "CAUSAL_LM"}
    Path("start/adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    losses: list[float] = []
    monkeypatch.setattr(theirs._metric_logger, "log_dict", lambda line, step: losses.append(float(line["loss"])))
    monkeypatch.setattr(theirs, "save_checkpoint", lambda epoch: None)
    theirs.train()

    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)  # PEFT refuses so old a torchao
    assert run(["recipes", "from", "theirs.yaml", "--out", "mine.yaml"]) == 0
    words = ["--adapter.start", "start", "--out", "run", "--train.precision", "fp32"]
    assert run(["train", "mine.yaml", *words]) == 0
    metrics = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ours = [line["loss"] for line in metrics if line["split"] == "train"]
    assert len(losses) == len(ours) == STEPS and losses[-1] < 0.8 * losses[0]
    assert ours == pytest.approx(losses, rel=1e-5)
