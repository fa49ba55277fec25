"""Results of a selection: scores, domains, map and first records; its checks; the records removed before it."""

from __future__ import annotations

import json
from typing import Any, get_args

from flatshift.experiments.report import formats
from flatshift.experiments.report.blocks import (
    Block,
    Card,
    Cards,
    ChapterPart,
    ChartGroup,
    KeyFigure,
    NameValuePairs,
    Notes,
    SearchableTable,
    Section,
    Table,
)
from flatshift.experiments.report.charts import selection as selection_charts
from flatshift.experiments.results.run import RunResults, SelectionResults, read_object
from flatshift.finetune.errors import UserError
from flatshift.finetune.figures import format_bytes
from flatshift.selection.config import Method

_SPOKE = {
    "tokens": " What spoke for one: the tokens that added most to its score, each with the one before it.",
    "words": " What spoke for one: its words that the target has and that are rarest in the pool.",
}
_ELSEWHERE = ("seconds", "skipped", "checks", "peak_bytes", "profile", "table", "inside")
"""Entries of the manifest that are not listed as facts: shown in other sections or not at all."""
_DIAGNOSTICS = {
    "method": "method",
    "embedder": "embedder",
    "budget": "budget",
    "distinct": "records to be read",
    "again": "records to be read more than once",
    "most_times": "most times that one is read",
    "taken": "readings that were looked for",
    "distinct_taken": "records among those",
    "looked_at": "records looked at by themselves",
    "short": "records below the minimum",
    "passes": "passes over the pool",
    "pool": "pool records",
    "target": "target records",
    "helpful": "records with a negative score",
    "ties": "records that tie at the cut",
    "epsilon": "ε, in units of the cost",
    "mean_cost": "mean cost",
    "marginal_error": "marginal L1 error reached",
    "tolerance": "marginal L1 error asked for",
    "converged": "converged",
    "iterations": "iterations",
    "dual_value": "dual value",
}
_DIAGNOSTICS_OF_METHOD = {
    "domains": {"short": "domains with fewer records than their share"},
    "round-robin": {"taken": "records taken in turn"},
}


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for the selection of a run or of a directory of `flatshift select`."""
    selection = run.selection
    if selection is None:
        return None
    sections = [*_selection_sections(run, selection), *_check_sections(selection), _removal_section(selection)]
    return ChapterPart("selection", [_selection_finding(selection)], _selection_tiles(selection), sections)


def _selection_finding(selection: SelectionResults) -> str:
    """Return a sentence on how many records were selected and which domain gained most."""
    if selection.table is None:
        return ""
    total, count = selection.table.num_rows, selection.taken
    if not total or not count:
        return f"Nothing was chosen from {total:,} records."
    method = _method_name(selection)
    sentence = f"{method} chose {count:,} of {total:,} records ({formats.percent(count / total)})"
    counts = selection.domains
    if len(counts) > 1:
        # Of the domains that make up at least a twentieth of the selection, the one that gained most.
        shares = {name: (pool / total, chosen / count) for name, (pool, chosen) in counts.items()}
        large = [name for name, (_, after) in shares.items() if after >= 0.05]
        name = max(large, key=lambda n: (shares[n][1] / shares[n][0], n)) if large else None
        if name is not None and shares[name][1] > shares[name][0]:
            before, after = map(formats.percent, shares[name])
            sentence += f"; “{name}” grows from {before} of the pool to {after} of the selection"
    if most := selection.about.get("most_times"):
        sentence += (
            f". The budget of {selection.about['budget']:,} counts readings: {selection.about['again']:,} records are "
            f"to be read more than once, up to {most} times"
        )
    return sentence + "."


def _method_name(selection: SelectionResults) -> str:
    """Return the method's title: `gotd` → `GOT-D`."""
    kind = selection.about.get("method")
    titles = {config.kind: config.title for config in get_args(Method)}
    if kind == "auto" and "chosen" in selection.about:
        return f"Auto ({titles.get(str(selection.about['chosen']), selection.about['chosen'])})"
    return titles.get(str(kind), "The selector")


def _selection_tiles(selection: SelectionResults) -> list[KeyFigure]:
    tiles = []
    if selection.table is not None and selection.table.num_rows:
        total, count = selection.table.num_rows, selection.taken
        note = f"of {total:,} records, {formats.percent(count / total)}"
        tiles.append(KeyFigure("chosen", formats.number(count), "", note))
    checks = selection.about.get("checks")
    if isinstance(checks, dict) and 0.1 in checks["shares"]:
        tenth = checks["fitted"]["selection"][checks["shares"].index(0.1)]
        change = _format_change(tenth["realised"] / checks["distance"])
        tiles.append(KeyFigure("distance to the target", change, "", "with the selection as a tenth"))
    error = selection.about.get("marginal_error")
    if isinstance(error, int | float):
        note = "how far the transport plan is from converged"
        tiles.append(KeyFigure("marginal L1 error", formats.number(float(error)), "", note))
    return tiles


def _selection_sections(run: RunResults, selection: SelectionResults) -> list[Section]:
    charts = [selection_charts.projection_map(selection)]
    if selection.table is not None and selection.table.num_rows:
        charts = [selection_charts.score_histogram(selection), selection_charts.domain_chart(selection), *charts]
    sections = [Section("Selection", [ChartGroup(charts), Notes(_selection_notes(selection))])]
    if profile := selection.about.get("profile", {}):
        sections.append(_profile_section(profile))
    if isinstance(tried := selection.about.get("table"), list):
        sections.append(_compared_methods_section(tried, str(selection.about.get("chosen"))))
    records = _top_records(run, selection)
    cards = _cards(selection, records[:9])
    known = any(name == "nearest target" for card in cards for name, _ in card.facts)
    near = ", with their nearest targets" if known else ""
    spoke = _SPOKE.get(str(profile.get("spoke")), "")
    lead = f"The first {len(cards)} choices{near}.{spoke}"
    sections.append(Section("First choices", [Cards(cards)], lead))
    if len(records) > len(cards):
        total = max(len(records), selection.taken if selection.table is not None else 0)
        file = f"{(selection.path / 'selected.jsonl').relative_to(run.path)} has"
        title, lead = "All choices", f"All {total:,} in rank order, to be searched; {file} their whole records."
        if total > len(records):
            title = f"The first {len(records):,} of {total:,} choices"
            lead = f"In rank order, to be searched. The other {total - len(records):,} are not on this page; "
            lead += f"{file} all of them, whole."
        sections.append(Section(title, [_search_table(records)], lead, folded=True))
    if facts := _diagnostics(selection.about):
        sections.append(Section("Solver and features", [NameValuePairs(facts)], folded=True))
    return sections


def _diagnostics(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    listed = {key: value for key, value in manifest.items() if key not in _ELSEWHERE}
    labels = _DIAGNOSTICS | _DIAGNOSTICS_OF_METHOD.get(str(manifest.get("method")), {})
    order = [key for key in labels if key in listed] + [key for key in listed if key not in labels]
    facts = [(labels.get(key, key.replace("_", " ")), formats.json_value(listed[key])) for key in order]
    peaks = manifest.get("peak_bytes")
    if isinstance(peaks, dict):
        text = ", ".join(f"{format_bytes(value)} after {stage}" for stage, value in peaks.items())
        facts.append(("peak memory, mapped files included", text))
    return facts


def _compared_methods_section(tried: list[dict[str, Any]], chosen: str) -> Section:
    """Tabulate the methods that `auto` compared."""
    rows = []
    for line in tried:
        error, difference = line.get("error"), line["difference"]
        cells = ("–", "")
        if error:
            bounds = {"low": difference - 2 * error, "high": difference + 2 * error}
            cells = formats.mean_and_interval({"value": difference, **bounds})
        name = f"{line['method']} (taken)" if line["method"] == chosen else str(line["method"])
        rows.append([name, formats.number(line.get("nats"), 4), *cells, str(line.get("reason") or "")])
    head = ["method", "nats per token", "compared with random", "± two standard errors of it", "left out because"]
    table = Table(head, rows, numeric=frozenset(range(1, 4)))
    lead = "Held-out target texts under a trigram model that has read each method's choice; lower is better."
    return Section("Methods that were tried", [table], lead)


def _profile_section(profile: dict[str, Any]) -> Section:
    """Compare lengths, scripts, sources and repeats of selection, target and pool, with the warnings."""
    sides = [side for side in ("selection", "target", "pool") if isinstance(profile.get(side), dict)]

    def format_shares(side: str, name: str) -> str:
        shares = profile[side].get(name)
        return ", ".join(f"{k} {formats.percent(v)}" for k, v in shares.items()) if shares else "–"

    rows = [
        ["words: 10 %, median, 90 %", *(" · ".join(f"{w:g}" for w in profile[s]["words"]) for s in sides)],
        ["repeats, but for numbers and marks", *(formats.percent(profile[s]["repeats"]) for s in sides)],
        ["scripts", *(format_shares(s, "scripts") for s in sides)],
        *(
            [name, *("–" if key not in profile[s] else f"{profile[s][key]:.2f}" for s in sides)]
            for key, name in (("form", "form like the target's"), ("words_alike", "words like the target's"))
        ),
        ["sources", *(format_shares(s, "sources") for s in sides)],
    ]
    counts = ", ".join(f"{profile[side]['texts']:,} of the {side}" for side in sides)
    caption = f"Texts compared: {counts}."
    warnings = Notes([formats.capitalise(str(sentence)) for sentence in profile["warnings"]])
    lead = "Compared with target and pool; a record that is read again counts once."
    return Section("What was chosen", [warnings, Table(["", *sides], rows, caption)], lead)


def _selection_notes(selection: SelectionResults) -> list[str]:
    manifest, notes = selection.about, []
    helpful, budget = manifest.get("helpful"), manifest.get("budget")
    if manifest.get("method") == "gotd" and isinstance(helpful, int) and isinstance(budget, int) and helpful < budget:
        notes.append(
            f"Only {helpful:,} records have a negative score; a budget of {budget:,} adds some that do not help."
        )
    ties = manifest.get("ties")
    if isinstance(ties, int) and ties:
        notes.append(f"{ties:,} records tie at the cut; file order decided which of them were chosen.")
    skipped = manifest.get("skipped")
    if isinstance(skipped, dict):
        notes += [
            f"{len(v):,} bad record{'s' * (len(v) > 1)} of the {k} left out, the first at {str(v[0])[:160]}"
            for k, v in skipped.items()
            if isinstance(v, list) and v
        ]
    return notes


_TopRecord = tuple[dict[str, Any], str, str, str, str]


def _top_records(run: RunResults, selection: SelectionResults) -> list[_TopRecord]:
    """Return (record, text, domain, id and text of the nearest target) of the loaded top records, in rank order."""
    column = ((run.recipe.get("select") or {}).get("columns") or {}).get("text") or "text"
    by_rank: dict[str, dict[int, Any]] = {"nearest_target": {}, "times": {}, "domain": {}}
    if selection.table is not None:
        import pyarrow as pa
        import pyarrow.compute as pc

        ranks = pa.array([record.get("rank", place) for place, record in enumerate(selection.top, 1)], pa.int64())
        top = selection.table.filter(pc.is_in(selection.table.column("rank"), value_set=ranks))
        for name in by_rank.keys() & set(top.column_names):
            by_rank[name] = dict(zip(top.column("rank").to_pylist(), top.column(name).to_pylist(), strict=True))
    records = []
    for position, record in enumerate(selection.top, 1):
        text = str(record.get(column, ""))
        rank = record.get("rank", position)
        domain = str(by_rank["domain"].get(rank) or selection.hidden_domains.get(str(record.get("id", "")), ""))
        near = str(by_rank["nearest_target"].get(rank) or "")
        times = by_rank["times"].get(rank, 1)
        record = {**record, "times": f"{times} times" if times > 1 else ""}
        records.append((record, " ".join(text.split()), domain, near, selection.targets.get(near, "")))
    return records


def _format_score(record: dict[str, Any]) -> str:
    score = record.get("score")
    return formats.number(float(score)) if isinstance(score, int | float) else ""


def _truncate(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " …"


def _cards(selection: SelectionResults, records: list[_TopRecord]) -> list[Card]:
    examples = selection.about.get("profile", {}).get("first", [])
    spoke = {str(example["id"]): ", ".join(example["words"]) for example in examples}
    cards = []
    for position, (record, text, domain, near, target) in enumerate(records, 1):
        facts = [("score", _format_score(record)), ("domain", domain), ("id", str(record.get("id", "")))]
        facts.append(("nearest target", f"{near}: {_truncate(target, 160)}" if target else near))
        facts.append(("to be read", record["times"]))
        facts.append(("spoke for it", spoke.get(str(record.get("id", "")), "")))
        cards.append(Card(str(record.get("rank", position)), _truncate(text, 360), [(k, v) for k, v in facts if v]))
    return cards


def _search_table(records: list[_TopRecord]) -> Table:
    columns = ["rank", "score", "to be read", "domain", "text", "nearest target"]
    rows = []
    for record, text, domain, near, target in records:
        cells = [str(record.get("rank", "")), _format_score(record), record["times"], domain]
        rows.append([*cells, _truncate(text, 240), _truncate(target, 240) or near])
    used = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return SearchableTable(columns, rows, numeric=frozenset({0, 1})).select_columns(used)


def _check_sections(selection: SelectionResults) -> list[Section]:
    """Return the change of the distance to the target, and the targets that the pool cannot serve, if checked."""
    checks = selection.about.get("checks")
    if not isinstance(checks, dict):
        return []
    warnings = Notes([formats.capitalise(sentence) + "." for sentence in checks["warnings"]])
    sampled = checks["rows"] < checks["of"] or checks["targets"] < checks["of_targets"]
    charts = ChartGroup([selection_charts.distance_chart(checks)])
    lead = (
        "The change of the transport distance from pool to target when the selection becomes a share λ of the mixture. "
    )
    lead += (
        f"Measured on {checks['rows']:,} of {checks['of']:,} records, drawn by seed and half of them among the best "
        f"ranks ({checks['budget_rows']:,} stand for the selection), and {checks['targets']:,} of "
        f"{checks['of_targets']:,} targets."
        if sampled
        else "Measured on the whole pool and target."
    )
    title = "Does the selection bring the pool nearer to the target?"
    distance = Section(title, [warnings, charts, _distance_table(checks, sampled)], lead)
    return [distance, _coverage_section(checks["coverage"])]


def _distance_table(checks: dict[str, Any], sampled: bool) -> Table:
    """Build a row for each λ. sampled: the best possible value is an estimate, a bound for the sampled rows only."""
    distance, held_out = checks["distance"], checks["held_out"]
    arms = ("selection", "random", selection_charts.third_arm(checks)) if held_out else ()
    columns = ["share λ", "promised", "realised", "ratio", "best possible", "divergence"]
    columns += [f"unseen: {arm}" for arm in arms]
    rows = []
    for index, share in enumerate(checks["shares"]):
        own = checks["fitted"]["selection"][index]
        cells = [
            f"{share:g}",
            _format_change(own["predicted"] / distance),
            _format_change(own["realised"] / distance),
            "–" if own["ratio"] is None else formats.number(float(own["ratio"]), 2),
            f"{'≈' if sampled else '≥'} {_format_change((own['realised'] - own['gap']) / distance)}",
            _format_change(own["debiased"] / distance),
        ]
        cells += [_format_range(selection_charts.relative_changes(checks, arm, index)) for arm in arms]
        rows.append(cells)
    bound = "an estimate from the sample, no bound for the whole pool" if sampled else "a bound"
    caption = (
        "All in per cent of the distance before. Promised: λ times the mean score. Best possible: no selection of this "
        f"size can change the distance by more ({bound}). Divergence: the change with entropy's own part taken out."
    )
    if arms:
        caption += (
            f" Unseen: chosen with one half of the target and evaluated on the other, mean and range of "
            f"{len(held_out[arms[-1]])} random halves."
        )
    return Table(columns, rows, caption, frozenset(range(1, len(columns))))


def _format_change(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def _format_range(values: list[float]) -> str:
    mean, low, high = (_format_change(share) for share in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def _coverage_section(coverage: dict[str, Any]) -> Section:
    rows = [
        {
            "target": worst["text"] or "(no text)",
            "id": worst["id"],
            "potential g": formats.signed_number(float(worst["g"])),
            "cost of nearest record": formats.number(float(worst["cost"])),
            "served": "no" if worst["unserved"] else "yes" if coverage["limit"] is not None else "–",
            "nearest record": worst["nearest_text"] or worst["nearest"],
        }
        for worst in coverage["worst"]
    ]
    unserved, count = coverage["unserved"], coverage["looked_at"]
    some = count < coverage["of"]
    if coverage["limit"] is None:
        lead = "Fewer than ten targets differ, so there is no telling what is far."
    elif unserved:
        lead = (
            f"{unserved:,} of {count:,} targets{' looked at' * some} have no record of the pool as near as targets are "
            f"to one another (95 % of them have another within a cost of {formats.number(float(coverage['limit']))}). "
        )
        lead += (
            "The pool as a whole is of another kind: a selection moves it towards the target without reaching it."
            if 2 * unserved > count
            else "No choice from this pool comes nearer to these."
        )
    else:
        lead = "Every target that was looked at has a record of the pool as near as targets are to one another."
    sample = f"The {count:,} targets of largest potential. " if some else ""
    caption = (
        f"{sample}The potential g_j, in units of cost: what it costs the pool to reach a target, compared with the "
        "mean one. Nearest records are searched in the whole pool."
    )
    table = Table.of(rows, caption, words=("target", "id", "served", "nearest record")) if rows else None
    return Section("What the pool cannot serve", [table], f"{lead} Listed by potential, largest first.")


_EXAMPLES = 5


def _removal_section(selection: SelectionResults) -> Section:
    """Return a section with counts of removed records by cause and some examples, if a hygiene step ran."""
    hygiene = read_object(selection.path / "manifest.json").get("hygiene")
    if not isinstance(hygiene, dict):
        return Section("Removed from the pool", [])
    records = hygiene["records"]
    counts = dict(hygiene["dropped"])
    if hygiene["cut"]:
        counts[f"cut (into {hygiene['pieces']:,} pieces)"] = hygiene["cut"]
    rows = [[c, f"{n:,}", f"{100 * n / records:.2f} %" if records else "–"] for c, n in counts.items()]
    blocks: list[Block] = [Table(["cause", "records", "share of the pool"], rows, numeric=frozenset({1, 2}))]
    if examples := _read_examples(selection):
        caption = f"The first {len(examples)} with a match; drops.jsonl has every one."
        blocks.append(Table(["record", "cause", "repeats", "in", "similarity"], examples, caption, frozenset({4})))
    notes = [
        f"{count:,} {sentence}" for step, name, sentence in _REMOVAL_NOTES if (count := hygiene.get(step, {}).get(name))
    ]
    lead = f"{records:,} records were read, {hygiene['kept']:,} remained after these steps."
    return Section("Removed from the pool", [*blocks, Notes(notes)], lead)


def _read_examples(selection: SelectionResults) -> list[list[str]]:
    path = selection.path / "drops.jsonl"
    examples: list[list[str]] = []
    if not path.is_file():
        return examples
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                drop = json.loads(line)
                if drop["match"] is None:
                    continue
                similarity = drop["value"] if drop["cause"] == "near-duplicate" else None
                text = "" if similarity is None else formats.number(similarity, 3)
                examples.append([drop["id"], drop["cause"], drop["match"], drop["match_in"], text])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(f"{path}:{number}: not what a selection writes; make it again") from None
            if len(examples) == _EXAMPLES:
                break
    return examples


_REMOVAL_NOTES = (
    ("listed", "unknown", "ids that were listed to drop are those of no record."),
    ("decontaminate", "too_short", "evaluation texts are too short to be looked for by their words."),
    ("decontaminate", "common", "evaluation n-grams are common in the pool and count as ordinary phrases."),
    ("near", "left_out", "pairs in large crowds of texts that share a hash were not compared."),
)
