"""From files to micro-batches: rows, encoding, columns, label noise, mixing, packing, the first-batch panel."""
