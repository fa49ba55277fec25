"""Training of a stage: loop, optimizer, checkpoints, divergence, data order, trace, callbacks, trackers."""
