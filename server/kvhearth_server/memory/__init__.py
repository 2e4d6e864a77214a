"""Access to memory: shared segments, page kinds, journal, small durable files, directory lock."""
