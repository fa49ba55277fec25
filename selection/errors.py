"""The error that bad selection input raises, and the warning of an unfinished solve."""


class SelectionError(ValueError):
    """A mistake in pool, target, features or settings: one sentence with what, where and the nearest valid fix."""


class ConvergenceWarning(UserWarning):
    """The transport solver stopped before its tolerance; the result says how far it got."""
