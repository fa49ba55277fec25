"""The error that a misused regularizer raises."""


class RegularizerError(ValueError):
    """A setting or model that a regularizer cannot serve: one sentence with what, where and the nearest valid fix."""


def demand(holds: bool, key: str, value: object, wanted: str) -> None:
    """Raises RegularizerError, naming the key of the settings, unless `value` is what is `wanted`."""
    if not holds:
        raise RegularizerError(f"regularizer.{key}: {value} is not {wanted}")
