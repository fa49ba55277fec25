"""A pool and a target become scores and chosen records, with all that is written of the choice."""
