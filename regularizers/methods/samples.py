"""Separate noise for every sample of a batch: signs c_b in rank space, ε_b = U diag(c_b) S_V.

c_b is keyed by (seed, step, micro-batch, layer, *global* row of the micro-batch), so that the number of processes over
which the rows are spread does not matter. This averages the gradient noise within a step; U and S_V are the step's, so
the spread of single draws of the loss stays about that of one noise for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.errors import RegularizerError
from flatshift.regularizers.layers.signs import counter_values, sign_words, stream_id, stream_keys, unpack_signs

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
            main = [kwargs.get(name) for name in _MAIN_INPUTS]
            found = [each for each in (*main, *args, *kwargs.values()) if isinstance(each, Tensor) and each.ndim]
            if found:
                self._sizes.add(len(found[0]))

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
    """Signs c_b of the layers of one `NoiseScales`, drawn for all of them at the first request."""

    def __init__(
        self, names: Sequence[str], columns: Sequence[int], batches: SampleCounts, share: tuple[int, int], like: Tensor
    ) -> None:
        """columns: k of each layer. share: (i, n), this process has the i-th of n blocks of the rows. like: has the
        signs' device and dtype."""
        self._names, self._columns, self._batches, self._part = names, columns, batches, share[0]
        self._streams = torch.tensor([stream_id(name, "sample") for name in names], device=like.device)
        self._device, self._dtype = like.device, like.dtype
        self._key: int | None = None
        self._drawn: dict[int, Tensor] = {}

    def micro(self, key: int) -> None:
        """Set the micro-batch `key` (`signs.micro_id`) of the next forward passes."""
        self._key, self._drawn = key, {}

    def of(self, layer: int) -> Callable[[Tensor], Tensor]:
        """Return the function that gives c (samples, k) for the input of layer number `layer`.

        Excluded from the graphs of `torch.compile`: it reads the batch, and its key changes with every micro-batch.
        """

        def signs(x: Tensor) -> Tensor:
            self._batches.check(x, self._names[layer])
            return self._draw(len(x))[layer, :, : self._columns[layer]]

        left_out: Callable[[Tensor], Tensor] = torch.compiler.disable(signs)
        return left_out

    def _draw(self, samples: int) -> Tensor:
        """Return the signs (layers, samples, largest k)."""
        if samples not in self._drawn:
            assert self._key is not None
            rows = counter_values(torch.arange(samples, device=self._device) + self._part * samples)
            words = sign_words(stream_keys(self._streams, self._key)[:, None], rows)
            columns = max(self._columns)
            drawn = unpack_signs(words.view(-1), columns, dtype=self._dtype)
            self._drawn[samples] = drawn.view(len(self._names), samples, columns)
        return self._drawn[samples]
