"""A backbone: where it lies, what its files say, how it is built, where its parts are."""
