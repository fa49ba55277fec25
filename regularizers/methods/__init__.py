"""The regularizers, one method per file, and their shared code."""
