"""The regularizers: a method a file, and what several of them share."""
