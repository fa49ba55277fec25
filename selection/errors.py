"""The error that bad selection input raises."""


class SelectionError(ValueError):
    """A mistake in pool, target, features or settings: one sentence with what, where and the nearest valid fix."""
