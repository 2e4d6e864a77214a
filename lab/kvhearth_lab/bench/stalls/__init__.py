"""``kvhearth bench stalls``: how long the daemon's loop is blocked."""
