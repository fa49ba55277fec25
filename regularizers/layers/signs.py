"""Random signs from a counter-based hash, independent of the device, the split over processes and recomputation.

A sign is one bit of a 64-bit hash of (seed, optimizer step, layer, side, *global* row or column), for some scopes also
of the micro-batch and the sample (`SampleSigns`). The hash is SplitMix64 (Steele, Lea & Flood, OOPSLA 2014) used as a
counter generator: word i of stream `key` is mix64(key + (i+1)·γ). Signed 64-bit integers wrap modulo 2^64 on every
device, so the words are the same on all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import RegularizerError

Side = Literal["out", "in", "probe", "shuffle", "sample"]
MAX_COLUMNS = 64
"""Number of signs in one word, hence for one row or column."""

_SIDES: dict[str, int] = {"out": 1, "in": 2, "probe": 3, "shuffle": 4, "sample": 5}
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def to_int64(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit word."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def _mix_int(word: int) -> int:
    """Apply SplitMix64's finaliser to a Python integer; the same bits as `mix64`."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * _M1) & _MASK
    word = ((word ^ (word >> 27)) * _M2) & _MASK
    return word ^ (word >> 31)


def mix64(words: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64 words, elementwise."""
    return mix64_(words.clone())


def mix64_(words: Tensor) -> Tensor:
    """Apply `mix64` in place, for many words: otherwise half of the time is spent on memory. The masks make the right
    shifts logical."""
    shifted = words >> 30
    words.bitwise_xor_(shifted.bitwise_and_((1 << 34) - 1)).mul_(to_int64(_M1))
    torch.bitwise_right_shift(words, 27, out=shifted)
    words.bitwise_xor_(shifted.bitwise_and_((1 << 37) - 1)).mul_(to_int64(_M2))
    torch.bitwise_right_shift(words, 31, out=shifted)
    return words.bitwise_xor_(shifted.bitwise_and_((1 << 33) - 1))


def layer_uid(name: str) -> int:
    """Return a 64-bit id of a layer, the same in every process and on every platform."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def stream_id(name: str, side: Side) -> int:
    """Return the id of the sign stream of one side of a layer, as an int64; constant over a run."""
    return to_int64(_mix_int(layer_uid(name) + _SIDES[side] * _GAMMA))


def step_id(seed: int, step: int) -> int:
    """Return the part of a key that changes with every optimizer step, as an int64."""
    return to_int64(_mix_int(_mix_int(seed + _GAMMA) + step * _GAMMA))


def micro_id(seed: int, step: int, micro: int) -> int:
    """Return the part of a key that changes with every micro-batch (from 0) of every optimizer step, as an int64."""
    return to_int64(_mix_int(step_id(seed, step) + (micro + 1) * _GAMMA))


def stream_keys(streams: Tensor, step: int) -> Tensor:
    """Return the keys of streams (int64 `stream_id`s) at one optimizer step (`step_id`) or micro-batch (`micro_id`)."""
    return mix64(streams ^ step)


def counter_values(indices: Tensor) -> Tensor:
    """Return the counter values of global rows or columns (int64)."""
    return (indices + 1) * to_int64(_GAMMA)


def sign_words(keys: Tensor, counters: Tensor) -> Tensor:
    """Return one 64-bit word for each pair of a key and a counter (broadcast)."""
    return mix64(keys + counters)


class SignStreams:
    """Words of many streams in one call: stream i at its own indices, one stream after another."""

    def __init__(self, streams: Sequence[int], indices: Sequence[Tensor], device: torch.device) -> None:
        """streams: `stream_id`s. indices: global rows or columns (int64) of each."""
        self._streams = torch.tensor(streams, dtype=torch.int64, device=device)
        self._lengths = torch.tensor([len(each) for each in indices], device=device)
        self._total = sum(len(each) for each in indices)
        # int32 between draws: there is one index for every row and column of the model, stored for the whole run
        self._indices = torch.cat(list(indices)).to(device=device, dtype=torch.int32)

    def words(self, step: int) -> Tensor:
        """Return the words at one `step_id` or `micro_id`, int64 (Σ lengths,)."""
        keys = torch.repeat_interleave(stream_keys(self._streams, step), self._lengths, output_size=self._total)
        return sign_words(keys, counter_values(self._indices.long()))


@lru_cache(maxsize=16)
def _byte_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the eight signs of every byte (256, 8), lowest bit first; a lookup is cheaper than shifting bit by bit."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (bits * 2 - 1).to(device=device, dtype=dtype)


def unpack_signs(words: Tensor, columns: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return signs ±1 (N, columns) from the lowest bits of N words."""
    if not 0 <= columns <= MAX_COLUMNS:
        raise ValueError(f"a word gives at most {MAX_COLUMNS} signs, not {columns}")
    if columns == 0:
        return torch.empty(len(words), 0, dtype=dtype, device=words.device)
    table = _byte_table(dtype, words.device)
    parts = [table[(words >> (8 * byte)) & 255] for byte in range((columns + 7) // 8)]
    signs = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return signs[:, :columns]


def draw_signs(
    *,
    seed: int,
    step: int,
    layer: str,
    side: Side,
    indices: Tensor | range,
    columns: int,
    micro: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return signs ±1 (len(indices), columns) of one side of a layer.

    indices: global rows ("out"), columns, or rows of the micro-batch `micro` ("sample"). Any split of the indices over
    processes gives slices of the same result. `GGPORegularizer` draws all layers in one call of the same functions;
    this is the readable form and the reference.
    """
    if isinstance(indices, range):
        indices = torch.arange(indices.start, indices.stop, indices.step, dtype=torch.int64)
    stream = torch.tensor([stream_id(layer, side)], device=indices.device)
    key = step_id(seed, step) if micro is None else micro_id(seed, step, micro)
    return unpack_signs(sign_words(stream_keys(stream, key), counter_values(indices)), columns, dtype=dtype)


_MAIN_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids")


class SampleCounts:
    """Number of samples of this process in the current micro-batch: the first dim of the model's input, or of the first
    layer's if the model itself is not called."""

    def __init__(self) -> None:
        self._sizes: set[int] = set()

    def forget(self) -> None:
        """Reset for another micro-batch."""
        self._sizes.clear()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Read the batch sizes from the calls of `model`."""

        def read(_: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            inputs = [*(kwargs.get(name) for name in _MAIN_INPUTS), *args, *kwargs.values()]
            tensors = [each for each in inputs if isinstance(each, Tensor) and each.ndim]
            if tensors:
                self._sizes.add(len(tensors[0]))

        hook = model.register_forward_pre_hook(read, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self.forget()

    def check(self, x: Tensor, layer: str) -> None:
        """Raise RegularizerError unless the first dim of the `layer`'s input x is the samples."""
        if not self._sizes:
            self._sizes.add(len(x))
        if x.ndim < 2 or len(x) not in self._sizes:
            raise RegularizerError(
                f"regularizer.scope: sample needs each layer's input to have the batch first, but layer {layer} gets "
                f"{tuple(x.shape)} in a batch of {max(self._sizes)}; use scope: microbatch, or leave this layer out "
                "of adapter.targets"
            )


class SampleSigns:
    """Separate noise for every sample b of a batch: signs c_b in rank space, ε_b = U diag(c_b) S_V.

    c_b is keyed by (seed, step, micro-batch, layer, *global* row of the micro-batch), so that the number of processes
    over which the rows are spread does not matter; drawn for all layers at the first request. This averages the
    gradient noise within a step; U and S_V are the step's, so the spread of single draws of the loss stays about that
    of one noise for all.
    """

    def __init__(
        self,
        names: Sequence[str],
        columns: Sequence[int],
        batches: SampleCounts,
        share: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """columns: k of each layer. share: (i, n), this process has the i-th of n blocks of the rows."""
        self._names, self._columns, self._batches, self._block = names, columns, batches, share[0]
        self._streams = torch.tensor([stream_id(name, "sample") for name in names], device=device)
        self._device, self._dtype = device, dtype
        self._key: int | None = None
        self._signs: dict[int, Tensor] = {}

    def set_micro_batch(self, key: int) -> None:
        """Set the micro-batch `key` (`micro_id`) of the next forward passes."""
        self._key, self._signs = key, {}

    def of_layer(self, layer: int) -> Callable[[Tensor], Tensor]:
        """Return the function that gives c (samples, k) for the input of layer number `layer`. Excluded from the graphs
        of `torch.compile`: it reads the batch, and its key changes with every micro-batch."""

        def signs(x: Tensor) -> Tensor:
            self._batches.check(x, self._names[layer])
            return self._draw(len(x))[layer, :, : self._columns[layer]]

        uncompiled: Callable[[Tensor], Tensor] = torch.compiler.disable(signs)
        return uncompiled

    def _draw(self, samples: int) -> Tensor:
        """Return the signs (layers, samples, largest k)."""
        if samples not in self._signs:
            assert self._key is not None
            rows = counter_values(torch.arange(samples, device=self._device) + self._block * samples)
            words = sign_words(stream_keys(self._streams, self._key)[:, None], rows)
            columns = max(self._columns)
            signs = unpack_signs(words.view(-1), columns, dtype=self._dtype)
            self._signs[samples] = signs.view(len(self._names), samples, columns)
        return self._signs[samples]
