"""Every setting of a recipe, and every number of a command line, at values that mean nothing."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks.faults.bad_inputs import BadInput, files, good

BEYOND = str(2**64)
NUMBERS = ("nan", "inf", "-inf", "-1", "0", BEYOND, "")
"""As they stand behind a flag of a recipe's number."""
MEANT: Mapping[str, frozenset[str]] = {
    value: frozenset(keys.split())
    for value, keys in {
        "0": "data.holdout data.label_noise data.checks.most eval.train_limit eval.cold eval.answers adapter.layers "
        "adapter.dropout "
        "train.seed train.max_cut train.backbone_dropout train.skip_nonfinite train.spikes.back train.eval_every "
        "train.save_every optimizer.weight_decay optimizer.warmup record.sharpness "
        "task.max_truncated task.max_unsupervised task.label_smoothing "
        "regularizer.sigma regularizer.beta regularizer.ema regularizer.tolerance regularizer.rho "
        "regularizer.momentum regularizer.eta regularizer.alpha regularizer.lr_scale "
        "select.hygiene.length.min_chars select.hygiene.length.min_words select.hygiene.repetition.lines "
        "select.hygiene.repetition.line_chars select.hygiene.repetition.top_ngrams "
        "select.hygiene.repetition.repeated_ngrams select.hygiene.repetition.min_words "
        "select.hygiene.decontaminate.margin select.method.prior select.method.attract "
        "select.method.repel select.method.floor select.method.sigma",
        "-1": "regularizer.sign",
        "": "task.prompt task.system task.prefix select.cache select.embedder.path select.embedder.pool "
        "select.embedder.target select.embedder.negative",
    }.items()
}
"""Value → the keys at which it says something: none of it, nothing before it, not kept, or the other direction."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A key of a recipe that takes a value."""

    key: str
    kinds: tuple[tuple[str, str], ...]
    """Keys of components above it that have a kind, and the kind that has this setting."""
    number: bool

    def values(self) -> Iterator[str]:
        """Values that mean nothing here, as a command line has them."""
        key = self.key.replace("select.method.inside.", "select.method.")
        for value in NUMBERS if self.number else ("",):
            if key not in MEANT.get(value, ()):
                yield value


def settings() -> list[Setting]:
    """All that take a number or a text."""
    from flatshift.experiments.recipe.schema import Recipe

    results = dict.fromkeys(_below(Recipe, "", ()))
    return [one for one in results if not one.key.startswith(("comparison", "extends"))]


def _below(cls: type, path: str, kinds: tuple[tuple[str, str], ...]) -> Iterator[Setting]:
    from flatshift.experiments.recipe.schema import setting_key

    hints = typing.get_type_hints(cls)
    for one in dataclasses.fields(cls):
        key = f"{path}.{setting_key(one.name)}" if path else one.name
        options = typing.get_args(hints[one.name]) or (hints[one.name],)
        components = [option for option in options if dataclasses.is_dataclass(option)]
        for component in components:
            own = {field.name: field.default for field in dataclasses.fields(component)}.get("kind")
            named = ((f"{key}.kind", own),) if isinstance(own, str) and len(components) > 1 else ()
            yield from _below(typing.cast(type, component), key, (*kinds, *named))
        scalars = _scalars(hints[one.name])
        if not components and scalars & {int, float, str}:
            yield Setting(key, kinds, bool(scalars & {int, float}))


def _scalars(hint: Any) -> set[Any]:
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return set()
    return set().union(*map(_scalars, inner)) if inner else {hint}


def numbers_of_commands() -> Iterator[tuple[str, str, type]]:
    """Command, flag and kind of each number that a command line takes."""
    from flatshift import commands

    for name in commands.SUMMARIES:
        flags = importlib.import_module(f"flatshift.commands.{name}").Flags
        hints = typing.get_type_hints(flags)
        for field in dataclasses.fields(flags):
            if result := _scalars(hints[field.name]) & {int, float}:
                yield name, f"--{field.name.replace('_', '-')}", result.pop()


def bad_settings(root: Path) -> list[BadInput]:
    """Inputs of both kinds, over the sandbox `root`: two values of a setting, once where many kinds of a component have
    it; tests/flatshift/test_command_line.py has them all."""
    return [*_of_recipes(root), *_of_commands(root)]


def _of_recipes(root: Path) -> Iterator[BadInput]:
    seen = set()
    for number, one in enumerate(settings()):
        if one.key in seen or ".inside." in one.key:
            continue
        seen.add(one.key)
        above = [word for key, kind in one.kinds for word in (f"--{key}", kind)]
        values = list(one.values())
        for value in dict.fromkeys(values[(number + step) % len(values)] for step in (0, 3) if values):
            argv = ("train", "recipe.yaml", "--out", "out", *above, f"--{one.key}", value)
            places = (one.key, one.key.rpartition(".")[2])
            yield BadInput(f"setting --{one.key} {value!r}", argv, places, good(root))


def _of_commands(root: Path) -> Iterator[BadInput]:
    run, rows = str(root / "writer"), str(root / "rows.jsonl")
    begin: dict[str, tuple[str, ...]] = {
        "plan": ("plan",),
        "select": ("select", "--pool", rows, "--target", rows, "--budget", "3", "--out", "out"),
        "sweep": ("sweep", "recipe.yaml", "--out", "out", "--grid", "adapter.rank=1,2"),
        "forecast": ("forecast", "recipe.yaml", "--out", "out"),
        "compare": ("compare", "flat-comparison", "--out", "out"),
        "eval": ("eval", run, "--data", rows, "--out", "out"),
        "predict": ("predict", run, "--data", rows, "--out", "out.jsonl"),
        "chat": ("chat", run),
        "serve": ("serve", run),
        "generate": ("generate", run, "--prompt", "a"),
    }
    beside = {
        ("sweep", "--points"): ("--design", "random"),
        **{("sweep", flag): ("--on", "slurm") for flag in ("--cpus", "--gpus", "--memory", "--time")},
        ("sweep", "--epsilon"): ("--bisect", "data.train.limit"),
        ("select", "--epsilon"): ("--method", "gotd"),
    }

    prepare = files(root, {"sweep/sweep.json": "{}"})
    for name, flag, kind in numbers_of_commands():
        values = ["nan", "inf", "-1"] if kind is float else ["-1", "1.5", "x"]
        for value in (*values, ""):
            argv = (*begin[name], *beside.get((name, flag), ()), flag, value)
            yield BadInput(f"number: {name} {flag} {value!r}", argv, (flag, flag[2:].replace("-", "_")), prepare)
