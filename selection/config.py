"""Settings of warm-up data selection: the table of methods and embedders, chosen by `kind`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, Literal

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.matrix import PrecomputedFeatures
from flatshift.selection.features.pooling import BackboneEmbedder, EncoderEmbedder, Gradients
from flatshift.selection.features.static import Static
from flatshift.selection.features.tfidf import TfIdf
from flatshift.selection.features.tokens import TokenNgrams
from flatshift.selection.methods.auto import Auto
from flatshift.selection.methods.base import MethodSettings, Selector
from flatshift.selection.methods.classifier import Classifier
from flatshift.selection.methods.controls import Length, Random
from flatshift.selection.methods.cynical import Cynical
from flatshift.selection.methods.domains import DomainsSelector
from flatshift.selection.methods.dsir import DSIR
from flatshift.selection.methods.gotd import GotD, GotDContrast
from flatshift.selection.methods.knn import KNN, RoundRobin
from flatshift.selection.methods.less import Less
from flatshift.selection.methods.moore_lewis import MooreLewis
from flatshift.selection.methods.perplexity import LossGap, Measure, Perplexity
from flatshift.selection.methods.tsds import TSDS
from flatshift.selection.validation import Settings, bounded

Inner = (
    Cynical
    | MooreLewis
    | GotD
    | GotDContrast
    | Random
    | KNN
    | RoundRobin
    | DSIR
    | Classifier
    | TSDS
    | Less
    | LossGap
    | Perplexity
    | Length
)
"""Methods that can rank the rows inside a domain."""


@dataclass(frozen=True, kw_only=True)
class Domains(MethodSettings):
    """A fixed share of the budget for each domain, by largest remainder; inside a domain by another method's score."""

    kind: Literal["domains"] = "domains"
    title: ClassVar[str] = "Shares of domains"
    needs: ClassVar[tuple[str, ...]] = ("domains",)
    selector: ClassVar[type[Selector]] = DomainsSelector
    shares: dict[str, float] = field(default_factory=dict)
    """Domain: weight (scaled to sum 1; a domain that is not named gets none). Empty: as in the target's domain
    column."""
    inside: Inner = field(default_factory=Random)
    """Method that ranks the rows of a domain, fitted on the whole pool; without its own rounds, and no row is taken
    twice."""

    def check(self) -> None:
        for name, share in self.shares.items():
            if not 0 <= share < inf:
                raise SelectionError(f"shares must be at least 0 and finite, got {share:g} for {name!r}")
        if isinstance(self.inside, GotD) and self.inside.rounds > 1:
            raise SelectionError(f"inside cannot be gotd in {self.inside.rounds} rounds; set its rounds to 1")

    def build(self, **arguments: Any) -> Selector:
        inner = self.inside.build(**arguments | {"budget": None})
        return super().build(**arguments, shares=self.shares or None, inside=inner)


Method = Inner | Domains | Auto
Embedder = TfIdf | TokenNgrams | BackboneEmbedder | EncoderEmbedder | Gradients | Static | PrecomputedFeatures


def build_selector(
    method: Method,
    *,
    seed: int,
    budget: int | None = None,
    measure: Measure | None = None,
    device: str = "cpu",
    state: str | None = None,
) -> Selector:
    """Build the selector that `method` describes, with those of the other arguments that it takes.

    seed: for random draws. budget: for methods that optimise their selection for one size (gotd in rounds, domains),
    and for the overlap that gotd measures. measure: texts → mean −log p per token, for perplexity. device: of the
    transport solver. state: directory in which a long solve of gotd saves its state for resuming after a kill.
    Raises SelectionError for another type of method.
    """
    if not isinstance(method, Method):
        raise SelectionError(
            f"no selector for {type(method).__name__}; use one of the methods of flatshift.selection.config"
        )
    return method.build(seed=seed, budget=budget, measure=measure, device=device, state=state)


def ranking_method(method: Method) -> Method:
    """Return the method that ranks rows: for `domains`, the inner one."""
    return method.inside if isinstance(method, Domains) else method


def required_inputs(method: Method) -> frozenset[str]:
    """Return the inputs a method needs: a subset of "texts", "tokens" (of the backbone), "features", "gradients" (as
    features), "losses", "domains", "negative"."""
    inside = method.inside.needs if isinstance(method, Domains) else ()
    return frozenset((*method.needs, *inside))


@dataclass(frozen=True, kw_only=True)
class TextChunks(Settings):
    """Splitting of the pool's texts into pieces of one length, as in the paper. Each piece becomes a record with id
    `<id>#<k>` and the columns `source_id`, `start` and `end` (characters of the source text)."""

    unit: Literal["words", "chars", "tokens"] = "words"
    """Unit of the length; `tokens`: of the backbone's tokenizer."""
    size: int = bounded(160, minimum=1)
    """Length of a piece; the last of a text may be shorter."""


@dataclass(frozen=True, kw_only=True)
class Relevance(Settings):
    """Relevance of whole pool domains: the transport distance from a sample of each to the target, as in the paper
    before its selection. Needs a domain column."""

    use: Literal["choose", "weight"] = "choose"
    """`choose`: only the nearest domains stay in the pool. `weight`: all stay, and the nearer a domain, the more mass
    its rows have in the transport problem (gotd)."""
    keep: int = bounded(2, minimum=1)
    """Number of domains that stay (`choose`; the paper: 2 to 4)."""
    temperature: float = bounded(1.0, above=0)
    """`weight`: a domain's mass is proportional to exp(−(distance − smallest) / (temperature · (mean distance −
    smallest))). The paper says only that relevance decides, so this form is ours."""
    sample: int = bounded(10_000, minimum=1)
    """Records that represent each domain, drawn by seed."""
    epsilon: float = bounded(0.05, above=0)
    """Entropic regularisation, as a multiple of the mean cost over all samples; the same for every domain."""
