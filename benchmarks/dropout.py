"""Dropout whose masks are counted (`flatshift.finetune.compute.dropout`) beside torch's, which are drawn from a
generator.

    python -m benchmarks.dropout

Forward and backward pass, one thread: of a dropout layer alone, and of a random Llama's blocks with rank-8 LoRA and
dropout on every linear layer. Attention dropout is made by its definition in both, as torch does on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks._harness import Benchmark, limit_threads
from benchmarks.regularizer_step import VOCABULARY, adapted_llama
from flatshift.finetune.compute.dropout import KeyedDropout
from flatshift.finetune.parallel.engine import Engine

RATE, ROWS, ROUNDS = 0.1, 4, 15
LAYERS = ((64, 64, 60), (128, 320, 10), (512, 768, 2))
"""Tokens, features, calls."""
MODELS = ((6, 320, 864, 128), (2, 768, 2048, 64))
"""Blocks, width, inner width, tokens."""
Around = Callable[[], contextlib.AbstractContextManager[Any]]


def layer(tokens: int, width: int, calls: int) -> tuple[Callable[[Around], None], Around]:
    """One dropout layer, `calls` times: counted, and by torch."""
    module = torch.nn.Dropout(RATE)
    x = torch.ones(ROWS, tokens, width, requires_grad=True)
    along = torch.ones(ROWS, tokens, width)

    def run(around: Around) -> None:
        for _ in range(calls):
            with around():
                y = module(x)
            y.backward(along)

    keyed = KeyedDropout({module: "layer"}, 0)
    return run, lambda: keyed.forward_pass(0, first_row=0, rows=ROWS, tokens=tokens)


def model(blocks: int, width: int, inner: int, tokens: int) -> tuple[Callable[[Around], None], Around]:
    """A pass of the whole model."""
    result = adapted_llama(blocks, width, inner)
    for part in result.modules():
        if hasattr(part, "lora_dropout"):
            part.lora_dropout["default"] = torch.nn.Dropout(RATE)
    result.train()
    ids = torch.randint(1, VOCABULARY, (ROWS, tokens), generator=torch.Generator().manual_seed(0))

    def run(around: Around) -> None:
        result.zero_grad()
        with around():
            out = result.base_model.model.model(input_ids=ids).last_hidden_state
        out.square().sum().backward()

    keyed = Engine.alone(result).dropout(0)
    return run, lambda: keyed.forward_pass(0, first_row=0, rows=ROWS, tokens=tokens)


def main() -> None:
    """Measure and write benchmarks/results/dropout.json."""
    limit_threads(1)
    bench = Benchmark("dropout", packages=("torch", "transformers", "peft"))
    every = [(sizes, layer, ROUNDS) for sizes in LAYERS] + [(sizes, model, 6) for sizes in MODELS]
    for sizes, build, rounds in every:
        run, counted = build(*sizes)
        if build is layer:
            tokens, width, calls = sizes
            what = f"{calls} × a dropout layer, {ROWS} × {tokens} × {width}"
            # of little tensors the calls of operators are what is paid for, about a tenth of a millisecond
            bar = 1.0 if tokens * width > 10_000 else 3.0
        else:
            blocks, width, _, tokens = sizes
            what, bar = f"LoRA pass with dropout, {blocks} blocks of {width}, {ROWS} × {tokens} tokens", 1.05
        ways = partial(run, counted), partial(run, contextlib.nullcontext)
        bench.compare(what, "CPU-s", *ways, "torch's dropout", rounds=rounds, maximum=bar)
    bench.finish()


if __name__ == "__main__":
    main()
