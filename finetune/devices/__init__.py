"""What the device at hand decides: its fastest dtype, the rate of its products, and how a step is computed there."""
