"""Reads the log of the SSD tier back after a start."""
