"""Logs, counters and metrics."""
