"""Runs, sweeps and studies read back as tables; draws nothing."""
