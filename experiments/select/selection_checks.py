"""Checks of a selection for manifest and report: `flatshift.selection.checks` on a run's own data, and a profile next
to target and pool: lengths, scripts, sources, repeats, and evidence for the top choices.

A warning tells if a selector mostly chose short flukes, one source, repeats, another script, or the target itself.
"""

from __future__ import annotations

import re
import time
import traceback
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.pool import PoolAndTarget
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.redaction import redact_urls
from flatshift.finetune.seeds import derive_seed, numpy_generator
from flatshift.selection import Pool, build_selector
from flatshift.selection.config import Domains, GotD, GotDContrast, ranking_method, required_inputs
from flatshift.selection.errors import SelectionError
from flatshift.selection.hygiene.duplicates import normalise_text
from flatshift.selection.methods.base import Selector

_MAX_LISTED = 10
"""Maximum targets listed in the manifest."""
_MAX_CHARACTERS = 200
"""Maximum characters of a text."""
_TOLERANCE = 1e-4
"""Marginal error of selectors that are refitted on parts of the data."""


def can_check(spec: Select) -> bool:
    """Return True if the method works on features with a meaningful distance."""
    required = required_inputs(spec.method)
    return spec.checks and "features" in required and not {"gradients", "tokens"} & required


def run_selection_checks(
    spec: Select,
    selector: Selector,
    sides: PoolAndTarget,
    chosen: np.ndarray,
    *,
    seed: int,
    console: Console,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any] | None:
    """Return the manifest entry of `flatshift.selection.checks`; None if all features coincide or a check failed.

    chosen: row numbers of the selection. Prints warnings. A finished selection never fails because of its check: errors
    in it are printed, too.
    """
    from flatshift.selection.checks.check import check_selection
    from flatshift.selection.checks.coverage import target_coverage

    started = time.monotonic()
    x, y = sides.x, sides.y
    assert y is not None
    potentials = getattr(selector, "potentials_", getattr(getattr(selector, "inside", None), "potentials_", None))
    inner = ranking_method(spec.method)
    cost = getattr(inner, "cost", "sqeuclidean")
    seed = derive_seed(seed, "checks")
    ranked = np.argsort(selector.ranks())
    order = np.concatenate([chosen, ranked[~np.isin(ranked, chosen)]])
    with non_fatal(console):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a part; a tolerance missed is in `marginal_error`
            result = check_selection(
                x, y, order, budget=spec.budget, refit=_refit_function(spec, sides, seed),
                weights=sides.weights,
                epsilon=potentials.epsilon if potentials is not None and potentials.epsilon > 0 else None, cost=cost,
                in_rounds=isinstance(inner, GotD) and inner.rounds > 1, seed=seed, progress=progress,
            )  # fmt: skip
        if result is None:
            console.say("note: all features coincide; the selection was not checked")
            return None
        rows, g = result.targets, result.g
        # With rounds the selector's own potentials cover only a part of the target.
        if potentials is not None and len(potentials.g) == len(y):
            rows, g = np.arange(len(y)), potentials.g
        coverage = target_coverage(x, y[rows], g, cost=cost, seed=seed, progress=progress)
        record = _coverage_record(coverage, rows, sides)
        sentences = result.warnings()
        for sentence in sentences:
            console.say(f"warning: {sentence}")
        if record["unserved"]:
            console.say(
                f"note: {record['unserved']:,} of {record['looked_at']:,} targets have no pool record as near as "
                f"targets are to one another, the worst is {record['worst'][0]['id']!r}; report.html names more"
            )
        seconds = round(time.monotonic() - started, 3)
        checks = {"of_targets": len(y), "warnings": sentences, "coverage": record, "seconds": seconds}
        return {**result.summary(), **checks}
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
    """Return the recipe's own method as a function that refits on some rows of pool and target, with a coarser
    tolerance that is enough for selecting."""
    x, y = sides.x, sides.y
    assert y is not None
    negative: dict[str, Any] = {} if sides.z is None else {"negative": Pool(features=sides.z)}
    method, inner = spec.method, ranking_method(spec.method)
    if isinstance(inner, GotD | GotDContrast):
        inner = replace(inner, tolerance=max(inner.tolerance or 0.0, _TOLERANCE))
        method = replace(method, inside=inner) if isinstance(method, Domains) else inner

    def choose(rows: np.ndarray, targets: np.ndarray, mass: np.ndarray, budget: int) -> np.ndarray:
        pool_domains, target_domains = (
            None if names is None else [names[row] for row in numbers.tolist()]
            for names, numbers in zip(sides.domains, (rows, targets), strict=True)
        )
        ids = sides.pool.rows.take(rows).ids[:]
        pool = Pool(ids=ids, features=np.asarray(x[rows]), domains=pool_domains, weights=mass)
        refitted = build_selector(method, seed=seed, budget=budget)
        refitted.fit(pool, Pool(features=y[targets], domains=target_domains), **negative)
        return refitted.select(budget)

    return choose


def _coverage_record(coverage: Any, rows: np.ndarray, sides: PoolAndTarget) -> dict[str, Any]:
    unserved = coverage.unserved
    worst = []
    for i in np.lexsort((-coverage.g, ~unserved))[:_MAX_LISTED].tolist():
        row = sides.target.rows[int(rows[coverage.targets[i]])]
        nearest = sides.pool.rows[int(coverage.rows[i])]
        line = {"id": row.id, "g": float(coverage.g[i]), "unserved": bool(unserved[i])}
        line |= {"cost": float(coverage.costs[i]), "text": _truncate(row.values["text"])}
        worst.append(line | {"nearest": nearest.id, "nearest_text": _truncate(nearest.values["text"])})
    count = int(unserved.sum())
    return {"looked_at": len(coverage.targets), "limit": coverage.limit, "unserved": count, "worst": worst,
            "of": len(rows)}  # fmt: skip


def _truncate(text: str) -> str:
    text = redact_urls(" ".join(text[: 4 * _MAX_CHARACTERS].split()))  # every address of a manifest is searched
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"


_MAX_PROFILED = 2000
"""Maximum texts of a side that are profiled."""
_FIRST = 10
"""Number of top choices listed with their evidence."""
_EVIDENCE_WORDS = 6
"""Words of evidence for each."""
_SCRIPT_CHARACTERS = 400
"""Characters of a text that determine its script."""
_MIN_TARGETS = 10
_MIN_DISTINCT = 0.5
"""Smallest ratio of distinct records to repetitions; a selection below it consists mostly of repeats."""
_WORDS = re.compile(r"\w+|[^\w\s]+")
_PARTS = re.compile(r"(\s*)(\w+|[^\w\s])")
_COMMON_WORDS = 300
"""Words of the pool that say nothing of a domain, at most; of a small vocabulary a tenth."""
_FORM_GAIN, _WORDS_GAIN = 0.1, 0.05
"""A choice has the target's form and not its domain where it closes more than the first share of the pool's distance in
form and less than the second in words."""


def profile_selection(recipe: Recipe, sides: PoolAndTarget, selector: Selector, chosen: np.ndarray) -> dict[str, Any]:
    """Return the entry `selection.profile` of manifest.json; its `warnings` are for the user.

    chosen: row numbers in selection order; repeated ones count once.
    """
    assert recipe.select is not None
    rows = sides.pool.rows
    readings, chosen = len(chosen), np.array(list(dict.fromkeys(chosen.tolist())))
    draw = numpy_generator(recipe.train.seed, "select", "profile")
    sample = np.sort(draw.choice(len(rows), min(_MAX_PROFILED, len(rows)), replace=False))
    target = [row.values["text"] for row in sides.target.rows]
    profiled = chosen
    if len(chosen) > _MAX_PROFILED:
        profiled = chosen[np.unique(np.linspace(0, len(chosen) - 1, _MAX_PROFILED).astype(int))]
    texts = {
        "selection": rows.take(profiled).texts[:],
        "target": target[:: -(-len(target) // _MAX_PROFILED)],
        "pool": rows.take(sample).texts[:],
    }
    profile: dict[str, Any] = {side: _profile_texts(side_texts) for side, side_texts in texts.items()}
    for side, figures in _compare_with_target(texts).items():
        profile[side] |= figures
    known = {normalise_text(text) for text in target}
    profile["selection"]["also_in_target"] = sum(normalise_text(text) in known for text in rows.take(chosen).texts)
    profile["selection"]["blank"] = sum(not text.strip() for text in rows.take(chosen).texts)
    if sides.domains[0] is not None:
        names = np.array([name or "(none)" for name in sides.domains[0]], dtype=object)
        profile["selection"]["sources"] = _largest_shares(names[chosen].tolist())
        profile["pool"]["sources"] = _largest_shares(names[sample].tolist())
    profile["spoke"], profile["first"] = _explain_first(recipe, sides, selector, chosen[:_FIRST], texts)
    profile["warnings"] = _warnings(profile, len(target), recipe.select)
    if len(chosen) < _MIN_DISTINCT * readings:
        profile["warnings"].append(
            f"{len(chosen):,} records make up {readings:,} readings, as the pool has few that are like the target; "
            "lower select.budget, or leave select.method.repeats out"
        )
    return profile


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


def _compare_with_target(texts: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    """Return how alike selection and pool are to the target, 0 to 1: in `form` (case, digits, marks and spacing, no
    word) and in `words` beyond the pool's commonest, in lower case. The pool counts with as many texts as the
    selection, since likeness of words grows with their number."""
    pool_words = _count_words(texts["pool"])
    common = {word for word, _ in pool_words.most_common(min(_COMMON_WORDS, len(pool_words) // 10))}
    stride = max(1, len(texts["pool"]) // max(1, len(texts["selection"])))
    sides = {"selection": texts["selection"], "pool": texts["pool"][::stride]}
    form = _count_shapes(texts["target"])
    words = _without(_count_words(texts["target"]), common)
    return {
        side: {
            "form": _likeness(form, _count_shapes(some)),
            "words_alike": _likeness(words, _without(_count_words(some), common)),
        }
        for side, some in sides.items()
    }


def _likeness(first: Counter[Any], second: Counter[Any]) -> float:
    """Return Bhattacharyya's coefficient Σ √(p q) of two distributions given by counts."""
    scale = max(1, first.total()) * max(1, second.total())
    return float(sum((count * second[key] / scale) ** 0.5 for key, count in first.items() if key in second))


def _without(counts: Counter[str], words: Collection[str]) -> Counter[str]:
    return Counter({word: count for word, count in counts.items() if word not in words})


def _count_words(texts: Sequence[str]) -> Counter[str]:
    return Counter(word for text in texts for word in re.findall(r"\w+", text.lower()))


def _count_shapes(texts: Sequence[str]) -> Counter[tuple[str, bool]]:
    """Count the parts of texts by case or mark, and whether a space precedes them."""
    parts = (match for text in texts for match in _PARTS.findall(text))
    return Counter((_case(part) if part[0].isalnum() else part, bool(space)) for space, part in parts)


def _case(word: str) -> str:
    cases = ("isdigit", "islower", "istitle", "isupper")
    return next((case for case in cases if getattr(word, case)()), "mixed")


def _letters_only(text: str) -> str:
    """Return only the letters, in lower case, so that texts differing in numbers, marks or spacing are equal."""
    return "".join(re.findall(r"[^\W\d_]+", text.lower())) or text


def _main_script(text: str) -> str:
    letters = [c for c in text[:_SCRIPT_CHARACTERS] if c.isalpha()]
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
    rows, records = sides.pool.rows.take(chosen), list[dict[str, Any]]()
    ranking = getattr(selector, "inside", getattr(selector, "inside_", selector))
    if hasattr(ranking, "evidence") and getattr(ranking, "explains", False):
        from flatshift.finetune.models.backbone import open_backbone

        tokenizer = open_backbone(recipe.backbone).tokenizer
        tokens = sides.tokens[0].take(chosen)
        for id_, row, gains in zip(rows.ids, tokens, ranking.evidence(tokens), strict=True):
            order = np.argsort(-np.asarray(gains), kind="stable")[:_EVIDENCE_WORDS].tolist()
            # The tokens with the largest gains, each with the one before it.
            words = [str(tokenizer.decode(row[max(0, i - 1) : i + 1].tolist())).strip() for i in order if gains[i] > 0]
            records.append({"id": id_, "words": words})
        return "tokens", records
    if not ranking.by_words:
        return "", [{"id": id_, "words": []} for id_ in rows.ids]
    target_counts, pool_counts = (
        Counter(word for text in texts[side] for word in set(_WORDS.findall(text))) for side in ("target", "pool")
    )
    target_size, pool_size = len(texts["target"]), len(texts["pool"])
    for id_, text in zip(rows.ids, rows.texts, strict=True):
        gain = {
            word: float(np.log((target_counts[word] / target_size) / ((pool_counts[word] + 1) / (pool_size + 1))))
            for word in dict.fromkeys(_WORDS.findall(text))
            if target_counts[word]
        }
        records.append({"id": id_, "words": sorted(gain, key=lambda word: -gain[word])[:_EVIDENCE_WORDS]})
    return "words", records


def _warnings(profile: dict[str, Any], targets: int, spec: Select) -> list[str]:
    selection, target, pool = profile["selection"], profile["target"], profile["pool"]
    sentences = []
    if targets < _MIN_TARGETS:
        sentences.append(f"the target has {targets} texts, which is little to choose by; give some dozens at least")
    median = selection["words"][1]
    if median < 0.5 * min(target["words"][1], pool["words"][1]):
        sentences.append(
            f"the chosen records are short: half have at most {median:g} words, where the target's median is "
            f"{target['words'][1]:g}; set select.hygiene.length.min_words, or the method's minimum"
        )
    if selection["repeats"] > max(0.1, 2 * pool["repeats"]):
        sentences.append(
            f"{selection['repeats']:.0%} of the chosen records repeat another but for numbers and marks; "
            "set select.hygiene.near"
        )
    if (also := selection["also_in_target"]) > 0.01 * spec.budget:
        cure = "" if spec.hygiene.exact or spec.chunk is not None else "; set select.hygiene.exact to drop them"
        sentences.append(f"{also:,} chosen records are texts of the target itself{cure}")
    if blank := selection["blank"]:
        sentences.append(
            f"{blank:,} chosen records have a blank text, and a training on them stops there; set "
            "select.hygiene.length.min_chars: 1 to drop them"
        )
    script, share = next(iter(target["scripts"].items()))
    if script != "none" and share > 0.5 and selection["scripts"].get(script, 0.0) < 0.5 * share:
        sentences.append(
            f"most target texts are in {script} script, and {selection['scripts'].get(script, 0.0):.0%} of the chosen "
            "records are; the pool, or the tokenizer, does not know it"
        )
    form, words = ((selection[key] - pool[key]) / max(1e-9, 1 - pool[key]) for key in ("form", "words_alike"))
    if form > _FORM_GAIN and words < _WORDS_GAIN:
        sentences.append(
            f"the chosen records are like the target in form (case, marks and spacing: {selection['form']:.2f}, a draw "
            f"of the pool {pool['form']:.2f}) and not in words ({selection['words_alike']:.2f}, "
            f"{pool['words_alike']:.2f}); write both in one form first, or compare --method dsir"
        )
    if "sources" in selection:
        name, share = next(iter(selection["sources"].items()))
        if share > 0.9 and pool["sources"].get(name, 0.0) < 0.5:
            sentences.append(
                f"{share:.0%} of the chosen records are of one source, {name!r}, "
                f"{pool['sources'].get(name, 0.0):.0%} of the pool"
            )
    return sentences
