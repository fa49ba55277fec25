"""How warm-up data is selected: methods and embedders, chosen by `kind`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, Literal


def _check(settings: Any, *names: str, above: float = -inf, least: float = -inf, most: float = inf) -> None:
    """Refuse fields that are not finite, not above `above`, below `least` or over `most`; None passes.

    Raises ValueError that begins with the field's name, so that a recipe loader can say where it was set.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None or (above < value < inf and least <= value <= most):
            continue
        low = f"above {above:,g}" if above > -inf else f"at least {least:,g}"
        high = "" if most == inf else f" and at most {most:,g}"
        raise ValueError(f"{name} must be {low}{high}{' and finite' * (value == inf)}, got {value:g}")


def _check_transport(settings: GotD | GotDContrast) -> None:
    _check(settings, "epsilon", above=0)
    _check(settings, "memory_gib", least=0.001)
    if settings.tolerance is not None and not 0 < settings.tolerance < 2:
        raise ValueError(
            f"tolerance must lie between 0 and 2 (an L1 error of probabilities), got {settings.tolerance:g}"
        )


@dataclass(frozen=True, kw_only=True)
class GotD:
    """Optimal-transport gradients (GOT-D): the samples whose added mass lowers OT(pool, target) most."""

    kind: Literal["gotd"] = "gotd"
    needs: ClassVar[tuple[str, ...]] = ("features",)
    epsilon: float = 0.05
    """Entropic regularisation, as a multiple of the exact weighted mean cost over all pairs."""
    tolerance: float | None = None
    """Marginal L1 error to reach; null: 1e-9 up to N·M = 1e7, 1e-3 above."""
    cost: Literal["sqeuclidean", "cosine"] = "sqeuclidean"
    """Squared Euclidean distance of features as given, or 1 − cosine (no feature may be zero)."""
    memory_gib: float = 1.0
    """What the solver may hold beside the features, GiB."""
    rounds: int = 1
    """Above 1: choose the budget in so many parts, and solve again on the mixture of pool and chosen after each. This
    restores the diversity that a single linear step loses when the selection gets a large share of training. A round
    costs a solve or two more."""
    mixture: float = 0.5
    """Rounds only: the share λ of the selection in (1 − λ)·pool + λ·selection that the later rounds see."""
    holdout: float = 0.25
    """Rounds only: this share of the target is kept aside, and of all rounds the one counts after which the mixture
    with the whole budget, filled at once, is nearest to it. 0: all rounds, on the whole target, unchecked."""
    debiased: bool = False
    """Subtract the pool's transport potential to itself: the gradient of the Sinkhorn divergence. Takes away what
    entropy adds, a pull to the middle of the target that grows with epsilon. Not together with rounds."""
    self_sample: int = 2000
    """Debiased only: pool rows, drawn by seed, that stand for the pool in its potential to itself (exact up to it)."""

    def __post_init__(self) -> None:
        _check_transport(self)
        _check(self, "rounds", "self_sample", least=1)
        _check(self, "mixture", above=0, most=1)
        _check(self, "holdout", least=0, most=0.9)
        if self.debiased and self.rounds > 1:
            raise ValueError(f"rounds cannot be {self.rounds} with debiased; set rounds to 1 or debiased to false")


@dataclass(frozen=True, kw_only=True)
class GotDContrast:
    """GOT-D towards the target and away from negative examples (`select.negative.files`). Score: attract · the target's
    calibrated gradient − repel · the negatives'. The minus sign is inferred, as the paper gives none: a row is taken
    where its mass would take the pool away from the negatives."""

    kind: Literal["gotd-contrast"] = "gotd-contrast"
    needs: ClassVar[tuple[str, ...]] = ("features", "negative")
    epsilon: float = 0.05
    """Entropic regularisation of both problems, as a multiple of each one's own mean cost."""
    tolerance: float | None = None
    """Marginal L1 error to reach; null: 1e-9 up to N·M = 1e7, 1e-3 above."""
    cost: Literal["sqeuclidean", "cosine"] = "sqeuclidean"
    """Squared Euclidean distance of features as given, or 1 − cosine (no feature may be zero)."""
    memory_gib: float = 1.0
    """What the solver may hold beside the features, GiB."""
    attract: float = 1.0
    """Weight of the target's gradient; 0: away from the negatives only, as the paper's detoxification study."""
    repel: float = 1.0
    """Weight of the negatives' gradient."""

    def __post_init__(self) -> None:
        _check_transport(self)
        _check(self, "attract", "repel", least=0)
        if self.attract == self.repel == 0:
            raise ValueError("repel and attract are both 0, which scores nothing; make one of them positive")


@dataclass(frozen=True, kw_only=True)
class Random:
    """A uniform draw by seed: the control of every comparison."""

    kind: Literal["random"] = "random"
    needs: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class KNN:
    """Nearest neighbours of the target, each sample at most once (score: squared distance to its nearest target)."""

    kind: Literal["knn"] = "knn"
    needs: ClassVar[tuple[str, ...]] = ("features",)


@dataclass(frozen=True, kw_only=True)
class DSIR:
    """Importance resampling on hashed word uni- and bigrams (DSIR); score −log weight."""

    kind: Literal["dsir"] = "dsir"
    needs: ClassVar[tuple[str, ...]] = ("texts",)
    buckets: int = 10_000
    """Hash buckets of the n-gram features."""
    resample: bool = False
    """Add seeded Gumbel noise to the log weights, so that the selection is a draw in proportion to the weights, as in
    the paper; the noise is then part of the score. False: the score is −log weight, the selection its plain top-k."""
    hashing: Literal["fast", "sha256"] = "fast"
    """`sha256` puts every n-gram into the bucket that PyPI's data-selection puts it in (slower); `fast` mixes words'
    hashes."""
    smoothing: float = 1.0
    """Count added to every bucket of both bags (Laplace). data-selection 1.0.3: 0."""
    floor: float = 0.0
    """Added to every bucket's probability after that. data-selection 1.0.3: 1e-8, which makes every n-gram that a small
    target happens to lack cost about as much as ten that it has."""

    def __post_init__(self) -> None:
        _check(self, "buckets", least=1, most=2**32 - 1)
        _check(self, "smoothing", "floor", least=0)
        if self.smoothing == self.floor == 0:
            raise ValueError(
                "smoothing and floor are both 0, and a bucket that the target lacks has no logarithm; set one"
            )


@dataclass(frozen=True, kw_only=True)
class TSDS:
    """Transport of the target onto its nearest neighbours with a penalty for crowding (TSDS, arXiv 2410.11303): each
    target spreads its mass over neighbours, near-duplicates share one portion, and the selection is a seeded draw
    without repeats in proportion to the mass received. Rows without mass follow by distance. Made for L2-normalised
    features."""

    kind: Literal["tsds"] = "tsds"
    needs: ClassVar[tuple[str, ...]] = ("features",)
    alpha: float = 0.5
    """Between 0 and 1: small spreads each target's mass over many neighbours, large keeps it on the nearest."""
    scale: float = 5.0
    """The constant C of the paper, in units of distance: what spreading is weighed against."""
    sigma: float = 0.75
    """Rows closer than this count as near-duplicates of one another (kernel 1 − d²/σ²); 0: none do."""
    neighbours: int = 1000
    """Neighbours of each target that may receive mass, at most."""

    def __post_init__(self) -> None:
        _check(self, "alpha", above=0, most=1)
        _check(self, "scale", above=0)
        _check(self, "sigma", least=0)
        _check(self, "neighbours", least=1)


@dataclass(frozen=True, kw_only=True)
class Less:
    """Gradient similarity (LESS, arXiv 2402.04333): the mean similarity of a row's gradient with a target subset's,
    largest over the subsets (the target's domains; one subset where it has none). Features are gradients, one a row,
    computed by you: `--pool-features` and `--target-features`."""

    kind: Literal["less"] = "less"
    needs: ClassVar[tuple[str, ...]] = ("features", "gradients", "domains")
    similarity: Literal["cosine", "inner"] = "cosine"
    """`cosine`, as the paper; `inner` rewards long gradients, which short texts have."""
    checkpoint_weights: tuple[float, ...] = (1.0,)
    """One weight (its learning rate) per checkpoint: the columns are that many equal blocks side by side, compared
    block by block; scaled to sum 1."""

    def __post_init__(self) -> None:
        if not self.checkpoint_weights:
            raise ValueError("checkpoint_weights is empty; give one weight per checkpoint")
        if not all(0 < weight < inf for weight in self.checkpoint_weights):
            raise ValueError(f"checkpoint_weights must all be above 0, got {list(self.checkpoint_weights)}")


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The backbone's own surprise at each text: mean −log p per token."""

    kind: Literal["perplexity"] = "perplexity"
    needs: ClassVar[tuple[str, ...]] = ("losses",)
    keep: Literal["low", "middle", "high"] = "middle"
    """Which end comes first; `middle`: by distance from the median rank."""
    max_length: int = 256
    """Tokens read of each text."""

    def __post_init__(self) -> None:
        _check(self, "max_length", least=8)


@dataclass(frozen=True, kw_only=True)
class Length:
    """By length alone: the control for methods that favour long or short texts."""

    kind: Literal["length"] = "length"
    needs: ClassVar[tuple[str, ...]] = ("texts",)
    prefer: Literal["long", "short", "target"] = "target"
    """`target`: a seeded draw whose lengths follow the target's (in tenths of its distribution)."""
    unit: Literal["words", "characters"] = "words"
    """What is counted."""


Inner = Random | GotD | GotDContrast | KNN | DSIR | TSDS | Less | Perplexity | Length
"""What may rank the rows inside a domain."""


@dataclass(frozen=True, kw_only=True)
class Domains:
    """A fixed share of the budget for each domain, by largest remainder; inside a domain by another method's score."""

    kind: Literal["domains"] = "domains"
    needs: ClassVar[tuple[str, ...]] = ("domains",)
    shares: dict[str, float] = field(default_factory=dict)
    """Domain: weight (scaled to sum 1; a domain that is not named gets none). Empty: as in the target's domain
    column."""
    inside: Inner = field(default_factory=Random)
    """The method that ranks the rows of a domain, fitted on the whole pool; not with rounds of its own."""

    def __post_init__(self) -> None:
        for name, share in self.shares.items():
            if not 0 <= share < inf:
                raise ValueError(f"shares must be at least 0 and finite, got {share:g} for {name!r}")
        if isinstance(self.inside, GotD) and self.inside.rounds > 1:
            raise ValueError(f"inside cannot be gotd in {self.inside.rounds} rounds; set its rounds to 1")


Method = GotD | GotDContrast | Random | KNN | DSIR | TSDS | Less | Perplexity | Length | Domains


def ranking(method: Method) -> Method:
    """The method that ranks rows: inside domains the inner one."""
    return method.inside if isinstance(method, Domains) else method


def needs(method: Method) -> frozenset[str]:
    """What a method works on: of "texts", "features", "gradients" (as features), "losses", "domains", "negative"."""
    inside = method.inside.needs if isinstance(method, Domains) else ()
    return frozenset((*method.needs, *inside))


def one_size(method: Method) -> bool:
    """Whether a selection is shaped for its budget, so that the first k of a larger one are not the selection of k."""
    return isinstance(method, Domains) or (isinstance(method, GotD) and method.rounds > 1)


@dataclass(frozen=True, kw_only=True)
class TfIdf:
    """Hashing TF-IDF followed by truncated SVD and L2 normalisation. Offline, no model."""

    kind: Literal["tfidf"] = "tfidf"
    dim: int = 128
    """Components kept by the SVD."""
    buckets: int = 2**18
    """Hash buckets."""
    fit_rows: int = 20_000
    """Texts that document frequencies and SVD are fitted on, at most: the target's first, then a seeded draw of the
    pool's."""

    def __post_init__(self) -> None:
        _check(self, "dim", least=1)
        _check(self, "buckets", "fit_rows", least=2)


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Masked mean of the backbone's last hidden states, L2-normalised."""

    kind: Literal["backbone"] = "backbone"
    max_length: int = 256
    """Tokens read of each text."""

    def __post_init__(self) -> None:
        _check(self, "max_length", least=1)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Pooled last hidden states of any Hugging Face encoder or decoder. A directory in sentence-transformers' layout is
    read as such: its pooling, normalisation, prompt and length; any other: masked mean, L2-normalised."""

    kind: Literal["encoder"] = "encoder"
    path: str = ""
    """Hub name or local directory."""
    max_length: int = 256
    """Tokens read of each text; no more than a sentence-transformers directory allows."""
    pooling: Literal["auto", "mean", "cls", "max", "last"] = "auto"
    """How a text's states become one vector, normalised; `auto`: as the directory says in all things, else `mean` over
    its tokens."""

    def __post_init__(self) -> None:
        _check(self, "max_length", least=1)


@dataclass(frozen=True, kw_only=True)
class Static:
    """Mean of static word vectors (model2vec or sentence-transformers' StaticEmbedding, or a text file as word2vec,
    GloVe and fastText write). No model runs."""

    kind: Literal["static"] = "static"
    path: str = ""
    """Local directory with model.safetensors and tokenizer.json, or a .txt or .vec file (also .gz)."""
    max_length: int = 512
    """Tokens read of each text."""

    def __post_init__(self) -> None:
        _check(self, "max_length", least=1)


@dataclass(frozen=True, kw_only=True)
class Features:
    """Your own features, one row per record in file order, used as given (never normalised)."""

    kind: Literal["features"] = "features"
    pool: str = ""
    """`.npy` file, N×d."""
    target: str = ""
    """`.npy` file, M×d."""
    negative: str = ""
    """`.npy` file, one row per negative example (gotd-contrast)."""


Embedder = TfIdf | Backbone | Encoder | Static | Features


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The pool's texts cut into pieces of one length, as the paper does. A piece is a record of its own: id
    `<id>#<k>`, with `source_id`, `start` and `end` (characters of the source text) beside it."""

    unit: Literal["words", "chars", "tokens"] = "words"
    """What is counted; `tokens`: of the backbone's tokenizer."""
    size: int = 160
    """Length of a piece; the last of a text may be shorter."""

    def __post_init__(self) -> None:
        _check(self, "size", least=1)


@dataclass(frozen=True, kw_only=True)
class Relevance:
    """Domains of the pool judged as wholes: the transport distance from a sample of each to the target, as the paper
    does before it selects. Needs a domain column."""

    use: Literal["choose", "weight"] = "choose"
    """`choose`: only the nearest domains stay in the pool. `weight`: all stay, and the nearer a domain, the more mass
    its rows have in the transport problem (gotd)."""
    keep: int = 2
    """Domains that stay (`choose`; the paper: 2 to 4)."""
    temperature: float = 1.0
    """`weight`: a domain's mass goes with exp(−(distance − smallest) / (temperature · (mean distance − smallest))). The
    paper says only that relevance decides, so this form is ours."""
    sample: int = 10_000
    """Records of each domain, drawn by seed, that stand for it."""
    epsilon: float = 0.05
    """Entropic regularisation, as a multiple of the mean cost over all samples; the same for every domain."""

    def __post_init__(self) -> None:
        _check(self, "keep", "sample", least=1)
        _check(self, "temperature", "epsilon", above=0)
