"""The adapted layers of a model: found, read, given a forward of their own for a step; and the signs of their noise."""
