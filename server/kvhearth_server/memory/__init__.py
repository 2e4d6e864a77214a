"""Doors to memory: shared segments, page kinds, small durable files, the directory lock."""
