"""The ``kvhearth`` command: one verb per file."""
