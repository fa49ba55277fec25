"""How long a test waits for another process: wall time depends on who else is at work, so it only tells a hang."""

HANG_S = 1200.0
"""After this many seconds a process that a test waits for hangs; less than pytest's own `timeout` for a whole test."""
