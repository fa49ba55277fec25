"""The five tokenizer schemes of the mGPT study on the shipped pool, each judged by small models trained alike.

    python -m benchmarks.tokenizer_schemes      # resumable

The same as `flatshift tokenizer train --data sample:pool`; a row is the bits per byte of each of the seeds, beside the
default scheme's of the same seed. A ratio below one is better than it. mGPT reports perplexities of 163M-parameter
models over many languages; these are English passages and models of half a million parameters.
"""

from __future__ import annotations

from benchmarks._harness import RESULTS, ROOT, Benchmark, limit_threads
from benchmarks._study_results import read
from flatshift.experiments.report.chapters.tokenizer import page
from flatshift.experiments.workflows.tokenizer import DOCUMENT, train_schemes
from flatshift.finetune.atomic import write_json
from flatshift.finetune.train.small_decoder import SmallDecoder

OUT, FOLDER = ROOT / ".bench" / "tokenizer_schemes", RESULTS / "tokenizer_schemes"
MODEL = SmallDecoder(bytes=150_000)


def main() -> None:
    """Train what is not trained yet and write the result."""
    limit_threads(1)
    if not (OUT / DOCUMENT).is_file():
        train_schemes(
            data=["sample:pool"], out=OUT, model=MODEL, page=page, command="python -m benchmarks.tokenizer_schemes"
        )
    document = read(OUT / DOCUMENT)
    write_json(FOLDER / DOCUMENT, document)
    bench = Benchmark("tokenizer_schemes", packages=("torch", "numpy", "tokenizers", "transformers"))
    first, *others = document["models"]
    bits = {
        scheme: [cell["bits_per_byte"] for _, cell in sorted(result["cells"].items())]
        for scheme, result in document["models"].items()
    }
    bench.row(f"{first}, bits per byte", "bits/byte", ours=bits[first])
    for scheme in others:
        bench.row(f"{scheme}, bits per byte", "bits/byte", ours=bits[scheme], peer=bits[first], peer_name=first)
    for scheme, result in document["tokenizers"].items():
        bench.row(f"{scheme}, tokens per word", "tokens/word", ours=result["all"]["tokens_per_word"])
    bench.finish()


if __name__ == "__main__":
    main()
