"""`flatshift select`: choose warm-up data from a pool for a target."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from flatshift import outcome
from flatshift.api import draw_report
from flatshift.command_line import parse_command, print_json, recipe_arguments
from flatshift.experiments.recipe import Resolved, from_override, list_input_files, load_recipe, refuse_contradictions
from flatshift.experiments.recipe.rules import SPLIT_RULES, check_rules
from flatshift.experiments.run.console import force_exit_on_signal, pause_heartbeat
from flatshift.finetune.data.files import check_local_files
from flatshift.finetune.errors import UserError
from flatshift.finetune.launch import job, spawn

AGAIN = "what was reached is kept; run the same command again"


@dataclass(frozen=True)
class Flags:
    """Choose warm-up records from a pool for a target, by a recipe's `select` block or by flags."""

    recipe: Positional[str | None] = None
    """Recipe file or shipped recipe; optional when --pool, --target and --budget are given."""
    pool: tuple[str, ...] = ()
    """Candidate files: JSONL (.gz .xz .zst), CSV, Parquet; globs; `sample:pool`."""
    target: tuple[str, ...] = ()
    """Files with samples of the task; the rows that training would hold out for evaluation (--data.holdout, 0.1) are
    excluded."""
    budget: int | None = None
    """Records to choose, no text twice; with --select.method.repeats 8, cynical (the default) counts repeats too."""
    out: Path | None = None
    """Directory to create (required): missing, empty, or left by this same command when it was killed."""
    method: str | None = None
    """Scoring method: cynical (default for texts), gotd (for features), auto, moore-lewis, random or another kind of
    `select.method` (docs/recipes/select.md)."""
    negative: tuple[str, ...] = ()
    """Files with examples that must not be learnt (gotd-contrast)."""
    embedder: str | None = None
    """tfidf, tokens (n-grams of the backbone's tokens), gradients (of an adapter), backbone, static:PATH (word
    vectors), or the directory or hub name of an encoder."""
    pool_features: str | None = None
    """Your own features of the pool: .npy or a directory of shards, row i for record i; an address (s3://…) is copied
    into --select.cache."""
    target_features: str | None = None
    """Your own features of the target: .npy."""
    negative_features: str | None = None
    """Your own features of the negative examples: .npy."""
    epsilon: float | None = None
    """Entropic regularisation, as a multiple of the mean cost (gotd)."""
    memory: float | None = None
    """Memory limit of the transport solver, on top of the features, GiB (gotd)."""
    processes: int | None = None
    """Number of processes on this machine among which the passes over the pool are divided, one thread each (gotd);
    under torchrun, its processes are used. The selection does not depend on the number."""
    on: str | None = None
    """Run the passes over the pool by shards, on local[:WORKERS], slurm[:PARTITION] or ray[:ADDRESS] (classifier,
    cynical, dsir, gotd, knn, moore-lewis). The selection is the same."""
    seed: int | None = None
    """Seed of every random draw."""
    text_column: str | None = None
    """Column that holds the text."""
    id_column: str | None = None
    """Column that holds a record's id."""
    domain_column: str | None = None
    """Column that names a record's domain."""
    bad_rows: Literal["refuse", "skip"] | None = None
    """Stop at a malformed record, or skip and count it."""
    json: bool = False
    """Print the manifest as JSON."""


def run(argv: list[str]) -> int:
    flags, overrides = parse_command(Flags, "select", argv)
    if flags.out is None:
        raise UserError("--out is missing: name the directory to make")
    if flags.recipe is None and not (flags.pool and flags.target and flags.budget is not None):
        raise UserError("select needs a RECIPE, or --pool, --target and --budget together")
    settings: dict[str, tuple[Any, str]] = {
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
    # the kind comes first: a change of kind drops the settings of the other
    if flags.embedder in (None, "tfidf", "tokens", "gradients", "backbone"):
        settings["select.embedder.kind"] = (flags.embedder, "--embedder")
    else:
        path = flags.embedder.removeprefix("static:")
        settings["select.embedder.kind"] = ("encoder" if path == flags.embedder else "static", "--embedder")
        settings["select.embedder.path"] = (path, "--embedder")
    if flags.pool_features or flags.target_features or flags.negative_features:
        if not (flags.pool_features and flags.target_features):
            raise UserError("--pool-features and --target-features belong together: give both")
        if flags.embedder is not None:
            raise UserError("--embedder and --pool-features exclude each other: keep one of them")
        settings["select.embedder.kind"] = ("features", "--pool-features")
        for name in ("pool", "target", "negative"):
            settings[f"select.embedder.{name}"] = (getattr(flags, f"{name}_features"), f"--{name}-features")
    overrides += [from_override(key, value, flag) for key, (value, flag) in settings.items() if value is not None]
    refuse_contradictions(overrides)
    words = recipe_arguments(argv, Flags, without="select")
    words += [] if flags.seed is None else ["--train.seed", str(flags.seed)]
    resolved = load_recipe(flags.recipe, overrides)
    check_local_files(list_input_files(resolved.recipe))
    if spawn.is_launched_rank():
        return _select_on_ranks(flags, resolved, words)
    if flags.processes is not None:
        if flags.processes < 1:
            raise UserError(f"--processes must be at least 1, got {flags.processes}")
        check_rules(resolved.recipe, SPLIT_RULES)
        command = ["-m", "flatshift", "select", *argv]
        with pause_heartbeat():
            return spawn.spawn(command, ranks=flags.processes, threads=1, resume_hint=AGAIN)
    with force_exit_on_signal():
        from flatshift.experiments.select.select import select

        manifest = select(resolved, flags.out, quiet=flags.json, draw=draw_report, on=flags.on)
    _print_result(manifest, flags, words)
    return 0


def _select_on_ranks(flags: Flags, resolved: Resolved, words: Sequence[str]) -> int:
    started = int(os.environ["WORLD_SIZE"])
    if flags.processes not in (None, started):
        raise UserError(
            f"--processes {flags.processes}: the launcher started {started}; leave --processes out under a launcher"
        )
    job.set_resume_hint(AGAIN)
    os.environ.update(dict.fromkeys(spawn.THREAD_VARIABLES, "1"))
    from flatshift.experiments.select.ranks import select_on_ranks

    assert flags.out is not None
    manifest = select_on_ranks(resolved, flags.out, quiet=flags.json, draw=draw_report, on=flags.on)
    if manifest is not None:
        _print_result(manifest, flags, words)
    return 0


def _print_result(manifest: dict[str, Any], flags: Flags, words: Sequence[str]) -> None:
    assert flags.out is not None
    if flags.json:
        print_json(manifest)
    else:
        outcome.print_selection_outcome(flags.out, flags.recipe, words)
