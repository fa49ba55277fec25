"""What fits: memory by cause, an automatic mesh, the devices at hand, and what to change where it does not."""
