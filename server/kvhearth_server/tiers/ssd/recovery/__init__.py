"""Recovers the log of the SSD tier after a start."""
