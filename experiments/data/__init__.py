"""From a recipe's files to the encoded examples of each split."""
