"""`flatshift eval`: evaluate a finished run again, measure its sharpness, or run lm-eval on it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from flatshift import api, outcome
from flatshift.command_line import parse_flags, spawn_ranks, split_overrides
from flatshift.experiments.recipe import resume_recipe
from flatshift.experiments.recipe.auto import find_mesh_overrides, mesh_flags
from flatshift.finetune.errors import UserError
from flatshift.finetune.launch import failure, spawn


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
        given = (
            self.group_by,
            self.trained,
            self.window,
            self.overlap,
            self.out,
            self.prompt,
            self.shots,
            self.samples,
            self.probe,
        )
        only = self.subjects[0] if len(self.subjects) == 1 else ""
        return len(self.subjects) > 1 or any(given) or not _looks_like_run(only)

    @property
    def run(self) -> Path:
        """The only run directory. Raises UserError if several are named."""
        if len(self.subjects) > 1:
            raise UserError(f"this takes one run directory, and {len(self.subjects)} are named; leave out the others")
        return Path(self.subjects[0])


def run(argv: list[str]) -> int:
    """Run `flatshift eval`."""
    rest, overrides = split_overrides(argv, Flags)
    flags: Flags = parse_flags(Flags, "eval", rest)
    if not flags.subjects:
        raise UserError("eval needs a RUN_DIR or a BACKBONE; see `flatshift eval --help`")
    if flags.harness:
        return _run_harness(flags, overrides)
    if given := [name for name in _fields_with_prefix(flags, "harness_") if getattr(flags, name) is not None]:
        raise UserError(f"--{given[0].replace('_', '-')} has a meaning with --harness only; add that, or leave it out")
    if flags.sharpness:
        return _run_sharpness(flags, overrides)
    if given := [name for name in _fields_with_prefix(flags, "sharpness_") if getattr(flags, name) is not None]:
        flag = given[0].replace("_", "-")
        raise UserError(f"--{flag} has a meaning with --sharpness only; add that, or leave it out")
    if flags.asks_for_several:
        return _evaluate_side_by_side(flags, argv, overrides)
    path = flags.run
    recipe = resume_recipe(path, overrides, other_rows=bool(flags.data)).recipe
    if chosen := mesh_flags(recipe, given=find_mesh_overrides(overrides)):
        # The mesh was chosen automatically: start over with its axes as flags.
        return run([*argv, *chosen])
    if spawn.must_spawn_ranks(recipe.mesh):
        return spawn_ranks("eval", argv, recipe, path)
    from flatshift.experiments.workflows.evaluate import evaluate_run, format_result

    result = evaluate_run(path, data=flags.data, overrides=overrides, quiet=flags.json)
    if failure.rank() == 0:
        print(json.dumps(result, indent=2, ensure_ascii=False) if flags.json else format_result(result))
        if not flags.json:
            outcome.print_next_commands(path)
    return 0


def _looks_like_run(name: str) -> bool:
    """True for a run directory, or for a directory that is no backbone, so that the run reader reports what is
    wrong."""
    path = Path(name)
    return (path / "recipe.resolved.yaml").is_file() or (path.is_dir() and not (path / "config.json").is_file())


def _evaluate_side_by_side(flags: Flags, argv: list[str], overrides: list[Any]) -> int:
    """Evaluate several subjects, a bare backbone, or by groups, on the same rows."""
    from flatshift.experiments.report.chapters.evaluation import page
    from flatshift.experiments.workflows.evaluate import evaluate_side_by_side
    from flatshift.experiments.workflows.evaluation_document import format_document

    few_shot = None
    if flags.prompt is not None:
        if given := [name for name in ("window", "overlap") if getattr(flags, name) is not None]:
            raise UserError(f"--{given[0]} cuts whole documents, and --prompt ranks candidates; leave one of them out")
        from flatshift.experiments.workflows.few_shot import FewShot, read_prompt

        few_shot = FewShot(
            prompt=read_prompt(flags.prompt),
            name=flags.prompt,
            shots=flags.shots,
            source=flags.shots_from,
            seeds=flags.shot_seeds,
            score=flags.score,
            spoken=flags.prompt_language,
        )
    elif flags.shots or flags.shots_from or flags.prompt_language:
        raise UserError("--shots, --shots-from and --prompt-language need --prompt NAME; `nli`, or a file of yours")
    sampling = None
    if flags.samples:
        from flatshift.experiments.workflows.samples import Sampling

        sampling = Sampling(
            samples=flags.samples,
            temperature=flags.temperature,
            top_p=flags.top_p,
            max_new_tokens=flags.max_new_tokens,
            seed=flags.sample_seed,
            programs=flags.programs,
            pass_at=flags.pass_at,
            toxicity=flags.toxicity,
            toxic=flags.toxic_label,
        )
    elif flags.programs or flags.toxicity:
        raise UserError("--programs and --toxicity evaluate generated text; add --samples N")
    if flags.probe is not None:
        return _run_probe(flags, argv, overrides, sampling)
    document = evaluate_side_by_side(
        flags.subjects,
        data=flags.data,
        group_by=flags.group_by,
        trained=flags.trained,
        window=flags.window,
        overlap=flags.overlap,
        few_shot=few_shot,
        sampling=sampling,
        overrides=overrides,
        out=flags.out,
        command=shlex.join(["flatshift", "eval", *argv]),
        quiet=flags.json,
        page=page,
    )
    print(json.dumps(document, indent=2, ensure_ascii=False) if flags.json else format_document(document))
    return 0


def _run_probe(flags: Flags, argv: list[str], overrides: list[Any], sampling: Any) -> int:
    """Run `eval --probe`."""
    from flatshift.experiments.workflows.samples import format_document, probe_models, read_probe

    given = ("prompt", "group_by", "trained", "window", "overlap", "programs", "toxicity")
    if odd := [name for name in given if getattr(flags, name)]:
        raise UserError(f"--{odd[0].replace('_', '-')} does not go with --probe; leave one of them out")
    document = probe_models(
        flags.subjects,
        read_probe(flags.probe or ""),
        sampling=sampling,
        data=flags.data,
        overrides=overrides,
        out=flags.out,
        command=shlex.join(["flatshift", "eval", *argv]),
        quiet=flags.json,
    )
    print(json.dumps(document, indent=2, ensure_ascii=False) if flags.json else format_document(document))
    return 0


def _fields_with_prefix(flags: Flags, prefix: str) -> list[str]:
    """Return the fields that only `--sharpness`, or only `--harness`, reads."""
    return [field.name for field in dataclasses.fields(flags) if field.name.startswith(prefix)]


def _run_sharpness(flags: Flags, overrides: list[Any]) -> int:
    """Run `eval --sharpness`; missing flags keep the study's own defaults."""
    from flatshift.regularizers.sharpness.sharpness_config import Sharpness

    given = {name.removeprefix("sharpness_"): getattr(flags, name) for name in _fields_with_prefix(flags, "sharpness_")}
    given = {name: value for name, value in given.items() if value is not None}
    own = {field.name for field in dataclasses.fields(Sharpness)}
    settings = Sharpness(**{name: value for name, value in given.items() if name in own})
    from flatshift.experiments.workflows.sharpness import format_result, measure_run_sharpness

    rest = {name: value for name, value in given.items() if name not in own}
    result = measure_run_sharpness(
        flags.run, settings, data=flags.data, overrides=overrides, quiet=flags.json, draw=api.draw_report, **rest
    )
    print(json.dumps(result, indent=2, ensure_ascii=False) if flags.json else format_result(result))
    return 0


def _run_harness(flags: Flags, overrides: list[Any]) -> int:
    """Run `eval --harness`; missing flags keep the study's own defaults."""
    odd = [field.name for field in dataclasses.fields(flags) if field.name.startswith(("sharpness", "data"))]
    if given := [name for name in odd if getattr(flags, name)]:
        raise UserError(f"--{given[0].replace('_', '-')} does not go with --harness; leave one of them out")
    for tree in overrides:
        # Only train.device may be overridden.
        if set(getattr(tree.children.get("train"), "children", tree.children)) != {"device"}:
            raise UserError(f"{tree.where} does not go with --harness, which runs in one process; leave it out")
    own = {name.removeprefix("harness_"): getattr(flags, name) for name in _fields_with_prefix(flags, "harness_")}
    from flatshift.experiments.workflows.lm_eval import format_record, run_harness

    given_own = {name: value for name, value in own.items() if value is not None}
    record = run_harness(flags.run, flags.harness, overrides=overrides, quiet=flags.json, **given_own)
    print(json.dumps(record, indent=2, ensure_ascii=False) if flags.json else format_record(record))
    return 0
