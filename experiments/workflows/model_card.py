"""Model card of an exported adapter: training data, settings and evaluation, all taken from its run.

User-provided texts (file names, labels, templates, commands) are put into code spans and fences that they cannot close,
and the metadata is written by huggingface_hub; so no name can inject markup or a key into the card.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows.build import format_number
from flatshift.experiments.workflows.run_parts import FINE_TUNE, WARM_UP
from flatshift.finetune import assets
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.data.encoding import get_end_token
from flatshift.finetune.data.formats import HUB, SAMPLE, HubName
from flatshift.finetune.data.rows import Row
from flatshift.finetune.digests import DONE
from flatshift.finetune.errors import UserError, is_remote
from flatshift.finetune.evaluate.metrics import METRICS, find_metric
from flatshift.finetune.launch.consistency import flatten_settings
from flatshift.finetune.models.backbone import PACKAGE
from flatshift.finetune.redaction import join_command
from flatshift.finetune.tasks import Task

_PIPELINE_TAGS = {"AutoModelForMaskedLM": "fill-mask", "AutoModelForSequenceClassification": "text-classification"}
"""Pipeline tags of the hub by transformers class; any other writes text."""
Form = Literal["adapter", "merged", "gguf", "ollama", "vllm"]


def build_card(
    path: Path,
    recipe: Recipe,
    *,
    tokenizer: Any,
    labels: Sequence[str] | None,
    base_model: str | None = None,
    license: str | None = None,
    added: Sequence[tuple[str, float]] = (),
    rank: int | None = None,
    form: Form = "adapter",
) -> str:
    """Return README.md for the export of the run directory `path`; arguments as `export`.

    added: names and weights of the adapters that were added to the run's. rank: of the written adapter. form: content
    of the folder: the adapter, the merged model, or files for llama.cpp, Ollama or vLLM.
    """
    base = base_model or published_name(recipe.backbone)
    others = ", ".join(f"{format_code_span(name)} with weight {weight:g}" for name, weight in added)
    sum_note = (
        f"**A sum of adapters**, of rank {rank}: to the adapter described below (weight 1) is added {others}. The sum "
        "has not been evaluated: all figures, settings and data below are of that first adapter alone.\n"
    )
    parts = [
        _format_metadata(path, recipe, base, license, evaluated=not added, form=form),
        f"# {recipe.task.kind} {'adapter on' if form == 'adapter' else 'model from'} {format_code_span(base)}\n",
        *([sum_note] if added else []),
        _format_summary(path, recipe),
    ]
    if form == "adapter" and base_model is None and _is_local(recipe.backbone):
        parts.append(
            "**To fill in:** the backbone was a local directory; put its hub name in place of "
            f"{format_code_span(base)}, here and in adapter_config.json (`flatshift export --base-model "
            "ORGANISATION/NAME` does both).\n"
        )
    parts += [
        "## Use\n",
        *_format_usage(recipe, tokenizer, labels, base, form),
        "## How it was evaluated\n",
        _format_metrics_table(_read_evaluation(path)),
        "## How it was trained\n",
        _format_settings(recipe),
        format_code_block(_without_directories((path / "command.txt").read_text(encoding="utf-8"), recipe)),
        _format_versions(read_json_object(path / "environment.json", "versions")),
        "## Data\n",
        _format_data(recipe, read_json_object(path / "manifest.json", "inputs")["inputs"]),
        "## Licence\n",
        "- **To fill in:** the licence of this adapter (`license` in the metadata).\n" * (license is None)
        + f"- **To fill in:** the licence of the backbone {format_code_span(base)}, "
        + ("which this adapter is of no use without" if form == "adapter" else "whose weights are in these files")
        + ".\n- **To fill in:** the licence of each file under Data, and who is to be named for it.\n",
    ]
    return "\n".join(parts)


def run_title(path: Path) -> str:
    """Return the public name of an adapter's directory: its own name, or that of its run."""
    return path.parent.name if path.name == "adapter" and path.parent.name else path.name


def published_name(backbone: str) -> str:
    """Return the public name of a backbone: its hub or shipped name, its package and folder there, or the name of its
    directory."""
    return Path(backbone).expanduser().resolve().name if _is_local(backbone) else backbone


def _is_local(backbone: str) -> bool:
    if backbone.startswith(PACKAGE):
        return False
    return assets.backbone_directory(backbone) is None and Path(backbone).expanduser().exists()


def format_code_span(text: object, *, table: bool = False) -> str:
    """Return a code span of `text` that no text can close; line breaks become spaces."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    if table:
        line = line.replace("|", "\\|")
    return f"{ticks} {line} {ticks}" if line.startswith("`") or line.endswith("`") else f"{ticks}{line}{ticks}"


def format_code_block(text: str, language: str = "") -> str:
    """Return a code block of `text` that no text can close."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}\n"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _format_metadata(path: Path, recipe: Recipe, base: str, license: str | None, *, evaluated: bool, form: Form) -> str:
    from huggingface_hub import ModelCardData

    names = {name for metrics in _read_evaluation(path).values() for name in metrics} if evaluated else set()
    data = ModelCardData(
        base_model=None if base.startswith(PACKAGE) else base,
        library_name={"adapter": "peft", "gguf": "gguf", "ollama": "gguf"}.get(form, "transformers"),
        license=license,
        pipeline_tag=_PIPELINE_TAGS.get(recipe.task.traits.auto_class, "text-generation"),
        tags=[*(["lora"] if form == "adapter" else []), "flatshift", recipe.regularizer.kind],
        datasets=_hub_dataset_names(recipe) or None,
        metrics=list(dict.fromkeys(m.hub for m in METRICS.values() if m.hub and m.name in names)) or None,
    )
    missing = [] if license is not None else ["# license: TO FILL IN, by its name on the hub (apache-2.0, mit, …)"]
    return "\n".join(["---", *data.to_yaml().strip().splitlines(), *missing, "---", ""])


def _hub_dataset_names(recipe: Recipe) -> list[str]:
    splits = (recipe.data.train.all_files, recipe.data.dev.files, recipe.data.test.files)
    names = [HubName.read(name).source for files in splits for name in files if name.startswith(HUB)]
    return list(dict.fromkeys(names))


def _format_summary(path: Path, recipe: Recipe) -> str:
    adapter, train = recipe.adapter, recipe.train
    targets = adapter.targets if isinstance(adapter.targets, str) else ", ".join(adapter.targets)
    kind = f"LoRA of rank {adapter.rank} (alpha {adapter.numerator:g}) on {format_code_span(targets)}"
    if adapter.soft_tokens is not None:
        kind = f"{adapter.soft_tokens} soft tokens before every row"
    steps = _describe_steps(path, FINE_TUNE, f" of {train.batch_size * train.accumulate} rows")
    text = f"{kind}; regularizer `{recipe.regularizer.kind}`; {steps}, seed {train.seed}"
    if recipe.warmup is not None:
        read = ["selected data"] * (recipe.warmup.own < 1) + ["the target's own texts"] * (recipe.warmup.own > 0)
        text += f", after a warm-up of {_describe_steps(path, WARM_UP)} on {' and '.join(read)}"
    return text + ". Made with Flatshift.\n"


def _describe_steps(path: Path, stage: str, size: str = "") -> str:
    done = read_json_object(path / "stages" / stage / DONE, "steps", "target_steps")
    text = f"{done['steps']:,} steps{size}"
    if done.get("stopped_early"):
        text += f" (stopped early, as dev got no better; {done['target_steps']:,} were asked for)"
    if done.get("best_step") not in (None, done["steps"]):
        text += f", of which this adapter is the one after {done['best_step']:,}, best on dev"
    if done.get("attempts", 1) > 1:
        text += f", in {done['attempts']} attempts"
    return text


def _read_evaluation(path: Path) -> dict[str, dict[str, Any]]:
    file = path / "eval.json"
    return read_json_object(file) if file.is_file() else {}


def _format_metrics_table(evaluation: dict[str, dict[str, Any]]) -> str:
    if not evaluation:
        return "Not yet: this adapter was handed on before its evaluation.\n"
    rows = []
    for split, metrics in evaluation.items():
        for name, m in metrics.items():
            if find_metric(name).is_floor:
                continue
            baseline = metrics.get(find_metric(name).floor or "")
            floor = "" if baseline is None else format_number(baseline["value"])
            interval = "–" if m["low"] is None else f"{format_number(m['low'])} to {format_number(m['high'])}"
            rows.append([split, name, format_number(m["value"]), interval, floor, f"{m['n']:,}"])
    table = _format_table(["split", "metric", "value", "interval", "baseline", "items"], rows)
    return (
        table + "\nIntervals are bootstrap intervals over items of this one run; they say nothing about other seeds. "
        "The baseline is the figure of always answering the commonest class (or set of classes) of the same items, or "
        "the mean of the training targets.\n"
    )


def _format_settings(recipe: Recipe) -> str:
    train = dataclasses.asdict(recipe.train)
    for name in ("device", "threads", "save_every", "keep"):
        del train[name]
    adapter = dataclasses.asdict(recipe.adapter)
    for name in ("start", "under"):
        if adapter[name] is not None:
            adapter[name] = run_title(Path(adapter[name]))
    task = dataclasses.asdict(recipe.task)
    if task.get("template") is not None:
        task["template"] = Path(task["template"]).name
    parts = {
        "task": task,
        "adapter": adapter,
        "optimizer": dataclasses.asdict(recipe.optimizer),
        "train": train,
        "regularizer": dataclasses.asdict(recipe.regularizer),
    }
    if recipe.warmup is not None:
        parts["warmup"] = dataclasses.asdict(recipe.warmup)
    if (selection := recipe.selection) is not None:
        parts["select"] = {"budget": selection.budget, "method": selection.method.kind}
    if recipe.mesh.size > 1:
        sizes = dataclasses.asdict(recipe.mesh).items()
        parts["mesh"] = {name: size for name, size in sizes if isinstance(size, int) and size > 1}
    rows = [
        [f"`{block}.{name}`", format_code_span(json.dumps(value, ensure_ascii=False), table=True)]
        for block, settings in parts.items()
        for name, value in settings.items()
    ]
    return _format_table(["setting", "value"], rows)


def _format_versions(environment: dict[str, Any]) -> str:
    lines = []
    for attempt in (environment, *environment.get("resumed", [])):
        versions = {"python": attempt.get("python"), **attempt.get("versions", {})}
        if listed := ", ".join(f"{name} {version}" for name, version in versions.items() if version):
            lines.append(f"{'' if attempt is environment else 'Resumed with '}{listed}.\n")
    return "\n".join(lines)


def _format_data(recipe: Recipe, inputs: Sequence[dict[str, Any]]) -> str:
    rows = []
    for entry in inputs:
        path, count = entry["path"], entry["rows"]
        name = format_code_span(path if path.startswith((SAMPLE, HUB)) else Path(path).name, table=True)
        rows.append([name, "–" if count is None else f"{count:,}", f"`{entry['sha256'] or '–'}`"])
    data, mixed = recipe.data, recipe.data.train.sources or {}
    sources: list[tuple[str, Any]] = [(format_code_span(name), source) for name, source in mixed.items()]
    notes = [f"{name}: a source of the training rows, of weight {source.weight:g}." for name, source in sources]
    for name, part in (("train", data.train), *sources, ("dev", data.dev), ("test", data.test)):
        if (first := getattr(part, "first", None)) is not None:
            notes.append(f"{name}: its first {first:,} rows were read.")
        if part.limit is not None:
            notes.append(f"{name}: {part.limit:,} rows of it were used, drawn by the seed.")
    if data.holdout:
        splits = " and as much for ".join(data.splits_to_fill)
        notes.append(f"A share of {data.holdout:g} of the training rows was set apart for {splits}.")
    if data.label_noise:
        notes.append(f"**{100 * data.label_noise:.3g}% of the training labels were made wrong on purpose.**")
    return "\n".join([_format_table(["file", "rows", "SHA-256"], rows), *(f"- {note}" for note in notes), ""])


def _without_directories(commands: str, recipe: Recipe) -> str:
    """Return commands, one a line, without secrets and with local files by their names alone. Hub names and texts are
    those that the recipe has as they were given; its paths are absolute."""
    values = flatten_settings(dataclasses.asdict(recipe)).values()
    kept = {value for value in values if isinstance(value, str) and not value.startswith("/")}
    lines, begun = [], ""
    for line in commands.splitlines(keepends=True):
        begun += line
        with contextlib.suppress(ValueError):  # a word with a line break has not ended
            lines.append(join_command(_without_directory(word, kept) for word in shlex.split(begun)))
            begun = ""
    return "\n".join(lines)


def _without_directory(value: Any, kept: Collection[str]) -> Any:
    """Return a word of a command, or a value in it, with the names of local files alone."""
    if isinstance(value, dict):
        return {key: _without_directory(child, kept) for key, child in value.items()}
    if isinstance(value, list):
        return [_without_directory(child, kept) for child in value]
    if not isinstance(value, str) or value in kept or is_remote(value) or value.startswith((SAMPLE, HUB, PACKAGE)):
        return value
    if value.startswith("--") and "=" in value:
        flag, _, value = value.partition("=")
        return f"{flag}={_without_directory(value, kept)}"
    if value.startswith(("[", "{")):
        with contextlib.suppress(yaml.YAMLError):
            tree = _without_directory(yaml.safe_load(value), kept)
            return yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1e6).strip()
    return value.rstrip("/").rpartition("/")[2]


def _backbone_lines(backbone: str, base: str) -> list[str]:
    note = "converted once by Flatshift: pip install 'flatshift[gguf]'" if base.endswith(".gguf") else ""
    if base == backbone and assets.backbone_directory(backbone) is not None:
        note = "ships with Flatshift: pip install flatshift"
    if note:
        code = f"str(open_backbone({base!r}).directory)  # {note}"
        return ["from flatshift.finetune.models.backbone import open_backbone", "", f"BACKBONE = {code}"]
    if backbone.startswith(PACKAGE) and base == published_name(backbone):
        package, _, folder = backbone.removeprefix(PACKAGE).partition("/")
        path = f"str(files({package!r}) / {folder!r})  # in the Python package {package}"
        return ["from importlib.resources import files", "", f"BACKBONE = {path}"]
    return ["", f"BACKBONE = {base!r}  # hub name or directory"]


def _format_usage(recipe: Recipe, tokenizer: Any, labels: Sequence[str] | None, base: str, form: Form) -> list[str]:
    if form == "gguf":
        words = ["-no-cnv", "-p", sample_prompt(recipe.task)]
        if recipe.task.input_format.uses_chat_template:
            system = getattr(recipe.task, "system", None)
            words = ["-cnv"] if system is None else ["-cnv", "-sys", system]
        return [format_code_block(shlex.join(["llama-cli", "-m", "model.gguf", "--temp", "0", *words]), "bash")]
    if form == "ollama":
        return [format_code_block("ollama create mine -f Modelfile\nollama run mine 'some text'", "bash")]
    if form == "vllm":
        return [format_code_block("python check_vllm.py    # compares vLLM with the run\nvllm serve .", "bash")]
    lines = [format_code_block(_usage_code(recipe, tokenizer, labels, base, merged=form == "merged"), "python")]
    if form == "adapter" and recipe.adapter.experts is not None:
        lines.append(
            "vLLM leaves adapters of experts out without a word (vllm-project/vllm#41384): for it fold this one into "
            "the backbone, as `flatshift export --to vllm` does.\n"
        )
    return lines


@dataclass(frozen=True)
class UsageExample:
    """Python lines for the model card that show how to call a model of a task, given `tokenizer` and `model`."""

    text: str
    """Expression of the input text."""
    answer: str
    """Line that prints the result from `logits`, or from the generated `answer`."""
    has_special_tokens: bool = False
    """True if the text already contains them, so that the tokenizer must add none."""
    ends: int | list[int] | None = None
    """Token ids that end a generated answer."""
    before: Sequence[str] = ()
    """Lines at the top of the script, such as the list of class names."""
    options: str = ""
    """Additional arguments of the backbone's `from_pretrained`."""
    ask: Sequence[str] = ()
    """Lines that build the input text."""


def usage_example(task: Task, tokenizer: Any, label_names: Sequence[str] | None) -> UsageExample:
    """Return code that calls a model of `task` with inputs formatted as in training.

    label_names: classes in head order, if the task has any.
    """
    if task.traits.masks_tokens:
        answer = "print(tokenizer.decode(logits[0, ids[0] == tokenizer.mask_token_id].argmax(-1)))"
        return UsageExample("text", answer, ask=[f"text = 'some {tokenizer.mask_token} text'"])
    if task.traits.is_sequence_level and task.traits.has_targets:
        answer = "print(float(logits))  # in the units of the training targets"
        return UsageExample("'some text'", answer, options=", num_labels=1, ignore_mismatched_sizes=True")
    if task.traits.is_sequence_level:
        several = "[label for label, logit in zip(LABELS, logits[0]) if logit > 0]"
        return UsageExample(
            "'some text'",
            f"print({several if task.multi else 'LABELS[int(logits.argmax())]'})",
            before=[f"LABELS = {list(label_names or ())!r}"],
            options=", num_labels=len(LABELS), ignore_mismatched_sizes=True",
        )
    start = "" if task.traits.encoder_decoder else ", ids.shape[1] :"
    answer = f"print(tokenizer.decode(answer[0{start}], skip_special_tokens=True))"
    if not task.input_format.uses_chat_template:
        ask = [f"prompt = {sample_prompt(task)!r}"]
        return UsageExample("prompt", answer, ends=get_end_token(tokenizer), ask=ask)
    ends = {get_end_token(tokenizer)}
    with contextlib.suppress(UserError):  # an end of turn in ordinary tokens cannot stop generation
        ends |= {question.stop for question in task.input_format.build_text_prompts(["some text"], tokenizer)}
    turns = [{"role": "user", "content": "some text"}]
    if (system := getattr(task, "system", None)) is not None:  # only kinds with a chat template have the setting
        turns.insert(0, {"role": "system", "content": system})
    template = "prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)"
    stops = sorted(end for end in ends if end is not None)
    return UsageExample("prompt", answer, has_special_tokens=True, ends=stops, ask=[f"turns = {turns!r}", template])


def sample_prompt(task: Task) -> str:
    """Return an example prompt of a task that writes text: its template with `some text` in each column."""
    if task.traits.reads_documents or task.input_format.uses_chat_template:
        return "Once upon a time"
    return task.input_format.render(Row(dict.fromkeys(task.input_format.columns(), "some text"), "example", "example"))


def _usage_code(recipe: Recipe, tokenizer: Any, labels: Sequence[str] | None, base: str, *, merged: bool) -> str:
    task = recipe.task
    use = usage_example(task, tokenizer, labels)
    special, arguments = ", add_special_tokens=False" if use.has_special_tokens else "", "input_ids=ids"
    if (has_head := task.traits.is_sequence_level) or task.traits.masks_tokens:  # rows were cut, pairs have segments
        special, arguments = ", truncation=True", "**inputs"
    pair = "; the second text of a pair goes after the first" if "text2" in task.optional_columns() else ""
    options = "" if merged else f", eos_token_id={use.ends}, pad_token_id={tokenizer.pad_token_id}"
    if merged:
        loading = [
            "",
            "MODEL = '.'  # hub name or directory of this model",
            "",
            "tokenizer = AutoTokenizer.from_pretrained(MODEL)",
            f"model = {task.traits.auto_class}.from_pretrained(MODEL).eval()",
        ]
    else:
        loading = [
            *_backbone_lines(recipe.backbone, base),
            "ADAPTER = '.'  # hub name or directory of this adapter",
            "",
            "tokenizer = AutoTokenizer.from_pretrained(ADAPTER)",
            f"backbone = {task.traits.auto_class}.from_pretrained(BACKBONE, dtype=torch.float32{use.options})",
            *["backbone.config.get_text_config().pad_token_id = tokenizer.pad_token_id"] * has_head,
            "model = PeftModel.from_pretrained(backbone, ADAPTER).eval()",
        ]
    lines = [
        *use.before,
        "import torch",
        *([] if merged else ["from peft import PeftModel"]),
        f"from transformers import {task.traits.auto_class}, AutoTokenizer",
        *loading,
        "",
        *use.ask,
        f"inputs = tokenizer({use.text}, return_tensors='pt'{special})  # as in training{pair}",
        "ids = inputs['input_ids']",
    ]
    if task.traits.is_generative and task.traits.encoder_decoder:
        lines.append("decoder_input_ids = torch.tensor([[model.config.decoder_start_token_id]])")
        arguments += ", decoder_input_ids=decoder_input_ids"
    lines += ["with torch.no_grad():", f"    logits = model({arguments}).logits"]
    if task.traits.is_generative:
        lines.append(
            "    answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), "
            f"max_new_tokens={task.max_new_tokens}, do_sample=False, "
            f"use_cache={recipe.adapter.soft_tokens is None}{options})"
        )
    return "\n".join([*lines, use.answer])
