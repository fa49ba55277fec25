"""TRL's SFTTrainer beside us: the script and the command of docs/migrate.md, from one initial adapter, step by step."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from flatshift.cli import run
from flatshift.finetune.assets import backbone_directory

PAGE = (
    (Path(__file__).resolve().parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8").partition("## TRL\n")[2]
)
COMMAND, SCRIPT = (
    re.findall(rf"(?ms)^```{language}\n(.*?)^```", PAGE)[0].replace("\\\n", " ") for language in ("bash", "python")
)
BATCHES = 4
ROWS = [{"prompt": f"Count to {n}:", "completion": " " + " ".join(map(str, range(1, n)))} for n in range(3, 11)]


def test_losses_are_the_same_from_the_same_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are in every batch, as the two draw their order in different ways."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    model = str(backbone_directory("flatshift-5m"))

    def load_dataset(kind: str, *, data_files: str, split: str) -> Any:
        """The rows with the beginning that Flatshift adds, as the shipped tokenizer does not."""
        lines = [json.loads(line) for line in Path(data_files).read_text(encoding="utf-8").splitlines()]
        return datasets.Dataset.from_list([{**row, "prompt": "<bos>" + row["prompt"]} for row in lines])

    class Config(trl.SFTConfig):  # a CPU without a device of its own, and every loss
        def __init__(self, **settings: Any) -> None:
            more = {"use_cpu": True, "bf16": False, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
            super().__init__(**settings, **more, gradient_checkpointing=False, weight_decay=0.0)

    class Trainer(trl.SFTTrainer):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.model.save_pretrained("start")

    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(trl, "SFTConfig", Config)
    monkeypatch.setattr(trl, "SFTTrainer", Trainer)
    names: dict[str, Any] = {}
    exec(SCRIPT.replace("MODEL", model).replace("epochs=1", f"epochs={BATCHES}"), names)
    theirs = [float(line["loss"]) for line in names["trainer"].state.log_history if "loss" in line]

    words = shlex.split(COMMAND.replace("MODEL", model).replace("epochs 1", f"epochs {BATCHES}"))[1:]
    words += ["--adapter.start", "start", "--train.precision", "fp32", "--train.eval_every", "0"]
    assert run(words) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(theirs) == len(ours) == BATCHES and theirs[-1] < 0.8 * theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-4)
