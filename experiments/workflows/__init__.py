"""Operations on a run, one verb per file: train, evaluate, generate, merge, export, and inspections."""
