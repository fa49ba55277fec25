"""Support for running commands: the console, stop signals, and a directory that a later run continues."""
