"""`flatshift eval`: evaluate a finished run again, measure its sharpness, or run lm-eval on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from flatshift import api, outcome
from flatshift.command_line import parse_command, print_result, spawn_ranks
from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.auto import find_mesh_overrides, mesh_flags
from flatshift.finetune.assets import backbone_directory
from flatshift.finetune.data.files import check_local_files
from flatshift.finetune.errors import UserError
from flatshift.finetune.launch import job, spawn
from flatshift.finetune.redaction import join_command
from flatshift.regularizers.config import Sharpness


@dataclass(frozen=True)
class Flags:
    """Evaluate a finished run again, on its own dev and test rows or on other files; use --mesh.dp N, … for another
    mesh.

    Several runs and bare backbones are evaluated on the same rows, each run also next to its own backbone:
    `flatshift eval RUN_DIR BACKBONE --data FILE`.

    With --sharpness: measure instead how the loss rises around the trained weights, and write sharpness.json, charts
    and the report into the run directory.
    """

    subjects: Positional[tuple[str, ...]]
    """Run directories, and backbones (shipped name, directory or hub name)."""
    data: tuple[str, ...] = ()
    """Files to evaluate on instead, read as the run's own or by `--data.columns.NAME` and `--data.bad_rows`; the split
    is called `data`."""
    group_by: str | None = None
    """A column of the rows: also compute every metric for each of its values."""
    trained: tuple[str, ...] = ()
    """Values of that column that the adapters were trained on; the others are checked for forgetting."""
    window: int | None = None
    """Window in tokens for scoring a whole document; by default the backbone's limit, at most 1024."""
    overlap: int | None = None
    """Tokens of each window that were already scored and serve as context; by default a quarter."""
    prompt: str | None = None
    """Format the rows by this prompt (a shipped name or a YAML file) and rank its candidates, with or without
    examples."""
    prompt_language: str | None = None
    """Use this language's wording of the prompt for every row, instead of the row's own."""
    shots: int = 0
    """Worked examples before each row."""
    shots_from: tuple[str, ...] = ()
    """Training files that the examples are drawn from."""
    shot_seeds: tuple[int, ...] = (0,)
    """Seeds of the draws; metrics are means over them."""
    score: Literal["sum", "label", "mean", "byte", "pmi", "calibrated"] = "sum"
    """Log-likelihood used for ranking: sum over everything after the context, over the label alone, mean per token, per
    byte, pmi (minus that without the row's text), or calibrated (minus that of rows without content)."""
    probe: str | None = None
    """Measure associations of groups by word lists (a shipped name or a YAML file); with --samples and --data, also
    co-occurrences in generated texts and in those of the files."""
    samples: int = 0
    """Generate this many texts after each row's prompt and evaluate them: distinct n-grams, programs, toxicity."""
    temperature: float = 1.0
    """Sampling temperature of the generated texts."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    max_new_tokens: int = 20
    """Longest text, tokens."""
    sample_seed: int = 0
    """Random seed of sampling."""
    programs: bool = False
    """Run generated texts as programs, with the row's `test`, in a sandbox without network: pass@k. Linux only."""
    unsafe_programs: bool = False
    """With --programs: run them even where no sandbox can be had, with your rights: your files, your network."""
    pass_at: tuple[int, ...] = (1,)
    """Values of k for pass@k."""
    toxicity: str | None = None
    """Run directory of a classifier that scores generated texts: expected maximum toxicity, toxicity probability."""
    toxic_label: str = "toxic"
    """The classifier's class for toxic texts."""
    out: Path | None = None
    """New directory for evaluation.json, eval.json and a page."""
    json: bool = False
    """Print the contents of eval.json, sharpness.json or evaluation.json."""
    sharpness: bool = False
    """Measure sharpness: λ_max, trace, mean and highest rises, slices, in adapter space and full weight space."""
    sharpness_batches: int | None = None
    """Batches of train.batch_size rows to measure on; 2 by default."""
    sharpness_split: Literal["dev", "test", "train"] | None = None
    """Split to take those rows from; by default the first of dev, test and train that the run has."""
    sharpness_spaces: tuple[Literal["adapter", "full"], ...] | None = None
    """Spaces to measure in; both by default."""
    sharpness_sigmas: tuple[float, ...] | None = None
    """Noise radii relative to the row norms; 0.02 0.05 0.1 by default."""
    sharpness_rhos: tuple[float, ...] | None = None
    """Radii of the balls for the highest rise; 0.01 0.05 0.1 by default."""
    sharpness_draws: int | None = None
    """Antithetic pairs of noise at each σ; 8 by default."""
    sharpness_seed: int | None = None
    """Seed of rows and directions; 0 by default."""
    harness: tuple[str, ...] = ()
    """Tasks of EleutherAI's lm-eval to run instead (extra `harness`); writes harness.json into the run directory."""
    harness_limit: int | None = None
    """Items per task; all by default."""
    harness_shots: int | None = None
    """Worked examples before each item; the task's own number by default."""
    harness_batch_size: int | None = None
    """Batch size in rows; 8 by default."""
    harness_seed: int | None = None
    """Seed of the worked examples and of sampling in tasks; 0 by default."""
    harness_include: Path | None = None
    """Directory with your own task files."""

    @property
    def asks_for_several(self) -> bool:
        """True if the flags need the side-by-side evaluation instead of one run's own."""
        names = ("group_by", "trained", "window", "overlap", "out", "prompt", "samples", "probe")
        changed = any(getattr(self, name) != getattr(Flags, name) for name in names)
        return changed or len(self.subjects) > 1 or not self._is_run(self.subjects[0])

    @staticmethod
    def _is_run(name: str) -> bool:
        """Return True for a run directory, and for one that is no backbone, whose reader reports what is wrong."""
        path, is_shipped = Path(name), backbone_directory(name) is not None
        is_other = path.is_dir() and not is_shipped and not (path / "config.json").is_file()
        return (path / "recipe.resolved.yaml").is_file() or is_other

    @property
    def run(self) -> Path:
        """The only run directory. Raises UserError if several are named."""
        if len(self.subjects) > 1:
            raise UserError(f"this takes one run directory, and {len(self.subjects)} are named; leave out the others")
        return Path(self.subjects[0])


_SAMPLING = ("temperature", "top_p", "max_new_tokens", "sample_seed")
_WITH = {
    "prompt": ("shots", "shots_from", "shot_seeds", "score"),
    "samples": (*_SAMPLING, "programs", "toxicity"),
    "programs": ("unsafe_programs", "pass_at"),
    "toxicity": ("toxic_label",),
}
"""Flags that have a meaning with another one only, as have those that begin with its name."""
_WITHOUT_WINDOW = {field.name for field in dataclasses.fields(Flags)} - {"window", "overlap"}
_ALONE: dict[str, Collection[str]] = {
    "harness": ("json",),
    "sharpness": ("data", "json"),
    "probe": ("data", "json", "out", "samples", *_SAMPLING),
    "prompt": _WITHOUT_WINDOW - {"samples"},
    "samples": _WITHOUT_WINDOW,
}
"""Other flags that go with those that ask for another evaluation."""


def _check_flags(flags: Flags) -> None:
    """Raise UserError for a flag that would be ignored."""
    changed = [f.name for f in dataclasses.fields(Flags)[1:] if getattr(flags, f.name) != f.default]
    for mode in _ALONE | _WITH:
        for name in changed:
            is_own, flag = name.startswith(f"{mode}_") or name in _WITH.get(mode, ()), name.replace("_", "-")
            if is_own and mode not in changed:
                raise UserError(f"--{flag} has a meaning with --{mode} only; add that, or leave it out")
            if mode in changed and not (is_own or name in (mode, *_ALONE.get(mode, changed))):
                raise UserError(f"--{flag} does not go with --{mode}; leave one of them out")


def run(argv: list[str]) -> int:
    flags, overrides = parse_command(Flags, "eval", argv)
    if not flags.subjects:
        raise UserError("eval needs a RUN_DIR or a BACKBONE; see `flatshift eval --help`")
    _check_flags(flags)
    if flags.harness:
        return _run_harness(flags, overrides)
    if flags.sharpness:
        return _run_sharpness(flags, overrides)
    check_local_files(flags.data)
    if flags.asks_for_several:
        return _evaluate_side_by_side(flags, argv, overrides)
    path = flags.run
    recipe = resume_recipe(path, overrides, other_rows=bool(flags.data)).recipe
    if chosen := mesh_flags(recipe, set_axes=find_mesh_overrides(overrides)):
        # The mesh was chosen automatically: start over with its axes as flags.
        return run([*argv, *chosen])
    if spawn.must_spawn_ranks(recipe.mesh):
        return spawn_ranks("eval", argv, recipe, path)
    from flatshift.experiments.results.run import read_run
    from flatshift.experiments.workflows.evaluate import evaluate_run, format_result

    result = evaluate_run(path, data=flags.data, overrides=overrides, quiet=flags.json)
    if job.rank() == 0:
        print_result(result, format_result(result), as_json=flags.json)
        if not flags.json:
            outcome.print_outcome("", outcome.commands_after_run(read_run(path)))
    return 0


def _evaluate_side_by_side(flags: Flags, argv: list[str], overrides: list[Any]) -> int:
    from flatshift.experiments.report.chapters.evaluation import page
    from flatshift.experiments.workflows.evaluate import evaluate_side_by_side
    from flatshift.experiments.workflows.evaluation_document import format_document

    few_shot = None
    if flags.prompt is not None:
        from flatshift.experiments.workflows.few_shot import FewShot, read_prompt

        few_shot = FewShot(
            prompt=read_prompt(flags.prompt), name=flags.prompt, shots=flags.shots, source=flags.shots_from,
            seeds=flags.shot_seeds, score=flags.score, spoken=flags.prompt_language,
        )  # fmt: skip
    sampling = None
    if flags.samples:
        from flatshift.experiments.workflows.samples import Sampling

        names = {"seed": "sample_seed", "toxic": "toxic_label"}
        settings = {f.name: getattr(flags, names.get(f.name, f.name)) for f in dataclasses.fields(Sampling)}
        sampling = Sampling(**settings)
    if flags.probe is not None:
        return _run_probe(flags, argv, overrides, sampling)
    document = evaluate_side_by_side(
        flags.subjects, data=flags.data, group_by=flags.group_by, trained=flags.trained, window=flags.window,
        overlap=flags.overlap, few_shot=few_shot, sampling=sampling, overrides=overrides, out=flags.out,
        command=join_command(["flatshift", "eval", *argv]), quiet=flags.json, page=page,
    )  # fmt: skip
    print_result(document, format_document(document), as_json=flags.json)
    return 0


def _run_probe(flags: Flags, argv: list[str], overrides: list[Any], sampling: Any) -> int:
    from flatshift.experiments.workflows.samples import format_document, probe_models, read_probe

    document = probe_models(
        flags.subjects, read_probe(flags.probe or ""), sampling=sampling, data=flags.data, overrides=overrides,
        out=flags.out, command=join_command(["flatshift", "eval", *argv]), quiet=flags.json,
    )  # fmt: skip
    print_result(document, format_document(document), as_json=flags.json)
    return 0


def _settings_with_prefix(flags: Flags, prefix: str) -> dict[str, Any]:
    """Return the settings that only `--sharpness`, or only `--harness`, reads; missing flags keep its own defaults."""
    values = {name.removeprefix(prefix): value for name, value in vars(flags).items() if name.startswith(prefix)}
    return {name: value for name, value in values.items() if value is not None}


def _run_sharpness(flags: Flags, overrides: list[Any]) -> int:
    options = _settings_with_prefix(flags, "sharpness_")
    names = {field.name for field in dataclasses.fields(Sharpness)} & options.keys()
    settings = Sharpness(**{name: options.pop(name) for name in names})
    from flatshift.experiments.workflows.sharpness import format_result, measure_run_sharpness

    result = measure_run_sharpness(
        flags.run, settings, data=flags.data, overrides=overrides, quiet=flags.json, draw=api.draw_report, **options
    )
    print_result(result, format_result(result), as_json=flags.json)
    return 0


def _run_harness(flags: Flags, overrides: list[Any]) -> int:
    for tree in overrides:
        # Only train.device may be overridden.
        if set(getattr(tree.children.get("train"), "children", tree.children)) != {"device"}:
            raise UserError(f"{tree.location} does not go with --harness, which runs in one process; leave it out")
    from flatshift.experiments.workflows.lm_eval import format_record, run_harness

    options = _settings_with_prefix(flags, "harness_")
    record = run_harness(flags.run, flags.harness, overrides=overrides, quiet=flags.json, **options)
    print_result(record, format_record(record), as_json=flags.json)
    return 0
