"""Selection workflow: from pool and target to a directory with scores, selected records and a report.

flatshift select --pool pool.jsonl --target target.jsonl --budget 500 --out selection
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.recipe import Resolved
from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.run.console import Console, Draw
from flatshift.experiments.run.resumable_directory import open_resumable
from flatshift.experiments.select import methods
from flatshift.experiments.select.embedding import (
    Vectors,
    backbone_tokenizer,
    check_unused_features,
    check_vectors,
    report_bad_rows,
)
from flatshift.experiments.select.hygiene import clean_rows
from flatshift.experiments.select.outputs import write_selection
from flatshift.experiments.select.pool import (
    PoolAndTarget,
    cut_pool,
    drop_blank_texts,
    drop_unknown_texts,
    read_pool,
    read_records,
    record_domains,
    select_settings,
    skips_blank_texts,
)
from flatshift.experiments.select.relevance import apply_relevance, check_relevance
from flatshift.experiments.select.selection_checks import can_check, non_fatal, profile_selection, run_selection_checks
from flatshift.experiments.select.stages import Stages
from flatshift.experiments.select.target import check_target, read_target, target_record
from flatshift.finetune.atomic import to_json_values, write_json
from flatshift.finetune.data.files import describe_files
from flatshift.finetune.digests import DONE, FILES, file_digests
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.run_directory import disk_full_interrupts, write_provenance
from flatshift.finetune.seeds import derive_seed
from flatshift.selection import Pool, TokenRows, build_selector
from flatshift.selection.config import Auto, GotD, required_inputs
from flatshift.selection.features.tokens import tokenise_shard
from flatshift.selection.hygiene.duplicates import normalise_text
from flatshift.selection.methods.base import Progress, Selector
from flatshift.selection.methods.domains import DomainsSelector

_LONG_S = 10.0
"""Fits that took longer are kept until the selection is whole."""
_BLOCK_ROWS = 4096
"""Records read at a time in search of another text."""


Fit = Callable[[Selector, Pool, Pool, Progress], Any]
"""Function that fits a selector: (selector, pool, target, progress)."""


def select(
    resolved: Resolved,
    out: Path,
    *,
    quiet: bool = False,
    draw: Draw | None = None,
    fit: Fit | None = None,
    on: str | None = None,
    setup: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Run a recipe's `select` block into the new directory `out` (atomically) and return its manifest.

    Called again after a kill with the same recipe, it continues from `out`/state: a long transport solve from its last
    full pass, with bit-identical scores and selection; a model's vectors and losses from their last shard; with any
    method, slow scores are not computed again.

    draw: draws the report page inside the directory. fit: fits the selector in place of its own `fit`
    (`flatshift.experiments.select.ranks`). on: executor that runs the stages over shards of the pool
    (`flatshift.experiments.select.stages`). setup: writes input files; called when `out` is accepted.

    Raises UserError for an `out` that holds anything else or is in use, missing settings, bad rows, or a budget above
    the pool.
    """
    recipe = resolved.recipe
    if recipe.select is None:
        raise UserError(
            f"recipe {resolved.name!r} has no `select` block: add one, or give --pool, --target and --budget"
        )
    if recipe.select.from_ is not None:
        raise UserError(
            f"select.from: {recipe.select.from_} is finished: there is nothing to select; `flatshift train` takes it"
        )
    console = Console(quiet=quiet)
    recipe_yaml = resolved.to_yaml()
    with disk_full_interrupts(f"selecting into {out}"), exclusive_lock(out), open_resumable(out, recipe_yaml) as work:
        directory = work.directory
        if setup is not None:
            setup()
        write_provenance(directory, recipe_yaml=recipe_yaml)

        def append_to_log(line: str) -> None:
            with (directory / "log.txt").open("a", encoding="utf-8") as handle:
                handle.write(line + "\n")

        console.log = append_to_log
        if work.continued:
            console.say(f"continuing the unfinished selection in {out}")
        workers = contextlib.nullcontext() if on is None else Stages(on, recipe.select, work.state / "shards", console)
        with workers as stages:
            manifest = select_into(recipe, directory, console, state=work.state, fit=fit, stages=stages)
        page = draw(directory).name if draw is not None else None
    console.log = None  # the log has moved with its directory
    if page is not None:
        console.say(f"report: {out / page}")
    return manifest


def select_into(
    recipe: Recipe,
    directory: Path,
    console: Console,
    state: Path | None = None,
    fit: Fit | None = None,
    stages: Stages | None = None,
) -> dict[str, Any]:
    """Score the pool, choose, and write scores.parquet, selected.jsonl and manifest.json into `directory`.

    state: directory from which a long transport solve resumes after a kill; None: not kept. fit: as in `select`.
    stages: run the passes over the pool by shards; None: this process does.
    """
    spec = select_settings(recipe)
    started = time.monotonic()
    check_target(recipe, ())
    methods.check_method(spec)
    check_relevance(spec)
    check_vectors(spec)
    if (idle := methods.unused_setting(spec)) is not None:
        console.say(f"note: select.{idle} has no effect: {spec.method.kind} looks at no vectors")
    sides = _read_sides(recipe, directory, console, stages)
    vectors = Vectors(recipe, sides.pool, sides.target, sides.negative, directory, console, state, stages=stages)
    _embed_sides(recipe, sides, vectors, console)
    if "tokens" in required_inputs(spec.method):
        sides.tokens = _tokenise_sides(recipe, sides, directory, console, stages)
    embedded, peak = time.monotonic(), {"features": _peak_bytes()}
    selector = _fit_selector(recipe, sides, vectors, console, state, fit, stages)
    chosen = np.asarray(selector.select(spec.budget))
    if getattr(spec.method, "repeats", 1) == 1:
        chosen, replaced, remaining = _replace_copies(selector, sides, chosen)
        if replaced:
            console.say(f"of the best records {replaced:,} said the same as one before; the next take their places")
        if remaining:
            console.say(f"warning: {remaining:,} of the chosen say the same as another: the pool has no other text")
    if ties := selector.ties(spec.budget):
        console.say(f"warning: {ties:,} records tie at the cut; file order decides which of them are chosen")
    solved = time.monotonic()
    peak["scores"] = _peak_bytes()
    checks = None
    if sides.x is not None and sides.y is not None and can_check(spec):
        with methods.show_progress(console) as progress:
            checks = run_selection_checks(
                spec, selector, sides, chosen, seed=recipe.train.seed, console=console, progress=progress
            )
    profile = None
    if spec.checks:
        with non_fatal(console):
            profile = profile_selection(recipe, sides, selector, chosen)
            for sentence in profile["warnings"]:
                console.say(f"warning: {sentence}")
    checked = time.monotonic()
    peak["checks"] = _peak_bytes()
    write_selection(recipe, directory, sides, selector, chosen)
    manifest = _build_manifest(spec, sides, selector, chosen, None if stages is None else stages.contents)
    entry = manifest["selection"]
    entry["seconds"] = {
        "features": round(embedded - started, 3),
        "scores": round(solved - embedded, 3),
        "checks": round(checked - solved, 3),
    }
    entry["peak_bytes"] = peak
    if ties:
        entry["ties"] = ties
    entry |= {
        name: to_json_values(value) for name, value in (("checks", checks), ("profile", profile)) if value is not None
    }
    cut = {"records": sides.records, "pieces": sides.pieces}
    chunk = spec.chunk and {"unit": spec.chunk.unit, "size": spec.chunk.size, **cut}
    features = {side: copy.record for side, copy in vectors.copies.items()}
    optional = {"hygiene": sides.hygiene, "chunk": chunk, "relevance": sides.relevance,
                "cache": vectors.cache_use or None, "features": features or None}  # fmt: skip
    manifest |= {name: value for name, value in optional.items() if value is not None}
    if spec.method.kind == "gotd" and entry["helpful"] < spec.budget:
        console.say(
            f"warning: only {entry['helpful']} records have a negative score; "
            f"a budget of {spec.budget} adds some that move the pool away from the target"
        )
    vectors.close()
    write_json(directory / "manifest.json", manifest)
    # log.txt still grows, so it gets no digest.
    files = [file for file in directory.iterdir() if file.is_file() and file.name != "log.txt"]
    write_json(directory / DONE, {FILES: file_digests(directory, files)})
    console.say(f"selected {spec.budget:,} of {len(sides.pool.rows):,} in {time.monotonic() - started:.1f} s")
    if "distinct" in entry:
        console.say(
            f"the budget counts readings: {entry['distinct']:,} records, {entry['again']:,} of them to be read more "
            f"than once, up to {entry['most_times']} times (select.method.repeats)"
        )
    return manifest


def _read_sides(recipe: Recipe, directory: Path, console: Console, stages: Stages | None) -> PoolAndTarget:
    """Read pool, target and negative examples, without rows dropped by hygiene or blank ones, the pool cut to
    length."""
    spec = select_settings(recipe)
    seed = recipe.train.seed
    target_files = spec.target.files or recipe.data.train.all_files
    # Read the small sides first: their errors are then reported before the pool is read.
    target, held_out = read_target(recipe, console)
    target_entry = target_record(recipe, target.skipped)
    negative = read_records(spec.negative, spec, seed, "negative", spec.columns) if spec.negative.files else None
    without = skips_blank_texts(spec)
    if without:
        target = drop_blank_texts(target, target_files, "target")
        negative = None if negative is None else drop_blank_texts(negative, spec.negative.files, "negative")
    pool = read_pool(spec, seed, directory, console, stages)
    shards = None if stages is None else stages.over(pool.rows)
    remaining, hygiene = clean_rows(recipe, pool.rows, target.rows, held_out, directory, console, shards)
    pool = replace(pool, rows=cut_pool(recipe, remaining, console))
    pieces = len(pool.rows)
    if without:
        pool = drop_blank_texts(pool, spec.pool.files, "pool", None if stages is None else stages.over(pool.rows))
    sides = PoolAndTarget(pool, target, negative, target_files, len(remaining), pieces, target_entry, hygiene)
    for name, records in sides.by_name.items():
        if records is not None and records.skipped:
            console.say(f"{name}: skipped {len(records.skipped):,} bad records, first {records.skipped[0]}")
    _check_budget(spec, len(pool.rows))
    console.say(
        f"pool {len(pool.rows):,} records, target {len(target.rows):,}, budget {spec.budget:,}, {spec.method.kind}"
    )
    return sides


def _embed_sides(recipe: Recipe, sides: PoolAndTarget, vectors: Vectors, console: Console) -> None:
    spec = select_settings(recipe)
    with _warnings_printed(console):
        with report_bad_rows(vectors, sides.by_name):
            sides.pool, sides.weights, sides.relevance = apply_relevance(
                spec, sides.pool, vectors, recipe.train.seed, console
            )
        _check_budget(spec, len(sides.pool.rows))
        if methods.needs_vectors(spec):
            sides.x, sides.y, sides.z = vectors.pool(sides.pool.rows), vectors.target(), vectors.negative()
    if sides.x is not None and sides.y is not None and methods.embeds_texts(spec):
        sides.pool, sides.x, known = drop_unknown_texts(sides.pool, sides.x, spec.pool.files, "pool", console)
        if sides.weights is not None and known is not None:
            sides.weights = sides.weights[known]
        sides.target, sides.y, _ = drop_unknown_texts(sides.target, sides.y, sides.target_files, "target", console)
        if sides.negative is not None:
            sides.negative, sides.z, _ = drop_unknown_texts(
                sides.negative, sides.z, spec.negative.files, "negative", console
            )
        _check_budget(spec, len(sides.pool.rows))
    sides.domains = record_domains(sides.pool, spec), record_domains(sides.target, spec)


def _tokenise_sides(
    recipe: Recipe, sides: PoolAndTarget, directory: Path, console: Console, stages: Stages | None
) -> tuple[TokenRows, TokenRows]:
    """Return the tokens of pool and target."""
    tokenize, size = backbone_tokenizer(recipe)
    target = TokenRows.of(tokenize([row.values["text"] for row in sides.target.rows]), size)
    rows = sides.pool.rows
    if stages is not None:
        parts = stages.over(rows)("tokens", partial(tokenise_shard, tokenizer=partial(backbone_tokenizer, recipe)))
        return TokenRows.of_shards(parts, size), target
    with console.task("tokenise pool", len(rows), "texts") as task:
        return TokenRows.spilled(rows.texts, tokenize, size, directory / ".pool.tokens", task), target


def _fit_selector(
    recipe: Recipe,
    sides: PoolAndTarget,
    vectors: Vectors,
    console: Console,
    state: Path | None,
    fit: Fit | None,
    stages: Stages | None,
) -> Selector:
    spec = select_settings(recipe)
    rows = sides.pool.rows
    pool = Pool(
        ids=rows.ids, texts=rows.texts, features=sides.x, domains=sides.domains[0], weights=sides.weights,
        tokens=sides.tokens[0], shards=None if stages is None else stages.over(rows),
    )  # fmt: skip
    target = Pool(
        ids=[row.id for row in sides.target.rows],
        texts=[row.values["text"] for row in sides.target.rows],
        features=sides.y,
        domains=sides.domains[1],
        tokens=sides.tokens[1],
    )
    more: dict[str, Any] = {} if sides.z is None else {"negative": Pool(features=sides.z)}
    selector = build_selector(
        spec.method,
        seed=derive_seed(recipe.train.seed, "select"),
        budget=spec.budget,
        measure=methods.backbone_nll(recipe, spec.method, target.texts or (), state),
        device=methods.solver_device(recipe),
        state=None if state is None else str(state),
    )
    with (
        _warnings_printed(console),
        methods.show_progress(console) as progress,
        report_bad_rows(vectors, sides.by_name),
        methods.report_memory_shortage(spec),
    ):
        check_unused_features(spec, sides.x, sides.y)
        # Shards keep their results themselves, and a checkpoint would read all texts here.
        checkpoint = None if state is None or stages is not None else methods.ScoreCheckpoint(state, sides)
        if checkpoint is None or not checkpoint.restore(selector):
            began = time.monotonic()
            if fit is not None:
                fit(selector, pool, target, progress)
            else:
                selector.fit(pool, target, progress=progress, **more)
            if checkpoint is not None and time.monotonic() - began > _LONG_S:
                checkpoint.save(selector)
    diagnostics = selector.diagnostics_
    if isinstance(spec.method, Auto):
        _print_compared_methods(diagnostics, console)
    rounds = spec.method.rounds if isinstance(spec.method, GotD) else 1
    used = len(diagnostics["rounds"]) if rounds > 1 and diagnostics["held_out"] else 0
    if 1 <= used < min(rounds, spec.budget):
        counted = "the first alone counts" if used == 1 else f"only {used} count"
        advice = "; the selection is that of one step (select.method.rounds: 1)" if used == 1 else ""
        console.say(
            f"warning: of {rounds} rounds {counted}: by the target that was held out, later ones led away from "
            f"it{advice}"
        )
    if checkpoint is not None and checkpoint.restored:
        console.say("the scores of the unfinished selection were taken over")
    if resumed := diagnostics.get("resumed") or diagnostics.get("inside", {}).get("resumed"):
        console.say(f"the transport solve continued after pass {resumed}")
    return selector


def _print_compared_methods(diagnostics: dict[str, Any], console: Console) -> None:
    console.say(f"auto: nats per token of {diagnostics['held_out']:,} held-out target texts after each method's choice")
    for line in diagnostics["table"]:
        text = line.get("reason")
        if text is None:
            text = f"{line['nats']:.4f}"
            if line["error"] is not None:
                text += f", {line['difference']:+.4f} ± {2 * line['error']:.4f} vs. random, {line['cpu_s']:g} CPU-s"
        console.say(f"  {line['method']:<12} {text}{' *' * (line['method'] == diagnostics['chosen'])}")
    console.say("  ±: two standard errors, paired by text; *: taken, and fitted to all of the target")
    best = next(line for line in diagnostics["table"] if line["method"] == diagnostics["chosen"])
    level = [
        line["method"]
        for line in diagnostics["table"]
        if line is not best and line["error"] and best["error"] and line["nats"] - best["nats"] < 2 * best["error"]
    ]
    if level:
        console.say(
            f"  {' and '.join(level)}: no further behind than that, so the held-out texts hardly tell them apart"
        )
    if diagnostics["chosen"] == "random":
        console.say(
            "warning: no method that was tried beats a random draw on held-out target texts; the selection is random: "
            "this pool has little for this target, or the target is too small to tell"
        )


def _build_manifest(
    spec: Select, sides: PoolAndTarget, selector: Selector, chosen: np.ndarray, contents: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Return the manifest's first entries. contents: of the pool's files, if workers described them."""
    solver = to_json_values(selector.diagnostics_)
    times = np.unique(chosen, return_counts=True)[1]
    repeats = {"distinct": len(times), "again": int((times > 1).sum()), "most_times": int(times.max(initial=0))}
    files = sides.target_files, spec.eval.files + spec.negative.files, spec.hygiene.drops
    inputs = [*describe_files(spec.pool.files, contents), *(line for group in files for line in describe_files(group))]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "inputs": inputs,
        "target": sides.target_entry,
        "selection": {
            **{name: value for name, value in solver.items() if name != "method"},
            "solver": solver.get("method"),
            "method": spec.method.kind,
            "embedder": spec.embedder.kind if sides.x is not None else None,
            "budget": spec.budget,
            **(repeats if len(times) < len(chosen) else {}),
            "pool": len(sides.pool.rows),
            "target": len(sides.target.rows),
            "skipped": {name: side.skipped for name, side in sides.by_name.items() if side is not None},
            **({"helpful": solver.get("helpful", int((selector.scores_ < 0).sum()))} if selector.signed else {}),
        },
    }


@contextlib.contextmanager
def _warnings_printed(console: Console) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(item.message) for item in caught if issubclass(item.category, UserWarning)):
        console.say(f"warning: {message}")


def _peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes, mapped files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _check_budget(spec: Select, count: int) -> None:
    if spec.budget > count:
        raise UserError(
            f"select.budget: {spec.budget} is above the pool's {count} records; "
            f"ask for at most {count} or add pool files"
        )


def _replace_copies(selector: Selector, sides: PoolAndTarget, chosen: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Replace those of the `chosen` rows that repeat the text of one before them (but for case, blanks and Unicode
    form) by the next in rank, of their own domain where the budget is shared out among domains.

    Reads no more of the pool than it has to. Copies stay, at the end, where the pool has no other text. Returns the
    rows, and the numbers of copies replaced and remaining.
    """
    rows = sides.pool.rows
    domains = sides.domains[0] if isinstance(selector, DomainsSelector) else None

    def domain(row: int) -> str | None:
        return None if domains is None else domains[row]

    seen: set[str] = set()
    selected: list[int] = []
    copies: list[int] = []
    for row, written in zip(chosen.tolist(), rows.take(chosen).texts, strict=True):
        text = normalise_text(written)
        (copies if text in seen else selected).append(row)
        seen.add(text)
    if not copies:
        return chosen, 0, 0
    needed = Counter(map(domain, copies))
    order = selector.select(len(selector.scores_))[len(chosen) :]
    for low in range(0, len(order), _BLOCK_ROWS):
        if not needed.total():
            break
        block = order[low : low + _BLOCK_ROWS]
        for row, written in zip(block.tolist(), rows.take(block).texts, strict=True):
            if needed[domain(row)] and (text := normalise_text(written)) not in seen:
                seen.add(text)
                selected.append(row)
                needed[domain(row)] -= 1
    remaining = []
    for row in copies:
        if needed[domain(row)]:
            remaining.append(row)
            needed[domain(row)] -= 1
    return np.array([*selected, *remaining], dtype=chosen.dtype), len(copies) - len(remaining), len(remaining)
