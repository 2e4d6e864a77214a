"""``kvhearth bench remote-tier``: a remote's driver in a plain loop, and through the mover."""
