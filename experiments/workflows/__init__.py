"""What is done with a run, one verb a file: train, evaluate, generate, merge, export, and the looks at it."""
