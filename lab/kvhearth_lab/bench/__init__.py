"""Benchmarks that a person can repeat: own daemons, the real client, ratios within one run.

The only part of the daemon's package that uses the whole client; nothing of the daemon imports it.
"""
