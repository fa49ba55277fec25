"""Everything that needs a GPU, in one command that goes on where it stopped: see `benchmarks.gpu.__main__`."""
