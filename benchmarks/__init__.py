"""Ours beside a peer's, interleaved, one ratio. `python -m benchmarks.NAME` writes `benchmarks/results/NAME.json`."""
