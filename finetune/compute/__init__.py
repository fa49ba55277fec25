"""Numerics of a step: sliced loss, attention, dropout masks, casts, and device capabilities."""
