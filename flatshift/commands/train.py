"""`flatshift train`: run a recipe, in this process or as the ranks of a mesh, here or on a cluster; or resume a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift import outcome
from flatshift.api import draw_report
from flatshift.command_line import data_override, parse_command, print_json, remove_flags, spawn_ranks, split_overrides
from flatshift.experiments.recipe import Resolved, list_input_files, load_recipe, recipe_like, resume_recipe
from flatshift.experiments.recipe.auto import axis_flags, find_mesh_overrides, mesh_flags
from flatshift.experiments.recipe.schema import ExecutorOptions, format_keys_by_block
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import pause_heartbeat
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.data.files import check_local_files
from flatshift.finetune.errors import UserError
from flatshift.finetune.launch import consistency, job, spawn
from flatshift.finetune.run_directory import RECIPE, check_replaceable


@dataclass(frozen=True)
class Flags(ExecutorOptions):
    """Fine-tune an adapter by a recipe. Any recipe key is a flag: --train.steps 100 --adapter.rank 4."""

    recipe: Positional[str | None] = None
    """Recipe file or shipped recipe (`flatshift recipes`)."""
    data: tuple[str, ...] = ()
    """Files of training rows; short for --data.train.files. A tenth of your own rows is held out for dev and a tenth
    for test, unless --data.dev.files, --data.test.files or --data.holdout are given."""
    out: Path | None = None
    """Run directory to create; by default runs/DATE-TIME-NAME."""
    resume: Path | None = None
    """Continue this run directory exactly where it stopped."""
    like: Path | None = None
    """Begin a new run with the recipe of this run directory; flags override it."""
    verbose: bool = False
    """Print the memory plan by component, three samples of the first batch, and measured rates; log.txt always has
    them."""
    json: bool = False
    """Print eval.json when done."""
    nodes: int | None = None
    """Nodes that share the ranks of the mesh evenly (--on ray or slurm); by default one of Slurm, and as few as Ray
    can take."""


_CLUSTER_FLAGS = ("nodes", *(field.name for field in dataclasses.fields(ExecutorOptions)))


def run(argv: list[str]) -> int:
    try:
        flags, overrides = parse_command(Flags, "train", argv)
    except SystemExit:  # --help was asked for
        print(format_keys_by_block())
        raise
    overrides = data_override(flags.data, overrides)
    if sum(source is not None for source in (flags.recipe, flags.resume, flags.like)) != 1:
        raise UserError("train needs one of RECIPE (see `flatshift recipes`), --resume RUN_DIR and --like RUN_DIR")
    if flags.resume is not None and flags.out is not None:
        raise UserError("--out and --resume exclude each other: a resumed run stays in its directory")
    run_directory, resolved, axes = flags.resume or flags.out, None, overrides
    if flags.on != "local":
        return _run_on_cluster(flags, argv, overrides)
    for name in _CLUSTER_FLAGS:
        if name != "on" and getattr(flags, name) != getattr(Flags, name):
            raise UserError(f"--{name} has a meaning with --on ray or slurm only; leave it out")
    if flags.resume is not None:
        resumed = resume_recipe(flags.resume, overrides)
        if chosen := mesh_flags(resumed.recipe, set_axes=find_mesh_overrides(overrides)):
            # The mesh was chosen automatically: start over with its axes as flags.
            return run([*argv, *chosen])
        if spawn.must_spawn_ranks(resumed.recipe.mesh):
            return spawn_ranks("train", argv, resumed.recipe, flags.resume)
    else:
        resolved = _load_new_recipe(flags, overrides)
        check_local_files(list_input_files(resolved.recipe))
        if chosen := mesh_flags(resolved.recipe):
            return run([*argv, *chosen])
        if spawn.must_spawn_ranks(resolved.recipe.mesh):
            if flags.out is None:
                with consistency.dated_directory("runs", resolved.name) as new:
                    return spawn_ranks("train", [*argv, "--out", str(new)], resolved.recipe, new)
            check_replaceable(flags.out, resumable=True)
            return spawn_ranks("train", argv, resolved.recipe, flags.out)
        if flags.out is not None and job.restart_count() and (flags.out / RECIPE).is_file():
            _, axes = split_overrides(axis_flags(resolved.recipe.mesh), Flags)  # there may be fewer ranks than before
            resolved = None
        elif flags.out is None and job.is_multi_rank() and spawn.may_restart():
            raise UserError("--out is missing: a job that its launcher may restart finds its run directory by it")
    from flatshift.experiments.workflows.train import resume, train

    def draw_page(directory: Path, *parts: Path) -> Path:
        nonlocal run_directory
        run_directory = directory
        return draw_report(directory, *parts)

    if resolved is not None:
        result = train(resolved, flags.out, quiet=flags.json, verbose=flags.verbose, draw=draw_page)
    else:
        assert run_directory is not None
        result = resume(run_directory, axes, quiet=flags.json, verbose=flags.verbose, draw=draw_page)
    if job.rank() != 0:
        return 0
    if flags.json:
        print_json(result)
    elif run_directory is not None:
        outcome.print_training_outcome(run_directory)
    return 0


def _load_new_recipe(flags: Flags, overrides: Sequence[Branch]) -> Resolved:
    return load_recipe(flags.recipe, overrides) if flags.like is None else recipe_like(flags.like, overrides)


def _run_on_cluster(flags: Flags, argv: list[str], overrides: Sequence[Branch]) -> int:
    """Start the ranks of the mesh on the cluster of `--on`; rank 0 prints the outcome of the run."""
    out = flags.resume or flags.out
    if spawn.is_launched_rank():
        raise UserError("--on: a launcher (torchrun) has started this process as a rank; leave --on out")
    if out is None:
        raise UserError("--out is missing: with --on name a new directory on a disk that all nodes see")
    from flatshift.experiments.studies.executors.ranks import check_same_run, train_on_cluster

    resolved = resume_recipe(out, overrides) if flags.resume is not None else _load_new_recipe(flags, overrides)
    if flags.resume is None:
        check_same_run(out, resolved)
    command = ["train", *remove_flags(argv, _CLUSTER_FLAGS)]
    with pause_heartbeat():
        code = train_on_cluster(resolved, out, command, flags, flags.nodes)
    if code == 0 and flags.json:
        print_json(read_json_object(out / "eval.json"))
    return code
