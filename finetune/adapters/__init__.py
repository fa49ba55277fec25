"""What an adapter is: PEFT's settings, first values, files, parts folded into frozen weights, and merging."""
