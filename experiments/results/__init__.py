"""Read runs, sweeps and studies back as tables; draws nothing."""
