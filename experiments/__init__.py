"""Studies made of the parts below: the journeys, sweeps, comparisons and their reports."""
