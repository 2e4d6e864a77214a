"""``kvhearth doctor``: checks of the machine and its findings."""
