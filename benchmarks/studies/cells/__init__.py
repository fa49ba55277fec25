"""What every study of cells shares: results as files, workers that run what has none yet, one way to train a cell."""
