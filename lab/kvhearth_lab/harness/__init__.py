"""Daemons, clients and drives that benchmarks and torture start and control."""

HUNG_S = 300.0
"""A wait this long has hung. One bound: a shorter one would bound how slow or busy a machine is."""
