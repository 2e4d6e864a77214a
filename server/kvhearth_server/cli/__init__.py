"""The ``kvhearth`` command: its verbs, by what they do to a daemon."""
