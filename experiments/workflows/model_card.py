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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows.run_parts import FINE_TUNE, WARM_UP
from flatshift.finetune import assets
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.data.encoding import get_end_token
from flatshift.finetune.data.formats import HUB, SAMPLE, HubName
from flatshift.finetune.data.rows import Row
from flatshift.finetune.digests import DONE
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.metrics import METRICS, find_metric
from flatshift.finetune.models.backbone import PACKAGE
from flatshift.finetune.tasks import Task

_PIPELINE_TAGS = {"AutoModelForMaskedLM": "fill-mask", "AutoModelForSequenceClassification": "text-classification"}
"""Pipeline tags of the hub by transformers class; any other writes text."""
Form = Literal["adapter", "merged", "gguf", "ollama", "vllm"]
_LOCAL_PATH = re.compile(r"(?<![\w.~:/-])(?:~|\.\.?)?/[^\s,'\"\]}]*")


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
    parts = [
        _format_metadata(path, recipe, base, license, judged=not added, form=form),
        f"# {recipe.task.kind} {'adapter on' if form == 'adapter' else 'model from'} {format_code_span(base)}\n",
        *([_describe_sum(added, rank)] if added else []),
        _format_summary(path, recipe),
    ]
    if form == "adapter" and base_model is None and _is_local(recipe.backbone):
        parts.append(
            "**To fill in:** the backbone was a local directory; put its hub name in place of "
            f"{format_code_span(base)}, here and "
            "in adapter_config.json (`flatshift export --base-model ORGANISATION/NAME` does both).\n"
        )
    parts += [
        "## Use\n",
        *_format_usage(recipe, tokenizer, labels, base, form),
        "## How it was evaluated\n",
        _format_metrics_table(_read_evaluation(path)),
        "## How it was trained\n",
        _format_settings(recipe),
        format_code_block(_without_paths((path / "command.txt").read_text(encoding="utf-8").strip())),
        _format_versions(read_json_object(path / "environment.json", "versions")),
        "## Data\n",
        _format_data(recipe, read_json_object(path / "manifest.json", "inputs")["inputs"]),
        "## Licence\n",
        _format_licence(base, license),
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
    return assets.backbone_directory(backbone) is None and Path(backbone).expanduser().is_dir()


# --------------------------------------------------------------------------------------------- markdown


def format_code_span(text: object, *, table: bool = False) -> str:
    """Return a code span of `text` that no text can close; line breaks become spaces."""
    shown = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    if table:
        shown = shown.replace("|", "\\|")
    return f"{ticks} {shown} {ticks}" if shown.startswith("`") or shown.endswith("`") else f"{ticks}{shown}{ticks}"


def format_code_block(text: str, language: str = "") -> str:
    """Return a code block of `text` that no text can close."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}\n"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


# --------------------------------------------------------------------------------------------- parts


def _format_metadata(path: Path, recipe: Recipe, base: str, license: str | None, *, judged: bool, form: Form) -> str:
    from huggingface_hub import ModelCardData

    found = {name for metrics in _read_evaluation(path).values() for name in metrics}
    data = ModelCardData(
        base_model=None if base.startswith(PACKAGE) else base,
        library_name={"adapter": "peft", "gguf": "gguf", "ollama": "gguf"}.get(form, "transformers"),
        license=license,
        pipeline_tag=_PIPELINE_TAGS.get(recipe.task.auto_class, "text-generation"),
        tags=[*(["lora"] if form == "adapter" else []), "flatshift", recipe.regularizer.kind],
        datasets=_hub_dataset_names(recipe) or None,
        metrics=list(dict.fromkeys(m.hub for m in METRICS.values() if judged and m.hub and m.name in found)) or None,
    )
    missing = [] if license is not None else ["# license: TO FILL IN, by its name on the hub (apache-2.0, mit, …)"]
    return "\n".join(["---", *data.to_yaml().strip().splitlines(), *missing, "---", ""])


def _hub_dataset_names(recipe: Recipe) -> list[str]:
    splits = (recipe.data.train.all_files, recipe.data.dev.files, recipe.data.test.files)
    names = [HubName.read(name).source for files in splits for name in files if name.startswith(HUB)]
    return list(dict.fromkeys(names))


def _describe_sum(added: Sequence[tuple[str, float]], rank: int | None) -> str:
    others = ", ".join(f"{format_code_span(name)} with weight {weight:g}" for name, weight in added)
    return (
        f"**A sum of adapters**, of rank {rank}: to the adapter described below (weight 1) is added {others}. The sum "
        "has not been evaluated: all figures, settings and data below are of that first adapter alone.\n"
    )


def _format_summary(path: Path, recipe: Recipe) -> str:
    adapter, train = recipe.adapter, recipe.train
    targets = adapter.targets if isinstance(adapter.targets, str) else ", ".join(adapter.targets)
    kind = f"LoRA of rank {adapter.rank} (alpha {adapter.numerator:g}) on {format_code_span(targets)}"
    if adapter.soft_tokens is not None:
        kind = f"{adapter.soft_tokens} soft tokens before every row"
    made = _describe_steps(path, FINE_TUNE, of=f" of {train.batch_size * train.accumulate} rows")
    text = f"{kind}; regularizer `{recipe.regularizer.kind}`; {made}, seed {train.seed}"
    if recipe.warmup is not None:
        text += f", after a warm-up of {_describe_steps(path, WARM_UP)} on selected data"
    return text + ". Made with Flatshift.\n"


def _describe_steps(path: Path, stage: str, *, of: str = "") -> str:
    done = read_json_object(path / "stages" / stage / DONE, "steps", "target_steps")
    text = f"{done['steps']:,} steps{of}"
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
            beside = metrics.get(find_metric(name).floor or "")
            floor = "" if beside is None else _format_number(beside["value"])
            interval = f"{_format_number(m['low'])} to {_format_number(m['high'])}"
            rows.append([split, name, _format_number(m["value"]), interval, floor, f"{m['n']:,}"])
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
    if recipe.select is not None:
        parts["select"] = {"budget": recipe.select.budget, "method": recipe.select.method.kind}
    mesh = {name: size for name, size in dataclasses.asdict(recipe.mesh).items() if isinstance(size, int) and size > 1}
    if recipe.mesh.size > 1:
        parts["mesh"] = mesh
    rows = [
        [f"`{part}.{name}`", format_code_span(json.dumps(value, ensure_ascii=False), table=True)]
        for part, settings in parts.items()
        for name, value in settings.items()
    ]
    return _format_table(["setting", "value"], rows)


def _format_versions(environment: dict[str, Any]) -> str:
    lines = []
    for attempt, prefix in ((environment, ""), *((one, "Resumed with ") for one in environment.get("resumed", []))):
        found = {"python": attempt.get("python"), **attempt.get("versions", {})}
        if shown := ", ".join(f"{name} {version}" for name, version in found.items() if version):
            lines.append(f"{prefix}{shown}.\n")
    return "\n".join(lines)


def _format_data(recipe: Recipe, inputs: Sequence[dict[str, Any]]) -> str:
    def shown(name: str) -> str:
        return format_code_span(name if name.startswith((SAMPLE, HUB)) else Path(name).name, table=True)

    rows = [
        [shown(i["path"]), "–" if i["rows"] is None else f"{i['rows']:,}", f"`{i['sha256'] or '–'}`"] for i in inputs
    ]
    data = recipe.data
    notes = [
        f"{name}: {split.limit:,} rows of it were used, drawn by the seed."
        for name, split in (("train", data.train), ("dev", data.dev), ("test", data.test))
        if split.limit is not None
    ]
    if data.holdout:
        notes.append(f"A share of {data.holdout:g} of the training rows was set apart for evaluation.")
    if data.label_noise:
        notes.append(f"**{data.label_noise:.0%} of the training labels were made wrong on purpose.**")
    return "\n".join([_format_table(["file", "rows", "SHA-256"], rows), *(f"- {note}" for note in notes), ""])


def _format_licence(base: str, license: str | None) -> str:
    lines = (
        [] if license is not None else ["- **To fill in:** the licence of this adapter (`license` in the metadata)."]
    )
    return "\n".join(
        [
            *lines,
            f"- **To fill in:** the licence of the backbone {format_code_span(base)}, which this adapter is of no "
            "use without.",
            "- **To fill in:** the licence of each file under Data, and who is to be named for it.",
            "",
        ]
    )


def _without_paths(command: str) -> str:
    return _LOCAL_PATH.sub(lambda found: found.group().rstrip("/").rsplit("/", 1)[-1], command)


# --------------------------------------------------------------------------------------------- use


def _backbone_lines(backbone: str, base: str) -> list[str]:
    if base == backbone and assets.backbone_directory(backbone) is not None:
        found = f"str(assets.backbone_directory({base!r}))  # ships with Flatshift: pip install flatshift"
        return ["from flatshift.finetune import assets", "", f"BACKBONE = {found}"]
    if backbone.startswith(PACKAGE) and base == published_name(backbone):
        package, _, folder = backbone.removeprefix(PACKAGE).partition("/")
        found = f"str(files({package!r}) / {folder!r})  # in the Python package {package}"
        return ["from importlib.resources import files", "", f"BACKBONE = {found}"]
    return ["", f"BACKBONE = {base!r}  # hub name or directory"]


def _format_usage(recipe: Recipe, tokenizer: Any, labels: Sequence[str] | None, base: str, form: Form) -> list[str]:
    if form == "gguf":
        prompt = sample_prompt(recipe.task)
        return [format_code_block(f"llama-cli -m model.gguf --temp 0 -no-cnv -p {shlex.quote(prompt)}", "bash")]
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
    answer: Sequence[str]
    """Lines that print the result from `logits`, or from the generated `answer`."""
    whole: bool = False
    """True if the text already contains its special tokens, so that the tokenizer must add none."""
    ends: int | list[int] | None = None
    """Token ids that end a generated answer."""
    before: Sequence[str] = ()
    """Lines at the top of the script, such as the list of class names."""
    options: str = ""
    """Additional arguments of the backbone's `from_pretrained`."""
    ask: Sequence[str] = ()
    """Lines that build the input text."""
    inputs: Sequence[tuple[str, str]] = ()
    """Further model inputs next to `input_ids`: (name, expression)."""


def usage_example(task: Task, tokenizer: Any, label_names: Sequence[str] | None) -> UsageExample:
    """Return code that calls a model of `task` with inputs formatted as in training.

    label_names: classes in head order, if the task has any.
    """
    if task.hides_tokens:
        return UsageExample(
            "text",
            ["print(tokenizer.decode(logits[0, ids[0] == tokenizer.mask_token_id].argmax(-1)))"],
            ask=[f"text = 'some {tokenizer.mask_token} text'"],
        )
    if task.is_sequence_level:
        return _head_example(task, label_names)
    if task.uses_chat_template:
        return _chat_example(task, tokenizer)
    start = "" if task.encoder_decoder else ", ids.shape[1] :"
    return UsageExample(
        "prompt",
        [f"print(tokenizer.decode(answer[0{start}], skip_special_tokens=True))"],
        ends=get_end_token(tokenizer),
        ask=[f"prompt = {sample_prompt(task)!r}"],
        inputs=[("decoder_input_ids", "torch.tensor([[model.config.decoder_start_token_id]])")]
        if task.encoder_decoder
        else [],
    )


def _head_example(task: Task, label_names: Sequence[str] | None) -> UsageExample:
    if task.has_targets:
        return UsageExample(
            "'some text'",
            ["print(float(logits))  # in the units of the training targets"],
            options=", num_labels=1, ignore_mismatched_sizes=True",
        )
    several = "[label for label, logit in zip(LABELS, logits[0]) if logit > 0]"
    return UsageExample(
        "'some text'",
        [f"print({several if task.multi else 'LABELS[int(logits.argmax())]'})"],
        before=[f"LABELS = {list(label_names or ())!r}"],
        options=", num_labels=len(LABELS), ignore_mismatched_sizes=True",
    )


def _chat_example(task: Task, tokenizer: Any) -> UsageExample:
    ends = {get_end_token(tokenizer)}
    with contextlib.suppress(UserError):  # an end of turn in ordinary tokens cannot stop generation
        ends |= {one.stop for one in task.ask_texts(["some text"], tokenizer)}
    turns = [{"role": "user", "content": "some text"}]
    if (system := getattr(task, "system", None)) is not None:  # only kinds with a chat template have the setting
        turns.insert(0, {"role": "system", "content": system})
    return UsageExample(
        "prompt",
        ["print(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))"],
        whole=True,
        ends=sorted(end for end in ends if end is not None),
        ask=[
            f"turns = {turns!r}",
            "prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)",
        ],
    )


def sample_prompt(task: Task) -> str:
    """Return an example prompt of a task that writes text: its template with `some text` in each column."""
    if task.documents or task.uses_chat_template:
        return "Once upon a time"
    return task.prompt_text(Row(dict.fromkeys(task.prompt_columns(), "some text"), "example", "example"))


def _usage_code(recipe: Recipe, tokenizer: Any, labels: Sequence[str] | None, base: str, *, merged: bool) -> str:
    task = recipe.task
    use = usage_example(task, tokenizer, labels)
    apart = ", add_special_tokens=False" if use.whole else ""
    more = "".join(f", {name}={name}" for name, _ in use.inputs)
    writes = (
        "    answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), "
        f"max_new_tokens={task.max_new_tokens}, do_sample=False, use_cache=True"
        + ("" if merged else f", eos_token_id={use.ends}, pad_token_id={tokenizer.pad_token_id}")
        + ")"
    )
    loads = [
        "from peft import PeftModel",
        f"from transformers import {task.auto_class}, AutoTokenizer",
        *_backbone_lines(recipe.backbone, base),
        "ADAPTER = '.'  # hub name or directory of this adapter",
        "",
        "tokenizer = AutoTokenizer.from_pretrained(ADAPTER)",
        f"backbone = {task.auto_class}.from_pretrained(BACKBONE, dtype=torch.float32{use.options})",
        "model = PeftModel.from_pretrained(backbone, ADAPTER).eval()",
    ]
    if merged:
        loads = [
            f"from transformers import {task.auto_class}, AutoTokenizer",
            "",
            "MODEL = '.'  # hub name or directory of this model",
            "",
            "tokenizer = AutoTokenizer.from_pretrained(MODEL)",
            f"model = {task.auto_class}.from_pretrained(MODEL).eval()",
        ]
    lines = [
        *use.before,
        "import torch",
        *loads,
        "",
        *use.ask,
        f"ids = tokenizer({use.text}, return_tensors='pt'{apart})['input_ids']  # as in training",
        *(f"{name} = {expression}" for name, expression in use.inputs),
        "with torch.no_grad():",
        f"    logits = model(input_ids=ids{more}).logits",
        *([writes] if task.is_generative else []),
        *use.answer,
    ]
    return "\n".join(lines)
