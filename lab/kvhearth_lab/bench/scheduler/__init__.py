"""``kvhearth bench scheduler``: processor time of vLLM's scheduler with caches and without."""
