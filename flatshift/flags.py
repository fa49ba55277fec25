"""What each command accepts: one dataclass of flags per command, its docstrings being the help texts.

Imports nothing heavy. A recipe's own keys are flags too; `flatshift.commands` takes them out before these are parsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Positional, UseAppendAction

from finetune.errors import UserError, shortened


def parse(flags: type, name: str, argv: Sequence[str]) -> Any:
    """The `flags` of the command `name` from its command line; whole numbers may be written `1e9`.

    Raises:
        UserError: what cannot be read, in one sentence that names the flag. SystemExit: `--help` was asked for.
    """
    said = io.StringIO()
    hints = get_type_hints(flags)
    kinds = {one.name: set(_parts(hints[one.name])) for one in dataclasses.fields(flags)}
    try:
        with contextlib.redirect_stderr(said), _wide(argv):
            return tyro.cli(flags, prog=f"flatshift {name}", args=_whole(argv, kinds))
    except SystemExit as stop:
        if not stop.code:
            raise
        text = said.getvalue()
    raise UserError(f"{_told(text, kinds)}; see `flatshift {name} --help`")


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from _parts(inner)


def _whole(argv: Sequence[str], kinds: dict[str, set[Any]]) -> list[str]:
    """`argv` with `1e9` behind a flag that takes a whole number written out, as in a recipe."""
    found, flag = [], ""
    for token in argv:
        head, equals, value = token.partition("=")
        if token.startswith("--"):
            flag = head
        kind = kinds.get(flag.removeprefix("--").replace("-", "_"), set())
        text = value if token.startswith("--") else token
        if int in kind and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]{1,2}", text):
            with contextlib.suppress(ValueError):
                if (number := float(text)).is_integer():
                    text = str(int(number))
        found.append(head + equals + text if token.startswith("--") else text)
    return found


@contextlib.contextmanager
def _wide(argv: Sequence[str]) -> Iterator[None]:
    """A terminal on which no word is broken."""
    before = os.environ.get("COLUMNS")
    if not {"--help", "-h"} & set(argv):
        os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def _told(text: str, kinds: dict[str, set[Any]]) -> str:
    """What the parser says in a box of several lines, as a clause."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [re.sub(r"^[│|]\s*|\s*[│|]$", "", line.strip()) for line in text.splitlines()]
    said = [line for line in lines[1:] if line.strip("╰╯─+- ")] or ["this command line cannot be read"]
    odd = re.search(r"Error parsing (\S+): .* from \[(.*?)\]", said[0])
    if odd is not None:
        kind = kinds.get(odd[1].removeprefix("--").replace("-", "_"), set())
        wanted = "a whole number" if int in kind else "a number" if float in kind else "another value"
        return f"{odd[1]} must be {wanted}, got {shortened(odd[2])}"
    if said[0].startswith("Missing from"):
        return f"{said[1]} is missing" + (f": {said[2].split('. (')[0]}" if len(said) > 2 else "")
    first = re.sub(r", 'None'|'None', ", "", said[0].rstrip(".")).replace(". Expected", "; expected")
    near = next((line.split()[0].rstrip(",") for line in said[1:] if line.startswith("--")), None)
    return first[:1].lower() + shortened(first[1:], 160) + (f" (did you mean {near}?)" if near else "")


@dataclass(frozen=True)
class DemoFlags:
    """Select, train, compare and sweep on the shipped samples; ends with a report and its path."""

    out: Path = Path("flatshift-demo")
    """Directory to make; must not exist or be empty."""


@dataclass(frozen=True)
class SelectFlags:
    """Choose warm-up records from a pool for a target, by a recipe's `select` block or by flags."""

    recipe: Positional[str | None] = None
    """Recipe file or shipped recipe; optional when --pool, --target and --budget are given."""
    pool: tuple[str, ...] = ()
    """Candidate files: JSONL (.gz .xz .zst), CSV, Parquet; globs; `sample:pool`."""
    target: tuple[str, ...] = ()
    """Files with samples of the task."""
    budget: int | None = None
    """Records to choose."""
    out: Path | None = None
    """Directory to make (required): not there, empty, or with what this same command left when it was killed."""
    method: str | None = None
    """How records are scored: gotd, knn, dsir, random or another kind of `select.method` (docs/recipes.md)."""
    negative: tuple[str, ...] = ()
    """Files with examples of what must not be learnt (gotd-contrast)."""
    embedder: str | None = None
    """tfidf, backbone, static:PATH (word vectors), or the directory or hub name of an encoder."""
    pool_features: str | None = None
    """Your own features of the pool: .npy, row i for record i."""
    target_features: str | None = None
    """Your own features of the target: .npy."""
    negative_features: str | None = None
    """Your own features of the negative examples: .npy."""
    epsilon: float | None = None
    """Entropic regularisation, as a multiple of the mean cost (gotd)."""
    memory: float | None = None
    """What the transport solver may hold beside the features, GiB (gotd)."""
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


@dataclass(frozen=True)
class TrainFlags:
    """Fine-tune an adapter by a recipe. Any recipe key is a flag: --train.steps 100 --adapter.rank 4."""

    recipe: Positional[str | None] = None
    """Recipe file or shipped recipe (`flatshift recipes list`)."""
    out: Path | None = None
    """Run directory to make; by default runs/DATE-TIME-NAME."""
    resume: Path | None = None
    """Continue this run directory exactly where it stopped."""
    json: bool = False
    """Print eval.json when done."""


@dataclass(frozen=True)
class SweepFlags:
    """Run a recipe over a grid of dotted keys and seeds; finished cells are never run again."""

    recipe: Positional[str]
    """Recipe file or shipped recipe."""
    grid: tuple[str, ...] | None = None
    """key=v1,v2,… for each axis (random: also key=lo..hi and key=lo..hi:log); by default the recipe's own
    `sweep.grid`."""
    seeds: int | None = None
    """Values of train.seed, from the recipe's own (0) on; by default the recipe's own `sweep.seeds`."""
    out: Path | None = None
    """Sweep directory (required); an existing one is continued, with the same grid or another."""
    design: Literal["grid", "paired", "random"] | None = None
    """All combinations, first values together and second together, or points drawn at random; grid by default."""
    points: int | None = None
    """How many points to draw (--design random)."""
    bisect: str | None = None
    """data.train.limit[=lo..hi]: find for each point how many training rows it still fits; written to emc.json."""
    epsilon: float | None = None
    """Mean train error up to which rows count as fitted (--bisect); 0.1 by default."""
    jobs: int | None = None
    """Processes that work on cells at the same time; by default one for each CUDA device, else 1."""
    stack: str | None = None
    """Cells that train together on one backbone: auto (as many as memory allows) or a number; 1: each alone."""
    devices: str = "auto"
    """auto (every CUDA device), cpu, or CUDA numbers such as 0,1; processes get them in turn."""
    max_cells: int | None = None
    """Refuse a plan of more cells (points times seeds) than this; 10000 by default."""
    rerun_stale: bool = False
    """Run finished cells anew that another version of the code made."""
    rerun_failed: bool = False
    """Run cells anew that failed (no memory, a dead worker, rows that were refused), but for those that diverged."""


@dataclass(frozen=True)
class CompareFlags:
    """Compare training methods by a recipe's `comparison` block: equal trials, paired seeds, one primary endpoint."""

    recipe: Positional[str]
    """Recipe file or shipped recipe (flat-comparison)."""
    out: Path | None = None
    """Directory to make or to continue (required); finished cells are never run again."""
    data: Path | None = None
    """Directory of the files that the block names."""
    methods: tuple[str, ...] = ()
    """Only these methods and the baseline."""
    tasks: tuple[str, ...] = ()
    """Only these tasks."""
    jobs: int = 2
    """Worker processes, one thread each."""
    json: bool = False
    """Print comparison.json when done."""


@dataclass(frozen=True)
class EvalFlags:
    """Judge a finished run again, on its own dev and test rows or on other files; on another mesh by --mesh.dp N, …

    With --sharpness: measure instead how the loss rises around the trained weights, and write sharpness.json, charts
    and the report into the run directory.
    """

    run: Positional[Path]
    """Run directory."""
    data: tuple[str, ...] = ()
    """Files to judge on instead; the split is called `data`."""
    json: bool = False
    """Print exactly what eval.json would hold, or what sharpness.json holds."""
    sharpness: bool = False
    """Measure sharpness: λ_max, trace, mean and highest rises, slices, in adapter space and full weight space."""
    sharpness_batches: int | None = None
    """Batches of train.batch_size rows to measure on; 2 by default."""
    sharpness_split: Literal["dev", "test", "train"] | None = None
    """Where those rows come from; by default the first of dev, test and train that the run has."""
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
    """Items of each task; all by default."""
    harness_shots: int | None = None
    """Worked examples before each item; the task's own number by default."""
    harness_batch_size: int | None = None
    """Rows at once; 8 by default."""
    harness_seed: int | None = None
    """Seed of the worked examples and of what tasks draw; 0 by default."""
    harness_include: Path | None = None
    """Directory with task files of your own."""


@dataclass(frozen=True)
class GenerateFlags:
    """Let a finished run write: prompts in, answers out. Greedy unless --temperature says otherwise."""

    run: Positional[Path]
    """Run directory."""
    prompt: UseAppendAction[tuple[str, ...]] = ()
    """A prompt, read by the model as it stands; may be given several times. Without --prompt and --data: the lines of
    standard input."""
    data: tuple[str, ...] = ()
    """Files whose rows are prompts, through the run's own template."""
    max_new_tokens: int | None = None
    """Longest answer, tokens; by default the task's own, else 64."""
    temperature: float | None = None
    """Draw from the softmax of logits / temperature; by default nothing is drawn."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have this probability."""
    top_k: int | None = None
    """Draw among so many of the likeliest tokens."""
    seed: int | None = None
    """Seed of the draws; 0 by default. The batch size does not change them."""
    num_beams: int | None = None
    """Beams; 1 by default."""
    batch_size: int = 16
    """Prompts at once."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N; by default the run's own."""
    out: Path | None = None
    """JSONL file to write: id, prompt, text, tokens, ended."""
    json: bool = False
    """Print these records as JSON."""


@dataclass(frozen=True)
class ReportFlags:
    """Make one offline HTML page from run, selection, sweep or study directories."""

    runs: Positional[tuple[Path, ...]]
    """Directories."""
    out: Path | None = None
    """HTML file; by default report.html in the first directory."""


@dataclass(frozen=True)
class MergeFlags:
    """Fold a run's adapter into its backbone: a model folder that plain transformers loads."""

    run: Positional[Path]
    """Run directory."""
    out: Path | None = None
    """Folder to make; by default RUN_DIR/merged."""
    check: Literal["auto", "logits", "rows"] = "auto"
    """What is compared with backbone + adapter afterwards: some rows of every changed weight, or also the logits,
    which takes the whole model into memory. auto: logits up to 2 GiB in float32."""
    json: bool = False
    """Print dtype, rounding and logit difference as JSON (what merge.json holds)."""


@dataclass(frozen=True)
class ExportFlags:
    """Write a run's adapter as a hub-ready folder: PEFT files, tokenizer, and a model card made from the run."""

    run: Positional[Path]
    """Run directory."""
    out: Path | None = None
    """Folder to make; by default RUN_DIR/export."""
    add: tuple[str, ...] = ()
    """Other adapters of the same backbone to add: run or PEFT directories, as DIR or DIR=WEIGHT."""
    base_model: str | None = None
    """Hub name of the backbone, where the run had it as a local directory."""
    license: str | None = None
    """Licence of the adapter by its name on the hub (apache-2.0, …); without it the card asks for one."""


@dataclass(frozen=True)
class RecipesFlags:
    """List, show or copy the shipped recipes."""

    action: Positional[Literal["list", "show", "copy"]]
    """What to do."""
    name: Positional[str | None] = None
    """Which recipe (show, copy)."""
    to: Positional[Path | None] = None
    """File to write (copy); by default NAME.yaml here."""
    json: bool = False
    """Print the list as JSON."""


@dataclass(frozen=True)
class DoctorFlags:
    """Environment, versions, devices, shadowed names, what is missing and how to get it."""

    deep: bool = False
    """Import torch as well and list its devices."""
    json: bool = False
    """Print as JSON."""
