"""Charts, one kind per module: each takes results and returns a drawn `Chart`."""
