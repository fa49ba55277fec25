"""From a command line to the study that does the work, in this process or as the ranks of a mesh.

Dotted flags (`--train.steps 100`) and plain recipe keys (`--backbone gpt2`) are laid over the recipe's YAML tree and
go through the same strict builder; a command's own flags are parsed by tyro. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.recipe import (
    from_override,
    load_recipe,
    refuse_contradictions,
    resume_recipe,
    shipped_recipe,
    shipped_recipes,
)
from experiments.recipe.config import Recipe
from experiments.recipe.mesh import axis_flags, mesh_flags, named_axes
from finetune.errors import UserError
from finetune.launch import consistency, failure, spawn
from finetune.models.quantize import check_available
from finetune.parallel.rules import Settings, check_settings
from finetune.run_directory import RECIPE, refuse_old
from flatshift import api, leaving
from flatshift.flags import (
    CompareFlags,
    DemoFlags,
    DoctorFlags,
    EvalFlags,
    RecipesFlags,
    ReportFlags,
    SelectFlags,
    SweepFlags,
    TrainFlags,
)
from flatshift.flags import parse as _parse

_RECIPE_KEYS = {field.name for field in dataclasses.fields(Recipe)}


def _split_overrides(argv: list[str], flags: type) -> tuple[list[str], list[Any]]:
    """Take recipe keys out of a command line: `--a.b value`, `--a.b=value`, and undotted recipe fields."""
    own = {field.name for field in dataclasses.fields(flags)}
    rest: list[str] = []
    overrides = []
    tokens = iter(argv)
    for token in tokens:
        name, has_value, value = token.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        head = key.split(".", 1)[0]
        if not token.startswith("--") or key in own or ("." not in key and head not in _RECIPE_KEYS):
            rest.append(token)
            continue
        if not has_value:
            try:
                value = next(tokens)
            except StopIteration:
                raise UserError(f"--{name} needs a value") from None
        overrides.append(from_override(key, value, f"--{name}"))
    refuse_contradictions(overrides)
    return rest, overrides


def _demo(argv: list[str]) -> int:
    flags = _parse(DemoFlags, "demo", argv)
    from experiments.workflows.demo import demo

    print(demo(flags.out, draw=api.draw))
    return 0


def _select(argv: list[str]) -> int:
    rest, overrides = _split_overrides(argv, SelectFlags)
    flags: SelectFlags = _parse(SelectFlags, "select", rest)
    if flags.out is None:
        raise UserError("--out is missing: name the directory to make")
    if flags.recipe is None and not (flags.pool and flags.target and flags.budget is not None):
        raise UserError("select needs a RECIPE, or --pool, --target and --budget together")
    own = {
        "select.pool.files": (flags.pool or None, "--pool"),
        "select.target.files": (flags.target or None, "--target"),
        "select.negative.files": (flags.negative or None, "--negative"),
        "select.budget": (flags.budget, "--budget"),
        "select.method.kind": (flags.method, "--method"),
        "select.method.epsilon": (flags.epsilon, "--epsilon"),
        "select.method.memory_gib": (flags.memory, "--memory"),
        "select.columns.text": (flags.text_column, "--text-column"),
        "select.columns.id": (flags.id_column, "--id-column"),
        "select.domain_column": (flags.domain_column, "--domain-column"),
        "select.bad_rows": (flags.bad_rows, "--bad-rows"),
        "train.seed": (flags.seed, "--seed"),
    }
    if flags.embedder in (None, "tfidf", "backbone"):
        own["select.embedder.kind"] = (flags.embedder, "--embedder")
    else:
        static = flags.embedder.startswith("static:")
        own["select.embedder.kind"] = ("static" if static else "encoder", "--embedder")
        own["select.embedder.path"] = (flags.embedder.removeprefix("static:"), "--embedder")
    if flags.pool_features or flags.target_features or flags.negative_features:
        if not (flags.pool_features and flags.target_features):
            raise UserError("--pool-features and --target-features belong together: give both")
        if flags.embedder is not None:
            raise UserError("--embedder and --pool-features exclude each other: keep one of them")
        own["select.embedder.kind"] = ("features", "--pool-features")
        own["select.embedder.pool"] = (flags.pool_features, "--pool-features")
        own["select.embedder.target"] = (flags.target_features, "--target-features")
        own["select.embedder.negative"] = (flags.negative_features, "--negative-features")
    for key, (value, where) in own.items():
        if value is not None:
            overrides.append(from_override(key, value, where))
    refuse_contradictions(overrides)
    resolved = load_recipe(flags.recipe, overrides)
    from experiments.select.select import select

    manifest = select(resolved, flags.out, quiet=flags.json)
    if flags.json:
        print(json.dumps(manifest, indent=2, ensure_ascii=False))
    return 0


def _train(argv: list[str]) -> int:
    rest, overrides = _split_overrides(argv, TrainFlags)
    flags: TrainFlags = _parse(TrainFlags, "train", rest)
    if (flags.recipe is None) == (flags.resume is None):
        raise UserError("train needs either a RECIPE (`flatshift recipes list`) or --resume RUN_DIR")
    if flags.resume is not None:
        if flags.out is not None:
            raise UserError("--out and --resume exclude each other: a resumed run stays in its directory")
        found = resume_recipe(flags.resume, overrides)
        if chosen := mesh_flags(found.recipe, given=named_axes(overrides)):
            return _train([*argv, *chosen])
        if spawn.wants_ranks(found.recipe.mesh):
            return _spawn("train", argv, found.recipe, flags.resume)
        return _trained(flags, lambda: api.resume(flags.resume, overrides, quiet=flags.json))
    resolved = load_recipe(flags.recipe, overrides)
    if chosen := mesh_flags(resolved.recipe):
        return _train([*argv, *chosen])
    if spawn.wants_ranks(resolved.recipe.mesh):
        if flags.out is None:
            with consistency.dated_directory("runs", resolved.name) as new:
                return _spawn("train", [*argv, "--out", str(new)], resolved.recipe, new)
        refuse_old(flags.out, resumable=True)
        return _spawn("train", argv, resolved.recipe, flags.out)
    if flags.out is not None and spawn.restarted() and (flags.out / RECIPE).is_file():
        _, axes = _split_overrides(axis_flags(resolved.recipe.mesh), TrainFlags)  # there may be fewer ranks than before
        return _trained(flags, lambda: api.resume(flags.out, axes, quiet=flags.json))
    if flags.out is None and failure.several() and spawn.restarts_allowed():
        raise UserError("--out is missing: a job that its launcher may restart finds its run directory by it")
    return _trained(flags, lambda: api.train(resolved, flags.out, quiet=flags.json))


def _spawn(command: str, argv: list[str], recipe: Recipe, run: Path) -> int:
    """The same command line once more, as the ranks of the recipe's mesh."""
    check_settings(Settings.of(recipe))
    check_available(recipe.train.quantization)
    return spawn.spawn(
        ["-m", "flatshift", command, *argv], ranks=recipe.mesh.size, resume=run, threads=recipe.train.threads
    )


def _trained(flags: TrainFlags, train: Callable[[], dict[str, Any]]) -> int:
    result = train()
    if flags.json and failure.rank() == 0:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    return 0


def _sweep(argv: list[str]) -> int:
    rest, overrides = _split_overrides(argv, SweepFlags)
    flags: SweepFlags = _parse(SweepFlags, "sweep", rest)
    if flags.out is None:
        raise UserError("--out is missing: name the sweep directory to make or continue")
    from experiments.studies.sweep import sweep

    return sweep(
        flags.recipe,
        overrides,
        flags.out,
        grid=flags.grid,
        seeds=flags.seeds,
        design=flags.design,
        points=flags.points,
        bisection=flags.bisect,
        epsilon=flags.epsilon,
        jobs=flags.jobs,
        stack=flags.stack,
        devices=flags.devices,
        max_cells=flags.max_cells,
        rerun_stale=flags.rerun_stale,
        rerun_failed=flags.rerun_failed,
    )


def _compare(argv: list[str]) -> int:
    rest, overrides = _split_overrides(argv, CompareFlags)
    flags: CompareFlags = _parse(CompareFlags, "compare", rest)
    if flags.out is None:
        raise UserError("--out is missing: name the directory to make or continue")
    from experiments.studies.compare.command import compare, summary

    document = compare(
        flags.recipe,
        flags.out,
        data=flags.data,
        overrides=overrides,
        methods=flags.methods,
        tasks=flags.tasks,
        jobs=flags.jobs,
    )
    print(json.dumps(document, indent=2, ensure_ascii=False) if flags.json else "\n".join(summary(document)))
    if not flags.json:
        print(flags.out / "report.html")
    return 1 if any(run["status"] == "failed" for run in document["diverged"]) else 0


def _eval(argv: list[str]) -> int:
    rest, overrides = _split_overrides(argv, EvalFlags)
    flags: EvalFlags = _parse(EvalFlags, "eval", rest)
    if flags.harness:
        return leaving.harness(flags, overrides)
    if given := [name for name in leaving.harness_flags(flags) if getattr(flags, name) is not None]:
        raise UserError(f"--{given[0].replace('_', '-')} has a meaning with --harness only; add that, or leave it out")
    if flags.sharpness:
        return _sharpness(flags, overrides)
    if given := [name for name in _sharpness_flags(flags) if getattr(flags, name) is not None]:
        flag = given[0].replace("_", "-")
        raise UserError(f"--{flag} has a meaning with --sharpness only; add that, or leave it out")
    recipe = resume_recipe(flags.run, overrides).recipe
    if chosen := mesh_flags(recipe, given=named_axes(overrides)):
        return _eval([*argv, *chosen])
    if spawn.wants_ranks(recipe.mesh):
        return _spawn("eval", argv, recipe, flags.run)
    from experiments.workflows.evaluate import evaluate_run, render

    result = evaluate_run(flags.run, data=flags.data, overrides=overrides, quiet=flags.json)
    if failure.rank() == 0:
        print(json.dumps(result, indent=2, ensure_ascii=False) if flags.json else render(result))
    return 0


def _sharpness_flags(flags: EvalFlags) -> list[str]:
    return [field.name for field in dataclasses.fields(flags) if field.name.startswith("sharpness_")]


def _sharpness(flags: EvalFlags, overrides: list[Any]) -> int:
    """`eval --sharpness`; what was not given is left to the study's own defaults."""
    from regularizers.sharpness.config import Sharpness

    given = {name.removeprefix("sharpness_"): getattr(flags, name) for name in _sharpness_flags(flags)}
    given = {name: value for name, value in given.items() if value is not None}
    own = {field.name for field in dataclasses.fields(Sharpness)}
    settings = Sharpness(**{name: value for name, value in given.items() if name in own})
    from experiments.workflows.sharpness import measure_run, render

    rest = {name: value for name, value in given.items() if name not in own}
    result = measure_run(
        flags.run, settings, data=flags.data, overrides=overrides, quiet=flags.json, draw=api.draw, **rest
    )
    print(json.dumps(result, indent=2, ensure_ascii=False) if flags.json else render(result))
    return 0


def _report(argv: list[str]) -> int:
    flags: ReportFlags = _parse(ReportFlags, "report", argv)
    if not flags.runs:
        raise UserError("report needs a DIRECTORY: a run, selection, sweep or study, or a folder of several")
    if flags.out is not None and flags.out.is_dir():
        raise UserError(f"--out {flags.out} is a directory; name an HTML file, for example {flags.out / 'report.html'}")
    from experiments.report import build_report
    from finetune.lock import owned

    out = flags.out or flags.runs[0] / "report.html"
    with owned(out):
        print(build_report(flags.runs, out=out))
    return 0


def _recipes(argv: list[str]) -> int:
    flags: RecipesFlags = _parse(RecipesFlags, "recipes", argv)
    if flags.action == "list":
        summaries = {}
        for name, path in shipped_recipes().items():
            first = path.read_text(encoding="utf-8").splitlines()[0]
            summaries[name] = first.removeprefix("#").strip()
        if flags.json:
            print(json.dumps(summaries, indent=2, ensure_ascii=False))
        else:
            width = max(map(len, summaries))
            print("\n".join(f"{name.ljust(width)}  {summary}" for name, summary in summaries.items()))
        return 0
    if flags.name is None:
        raise UserError(f"recipes {flags.action} needs a NAME: {', '.join(shipped_recipes())}")
    text = shipped_recipe(flags.name).read_text(encoding="utf-8")
    if flags.action == "show":
        sys.stdout.write(text)
        return 0
    target = flags.to or Path(f"{flags.name}.yaml")
    from finetune.atomic import write_text
    from finetune.lock import owned

    with owned(target, instead="name another file"):
        if target.exists():
            raise UserError(f"{target} exists; name another file or remove it")
        write_text(target, text)
    print(target)
    return 0


def _doctor(argv: list[str]) -> int:
    flags: DoctorFlags = _parse(DoctorFlags, "doctor", argv)
    from experiments.workflows.doctor import doctor, render
    from flatshift.installation import shadows

    result = doctor(shadows(), deep=flags.deep)
    print(json.dumps(result, indent=2, ensure_ascii=False) if flags.json else render(result))
    return 0 if result["ok"] else 1


_RUN: dict[str, Callable[[list[str]], int]] = {
    "demo": _demo,
    "select": _select,
    "train": _train,
    "sweep": _sweep,
    "compare": _compare,
    "eval": _eval,
    "generate": leaving.generate,
    "report": _report,
    "merge": leaving.merge,
    "export": leaving.export,
    "recipes": _recipes,
    "doctor": _doctor,
}


def run(name: str, argv: list[str]) -> int:
    """Run command `name` with its arguments; returns the exit code."""
    return _RUN[name](argv)
