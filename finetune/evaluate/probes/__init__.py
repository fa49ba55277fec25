"""Probes of association and co-occurrence with custom word lists, following Smith et al. (MT-NLG, 2201.11990, §6).

    groups: {women: [she, woman], men: [he, man]}
    attributes: {care: [nurse, nanny], craft: [plumber, welder]}
    templates: ["The {attribute} knew that {group} was late."]
    prompts: ["{group} worked as a"]

**Association**: a template is filled with an attribute and with the words at the same index of two groups; the metric
is the difference of the two sentences' log p in nats, so a pair of sentences differs only in the group's word. It is
averaged over templates and indices for an attribute word, and over its words for a set. A group's word may be rarer in
general, which shifts all sets alike; so the informative value of a set is its difference from another.

**Co-occurrence**: the fraction of the words near a group's words that belong to an attribute set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from ...errors import UserError
from ...seeds import numpy_generator
from ..bootstrap import ratio_interval

_WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+(?:['’][\p{L}\p{M}]+)*")


@dataclass(frozen=True, kw_only=True)
class WordListProbe:
    """Word lists and templates of a probe."""

    groups: dict[str, tuple[str, ...]]
    """Group → its words; other groups are compared with the first, and words at the same index form a pair."""
    attributes: dict[str, tuple[str, ...]]
    """Attribute set → its words."""
    templates: tuple[str, ...] = ()
    """Sentences with {group} and {attribute}, for association."""
    prompts: tuple[str, ...] = ()
    """Prompts with {group}, which a model continues (--samples)."""
    window: int = 10
    """Number of words on either side of a group's word that count as near."""
    review: str = ""
    """Reviewer of the lists, for readers."""

    def __post_init__(self) -> None:
        sizes = {name: len(words) for name, words in self.groups.items()}
        if len(sizes) < 2 or len(set(sizes.values())) != 1 or not all(sizes.values()):
            counts = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "none"
            raise UserError(f"probe: `groups` are two at least, of equally many words, which are pairs; here {counts}")
        if not self.attributes or not all(self.attributes.values()):
            raise UserError("probe: `attributes` names a set at least, and each has words")
        if self.window < 1:
            raise UserError(f"probe: window is {self.window}; a word has neighbours from 1 on")
        for name, texts, slots in (
            ("templates", self.templates, ("{group}", "{attribute}")),
            ("prompts", self.prompts, ("{group}",)),
        ):
            for text in texts:
                if any(text.count(slot) != 1 for slot in slots):
                    raise UserError(f"probe: {name} have {' and '.join(slots)} once each; this has not: {text!r}")
        owners: dict[str, str] = {}
        for name, words in (*self.groups.items(), *self.attributes.items()):
            for word in words:
                key = " ".join(_split_words(word))
                if not key:
                    raise UserError(f"probe: {name} has {word!r}, which is no word")
                if key in owners:
                    raise UserError(f"probe: {word!r} is of {owners[key]} and of {name}; leave it in one")
                owners[key] = name


def shipped_probes() -> dict[str, Path]:
    """Return the probes shipped in the package, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def fill_templates(probe: WordListProbe) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Fill all templates of a probe; return the sentences, and (group, set, attribute) of each. Templates and word
    indices follow in the same order for every group.

    Raises UserError for a probe without templates.
    """
    if not probe.templates:
        raise UserError("probe: there are no `templates` to ask association by")
    texts, keys = [], []
    for group, group_words in probe.groups.items():
        for name, words in probe.attributes.items():
            for attribute in words:
                for template in probe.templates:
                    for word in group_words:
                        text = template.replace("{attribute}", attribute).replace("{group}", word)
                        texts.append(text[:1].upper() + text[1:])
                        keys.append((group, name, attribute))
    return texts, keys


def measure_association(
    probe: WordListProbe, keys: Sequence[tuple[str, str, str]], nats: NDArray[np.float64], *, resamples: int = 1000
) -> dict[str, Any]:
    """Compute associations from the sentences' nats (N,): for each group but the first, `{set: {value, low, high, n,
    words}}` with log p(its sentence) − log p(that of the first group), and under `between` the difference of each set
    from the first.

    Intervals are percentiles of a bootstrap over the words of a set, as they represent others; a set of one word has
    none.
    """
    log_probs: dict[tuple[str, str, str], list[float]] = {}
    for key, value in zip(keys, nats.tolist(), strict=True):
        log_probs.setdefault(key, []).append(-value)
    reference, *groups = probe.groups
    base = next(iter(probe.attributes))
    associations: dict[str, Any] = {}
    for group in groups:
        words = {
            name: np.array([
                np.mean(np.subtract(log_probs[group, name, word], log_probs[reference, name, word]))
                for word in attributes
            ])
            for name, attributes in probe.attributes.items()
        }  # fmt: skip
        resampled = {}
        for name, values in words.items():
            index = numpy_generator(0, "probe", name).integers(0, len(values), size=(resamples, len(values)))
            resampled[name] = values[index].mean(-1)
        associations[group] = {
            "sets": {
                name: {
                    **_summarize(float(values.mean()), resampled[name], len(values)),
                    "words": dict(zip(probe.attributes[name], values.tolist(), strict=True)),
                }
                for name, values in words.items()
            },
            "between": {
                name: _summarize(
                    float(values.mean() - words[base].mean()), resampled[name] - resampled[base],
                    min(len(values), len(words[base])),
                )
                for name, values in words.items() if name != base
            },
        }  # fmt: skip
    return associations


def measure_cooccurrence(probe: WordListProbe, texts: Sequence[str], *, resamples: int = 1000) -> dict[str, Any]:
    """Return for each group `{near, texts, sets: {set: {count, value, low, high, n}}}`: the number of words near one of
    the group's words, of texts that have one, and the fraction of those words in the set, with a bootstrap interval
    over texts (none for a count of zero, for which resampling is uninformative).

    A word near several of the group's words counts once; case is ignored; a phrase of several words counts each word.
    The group's own words are not near words.
    """
    phrases = {
        name: [_split_words(w) for w in words] for name, words in (*probe.groups.items(), *probe.attributes.items())
    }
    near = {group: np.zeros(len(texts)) for group in probe.groups}
    counts = {(group, name): np.zeros(len(texts)) for group in probe.groups for name in probe.attributes}
    occurs = {group: np.zeros(len(texts), dtype=bool) for group in probe.groups}
    for i, text in enumerate(texts):
        words = _split_words(text)
        positions = {name: _phrase_positions(words, members) for name, members in phrases.items()}
        for group in probe.groups:
            neighbours = {
                p for at in positions[group] for p in range(max(0, at - probe.window), at + probe.window + 1)
                if p < len(words)
            } - positions[group]  # fmt: skip
            occurs[group][i], near[group][i] = bool(positions[group]), len(neighbours)
            for name in probe.attributes:
                counts[group, name][i] = len(neighbours & positions[name])
    figures: dict[str, Any] = {}
    for group in probe.groups:
        rows = np.flatnonzero(near[group])
        sets = {}
        for name in probe.attributes:
            count = int(counts[group, name].sum())
            value = count / near[group].sum() if len(rows) else None
            interval: Mapping[str, Any] = {"value": value, "low": None, "high": None, "n": len(rows)}
            if count:
                interval = ratio_interval(counts[group, name][rows], near[group][rows], resamples=resamples)
            sets[name] = {"count": count, **interval}
        figures[group] = {"near": int(near[group].sum()), "texts": int(occurs[group].sum()), "sets": sets}
    return figures


def _split_words(text: str) -> list[str]:
    return [word.casefold().replace("’", "'") for word in _WORD.findall(text)]


def _phrase_positions(words: Sequence[str], phrases: Sequence[Sequence[str]]) -> set[int]:
    """Return the indices of words that belong to any of the phrases."""
    starts: dict[str, list[Sequence[str]]] = {}
    for phrase in phrases:
        starts.setdefault(phrase[0], []).append(phrase)
    return {
        i + k
        for i, word in enumerate(words)
        for phrase in starts.get(word, ())
        if list(words[i : i + len(phrase)]) == list(phrase)
        for k in range(len(phrase))
    }


def _summarize(value: float, resampled: NDArray[np.float64], n: int) -> dict[str, Any]:
    if n < 2:
        return {"value": value, "low": None, "high": None, "n": n}
    low, high = np.quantile(resampled, [0.025, 0.975]).tolist()
    return {"value": value, "low": low, "high": high, "n": n}
