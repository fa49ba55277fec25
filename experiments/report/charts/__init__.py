"""Charts, one kind a file: figures in, a drawn `Chart` out."""
