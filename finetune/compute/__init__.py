"""How a step is computed: the loss in slices, attention, dropout masks, casts, and what the device at hand decides."""
