"""How long a test waits for what must come."""

HUNG_S = 60.0
"""A wait this long has hung.

One bound for all waits of the suite: a shorter one would bound how busy a machine may be.
"""
