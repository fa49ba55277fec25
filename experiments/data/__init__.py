"""Reading of a recipe's files into the encoded examples of each split."""
