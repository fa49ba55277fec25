"""Planning: memory by cause, an automatic mesh, the available devices, and what to change if a run does not fit."""
