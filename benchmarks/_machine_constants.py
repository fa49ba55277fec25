"""Numbers in the code that were chosen on some machine: does a neighbouring value do better on another one?

Each is put at half and at twice its value, and the work that it is for is timed at all three, in turn, in one process.
A number that decides a choice rather than a size (the kernel of attention, the form of a layer) stands beside what it
was chosen against.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks._harness import cpu_seconds, limit_threads

Work = Callable[[], Any]
TEXTS = 1500


@dataclass(frozen=True)
class Constant:
    """A number of a module, and the work that it is for."""

    place: str
    """`module:NAME`, or `module:NAME:key` of a table."""
    work: Callable[[], Work]
    """Makes the inputs and gives what is timed."""

    def value(self) -> int:
        """As it stands in the code."""
        owner, name = self._owner()
        found = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        assert isinstance(found, int)
        return found

    @contextmanager
    def at(self, value: int) -> Iterator[None]:
        """The number is another one inside."""
        owner, name = self._owner()
        before = self.value()
        put = owner.__setitem__ if isinstance(owner, dict) else partial(setattr, owner)
        put(name, value)
        try:
            yield
        finally:
            put(name, before)

    def _owner(self) -> tuple[Any, str]:
        module, name, *key = self.place.split(":")
        owner = importlib.import_module(module)
        return (getattr(owner, name), key[0]) if key else (owner, name)


def texts(count: int = TEXTS) -> list[str]:
    """Of the pool that ships."""
    from flatshift.finetune.data.rows import read_rows

    found = [str(row.values["text"]) for row, _ in zip(read_rows(["sample:pool"]), range(count), strict=False)]
    if len(found) < count:
        raise ValueError(f"sample:pool has {len(found)} texts, {count} are wanted")
    return found


# ---------------------------------------------------------------------------------------- what the numbers are for


def transport() -> Work:
    """One evaluation of the semi-dual over 16 k × 1 k × 384, streamed."""
    import numpy as np
    import torch

    from flatshift.selection.transport.kernel import StreamedEvaluator
    from flatshift.selection.transport.problem import pose_problem
    from flatshift.selection.transport.rows import StreamedRows

    draw = np.random.Generator(np.random.PCG64(0))
    x, y = (draw.standard_normal((size, 384)).astype(np.float32) for size in (16_384, 1000))
    rows = StreamedRows(pose_problem(x, y, None, None, chunk=None, progress=None), torch.float32)
    return lambda: StreamedEvaluator(rows, 40.0).evaluate(torch.zeros(len(y), dtype=torch.float64))


def signatures() -> Work:
    """MinHash signatures of the pool's shingles, 128 permutations."""
    from flatshift.selection.hashing import Shingler
    from flatshift.selection.hygiene.duplicates import MinHasher

    hashes, counts = Shingler("char", 5)(texts() * 4)
    return lambda: MinHasher(128, 0).signatures(hashes, counts)


def shingles() -> Work:
    """Hashed character shingles of the pool."""
    from flatshift.selection.hashing import Shingler

    found = texts() * 8
    return lambda: Shingler("char", 5)(found)


def duplicates() -> Work:
    """Near duplicates among texts of the pool and copies of them with every twentieth word changed."""
    import numpy as np

    from flatshift.selection.hygiene.duplicates import NearDuplicateGroups
    from flatshift.selection.hygiene.hygiene_config import NearDuplicates as Settings

    found = texts()
    twins = [" ".join("x" if i % 20 == 19 else w for i, w in enumerate(text.split())) for text in found]
    everything = [*found, *twins]
    signed = NearDuplicateGroups(Settings(), seed=0, memory=1 << 30)
    signed.sign(everything)
    signed.propose(np.ones(len(everything), dtype=bool))
    signed.collect(everything)
    return signed.resolve


def repetition() -> Work:
    """Shares of repeated n-grams in the pool's texts."""
    from flatshift.selection.hygiene.filters import repetition_shares

    found = texts() * 8
    return lambda: repetition_shares(found)


def hashed_words() -> Work:
    """Hashed bags of words of the pool."""
    from flatshift.selection.features.tfidf import WordHasher

    found = texts() * 6
    return lambda: WordHasher(2**18).counts(found)


def tfidf() -> Work:
    """TF-IDF features of 18 k texts by a fitted embedder."""
    from flatshift.selection.features.tfidf import TfIdfEmbedder

    found = texts()
    fitted = TfIdfEmbedder(dim=64, fit_rows=1000).fit(found)
    return lambda: fitted.transform([text[:120] for text in found] * 12)


def ngrams() -> Work:
    """Hashed n-grams of the pool (DSIR)."""
    from flatshift.selection.methods.dsir import NgramHasher

    found = texts() * 4
    return lambda: sum(len(lengths) for _, lengths in NgramHasher(10_000).batches(found))


def row_norms() -> Work:
    """Row norms of a bf16 weight of 4096 × 4096 with an adapter of rank 8 (GGPO)."""
    import torch

    from flatshift.regularizers.layers.frozen import adapted_squared_row_norms

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, 4096, generator=generator).bfloat16()
    a, sb = torch.randn(8, 4096, generator=generator), torch.randn(4096, 8, generator=generator)
    return lambda: adapted_squared_row_norms(weight, a, sb)


def dots() -> Work:
    """The inner product of two vectors of 16 M numbers, summed in float64 (sharpness)."""
    import torch

    from flatshift.regularizers.sharpness.spaces import dot

    one = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    other = one.flip(0)
    return lambda: dot(one, other)


def resamples() -> Work:
    """A bootstrap interval of 2,000 documents."""
    import numpy as np

    from flatshift.finetune.evaluate.bootstrap import bootstrap_interval

    nats, tokens = np.random.Generator(np.random.PCG64(0)).random((2, 2000)) + 1.0
    return lambda: bootstrap_interval([nats, tokens], lambda a, b: a.sum(-1) / b.sum(-1), resamples=1500)


CONSTANTS = {
    "tile of a pass over the pool": Constant("flatshift.selection.transport.kernel:TILE_BYTES:cpu", transport),
    "tile of MinHash": Constant("flatshift.selection.hygiene.duplicates:_TILE", signatures),
    "tile of shingles": Constant("flatshift.selection.hashing:_TILE", shingles),
    "shingles compared at a time": Constant("flatshift.selection.hygiene.duplicates:_BATCH", duplicates),
    "words of repetition at a time": Constant("flatshift.selection.hygiene.filters:_WORDS_AT_ONCE", repetition),
    "texts of hashed words at a time": Constant("flatshift.selection.features.tfidf:_BATCH", hashed_words),
    "texts of TF-IDF at a time": Constant("flatshift.selection.features.tfidf:_CHUNK", tfidf),
    "texts of hashed n-grams at a time": Constant("flatshift.selection.methods.dsir:_BATCH", ngrams),
    "elements of row norms at a time": Constant("flatshift.regularizers.layers.frozen:_CHUNK", row_norms),
    "elements of inner products at a time": Constant("flatshift.regularizers.sharpness.spaces:_CHUNK", dots),
    "numbers of a bootstrap at a time": Constant("flatshift.finetune.evaluate.bootstrap:_ELEMENTS", resamples),
}
"""By what each is: sizes that were measured on some machine. Numbers that only bound memory are not among them."""


def constant_times(what: str, rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of the work at the number itself, at half of it and at twice, paired by round."""
    limit_threads(1)
    constant = CONSTANTS[what]
    work, value = constant.work(), constant.value()
    values = (value // 2, value, value * 2)
    found: dict[str, list[float]] = {str(each): [] for each in values}
    with constant.at(value):
        work()
    for turn in range(rounds):
        for each in values if turn % 2 == 0 else values[::-1]:
            with constant.at(each):
                found[str(each)].append(cpu_seconds(work))
    return {"value": [float(value)], **found}


# ---------------------------------------------------------------------------------------- choices, not sizes


def attention_times(tokens: int, rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of attention, forward and backward in bf16 over 16 rows and 8 heads of 32: as
    `flatshift.finetune.compute.numerics.attention_kernel` has it (`ours`), by batched products (`products`) and as
    torch chooses (`torch`)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from flatshift.finetune.compute.numerics import attention_kernel

    limit_threads(1)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(16, 8, tokens, 32, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    inputs = {"input_ids": torch.zeros(16, tokens, dtype=torch.int64)}

    def run(around: Callable[[], Any]) -> None:
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16), around():
                scaled_dot_product_attention(*parts, is_causal=True).sum().backward()

    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: attention_kernel(inputs),
        "products": lambda: sdpa_kernel(SDPBackend.MATH),
        "torch": contextlib.nullcontext,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    run(ways["products"])
    for turn in range(rounds):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(cpu_seconds(partial(run, ways[name])))
    return found
