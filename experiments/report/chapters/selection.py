"""Results of a selection: scores, the mix of domains, the map, and the first records."""

from __future__ import annotations

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
from flatshift.experiments.report.charts.selection import domain_chart, projection_map, score_histogram
from flatshift.experiments.results.run import RunResults, SelectionResults
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


def part(run: RunResults) -> ChapterPart | None:
    """Return the part for the selection of a run or of a directory of `flatshift select`."""
    if run.selection is None:
        return None
    tiles, sections = selection_tiles(run.selection), selection_sections(run, run.selection)
    return ChapterPart("selection", [selection_finding(run.selection)], tiles, sections)


def selection_finding(selection: SelectionResults) -> str:
    """Return a sentence on how many records were selected and which domain gained most."""
    if selection.table is None:
        return ""
    total, taken = selection.table.num_rows, selection.taken
    if not total or not taken:
        return f"Nothing was chosen from {total:,} records."
    method = method_name(selection)
    sentence = f"{method} chose {taken:,} of {total:,} records ({formats.percent(taken / total)})"
    counts = selection.domains
    if len(counts) > 1:
        # Of the domains that make up at least a twentieth of the selection, the one that gained most.
        shares = {name: (pool / total, chosen / taken) for name, (pool, chosen) in counts.items()}
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


def method_name(selection: SelectionResults) -> str:
    """Return the method's title: `gotd` → `GOT-D`."""
    method = selection.about.get("method")
    kind = method.get("kind") if isinstance(method, dict) else method
    titles = {one.kind: one.title for one in get_args(Method)}
    if kind == "auto" and "chosen" in selection.about:
        return f"Auto ({titles.get(str(selection.about['chosen']), selection.about['chosen'])})"
    return titles.get(str(kind), "The selector")


def selection_tiles(selection: SelectionResults) -> list[KeyFigure]:
    about = selection.about
    tiles = []
    if selection.table is not None and selection.table.num_rows:
        total, taken = selection.table.num_rows, selection.taken
        tiles.append(
            KeyFigure("chosen", formats.number(taken), "", f"of {total:,} records, {formats.percent(taken / total)}")
        )
    checks = about.get("checks")
    if isinstance(checks, dict) and 0.1 in checks["shares"]:
        place = checks["shares"].index(0.1)
        share = checks["fitted"]["selection"][place]["realised"] / checks["distance"]
        change = f"{100 * share:+.1f} %".replace("-", "−")
        tiles.append(KeyFigure("distance to the target", change, "", "with the selection as a tenth"))
    error = about.get("marginal_error")
    if isinstance(error, int | float):
        tiles.append(
            KeyFigure(
                "marginal L1 error", formats.number(float(error)), "", "how far the transport plan is from converged"
            )
        )
    return tiles


def selection_sections(run: RunResults, selection: SelectionResults) -> list[Section]:
    blocks: list[Block] = []
    charts = []
    if selection.table is not None and selection.table.num_rows:
        charts = [c for c in (score_histogram(selection), domain_chart(selection)) if c]
    mapped = projection_map(selection)
    if mapped:
        charts.append(mapped)
    if charts:
        blocks.append(ChartGroup(charts))
    notes = _selection_notes(selection)
    if notes:
        blocks.append(Notes(notes))
    about = {k: v for k, v in selection.about.items() if k not in _ELSEWHERE}
    order = [k for k in _DIAGNOSTICS if k in about] + [k for k in about if k not in _DIAGNOSTICS]
    facts = [(_DIAGNOSTICS.get(k, k.replace("_", " ")), formats.json_value(about[k])) for k in order]
    peaks = selection.about.get("peak_bytes")
    if isinstance(peaks, dict):
        told = ", ".join(f"{formats.size(value)} after {stage}" for stage, value in peaks.items())
        facts.append(("peak memory, mapped files included", told))
    sections = [Section("Selection", blocks)] if blocks else []
    if isinstance(profile := selection.about.get("profile"), dict):
        sections.append(_profile_section(profile))
    if isinstance(tried := selection.about.get("table"), list):
        sections.append(_compared_methods_section(tried, str(selection.about.get("chosen"))))
    cards = _cards(run, selection)
    if cards:
        known = any(name == "nearest target" for card in cards for name, _ in card.facts)
        near = ", with their nearest targets" if known else ""
        spoke = _SPOKE.get(str(profile.get("spoke")), "") if isinstance(profile, dict) else ""
        lead = f"The {len(cards)} records with the smallest scores{near}.{spoke}"
        sections.append(Section("First choices", [Cards(cards)], lead))
    if len(selection.top) > len(cards):
        taken = max(len(selection.top), selection.taken if selection.table is not None else 0)
        where = f"{(selection.path / 'selected.jsonl').relative_to(run.path)} has"
        title, lead = "All choices", f"All {taken:,} in rank order, to be searched; {where} their whole records."
        if taken > len(selection.top):
            title = f"The first {len(selection.top):,} of {taken:,} choices"
            lead = f"In rank order, to be searched. The other {taken - len(selection.top):,} are not on this page; "
            lead += f"{where} all of them, whole."
        sections.append(Section(title, [_search_table(run, selection)], lead, folded=True))
    if facts:
        sections.append(Section("Solver and features", [NameValuePairs(facts)], folded=True))
    return sections


def _compared_methods_section(tried: list[dict[str, Any]], chosen: str) -> Section:
    """Tabulate the methods that `auto` compared."""
    rows = []
    for line in tried:
        error = line.get("error")
        beside = formats.mean_and_interval({"value": line["difference"], "low": line["difference"] - 2 * error,
                                 "high": line["difference"] + 2 * error}) if error else ("–", "")  # fmt: skip
        name = f"{line['method']} (taken)" if line["method"] == chosen else str(line["method"])
        rows.append([name, formats.number(line.get("nats"), 4), *beside, str(line.get("reason") or "")])
    head = ["method", "nats per token", "compared with random", "± two standard errors of it", "left out because"]
    table = Table(head, rows, numeric=frozenset(range(1, 4)))
    lead = "Held-out target texts under a trigram model that has read each method's choice; lower is better."
    return Section("Methods that were tried", [table], lead)


def _profile_section(profile: dict[str, Any]) -> Section:
    """Compare lengths, scripts, sources and repeats of selection, target and pool, with the warnings."""
    sides = [side for side in ("selection", "target", "pool") if isinstance(profile.get(side), dict)]

    def told(side: str, name: str) -> str:
        shares = profile[side].get(name)
        return ", ".join(f"{k} {formats.percent(v)}" for k, v in shares.items()) if shares else "–"

    rows = [
        ["words: 10 %, median, 90 %", *(" · ".join(f"{w:g}" for w in profile[s]["words"]) for s in sides)],
        ["repeats, but for numbers and marks", *(formats.percent(profile[s]["repeats"]) for s in sides)],
        ["scripts", *(told(s, "scripts") for s in sides)],
        ["sources", *(told(s, "sources") for s in sides)],
    ]
    caption = f"Of up to {profile['pool']['texts']:,} texts of each side."
    blocks: list[Block] = [Table(["", *sides], rows, caption)]
    if profile.get("warnings"):
        blocks.insert(0, Notes([str(sentence).capitalize() for sentence in profile["warnings"]]))
    return Section("What was chosen", blocks, "Compared with target and pool; a record that is read again counts once.")


def _selection_notes(selection: SelectionResults) -> list[str]:
    about, notes = selection.about, []
    helpful, budget = about.get("helpful"), about.get("budget")
    gotd = about.get("method") == "gotd"
    if gotd and isinstance(helpful, int) and isinstance(budget, int) and helpful < budget:
        notes.append(
            f"Only {helpful:,} records have a negative score; a budget of {budget:,} adds some that do not help."
        )
    ties = about.get("ties")
    if isinstance(ties, int) and ties:
        notes.append(f"{ties:,} records tie at the cut; file order decided which of them were chosen.")
    skipped = about.get("skipped")
    if isinstance(skipped, dict):
        notes += [
            f"{len(v):,} bad record{'s' * (len(v) > 1)} of the {k} left out, the first at {str(v[0])[:160]}"
            for k, v in skipped.items()
            if isinstance(v, list) and v
        ]
    return notes


def _top_records(run: RunResults, selection: SelectionResults) -> list[tuple[dict[str, Any], str, str, str, str]]:
    """Return (record, text, domain, id and text of the nearest target) of the loaded top records, in rank order."""
    column = "text"
    select = run.recipe.get("select")
    if isinstance(select, dict) and isinstance(select.get("columns"), dict):
        column = str(select["columns"].get("text") or "text")
    told: dict[str, dict[int, Any]] = {"nearest_target": {}, "times": {}}
    if selection.table is not None:
        import pyarrow.compute as pc

        top = selection.table.filter(pc.less_equal(selection.table.column("rank"), len(selection.top)))
        for name in told.keys() & set(top.column_names):
            told[name] = dict(zip(top.column("rank").to_pylist(), top.column(name).to_pylist(), strict=True))
    found = []
    for position, record in enumerate(selection.top, 1):
        source = record.get("source")
        text = record.get(column) or (source.get(column) if isinstance(source, dict) else None)
        if not isinstance(text, str):
            text = next((v for k, v in record.items() if isinstance(v, str) and k != "id"), "")
        domain = str(record.get("domain") or selection.judged.get(str(record.get("id", "")), ""))
        rank = record.get("rank", position)
        near = str(told["nearest_target"].get(rank) or "")
        times = told["times"].get(rank, 1)
        record = {**record, "times": f"{times} times" if times > 1 else ""}
        found.append((record, " ".join(text.split()), domain, near, selection.targets.get(near, "")))
    return found


def _format_score(record: dict[str, Any]) -> str:
    score = record.get("score")
    return formats.number(float(score)) if isinstance(score, int | float) else ""


def _truncate(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " …"


def _cards(run: RunResults, selection: SelectionResults) -> list[Card]:
    profile = selection.about.get("profile")
    first = profile.get("first", []) if isinstance(profile, dict) else []
    spoke = {str(one.get("id")): ", ".join(map(str, one.get("words", ()))) for one in first if isinstance(one, dict)}
    cards = []
    for position, (record, text, domain, near, told) in enumerate(_top_records(run, selection)[:9], 1):
        facts = [("score", _format_score(record)), ("domain", domain), ("id", str(record.get("id", "")))]
        facts.append(("nearest target", f"{near}: {_truncate(told, 160)}" if told else near))
        facts.append(("to be read", record["times"]))
        facts.append(("spoke for it", spoke.get(str(record.get("id", "")), "")))
        cards.append(Card(str(record.get("rank", position)), _truncate(text, 360), [(k, v) for k, v in facts if v]))
    return cards


def _search_table(run: RunResults, selection: SelectionResults) -> SearchableTable:
    rows = [
        [
            str(record.get("rank", "")),
            _format_score(record),
            record["times"],
            domain,
            _truncate(text, 240),
            _truncate(told, 240) or near,
        ]
        for record, text, domain, near, told in _top_records(run, selection)
    ]
    kept = [place for place in range(6) if any(row[place] for row in rows)]
    columns = ["rank", "score", "to be read", "domain", "text", "nearest target"]
    numeric = frozenset(new for new, old in enumerate(kept) if old < 2)
    return SearchableTable(
        [columns[place] for place in kept], [[row[place] for place in kept] for row in rows], numeric
    )
