"""What a run can end with besides success. The front door turns each into an exit code."""


class UserError(ValueError):
    """A mistake in the user's input: one sentence with what, where (file:line or flag) and the nearest valid fix."""


class Interrupted(Exception):
    """Stopped from outside (signal, full disk) with everything finished so far kept and resumable."""
