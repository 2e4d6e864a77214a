"""``kvhearth bench stalls``: how long the daemon's loop stands still."""
