"""``kvhearth bench local``: copies, lookups and memory of one daemon and its clients."""
