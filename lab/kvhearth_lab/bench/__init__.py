"""Reproducible benchmarks: own daemons, the real client, ratios within one run.

No part of the daemon imports this package.
"""
