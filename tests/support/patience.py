"""How long a test waits for what must come."""

HUNG_S = 300.0
"""A wait this long has hung.

One bound for all waits of the suite: a shorter one would bound how slow or busy a machine may be.
"""
