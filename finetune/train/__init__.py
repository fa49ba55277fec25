"""The training of a stage: loop, loss, optimizer, checkpoints, spikes, data order, trace, callbacks, trackers."""
