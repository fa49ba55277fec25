"""Exception of misused regularizers."""


class RegularizerError(ValueError):
    """A setting or model that a regularizer does not support: one sentence with the problem, its place and the nearest
    fix."""
