"""Runs, sweeps and studies read back from their directories as tables; draws nothing."""
