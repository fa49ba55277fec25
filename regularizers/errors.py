"""The error that a misused regularizer raises."""


class RegularizerError(ValueError):
    """A setting or model that a regularizer cannot serve: one sentence with what, where and the nearest valid fix."""
