"""Numbers in the code that were chosen on some machine: does a neighbouring value do better on another one?

Each is put at half and at twice its value, and the work that it is for is timed at all three, in turn, in one process.
A number that decides a choice rather than a size (the kernel of attention, the form of a layer) stands beside what it
was chosen against.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks._harness import in_turn, limit_threads
from flatshift.finetune.compute.numerics import attention_kernel
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.evaluate.bootstrap import bootstrap_interval
from flatshift.regularizers.layers.frozen import adapted_squared_row_norms
from flatshift.regularizers.sharpness.spaces import dot
from flatshift.selection.features.tfidf import TfIdfEmbedder, WordHasher
from flatshift.selection.hashing import Shingler
from flatshift.selection.hygiene.duplicates import MinHasher, NearDuplicateGroups
from flatshift.selection.hygiene.filters import repetition_shares
from flatshift.selection.hygiene.hygiene_config import NearDuplicates
from flatshift.selection.methods.dsir import NgramHasher
from flatshift.selection.transport.kernel import StreamedEvaluator
from flatshift.selection.transport.problem import pose_problem
from flatshift.selection.transport.rows import StreamedRows

Work = Callable[[], Any]


def texts(times: int = 1) -> list[str]:
    """1,500 of the pool that ships, several times."""
    return [str(row.values["text"]) for row in islice(read_rows(["sample:pool"]), 1500)] * times


def transport() -> Work:
    """One evaluation of the semi-dual over 16 k × 1 k × 384, streamed."""
    draw = np.random.Generator(np.random.PCG64(0))
    x, y = (draw.standard_normal((size, 384)).astype(np.float32) for size in (16_384, 1000))
    rows = StreamedRows(pose_problem(x, y, None, None, chunk=None, progress=None), torch.float32)
    return lambda: StreamedEvaluator(rows, 40.0).evaluate(torch.zeros(len(y), dtype=torch.float64))


def signatures() -> Work:
    """MinHash signatures of the pool's shingles, 128 permutations."""
    hashes, counts = Shingler("char", 5)(texts(4))
    return lambda: MinHasher(128, 0).signatures(hashes, counts)


def duplicates() -> Work:
    """Near duplicates among texts of the pool and copies of them with every twentieth word changed."""
    twins = [" ".join("x" if i % 20 == 19 else w for i, w in enumerate(text.split())) for text in texts()]
    everything = [*texts(), *twins]
    signed = NearDuplicateGroups(NearDuplicates(), seed=0, memory=1 << 30)
    signed.sign(everything)
    signed.propose(np.ones(len(everything), dtype=bool))
    signed.collect(everything)
    return signed.resolve


def tfidf() -> Work:
    """TF-IDF features of 18 k texts by a fitted embedder."""
    fitted = TfIdfEmbedder(dim=64, fit_rows=1000).fit(texts())
    return partial(fitted.transform, [text[:120] for text in texts(12)])


def ngrams() -> Work:
    """Hashed n-grams of the pool (DSIR)."""
    result = texts(4)
    return lambda: sum(len(lengths) for _, lengths in NgramHasher(10_000).batches(result))


def row_norms() -> Work:
    """Row norms of a bf16 weight of 4096 × 4096 with an adapter of rank 8 (GGPO)."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, 4096, generator=generator).bfloat16()
    a, sb = torch.randn(8, 4096, generator=generator), torch.randn(4096, 8, generator=generator)
    return partial(adapted_squared_row_norms, weight, a, sb)


def dots() -> Work:
    """The inner product of two vectors of 16 M numbers, summed in float64 (sharpness)."""
    one = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    return partial(dot, one, one.flip(0))


def resamples() -> Work:
    """A bootstrap interval of 2,000 documents."""
    nats, tokens = np.random.Generator(np.random.PCG64(0)).random((2, 2000)) + 1.0
    return lambda: bootstrap_interval([nats, tokens], lambda a, b: a.sum(-1) / b.sum(-1), resamples=1500)


CONSTANTS: dict[str, tuple[str, Callable[[], Work]]] = {
    "tile of a pass over the pool": ("selection.transport.kernel:TILE_BYTES:cpu", transport),
    "tile of MinHash": ("selection.hygiene.duplicates:_TILE", signatures),
    "tile of shingles": ("selection.hashing:_TILE", lambda: partial(Shingler("char", 5), texts(8))),
    "shingles compared at a time": ("selection.hygiene.duplicates:_BATCH", duplicates),
    "words of repetition at a time": (
        "selection.hygiene.filters:_WORDS_AT_ONCE",
        lambda: partial(repetition_shares, texts(8)),
    ),
    "texts of hashed words at a time": (
        "selection.features.tfidf:_BATCH",
        lambda: partial(WordHasher(2**18).counts, texts(6)),
    ),
    "texts of TF-IDF at a time": ("selection.features.tfidf:_CHUNK", tfidf),
    "texts of hashed n-grams at a time": ("selection.methods.dsir:_BATCH", ngrams),
    "elements of row norms at a time": ("regularizers.layers.frozen:_CHUNK", row_norms),
    "elements of inner products at a time": ("regularizers.sharpness.spaces:_CHUNK", dots),
    "numbers of a bootstrap at a time": ("finetune.evaluate.bootstrap:_ELEMENTS", resamples),
}
"""`module:NAME`, or `module:NAME:key` of a table, and the work that the number is for. Sizes that were measured on some
machine; numbers that only bound memory are not among them."""


@contextlib.contextmanager
def constant(place: str, value: int | None = None) -> Iterator[int]:
    """The number at `place`, which is `value` inside."""
    module, name, *key = place.split(":")
    owner = vars(importlib.import_module(f"flatshift.{module}"))
    table, entry = (owner[name], key[0]) if key else (owner, name)
    before = table[entry]
    table[entry] = before if value is None else value
    try:
        yield before
    finally:
        table[entry] = before


def constant_times(what: str, rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of the work at the number itself, at half of it and at twice, paired by round."""
    limit_threads(1)
    place, build = CONSTANTS[what]
    work = build()
    with constant(place) as value:
        work()

    def at(number: int) -> None:
        with constant(place, number):
            work()

    ways = {str(number): partial(at, number) for number in (value // 2, value, value * 2)}
    return {"value": [float(value)], **in_turn(ways, rounds)}


def attention_times(tokens: int, rounds: int) -> dict[str, list[float]]:
    """CPU-seconds of attention, forward and backward in bf16 over 16 rows and 8 heads of 32: as
    `flatshift.finetune.compute.numerics.attention_kernel` has it (`ours`), by batched products (`products`) and as
    torch chooses (`torch`)."""
    limit_threads(1)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(16, 8, tokens, 32, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    inputs = {"input_ids": torch.zeros(16, tokens, dtype=torch.int64)}

    def run(around: Callable[[], Any]) -> None:
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16), around():
                scaled_dot_product_attention(*parts, is_causal=True).sum().backward()

    ways: dict[str, Callable[[], Any]] = {
        "ours": partial(attention_kernel, inputs),
        "products": partial(sdpa_kernel, SDPBackend.MATH),
        "torch": contextlib.nullcontext,
    }
    run(ways["products"])
    return in_turn({name: partial(run, around) for name, around in ways.items()}, rounds)
