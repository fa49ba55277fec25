"""Executors of a study's cells: processes of this machine, Ray, Slurm."""

from __future__ import annotations

from flatshift.experiments.recipe.schema import ExecutorOptions
from flatshift.experiments.studies.executors.base import Executor, Resources
from flatshift.finetune.errors import UserError

_LONGEST_MINUTES, _MOST_GIB = 366 * 24 * 60, 1 << 20


def parse_executor(options: ExecutorOptions) -> tuple[str, str | None]:
    """Return the kind of executor, and the address of a Ray cluster if one is given. Raises UserError for another
    word, and for a flag that the executor has no use for."""
    kind, _, address = options.on.partition(":")
    if kind not in ("local", "ray", "slurm") or (address and kind != "ray"):
        raise UserError(f"--on {options.on}: write local, ray, ray:HOST:PORT or slurm")
    if address.startswith("//"):
        raise UserError(f"--on {options.on}: start the command on a node of the cluster and write ray:HOST:PORT")
    if options.retries < 0:
        raise UserError(f"--retries must be at least 0, got {options.retries}")
    for name, least, most in (("cpus", 1, 4096), ("gpus", 0, 1024), ("time", 1, _LONGEST_MINUTES)):
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"--{name} must be {least} to {most:,}, got {value}")
    if options.memory is not None and not 0 < options.memory <= _MOST_GIB:
        raise UserError(f"--memory must be above 0 and at most {_MOST_GIB:,} GiB, got {options.memory}")
    useless = {"local": ("cpus", "gpus", "memory", "time"), "ray": ("time",), "slurm": ()}[kind]
    for name in useless:
        if getattr(options, name) is not None:
            others = "slurm" if name == "time" else "ray or slurm"
            raise UserError(f"--{name} has a meaning with --on {others} only; leave it out")
    return kind, address or None


def open_executor(options: ExecutorOptions, local: Executor, *, jobs: int | None) -> Executor:
    """Return the executor that the options name, connected to its cluster. local: the one of this machine. jobs: most
    cells at the same time elsewhere; None: as many as there is room for. Raises UserError if there is no cluster."""
    kind, address = parse_executor(options)
    if kind == "local":
        local.retries = options.retries
        return local
    memory = None if options.memory is None else round(options.memory * 2**30)
    resources = Resources(options.cpus or 1, options.gpus, memory)
    if kind == "ray":
        from flatshift.experiments.studies.executors.ray import RayExecutor

        return RayExecutor(address, resources, jobs=jobs, retries=options.retries)
    from flatshift.experiments.studies.executors.slurm import SlurmExecutor

    return SlurmExecutor(resources, minutes=options.time or 60, jobs=jobs, retries=options.retries)
