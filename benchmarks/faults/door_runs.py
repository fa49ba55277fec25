"""Run directories, adapters, selections, sweeps, recipes and backbones of strangers, with sums made to agree."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.bad_inputs import recipe
from benchmarks.faults.doors import SECRET, Case, Place, holders

Change = Callable[[Path], None]
"""Makes a stranger's directory of a good one."""
_ADAPTER, _WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"


class _Planted:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch canary",)


PICKLE = pickle.dumps(_Planted())
YAML = "!!python/object/apply:os.system ['touch canary']\n"


def seal(folder: Path, **more: str) -> None:
    """Make the sums in done.json agree with what lies there, with `more` names of files in it."""
    record = json.loads((folder / "done.json").read_text(encoding="utf-8"))
    names = [name for name in record["files"] if (folder / name).is_file()]
    record["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names} | more
    (folder / "done.json").write_text(json.dumps(record), encoding="utf-8")


def _sum(text: str = SECRET) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _list(name: str) -> Change:
    """List a file of the user's in done.json. `{outside}` is the folder that holds it."""
    return lambda run: seal(run, **{name.replace("{outside}", str(run.parent / "outside")): _sum()})


def _link(name: str, target: str = "../outside/mine.txt") -> Change:
    def change(run: Path) -> None:
        place = run / name
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.symlink_to(os.path.relpath(run / target, place.parent))
        seal(run)

    return change


def _pipe(name: str) -> Change:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def _write(name: str, data: bytes | str) -> Change:
    def change(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(data.encode() if isinstance(data, str) else data)
        if (run / "done.json").is_file() and name != "done.json":
            seal(run)

    return change


def _set(name: str, **values: Any) -> Change:
    """Set keys of a JSON file."""

    def change(run: Path) -> None:
        tree = json.loads((run / name).read_text(encoding="utf-8"))
        _write(name, json.dumps(tree | values))(run)

    return change


def _replace(name: str, old: str, new: str) -> Change:
    def change(run: Path) -> None:
        text = (run / name).read_text(encoding="utf-8")
        assert old in text, (name, old)
        _write(name, text.replace(old, new, 1))(run)

    return change


def _tensors(shape: list[int], begin: int, end: int, dtype: str = "F32") -> bytes:
    """Return a safetensors file whose header lies."""
    header = json.dumps(
        {"base_model.model.x.lora_A.weight": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}
    )
    return struct.pack("<Q", len(header)) + header.encode() + bytes(64)


def _move(name: str, target: str) -> Change:
    return lambda folder: shutil.move(folder / name, folder / target)  # type: ignore[return-value]


def _all(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


RECIPE = "recipe.resolved.yaml"
RUNS: dict[str, Change] = {
    "lists a file above it": _list("../outside/mine.txt"),
    "lists a file by its absolute path": _list("{outside}/mine.txt"),
    "lists a file through a folder": _list("adapter/../../outside/mine.txt"),
    "lists a device": _list("/dev/zero"),
    "a link to the user's file for its recipe": _link(RECIPE),
    "a link for its adapter's settings": _link(_ADAPTER),
    "a link for its weights": _link(_WEIGHTS),
    "a link for its adapter": _link("adapter", "../outside"),
    "a link for its command": _link("command.txt"),
    "a link for its log": _link("log.txt"),
    "a link to a device": _link("command.txt", "../../../../../../../../../../dev/zero"),
    "a link that no record lists": _link("adapter/README.md"),
    "a link to itself": _link("more", "more"),
    "a FIFO for its command": _pipe("command.txt"),
    "a FIFO for its evaluation": _pipe("eval.json"),
    "a FIFO for its record": _pipe("done.json"),
    "a FIFO for its weights": _pipe(_WEIGHTS),
    "a pickle for weights": _write("adapter/adapter_model.bin", PICKLE),
    "a pickle called safetensors": _write(_WEIGHTS, PICKLE),
    "a pickle of a tokenizer": _write("adapter/tokenizer.pkl", PICKLE),
    "YAML that makes objects": _write(RECIPE, YAML),
    "an anchor that doubles": _write(
        RECIPE, "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    ),
    "a deep recipe": _write(RECIPE, "[" * 50_000),
    "a recipe of digits": _replace(RECIPE, "steps: 1", "steps: " + "9" * 5000),
    "a recipe of infinity": _replace(RECIPE, "rank: 2", "rank: .inf"),
    "a huge rank": _set(_ADAPTER, r=10**9),
    "a rank of digits": _set(_ADAPTER, r=10**400),
    "a scale of NaN": _write(
        _ADAPTER, '{"peft_type": "LORA", "r": 2, "lora_alpha": NaN, "target_modules": ["q_proj"]}'
    ),
    "a pattern that runs away": _set(_ADAPTER, target_modules="(([a-z_.0-9])+)+!"),
    "a rank pattern that runs away": _set(_ADAPTER, rank_pattern={"(([a-z_.0-9])+)+!": 3}),
    "another kind of adapter": _set(_ADAPTER, peft_type="PROMPT_TUNING"),
    "a kind of adapter that is none": _set(_ADAPTER, peft_type={"x": 1}),
    "a class to import": _set(_ADAPTER, auto_mapping={"base_model_class": "system", "parent_library": "os"}),
    "a base that is a folder of the user's": _set(_ADAPTER, base_model_name_or_path="/etc"),
    "modules to save": _set(_ADAPTER, modules_to_save=["../x", ".*"]),
    "weights larger than memory": _write(_WEIGHTS, _tensors([1 << 40, 1 << 20], 0, 1 << 62)),
    "weights before their file": _write(_WEIGHTS, _tensors([4], -16, 0)),
    "weights beyond their file": _write(_WEIGHTS, _tensors([1 << 20], 0, 1 << 22)),
    "weights of a negative size": _write(_WEIGHTS, _tensors([-4, 4], 0, 64)),
    "a header of 2^60 bytes": _write(_WEIGHTS, struct.pack("<Q", 1 << 60) + b"{}"),
    "a deep header": _write(_WEIGHTS, struct.pack("<Q", 100_000) + b"[" * 100_000),
    "metrics of digits": _write("metrics.jsonl", '{"step": ' + "9" * 5000 + "}\n"),
    "metrics that are infinite": _write("metrics.jsonl", '{"step": 1e999, "loss": NaN}\n'),
    "a deep evaluation": _write("eval.json", '{"test": ' + "[" * 50_000),
    "an evaluation of markup": _write("eval.json", '{"<script>alert(1)</script>": {"accuracy": {"value": 1}}}'),
    "a deep record": _write("done.json", "[" * 50_000),
    "a record of a number": _write("done.json", "3"),
    "sums that are numbers": _write("done.json", '{"files": {"eval.json": 3}}'),
    "a deep manifest": _write("manifest.json", '{"inputs": ' + "[" * 50_000),
    "labels of escapes": _write("labels.json", '{"labels": ["\\u001b[31m", "</script>"]}'),
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "eval": ("eval", "{run}"),
    "predict": ("predict", "{run}", "--data", "{rows}", "--out", "p.jsonl"),
    "report": ("report", "{run}", "--out", "page.html"),
    "merge": ("merge", "{run}", "--out", "made"),
    "export": ("export", "{run}", "--out", "made"),
    "resume": ("train", "--resume", "{run}", "--train.steps", "2"),
}

_OWN = _write("own.py", "import os\nos.system('touch canary')\nOwn = None\n")
BACKBONES: dict[str, Change] = {
    "weights as a pickle": _all(_move("model.safetensors", "nothing"), _write("pytorch_model.bin", PICKLE)),
    "a pickle beside the weights": _write("pytorch_model.bin", PICKLE),
    "code of its own": _all(
        _OWN,
        _set("config.json", model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}),
    ),
    "code beside its architecture": _all(_OWN, _set("config.json", auto_map={"AutoModelForCausalLM": "own.Own"})),
    "code for its tokenizer": _all(
        _OWN,
        _set("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own"),
    ),
    "an index that leads out": _all(
        _move("model.safetensors", "../outside/model.safetensors"),
        _write(
            "model.safetensors.index.json",
            json.dumps({"weight_map": {"model.embed_tokens.weight": "../outside/model.safetensors"}}),
        ),
    ),
    "10^9 layers": _set("config.json", num_hidden_layers=10**9),
    "a vocabulary of 10^12": _set("config.json", vocab_size=10**12),
    "a hidden size of digits": _set("config.json", hidden_size=10**400),
    "a deep configuration": _write("config.json", '{"model_type": "llama", "a": ' + "[" * 50_000),
    "an attention of a class": _set("config.json", _attn_implementation="os.system"),
    "a kernel of a repository": _set("config.json", _attn_implementation="evil/kernels"),
    "a quantisation of a class": _set("config.json", quantization_config={"quant_method": "os.system"}),
    "adapters in its tokenizer's settings": _set("tokenizer_config.json", chat_template="{{ ''.__class__.__mro__ }}"),
}  # fmt: skip
"""Backbones, for `train language-model`: without harm, used or refused."""

RECIPES: dict[str, str] = {
    "objects": f"train: {YAML}",
    "objects in its base": "extends: evil.yaml\n",
    "a base of a device": "extends: /dev/zero\n",
    "a base of a FIFO": "extends: pipe.yaml\n",
    "a base of itself": "extends: r.yaml\n",
    "a base of the user's file": "extends: outside/mine.txt\n",
    "rows of a device": "extends: classify\ndata: {train: {files: [/dev/zero]}}\n",
    "rows of the user's file": "extends: classify\ndata: {train: {files: [outside/mine.txt]}}\n",
    "rows of a program": "extends: classify\ndata: {train: {files: ['| touch canary']}}\n",
    "a template of a device": "extends: chat\ntask: {template: /dev/zero}\n",
    "a template of the user's file": "extends: chat\ntask: {template: outside/mine.txt}\n",
    "a template of the shell": "extends: chat\ntask: {template: '$(touch canary)'}\n",
    "a backbone of the user's folder": "extends: classify\nbackbone: outside\n",
    "a backbone of the hub": "extends: classify\nbackbone: evil/model\n",
    "an adapter of the user's folder": "extends: classify\nadapter: {start: outside}\n",
    "a device of the shell": "extends: classify\ntrain: {device: '$(touch canary)'}\n",
    "10^400 steps": f"extends: classify\ntrain: {{steps: {10**400}}}\n",
    "a rank of 10^12": f"extends: classify\nadapter: {{rank: {10**12}}}\n",
    "a batch of 10^15": f"extends: classify\ntrain: {{batch_size: {10**15}, device_batch: {10**15}}}\n",
    "a pattern that runs away": "extends: classify\nadapter: {targets: '(([a-z_.0-9])+)+!'}\n",
    "a key of the system": "extends: classify\n__class__: os\n",
    "an interpolation": "extends: classify\nbackbone: ${oc.env:HOME}\n",
    "merge keys that double": "a: &a {x: 1}\nb: &b {<<: [*a, *a], y: 2}\n<<: *b\n",
}  # fmt: skip
"""Recipes, for `train`: nothing is run, and no text of the user's file is told."""

SELECTIONS: dict[str, Change] = {
    "lists a file above it": _list("../outside/mine.txt"),
    "lists a file to write": _all(
        _write("evil", "planted"), _write("a/b/c/d/e", ""), _link("link", "a/b/c/d"),
        lambda chosen: seal(chosen, **{"link/../../../../evil": _sum("planted")}),
    ),
    "lists an absolute path": _list("{outside}/mine.txt"),
    "a link for its rows": _link("selected.jsonl"),
    "a link for its page": _link("report.html"),
}  # fmt: skip
"""Selections, for `train warmup --select.from`."""


def _guard(place: Place, folder: Path, *argv: str, wanted: tuple[int, ...] = (0, 2)) -> str:
    """Run a command beside a file of the user's, and return what it did to it, or told of it."""
    before = sorted(folder.parent.iterdir())
    answer = place.flatshift(*argv, cwd=folder)
    if wrong := answer.faults():
        return wrong
    if answer.code not in wanted:
        return f"exit code {answer.code}: {answer.text[-300:]}"
    mine = folder / "outside" / "mine.txt"
    if (folder / "canary").exists() or mine.read_text(encoding="utf-8") != SECRET:
        return "ran a command, or changed the user's file"
    if results := [name for name in holders(folder) if not name.startswith("outside")]:
        return f"copies the user's file to {', '.join(results)}"
    return "" if sorted(folder.parent.iterdir()) == before else "writes outside its directory"


def _stage(place: Place) -> Path:
    folder = place.folder() / "work"
    (folder / "outside").mkdir(parents=True)
    (folder / "outside" / "mine.txt").write_text(SECRET, encoding="utf-8")
    return folder


def _run(change: Change, words: tuple[str, ...]) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        folder = _stage(place)
        shutil.copytree(place.sandbox / "run", folder / "run")
        change(folder / "run")
        named = {"{run}": "run", "{rows}": str(place.sandbox / "rows.jsonl")}
        return _guard(place, folder, *(named.get(word, word) for word in words))

    return open_by


def _backbone(change: Change) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        folder = _stage(place)
        shutil.copytree(place.sandbox / "backbone", folder / "model")
        change(folder / "model")
        text = recipe(place.sandbox).replace(str(place.sandbox / "backbone"), "./model")
        (folder / "r.yaml").write_text(text.replace("kind: classify", "kind: language-model"), encoding="utf-8")
        return _guard(place, folder, "train", "r.yaml", "--out", "out")

    return open_by


def _recipe(text: str) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        folder = _stage(place)
        (folder / "r.yaml").write_text(text, encoding="utf-8")
        (folder / "evil.yaml").write_text(YAML, encoding="utf-8")
        os.mkfifo(folder / "pipe.yaml")
        return _guard(place, folder, "train", "r.yaml", "--out", "out", wanted=(2,))

    return open_by


def _selection(change: Change) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        folder = _stage(place)
        pool = str(place.sandbox / "rows.jsonl")
        small = ("--select.embedder.dim", "4", "--select.checks", "false")
        result = place.flatshift(
            "select", "--pool", pool, "--target", pool, "--budget", "4", "--out", "chosen", *small, cwd=folder
        )
        if result.code:
            return f"no selection: {result.text[-300:]}"
        change(folder / "chosen")
        text = "warmup: {steps: 1, batch_size: 2}\nselect: {from: chosen}\n"
        (folder / "r.yaml").write_text(recipe(place.sandbox, text), encoding="utf-8")
        return _guard(place, folder, "train", "r.yaml", "--out", "out", wanted=(2,))

    return open_by


def cases() -> Iterator[Case]:
    """Yield a case for each row of the tables; each change of a run for the next command."""
    for number, (name, change) in enumerate(RUNS.items()):
        command = [*COMMANDS][number % len(COMMANDS)]
        yield Case("directories", f"{command} of a run: {name}", _run(change, COMMANDS[command]))
    for name, change in BACKBONES.items():
        yield Case("directories", f"backbone: {name}", _backbone(change))
    for name, text in RECIPES.items():
        yield Case("directories", f"recipe: {name}", _recipe(text))
    for name, change in SELECTIONS.items():
        yield Case("directories", f"selection: {name}", _selection(change))
