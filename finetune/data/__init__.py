"""Data pipeline from files to micro-batches: rows, encoding, columns, label noise, mixing, packing, first-batch
panel."""
