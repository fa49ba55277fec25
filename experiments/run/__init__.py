"""What a command has at hand while it works: the console, signals to stop, a directory that a later try continues."""
