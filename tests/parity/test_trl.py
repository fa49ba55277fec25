"""TRL's SFTTrainer beside us: the script and the command of docs/migrate.md, from one initial adapter, step by step."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from flatshift.cli import run
from flatshift.finetune.assets import backbone_directory

PAGE = (
    (Path(__file__).resolve().parents[2] / "docs" / "migrate.md").read_text(encoding="utf-8").partition("## TRL\n")[2]
)
COMMANDS, (SCRIPT,) = (
    [code.replace("\\\n", " ") for code in re.findall(rf"(?ms)^```{language}\n(.*?)^```", PAGE.partition("\n## ")[0])]
    for language in ("bash", "python")
)
(CONVERSATION,) = re.findall(r"(?ms)^```json\n(.*?)^```", PAGE)
BATCHES = 4
ROWS = [{"prompt": f"Count to {n}:", "completion": " " + " ".join(map(str, range(1, n)))} for n in range(3, 11)]
TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}{% if turn.role == 'assistant' %}A:\n{% generation %}"
    "{{ turn.content + eos_token }}{% endgeneration %}{% else %}Q: {{ turn.content }}\n{% endif %}{% endfor %}"
)


def conversation(row: dict[str, str]) -> dict[str, Any]:
    """The page's conversation, with the texts of a row."""
    turns = json.loads(CONVERSATION)["messages"]
    return {"messages": [{**turn, "content": text.strip()} for turn, text in zip(turns, row.values(), strict=True)]}


@pytest.mark.parametrize("recipe", ["completion", "chat"])
def test_losses_are_the_same_from_the_same_adapter(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are in every batch, as the two draw their order in different ways."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    own = backbone_directory("flatshift-5m")
    assert own is not None
    model = str(shutil.copytree(own, "model"))
    Path(model, "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")

    def load_dataset(kind: str, *, data_files: str, split: str) -> Any:
        """The rows with the beginning that Flatshift adds, as the shipped tokenizer does not."""
        lines = [json.loads(line) for line in Path(data_files).read_text(encoding="utf-8").splitlines()]
        begun = [{**row, "prompt": "<bos>" + row["prompt"]} if "prompt" in row else row for row in lines]
        return datasets.Dataset.from_list(begun)

    class Config(trl.SFTConfig):  # a CPU without a device of its own, and every loss
        def __init__(self, **settings: Any) -> None:
            more = {"use_cpu": True, "bf16": False, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
            super().__init__(**settings, **more, gradient_checkpointing=False, weight_decay=0.0)

    class Trainer(trl.SFTTrainer):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.model.save_pretrained("start")

    rows = ROWS if recipe == "completion" else [conversation(row) for row in ROWS]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(trl, "SFTConfig", Config)
    monkeypatch.setattr(trl, "SFTTrainer", Trainer)
    names: dict[str, Any] = {}
    script = SCRIPT.replace("MODEL", model).replace("epochs=1", f"epochs={BATCHES}")
    if recipe == "chat":
        script = script.replace('output_dir="trl"', 'output_dir="trl", assistant_only_loss=True')
    exec(script, names)
    theirs = [float(line["loss"]) for line in names["trainer"].state.log_history if "loss" in line]

    (command,) = [command for command in COMMANDS if command.startswith(f"flatshift train {recipe} ")]
    words = shlex.split(command.replace("MODEL", model).replace("epochs 1", f"epochs {BATCHES}"))[1:]
    words += ["--adapter.start", "start", "--train.precision", "fp32", "--train.eval_every", "0"]
    assert run(words) == 0
    metrics = Path(words[words.index("--out") + 1], "metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    ours = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(theirs) == len(ours) == BATCHES and theirs[-1] < 0.8 * theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-4)
