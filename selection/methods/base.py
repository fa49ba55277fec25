"""Inputs of selectors (Pool, Target) and their base class (Selector)."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.tokens import TokenRows
from flatshift.selection.lazy import np
from flatshift.selection.shards import ShardMap
from flatshift.selection.validation import Settings, check_chunk, check_strings, feature_matrix, is_whole

Progress = Callable[[str, int, int], None]
UNITS = {"sqeuclidean": 1.0, "cosine": 0.5}
"""Each cost as a multiple of squared distances between `scaled_features` rows."""
_READ_BYTES = 2 << 20  # bytes of float64 rows read at a time for averaging costs


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Samples in file order, with the fields that a method needs.

    ids: N strings (random draws are keyed by them, so they follow a sample when rows move). texts: N strings.
    features: (N, d) array or memory map, used as given. domains: N names or None. weights: (N,), the distribution over
    rows for optimal transport; uniform when None. losses: (N,), mean −log p per token under a model.
    tokens: N rows of token ids (`selection.TokenRows`), of one tokenizer on both sides. shards: maps functions over the
    rows in other processes; methods that are not divided ignore it.
    """

    ids: Sequence[str] | None = None
    texts: Sequence[str] | None = None
    features: Any = None
    domains: Sequence[str | None] | None = None
    weights: Any = None
    losses: Any = None
    tokens: Any = None
    shards: ShardMap | None = None

    def __post_init__(self) -> None:
        lengths = {name: len(value) for name, value in self._columns().items()}
        if not lengths:
            raise SelectionError("a pool or target needs at least one of ids, texts and features")
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise SelectionError(f"pool or target parts differ in length: {counts}; give one of each per row")
        if not len(self):
            raise SelectionError("the pool or target is empty; give at least one row")
        check_strings(self.ids, "ids")
        check_strings(self.texts, "texts")

    def __len__(self) -> int:
        return next(len(value) for value in self._columns().values())

    def _columns(self) -> dict[str, Any]:
        """Return the fields that hold a value for each row."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "shards"}

    def draw(self, seed: int, purpose: str) -> np.ndarray:
        """Return (N,) float64 in (0, 1): a draw for each row, keyed by (seed, purpose, id), not by its position.

        Rows that share an id get different draws, by order of appearance.
        """
        key = hashlib.sha256(f"{purpose}\x1f{seed}".encode()).digest()

        def digest(text: str) -> int:
            raw = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
            return int.from_bytes(raw, "little")

        ids = self.ids if self.ids is not None else map(str, range(len(self)))
        bits = np.fromiter(map(digest, ids), np.uint64, len(self))
        if self.ids is not None:
            # Only rows whose draw is not unique can share an id; names are stored for these alone.
            ordered = np.sort(bits)
            shared = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
            occurrences: Counter[str] = Counter()
            for row in np.flatnonzero(np.isin(bits, shared, kind="sort")).tolist() if len(shared) else ():
                name = self.ids[row]
                if occurrences[name]:
                    bits[row] = digest(f"{name}\x1f{occurrences[name]}")
                occurrences[name] += 1
        return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


Target = Pool
"""Samples of the task; the same class as Pool."""


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Settings):
    """Base of the settings of a method in a recipe."""

    kind: str
    title: ClassVar[str]
    """Name in reports."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Inputs: see `flatshift.selection.config.required_inputs`."""
    selector: ClassVar[type[Selector]]
    """Class with these settings as parameters; set by the class itself if it inherits from the settings."""

    def build(self, **arguments: Any) -> Selector:
        """Build the selector with these settings and with those of `arguments` that are parameters of it."""
        values = vars(self) | arguments
        return self.selector(**{name: value for name, value in values.items() if name in self.selector.parameters})

    def _sides(self, pool: Pool, target: Target) -> tuple[Any, Any]:
        """Return what the method works on, the first of its `needs`, of both sides."""
        return require_field(pool, target, self.needs[0], self.kind)


class Selector(Settings):
    """Base of all selectors, in scikit-learn's style.

    Parameters are the fields of the settings that a class inherits from, and its own annotated attributes with a
    default. Constructors only store them; `fit` checks them, returns self and sets `scores_` (N,) float64, smaller is
    better for every method; `nearest_target_` (N,) int64 or None; `diagnostics_`, a dict for the manifest. A method
    that optimises its selection for one size takes it as the parameter `budget`: `select(budget)` is then that
    selection, a smaller k its best part, a larger k adds rows after it. A method with the parameter `repeats` may
    choose a row up to that many times: `readings_` then lists it each time.

    A method implements `_fit`, which sets these attributes.
    """

    parameters: ClassVar[dict[str, Any]] = {}
    """Default of each constructor parameter."""
    by_words: ClassVar[bool] = True
    """True if words that a row shares with the target can explain its choice."""
    signed: ClassVar[bool] = False
    """True if rows of negative score help and others do not; otherwise zero has no meaning."""
    __signature__: ClassVar[inspect.Signature]
    scores_: np.ndarray
    nearest_target_: np.ndarray | None = None
    diagnostics_: dict[str, Any]
    readings_: np.ndarray | None = None
    """(R,) int64: the selection in the order chosen, each row as often as it is to be read; None: once, by score."""

    def __init_subclass__(cls) -> None:
        types = {item.name: item.type for item in fields(cls) if item.name != "kind"}
        cls.parameters = {item.name: item.default for item in fields(cls) if item.name in types}
        for base in reversed(cls.__mro__):
            if issubclass(base, Selector) and base is not Selector:
                own = {name: hint for name, hint in inspect.get_annotations(base).items() if hasattr(cls, name)}
                types |= own
                cls.parameters |= {name: getattr(cls, name) for name in own}
        cls.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
                for name, default in cls.parameters.items()
            ]
        )
        for base in cls.__bases__:
            if issubclass(base, MethodSettings):
                base.selector = cls

    def __init__(self, **parameters: Any) -> None:
        for name in parameters:
            if name not in self.parameters:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
        vars(self).update(self.parameters | parameters)

    # Parameters can be changed, and two selectors are different objects: settings are frozen and equal by value.
    __setattr__ = object.__setattr__
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def fit(self, pool: Pool, target: Target, *, progress: Progress | None = None, **inputs: Any) -> Self:
        """Check the parameters and score every row of `pool` against `target`.

        progress: called as (stage, done, total). inputs: those that only some methods take, such as `negative`.
        """
        self.check()
        check_chunk(getattr(self, "chunk", None))
        self._fit(pool, target, progress or (lambda stage, done, total: None), **inputs)
        return self

    def _fit(self, pool: Pool, target: Target, progress: Progress) -> None:
        """Set `scores_`, `diagnostics_` and, if the method has them, `nearest_target_` and `readings_`."""
        raise NotImplementedError

    def fit_texts(
        self, pool: Sequence[str], target: Sequence[str], embedder: Any = None, *, progress: Progress | None = None
    ) -> Self:
        """Fit on lists of texts, embedded by `embedder`: an object with `fit_transform(pool, target)`, one with
        `transform(texts)`, or a function from a list of texts to (n, d) vectors, as
        `SentenceTransformer(...).encode`; None: `TfIdfEmbedder()`. Raises SelectionError for anything else, or for
        arguments that are not lists of texts."""
        for name, side in (("pool", pool), ("target", target)):
            if isinstance(side, str) or not hasattr(side, "__len__"):
                raise SelectionError(
                    f"{name} must be a list of texts, not {type(side).__name__}; put texts into a list"
                )
        sides = Pool(texts=pool), Pool(texts=target)
        if embedder is None:
            from flatshift.selection.features.tfidf import TfIdfEmbedder

            embedder = TfIdfEmbedder()
        if hasattr(embedder, "fit_transform"):
            vectors = embedder.fit_transform(pool, target)
        else:
            encode = getattr(embedder, "transform", embedder)
            if not callable(encode):
                raise SelectionError(
                    f"embedder must be an embedder or a function of texts, not {type(embedder).__name__}; "
                    "leave it out for TfIdfEmbedder()"
                )
            vectors = encode(list(pool)), encode(list(target))
        x, y = (feature_matrix(part, name) for part, name in zip(vectors, ("pool", "target"), strict=True))
        return self.fit(replace(sides[0], features=x), replace(sides[1], features=y), progress=progress)

    def select(self, k: int) -> np.ndarray:
        """Return the k best rows as int64 indices in rank order; ties by file order (`ties`).

        With `readings_`, the first k of them, followed by rows that were never chosen. Raises SelectionError.
        """
        k, order = check_budget(k, len(self._fitted())), self._order()
        if self.readings_ is None:
            return order[:k]
        return np.concatenate([self.readings_, order[len(np.unique(self.readings_)) :]])[:k]

    def ties(self, k: int) -> int:
        """Count the rows that share the score at which `select(k)` cuts, so that only file order decides among them; 0
        if the scores decide. Raises SelectionError."""
        scores = self._fitted()
        k = check_budget(k, len(scores))
        if self.readings_ is not None:
            k = len(np.unique(self.select(k)))
        last = np.partition(scores, k - 1)[k - 1]
        tied = int((scores == last).sum())
        return tied if int((scores < last).sum()) + tied > k else 0

    def ranks(self) -> np.ndarray:
        """Return (N,) int64: 1 for the best row, N for the worst; ties by file order."""
        order = self._order()
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.arange(1, len(order) + 1)
        return ranks

    def _order(self) -> np.ndarray:
        return np.argsort(self._fitted(), kind="stable").astype(np.int64, copy=False)

    def _fitted(self) -> np.ndarray:
        if not hasattr(self, "scores_"):
            raise SelectionError(f"{type(self).__name__} has no scores yet; call fit(pool, target) first")
        return self.scores_

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return constructor parameters by name (for scikit-learn's `clone`)."""
        return {name: getattr(self, name) for name in self.parameters}

    def set_params(self, **params: Any) -> Self:
        """Change constructor parameters. Raises SelectionError for an unknown name."""
        for name, value in params.items():
            if name not in self.parameters:
                known = ", ".join(self.parameters)
                raise SelectionError(f"{type(self).__name__} has no parameter {name!r}; it has {known}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        changed = [f"{name}={value!r}" for name, value in self.get_params().items() if value != self.parameters[name]]
        return f"{type(self).__name__}({', '.join(changed)})"


class TokenSelector(Selector):
    """Base of methods that explain their choice: `explains` is True once `_gains` can be computed."""

    @property
    def explains(self) -> bool:
        """True if `evidence` is available: after `fit`, but not with restored scores."""
        return bool(vars(self).keys() & {"_ngrams", "_models", "_weights"})

    def evidence(self, rows: TokenRows) -> list[np.ndarray]:
        """Return each text's evidence by token: what the token, after those before it, adds in favour of the text."""
        self._fitted()
        if not len(rows):
            return []
        flat, lengths = rows.part(0, len(rows))
        return np.split(self._gains(flat, lengths, rows.size), np.cumsum(lengths)[:-1])

    def _gains(self, flat: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
        """Return (T,) evidence of each token of some texts, concatenated; size: of the vocabulary."""
        raise NotImplementedError


def check_budget(k: Any, count: int) -> int:
    """Return `k` if it is a whole number between 1 and `count`. Raises SelectionError."""
    if not is_whole(k) or k < 1:
        raise SelectionError(f"the budget must be a whole number of at least 1, not {k!r}")
    if k > count:
        raise SelectionError(f"the budget {k} is above the pool size {count}; ask for at most {count}")
    return int(k)


def require_field(pool: Pool, target: Target, field: str, method: str) -> tuple[Any, Any]:
    """Return `field` ("texts", "tokens" or "features") of both sides, features as matrices.

    Raises SelectionError if one is missing, tokens are of two vocabularies, or the target has no token at all.
    """
    values = []
    for name, side in (("pool", pool), ("target", target)):
        value = getattr(side, field)
        if value is None:
            raise SelectionError(f"{method} works on {field}, and the {name} has none; pass {field}= to it")
        values.append(feature_matrix(value, name) if field == "features" else value)
    if field == "tokens" and values[0].size != values[1].size:
        raise SelectionError(
            f"pool tokens are of a vocabulary of {values[0].size:,} and target tokens of one of {values[1].size:,}; "
            "make both with the same tokenizer"
        )
    if field == "tokens" and not len(values[1].flat):
        raise SelectionError(f"no target text holds a single token; {method} has nothing to compare with")
    return values[0], values[1]


def unit_weights(weights: Any, count: int) -> np.ndarray:
    """Return (count,) float64 that sums to 1: `weights` scaled, or uniform if they are None."""
    if weights is None:
        return np.full(count, 1.0 / count)
    values = np.asarray(weights, dtype=np.float64)
    return np.asarray(values / values.sum())


def scaled_features(rows: Any, cost: str) -> np.ndarray:
    """Return rows as float64, for "cosine" of length one, so that costs are `UNITS[cost]` times squared distances."""
    wide = np.asarray(rows, dtype=np.float64)
    return wide if cost == "sqeuclidean" else np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True))


class ConvertedRows:
    """Rows of a matrix of any size as float64, each slice converted by a function as it is read."""

    def __init__(self, source: Any, convert: Callable[[np.ndarray], np.ndarray]):
        self._source, self._convert = source, convert
        self.shape, self.dtype = tuple(source.shape), np.dtype(np.float64)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, key: Any) -> np.ndarray:
        return self._convert(np.asarray(self._source[key], dtype=np.float64))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:]


def mean_cost(
    x: Any,
    y: Any,
    *,
    weights: Any = None,
    target_weights: Any = None,
    index: np.ndarray | None = None,
    cost: str = "sqeuclidean",
) -> float:
    """Return Σ_ij a_i b_j c(x_i, y_j), the unit of a relative ε, over the rows `index` of x (None: all).

    a: `weights` of these rows; b: `target_weights`, of y; both uniform if None. Squared distances: Σ_i a_i |x_i − ȳ|² +
    Σ_j b_j |y_j − ȳ|²; cosine costs: half of these for rows of length one. x is read a few MiB at a time.
    """
    rows = scaled_features(y, cost)
    b = unit_weights(target_weights, len(rows))
    centre = b @ rows
    spread = float(b @ ((rows - centre) ** 2).sum(1))
    count = x.shape[0] if index is None else len(index)
    a = unit_weights(weights, count)
    step = max(16, _READ_BYTES // (8 * x.shape[1]))
    total = 0.0
    for low in range(0, count, step):
        centred = scaled_features(x[low : low + step] if index is None else x[index[low : low + step]], cost) - centre
        total += float(a[low : low + step] @ np.einsum("ij,ij->i", centred, centred))
    return UNITS[cost] * (total + spread)


def squared_distances(points: np.ndarray) -> np.ndarray:
    """Return (n, n): the squared distances between centred points (n, d), none below 0 by rounding."""
    squared = np.einsum("ij,ij->i", points, points)
    return np.asarray(np.maximum(squared[:, None] + squared - 2.0 * (points @ points.T), 0.0))


def move_behind(scores: np.ndarray, rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return `scores` with those of `rows` (a mask) moved behind all others, if there are any, sorted by `order`.

    The moved rows get the largest other score plus 1 plus `order` minus its smallest: finite, and larger.
    """
    if not rows.any() or rows.all():
        return scores
    floor = scores[~rows].max(initial=0.0)
    moved = order[rows] - order[rows].min()
    out = scores.copy()
    out[rows] = np.maximum(floor + 1.0 + moved, np.nextafter(floor, np.inf))
    return out
