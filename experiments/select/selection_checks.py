"""Checks of a selection for manifest and report: `flatshift.selection.checks` on a run's own data."""

from __future__ import annotations

import re
import time
import traceback
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.pool import PoolAndTarget
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.seeds import derive_seed, numpy_generator
from flatshift.selection import Pool, build_selector
from flatshift.selection.config import Domains, GotD, GotDContrast, Method, ranking_method, required_inputs
from flatshift.selection.errors import ConvergenceWarning, SelectionError
from flatshift.selection.methods.base import Selector

_SHOWN = 10
"""Most targets listed in the manifest."""
_CHARACTERS = 200
"""Most characters of a text."""
_TOLERANCE = 1e-4
"""Marginal error of selectors that are refitted on parts of the data."""


def can_check(spec: Select) -> bool:
    """Return True if the method works on features with a meaningful distance."""
    wanted = required_inputs(spec.method)
    return spec.checks and "features" in wanted and not {"gradients", "tokens"} & wanted


def run_selection_checks(
    spec: Select,
    selector: Selector,
    sides: PoolAndTarget,
    *,
    seed: int,
    console: Console,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any] | None:
    """Return the manifest entry of `flatshift.selection.checks`; None if all features coincide or a check failed.

    Prints warnings. A finished selection never fails because of its check: errors in it are printed, too.
    """
    with non_fatal(console):
        from flatshift.selection.checks import check_selection, target_coverage

        started = time.monotonic()
        x, y = sides.x, sides.y
        assert y is not None
        potentials = getattr(selector, "potentials_", getattr(getattr(selector, "inside", None), "potentials_", None))
        inner = ranking_method(spec.method)
        cost = getattr(inner, "cost", "sqeuclidean")
        seed = derive_seed(seed, "checks")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a tolerance missed on a part is in `marginal_error`
            found = check_selection(
                x,
                y,
                np.argsort(selector.ranks()),
                budget=spec.budget,
                refit=_refit_function(spec, sides, seed),
                weights=sides.weights,
                epsilon=potentials.epsilon if potentials is not None and potentials.epsilon > 0 else None,
                cost=cost,
                in_rounds=isinstance(inner, GotD) and inner.rounds > 1,
                seed=seed,
                progress=progress,
            )
        if found is None:
            console.say("note: all features coincide; the selection was not checked")
            return None
        rows, g = found.targets, found.g
        # With rounds the selector's own potentials cover only a part of the target.
        if potentials is not None and len(potentials.g) == len(y):
            rows, g = np.arange(len(y)), potentials.g
        coverage = target_coverage(x, y[rows], g, cost=cost, seed=seed, progress=progress)
        about = _coverage_record(coverage, rows, sides)
        told = found.warnings()
        for sentence in told:
            console.say(f"warning: {sentence}")
        if about["unserved"]:
            worst = about["worst"][0]
            console.say(
                f"note: {about['unserved']:,} of {about['looked_at']:,} targets have no pool record as near as targets "
                f"are to one another, the worst is {worst['id']!r}; report.html names more"
            )
        about["of"] = len(rows)
        return {
            **found.summary(),
            "of_targets": len(y),
            "warnings": told,
            "coverage": about,
            "seconds": round(time.monotonic() - started, 3),
        }
    return None


@contextmanager
def non_fatal(console: Console) -> Iterator[None]:
    """Print errors of a check instead of raising them: the selection stands."""
    try:
        yield
    except SelectionError as error:  # the method may need more than a part of the data
        console.say(f"note: the selection was not checked on parts of the data: {error}")
    except (Interrupted, OSError):  # such as a full disk: the run can be resumed later
        raise
    except Exception as error:
        console.say(f"warning: the selection was not checked, by a fault of the check: {type(error).__name__}: {error}")
        if console.log is not None:
            console.log(traceback.format_exc().rstrip())


def _refit_function(
    spec: Select, sides: PoolAndTarget, seed: int
) -> Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]:
    x, y = sides.x, sides.y
    assert y is not None
    more: dict[str, Any] = {} if sides.z is None else {"negative": Pool(features=sides.z)}
    given = spec.method
    method: Method = (
        replace(given, inside=_with_coarse_tolerance(given.inside))
        if isinstance(given, Domains)
        else _with_coarse_tolerance(given)
    )

    def choose(rows: np.ndarray, targets: np.ndarray, mass: np.ndarray, budget: int) -> np.ndarray:
        part = Pool(
            ids=sides.pool.rows.take(rows).ids[:],
            features=np.asarray(x[rows]),
            domains=_names_at(sides.domains[0], rows),
            weights=mass,
        )
        aims = Pool(features=y[targets], domains=_names_at(sides.domains[1], targets))
        chooser = build_selector(method, seed=seed, budget=budget)
        chooser.fit(part, aims, **more)
        return chooser.select(budget)

    return choose


def _names_at(names: Sequence[str | None] | None, rows: np.ndarray) -> list[str | None] | None:
    return None if names is None else [names[row] for row in rows.tolist()]


def _with_coarse_tolerance(method: Any) -> Any:
    if isinstance(method, GotD | GotDContrast):
        return replace(method, tolerance=max(method.tolerance or 0.0, _TOLERANCE))
    return method


def _coverage_record(coverage: Any, rows: np.ndarray, sides: PoolAndTarget) -> dict[str, Any]:
    unserved = coverage.unserved
    first = np.lexsort((-coverage.g, ~unserved))[:_SHOWN]
    nearest = [sides.pool.rows[int(row)] for row in coverage.rows[first]]
    worst = []
    for place, record in zip(first.tolist(), nearest, strict=True):
        row = sides.target.rows[int(rows[coverage.targets[place]])]
        worst.append(
            {
                "id": row.id,
                "g": float(coverage.g[place]),
                "unserved": bool(unserved[place]),
                "cost": float(coverage.costs[place]),
                "text": _truncate(row.values["text"]),
                "nearest": record.id,
                "nearest_text": _truncate(record.values["text"]),
            }
        )
    return {
        "looked_at": len(coverage.targets),
        "limit": coverage.limit,
        "unserved": int(unserved.sum()),
        "worst": worst,
    }


def _truncate(text: str) -> str:
    text = " ".join(text[: 4 * _CHARACTERS].split())
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"


_SAMPLE = 2000
"""Most texts of a side that are profiled."""
_FIRST = 10
"""Number of top choices listed with their evidence."""
_SPOKE = 6
"""Words of evidence for each."""
_CHARACTERS = 400
"""Characters of a text that determine its script."""
_FEW = 10
_FEWER = 0.5
"""Smallest ratio of distinct records to repetitions; a selection below it consists mostly of repeats."""
_WORDS = re.compile(r"\w+|[^\w\s]+")


def profile_selection(recipe: Recipe, sides: PoolAndTarget, selector: Selector, chosen: np.ndarray) -> dict[str, Any]:
    """Return the entry `selection.profile` of manifest.json; its `warnings` are for the user.

    chosen: row numbers in selection order; repeated ones count once.
    """
    assert recipe.select is not None
    rows = sides.pool.rows
    readings, chosen = len(chosen), np.array(list(dict.fromkeys(chosen.tolist())))
    draw = numpy_generator(recipe.train.seed, "select", "profile")
    some = np.sort(draw.choice(len(rows), min(_SAMPLE, len(rows)), replace=False))
    target = [row.values["text"] for row in sides.target.rows]
    looked = (
        chosen[np.unique(np.linspace(0, len(chosen) - 1, _SAMPLE).astype(int))] if len(chosen) > _SAMPLE else chosen
    )
    texts = {
        "selection": rows.take(looked).texts[:],
        "target": target[:: max(1, len(target) // _SAMPLE)],
        "pool": rows.take(some).texts[:],
    }
    found: dict[str, Any] = {side: _profile_texts(part) for side, part in texts.items()}
    known = {_letters_only(text) for text in target}
    found["selection"]["also_in_target"] = sum(_letters_only(text) in known for text in texts["selection"])
    if sides.domains[0] is not None:
        names = np.array([name or "(none)" for name in sides.domains[0]], dtype=object)
        found["selection"]["sources"] = _largest_shares(names[chosen].tolist())
        found["pool"]["sources"] = _largest_shares(names[some].tolist())
    found["spoke"], found["first"] = _explain_first(recipe, sides, selector, chosen[:_FIRST], texts)
    found["warnings"] = _warnings(found, len(target))
    if len(chosen) < _FEWER * readings:
        found["warnings"].append(
            f"{len(chosen):,} records make up {readings:,} readings, as the pool has few that are like the target; "
            "lower select.budget, or leave select.method.repeats out"
        )
    return found


def _profile_texts(texts: Sequence[str]) -> dict[str, Any]:
    """Return quantiles of lengths in words, scripts, and the share of texts that repeat another except for form."""
    words = np.array([len(text.split()) for text in texts])
    plain = Counter(map(_letters_only, texts))
    return {
        "texts": len(texts),
        "words": [float(q) for q in np.quantile(words, (0.1, 0.5, 0.9))],
        "scripts": _largest_shares([_main_script(text) for text in texts]),
        "repeats": sum(count - 1 for count in plain.values()) / len(texts),
    }


def _letters_only(text: str) -> str:
    """Return only the letters, in lower case, so that texts differing in numbers, marks or spacing are equal."""
    return "".join(re.findall(r"[^\W\d_]+", text.lower())) or text


def _main_script(text: str) -> str:
    letters = [c for c in text[:_CHARACTERS] if c.isalpha()]
    if not letters:
        return "none"
    if all(c.isascii() for c in letters):
        return "latin"
    names = Counter(unicodedata.name(c, "UNKNOWN").split()[0].split("-")[0] for c in letters)
    return names.most_common(1)[0][0].lower()


def _largest_shares(names: Sequence[str]) -> dict[str, float]:
    return {name: count / len(names) for name, count in Counter(names).most_common(5)}


def _explain_first(
    recipe: Recipe, sides: PoolAndTarget, selector: Selector, chosen: np.ndarray, texts: dict[str, Sequence[str]]
) -> tuple[str, list[dict[str, Any]]]:
    """Return the kind of evidence, and the ids of the first choices with their words.

    "tokens": the method's own attribution; "words": words that a choice shares with the target's texts and that are
    rarer in the pool; "": the method uses no words of the target.
    """
    rows = sides.pool.rows.take(chosen)
    judge = getattr(selector, "inside", getattr(selector, "inside_", selector))
    if hasattr(judge, "evidence") and getattr(judge, "explains", False):
        from flatshift.finetune.models.backbone import open_backbone

        tokenizer = open_backbone(recipe.backbone).tokenizer
        tokens = sides.tokens[0].take(chosen)
        told = zip(rows.ids, tokens, judge.evidence(tokens), strict=True)
        return "tokens", [{"id": id_, "words": _strongest_tokens(tokenizer, row, gains)} for id_, row, gains in told]
    if not judge.by_words:
        return "", [{"id": id_, "words": []} for id_ in rows.ids]
    aims, pool = (_document_frequencies(texts[side]) for side in ("target", "pool"))
    out = []
    for id_, text in zip(rows.ids, rows.texts, strict=True):
        words = dict.fromkeys(_WORDS.findall(text))
        gain = {w: float(np.log((aims[w] / len(texts["target"])) / ((pool[w] + 1) / (len(texts["pool"]) + 1))))
                for w in words if aims[w]}  # fmt: skip
        out.append({"id": id_, "words": sorted(gain, key=lambda w: -gain[w])[:_SPOKE]})
    return "words", out


def _strongest_tokens(tokenizer: Any, tokens: np.ndarray, gains: Sequence[float]) -> list[str]:
    best = [i for i in np.argsort(-np.asarray(gains), kind="stable")[:_SPOKE].tolist() if gains[i] > 0]
    return [tokenizer.decode(tokens[max(0, i - 1) : i + 1].tolist()).strip() for i in best]


def _document_frequencies(texts: Sequence[str]) -> Counter[str]:
    return Counter(word for text in texts for word in set(_WORDS.findall(text)))


def _warnings(found: dict[str, Any], targets: int) -> list[str]:
    selection, target, pool = found["selection"], found["target"], found["pool"]
    told = []
    if targets < _FEW:
        told.append(f"the target has {targets} texts, which is little to choose by; give some dozens at least")
    median = selection["words"][1]
    if median < 0.5 * min(target["words"][1], pool["words"][1]):
        told.append(
            f"the chosen records are short: half have at most {median:g} words, where the target's median is "
            f"{target['words'][1]:g}; set select.hygiene.length.min_words, or the method's minimum"
        )
    if selection["repeats"] > max(0.1, 2 * pool["repeats"]):
        told.append(
            f"{selection['repeats']:.0%} of the chosen records repeat another but for numbers and marks; "
            "set select.hygiene.near"
        )
    if (also := selection["also_in_target"]) > 0.01 * selection["texts"]:
        told.append(f"{also:,} chosen records are texts of the target itself; set select.hygiene.exact to drop them")
    script, share = next(iter(target["scripts"].items()))
    if share > 0.5 and selection["scripts"].get(script, 0.0) < 0.5 * share:
        told.append(
            f"most target texts are in {script} script, and {selection['scripts'].get(script, 0.0):.0%} of the chosen "
            "records are; the pool, or the tokenizer, does not know it"
        )
    if "sources" in selection:
        name, share = next(iter(selection["sources"].items()))
        if share > 0.9 and pool["sources"].get(name, 0.0) < 0.5:
            told.append(
                f"{share:.0%} of the chosen records are of one source, {name!r}, "
                f"{pool['sources'].get(name, 0.0):.0%} of the pool"
            )
    return told
